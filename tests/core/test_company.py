"""Options of memory and options of choice beside each other: what an engine gives in company it gives alone."""

from __future__ import annotations

import math
import tempfile
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.backend.fake import FakeBackend, StepCost
from cbatch.core.plan import KvCapabilities
from cbatch.core.span import ANYWHERE, PromptCuts
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import CacheError
from cbatch.messages import BatchPrompt
from cbatch.runtime.validation import EXTENSIBLE
from tests.core.test_equivalence import PROMPTS, memories, schedules
from tests.profiles import examples
from tests.runtime.backends import GatedBackend, ids_in_flight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.batch_response import BatchResponse

N_STEPS = 24
"""Within which everything comes and is cancelled, paused and resumed."""

OF_COMPANY = ("n", "best_of", "cache_key", "save_cache", "timeout_s")
"""Options that make no difference to what one answer says."""


@dataclass(frozen=True)
class Item:
    """A request: its prompt, its options, what befalls it, and how far its answers are extended."""

    prompt: tuple[int, ...]
    options: dict[str, Any]
    arrives: int
    cancel_after: int | None
    pause: tuple[int, int] | None
    """(steps after its arrival, steps until it is resumed)"""
    is_streamed: bool
    extend_by: tuple[int, ...]

    @property
    def n_echoed(self) -> int:
        return len(self.prompt) if self.options.get("echo") else 0

    @property
    def has_logprobs(self) -> bool:
        return bool(self.options.get("logprobs"))

    @property
    def is_scored(self) -> bool:
        return "prompt_logprobs" in self.options or bool(self.n_echoed and self.has_logprobs)

    @property
    def may_be_cut(self) -> bool:
        return self.cancel_after is not None or "timeout_s" in self.options


CUTS = (
    *(ANYWHERE, ANYWHERE, PromptCuts.every(16)),
    *(PromptCuts(8, 16, least=5), PromptCuts(8, 24, least=5, ends_in_row=True)),
)


@dataclass(frozen=True)
class Workload:
    n_slots: int
    n_window: int
    cuts: PromptCuts
    memory: KvCapabilities
    schedule: dict[str, Any]
    seed: int
    is_gated: bool
    items: tuple[Item, ...]


def _rarely(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 5).flatmap(lambda i: values if i == 5 else st.none())


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 4),
    "best_of": st.integers(1, 5),
    "logprobs": st.sampled_from([None, True, 2]),
    "prompt_logprobs": _rarely(st.integers(0, 3)),
    "echo": st.sampled_from([None, None, True]),
    "regex": st.sampled_from([None, None, "0", "1", "1:5", "0:4:6"]),
    "stop": st.sampled_from([None, None, "a", ["e", "é"], "12"]),
    "include_stop": st.booleans(),
    "ignore_eos": st.booleans(),
    "stop_token_ids": _rarely(st.lists(st.integers(0, 300), max_size=20)),
    "dry_multiplier": _rarely(st.just(0.8)),
    "max_tokens": st.none() | st.integers(0, 12) | st.integers(1, 60),
    "adapter": st.sampled_from([None, None, None, "a", "b"]),
    "n_discard": _rarely(st.integers(1, 40)),
    "cache_key": st.sampled_from([None, None, "k", "l"]),
    "save_cache": _rarely(st.just(True)),
    "prefill_only": _rarely(st.just(True)),
    "timeout_s": _rarely(st.integers(0, 30)),
    "seed": st.integers(0, 3),
}


@st.composite
def items(draw: st.DrawFn, memory: KvCapabilities, cuts: PromptCuts) -> Item:
    said = {name: draw(values) for name, values in OPTIONS.items()}
    _leave_out_what_is_refused(said, memory, cuts)
    return Item(
        draw(PROMPTS),
        {name: value for name, value in said.items() if value is not None},
        draw(st.integers(0, 8)),
        draw(_rarely(st.integers(0, 8))),
        draw(_rarely(st.tuples(st.integers(0, 8), st.integers(1, 8)))),
        draw(st.booleans()),
        draw(st.sampled_from([(), (1, 12), (5, 1), (12, 7)])),
    )


