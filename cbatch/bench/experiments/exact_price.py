"""What `exact=True` costs in tokens/s: `python -m cbatch.bench.experiments.exact_price MODEL`.

Fresh engines answer the same requests exactly and as by default in turn. A rate is that of the time when all slots were
busy, until fewer requests than slots are left; `whole_ratio` is of the time until the last answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from cbatch.bench.experiments.rounds import CHAIN, in_model, median, parser, ratios, take_turns
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.errors import ConfigError
from cbatch.loading import load
from cbatch.messages import BatchPrompt


@dataclass(frozen=True, slots=True)
class PriceJob:
    """The least and most tokens of prompts and of answers."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    def prompts(self, n: int, n_vocab: int) -> list[BatchPrompt]:
        """Return random requests, the same each time."""
        ids, dice = range(FIRST_TOKEN, n_vocab), random.Random(1)
        return [
            BatchPrompt(
                tokens=dice.choices(ids, k=dice.randint(*self.prompt)),
                options={**CHAIN, "seed": 1, "max_tokens": dice.randint(*self.output)},
            )
            for _ in range(n)
        ]


JOBS = {"decode": PriceJob((16, 16), (64, 64)), "mixed": PriceJob((32, 256), (16, 128))}

Turn: TypeAlias = "tuple[float, float]"
"""Generated tokens a second while all slots were busy, and of the whole."""


def _turn(
    path: str, job: PriceJob, prompts: Sequence[BatchPrompt], n_slots: int, *, exact: bool
) -> Turn:
    """Answer the requests with a fresh engine."""
    n_window = job.prompt[1] + job.output[1]
    with load(path, parallel=n_slots, ctx_per_seq=n_window, exact=exact) as engine:
        engine.submit(BatchPrompt(tokens=[FIRST_TOKEN]), options={"max_tokens": 2}).result()
        n_tokens, n_left, busy_tps = 0, len(prompts), 0.0
        start_s = time.perf_counter()
        response = engine.run(prompts, streamed=True)
        for chunk in response:
            n_tokens += len(chunk.token_ids)
            n_left -= chunk.finish_reason is not None
            if n_left < n_slots and not busy_tps:
                busy_tps = n_tokens / (time.perf_counter() - start_s)
        whole_tps = n_tokens / (time.perf_counter() - start_s)
        for result in response.results():
            if result.error is not None:
                raise result.error
    return busy_tps, whole_tps


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each workload."""
    asked = parser(__doc__, n_rounds=2)
    asked.add_argument("--workload", choices=JOBS, nargs="+", default=list(JOBS))
    asked.add_argument("--slots", type=int, default=16, help="requests at once")
    asked.add_argument("--requests", type=int, default=48, help="at least as many as slots")
    a = asked.parse_args(words)
    if a.requests < a.slots:
        raise ConfigError(f"--requests {a.requests} leave some of {a.slots} --slots idle")
    n_vocab = in_model(a.model, lambda model: model.vocab.n_vocab)
    for name in a.workload:
        job = JOBS[name]
        prompts = job.prompts(a.requests, n_vocab)
        ways = (
            partial(_turn, a.model, job, prompts, a.slots, exact=exact) for exact in (True, False)
        )
        rounds = take_turns(a.rounds, *ways, n_warm_up=0)
        emit(
            workload=name,
            exact_tps=median((exact[0] for exact, _ in rounds), 1),
            default_tps=median((plain[0] for _, plain in rounds), 1),
            **ratios((exact[0], plain[0]) for exact, plain in rounds),
            whole_ratio=median((exact[1] / plain[1] for exact, plain in rounds), 4),
        )


if __name__ == "__main__":
    main()
