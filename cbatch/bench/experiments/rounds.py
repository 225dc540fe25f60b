"""What benchmarks of one question share: arguments, turns on one machine, and medians.

Two things are compared by turns: both run in each round, each as often first, and the first round only warms up. So
their ratio holds on a noisy machine, where the two rates do not.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cbatch.backend.llama.model import LlamaModel

T = TypeVar("T")

CHAIN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.0, "ignore_eos": True}
"""Options of requests that are sampled as most are, and that generate as many tokens as they are told to."""

_PAUSE_S = 0.1
"""Longer than an engine waits before its backend rests."""


def parser(
    doc: str | None, *, model: str | None = "", n_rounds: int | None = None
) -> argparse.ArgumentParser:
    """Return a parser of arguments, described by the first line of a module's docstring.

    Args:
        model: what is loaded where no model is given; empty where one must be given, None where there is none.
        n_rounds: the default of `--rounds`, None for a benchmark without rounds.
    """
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if model == "":
        made.add_argument("model", help="a GGUF file")
    elif model is not None:
        made.add_argument("model", nargs="?", help=f"a GGUF file; {model} by default")
    if n_rounds is not None:
        made.add_argument("--rounds", type=int, default=n_rounds, help="rounds after the warm-up")
    return made


def take_turns(n_rounds: int, *ways: Callable[[], T], n_warm_up: int = 1) -> list[tuple[T, ...]]:
    """Do all ways in each round, in every second round backwards; return what they returned in the rounds that count.

    Between two ways is a pause, in which the engine of the first gives its threads back: see `Backend.rest`.

    Args:
        n_rounds: rounds that count.
        ways: what is compared.
        n_warm_up: rounds before them.
    """
    rounds: list[tuple[T, ...]] = []
    for i in range(n_warm_up + n_rounds):
        found = []
        for way in ways[::-1] if i % 2 else ways:
            found.append(way())
            time.sleep(_PAUSE_S)
        rounds.append(tuple(found[::-1] if i % 2 else found))
    return rounds[n_warm_up:]


@contextmanager
def beside(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Do `work` in a thread during the block, whose end sets the event that it is given, and waits for it."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def busy_loops(n_loops: int) -> Iterator[None]:
    """Run this number of programs during the block, each of which keeps one thread busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def median(values: Iterable[float], n_digits: int = 3) -> float:
    """Return the median, rounded."""
    return round(statistics.median(values), n_digits)


def compare(n_rounds: int, n_digits: int = 1, /, **ways: Callable[[], float]) -> dict[str, float]:
    """Do two ways in turn; return the median of each by its name, and the ratios of the first over the second."""
    rounds = take_turns(n_rounds, *ways.values())
    medians = {
        name: median(found, n_digits)
        for name, found in zip(ways, zip(*rounds, strict=True), strict=True)
    }
    return {**medians, **ratios(rounds)}


def ratios(rounds: Iterable[tuple[float, ...]], name: str = "ratio") -> dict[str, float]:
    """Return the median and the range of the rounds' own ratios, the first over the second of each."""
    found = sorted(first / second for first, second in rounds)
    return {
        name: median(found, 4),
        "ratio_min": round(found[0], 4),
        "ratio_max": round(found[-1], 4),
    }


def in_model(path: str, use: Callable[[LlamaModel], T]) -> T:
    """Open a model, do `use` with it in a thread of its own, which computes alone meanwhile, and close it."""
    from cbatch.backend.llama.log import llama_log  # llama_cpp is slow to import
    from cbatch.backend.load.open_model import open_model
    from cbatch.backend.threads import run_in_fresh_thread

    def opened() -> T:
        with closing(open_model(path)) as model:
            return use(model)

    with llama_log().captured():
        return run_in_fresh_thread(opened)
