"""The window of a slot: what fits it to the last token, and what goes on when it is full."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeBackend, Faults
from cbatch.core.plan import Binding, KvCapabilities, Slot
from cbatch.core.span import PromptCuts
from cbatch.engine import Engine
from cbatch.errors import CacheError, ConfigError, PromptTooLongError
from cbatch.messages import BatchPrompt
from cbatch.options import Sampling
from tests.kinds import Reason, each_kind, engine_on, no_pool, thread_only
from tests.oracle.fake_streams import MovingContext, stream_alone
from tests.places import (
    ENDLESS,
    Place,
    expected,
    expects_little,
    first_chunk,
    item,
    plans_of,
    steps,
    text_of,
)
from tests.runtime.backends import (
    GatedBackend,
    batcher_of,
    find_pool_full,
    ids_in_flight,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.response import BatchResult

pytestmark = each_kind

W = 128


def moving(
    tokens: Sequence[int],
    n: int,
    *,
    n_discard: int,
    n_keep: int = 1,
    n_window: int = W,
    seed: int = 1,
) -> tuple[int, ...]:
    """What a prompt gives alone where `n_discard` tokens behind the first `n_keep` go when the window is full."""
    backend, output = FakeBackend(1), list[int]()
    context = MovingContext(backend, tokens, n_keep, n_discard, n_window)
    while len(output) < n:
        i_output = len(context.cells) - len(output)
        binding = Binding(Slot(0), i_output, Sampling(seed=seed), (), (*tokens, *output))
        output += stream_alone(backend, context.cells, binding, 1)
        context.append(output[-1])
    return tuple(output)


def n_moves(n_prompt: int, n_output: int, n_discard: int, n_window: int = W) -> int:
    """How often a window is full before `n_output` tokens are sampled."""
    return max(0, -(-(n_prompt + n_output - 1 - n_window) // n_discard))


def pool(n_cells: int, *, can_save: bool = True) -> KvCapabilities:
    return KvCapabilities(
        "unified",
        n_cells,
        can_save=can_save,
        can_copy=True,
        can_shift=True,
        saved_bytes_per_cell=1024,
    )


# ---- what fits ----


def too_long(result: BatchResult) -> tuple[int, int, int]:
    error = result.error
    assert isinstance(error, PromptTooLongError)
    assert all(f"{n}" in str(error) for n in (error.n_prompt, error.n_limit))
    return error.n_prompt, error.n_output, error.n_limit


@pytest.mark.parametrize("chunk_alignment", [0, 16])
def test_window_full_of_prompt_is_refused_with_the_numbers(
    any_way: Place, chunk_alignment: int
) -> None:
    engine = any_way.engine(n_window=W, cuts=PromptCuts.every(chunk_alignment))
    items = [item(text_of(W), max_tokens=cap) for cap in (None, 1, 7)]
    results = any_way.results(engine.run(items))
    assert [too_long(r) for r in results] == [(W, 1, W)] * 3
    assert engine.stats().n_steps == 0


def test_window_full_of_prompt_alone_fits_and_one_more_does_not(any_way: Place) -> None:
    engine = any_way.engine(n_window=W)
    items = [item(text_of(n), prefill_only=True) for n in (W, W + 1, 3 * W)]
    fits, *late = any_way.results(engine.run(items))
    assert (fits.finish_reason, fits.usage.prompt_tokens) == ("length", W)
    assert [too_long(r) for r in late] == [(W + 1, 0, W), (3 * W, 0, W)]
    assert engine.stats().n_prompt_tokens == W


@pytest.mark.parametrize("cap", [1, W - 1])
def test_prompt_and_cap_fill_the_window_and_a_greater_cap_gives_way(
    any_way: Place, cap: int
) -> None:
    engine, tokens = any_way.engine(n_window=W), text_of(W - cap)
    fits = any_way.result(engine, tokens, max_tokens=cap, strict_max_tokens=True)
    assert (fits.finish_reason, fits.token_ids) == ("length", expected(tokens, cap))
    assert fits.warnings == ()
    more = any_way.result(engine, tokens, max_tokens=cap + 1)
    assert (more.finish_reason, more.token_ids) == ("window", fits.token_ids)
    assert more.warnings == (
        f"max_tokens is {cap}, not {cap + 1}: the prompt has {W - cap} tokens and the window {W}",
    )
    late = any_way.result(engine, tokens, max_tokens=cap + 1, strict_max_tokens=True)
    assert too_long(late) == (W - cap, cap + 1, W)


def test_strict_cap_of_the_greatest_number_is_refused_alone(
    any_way: Place,
) -> None:
    engine = any_way.engine(n_window=W)
    greatest: dict[str, Any] = {"max_tokens": 2**31 - 1, "strict_max_tokens": True}
    items = [item(text_of(9)), item(text_of(9), **greatest), item(text_of(9, 3))]
    first, late, last = any_way.results(engine.run(items))
    assert too_long(late) == (9, 2**31 - 1, W)
    assert [first.token_ids, last.token_ids] == [expected(text_of(9)), expected(text_of(9, 3))]
    with pytest.raises(ConfigError, match="max_tokens"):
        engine.submit(item(text_of(9), max_tokens=2**31))


def test_texts_chats_and_generators_are_measured_alike(any_way: Place) -> None:
    engine = any_way.engine(n_window=W)
    prompts: list[Any] = ["x" * (W - 5), [{"role": "user", "content": "x" * W}], "x" * (W - 6)]
    for given in (prompts, iter(prompts)):
        late, chat, fits = any_way.results(engine.run(given, options={"strict_max_tokens": True}))
        assert too_long(late) == (W - 5, 6, W)
        assert too_long(chat) == (W + 5, 6, W)
        assert fits.finish_reason == "length"


def test_window_is_as_long_for_what_a_cache_begins(any_way: Place) -> None:
    saved: dict[str, Any] = {"cache_key": "k", "save_cache": True}
    read: dict[str, Any] = {"cache_key": "k", "cache_required": True}
    first = any_way.engine(n_window=W)
    any_way.result(first, text_of(W), **saved, prefill_only=True)
    first.close()
    engine = any_way.engine(n_window=W)
    assert too_long(any_way.result(engine, text_of(W), **read)) == (W, 1, W)
    again = any_way.result(engine, text_of(W), **read, prefill_only=True)
    assert (again.finish_reason, again.usage.cached_tokens) == ("length", W - 1)
    fits = any_way.result(engine, text_of(W - 6), **read)
    assert (fits.token_ids, fits.usage.cached_tokens) == (expected(text_of(W - 6)), W - 7)


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
def test_caps_above_the_window_are_all_served_from_a_pool(any_way: Place, admission: str) -> None:
    engine = any_way.engine(3, W, memory=pool(2 * W), schedule={"admission": admission})
    items = [item(text_of(20, i), max_tokens=32_000) for i in range(5)]
    for i, result in enumerate(any_way.results(engine.run(items))):
        assert (result.finish_reason, len(result.token_ids)) == ("window", W - 20)
        assert result.token_ids == expected(text_of(20, i), W - 20)
        assert len(result.warnings) == 1


def test_each_of_several_answers_is_capped_and_says_so(any_way: Place) -> None:
    engine = any_way.engine(n_window=W)
    result = any_way.result(engine, text_of(W - 9), max_tokens=32_000, n=2)
    assert [c.finish_reason for c in result.choices] == ["window", "window"]
    warning = f"max_tokens is 9, not 32000: the prompt has {W - 9} tokens and the window {W}"
    assert result.warnings == result.choices[1].warnings == (warning,)


def test_strict_cap_is_no_reason_against_a_window_that_moves(any_way: Place) -> None:
    engine = any_way.engine(2, W)
    options: dict[str, Any] = {"max_tokens": 2 * W, "n_discard": 20, "strict_max_tokens": True}
    result = any_way.result(engine, text_of(9), **options)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 2 * W)


# ---- a window that moves on ----


@pytest.mark.parametrize(("seed", "kind"), [(0, GatedBackend), (2**64 - 1, FakeBackend)])
def test_answer_goes_past_the_window_and_its_neighbour_notices_nothing(
    any_way: Place, seed: int, kind: type[FakeBackend]
) -> None:
    engine = any_way.engine(2, W, kind=kind)
    items = [
        item(text_of(40), seed=seed, max_tokens=400, n_discard=32),
        item(text_of(50, start=3), seed=seed, max_tokens=W - 50),
        item(text_of(50, start=5), seed=seed, max_tokens=W - 50),
    ]
    first, *others = any_way.results(engine.run(items))
    assert first.token_ids == moving(text_of(40), 400, n_discard=32, seed=seed)
    assert (first.finish_reason, first.warnings) == ("length", ())
    assert first.usage.context_shifts == n_moves(40, 400, 32) == 10
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (40, 400)
    for start, other in zip((3, 5), others, strict=True):
        assert other.token_ids == expected(text_of(50, start), W - 50, seed=seed)
        assert other.usage.context_shifts == 0
    stats = engine.stats()
    assert (stats.n_prompt_tokens, stats.n_recomputed_tokens) == (140, 0)


@pytest.mark.parametrize(
    ("n_keep", "n_discard"), [(0, 1), (0, W - 2), (1, W - 2), (5, 31), (40, 2), (40, W - 2)]
)
def test_what_is_kept_and_what_goes_is_as_asked(place: Place, n_keep: int, n_discard: int) -> None:
    engine = place.engine(2, W)
    n_most = W - n_keep - 1
    result = place.result(engine, text_of(40), max_tokens=250, n_keep=n_keep, n_discard=n_discard)
    n_taken = min(n_discard, n_most)
    assert result.token_ids == moving(text_of(40), 250, n_keep=n_keep, n_discard=n_taken)
    assert result.usage.context_shifts == n_moves(40, 250, n_taken)
    assert bool(result.warnings) == (n_discard > n_most)


@thread_only(Reason.BY_HAND)
def test_plan_moves_the_cells_of_that_slot_alone(by_hand: Place) -> None:
    engine = by_hand.engine(2, W)
    by_hand.results(
        engine.run(
            [
                item(text_of(50, start=3), max_tokens=W - 50),
                item(text_of(100), max_tokens=90, n_keep=7, n_discard=32),
            ]
        )
    )
    shifts = [shift for plan in plans_of(engine) for shift in plan.shifts]
    assert shifts == [(1, 7, 32)] * n_moves(100, 90, 32) == [(1, 7, 32)] * 2
    touched = {slot for p in plans_of(engine) if p.shifts for slot in (*p.clears, *dict(p.trims))}
    assert 1 not in touched


def test_first_message_of_a_chat_is_kept_and_the_first_token_of_a_text(any_way: Place) -> None:
    engine = any_way.engine(2, W)
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "tell me"}]
    tokens = FakeBackend(1).vocab.render(chat)
    n_first = len(FakeBackend(1).vocab.render(chat[:1]))
    options: dict[str, Any] = {"max_tokens": 300, "n_discard": 20}
    [of_chat] = any_way.results(engine.run([chat], options=options))
    [of_text] = any_way.results(engine.run(["tell me"], options=options))
    assert of_chat.token_ids == moving(tokens, 300, n_keep=n_first, n_discard=20)
    assert of_text.token_ids == moving(list(b"tell me"), 300, n_keep=1, n_discard=20)


def test_more_to_keep_or_to_discard_than_there_is_warns_and_is_clamped(any_way: Place) -> None:
    engine = any_way.engine(2, W)
    keeps = any_way.result(engine, text_of(W - 1), max_tokens=30, n_keep=-1, n_discard=5)
    assert keeps.warnings == (
        f"n_keep is {W - 2}, not {W - 1}: the window has {W} tokens",
        f"n_discard is 1, not 5: the window has {W} tokens, of which {W - 2} are kept",
    )
    assert keeps.token_ids == moving(text_of(W - 1), 30, n_keep=W - 2, n_discard=1)
    discards = any_way.result(engine, text_of(40), max_tokens=300, n_discard=2**31 - 1)
    assert discards.warnings == (
        f"n_discard is {W - 2}, not {2**31 - 1}: the window has {W} tokens, of which 1 are kept",
    )
    assert discards.token_ids == moving(text_of(40), 300, n_discard=W - 2)
    more = any_way.result(engine, text_of(40), max_tokens=300, n_keep=2**31 - 1, n_discard=20)
    assert more.warnings == (f"n_keep is 40, not {2**31 - 1}: the prompt has 40 tokens",)
    assert more.token_ids == moving(text_of(40), 300, n_keep=40, n_discard=20)
    all_of_it = any_way.result(engine, text_of(40), max_tokens=300, n_keep=40, n_discard=20)
    assert all_of_it.warnings == ()


def test_answer_without_a_cap_goes_on_until_it_is_cancelled(any_way: Place) -> None:
    backend = GatedBackend(1, W, 64, memory=KvCapabilities("partitioned", W, can_shift=True))
    engine = engine_on(
        backend, options={"ignore_eos": True, "seed": 1}, threaded=any_way.way != "by hand"
    )
    any_way.made.append(engine)
    response = engine.submit(item(text_of(40), n_discard=32))
    n_seen = 0
    chunks = iter(response)
    while n_seen < 1000:
        n_seen += len(next(chunks).token_ids)
    engine.cancel(response.ids[0])
    [result] = any_way.results(response)
    assert result.finish_reason == "cancelled"
    assert result.token_ids == moving(text_of(40), len(result.token_ids), n_discard=32)


@pytest.mark.parametrize("by", ["stop", "stop_token_ids"])
def test_stops_are_found_behind_the_window(any_way: Place, by: str) -> None:
    answer, vocab = moving(text_of(40), 300, n_discard=32), FakeBackend(1).vocab
    i = next(i for i in range(200, 300) if answer[i] > 256 and answer[i] not in answer[:i])
    said: dict[str, Any] = {by: [vocab.piece(answer[i]).decode()] if by == "stop" else [answer[i]]}
    engine = any_way.engine(2, W)
    result = any_way.result(engine, text_of(40), max_tokens=300, n_discard=32, **said)
    assert (result.finish_reason, result.usage.completion_tokens) == ("stop", i + 1)
    assert any_way.result(engine, text_of(40)).token_ids == expected(text_of(40))


# ---- where it cannot be ----


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize(
    ("memory", "chunk_alignment", "words"),
    [
        (KvCapabilities("partitioned", 512, can_save=True, can_copy=True), 0, "cannot be moved"),
        (KvCapabilities("recurrent", 4, can_trim=False, can_save=True), 0, "cannot be moved"),
        (KvCapabilities("partitioned", 512, can_shift=True), 16, "exact=True"),
    ],
)
def test_memory_that_cannot_move_refuses_and_others_run(
    any_way: Place, memory: KvCapabilities, chunk_alignment: int, words: str
) -> None:
    engine = any_way.engine(4, W, memory=memory, cuts=PromptCuts.every(chunk_alignment))
    refusal = f"n_discard=32 cannot be used.*{words}"
    with pytest.raises(ConfigError, match=refusal):
        engine.run([item(text_of(9), n_discard=32)])
    assert not ids_in_flight(engine)
    runs, refused = any_way.results(engine.run([item(text_of(9)), item(text_of(9), n_discard=32)]))
    assert runs.token_ids == expected(text_of(9))
    assert isinstance(refused.error, ConfigError)
    assert re.search(refusal, str(refused.error))
    assert any_way.result(engine, text_of(9), n_discard=0).token_ids == expected(text_of(9))


@pytest.mark.parametrize("options", [{"n_keep": 5}, {"n_keep": 1}])
def test_keeping_without_discarding_is_refused(any_way: Place, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no effect without n_discard"):
        any_way.engine().submit(item(text_of(9), **options))


def test_request_may_switch_off_the_moving_window_of_the_run(any_way: Place) -> None:
    engine = any_way.engine(n_window=W)
    moving = {"n_keep": 4, "n_discard": 8, "max_tokens": 2 * W}
    still: list[dict[str, Any]] = [{}, {"max_tokens": W - 9}]
    items = [item(text_of(9)), *(item(text_of(9), n_discard=0, **said) for said in still)]
    moved, capped, fits = any_way.results(engine.run(items, options=moving))
    assert (moved.finish_reason, len(moved.token_ids)) == ("length", 2 * W)
    assert moved.warnings == ()
    assert (capped.finish_reason, capped.token_ids) == ("window", fits.token_ids)
    assert fits.token_ids == expected(text_of(9), W - 9)


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize(
    "options", [{"n_keep": -2}, {"n_discard": -1}, {"n_discard": 1.5}, {"n_discard": True}]
)
def test_numbers_that_are_none_are_refused(any_way: Place, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="n_"):
        item(text_of(9), **options)


# ---- a moving window in trouble ----


def movers(n: int, **options: Any) -> list[BatchPrompt]:
    said = {"max_tokens": 300, "n_discard": 32, "n_keep": 5, **options}
    return [item(text_of(20 + 9 * i, start=i), str(i), **said) for i in range(n)]


@cache
def moved(i: int, n: int = 300) -> tuple[int, ...]:
    return moving(text_of(20 + 9 * i, start=i), n, n_keep=5, n_discard=32)


@thread_only(Reason.LONG)
@pytest.mark.parametrize(("swap_mib", "quantum"), [(0, 1), (64, 7), (0, 50)])
def test_turns_change_no_token(place: Place, swap_mib: int, quantum: int) -> None:
    schedule = {"policy": "round_robin", "quantum": quantum, "swap_mib": swap_mib}
    engine = place.engine(2, W, schedule=schedule)
    results = place.results(engine.run(movers(6)))
    assert [r.token_ids for r in results] == [moved(i) for i in range(6)]


@thread_only(Reason.LONG)
@pytest.mark.parametrize("n_discard", [1, 2])
def test_window_that_moves_in_each_step_lets_others_have_their_turns(
    place: Place, n_discard: int
) -> None:
    schedule = {"policy": "round_robin", "quantum": 4}
    engine = place.engine(1, W, schedule=schedule)
    long = item(text_of(W), "long", max_tokens=100, n_discard=n_discard)
    response = engine.run([long, item(text_of(9), "short", max_tokens=5)])
    first, second = place.results(response)
    assert first.token_ids == moving(text_of(W), 100, n_discard=n_discard)
    assert second.token_ids == expected(text_of(9), 5)
    assert engine.stats().n_recomputed_tokens == 0
    assert first.timings.queue_s < second.timings.queue_s < first.timings.total_s


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize(
    ("n_cells", "swap_mib", "kind"),
    [
        (W + 8, 0, FakeBackend),
        (W + 8, 64, GatedBackend),
        (300, 0, GatedBackend),
        (300, 64, FakeBackend),
    ],
)
def test_full_pool_changes_no_token(
    place: Place, swap_mib: int, n_cells: int, kind: type[FakeBackend]
) -> None:
    schedule = {"admission": "optimistic", "swap_mib": swap_mib}
    engine = place.engine(4, W, memory=pool(n_cells), schedule=schedule, kind=kind)
    expects_little(place, engine)
    with together(6):
        results = place.results(engine.run(movers(6)))
    assert [r.token_ids for r in results] == [moved(i) for i in range(6)]
    assert engine.stats().n_preempted > 0


@pytest.mark.parametrize("n_cells", [400, 1000])
def test_movers_share_no_cell_of_a_pool_and_the_others_all(any_way: Place, n_cells: int) -> None:
    engine = any_way.engine(4, W, memory=pool(n_cells))
    common = text_of(70)
    items = [
        item([*common, i], max_tokens=200 if i % 2 else 40, n_discard=32 if i % 2 else None)
        for i in range(12)
    ]
    results = any_way.results(engine.run(items))
    for i, result in enumerate(results):
        tokens = [*common, i]
        wanted = moving(tokens, 200, n_discard=32) if i % 2 else expected(tokens, 40)
        assert result.token_ids == wanted
        assert i % 2 == 0 or result.usage.cached_tokens == 0


@no_pool(Reason.ONE_BACKEND)
def test_movers_in_slots_of_their_own_share_beginnings(any_way: Place) -> None:
    engine = any_way.engine(4, W)
    prompts = [[*text_of(70), i] for i in range(12)]
    items = [item(p, max_tokens=200, n_discard=32) for p in prompts]
    with together(len(items)):
        results = any_way.results(engine.run(items))
    assert [r.token_ids for r in results] == [moving(p, 200, n_discard=32) for p in prompts]
    assert (
        sum(r.usage.cached_tokens > 32 for r in results) == 12 - 3
    )  # each generation has a leader


def test_what_a_mover_leaves_serves_nobody_as_what_it_is_not(any_way: Place) -> None:
    engine = any_way.engine(1, W)
    first = any_way.result(engine, text_of(40), max_tokens=300, n_keep=5, n_discard=32)
    for n in (0, 40, 60):
        tokens = [*text_of(40), *first.token_ids[:n], 1]
        result = any_way.result(engine, tokens)
        assert result.token_ids == expected(tokens)
    tokens = [*text_of(5), *first.token_ids[-60:]]
    assert any_way.result(engine, tokens).token_ids == expected(tokens)


@pytest.mark.parametrize("n_keep", [0, 5, 40])
def test_mover_saves_what_was_never_moved(any_way: Place, n_keep: int) -> None:
    saved: dict[str, Any] = {"cache_key": "k", "save_cache": True}
    first = any_way.engine(1, W)
    result = any_way.result(
        first, text_of(40), **saved, max_tokens=300, n_keep=n_keep, n_discard=32
    )
    assert result.token_ids == moving(text_of(40), 300, n_keep=n_keep, n_discard=32)
    first.close()
    read: dict[str, Any] = {"cache_key": "k", "cache_required": True}
    found = any_way.result(any_way.engine(1, W), text_of(60), **read)
    if n_keep:
        assert (found.token_ids, found.usage.cached_tokens) == (expected(text_of(60)), n_keep)
        assert result.warnings == ()
    else:
        assert isinstance(found.error, CacheError)
        assert "not saved" in result.warnings[-1]


def test_mover_begins_with_a_file(any_way: Place) -> None:
    first = any_way.engine(1, W)
    any_way.result(first, text_of(60), cache_key="k", save_cache=True)
    first.close()
    for memory in (None, pool(400)):
        engine = any_way.engine(2, W, memory=memory)
        result = any_way.result(engine, text_of(60), cache_key="k", max_tokens=300, n_discard=32)
        assert result.token_ids == moving(text_of(60), 300, n_discard=32)
        assert result.usage.cached_tokens == (59 if memory is None else 0)


def test_movers_in_a_pool_each_begin_with_the_file(any_way: Place) -> None:
    first = any_way.engine(4, W, memory=pool(800))
    any_way.result(first, text_of(60), cache_key="k", save_cache=True)
    first.close()
    engine = any_way.engine(4, W, memory=pool(800))
    options: dict[str, Any] = {"cache_key": "k", "cache_required": True, "n_discard": 32}
    mover = item(text_of(61), n=3, max_tokens=80, **options)
    several, other = any_way.results(engine.run([mover, item(text_of(62), cache_key="k")]))
    for i, choice in enumerate(several.choices):
        assert choice.token_ids == moving(text_of(61), 80, n_discard=32, seed=1 + i)
    assert [c.usage.cached_tokens for c in (*several.choices, other)] == [60] * 4
    assert engine.stats().n_prompt_tokens == 3 * 1 + 2


def full(engine: Engine, id: str, n_more: int = 0) -> None:
    """Step until a window is full and moves in the next step."""
    batcher = batcher_of(engine)
    while id not in batcher.in_flight or not batcher.in_flight[id].is_full:
        assert engine.step()
    steps(engine, n_more)


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("swap_mib", [0, 64])
@pytest.mark.parametrize("n_more", [0, 1, 2])
def test_mover_paused_at_the_border_goes_on_in_its_slot_and_out_of_it(
    by_hand: Place, n_more: int, swap_mib: int
) -> None:
    for is_parked in (False, True):
        engine = by_hand.engine(
            1, W, kind=GatedBackend, schedule={"swap_mib": swap_mib}, n_batch=256
        )
        response = engine.run(movers(1))
        full(engine, "0", n_more)
        assert engine.pause("0")
        steps(engine, 3)
        if is_parked:
            assert by_hand.result(engine, text_of(9, 3)).token_ids == expected(text_of(9, 3))
        assert engine.resume("0")
        [result] = by_hand.results(response)
        assert result.token_ids == moved(0)


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("swap_mib", [0, 64])
@pytest.mark.parametrize("pause_every", [3, 16, 27])
def test_mover_that_is_parked_at_each_pause_changes_no_token(
    by_hand: Place, pause_every: int, swap_mib: int
) -> None:
    memory = KvCapabilities(
        "partitioned", W, can_save=True, can_shift=True, saved_bytes_per_cell=1024
    )
    engine = by_hand.engine(1, W, memory=memory, schedule={"swap_mib": swap_mib}, n_batch=64)
    response = engine.run(movers(1, max_tokens=200, pause_every=pause_every))
    n_parked = 0
    while ids_in_flight(engine):
        if batcher_of(engine).is_paused("0"):
            assert by_hand.result(engine, text_of(9, 3)).token_ids == expected(text_of(9, 3))
            n_parked += engine.resume("0")
        engine.step()
    [result] = by_hand.results(response)
    assert result.token_ids == moved(0, 200)
    assert n_parked == 199 // pause_every
    stats = engine.stats()
    assert bool(stats.n_recomputed_tokens) == (swap_mib == 0)


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("swap_mib", [0, 64])
def test_mover_preempted_at_the_border_goes_on(by_hand: Place, swap_mib: int) -> None:
    engine = by_hand.engine(
        2,
        W,
        memory=pool(250),
        kind=GatedBackend,
        schedule={"swap_mib": swap_mib, "admission": "optimistic"},
    )
    response = engine.run([item(text_of(9, 77), "old", max_tokens=110), *movers(1)])
    full(engine, "0")
    batcher = batcher_of(engine)
    find_pool_full(engine)
    engine.step()
    assert batcher.in_flight["0"].slot is None
    old, result = by_hand.results(response)
    assert result.token_ids == moved(0)
    assert old.token_ids == expected(text_of(9, 77), 110)


@pytest.mark.parametrize("n_first", [W - 20, W - 19])
def test_mover_that_ended_at_the_border_is_extended(any_way: Place, n_first: int) -> None:
    engine = any_way.engine(2, W)
    [first] = any_way.results(engine.run(movers(1, max_tokens=n_first)))
    assert first.usage.context_shifts == 0
    [result] = any_way.results(engine.extend(first, 300 - n_first))
    assert result.token_ids == moved(0)
    assert engine.stats().n_prompt_tokens == 20


@pytest.mark.parametrize("n_prompt", [20, W - 1, W, W + 31, 3 * W + 5])
@pytest.mark.parametrize("n_first", [1, 2, 33, 200])
@pytest.mark.parametrize("is_flooded", [False, True])
def test_extended_mover_has_the_answer_of_one_run(
    any_way: Place, n_prompt: int, n_first: int, is_flooded: bool
) -> None:
    engine = any_way.engine(1, W)
    tokens, options = text_of(n_prompt), {"n_keep": 5, "n_discard": 32}
    first = any_way.result(engine, tokens, max_tokens=n_first, **options)
    if is_flooded:
        any_way.result(engine, text_of(90, 3), max_tokens=3)
    [result] = any_way.results(engine.extend(first, 100))
    n_all = n_first + 100
    assert result.token_ids == moving(tokens, n_all, n_keep=5, n_discard=32)
    assert result.usage.context_shifts == n_moves(n_prompt, n_all, 32)


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize(
    ("code", "is_pool"), [(1, True), (-1, False), (2, True), (2, False), (-2, True), (-3, False)]
)
def test_failed_steps_change_no_token(place: Place, code: int, is_pool: bool) -> None:
    n_steps = iter(range(10**6))
    faults = Faults(code=lambda _: code if next(n_steps) % 23 == 22 else 0)
    engine = place.engine(2, W, memory=pool(400) if is_pool else None, faults=faults)
    results = place.results(engine.run(movers(3)))
    assert [r.token_ids for r in results] == [moved(i) for i in range(3)]


class Struck(FakeBackend):
    """Ctrl-C strikes in runs that move cells, more and more rarely, before their work or after it."""

    n_moves = 0
    is_late = False

    def run(self, plan: StepPlan) -> StepResult:
        self.n_moves += bool(plan.shifts)
        strikes = plan.shifts and self.n_moves.bit_count() == 1
        if strikes and self.is_late:
            super().run(plan)
        if strikes:
            raise KeyboardInterrupt
        return super().run(plan)


class LateStruck(Struck):
    is_late = True


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("kind", [Struck, LateStruck])
def test_ctrl_c_while_cells_move_changes_no_token(by_hand: Place, kind: type[Struck]) -> None:
    engine = by_hand.engine(2, W, kind=kind)
    response = engine.run(movers(3))
    n_struck = 0
    while ids_in_flight(engine):
        with suppress(KeyboardInterrupt):
            engine.step()
            n_struck -= 1
        n_struck += 1
    assert n_struck > 3
    results = by_hand.results(response)
    assert [r.token_ids for r in results] == [moved(i) for i in range(3)]


@no_pool(Reason.ONE_BACKEND)
def test_closing_ends_movers_with_what_they_have(any_way: Place) -> None:
    engine = any_way.engine(2, W, kind=GatedBackend)
    response = engine.run(movers(3, max_tokens=ENDLESS))
    first_chunk(response)
    engine.close()
    results = any_way.results(response)
    assert {r.finish_reason for r in results} == {"cancelled"}
    for i, result in enumerate(results):
        assert result.token_ids == moved(i, len(result.token_ids))


def test_prompt_alone_never_moves(any_way: Place) -> None:
    engine = any_way.engine(2, W)
    result = any_way.result(engine, text_of(W), prefill_only=True, n_discard=32)
    assert (result.finish_reason, result.usage.context_shifts) == ("length", 0)


# ---- a prompt over the window ----

OWN_CELLS = KvCapabilities("partitioned", 2 * W, can_copy=True, can_shift=True)


@pytest.mark.parametrize("n_prompt", [W, W + 1, W + 31, 3 * W + 5])
@pytest.mark.parametrize("kind", ["partitioned", "unified"])
def test_prompt_over_the_window_slides_as_an_answer_does(n_prompt: int, kind: str) -> None:
    memory = pool(4 * W) if kind == "unified" else OWN_CELLS
    backend = FakeBackend(2, W, 64, memory=memory)
    tokens = [i % 200 for i in range(n_prompt)]
    given = BatchPrompt(tokens=tokens, options={"n_discard": 32, "n_keep": 5, "seed": 1})
    options = {"max_tokens": 50, "ignore_eos": True}
    with engine_on(backend, options=options) as engine:
        result, short = engine.run([given, BatchPrompt(prompt="short")]).results()
        again = engine.submit(given).result()
    assert result.token_ids == again.token_ids == moving(tokens, 50, n_discard=32, n_keep=5)
    assert result.usage.prompt_tokens == n_prompt
    assert result.usage.context_shifts == n_moves(n_prompt, 50, 32)
    n_early = n_moves(n_prompt, 1, 32)
    assert [w.split(" (n_discard)")[0] for w in result.warnings] == [
        f"{32 * n_early} tokens after the first 5 were left out" for _ in range(n_early > 0)
    ]
    assert short.usage.context_shifts == 0
    if n_early:
        assert result.usage.cached_tokens <= W


@pytest.mark.parametrize("form", ["tokens", "prompt"])
def test_prompt_of_more_than_16_windows_is_refused_in_any_form(any_way: Place, form: str) -> None:
    engine = any_way.engine(2, W)
    options: dict[str, Any] = {"n_discard": 1, "max_tokens": 3, "n": 2}
    most, late = [
        {"tokens": [65] * n} if form == "tokens" else {"prompt": "A" * n}
        for n in (16 * W, 16 * W + 1)
    ]
    fits = any_way.results(engine.run([BatchPrompt(**most, options=options)]))
    assert [r.usage.context_shifts for r in fits] == [2 * n_moves(16 * W, 3, 1)]
    [refused] = any_way.results(engine.run([BatchPrompt(**late, options=options)]))
    assert too_long(refused) == (16 * W + 1, 1, W)
    assert "n_discard" not in str(refused.error)
    assert "n_keep" not in str(refused.error)


def test_prompt_over_the_window_is_refused_with_what_to_do(tmp_path: Path) -> None:
    backend = FakeBackend(2, W, 64, memory=OWN_CELLS)
    slide = {"n_discard": 32}
    asked: list[dict[str, Any]] = [
        {},
        {"n_discard": 0},
        {**slide, "n_keep": -1},
        {**slide, "n_keep": W},
        {**slide, "prompt_logprobs": 0},
        {**slide, "prefill_only": True},
    ]
    with engine_on(backend, options={"max_tokens": 2}, cache_dir=tmp_path) as engine:
        items = [item(text_of(W + 9), **options) for options in asked]
        results = engine.run(items).results(return_errors=True)
    says = ["set n_discard", "set n_discard", "lower n_keep", "lower n_keep", "", ""]
    for result, words in zip(results, says, strict=True):
        assert isinstance(result.error, PromptTooLongError)
        assert words in str(result.error)
        assert f"window holds {W}" in str(result.error)


@thread_only(Reason.BY_HAND)
def test_first_message_stays_of_a_chat_over_the_window() -> None:
    chat = [{"role": "system", "content": "Be brief."}]
    chat += [{"role": "user", "content": f"message {i}"} for i in range(40)]
    backend = FakeBackend(2, W, 64, memory=OWN_CELLS)
    with Engine(backend, options={"max_tokens": 2}) as engine:
        n_first = engine.count_tokens(chat[:1])
        result = engine.chat(chat, n_discard=16)
        with pytest.raises(PromptTooLongError, match="set n_discard"):
            engine.chat(chat)
    assert result.usage.context_shifts > 0
    [said] = re.findall(r"after the first (\d+) were left out", result.warnings[0])
    assert 8 < int(said) <= n_first
