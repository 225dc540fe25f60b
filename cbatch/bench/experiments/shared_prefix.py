"""Prompts that begin alike, against a loop made for them: `python -m cbatch.bench.experiments.shared_prefix MODEL`.

Both get the same tokens and settings and run in turn, each with the model loaded anew, so that nothing is computed
before. The loop knows all prompts and lengths beforehand and does not sample; the engine finds out what is common, and
samples with top-k 40, top-p 0.95 at temperature 0.8. With `--sweep` the engine alone runs over lengths of beginnings
and answers, in both kinds of memory in turn.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from cbatch.bench.experiments.rounds import CHAIN, in_model, median, parser, ratios, take_turns
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel

KINDS = ("partitioned", "unified")
SWEEP_COMMON = (0, 64, 128, 256, 512, 1024)
SWEEP_OUTPUT = (8, 32, 128)
SWEEP_OWN = 32


@dataclass(frozen=True, slots=True)
class PrefixJob:
    """How many requests, and tokens of each: in common with all, its own, and of its answer."""

    requests: int
    common: int
    own: int
    output: int
    slots: int

    def __post_init__(self) -> None:
        """Check the sizes."""
        least = {"requests": 1, "common": 0, "own": 1, "output": 1, "slots": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, not {getattr(self, name)}")

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts."""
        return self.requests * (self.common + self.own)

    @property
    def n_distinct(self) -> int:
        """Tokens of all prompts, those in common counted once."""
        return self.common + self.requests * self.own

    @property
    def n_output(self) -> int:
        """Tokens of all answers."""
        return self.requests * self.output

    def settings(self, kv: str) -> dict[str, Any]:
        """Return what `load` gets: a window just large enough."""
        n_window = self.common + self.own + self.output
        return {"parallel": self.slots, "ctx_per_seq": n_window, "kv": kv}


@dataclass(frozen=True, slots=True)
class Prompts:
    """Tokens: the beginning of all prompts, and the rest of each."""

    common: list[int]
    owns: list[list[int]]

    @classmethod
    def random(cls, job: PrefixJob, n_vocab: int, seed: int = 7) -> Prompts:
        """Return random tokens, the same for the same seed; the rests begin with different ones.

        Raises:
            ConfigError: more requests than tokens to begin with.
        """
        ids, rng = range(FIRST_TOKEN, n_vocab), random.Random(seed)
        if job.requests > len(ids):
            raise ConfigError(f"{job.requests} requests cannot differ in {len(ids)} tokens")
        common = rng.choices(ids, k=job.common)
        firsts = rng.sample(ids, job.requests)
        return cls(common, [[first, *rng.choices(ids, k=job.own - 1)] for first in firsts])

    def requests(self) -> list[BatchPrompt]:
        """Return what the engine gets."""
        return [BatchPrompt(tokens=[*self.common, *own]) for own in self.owns]


@dataclass(frozen=True, slots=True)
class PrefixTurn:
    """One turn: tokens of answers per second, over everything, and the tokens of prompts that were computed."""

    tps: float
    n_computed: int


def run_loop(path: str, job: PrefixJob, kv: str, prompts: Prompts) -> PrefixTurn:
    """Run the job by the loop written by hand."""
    from cbatch.bench.bare import BareLoop  # llama_cpp is slow to import

    def run(model: LlamaModel) -> float:
        with closing(BareLoop(model, EngineOptions.of(job.settings(kv)))) as loop:
            return loop.run(prompts.common, prompts.owns, job.output)

    return PrefixTurn(job.n_output / in_model(path, run), job.n_distinct)


def run_engine(path: str, job: PrefixJob, kv: str, prompts: Prompts) -> PrefixTurn:
    """Run the job by a fresh engine, from the call of `run` until all results are there."""
    requests, options = prompts.requests(), {**CHAIN, "max_tokens": job.output, "seed": 1}
    with load(path, **job.settings(kv)) as engine:
        start = time.perf_counter()
        results = engine.run(requests, options=options).results()
        seconds = time.perf_counter() - start
        n_computed = engine.stats().n_prompt_tokens
    return PrefixTurn(sum(len(r.token_ids) for r in results) / seconds, n_computed)