def _leave_out_what_is_refused(
    said: dict[str, Any], memory: KvCapabilities, cuts: PromptCuts
) -> None:
    said["best_of"] = max(said["n"], said["best_of"])
    is_scored = said["prompt_logprobs"] is not None or (said["echo"] and said["logprobs"])
    if not memory.can_shift or cuts or is_scored:  # of a prompt that is scored nothing is left out
        said["n_discard"] = None
    if said["n_discard"] and said["max_tokens"] is None:
        said["max_tokens"] = 150
    if not memory.can_save:
        said["cache_key"] = None
    if said["best_of"] > 1:
        said["prefill_only"] = said["save_cache"] = None
    if said["cache_key"] is None:
        said["save_cache"] = None
    if said["max_tokens"] == 0 and not said["echo"] and said["prompt_logprobs"] is None:
        said["max_tokens"] = 1


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n_slots, cuts = draw(st.integers(1, 4)), draw(st.sampled_from(CUTS))
    n_window = draw(st.integers(24, 96))
    memory = draw(memories(n_slots, n_window))
    schedule = draw(schedules(n_slots + 20, memory.kind))
    if cuts:
        schedule.pop("prefill_chunk", None)
    asked = draw(st.lists(items(memory, cuts), min_size=1, max_size=6))
    seed, is_gated = draw(st.integers(0, 5)), draw(st.booleans())
    return Workload(n_slots, n_window, cuts, memory, schedule, seed, is_gated, tuple(asked))


def make_engine(
    workload: Workload, folder: str, n_slots: int, memory: KvCapabilities, schedule: dict[str, Any]
) -> tuple[Engine, FakeBackend]:
    kind = GatedBackend if workload.is_gated else FakeBackend
    backend = kind(
        n_slots,
        workload.n_window,
        n_slots + 20,
        memory=memory,
        seed=workload.seed,
        cost=StepCost(base_s=1.0),
    )
    backend.cuts, backend.adapters = workload.cuts, ("a", "b")
    options = ScheduleOptions(**schedule)
    return Engine(backend, schedule=options, threaded=False, cache_dir=folder), backend


def alone(workload: Workload, item: Item, i_choice: int, **more: Any) -> BatchResult:
    """What a choice gives in an engine of its own."""
    said = {name: value for name, value in item.options.items() if name not in OF_COMPANY}
    said["seed"] += i_choice
    memory = KvCapabilities("partitioned", workload.n_window, can_shift=workload.memory.can_shift)
    with tempfile.TemporaryDirectory() as folder:
        engine, _ = make_engine(workload, folder, 1, memory, {})
        with closing(engine):
            prompt = BatchPrompt(tokens=item.prompt, options={**said, **more})
            [result] = engine.run([prompt]).results(return_errors=True)
    return result


def play(engine: Engine, workload: Workload) -> dict[int, BatchResponse]:
    """Submit the items when they come, and have happen what befalls them."""
    responses: dict[int, BatchResponse] = {}
    for i_step in range(N_STEPS):
        for i, item in enumerate(workload.items):
            after = i_step - item.arrives
            if after == 0 and (response := submitted(engine, i, item)):
                responses[i] = response
            if item.pause and after == item.pause[0]:
                engine.pause(str(i))
            if item.pause and after == sum(item.pause):
                engine.resume(str(i))
            if after == item.cancel_after:
                engine.cancel(str(i))
        engine.step()
    return responses


def submitted(engine: Engine, i: int, item: Item) -> BatchResponse | None:
    """Submit one; None where another is about to save its key."""
    prompt = BatchPrompt(tokens=item.prompt, id=str(i), options=item.options)
    try:
        return engine.run([prompt])
    except CacheError:
        return None


def check_choice(item: Item, found: BatchResult, wanted: BatchResult) -> None:
    if found.finish_reason in ("cancelled", "timeout"):
        check_cut(item, found, wanted)
        return
    assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids)
    assert (found.finish_reason, found.seed) == (wanted.finish_reason, wanted.seed)
    # of choices that are not scored, as only the first is, an error may tell another way out
    assert repr(found.error).partition(":")[0] == repr(wanted.error).partition(":")[0]
    if wanted.error is None:  # in words, for NaN is not equal to itself
        assert repr(found.prompt_logprobs) == repr(wanted.prompt_logprobs)
        assert repr(found.logprobs) == repr(wanted.logprobs)
        used, due = found.usage, wanted.usage
        assert used.prompt_tokens == due.prompt_tokens
        assert used.completion_tokens == due.completion_tokens
        assert used.context_shifts == due.context_shifts


