"""Embeddings and rerank in a side's own process: by an engine, or by `Llama.embed`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from cbatch.bench.text_work import TextCall
from cbatch.errors import ConfigError
from cbatch.support.taken_cores import my_cores

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from cbatch.engine import Engine

    Do = Callable[[Mapping[str, Any]], Mapping[str, Any]]
    Rows = list[list[float]]
    """The vector of each text, or of each document its score alone."""


async def all_answered(
    calls: Sequence[TextCall],
    n_clients: int,
    ask: Callable[[TextCall], Awaitable[object]],
) -> float:
    """Have all calls answered, so many at once; return the seconds until the last."""
    waiting, start_s = deque(calls), time.perf_counter()

    async def client() -> None:
        while waiting:
            await ask(waiting.popleft())

    await asyncio.gather(*(client() for _ in range(n_clients)))
    return time.perf_counter() - start_s


async def rows_of(engine: Engine, call: TextCall) -> Rows:
    """Have an engine answer a call."""
    if call.query is None:
        vectors = await engine.embed(call.texts)
        return [[] if v.embedding is None else v.embedding.tolist() for v in vectors]
    scores = await engine.rerank(call.query, call.texts)
    return [[s.score] for s in sorted(scores, key=lambda s: s.index)]


async def asked_for(engine: Engine, call: TextCall) -> None:
    """Have an engine answer a call, without lists of numbers."""
    if call.query is None:
        await engine.embed(call.texts)
    else:
        await engine.rerank(call.query, call.texts)


@contextmanager
def llama_embed_side(model: str, settings: Mapping[str, Any]) -> Iterator[Do]:
    """Load a `llama_cpp.Llama` for the block, which embeds one call after another."""
    from cbatch.backend.bindings import llama_cpp  # slow to import

    n_threads = settings.get("n_threads") or len(my_cores())
    n_layers = settings.get("n_gpu_layers")
    llama: Any = llama_cpp.Llama(
        model,
        embedding=True,
        n_ctx=0,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        n_gpu_layers=-1 if n_layers is None else n_layers,
        verbose=False,
    )

    def embed(call: TextCall) -> Rows:
        if call.query is not None:
            raise ConfigError("llama-cpp-python cannot rerank: leave this side out")
        rows: Rows = llama.embed(call.texts, normalize=True)
        return rows

    def do(job: Mapping[str, Any]) -> dict[str, Any]:
        if "call" in job:
            return {"rows": embed(TextCall(**job["call"]))}
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for call in job["calls"]:
            embed(TextCall(**call))
        cpu_s = time.process_time() - start_cpu_s
        return {"seconds": time.perf_counter() - start_s, "cpu_s": cpu_s}

    yield do
    llama.close()


def engine_answer(engine: Engine, job: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job of calls with an engine."""
    if "call" in job:
        return {"rows": asyncio.run(rows_of(engine, TextCall(**job["call"])))}
    calls = [TextCall(**call) for call in job["calls"]]
    start_cpu_s = time.process_time()
    seconds = asyncio.run(all_answered(calls, job["n_clients"], partial(asked_for, engine)))
    return {"seconds": seconds, "cpu_s": time.process_time() - start_cpu_s}
