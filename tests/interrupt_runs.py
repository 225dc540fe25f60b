"""Ctrl-C at any moment of loading, closing and stepping ends no process: `python -m tests.interrupt_runs 50`.

Each run is a process of its own that presses Ctrl-C for itself, once or often, at moments that its seed says. It must
end by itself, without a signal but the Ctrl-C, with its memory given back.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.engine import Engine

_PATIENCE_S = 120.0
_N_LOADS = 6


class Presser:
    """Presses Ctrl-C some times after it is told to begin."""

    def __init__(self, dice: random.Random, within_s: float) -> None:
        self._waits = [dice.uniform(0, within_s) for _ in range(dice.choice([1, 1, 2, 5]))]
        self._thread = threading.Thread(target=self._press, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def _press(self) -> None:
        for wait_s in self._waits:
            time.sleep(wait_s)  # chance is what is wanted
            os.kill(os.getpid(), signal.SIGINT)

    def outlast(self) -> None:
        """Return when the last press was taken, whatever it raises."""
        while self._thread.is_alive():
            with suppress(KeyboardInterrupt):
                time.sleep(0.01)


def _busy_engine(model: Path, *, threaded: bool = True) -> Engine:
    import cbatch

    engine = cbatch.load(model, parallel=4, ctx_per_seq=256, n_threads=2, threaded=threaded)
    engine.run([str(i) for i in range(20)], options={"ignore_eos": True, "max_tokens": 200})
    return engine


def closing(dice: random.Random, model: Path) -> None:
    """In `close`, and again in the next one."""
    engine, presser = _busy_engine(model), Presser(dice, 0.03)
    time.sleep(dice.uniform(0, 0.05))
    try:
        presser.begin()
        engine.close()
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            engine.close()
    presser.outlast()
    engine.close()
    _busy_engine(model).close()


def leaving(dice: random.Random, model: Path) -> None:
    """On leaving `with`, raised to the end of the process."""
    presser = Presser(dice, 0.03)
    with _busy_engine(model):
        presser.begin()


class Living:
    """The models and contexts that llama.cpp has made from now on, and not freed.

    The memory of the process is no measure: malloc keeps up to twice a model's size of what was freed.
    """

    def __init__(self) -> None:
        from cbatch.backend.bindings import llama_cpp

        self.addresses: set[int | None] = set()
        self.n_made = 0
        for make in ("llama_model_load_from_file", "llama_init_from_model"):
            setattr(llama_cpp, make, partial(self._make, getattr(llama_cpp, make)))
        for free in ("llama_model_free", "llama_free"):
            setattr(llama_cpp, free, partial(self._free, getattr(llama_cpp, free)))

    def _make(self, make: Callable[..., Any], *args: object) -> object:
        made = make(*args)
        if made:
            self.n_made += 1
            self.addresses.add(ctypes.cast(made, ctypes.c_void_p).value)
        return made

    def _free(self, free: Callable[[Any], object], made: Any) -> None:
        self.addresses.discard(ctypes.cast(made, ctypes.c_void_p).value)
        free(made)


def loading(dice: random.Random, model: Path) -> None:
    """In `load`, often: nothing stays behind of those that were broken off."""
    import cbatch

    living = Living()
    cbatch.load(model, parallel=4, use_mmap=False).close()
    assert living.n_made >= 2
    assert not living.addresses
    start = time.perf_counter()
    cbatch.load(model, parallel=4, use_mmap=False).close()
    load_s = time.perf_counter() - start
    for _ in range(_N_LOADS):
        presser = Presser(dice, 1.2 * load_s)
        engine: Engine | None = None
        try:
            presser.begin()
            engine = cbatch.load(model, parallel=4, use_mmap=False)
        except KeyboardInterrupt:
            pass
        presser.outlast()
        if engine is not None:
            engine.close()
    gc.collect()  # frames of a load that was broken off may hold it
    assert not living.addresses, f"{len(living.addresses)} of {living.n_made} stay behind"


def loading_to_the_end(dice: random.Random, model: Path) -> None:
    """In `load`, raised to the end of the process."""
    import cbatch

    presser = Presser(dice, 0.05)
    time.sleep(dice.uniform(0, 0.2))
    presser.begin()
    cbatch.load(model, parallel=4, use_mmap=False)


def exiting(dice: random.Random, model: Path) -> None:
    """While the process ends with an engine that nobody closed."""
    engine, presser = _busy_engine(model), Presser(dice, 0.03)
    sys.modules["kept"] = engine  # type: ignore[assignment]
    presser.begin()


def stepping(dice: random.Random, model: Path) -> None:
    """In steps by hand, often: everybody gets what they would have got."""
    import cbatch

    def streams(presses: bool) -> list[tuple[int, ...]]:
        options = {"ignore_eos": True, "max_tokens": 30, "temperature": 0}
        with cbatch.load(model, parallel=4, ctx_per_seq=256, threaded=False) as engine:
            response = engine.run([str(i) for i in range(12)], options=options)
            for _ in range(4 if presses else 0):
                presser = Presser(dice, 0.02)
                with suppress(KeyboardInterrupt):
                    presser.begin()
                    all(iter(engine.step, False))
                presser.outlast()
            return [r.token_ids for r in response.results()]

    assert streams(True) == streams(False)


def reading(dice: random.Random, model: Path) -> None:
    """While results are waited for, often: the batch is cancelled, and the engine stays as it was."""
    import cbatch

    options = {"ignore_eos": True, "max_tokens": 12, "temperature": 0}
    threaded = dice.random() < 0.5
    with cbatch.load(model, parallel=4, ctx_per_seq=256, threaded=threaded) as engine:
        expected = engine.submit("a", options=options).result().token_ids
        for _ in range(6):
            presser = Presser(dice, 0.03)
            with suppress(KeyboardInterrupt):
                presser.begin()
                engine.run([str(i) for i in range(20)], options=options).results()
            presser.outlast()
            assert engine.submit("a", options=options).result().token_ids == expected
        assert engine.stats().n_running == 0


def leaving_async(dice: random.Random, model: Path) -> None:
    """In `async with`, entering and leaving, raised to the end of the process."""
    import cbatch

    async def main() -> None:
        presser = Presser(dice, 0.1)
        presser.begin()
        async with cbatch.load(model, parallel=4, use_mmap=False) as engine:
            engine.run(["a", "b"], options={"ignore_eos": True, "max_tokens": 100})
            await asyncio.sleep(dice.uniform(0, 0.1))

    asyncio.run(main())


SCENES: dict[str, Callable[[random.Random, Path], None]] = {
    scene.__name__: scene
    for scene in (
        closing,
        leaving,
        loading,
        loading_to_the_end,
        exiting,
        stepping,
        reading,
        leaving_async,
    )
}
ENDINGS = (0, -signal.SIGINT, 130)


def run(name: str, seed: int, model: Path) -> str:
    """Run a scene in a process of its own; return what is wrong, empty where nothing is."""
    command = [sys.executable, "-m", "tests.interrupt_runs", "--child", name, str(seed), str(model)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{name} {seed}: hangs"
    # Python ends so where it is pressed once more while Python waits for threads at its end
    is_pressed_at_end = done.returncode == 1 and done.stderr.rstrip().endswith("KeyboardInterrupt:")
    if done.returncode in ENDINGS or is_pressed_at_end:
        return ""
    return f"{name} {seed}: ended with {done.returncode}: {done.stderr[-600:]}"


def make_model(folder: Path) -> Path:
    """Write a model whose loading takes a moment."""
    from cbatch.bench.synthetic import Shape, write_model

    return write_model(folder / "model.gguf", Shape(4, 512, 8, 4, 1536, 8000, "f16"))


def _child(name: str, seed: str, model: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    SCENES[name](random.Random(seed), Path(model))


def main() -> None:
    """Run each scene so many times; exit with 1 where something went wrong."""
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:])
        return
    n_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    n_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for name in SCENES:
            found = [problem for seed in range(n_runs) if (problem := run(name, seed, model))]
            sys.stdout.write("\n".join([f"{name}: {len(found)} of {n_runs} wrong", *found]) + "\n")
            sys.stdout.flush()
            n_wrong += len(found)
    sys.exit(bool(n_wrong))


if __name__ == "__main__":
    main()
