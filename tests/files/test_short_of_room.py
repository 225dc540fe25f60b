"""Runs that are short of memory or of disk: nothing lost, nothing twice."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cbatch
from tests.files.runs import answers, records, write_requests

ROOT = Path(cbatch.__file__).parents[1]  # of the package under test, installed or not
FAKE = """
import sys
from tests.files.runs import make_engine
from cbatch.files.file_run import run_file
with make_engine(int(sys.argv[3])) as engine:
    run_file(sys.argv[1], sys.argv[2], engine=engine)
"""

MEMORY = (
    """
import resource
"""
    + FAKE
    + """
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
)


def start(*command: object, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def run_to_the_end(*command: object) -> bytes:
    with start(*command) as process:
        said, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    return said


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="counts in KiB")
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    n_kib = {
        n: int(
            run_to_the_end(
                "-c",
                MEMORY,
                write_requests(tmp_path / f"{n}.jsonl", n, max_tokens=1),
                tmp_path / f"{n}.out",
                64,
            )
        )
        for n in (1_000, 40_000)
    }
    assert n_kib[40_000] <= 1.1 * n_kib[1_000] + 16 * 40_000 / 1024


@pytest.mark.real
def test_full_disk_stops_cleanly_and_the_next_run_goes_on(tmp_path: Path) -> None:
    source, out = write_requests(tmp_path / "in.jsonl", 500), tmp_path / "out.jsonl"
    # of this process alone, which starts the other: a file of the output's size would be larger than is allowed
    limit = (60_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    with start(
        "-c",
        FAKE,
        source,
        out,
        8,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    ) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert b"OutputError" in errors
    assert b"run the same command again" in errors
    assert 0 < len(records(out)) < 500
    run_to_the_end("-c", FAKE, source, out, 8)
    assert len(answers(out)) == 500
