"""A side of a comparison in a process of its own: reads a specification and jobs as JSON lines, writes answers.

Sides: `engine` (the engine), `one` (the engine with one slot), `static` (batches that begin together and end together),
`llama` (`llama_cpp.Llama`, one request after another), `Llama.embed`, `bare` (hand-written loops of `llama_decode`, in
rows).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from time import process_time
from typing import TYPE_CHECKING, Any

from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.bench.measured import Arrivals, MeasuredAnswer, WorkRequest
from cbatch.bench.pacing import Ask, Now, Pace, drive
from cbatch.bench.vector_process import engine_answer, llama_embed_side
from cbatch.bench.verdict import N_MOST_LIKELY
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError
from cbatch.loading import load
from cbatch.messages import BatchPrompt
from cbatch.support.taken_cores import my_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cbatch.engine import Engine

    Do = Callable[[Mapping[str, Any]], Mapping[str, Any]]

N_PREFILL = 512
"""Prompt tokens by which the best prompt rate is measured, over up to eight rows. Our choice."""


def options_of(request: WorkRequest) -> dict[str, Any]:
    """Return the options of a request that generates as many tokens as it is told to."""
    return {**request.options, "max_tokens": request.n_output, "ignore_eos": True}


async def ask_engine(
    engine: Engine, request: WorkRequest, sent_s: float, now: Now, *, is_streamed: bool
) -> MeasuredAnswer:
    """Have an engine answer one request."""
    seen = Arrivals(sent_s)
    try:
        response = engine.submit(BatchPrompt(prompt=request.prompt), options=options_of(request))
        if is_streamed:
            async for chunk in response:
                if chunk.token_ids:
                    seen.note(now(), len(chunk.token_ids))
        [result] = await response
    except CBatchError as error:
        return seen.answer(request.id, now(), 0, error=str(error))
    tokens = result.token_ids
    return seen.answer(
        request.id,
        now(),
        len(tokens),
        n_prompt=result.usage.prompt_tokens,
        n_distinct=len(set(tokens)),
        finish=result.finish_reason,
        tokens=tokens,
        text=result.text,
    )


class StaticBatches:
    """Collects requests into batches; each begins when the one before it has ended, with all that came meanwhile."""

    def __init__(self, engine: Engine, n_rows: int, *, is_streamed: bool) -> None:
        self._engine, self._n_rows, self._is_streamed = engine, n_rows, is_streamed
        self._waiting: list[tuple[WorkRequest, float, Now, asyncio.Future[MeasuredAnswer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, request: WorkRequest, sent_s: float, now: Now) -> MeasuredAnswer:
        """Wait for a batch that has room, and return when all of it is answered."""
        answer: asyncio.Future[MeasuredAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, sent_s, now, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # who was answered sends the next request now
            await asyncio.sleep(0)
            batch, self._waiting = self._waiting[: self._n_rows], self._waiting[self._n_rows :]
            answers = await asyncio.gather(
                *(
                    ask_engine(self._engine, request, sent_s, now, is_streamed=self._is_streamed)
                    for request, sent_s, now, _ in batch
                )
            )
            for (*_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        self._task = None


def answers_to(job: Mapping[str, Any], ask: Ask) -> dict[str, Any]:
    """Drive a job, and return its answers as JSON values."""
    chains = [[WorkRequest(**request) for request in chain] for chain in job["chains"]]
    arrivals_s = job["arrivals_s"]
    pace = Pace(job["n_clients"], None if arrivals_s is None else tuple(arrivals_s))
    start_cpu_s = process_time()
    answers, seconds = asyncio.run(drive(chains, pace, ask))
    cpu_s = process_time() - start_cpu_s
    return {
        "answers": [asdict(answer) for answer in answers],
        "seconds": seconds,
        "cpu_s": cpu_s,
    }


def margins_of(engine: Engine, items: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Compute answers again as prompts; return how much likelier each token is than the least that could be drawn.

    Args:
        engine: has the model.
        items: each has `tokens`, prompt and answer; `n_prompt`, how many are the prompt's; `n_likely`, how many of the
            likeliest tokens may be drawn at a place, at most `N_MOST_LIKELY`; and `banned` tokens, which may not.

    Returns:
        A list for each item, with the difference of two natural log-probabilities for each token of the answer.

    Raises:
        CBatchError: an item cannot be computed.
    """
    prompts = [BatchPrompt(tokens=item["tokens"]) for item in items]
    options = {"max_tokens": 0, "prompt_logprobs": N_MOST_LIKELY}
    found = []
    for item, result in zip(items, engine.run(prompts, options=options).results(), strict=True):
        margins, banned = [], set(item["banned"])
        for place in (result.prompt_logprobs or ())[item["n_prompt"] :]:
            if place is None:  # the first token of all has none before it
                continue
            tops = [top.logprob for top in place.top if top.token_id not in banned] or [-math.inf]
            least = tops[: item["n_likely"]][-1]
            margins.append(place.logprob - least if least > -math.inf else 0.0)
        found.append(margins)
    return found


