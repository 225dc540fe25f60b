"""What it takes to score continuations of contexts: `python -m cbatch.bench.experiments.continuations MODEL`.

Tasks of the form of HellaSwag, a context with four continuations, by `Engine.score` and by one request for each whole
text with `prompt_logprobs`, in turn on one engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from cbatch.bench.experiments.rounds import in_model, median, parser, ratios, take_turns
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.engine import Engine
from cbatch.loading import load
from cbatch.messages import BatchPrompt

Task = tuple[BatchPrompt, list[list[int]]]

_N_CONTEXT, _N_ENDING = (40, 120), (8, 30)
"""Tokens of contexts and of continuations, least and most, as HellaSwag's are."""


def tasks_of(n: int, n_common: int, n_vocab: int, seed: int = 1) -> list[Task]:
    """Return tasks whose contexts all begin with the same `n_common` tokens, as with examples before each."""
    ids, chance = range(FIRST_TOKEN, n_vocab), random.Random(seed)
    common = chance.choices(ids, k=n_common)

    def some(sizes: tuple[int, int]) -> list[int]:
        return chance.choices(ids, k=chance.randint(*sizes))

    return [
        (BatchPrompt(tokens=[*common, *some(_N_CONTEXT)]), [some(_N_ENDING) for _ in range(4)])
        for _ in range(n)
    ]


def _by_score(engine: Engine, tasks: Sequence[Task]) -> None:
    engine.score(tasks).results()


def _by_whole_texts(engine: Engine, tasks: Sequence[Task]) -> None:
    whole = [
        BatchPrompt(tokens=[*(context.tokens or ()), *ending])
        for context, endings in tasks
        for ending in endings
    ]
    engine.run(whole, options={"max_tokens": 0, "prompt_logprobs": 1}).results()


def _measured(
    way: Callable[[Engine, Sequence[Task]], None], engine: Engine, tasks: Sequence[Task]
) -> tuple[float, int]:
    """Return tasks a second, and the tokens that were computed."""
    engine.reset_stats()
    start = time.perf_counter()
    way(engine, tasks)
    return len(tasks) / (time.perf_counter() - start), engine.stats().n_prompt_tokens


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of tokens that all contexts begin with."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("--tasks", type=int, default=40)
    asked.add_argument("--common", type=int, nargs="+", default=[0, 300], help="common tokens")
    asked.add_argument("--slots", type=int, default=16, help="requests at once")
    a = asked.parse_args(words)
    n_vocab = in_model(a.model, lambda model: model.vocab.n_vocab)
    n_most = max(a.common) + _N_CONTEXT[1] + _N_ENDING[1] + 8
    with load(a.model, parallel=a.slots, ctx_per_seq=n_most) as engine:
        for n_common in a.common:
            tasks = tasks_of(a.tasks, n_common, n_vocab)
            ways = [partial(_measured, way, engine, tasks) for way in (_by_score, _by_whole_texts)]
            rounds = list(take_turns(a.rounds, *ways))
            emit(
                common=n_common,
                score_tasks_s=median((score[0] for score, _ in rounds), 2),
                whole_tasks_s=median((whole[0] for _, whole in rounds), 2),
                score_tokens=rounds[0][0][1],
                whole_tokens=rounds[0][1][1],
                **ratios((score[0], whole[0]) for score, whole in rounds),
            )


if __name__ == "__main__":
    main()
