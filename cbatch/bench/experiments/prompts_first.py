"""Prompts of several lengths: `python -m cbatch.bench.experiments.prompts_first MODEL`.

Requests of unequal length begin with the same tokens, which were computed before. The engine computes the prompts of a
step by their lengths and then their last tokens beside the rows that decode, as it does by default in memory that slots
have for themselves; and in turn with that it leaves to llama.cpp how all of them together are computed.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cbatch.bench.experiments.rounds import compare, in_model, parser
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel


@dataclass(frozen=True, slots=True)
class PromptsJob:
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


def seconds(path: str, options: EngineOptions, job: PromptsJob, *, is_first: bool) -> float:
    """Return what a fresh engine needs for the job once the beginning is computed."""
    return in_model(path, partial(_seconds, options=options, job=job, is_first=is_first))


def _seconds(
    model: LlamaModel, options: EngineOptions, job: PromptsJob, *, is_first: bool
) -> float:
    from cbatch.backend.llama.llama_backend import LlamaBackend  # llama_cpp is slow to import
    from cbatch.backend.llama.model_tuning import Tuning

    prompts = job.prompts(model.vocab.n_vocab, seed=1)
    backend = LlamaBackend(model, Tuning(options), owns_model=False)
    backend.has_prompts_apart = is_first
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
    asked.add_argument("--flash-attn", choices=("auto", "on", "off"), default="auto")
    asked.add_argument("--slots", type=int, default=16, help="requests at once")
    a = asked.parse_args(words)
    job = PromptsJob(a.requests, a.common, tuple(a.own), tuple(a.output))
    n_window = a.common + a.own[1] + a.output[1]
    options = EngineOptions(parallel=a.slots, ctx_per_seq=n_window, flash_attn=a.flash_attn)
    turn = partial(seconds, a.model, options, job)
    together, first = partial(turn, is_first=False), partial(turn, is_first=True)
    emit(**compare(a.rounds, 3, together_s=together, first_s=first))


if __name__ == "__main__":
    main()
