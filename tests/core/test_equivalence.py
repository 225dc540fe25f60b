"""Every stream is what it would be alone, whatever the company, the cuts, the cancels and the failures."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.backend.fake import fake_logprobs
from cbatch.core.driver import Status
from cbatch.core.plan import KvCapabilities, TokenLogprobs
from cbatch.core.span import ANYWHERE, N_TARGETS_MAX, PromptCuts
from cbatch.engine_options import Policy
from cbatch.errors import (
    DeadlineError,
    DecodeError,
    GrammarError,
    PromptTooLongError,
    RequestCancelledError,
    RequestFailedError,
)
from cbatch.options import RunOptions
from cbatch.response import BatchResult
from cbatch.runtime.validation import EXTENSIBLE
from tests.helpers import (
    Rig,
    constraint_of,
    drive,
    is_complete,
    make_request,
    make_scheduler,
    step,
    tokenize,
)
from tests.oracle.fake_streams import rolled, scores_alone
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cbatch.core.request import Request
    from cbatch.core.span import Span
    from cbatch.response import FinishReason, TokenLogprob

CODES = (1, -1, 2, -2, -3)
Kind = Literal["partitioned", "unified", "recurrent"]
KINDS: list[Kind] = ["partitioned", "unified", "unified", "recurrent"]


@dataclass(frozen=True)
class Item:
    """One request of a workload: what is asked, when it comes, and what befalls it."""

    prompt: tuple[int, ...]
    arrives: int
    seed: int
    cap: int | None
    ignore_eos: bool
    include_stop: bool
    is_strict: bool
    stop_token_at: int | None
    stop_text_at: tuple[tuple[int, int], ...]
    cancel_after: int | None
    broken_at: int | None
    guilty_at: int | None
    guilty_code: int
    priority: int
    timeout_s: float | None
    pauses: tuple[tuple[int, int], ...]
    """(plans after its arrival, plans until it is resumed)"""
    adapter: str | None = None
    salt: str | None = None
    prefill_only: bool = False
    moves: tuple[int, int] | None = None
    """(n_keep, n_discard): a window that moves on."""
    cache_key: str | None = None
    save_cache: bool = False
    extend_by: int | None = None
    regex: str | None = None
    """A constraint of the fake backend, or a bad one."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int | None = None
    echo: bool = False
    slot: int | None = None
    """A slot of its own choosing, modulo their number."""
    pause_every: int | None = None
    is_processed: bool = False
    """Whether it has a processor of logits."""

    @property
    def grammar(self) -> str | None:
        """Its constraint; not where failures are placed: what is forced is there before it is computed."""
        is_placed = self.broken_at is not None or self.guilty_at is not None
        return None if is_placed else self.regex

    @property
    def window(self) -> tuple[int, int] | None:
        """How its window moves; not where failures are placed by positions in it."""
        is_placed = self.broken_at is not None or self.guilty_at is not None
        return None if is_placed or self.cap is None or self.prefill_only else self.moves


CUTS = (
    *(ANYWHERE, ANYWHERE, PromptCuts.every(4), PromptCuts.every(16)),
    *(PromptCuts(4, 16, least=1), PromptCuts(4, 16, least=3), PromptCuts(8, 16, least=8)),
    *(PromptCuts(4, 16, n, ends_in_row=True) for n in (2, 4)),
)


@dataclass(frozen=True)
class Workload:
    n_slots: int
    n_window: int
    n_batch: int
    n_vocab: int
    seed: int
    items: tuple[Item, ...]
    faults: tuple[int, ...]
    interrupts: tuple[bool, ...]
    memory: KvCapabilities
    options: dict[str, Any]
    cuts: PromptCuts
    lost_keys: frozenset[int]
    n_targets: int
    """How many a step can score."""
    copy_s: float
    """What a cell takes that is copied from slot to slot, where a step takes a second."""


@dataclass(frozen=True)
class Outcome:
    """What a request gives alone: its tokens and text as reported, and how many were sampled."""

    reason: FinishReason
    tokens: tuple[int, ...]
    text: str
    n_sampled: int


