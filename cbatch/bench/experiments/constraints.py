"""What constraints cost: `python -m cbatch.bench.experiments.constraints MODEL`.

The same prompts are answered freely and under a constraint, in turn on one engine. Every answer is cut at the same
number of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cbatch.bench.experiments.rounds import median, parser, ratios, take_turns
from cbatch.bench.harness import emit
from cbatch.bench.workloads import RECORDS
from cbatch.engine import Engine
from cbatch.loading import load
from cbatch.messages import BatchPrompt

CONSTRAINTS: dict[str, Mapping[str, Any]] = {
    "records": {"json_schema": RECORDS},
    "letters": {"regex": "[a-zA-Z ,.]*"},  # nothing is forced
    "strings": {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 1000}},
}


@dataclass(frozen=True, slots=True)
class ConstraintTurn:
    """One batch: its rate, and the mean milliseconds of a step in all and in sampling, masks included."""

    tps: float
    ms_step: float
    ms_sample: float
    n_steps: int


def compare(
    engine: Engine, constraint: Mapping[str, Any], n_tokens: int, n_rounds: int, n_bound: int
) -> list[tuple[ConstraintTurn, ConstraintTurn]]:
    """Answer freely and under a constraint in turn, as many prompts as the engine has slots.

    Args:
        engine: the engine that answers, for this benchmark alone.
        constraint: options that make the constraint.
        n_rounds: rounds after the one that warms up.
        n_bound: how many of the prompts have the constraint in its turn.

    Returns:
        The free and the bound turn of each round.
    """
    free = partial(_turn, engine, {}, n_tokens, 0)
    bound = partial(_turn, engine, constraint, n_tokens, n_bound)
    return [(one, other) for one, other in take_turns(n_rounds, free, bound)]


def _turn(
    engine: Engine, constraint: Mapping[str, Any], n_tokens: int, n_bound: int
) -> ConstraintTurn:
    engine.reset_stats()
    options = {"max_tokens": n_tokens, "ignore_eos": True, "seed": 1}
    prompts = [
        BatchPrompt(prompt=f"List {i}:", options=constraint if i < n_bound else {})
        for i in range(engine.parallel)
    ]
    start = time.perf_counter()
    results = engine.run(prompts, options=options).results()
    seconds = time.perf_counter() - start
    stats = engine.stats()
    n_output = sum(len(r.token_ids) for r in results)
    ms = 1e3 / stats.n_steps
    return ConstraintTurn(n_output / seconds, seconds * ms, stats.sample_s * ms, stats.n_steps)


def summary(rounds: Sequence[tuple[ConstraintTurn, ConstraintTurn]]) -> dict[str, float]:
    """Return medians; the ratio is that of the rates, bound over free."""
    found = ratios((bound.tps, free.tps) for free, bound in rounds)
    for name, turns in zip(("free", "bound"), zip(*rounds, strict=True), strict=True):
        found[f"{name}_tps"] = median((t.tps for t in turns), 1)
        found[f"{name}_ms_step"] = median(t.ms_step for t in turns)
        found[f"{name}_ms_sample"] = median(t.ms_sample for t in turns)
        found[f"{name}_steps"] = median(t.n_steps for t in turns)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each constraint."""
    asked = parser(__doc__, model="the model that ships inside", n_rounds=5)
    asked.add_argument("--rows", type=int, default=16, help="requests, all in slots at once")
    asked.add_argument("--bound", type=int, help="how many have the constraint; all by default")
    asked.add_argument("--tokens", type=int, default=96, help="tokens an answer")
    asked.add_argument("--only", nargs="+", choices=[*CONSTRAINTS], default=[*CONSTRAINTS])
    a = asked.parse_args(words)
    n_bound = a.rows if a.bound is None else a.bound
    with load(a.model, parallel=a.rows, ctx_per_seq=a.tokens + 64) as engine:
        for name in a.only:
            rounds = compare(engine, CONSTRAINTS[name], a.tokens, a.rounds, n_bound)
            sizes = {"rows": a.rows, "bound": n_bound, "tokens": a.tokens}
            emit(constraint=name, **sizes, **summary(rounds))


if __name__ == "__main__":
    main()
