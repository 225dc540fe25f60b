"""Prompts that begin alike, against a loop written by hand for them: `python -m cbatch.bench.shared_prefix MODEL`.

Both get the same tokens and settings and run in turn, each with the model loaded anew, so that nothing is computed
before. The loop knows all prompts and lengths beforehand and does not sample; the engine finds out what is common, and
samples with top-k 40, top-p 0.95 at temperature 0.8. With `--sweep` the engine alone runs over lengths of beginnings
and answers, in both kinds of memory in turn. JSON lines go to stdout, a table to stderr.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from cbatch.backend.llama.bare import PrefixLoop
from cbatch.backend.llama.log import llama_log
from cbatch.backend.load.loader import describe_model
from cbatch.backend.load.open_model import open_model
from cbatch.backend.threads import run_aside
from cbatch.engine import load
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")
U = TypeVar("U")

KINDS = ("partitioned", "unified")
SWEEP_COMMON = (0, 64, 128, 256, 512, 1024)
SWEEP_OUTPUT = (8, 32, 128)
SWEEP_OWN = 32

_CHAIN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.0, "ignore_eos": True}
FIRST_TOKEN = 3
"""Those below are control tokens as a rule."""


@dataclass(frozen=True, slots=True)
class Job:
    """How many requests, and tokens of each: in common with all, its own, and of its answer."""

    requests: int
    common: int
    own: int
    output: int
    slots: int

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: one is too small to run.
        """
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
    def random(cls, job: Job, n_vocab: int, seed: int = 7) -> Prompts:
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
class Turn:
    """One turn of the engine."""

    tps: float
    """Tokens of answers per second, over everything."""
    n_computed: int
    """Tokens of prompts that were computed."""


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of both."""

    loop_tps: float
    engine: Turn

    @property
    def ratio(self) -> float:
        """Engine over loop."""
        return self.engine.tps / self.loop_tps


def run_loop(path: str, job: Job, kv: str, prompts: Prompts) -> float:
    """Return the tokens per second of the loop, in a thread of its own."""
    return job.n_output / run_aside(partial(_loop_seconds, path, job, kv, prompts))


def _loop_seconds(path: str, job: Job, kv: str, prompts: Prompts) -> float:
    model = open_model(path)
    try:
        loop = PrefixLoop(model, EngineOptions.of(job.settings(kv)))
        try:
            return loop.run(prompts.common, prompts.owns, job.output)
        finally:
            loop.close()
    finally:
        model.close()


def run_engine(path: str, job: Job, kv: str, prompts: Prompts) -> Turn:
    """Return what a fresh engine did, from the call of `run` until all results are there."""
    requests, options = prompts.requests(), {**_CHAIN, "max_tokens": job.output, "seed": 1}
    with load(path, **job.settings(kv)) as engine:
        start = time.perf_counter()
        results = engine.run(requests, options=options).results()
        seconds = time.perf_counter() - start
        n_computed = engine.stats().n_prompt_tokens
    return Turn(sum(len(r.token_ids) for r in results) / seconds, n_computed)


def compare(path: str, job: Job, kv: str, prompts: Prompts, n_rounds: int) -> list[Round]:
    """Run loop and engine in turn, each as often first; the first turn warms up."""
    rounds: list[Round] = []
    for i in range(n_rounds + 1):
        loop = partial(run_loop, path, job, kv, prompts)
        engine = partial(run_engine, path, job, kv, prompts)
        rounds.append(Round(*in_turn(loop, engine, is_swapped=bool(i % 2))))
    return rounds[1:]


def in_turn(one: Callable[[], T], other: Callable[[], U], *, is_swapped: bool) -> tuple[T, U]:
    """Do both, `other` first where they are swapped; return what they return, `one`'s first."""
    if not is_swapped:
        return one(), other()
    last = other()
    return one(), last


def summary(job: Job, rounds: Sequence[Round]) -> dict[str, float]:
    """Return medians; the ratio is the median and the range of each round's own ratio."""
    ratios = [r.ratio for r in rounds]
    n_computed = statistics.median_high(r.engine.n_computed for r in rounds)
    return {
        "loop_tps": round(statistics.median(r.loop_tps for r in rounds), 1),
        "engine_tps": round(statistics.median(r.engine.tps for r in rounds), 1),
        "engine_over_loop": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "prompt_tokens": job.n_prompt,
        "prompt_tokens_distinct": job.n_distinct,
        "prompt_tokens_computed": n_computed,
        "computed_over_distinct": round(n_computed / job.n_distinct, 4),
    }


