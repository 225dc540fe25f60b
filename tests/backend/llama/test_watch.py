"""What ends, pauses and breaks off graphs, without a graph."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cbatch.backend.llama.watch import GraphWatch

SCRIPT = """
from cbatch.backend.llama.library import library
from cbatch.backend.llama.watch import GraphWatch

library().cbatch_watch_free = lambda _: print("freed")
kept, dropped = GraphWatch(), GraphWatch()
del dropped
print("end")
"""


@pytest.mark.real
def test_watch_is_not_freed_while_the_interpreter_ends() -> None:
    """A graph may still be computed: engines are closed later."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["freed", "end"]


def test_what_a_turn_raises_is_raised_behind_the_graph() -> None:
    watch = GraphWatch(has_turns=True)

    def fail() -> float:
        raise KeyError("no")

    with pytest.raises(KeyError), watch.turns(fail):
        raise AssertionError
    turns = iter([0.5, float("inf")])
    with watch.turns(lambda: next(turns)):
        assert not watch.is_alone
        assert watch.turn() == float("inf")
        assert watch.is_alone
        assert watch.turn() == -1.0  # there is no third one
        with pytest.raises(StopIteration):
            watch.check()
    watch.check()
