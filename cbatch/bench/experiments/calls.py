"""How many Python calls a steady step costs: `python -m cbatch.bench.experiments.calls`.

Requests decode on `FakeBackend` in an engine's own thread, one step a run, while the calls of that thread are counted:
from one backend run to the next, so through everything from commands in to delivery out. Python calls are counted, and
resumed generators with them; calls of C functions are not. The same code gives the same counts on any machine.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.bench.experiments.rounds import parser
from cbatch.bench.harness import show
from cbatch.engine import Engine
from cbatch.messages import BatchPrompt

_N_WARM_UP = 20

_N_WINDOW = 2**20
"""Tokens that a sequence may have: none ends before all are counted, however late the last one joins."""

_PACKAGE = Path(cbatch.__file__).parent


@dataclass(frozen=True, slots=True)
class Calls:
    """Python calls of one steady step, by file."""

    by_file: dict[str, float]
    """Calls a step outside the backend's run."""
    backend_run: float
    """Calls a step of the fake backend's own run."""

    @property
    def total(self) -> float:
        """Calls a step outside the backend's run."""
        return sum(self.by_file.values())


class _Meter:
    """Step costs of a `FakeBackend` that end each run after one step and count the calls between runs."""

    def __init__(self, n_rows: int, n_steps: int) -> None:
        self.can_start = threading.Event()
        self.is_done = threading.Event()
        self.backend: FakeBackend | None = None
        self.counts: Counter[CodeType] = Counter()
        self.n_calls_in_run = 0
        self._n_rows, self._n_steps, self._n_seen = n_rows, n_steps, 0
        self._is_in_run = True

    def __call__(self, n_rows: int, n_prompt: int) -> float:
        """Return a second; start and stop counting at the right step. Owner thread, inside `FakeBackend.run`."""
        if self.backend is not None:
            self.backend.interrupt()
        if n_rows == self._n_rows and not n_prompt:
            self._n_seen += 1
            if self._n_seen == _N_WARM_UP:
                self.can_start.wait()
                sys.setprofile(self._count)
            elif self._n_seen == _N_WARM_UP + self._n_steps:
                sys.setprofile(None)
                self.is_done.set()
        return 1.0

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call":
            self._is_in_run = self._is_in_run or code is FakeBackend.run.__code__
            if self._is_in_run:
                self.n_calls_in_run += 1
            else:
                self.counts[code] += 1
        elif event == "return" and code is FakeBackend.run.__code__:
            self._is_in_run = False


def count_calls(n_rows: int = 32, n_steps: int = 50, *, is_streamed: bool = False) -> Calls:
    """Return the calls of a step of `n_rows` decoding sequences, as the mean of `n_steps` steps.

    Args:
        n_rows: sequences in the step, each of a request without special options.
        n_steps: steps that are counted, after some that warm up.
        is_streamed: whether the batch is read chunk by chunk, so that every step is delivered.
    """
    meter = _Meter(n_rows, n_steps)
    backend = meter.backend = FakeBackend(n_rows, _N_WINDOW, cost=meter)
    options = {"ignore_eos": True, "seed": 1}
    with Engine(backend, options=options) as engine:
        response = engine.run([BatchPrompt(tokens=[1 + i, 2, 3]) for i in range(n_rows)])
        chunks = iter(response)  # kept: a reader who leaves cancels
        if is_streamed:
            next(chunks)
        meter.can_start.set()
        meter.is_done.wait()
        engine.cancel_all()
    by_file: Counter[str] = Counter()
    for code, n_calls in meter.counts.items():
        by_file[_file_name(code)] += n_calls
    found = {name: n / n_steps for name, n in by_file.most_common()}
    return Calls(found, meter.n_calls_in_run / n_steps)


def _file_name(code: CodeType) -> str:
    """Return a file's path within the package, or the name of a file outside it."""
    path = Path(code.co_filename)
    if path.is_relative_to(_PACKAGE):
        return str(path.relative_to(_PACKAGE.parent))
    return "methods that dataclasses made" if path.name == "<string>" else path.name


def table(calls: Calls) -> str:
    """Return one line for each file, the most calls first, and the sums below."""
    lines = [f"{n:8.1f}  {name}" for name, n in calls.by_file.items()]
    lines.append(f"{calls.total:8.1f}  calls a step in {len(calls.by_file)} files")
    lines.append(f"{calls.total + calls.backend_run:8.1f}  with the fake backend's own run")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    asked = parser(__doc__, model=None)
    asked.add_argument("--rows", type=int, default=32, help="sequences in the step")
    asked.add_argument("--steps", type=int, default=50, help="steps to count")
    asked.add_argument("--streamed", action="store_true", help="read chunks instead of results")
    a = asked.parse_args(words)
    calls = count_calls(a.rows, a.steps, is_streamed=a.streamed)
    show(table(calls))


if __name__ == "__main__":
    main()
