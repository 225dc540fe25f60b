"""Types that many threads read for the first time at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import dataclasses, sys, threading, typing
import msgspec
from cbatch.support.typed import known
from cbatch.worker import wire

sys.setswitchinterval(1e-6)
data = {f"y{i}": {f"x{j}": 1 for j in range(12)} for i in range(8)}
packed = msgspec.msgpack.encode(data)
for n in range(150):
    make = dataclasses.make_dataclass if n % 2 else msgspec.defstruct
    inner = make(f"Inner{n}", [(f"x{i}", int) for i in range(12)])
    outer = make(f"Outer{n}", [(f"y{i}", typing.Optional[inner]) for i in range(8)])
    gate = threading.Barrier(6)

    def read():
        gate.wait()
        if n % 3:
            wire.decode(packed, outer)
        else:
            msgspec.convert(data, known(outer))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("whole")
"""


@pytest.mark.real
def test_threads_that_read_a_new_type_at_once_do_not_end_the_process() -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