@contextmanager
def engine_side(model: str, settings: Mapping[str, Any], kind: str) -> Iterator[Do]:
    """Load an engine for the block, and answer by it."""
    with load(model, **settings) as engine:

        def do(job: Mapping[str, Any]) -> dict[str, Any]:
            if "call" in job or "calls" in job:
                return engine_answer(engine, job)
            if "scored" in job:
                return {"margins": margins_of(engine, job["scored"])}
            is_streamed = job["is_streamed"]
            if kind == "static":
                return answers_to(
                    job, StaticBatches(engine, job["n_rows"], is_streamed=is_streamed).ask
                )

            async def ask(request: WorkRequest, sent_s: float, now: Now) -> MeasuredAnswer:
                return await ask_engine(engine, request, sent_s, now, is_streamed=is_streamed)

            return answers_to(job, ask)

        yield do


@contextmanager
def llama_side(model: str, settings: Mapping[str, Any]) -> Iterator[Do]:
    """Load a `llama_cpp.Llama` for the block; one thread loads it and answers, since each has its own OpenMP team."""
    from cbatch.backend.bindings import llama_cpp  # slow to import

    options = EngineOptions.of(settings)
    n_threads = options.n_threads or len(my_cores())
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    with ThreadPoolExecutor(1) as thread:
        make = thread.submit(
            llama_cpp.Llama,
            model,
            n_ctx=options.ctx_per_seq or 0,
            n_gpu_layers=options.n_gpu_layers if options.n_gpu_layers is not None else -1,
            verbose=False,
            **threads,
        )
        llama: Any = make.result()

        async def ask(request: WorkRequest, sent_s: float, now: Now) -> MeasuredAnswer:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(thread, _generate, llama, request, sent_s, now)

        yield lambda job: answers_to(job, ask)
        thread.submit(llama.close).result()


def _generate(llama: Any, request: WorkRequest, sent_s: float, now: Now) -> MeasuredAnswer:
    """Answer one request, as many tokens as it wants: its generator does not stop at the model's end tokens."""
    from cbatch.backend.bindings import llama_cpp

    seen, tokens = Arrivals(sent_s), list[int]()
    options = dict(request.options)
    schema = options.pop("json_schema", None)
    try:
        if schema is not None:
            options["grammar"] = llama_cpp.LlamaGrammar.from_json_schema(
                json.dumps(schema), verbose=False
            )
        llama.set_seed(options.pop("seed", 0))
        prompt = llama.tokenize(request.prompt.encode(), add_bos=True, special=True)
        names = {"temperature": "temp", "repeat_penalty": "repeat_penalty"}
        chain = {names.get(name, name): value for name, value in options.items()}
        for token in llama.generate(prompt, **{"repeat_penalty": 1.0, **chain}):
            tokens.append(token)
            seen.note(now())
            if len(tokens) == request.n_output:
                break
    except Exception as error:  # llama-cpp-python raises what it likes, and a round must go on
        return seen.answer(request.id, now(), len(tokens), error=f"{type(error).__name__}: {error}")
    return seen.answer(
        request.id,
        now(),
        len(tokens),
        n_prompt=len(prompt),
        n_distinct=len(set(tokens)),
        finish="length",
        tokens=tuple(tokens),
    )


@contextmanager
def bare_side(model: str, settings: Mapping[str, Any]) -> Iterator[Do]:
    """Open the weights for the block, and run loops of `llama_decode` alone."""
    from cbatch.backend.llama.log import llama_log  # llama_cpp is slow to import
    from cbatch.backend.load.open_model import open_model
    from cbatch.bench.bare import BareLoop

    kept = ("cache_type_k", "cache_type_v", "flash_attn", "n_threads", "n_gpu_layers")
    own = {name: settings[name] for name in kept if name in settings}
    llama_log().install()
    with closing(open_model(model, EngineOptions.of(own))) as opened:

        def options(n_rows: int, n_window: int) -> EngineOptions:
            return EngineOptions.of({**own, "parallel": n_rows, "ctx_per_seq": n_window})

        def do(job: Mapping[str, Any]) -> dict[str, Any]:
            n_rows, n_steps = job["n_rows"], job["n_steps"]
            if job["is_prefill"]:
                n_own = max(1, N_PREFILL // n_rows)
                ids, chance = range(FIRST_TOKEN, opened.vocab.n_vocab), random.Random(1)
                owns = [chance.choices(ids, k=n_own) for _ in range(n_rows)]
                with closing(BareLoop(opened, options(n_rows, n_own + 8))) as loop:
                    loop.run((), owns, 1)  # warms up
                    return {"n_tokens": n_own * n_rows, "seconds": loop.run((), owns, 1)}
            with closing(BareLoop(opened, options(n_rows, n_steps + 8))) as rows:
                rows.decode(min(n_steps, 4))
                return {"n_tokens": n_rows * n_steps, "seconds": rows.decode(n_steps)}

        yield do


@contextmanager
def told() -> Iterator[None]:
    """Print an error of the block, which ends it."""
    try:
        yield
    except (CBatchError, ValueError, OSError) as error:
        emit(error=str(error))


def main() -> None:
    """Load what the first line asks for, say that it is ready, and do a job for each line."""
    spec = json.loads(sys.stdin.readline())
    model, settings, kind = spec["model"], spec["settings"], spec["kind"]
    sides = {"llama": llama_side, "bare": bare_side, "Llama.embed": llama_embed_side}
    with ExitStack() as stack, told():
        if kind in sides:
            do = stack.enter_context(sides[kind](model, settings))
        else:
            do = stack.enter_context(engine_side(model, settings, kind))
        emit(ready=True)
        for line in sys.stdin:
            with told():
                emit(**do(json.loads(line)))


if __name__ == "__main__":
    main()
