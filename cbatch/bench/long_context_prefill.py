"""Prompts that go on behind many cells: `python -m cbatch.bench.long_context_prefill MODEL`.

Requests of unequal length begin with the same tokens, which were computed before. The engine answers them as it does,
and with no limit, in turn on one model; JSON goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.log import llama_log
from cbatch.backend.load.open_model import open_model
from cbatch.backend.threads import run_aside
from cbatch.bench.shared_prefix import FIRST_TOKEN, in_turn
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
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


def compare(
    model: LlamaModel, options: EngineOptions, job: Job, n_rounds: int
) -> list[tuple[float, float]]:
    """Return seconds a round, a few prompts in a step and all at once, each as often first; the first warms up."""
    rounds = []
    for i in range(n_rounds + 1):
        seconds = partial(_seconds, model, options, job, seed=i)
        few, many = partial(seconds, is_limited=True), partial(seconds, is_limited=False)
        rounds.append(in_turn(few, many, is_swapped=bool(i % 2)))
    return rounds[1:]


def _seconds(
    model: LlamaModel, options: EngineOptions, job: Job, *, seed: int, is_limited: bool
) -> float:
    """Return what a fresh engine needs once the beginning is computed."""
    prompts = job.prompts(model.vocab.n_vocab, seed)
    backend = run_aside(partial(LlamaBackend, model, options, owns_model=False))
    if not is_limited:
        backend.memory = replace(backend.memory, n_long_context_prefills=0)
    with Engine(backend, options={"temperature": 0, "ignore_eos": True}) as engine:
        beginning = (prompts[0].tokens or ())[: job.n_common + 1]
        engine.submit(BatchPrompt(tokens=beginning), options={"max_tokens": 1}).result()
        start = time.perf_counter()
        engine.run(prompts).results()
        return time.perf_counter() - start


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--common", type=int, default=1000, help="tokens that all begin with")
    parser.add_argument("--own", type=int, nargs=2, default=(65, 200), help="least and most")
    parser.add_argument("--output", type=int, nargs=2, default=(2, 16), help="least and most")
    parser.add_argument("--slots", type=int, default=16, help="requests at once")
    parser.add_argument("--rounds", type=int, default=3, help="turns after the warm-up")
    a = parser.parse_args()
    llama_log().install()
    model = open_model(a.model)
    job = Job(a.requests, a.common, tuple(a.own), tuple(a.output))
    options = EngineOptions(parallel=a.slots, ctx_per_seq=a.common + a.own[1] + a.output[1])
    rounds = compare(model, options, job, a.rounds)
    model.close()
    llama_log().remove()
    ratios = sorted(many / few for few, many in rounds)
    found = {
        "few_s": round(statistics.median(few for few, _ in rounds), 3),
        "all_at_once_s": round(statistics.median(many for _, many in rounds), 3),
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(ratios[0], 3), round(ratios[-1], 3)],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
