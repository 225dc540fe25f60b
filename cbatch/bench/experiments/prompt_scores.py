"""What log-probabilities of prompts cost: `python -m cbatch.bench.experiments.prompt_scores MODEL`.

The same prompts are computed without and with `prompt_logprobs`, in turn on one engine, and nothing is generated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cbatch.bench.experiments.rounds import compare, in_model, parser
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.engine import Engine
from cbatch.loading import load
from cbatch.messages import BatchPrompt

PLAIN: Mapping[str, Any] = {"prefill_only": True}


def prompts_of(n: int, n_tokens: int, n_vocab: int, seed: int = 1) -> list[BatchPrompt]:
    """Return prompts of random tokens, the same for the same seed."""
    ids, chance = range(FIRST_TOKEN, n_vocab), random.Random(seed)
    return [BatchPrompt(tokens=chance.choices(ids, k=n_tokens)) for _ in range(n)]


def tokens_per_second(
    engine: Engine, prompts: Sequence[BatchPrompt], options: Mapping[str, Any]
) -> float:
    """Compute all prompts; return their tokens a second."""
    start = time.perf_counter()
    results = engine.run(prompts, options=options).results()
    return sum(r.usage.prompt_tokens for r in results) / (time.perf_counter() - start)


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of likeliest tokens."""
    asked = parser(__doc__, n_rounds=5)
    asked.add_argument("--requests", type=int, default=16)
    asked.add_argument("--prompt", type=int, default=400, help="tokens of each prompt")
    asked.add_argument("--top", type=int, nargs="+", default=[0, 5, 20], help="likeliest tokens")
    asked.add_argument("--slots", type=int, default=16, help="requests at once")
    a = asked.parse_args(words)
    n_vocab = in_model(a.model, lambda model: model.vocab.n_vocab)
    prompts = prompts_of(a.requests, a.prompt, n_vocab)
    with load(a.model, parallel=a.slots, ctx_per_seq=a.prompt + 8, share_prefixes=False) as engine:
        for n_top in a.top:
            scored = {"prompt_logprobs": n_top, "max_tokens": 0}
            turn = partial(tokens_per_second, engine, prompts)
            found = compare(
                a.rounds, scored_tps=partial(turn, scored), plain_tps=partial(turn, PLAIN)
            )
            emit(top=n_top, requests=a.requests, **found)


if __name__ == "__main__":
    main()
