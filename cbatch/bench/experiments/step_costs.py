"""What steps of a model take on a machine: `python -m cbatch.bench.experiments.step_costs MODEL > costs.json`.

The table is a cost for `FakeBackend`, and so for `simulate`: it knows the width of a step and the prompt
tokens that join it. That steps grow slower as sequences grow longer is not in it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.bench.experiments.rounds import median, parser, take_turns
from cbatch.bench.harness import emit
from cbatch.engine_options import MAX_PARALLEL
from cbatch.errors import ConfigError, words_of
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from cbatch.engine import Engine
    from cbatch.runtime.step_record import StepRecord

Points = tuple[tuple[int, float], ...]

WIDTHS = (1, 2, 4, 8, 16, 32)
CHUNKS = (16, 64, 256, 1024)

_N_PROMPT_READY = 4096
"""Prompt tokens up to which times are looked up in a list: the largest step of most settings."""

N_DECODING = 8
"""Rows that decode in the step whose prompt tokens are measured: enough for the fast kernels of a CPU."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """Seconds of a step as measured points; called with its rows and its tokens beyond one each, as `FakeBackend` does.

    Between two points the line through them holds, beyond the ends the line through the last two, but never less than
    the smallest figure.

    Args:
        decode_s: (rows, seconds) of steps with one token a row.
        prompt_s: (tokens, seconds more) that prompt tokens beyond one a row add to a step; none add nothing.

    Raises:
        ConfigError: no points, or one that is not a count and a time, or two of one place.
    """

    decode_s: Points
    prompt_s: Points
    _by_rows: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _by_prompt: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        decode_s, prompt_s = _points("decode_s", self.decode_s), _points("prompt_s", self.prompt_s)
        _set = partial(object.__setattr__, self)
        _set("decode_s", decode_s)
        _set("prompt_s", prompt_s)
        _set("_by_rows", _line(decode_s, MAX_PARALLEL))
        _set("_by_prompt", _line(_from_zero(prompt_s), _N_PROMPT_READY))

    def __call__(self, n_rows: int, n_prompt: int) -> float:
        """Return the seconds of a step of `n_rows` sequences and `n_prompt` tokens beyond one each."""
        try:
            return self._by_rows[n_rows] + self._by_prompt[n_prompt]
        except IndexError:
            return at(self.decode_s, n_rows) + at(_from_zero(self.prompt_s), n_prompt)

    @classmethod
    def of(cls, data: Any) -> StepTable:
        """Return the table that `as_json` gave.

        Raises:
            ConfigError: it is none.
        """
        if not isinstance(data, dict) or set(data) != {"decode_s", "prompt_s"}:
            raise ConfigError("a table of step costs needs decode_s and prompt_s")
        return cls(data["decode_s"], data["prompt_s"])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> StepTable:
        """Return the table of a JSON file.

        Raises:
            ConfigError: the file cannot be read, or holds no table.
        """
        try:
            return cls.of(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:  # ConfigError and bad JSON are ValueErrors
            raise ConfigError(f"{path}: {words_of(error)}") from error

    def as_json(self) -> dict[str, Points]:
        """Return what `of` takes, ready for `json.dumps`."""
        return {"decode_s": self.decode_s, "prompt_s": self.prompt_s}


def at(points: Points, x: int) -> float:
    """Return the value at `x` of the lines through `points`, which ascend; see `StepTable`."""
    lowest = min(y for _, y in points)
    if len(points) == 1:
        return lowest
    i = bisect_left(points, (x, 0.0))
    i = min(max(i, 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(lowest, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _line(points: Points, x_max: int) -> tuple[float, ...]:
    return tuple(at(points, x) for x in range(x_max + 1))


def _from_zero(points: Points) -> Points:
    return points if points[0][0] == 0 else ((0, 0.0), *points)


def _points(name: str, given: Any) -> Points:
    try:
        points = sorted((n, float(s)) for n, s in given)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be pairs of a count and seconds, not {given!r}") from None
    if not points:
        raise ConfigError(f"{name} is empty")
    for n, s in points:
        if type(n) is not int or n < 0 or not 0 <= s < float("inf"):
            raise ConfigError(f"{name} must be pairs of a count and seconds, not {(n, s)!r}")
    if len(dict(points)) < len(points):
        raise ConfigError(f"{name} has two points with the same count: {points}")
    return tuple(points)


SMALL = StepTable(
    ((1, 0.00616), (2, 0.0169), (4, 0.0236), (8, 0.0273), (16, 0.0321), (32, 0.0590)),
    ((16, 0.0085), (64, 0.0360), (256, 0.147), (1024, 0.724)),
)
"""The model *small* (12 layers, 768 wide, 151,936 tokens, q8_0) on 2 cores (x86-64, AVX-512).

Source: `python -m cbatch.bench.experiments.step_costs small.gguf`, llama-cpp-python 0.3.36. Four rows cost nearly
as much as eight.
"""


def measure(
    path: str,
    widths: Sequence[int] = WIDTHS,
    chunks: Sequence[int] = CHUNKS,
    *,
    n_rounds: int = 5,
    n_threads: int | None = None,
) -> StepTable:
    """Return what steps of a model take here, sampling included: medians of `n_rounds` rounds over all points.

    Args:
        path: a GGUF file; nothing else may compute at the same time.
        widths: rows of decoding steps.
        chunks: tokens beyond the first of a prompt's chunk, in a step with rows that decode.
        n_rounds: how often each is measured, after a round that warms up.
        n_threads: as in `load`.
    """
    n_slots, n_window = max(*widths, N_DECODING + 1), max(chunks) + 2
    with load(
        path,
        threaded=False,
        parallel=n_slots,
        ctx_per_seq=n_window,
        n_batch=max(2048, 2 * n_window + n_slots),
        n_threads=n_threads,
        share_prefixes=False,
    ) as engine:
        narrow = [[1] * n for n in widths]
        wide = [[1] * N_DECODING + [1 + n] for n in (0, *chunks)]
        rounds = take_turns(n_rounds, *(partial(_step_s, engine, n) for n in (*narrow, *wide)))
    times = [median(of_point, 9) for of_point in zip(*rounds, strict=True)]
    decode_s, (base_s, *chunk_s) = times[: len(widths)], times[len(widths) :]
    more_s = (max(0.0, s - base_s) for s in chunk_s)
    return StepTable(
        tuple(zip(widths, decode_s, strict=True)), tuple(zip(chunks, more_s, strict=True))
    )


def _step_s(engine: Engine, lengths: Sequence[int]) -> float:
    records: list[StepRecord] = []
    engine.record_steps(records.append)
    prompts = [BatchPrompt(tokens=[1] * n) for n in lengths]
    engine.run(prompts, options={"max_tokens": 1, "ignore_eos": True, "seed": 1}).results()
    return sum(record.first_s for record in records)


def main(words: Sequence[str] | None = None) -> None:
    """Print the table as JSON."""
    asked = parser(__doc__)
    asked.add_argument(
        "--widths", type=int, nargs="+", default=WIDTHS, help="numbers of decoding rows to measure"
    )
    asked.add_argument(
        "--chunks", type=int, nargs="+", default=CHUNKS, help="numbers of prompt tokens to measure"
    )
    asked.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up")
    asked.add_argument("--threads", type=int, help="as n_threads of cbatch.load")
    a = asked.parse_args(words)
    table = measure(a.model, a.widths, a.chunks, n_rounds=a.rounds, n_threads=a.threads)
    emit(**table.as_json())


if __name__ == "__main__":
    main()