def compare(
    path: str, job: PrefixJob, kv: str, prompts: Prompts, n_rounds: int
) -> dict[str, float]:
    """Run loop and engine in turn; return medians."""
    ways = (partial(run, path, job, kv, prompts) for run in (run_loop, run_engine))
    rounds = [(loop, engine) for loop, engine in take_turns(n_rounds, *ways)]
    n_computed = round(median(engine.n_computed for _, engine in rounds))
    return {
        "loop_tps": median((loop.tps for loop, _ in rounds), 1),
        "engine_tps": median((engine.tps for _, engine in rounds), 1),
        **ratios(((engine.tps, loop.tps) for loop, engine in rounds), "engine_over_loop"),
        "prompt_tokens": job.n_prompt,
        "prompt_tokens_distinct": job.n_distinct,
        "prompt_tokens_computed": n_computed,
        "computed_over_distinct": round(n_computed / job.n_distinct, 4),
    }


def sweep(path: str, job: PrefixJob, prompts: Prompts, n_rounds: int) -> dict[str, float]:
    """Run the engine in both kinds of memory in turn; return medians."""
    ways = (partial(run_engine, path, job, kv, prompts) for kv in KINDS)
    rounds = [(parts.tps, pool.tps) for parts, pool in take_turns(n_rounds, *ways)]
    return {
        "common_share": round(job.common / (job.common + job.own), 3),
        "partitioned_tps": median((parts for parts, _ in rounds), 1),
        "unified_tps": median((pool for _, pool in rounds), 1),
        **ratios(((pool, parts) for parts, pool in rounds), "unified_over_partitioned"),
    }


def print_comparison(a: argparse.Namespace, n_vocab: int) -> None:
    """Print how the engine compares with the loop in each kind of memory."""
    job = PrefixJob(a.requests, a.common, a.own, a.output, a.slots)
    prompts = Prompts.random(job, n_vocab)
    for kv in KINDS if a.kv == "both" else (a.kv,):
        found = compare(a.model, job, kv, prompts, a.rounds)
        emit(kv=kv, **asdict(job), rounds=a.rounds, **found)


def print_sweep(a: argparse.Namespace, n_vocab: int) -> None:
    """Print how the kinds of memory compare, for each length of prefix and answer."""
    for common, output in product(SWEEP_COMMON, SWEEP_OUTPUT):
        job = PrefixJob(a.requests, common, SWEEP_OWN, output, a.slots)
        found = sweep(a.model, job, Prompts.random(job, n_vocab), a.rounds)
        emit(**asdict(job), rounds=a.rounds, **found)


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each kind of memory, or for each place of the sweep."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("--requests", type=int, default=64)
    asked.add_argument("--common", type=int, default=600, help="tokens that all prompts begin with")
    asked.add_argument("--own", type=int, default=16, help="tokens that follow in each prompt")
    asked.add_argument("--output", type=int, default=32, help="tokens of each answer")
    asked.add_argument("--slots", type=int, default=16, help="requests at once")
    asked.add_argument("--kv", choices=[*KINDS, "both"], default="both")
    asked.add_argument(
        "--sweep",
        action="store_true",
        help=f"the engine alone over beginnings of {SWEEP_COMMON} and answers of {SWEEP_OUTPUT} tokens, "
        f"{SWEEP_OWN} of each prompt its own, in both kinds of memory",
    )
    a = asked.parse_args(words)
    n_vocab = in_model(a.model, lambda model: model.vocab.n_vocab)
    (print_sweep if a.sweep else print_comparison)(a, n_vocab)


if __name__ == "__main__":
    main()
