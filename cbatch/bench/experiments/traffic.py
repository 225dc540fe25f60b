"""Requests for simulations: random ones, or read from a file."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cbatch.errors import ConfigError, words_of
from cbatch.options import MAX_PRIORITY
from cbatch.support.checks import check_seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Args:
        at_s: when it is submitted, in seconds from the beginning.
        n_prompt: tokens of its prompt.
        n_output: tokens it generates.
        priority: as in `RunOptions`.
        timeout_s: as in `RunOptions`.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    at_s: float
    n_prompt: int
    n_output: int
    priority: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if type(self.at_s) not in (int, float) or not 0 <= self.at_s < math.inf:
            raise ConfigError(
                f"at_s must be a time in seconds after the start, at least 0, not {self.at_s!r}"
            )
        for name in ("n_prompt", "n_output"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ConfigError(f"{name} must be a whole number above 0, not {value!r}")
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise ConfigError(f"priority must be within ±{MAX_PRIORITY}, not {self.priority!r}")
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s)


def poisson(
    rate: float, n: int, mean_prompt: float, mean_output: float, seed: int = 0
) -> Iterator[Arrival]:
    """Yield `n` requests that come at random, `rate` a second (`math.inf`: all at once), of geometric lengths."""
    for name, value, low in (
        ("rate", rate, 0.0), ("mean_prompt", mean_prompt, 1.0), ("mean_output", mean_output, 1.0),
    ):  # fmt: skip
        if not value >= low or not value:
            raise ConfigError(f"{name} must be above 0 and at least {low:g}, not {value!r}")
    return _poisson(rate, n, mean_prompt, mean_output, random.Random(seed))


def _poisson(
    rate: float, n: int, mean_prompt: float, mean_output: float, chance: random.Random
) -> Iterator[Arrival]:
    at_s = 0.0
    for _ in range(n):
        at_s += chance.expovariate(rate) if rate < math.inf else 0.0
        yield Arrival(at_s, _length(chance, mean_prompt), _length(chance, mean_output))


def _length(chance: random.Random, mean: float) -> int:
    """Return a whole number ≥ 1 of geometric distribution."""
    if mean <= 1:
        return 1
    return 1 + int(math.log(1.0 - chance.random()) / math.log1p(-1 / mean))


def read_trace(path: str | os.PathLike[str]) -> Iterator[Arrival]:
    """Yield the requests of a JSONL file, an `Arrival`'s fields by name in each line; lines are read as needed.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request or comes before the one above it in time; the
            message names file and line.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            yield from _arrivals(file, str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {words_of(error)}") from error


def _arrivals(lines: Iterable[str], name: str) -> Iterator[Arrival]:
    last_s = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            arrival = _arrival(json.loads(line))
            if arrival.at_s < last_s:
                raise ConfigError(
                    f"at_s is {arrival.at_s}, but {last_s} in the request before: sort requests by at_s"
                )
        except ValueError as error:  # ConfigError and bad JSON are ValueErrors
            raise ConfigError(f"{name}, line {number}: {error}") from error
        last_s = arrival.at_s
        yield arrival


def _arrival(data: Any) -> Arrival:
    if not isinstance(data, dict):
        raise ConfigError(f"a request must be an object, not {data!r}")
    known = {f.name for f in fields(Arrival)}
    missing, unknown = {"at_s", "n_prompt", "n_output"} - data.keys(), data.keys() - known
    if missing or unknown:
        raise ConfigError(
            f"a request lacks the fields {sorted(missing)}, and has the unknown fields {sorted(unknown)}"
        )
    return Arrival(**data)
