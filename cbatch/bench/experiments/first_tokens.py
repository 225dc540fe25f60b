"""When chats that come at once get their first tokens: `python -m cbatch.bench.experiments.first_tokens MODEL`.

Bursts of chats of many lengths are streamed by two engines in turn: one computes their prompts one after the other
(`ttft="first"`), one in the fastest shape (`ttft="any"`). Then one newcomer comes beside streams, by default and with
each fixed `prefill_budget`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from cbatch.bench.experiments.rounds import median, parser, take_turns
from cbatch.bench.harness import FIRST_TOKEN, emit, percentile
from cbatch.engine import Engine
from cbatch.loading import load
from cbatch.messages import BatchPrompt

SIZES = (4, 16, 64)
BUDGETS = (64, 128, 256, 512)
LENGTHS = (20, 800)
N_OUTPUT = 32

_OPTIONS: dict[str, Any] = {"ignore_eos": True, "seed": 1}


def burst(engine: Engine, lengths: Sequence[int], n_output: int = N_OUTPUT) -> tuple[float, float]:
    """Stream chats of these lengths that come at once; return the mean first token in seconds, and tokens/s."""
    prompts = [_prompt(i, n) for i, n in enumerate(lengths)]
    start = time.perf_counter()
    response = engine.run(prompts, options={**_OPTIONS, "max_tokens": n_output}, streamed=True)
    firsts: dict[str, float] = {}
    for chunk in response:
        if chunk.token_ids:
            firsts.setdefault(chunk.id, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    return sum(firsts.values()) / len(firsts), len(lengths) * n_output / seconds


def newcomer(engine: Engine, n_streams: int, n_prompt: int) -> tuple[float, float]:
    """Stream `n_streams` chats and one that joins them; return its first token and the others' p99 gap, in seconds."""
    options = {**_OPTIONS, "max_tokens": engine.n_window // 2}
    response = engine.run([_prompt(i, 8) for i in range(n_streams)], options=options, streamed=True)
    chunks = iter(response)
    seen: dict[str, int] = {}
    while len(seen) < n_streams or min(seen.values()) < N_OUTPUT:
        chunk = next(chunks)
        seen[chunk.id] = seen.get(chunk.id, 0) + len(chunk.token_ids)
    start = time.perf_counter()
    joined = engine.run(
        [_prompt(n_streams, n_prompt)], options={**_OPTIONS, "max_tokens": 2}, streamed=True
    )
    last: dict[str, float] = {}
    gaps: list[float] = []
    while joined.n_open:
        chunk = next(chunks)
        now, n = time.perf_counter(), len(chunk.token_ids)
        if n and chunk.id in last:
            gaps += [(now - last[chunk.id]) / n] * n
        last[chunk.id] = now
    ttft_s = joined.results()[0].timings.ttft_s or 0.0
    response.cancel()
    response.results(return_errors=True)
    return ttft_s, percentile(gaps, 0.99) if gaps else time.perf_counter() - start


def _prompt(i: int, n: int) -> BatchPrompt:
    drawn = random.Random(i)
    return BatchPrompt(tokens=[FIRST_TOKEN + drawn.randrange(200) for _ in range(n)])


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each burst and each newcomer."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="chats of a burst")
    asked.add_argument("--streams", type=int, nargs="*", default=(1, 8), help="beside a newcomer")
    asked.add_argument("--prompts", type=int, nargs="*", default=(512, 1500), help="its tokens")
    asked.add_argument("--seed", type=int, default=1, help="of the lengths")
    a = asked.parse_args(words)
    made = partial(load, a.model, share_prefixes=False, ctx_per_seq=2048)
    with ExitStack() as stack:
        ways = [
            stack.enter_context(made(parallel=max([1, *a.sizes]), ttft=ttft))
            for ttft in ("first", "any")
            if a.sizes
        ]
        for size in a.sizes:
            lengths = random.Random(a.seed).choices(range(*LENGTHS), k=size)
            found = take_turns(a.rounds, *(partial(burst, engine, lengths) for engine in ways))
            firsts = [one[0] / other[0] for one, other in found]
            rates = [one[1] / other[1] for one, other in found]
            emit(
                burst=size,
                first_s=median([one[0] for one, _ in found]),
                any_s=median([other[0] for _, other in found]),
                first_over_any=median(firsts),
                rate_over_any=median(rates),
            )
    if not a.streams:
        return
    with ExitStack() as stack:
        n_slots = max(a.streams) + 1
        budgets = [None, *BUDGETS]
        engines = [stack.enter_context(made(parallel=n_slots, prefill_budget=n)) for n in budgets]
        for n_streams in a.streams:
            for n_prompt in a.prompts:
                turns = (partial(newcomer, engine, n_streams, n_prompt) for engine in engines)
                rounds = take_turns(a.rounds, *turns)
                for n, of_engine in zip(budgets, zip(*rounds, strict=True), strict=True):
                    emit(
                        streams=n_streams,
                        prompt=n_prompt,
                        budget=n or "default",
                        first_s=median([ttft for ttft, _ in of_engine]),
                        p99_gap_s=median([gap for _, gap in of_engine]),
                    )


if __name__ == "__main__":
    main()
