"""`cbatch serve` in a process of its own: when it has started, and what is told where it does not."""

from __future__ import annotations

import pytest

from cbatch.bench.server_process import serving

SERVER = """
import sys, time
words = ["a warning of llama.cpp", "cbatch: serving m at http://127.0.0.1:5, 4 slots"]
for word in words[: int(sys.argv[-1])]:
    print(word, file=sys.stderr, flush=True)
time.sleep(60 * (sys.argv[-1] == "2"))
"""


@pytest.mark.real
def test_server_that_warns_before_it_serves_has_started() -> None:
    with serving("2", has_folder=False, program=("-c", SERVER)) as (_, place):
        assert place == "http://127.0.0.1:5"


@pytest.mark.real
def test_server_that_ends_before_it_serves_is_told_with_all_that_it_said() -> None:
    with (
        pytest.raises(ChildProcessError, match=r"did not start: a warning of llama\.cpp"),
        serving("1", has_folder=False, program=("-c", SERVER)),
    ):
        pass