def check_cut(item: Item, found: BatchResult, wanted: BatchResult) -> None:
    """One that was cut off is a beginning, and has all parts that it was asked for."""
    n = len(found.token_ids)
    assert found.token_ids == wanted.token_ids[:n]
    assert (found.logprobs is not None) is item.has_logprobs
    assert found.logprobs is None or len(found.logprobs) == n
    assert (found.prompt_logprobs is not None) is item.is_scored


def check_item(
    workload: Workload, item: Item, result: BatchResult
) -> list[tuple[int, BatchResult]]:
    """Check an item's result; return its choices, with their numbers."""
    n, n_all = item.options["n"], item.options["best_of"]
    choices = result.choices or (result,)
    assert len(choices) == n
    wanted = [alone(workload, item, i) for i in range(n_all)]
    order = [(c.seed - item.options["seed"], c) for c in choices]
    if not item.may_be_cut and n_all > 1:
        assert [i for i, _ in order] == ranked(workload, item)
        n_tokens = sum(r.usage.completion_tokens for r in wanted)
        assert result.usage.completion_tokens == n_tokens
    for i, choice in order:
        check_choice(item, choice, wanted[i])
    return order


def ranked(workload: Workload, item: Item) -> list[int]:
    """The numbers of the choices that are kept, in order."""
    n, n_all = item.options["n"], item.options["best_of"]
    if n == n_all or item.options.get("max_tokens") == 0:
        return [*range(n)]
    # an echo with log-probabilities would score the prompt, which then may not be longer than the window
    told = [alone(workload, item, i, logprobs=True, echo=False) for i in range(n_all)]
    return sorted(range(n_all), key=lambda i: rank(told[i]))[:n]


def rank(result: BatchResult) -> tuple[bool, float]:
    answer = [token.logprob for token in result.logprobs or ()]
    mean = sum(answer) / len(answer) if answer else -math.inf
    return result.error is not None, -mean


def check_chunks(result: BatchResult, chunks: Sequence[BatchOutputChunk]) -> None:
    for i, choice in enumerate(result.choices or (result,)):
        own = [c for c in chunks if c.index == i]
        assert "".join(c.text for c in own) == choice.text
        assert [c.content for c in own] == [c.text for c in own]
        assert tuple(t for c in own for t in c.token_ids) == choice.token_ids
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]


def check_extensions(
    engine: Engine, workload: Workload, item: Item, i_choice: int, part: BatchResult
) -> None:
    """Each longer part is one run with the greater cap, as far as it goes."""
    for n_more in item.extend_by:
        n = len(part.token_ids) - item.n_echoed + n_more
        if not can_extend(part) or len(item.prompt) + n > workload.n_window:
            return
        [part] = engine.extend(part, n_more).results(return_errors=True)
        wanted = alone(workload, item, i_choice, max_tokens=n, prefill_only=False)
        check_choice(item, part, wanted)


def can_extend(result: BatchResult) -> bool:
    return result.error is None and result.finish_reason in EXTENSIBLE


def check_workload(engine: Engine, workload: Workload) -> None:
    responses = play(engine, workload)
    for i in responses:
        engine.resume(str(i))
    for i, response in responses.items():
        item = workload.items[i]
        chunks = list(response) if item.is_streamed else []
        [result] = response.results(return_errors=True)
        if item.is_streamed:
            check_chunks(result, chunks)
        for i_choice, choice in check_item(workload, item, result):
            check_extensions(engine, workload, item, i_choice, choice)
    assert not ids_in_flight(engine)


@given(workloads())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_choice_in_company_is_what_it_is_alone(workload: Workload) -> None:
    with tempfile.TemporaryDirectory() as folder:
        n_slots, memory = workload.n_slots, workload.memory
        engine, backend = make_engine(workload, folder, n_slots, memory, workload.schedule)
        with closing(engine), patch("time.perf_counter", lambda: backend.now_s):
            check_workload(engine, workload)
