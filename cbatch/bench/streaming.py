"""What streaming costs: `python -m cbatch.bench.streaming MODEL`.

The same requests are read by `await` and by `async for`, in turn, so their ratio holds on a noisy machine: as one batch
with one reader, and as one request a task.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import anyio

from cbatch.engine import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.engine import Engine
    from cbatch.response import BatchResponse

Read: TypeAlias = Callable[["BatchResponse"], Awaitable[int]]
Way: TypeAlias = Callable[["Engine", "Sequence[BatchPrompt]", Read], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of both: tokens per second."""

    awaited_tps: float
    streamed_tps: float

    @property
    def ratio(self) -> float:
        """The share of the rate that is left with streaming."""
        return self.streamed_tps / self.awaited_tps


async def awaited(response: BatchResponse) -> int:
    """Wait for a batch; return how many tokens it gave."""
    return sum(len(r.token_ids) for r in await response)


async def streamed(response: BatchResponse) -> int:
    """Read a batch chunk by chunk; return how many tokens it gave."""
    n_tokens = 0
    async for chunk in response:
        n_tokens += len(chunk.token_ids)
    return n_tokens


async def one_batch(engine: Engine, prompts: Sequence[BatchPrompt], read: Read) -> int:
    """Run all requests as one batch with one reader; return how many tokens they gave."""
    return await read(engine.run(prompts))


async def one_each(engine: Engine, prompts: Sequence[BatchPrompt], read: Read) -> int:
    """Run every request in a task of its own; return how many tokens they gave."""
    counts: list[int] = []

    async def run(prompt: BatchPrompt) -> None:
        counts.append(await read(engine.submit(prompt)))

    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(run, prompt)
    return sum(counts)


async def compare(
    engine: Engine, prompts: Sequence[BatchPrompt], way: Way, n_rounds: int
) -> list[Round]:
    """Read the requests awaited and streamed in turn, each as often first; the first turn warms up."""
    rounds: list[Round] = []
    for i in range(n_rounds + 1):
        reads = [awaited, streamed] if i % 2 else [streamed, awaited]
        tps = {read: await _tps(engine, prompts, way, read) for read in reads}
        rounds.append(Round(tps[awaited], tps[streamed]))
    return rounds[1:]


async def _tps(engine: Engine, prompts: Sequence[BatchPrompt], way: Way, read: Read) -> float:
    start = time.perf_counter()
    n_tokens = await way(engine, prompts, read)
    return n_tokens / (time.perf_counter() - start)


def requests(n: int, n_tokens: int) -> list[BatchPrompt]:
    """Return `n` short requests that give `n_tokens` tokens each."""
    options = {"max_tokens": n_tokens, "ignore_eos": True, "seed": 1}
    return [BatchPrompt(prompt=f"Tell me of number {i}.", options=options) for i in range(n)]


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Return medians; the ratio is the median and the range of each round's own ratio."""
    ratios = [r.ratio for r in rounds]
    return {
        "await_tps": round(statistics.median(r.awaited_tps for r in rounds), 1),
        "async_for_tps": round(statistics.median(r.streamed_tps for r in rounds), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def main() -> None:
    """Print one JSON line for one batch, and one for a task each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--requests", type=int, default=16, help="requests, all in slots at once")
    parser.add_argument("--tokens", type=int, default=192, help="tokens a request")
    parser.add_argument("--rounds", type=int, default=7, help="turns after the warm-up")
    a = parser.parse_args()
    prompts = requests(a.requests, a.tokens)
    with load(a.model, parallel=a.requests, ctx_per_seq=a.tokens + 64) as engine:
        for name, way in (("one batch", one_batch), ("a task each", one_each)):
            found = summary(anyio.run(compare, engine, prompts, way, a.rounds))
            sys.stdout.write(json.dumps({"way": name, "requests": a.requests, **found}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
