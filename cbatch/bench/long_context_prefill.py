"""Prompts that go on after many cells: `python -m cbatch.bench.long_context_prefill MODEL`.

Requests of unequal length begin with the same tokens, which were computed before. The engine computes a few of their
prompts in a step, as it does by default, and in turn with that all of them at once.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from cbatch.bench.harness import FIRST_TOKEN, emit, in_model, median, parser, ratios, take_turns
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel


@dataclass(frozen=True, slots=True)
class Job:
    """Tokens in common, the least and most of each request's own, the least and most of its answer."""

    n_requests: int
    n_common: int
    own: tuple[int, int]
    output: tuple[int, int]

    def prompts(self, n_vocab: int, seed: int) -> list[BatchPrompt]:
        """Return random requests, the same for the same seed."""
        ids, rng = range(FIRST_TOKEN, n_vocab), random.Random(seed)
        common = rng.choices(ids, k=self.n_common)
        return [
            BatchPrompt(
                tokens=[*common, *rng.choices(ids, k=rng.randint(*self.own))],
                options={"max_tokens": rng.randint(*self.output)},
            )
            for _ in range(self.n_requests)
        ]


def seconds(path: str, options: EngineOptions, job: Job, *, is_limited: bool) -> float:
    """Return what a fresh engine needs for the job once the beginning is computed."""
    return in_model(path, partial(_seconds, options=options, job=job, is_limited=is_limited))


def _seconds(model: LlamaModel, options: EngineOptions, job: Job, *, is_limited: bool) -> float:
    from cbatch.backend.llama.llama_backend import LlamaBackend  # llama_cpp is slow to import

    prompts = job.prompts(model.vocab.n_vocab, seed=1)
    backend = LlamaBackend(model, options, owns_model=False)
    if not is_limited:
        backend.memory = replace(backend.memory, n_long_context_prefills=0)
    with Engine(backend, options={"temperature": 0, "ignore_eos": True}) as engine:
        beginning = (prompts[0].tokens or ())[: job.n_common + 1]
        engine.submit(BatchPrompt(tokens=beginning), options={"max_tokens": 1}).result()
        start = time.perf_counter()
        engine.run(prompts).results()
        return time.perf_counter() - start


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("--requests", type=int, default=32)
    asked.add_argument("--common", type=int, default=1000, help="tokens that all begin with")
    asked.add_argument("--own", type=int, nargs=2, default=(65, 200), help="least and most")
    asked.add_argument("--output", type=int, nargs=2, default=(2, 16), help="least and most")
    asked.add_argument("--slots", type=int, default=16, help="requests at once")
    a = asked.parse_args(words)
    job = Job(a.requests, a.common, tuple(a.own), tuple(a.output))
    options = EngineOptions(parallel=a.slots, ctx_per_seq=a.common + a.own[1] + a.output[1])
    ways = (partial(seconds, a.model, options, job, is_limited=limit) for limit in (True, False))
    rounds = [(few, many) for few, many in take_turns(a.rounds, *ways)]
    emit(
        few_s=median(few for few, _ in rounds),
        all_at_once_s=median(many for _, many in rounds),
        **ratios((many, few) for few, many in rounds),
    )


if __name__ == "__main__":
    main()