def _rarely(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.integers(0, 7).flatmap(lambda i: values if i == 7 else st.none())


ALIKE = st.builds(  # several of these have a long beginning in common
    lambda n, end: (*range(n), *end),
    st.integers(30, 60),
    st.lists(st.integers(0, 2), max_size=3),
)
PROMPTS = st.lists(st.integers(0, 255), min_size=1, max_size=20).map(tuple) | ALIKE | ALIKE

ITEMS = st.builds(
    Item,
    prompt=PROMPTS,
    arrives=st.sampled_from([0, 1, 6]) | st.integers(0, 12),
    seed=st.integers(0, 3),
    cap=st.one_of(st.none(), st.integers(1, 12), st.integers(1, 40), st.integers(40, 150)),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
    is_strict=st.booleans(),
    stop_token_at=_rarely(st.integers(0, 12)),
    stop_text_at=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=2).map(tuple),
    cancel_after=_rarely(st.integers(0, 6)),
    broken_at=_rarely(st.integers(0, 8)),
    guilty_at=_rarely(st.integers(-8, 8)),
    guilty_code=st.sampled_from(CODES),
    priority=st.integers(-3, 3),
    timeout_s=_rarely(st.integers(0, 30)),
    pauses=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=2).map(tuple),
    adapter=st.sampled_from([None, None, None, "a", "b"]),
    salt=st.sampled_from([None, None, "a", "b"]),
    prefill_only=st.integers(0, 7).map(lambda i: i == 7),
    moves=st.none() | st.tuples(st.integers(0, 70), st.integers(1, 100)),
    cache_key=st.sampled_from([None, None, "k", "l"]),
    save_cache=st.booleans(),
    extend_by=_rarely(st.integers(1, 8)),
    regex=st.sampled_from([None, None, None, "0", "1", "1:5", "0:4:6", "1:3:9", "x"]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0, 3]),
    prompt_logprobs_start=st.sampled_from([None, None, 1, 2, 5, 9, 70]),
    echo=st.sampled_from([False, False, True]),
    slot=st.sampled_from([None, None, None]) | st.integers(0, 4),
    pause_every=_rarely(st.integers(1, 9)),
    is_processed=st.sampled_from([False, False, True]),
)


@st.composite
def schedules(draw: st.DrawFn, n_batch: int, kind: str) -> dict[str, Any]:
    policy = draw(st.sampled_from(get_args(Policy)))
    said: dict[str, Any] = {"policy": policy, "swap_mib": draw(st.sampled_from([0, 1, 1024]))}
    said["checkpoint_mib"] = draw(st.sampled_from([0, 1, 1024]))
    said["share_prefixes"] = draw(st.sampled_from([True, True, True, False]))
    said["speculate"] = draw(st.sampled_from(["off", "auto"]))
    if policy == "round_robin":
        said["quantum"] = draw(st.integers(1, 12))
    if policy == "priority":
        said["ageing_s"] = draw(st.sampled_from([0.5, 3.0]))
    if kind == "unified":
        said["admission"] = draw(st.sampled_from([None, "reserve", "optimistic"]))
    limits: dict[str, st.SearchStrategy[float]] = {
        "prefill_chunk": st.integers(1, n_batch),
        "prefill_budget": st.integers(1, n_batch),
        "itl_ms": st.floats(500, 5000),
    }
    name = draw(st.sampled_from([None, None, *limits]))
    return said if name is None else {**said, name: draw(limits[name])}


