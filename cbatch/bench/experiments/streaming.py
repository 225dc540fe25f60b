"""What streaming costs: `python -m cbatch.bench.experiments.streaming MODEL`.

The same requests are read by `await` and by `async for`, in turn: as one batch with one reader, and as one request a
task.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import anyio

from cbatch.bench.experiments.rounds import compare, parser
from cbatch.bench.harness import emit
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from cbatch.engine import Engine
    from cbatch.runtime.batch_response import BatchResponse

Read: TypeAlias = Callable[["BatchResponse"], Awaitable[int]]
Way: TypeAlias = Callable[["Engine", "Sequence[BatchPrompt]", Read], Awaitable[int]]


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


async def _tps(engine: Engine, prompts: Sequence[BatchPrompt], way: Way, read: Read) -> float:
    start = time.perf_counter()
    n_tokens = await way(engine, prompts, read)
    return n_tokens / (time.perf_counter() - start)


def requests(n: int, n_tokens: int) -> list[BatchPrompt]:
    """Return `n` short requests that give `n_tokens` tokens each."""
    options = {"max_tokens": n_tokens, "ignore_eos": True, "seed": 1}
    return [BatchPrompt(prompt=f"Tell me of number {i}.", options=options) for i in range(n)]


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for one batch, and one for a task each."""
    asked = parser(__doc__, n_rounds=7)
    asked.add_argument("--requests", type=int, default=16, help="requests, all in slots at once")
    asked.add_argument("--tokens", type=int, default=192, help="tokens a request")
    a = asked.parse_args(words)
    prompts = requests(a.requests, a.tokens)
    with load(a.model, parallel=a.requests, ctx_per_seq=a.tokens + 64) as engine:
        for name, way in (("one batch", one_batch), ("a task each", one_each)):
            ways = {
                key: partial(anyio.run, _tps, engine, prompts, way, read)
                for key, read in (("async_for_tps", streamed), ("await_tps", awaited))
            }
            found = compare(a.rounds, **ways)
            emit(way=name, requests=a.requests, **found)


if __name__ == "__main__":
    main()
