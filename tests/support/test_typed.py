"""Types that many threads read for the first time at once."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import msgspec
import pytest

from cbatch.support.typed import known

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


@pytest.mark.parametrize("way", ["handler", "finalizer"])
def test_type_is_learned_though_another_is_wanted_meanwhile(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """What a signal's handler or a finalizer asks for waits for no lock of the thread that it runs in."""

    @dataclass
    class Inner:
        x: int = 0

    class Wanting:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            learned.append(known(Inner))

    @dataclass
    class Outer:
        x: int = 0

    learned: list[object] = []
    decoder = msgspec.json.Decoder

    def amid(kind: type) -> object:
        monkeypatch.setattr(msgspec.json, "Decoder", decoder)
        if way == "handler":
            signal.raise_signal(signal.SIGUSR1)
        else:
            Wanting()
            _ = [[i] for i in range(5000)]  # more than what the collector waits for
        return decoder(kind)

    monkeypatch.setattr(msgspec.json, "Decoder", amid)
    before = signal.signal(signal.SIGUSR1, lambda *_: learned.append(known(Inner)))
    try:
        known(Outer)
    finally:
        signal.signal(signal.SIGUSR1, before)
    gc.collect()
    assert learned == [Inner]