@st.composite
def memories(draw: st.DrawFn, n_slots: int, n_window: int) -> KvCapabilities:
    can_save = draw(st.sampled_from([True, True, False]))
    kind: Kind = draw(st.sampled_from(KINDS))
    can_trim = kind != "recurrent" and draw(st.sampled_from([True, True, True, False]))
    n_cells = (
        draw(st.integers(n_window, n_slots * n_window)) if kind == "unified" else n_window * n_slots
    )
    return KvCapabilities(
        kind,
        n_cells,
        can_trim=can_trim,
        can_draft=can_trim,
        can_save=can_save,
        can_copy=can_trim and draw(st.sampled_from([True, True, True, False])),
        can_shift=can_trim,
        saved_bytes=draw(st.sampled_from([64, 2**19])),
        saved_bytes_per_cell=1024,
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n_slots = draw(st.integers(1, 5))
    n_window = draw(st.integers(12, 64) | st.integers(64, 96) | st.integers(90, 128))
    cuts = draw(st.sampled_from(CUTS))
    n_least = n_slots + max(0, cuts.n_room - 1)  # room for a chunk beside the rows of all others
    n_batch = draw(st.integers(n_least, n_least + 2) | st.integers(n_least, n_least + 20))
    memory = draw(memories(n_slots, n_window))
    options = draw(schedules(n_batch, memory.kind))
    if cuts:
        options.pop("prefill_chunk", None)
    return Workload(
        n_slots=n_slots,
        n_window=n_window,
        n_batch=n_batch,
        memory=memory,
        options=options,
        cuts=cuts,
        n_targets=draw(st.sampled_from([1, 5, 12, N_TARGETS_MAX])),
        copy_s=draw(st.sampled_from([0.0, 0.02, 1.0])),
        lost_keys=draw(st.frozensets(st.integers(0, 6), max_size=2)),
        n_vocab=draw(st.sampled_from([257, 300, 4096])),
        seed=draw(st.integers(0, 5)),
        items=tuple(draw(st.lists(ITEMS, min_size=draw(st.sampled_from([1, 8])), max_size=12))),
        faults=tuple(
            draw(st.lists(st.one_of(st.just(0), st.just(0), st.sampled_from(CODES)), max_size=40))
        ),
        interrupts=tuple(draw(st.lists(st.booleans(), max_size=10))),
    )


class Trouble:
    """Fails steps: on schedule, but never a sequence twice in a row; and always where a guilty item computes."""

    def __init__(self, workload: Workload) -> None:
        self.rig: Rig
        self.workload = workload
        self.n_calls = 0
        self.n_faults = 0
        self.shaken: set[str] = set()

    def code(self, chunks: Sequence[Span]) -> int:
        i, self.n_calls = self.n_calls, self.n_calls + 1
        if i < len(self.workload.interrupts) and self.workload.interrupts[i]:
            self.rig.backend.interrupt()
        code = self._guilty_code(chunks) or self._transient_code(i, chunks)
        ids = {c.slot: self._id(c) for c in chunks}
        if code:
            self.n_faults += 1
            self.shaken.update(ids.values())
        else:
            self.shaken -= {ids[c.slot] for c in chunks if c.has_output}
        return code

    def broken(self, chunk: Span) -> bool:
        at = self._item(chunk).broken_at
        return at is not None and self._i_output(chunk) >= at

    def _guilty_code(self, chunks: Sequence[Span]) -> int:
        for chunk in chunks:
            item = self._item(chunk)
            if item.guilty_at is not None and self._i_output(chunk) >= item.guilty_at:
                return item.guilty_code
        return 0

    def _transient_code(self, i: int, chunks: Sequence[Span]) -> int:
        if i >= len(self.workload.faults) or any(self._id(c) in self.shaken for c in chunks):
            return 0
        return self.workload.faults[i]

    def _id(self, chunk: Span) -> str:
        plan = self.rig.in_run
        assert plan is not None
        by_slot = {c.slot: d for c, d in zip(plan.step.spans, plan.rows, strict=True)}
        return by_slot[chunk.slot].request.id

    def _item(self, chunk: Span) -> Item:
        return self.workload.items[int(self._id(chunk).rstrip("+"))]

    def _i_output(self, chunk: Span) -> int:
        return chunk.start + len(chunk.inputs) - len(self._item(chunk).prompt)


def build(workload: Workload) -> tuple[Rig, Trouble, list[Request]]:
    trouble = Trouble(workload)
    rig = trouble.rig = make_scheduler(
        workload.n_slots,
        workload.n_window,
        workload.n_batch,
        n_vocab=workload.n_vocab,
        seed=workload.seed,
        code=trouble.code,
        broken=trouble.broken,
        swap=lambda key: key not in workload.lost_keys,
        memory=workload.memory,
        cuts=workload.cuts,
        adapters=("a", "b"),
        copy_s=workload.copy_s,
        **workload.options,
    )
    return rig, trouble, [_request(rig, str(i), item) for i, item in enumerate(workload.items)]


def _request(rig: Rig, id: str, item: Item) -> Request:
    """Return an item's request; its stops are cut from the stream that it gives without them."""
    said: dict[str, Any] = {"adapter": item.adapter, "regex": item.grammar, "cache_salt": item.salt}
    if item.is_processed:
        said["logits_processor"] = rolled
    if item.window and rig.backend.memory.can_shift and not rig.backend.cuts:
        said["n_keep"], said["n_discard"] = item.window
    plain = make_request(id, item.prompt, seed=item.seed, ignore_eos=True, **said)
    stream = rig.alone(plain, 16)
    text = _text(rig, stream).replace("\ufffd", "")
    stops = [s for i, n in item.stop_text_at if (s := text[i : i + n])]
    at = item.stop_token_at
    return make_request(
        id,
        item.prompt,
        seed=item.seed,
        max_tokens=item.cap,
        ignore_eos=item.ignore_eos,
        include_stop=item.include_stop,
        strict_max_tokens=item.is_strict,
        stop=stops,
        stop_token_ids=stream[at : at + 1] if at is not None else [],
        priority=item.priority,
        timeout_s=item.timeout_s,
        logprobs=item.logprobs,
        prompt_logprobs=item.prompt_logprobs,
        prompt_logprobs_start=item.prompt_logprobs_start,
        echo=item.echo,
        slot=None if item.slot is None else item.slot % rig.backend.n_slots,
        pause_every=item.pause_every,
        prefill_only=item.prefill_only,
        cache_key=item.cache_key if rig.backend.memory.can_save else None,
        save_cache=item.save_cache and rig.backend.memory.can_save and item.cache_key is not None,
        **said,
    )


def _text(rig: Rig, tokens: Sequence[int]) -> str:
    return b"".join(map(rig.backend.vocab.piece, tokens)).decode("utf-8", "replace")


def alone(rig: Rig, request: Request) -> Outcome:
    """Return what a request gives alone, by looking at all of its bytes again after every token."""
    options = request.options
    if options.prefill_only:
        return Outcome("length", (), "", 0)
    n_room = rig.backend.n_window - len(tokenize(rig.backend, request.prompt))
    cap = options.max_tokens or n_room
    if not options.n_discard:
        cap = min(cap, n_room)
    stream = rig.alone(request, cap)
    for n in range(1, len(stream) + 1):
        is_end = stream[n - 1] in request.stop_tokens
        given = stream[: n - (is_end and not options.include_stop)]
        data = b"".join(map(rig.backend.vocab.piece, given))
        ends = [
            (i + len(s.encode()), -len(s.encode()))
            for s in options.stop or ()
            if (i := data.find(s.encode())) >= 0
        ]
        if ends:
            end, minus_n = min(ends)
            data = data[: end if options.include_stop else end + minus_n]
        if ends or is_end:
            return Outcome("stop", tuple(given), data.decode("utf-8", "replace"), n)
    constraint = constraint_of(request)
    if constraint is not None and is_complete(constraint, stream):
        return Outcome("stop", tuple(stream), _text(rig, stream), len(stream))
    if len(stream) < cap:  # it cannot be followed
        return Outcome("error", tuple(stream), _text(rig, stream), len(stream))
    reason: FinishReason = "length" if cap == options.max_tokens else "window"
    return Outcome(reason, tuple(stream), _text(rig, stream), len(stream))


def check_logprobs(request: Request, result: BatchResult) -> None:
    n_top, found = request.n_logprobs, result.logprobs
    if n_top is None or found is None:
        assert (found, n_top) == (None, None)
        return
    told = [*map(_raw, found)]
    assert [t.token_id for t in found] == list(result.token_ids)
    assert told == [fake_logprobs(token, n_top) for token in result.token_ids]


def check_prompt_logprobs(rig: Rig, request: Request, item: Item, result: BatchResult) -> None:
    n_top, found = request.options.n_prompt_logprobs, result.prompt_logprobs
    if n_top is None or found is None:
        assert n_top is None
        assert found is None
        return
    if not (rig.drivers[request.id].has_run or request.prompt_logprobs):
        assert found == ()
        return
    told = [*map(_raw, filter(None, found))]
    n_shown = n_top if item.prompt_logprobs is None else item.prompt_logprobs
    n_before = min((item.prompt_logprobs_start or 1), len(item.prompt))
    wanted = scores_alone(rig.backend, item.prompt, n_shown, request.adapters)[n_before - 1 :]
    assert told == wanted[: len(told)]
    assert list(found[:n_before]) == [None] * n_before
    assert list(found[len(told) + n_before :]) == [None] * (len(wanted) - len(told))
    assert len(told) == len(wanted) or result.finish_reason in ("cancelled", "timeout", "error")


def _raw(told: TokenLogprob) -> TokenLogprobs:
    return TokenLogprobs(told.logprob, tuple((o.token_id, o.logprob) for o in told.top))


def without_echo(rig: Rig, request: Request, item: Item, result: BatchResult) -> BatchResult:
    """Return the answer alone, once the prompt before it is checked."""
    if not (request.options.echo and rig.drivers[request.id].has_run):
        return result
    n, text = len(item.prompt), _text(rig, item.prompt)
    assert result.token_ids[:n] == item.prompt
    assert result.text.startswith(text)
    if result.logprobs is not None:
        n_top = request.n_logprobs or 0
        assert [t.token_id for t in result.logprobs[:n]] == list(item.prompt)
        wanted = (None, *scores_alone(rig.backend, item.prompt, n_top, request.adapters))
        found = result.prompt_logprobs or (None,) * n
        for told, known, score in zip(result.logprobs, found, wanted, strict=False):
            assert _raw(told) == score if known else math.isnan(told.logprob)
    return replace(
        result,
        token_ids=result.token_ids[n:],
        text=result.text[len(text) :],
        logprobs=result.logprobs and result.logprobs[n:],
    )


def check_result(rig: Rig, request: Request, item: Item, result: BatchResult) -> None:
    check_prompt_logprobs(rig, request, item, result)
    result = without_echo(rig, request, item, result)
    check_logprobs(request, result)
    n_prompt = len(item.prompt)
    if result.finish_reason in ("cancelled", "timeout"):
        _check_cut_short(rig, request, result)
        return
    options = request.options
    if item.grammar == "x" and isinstance(result.error, GrammarError):
        assert not rig.drivers[request.id].has_run
        return
    assert item.grammar != "x" or isinstance(result.error, PromptTooLongError)
    n_next = 1 + (0 if options.n_discard else len(request.output))  # one more than it goes on from
    n_least = 0 if options.prefill_only else min(n_next, options.max_tokens or n_next)
    if options.strict_max_tokens and not (options.prefill_only or options.n_discard):
        n_least = options.max_tokens or 1
    n_keep = 1 if options.n_keep is None else options.n_keep
    n_keep = n_prompt if n_keep < 0 else n_keep
    slides = options.n_discard and not options.prefill_only and request.n_prompt_logprobs is None
    slides = slides and n_keep <= rig.backend.n_window - 2
    if n_prompt + n_least > rig.backend.n_window and not slides:
        assert isinstance(result.error, PromptTooLongError)
        assert (result.error.n_prompt, result.error.n_limit) == (n_prompt, rig.backend.n_window)
        return
    whole = alone(rig, request)
    broken_at = None if options.prefill_only else item.broken_at  # it has no row to be broken
    ends = [max(0, k) for k in (broken_at, item.guilty_at) if k is not None]
    if ends and min(ends) < whole.n_sampled + bool(options.prefill_only):
        tokens = whole.tokens[: min(ends)]
        assert isinstance(result.error, RequestFailedError)
        is_guilty = item.guilty_at is not None and max(0, item.guilty_at) == min(ends)
        if is_guilty:
            assert isinstance(result.error.__cause__, DecodeError)
            assert result.error.__cause__.code == item.guilty_code
        whole = Outcome("error", tokens, _text(rig, tokens), len(tokens))
    elif whole.reason == "error":
        assert isinstance(result.error, GrammarError)
    assert result.finish_reason == whole.reason
    assert result.token_ids == whole.tokens
    assert result.text == whole.text
    assert result.usage.prompt_tokens == n_prompt
    assert result.usage.completion_tokens == whole.n_sampled


def _check_cut_short(rig: Rig, request: Request, result: BatchResult) -> None:
    has_run = rig.drivers[request.id].has_run
    kind = RequestCancelledError if result.finish_reason == "cancelled" else DeadlineError
    assert isinstance(result.error, kind) != has_run
    if not has_run:
        assert (result.token_ids, result.text) == ((), "")
        return
    whole = alone(rig, request)
    assert len(result.token_ids) <= whole.n_sampled
    assert result.token_ids == whole.tokens[: len(result.token_ids)]
    assert result.text == _text(rig, result.token_ids)


@contextmanager
def short_limits(n_targets: int) -> Iterator[None]:
    """Have steps score no more than so many: prompts here are short."""
    with ExitStack() as stack:
        for place in ("core.scheduler", "core.span", "backend.fake.fake_backend"):
            stack.enter_context(patch(f"cbatch.{place}.N_TARGETS_MAX", n_targets))
        yield


def play(workload: Workload, *, is_watched: bool = False) -> tuple[Rig, list[Request]]:
    """Run a workload to its end: arrivals, cancels and pauses by the number of plans."""
    rig, _, requests = build(workload)
    rig.is_watched = is_watched
    todo = sorted(_happenings(rig, workload, requests), key=lambda happening: happening[0])
    for i_plan in range(todo[-1][0] + 1):
        while todo and todo[0][0] == i_plan:
            todo.pop(0)[1]()
        step(rig)
    drive(rig, before=_resume_all)
    return rig, requests


def _resume_all(rig: Rig) -> None:
    for id, driver in rig.batcher.in_flight.items():
        if driver.status is Status.PAUSED:
            rig.batcher.resume(id)


def _happenings(
    rig: Rig, workload: Workload, requests: Sequence[Request]
) -> Iterator[tuple[int, Callable[[], object]]]:
    """Yield (number of plans, what happens before the next)."""
    for request, item in zip(requests, workload.items, strict=True):
        yield item.arrives, partial(rig.submit, request)
        if item.cancel_after is not None:
            yield item.arrives + item.cancel_after, partial(_cancel, rig, request.id)
        for after, n_paused in item.pauses:
            yield item.arrives + after, partial(_pause, rig, request.id)
            yield item.arrives + after + n_paused, partial(rig.batcher.resume, request.id)
        yield item.arrives + 20, partial(rig.batcher.resume, request.id)


def _cancel(rig: Rig, id: str) -> None:
    in_flight = id in rig.batcher.in_flight
    assert rig.cancel(id) is in_flight
    assert rig.cancel(id) is False


def _pause(rig: Rig, id: str) -> None:
    if rig.batcher.pause(id):
        assert rig.batcher.pause(id) is False


def extensions(
    rig: Rig, workload: Workload, requests: Sequence[Request]
) -> Iterator[tuple[Request, Item]]:
    """Yield requests that go on from those that ended by their cap, by a cancel or for want of time."""
    for request, item in zip(requests, workload.items, strict=True):
        result = rig.results[request.id]
        is_open = result.error is None and result.finish_reason in EXTENSIBLE
        if item.extend_by is None or not is_open:
            continue
        n_prompt = len(item.prompt)
        n_echoed = n_prompt if item.echo and rig.drivers[request.id].has_run else 0
        n_all = len(result.token_ids) - n_echoed + item.extend_by
        said = RunOptions(max_tokens=n_all, prefill_only=False, timeout_s=None, priority=0)
        yield (
            replace(
                request,
                id=f"{request.id}+",
                options=said.over(replace(request.options, timeout_s=None)),
                deadline_s=math.inf,
                output=result.token_ids[n_echoed:],
                output_logprobs=(result.logprobs or ())[n_echoed:],
                **known_of(request.options, result, n_prompt),
                continues=rig.drivers[request.id].number,
            ),
            replace(item, cap=n_all, prefill_only=False),
        )


def known_of(options: RunOptions, result: BatchResult, n_prompt: int) -> dict[str, Any]:
    """Return what a request that goes on from a result need not score again: all of its prompt or nothing."""
    found = result.prompt_logprobs
    if not found or sum(told is not None for told in found) < n_prompt - 1:
        return {}
    if options.prompt_logprobs != options.n_prompt_logprobs:  # the echo has more
        found = (None, *(result.logprobs or ())[1:n_prompt])
    return {"n_prompt_logprobs": None, "prompt_logprobs": found}


@given(workloads())
@settings(max_examples=examples(1800), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_workload_gives_every_request_its_solo_stream(workload: Workload) -> None:
    with short_limits(workload.n_targets):
        rig, requests = play(workload)
        for request, item in zip(requests, workload.items, strict=True):
            check_result(rig, request, item, rig.results[request.id])
        more = [*extensions(rig, workload, requests)]
        rig.submit(*(request for request, _ in more))
        drive(rig, before=_resume_all)
        for request, item in more:
            check_result(rig, request, item, rig.results[request.id])


def values_of(results: Mapping[str, BatchResult]) -> dict[str, list[str]]:
    """The values of results as text: errors are equal in words alone."""
    shown = [f.name for f in fields(BatchResult) if f.repr]
    return {id: [repr(getattr(result, name)) for name in shown] for id, result in results.items()}


@given(workloads())
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_same_workload_twice_gives_the_same_plans_and_results(workload: Workload) -> None:
    with short_limits(workload.n_targets):
        first, second = play(workload)[0], play(workload)[0]
    assert first.backend.plans == second.backend.plans
    assert values_of(first.results) == values_of(second.results)
    assert first.chunks == second.chunks


@given(workloads())
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_plan_twice_is_the_same_plan_and_changes_nothing(workload: Workload) -> None:
    with short_limits(workload.n_targets):
        play(workload, is_watched=True)  # which compares before and after each plan
