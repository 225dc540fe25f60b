"""What constraints cost: `python -m cbatch.bench.constraints MODEL`.

The same prompts are answered freely and under a constraint, in turn on one engine, so the ratio holds on a noisy
machine. Every answer is cut at the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbatch.engine import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.engine import Engine

RECORDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
"""A list of records longer than any answer: strings, numbers and names that are forced."""

CONSTRAINTS: dict[str, Mapping[str, Any]] = {
    "records": {"json_schema": RECORDS},
    "letters": {"regex": "[a-zA-Z ,.]*"},  # nothing is forced
    "strings": {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 1000}},
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch: its rate, and the mean milliseconds of a step in all and in sampling, masks included."""

    tps: float
    ms_step: float
    ms_sample: float
    n_steps: int


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of each."""

    free: Turn
    bound: Turn

    @property
    def ratio(self) -> float:
        """The share of the rate that is left under the constraint."""
        return self.bound.tps / self.free.tps


def compare(
    engine: Engine, said: Mapping[str, Any], n_tokens: int, n_rounds: int, n_bound: int
) -> list[Round]:
    """Answer freely and under a constraint in turn, each as often first; the first round warms up.

    Args:
        engine: what answers, as many prompts as it has slots.
        said: options that make the constraint.
        n_tokens: tokens an answer.
        n_rounds: rounds after the first.
        n_bound: how many of the prompts have the constraint in its turn.
    """
    rounds = []
    for i in range(n_rounds + 1):
        if i % 2:
            free, bound = _turn(engine, {}, n_tokens, 0), _turn(engine, said, n_tokens, n_bound)
        else:
            bound, free = _turn(engine, said, n_tokens, n_bound), _turn(engine, {}, n_tokens, 0)
        rounds.append(Round(free, bound))
    return rounds[1:]


def _turn(engine: Engine, said: Mapping[str, Any], n_tokens: int, n_bound: int) -> Turn:
    engine.reset_stats()
    options = {"max_tokens": n_tokens, "ignore_eos": True, "seed": 1}
    prompts = [
        BatchPrompt(prompt=f"List {i}:", options=said if i < n_bound else {})
        for i in range(engine.parallel)
    ]
    start = time.perf_counter()
    results = engine.run(prompts, options=options).results()
    seconds = time.perf_counter() - start
    stats = engine.stats()
    n_output = sum(len(r.token_ids) for r in results)
    ms = 1e3 / stats.n_steps
    return Turn(n_output / seconds, seconds * ms, stats.sample_s * ms, stats.n_steps)


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Return medians; the ratio is the median and the range of each round's own ratio."""
    middle, ratios = statistics.median, [r.ratio for r in rounds]
    return {
        "free_tps": round(middle(r.free.tps for r in rounds), 1),
        "bound_tps": round(middle(r.bound.tps for r in rounds), 1),
        "ratio": round(middle(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "free_ms_step": round(middle(r.free.ms_step for r in rounds), 3),
        "bound_ms_step": round(middle(r.bound.ms_step for r in rounds), 3),
        "free_ms_sample": round(middle(r.free.ms_sample for r in rounds), 3),
        "bound_ms_sample": round(middle(r.bound.ms_sample for r in rounds), 3),
        "free_steps": middle(r.free.n_steps for r in rounds),
        "bound_steps": middle(r.bound.n_steps for r in rounds),
    }


def main() -> None:
    """Print one JSON line for each constraint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="a GGUF file; the model that ships by default")
    parser.add_argument("--rows", type=int, default=16, help="requests, all in slots at once")
    parser.add_argument("--bound", type=int, help="how many have the constraint; all by default")
    parser.add_argument("--tokens", type=int, default=96, help="tokens an answer")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up")
    parser.add_argument("--only", nargs="+", choices=[*CONSTRAINTS], default=[*CONSTRAINTS])
    a = parser.parse_args()
    n_bound = a.rows if a.bound is None else a.bound
    with load(a.model, parallel=a.rows, ctx_per_seq=a.tokens + 64) as engine:
        for name in a.only:
            rounds = compare(engine, CONSTRAINTS[name], a.tokens, a.rounds, n_bound)
            said = {"constraint": name, "rows": a.rows, "bound": n_bound, "tokens": a.tokens}
            sys.stdout.write(json.dumps({**said, **summary(rounds)}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