def sweep(path: str, job: Job, prompts: Prompts, n_rounds: int) -> dict[str, float]:
    """Run the engine in both kinds of memory in turn, each as often first; return medians.

    The ratio is the median of each round's own.
    """
    rounds: list[tuple[Turn, Turn]] = []
    for i in range(n_rounds):
        partitioned, unified = (partial(run_engine, path, job, kv, prompts) for kv in KINDS)
        rounds.append(in_turn(partitioned, unified, is_swapped=bool(i % 2)))
    ratios = [u.tps / p.tps for p, u in rounds]
    return {
        "common_share": round(job.common / (job.common + job.own), 3),
        "partitioned_tps": round(statistics.median(p.tps for p, _ in rounds), 1),
        "unified_tps": round(statistics.median(u.tps for _, u in rounds), 1),
        "unified_over_partitioned": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def _print_comparison(a: argparse.Namespace, n_vocab: int) -> None:
    job = Job(a.requests, a.common, a.own, a.output, a.slots)
    prompts = Prompts.random(job, n_vocab)
    columns = ("kv", "loop tps", "engine tps", "engine/loop", "range", "computed", "distinct")
    _say(columns)
    for kv in KINDS if a.kv == "both" else (a.kv,):
        found = summary(job, compare(a.model, job, kv, prompts, a.rounds))
        _print({"kv": kv, **asdict(job), "rounds": a.rounds, **found})
        _say(
            (
                kv,
                f"{found['loop_tps']:,.0f}",
                f"{found['engine_tps']:,.0f}",
                f"{found['engine_over_loop']:.3f}",
                f"{found['ratio_min']:.3f}–{found['ratio_max']:.3f}",
                f"{found['prompt_tokens_computed']:,}",
                f"{found['prompt_tokens_distinct']:,}",
            )
        )


def _print_sweep(a: argparse.Namespace, n_vocab: int) -> None:
    _say(("common", "share", "output", *KINDS, "uni/part", "range"))
    for i, (common, output) in enumerate(product(SWEEP_COMMON, SWEEP_OUTPUT)):
        job = Job(a.requests, common, SWEEP_OWN, output, a.slots)
        prompts = Prompts.random(job, n_vocab)
        if i == 0:
            sweep(a.model, job, prompts, 1)  # warms up
        found = sweep(a.model, job, prompts, a.rounds)
        _print({**asdict(job), "rounds": a.rounds, **found})
        _say(
            (
                f"{common:,}",
                f"{found['common_share']:.0%}",
                f"{output}",
                f"{found['partitioned_tps']:,.0f}",
                f"{found['unified_tps']:,.0f}",
                f"{found['unified_over_partitioned']:.3f}",
                f"{found['ratio_min']:.3f}–{found['ratio_max']:.3f}",
            )
        )


def _print(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _say(cells: Iterable[str]) -> None:
    """Print a row of the table."""
    sys.stderr.write("".join(f"{cell:>13}" for cell in cells) + "\n")
    sys.stderr.flush()


def main() -> None:
    """Print one JSON line for each kind of memory, or for each place of the sweep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument(
        "--common", type=int, default=600, help="tokens that all prompts begin with"
    )
    parser.add_argument("--own", type=int, default=16, help="tokens that follow in each prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--slots", type=int, default=16, help="requests at once")
    parser.add_argument("--kv", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=3, help="turns after the warm-up")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help=f"the engine alone over beginnings of {SWEEP_COMMON} and answers of {SWEEP_OUTPUT} tokens, "
        f"{SWEEP_OWN} of each prompt its own, in both kinds of memory",
    )
    a = parser.parse_args()
    llama_log().install()
    n_vocab = describe_model(a.model, EngineOptions(parallel=1), asks_probe=False)["n_vocab"]
    (_print_sweep if a.sweep else _print_comparison)(a, n_vocab)
    llama_log().remove()


if __name__ == "__main__":
    main()
