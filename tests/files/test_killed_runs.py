"""Runs that are killed at any moment, short of memory or of disk: nothing lost, nothing twice."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cbatch
from cbatch.files.output.sorting import sort_in_place
from tests.files.runs import answers, records, write_requests

ROOT = Path(cbatch.__file__).parents[1]  # of the package under test, installed or not
N_KILLS = 10

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")

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


def kill_and_go_on(n_kills: int, out: Path, n_bytes: int, seed: int, *command: object) -> int:
    """Run a command again and again, then to its end; return in how many passes it was killed in the midst of work.

    Each pass is killed where it has written about its share of `n_bytes`, some milliseconds later; one in five while it
    starts. Behind one that was done before it was killed, all begins anew.
    """
    chance, n_in_work = random.Random(seed), 0
    for _ in range(n_kills):
        with start(*command) as process:
            n_before = size_of(out)
            n_more = chance.randrange(1, 2 * n_bytes // n_kills)
            if chance.random() < 0.2:
                n_more = 0
                time.sleep(chance.uniform(0.0, 0.5))
            while process.poll() is None and size_of(out) < n_before + n_more:
                time.sleep(0.001)
            time.sleep(chance.uniform(0.0, 0.01))
            n_in_work += process.poll() is None and n_before < size_of(out) < n_bytes
            process.send_signal(signal.SIGKILL)
            process.communicate()
        if process.returncode == 0:
            for path in out.parent.glob(f"{out.name}*"):
                path.unlink()
    run_to_the_end(*command)
    return n_in_work


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.real
@posix
def test_fake_run_killed_at_any_moment_ends_as_if_it_never_was(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 3000)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_to_the_end("-c", FAKE, source, whole, 8)
    command = ("-c", FAKE, source, out, 8)
    assert kill_and_go_on(N_KILLS, out, size_of(whole), 1, *command) > N_KILLS // 3
    for path in (whole, out):
        sort_in_place(path)
    assert [r["id"] for r in records(out)] == [f"r{i}" for i in range(3000)]
    assert list(answers(out).items()) == list(answers(whole).items())


@posix
def test_greedy_run_of_a_model_killed_at_any_moment_ends_as_if_unkilled(
    tmp_path: Path, test_model: Path
) -> None:
    source, whole, out = (tmp_path / f"{name}.jsonl" for name in ("in", "whole", "out"))
    asked = ["Say red.", "Tell me a short story about a fox.", "Count from one to ten."]
    with source.open("w") as file:
        for i in range(150):
            chat = [{"role": "user", "content": f"{asked[i % 3]} {i}"}]
            file.write(json.dumps({"id": f"r{i}", "messages": chat}) + "\n")
    options = ("-m", test_model, "--exact", "--temperature", 0, "--max-tokens", 64, "--quiet")
    command = ("-m", "cbatch.cli", "run", source, *options, "--threads", 1, "--parallel", 8, "-o")
    run_to_the_end(*command, whole)
    assert kill_and_go_on(N_KILLS, out, size_of(whole), 2, *command, out) > N_KILLS // 3
    for path in (whole, out):
        sort_in_place(path)
    assert [r["id"] for r in records(out)] == [f"r{i}" for i in range(150)]
    assert list(answers(out).items()) == list(answers(whole).items())


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
@posix
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
