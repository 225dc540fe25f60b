"""Where memory cannot be cut, sequences go on from checkpoints: a common beginning is computed once there too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pytest

from cbatch.core.plan import Slot
from cbatch.core.prefix import with_mark
from cbatch.core.saved_cells import N_CHECKPOINTS_MAX, Checkpoints
from cbatch.core.span import PromptCuts
from cbatch.messages import BatchPrompt
from tests.helpers import (
    Rig,
    at_end_only,
    checkpoints_by_key,
    drive,
    make_request,
    make_scheduler,
    park_paused,
    step,
)
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.plan import StepPlan
    from cbatch.core.request import Request
    from cbatch.options import RunOptions

COMMON = range(100)
Kind = Literal["partitioned", "unified", "recurrent"]
KINDS: list[Kind] = ["partitioned", "unified", "recurrent"]
MIB = 2**20

each_kind = pytest.mark.parametrize("kind", KINDS)


def make_rig(kind: Kind = "recurrent", n_slots: int = 4, **options: Any) -> Rig:
    given: dict[str, Any] = {
        "n_window": 256,
        "n_batch": 64,
        "memory": at_end_only(kind, n_slots * 256),
        "share_prefixes": True,
        **options,
    }
    return make_scheduler(n_slots, **given)


def alike(
    n: int, first: int = 0, common: Sequence[int] = COMMON, n_own: int = 3, **options: Any
) -> list[Request]:
    """Requests with `common` and some tokens of their own."""
    said = {"max_tokens": 4, **options}
    return [
        make_request(str(i), [*common, *([100 + i] * n_own)], **said)
        for i in range(first, first + n)
    ]


def chat(id: str, text: str, **options: Any) -> Request:
    request = make_request(id, max_tokens=4, **options)
    return replace(request, prompt=BatchPrompt([{"role": "user", "content": text}]))


def cached(rig: Rig) -> dict[str, int]:
    return {id: result.usage.cached_tokens for id, result in rig.results.items()}


def check_alone(rig: Rig) -> None:
    """Every answer is that of its request alone."""
    for id, result in rig.results.items():
        request = rig.drivers[id].request
        assert list(result.token_ids) == rig.alone(request, len(result.token_ids))


def saved_in(plans: Sequence[StepPlan]) -> list[int]:
    """The slots that plans take checkpoints of, in their order."""
    return [slot for plan in plans for slot, key in plan.saves if key < 0]


# ---- what waits together ----


@each_kind
def test_burst_computes_its_beginning_once(kind: Kind) -> None:
    rig = make_rig(kind)
    rig.submit(*alike(12))
    plans = drive(rig)
    assert rig.stats.n_prompt_tokens == 100 + 12 * 3
    assert cached(rig) == {str(i): 100 if i else 0 for i in range(12)}
    assert saved_in(plans) == [0]
    check_alone(rig)


def test_followers_enter_in_the_plan_that_takes_the_checkpoint() -> None:
    rig = make_rig()
    rig.submit(*alike(3))
    plans = drive(rig)
    [(slot, key)] = next(plan.saves for plan in plans if plan.saves)
    [taking] = [plan for plan in plans if plan.saves]
    assert taking.loads == ((Slot(1), key, 100), (Slot(2), key, 100))
    assert [(c.slot, c.start) for c in taking.spans] == [(0, 100), (1, 100), (2, 100)]
    assert slot == 0


def test_prompts_that_part_at_two_places_leave_two_checkpoints() -> None:
    rig = make_rig()
    long = [*COMMON, *range(150, 200)]
    rig.submit(*alike(3, common=long), *alike(2, first=3, n_own=60))
    plans = drive(rig)
    assert rig.stats.n_prompt_tokens == 150 + 3 * 3 + 2 * 60
    assert saved_in(plans) == [0, 0]
    check_alone(rig)


def test_prompts_that_part_nearby_share_one_checkpoint() -> None:
    rig = make_rig(n_slots=8)
    prompts = [[*COMMON, *([7] * i), 8, i] for i in (4, 3, 2, 1)]
    rig.submit(*(make_request(str(i), p, max_tokens=2) for i, p in enumerate(prompts)))
    plans = drive(rig)
    assert saved_in(plans) == [0]
    check_alone(rig)


def test_equal_prompts_share_all_but_their_last_token() -> None:
    rig = make_rig()
    rig.submit(*(make_request(str(i), COMMON, seed=i, max_tokens=3) for i in range(4)))
    drive(rig)
    assert rig.stats.n_prompt_tokens == 99 + 4
    check_alone(rig)


def test_one_goes_on_from_the_whole_prompt_of_its_leader() -> None:
    rig = make_rig()
    rig.submit(make_request("a", COMMON, max_tokens=9), *alike(1))
    drive(rig)
    assert cached(rig) == {"a": 0, "0": 100}
    assert rig.stats.n_prompt_tokens == 103
    check_alone(rig)


def test_leader_that_leaves_before_the_place_has_another_lead() -> None:
    rig = make_rig(n_batch=16)
    rig.submit(*alike(3))
    step(rig)
    assert rig.running() == ["0"]
    rig.cancel("0")
    drive(rig)
    assert cached(rig) == {"0": 0, "1": 16, "2": 100}
    assert rig.stats.n_prompt_tokens == 103 + 3


def test_pieces_of_exact_prompts_end_at_checkpoints_anyway() -> None:
    rig = make_rig(n_batch=32, cuts=PromptCuts.every(16))
    rig.submit(*alike(4))
    drive(rig)
    assert cached(rig) == {"0": 0, "1": 96, "2": 96, "3": 96}
    check_alone(rig)


@pytest.mark.parametrize("n_own", range(1, 16))
def test_prompt_that_is_computed_again_stops_for_those_that_come(n_own: int) -> None:
    """Its last token is a row now, but the end of its prompt is cut off where it was."""
    cuts = PromptCuts(16, 48, least=9, ends_in_row=True)
    rig = make_rig(cuts=cuts, swap_mib=0)
    rig.submit(*alike(1, n_own=n_own, pause_every=2))
    while step(rig) is not None:
        pass
    park_paused(rig)
    assert rig.batcher.resume("0")
    rig.submit(*alike(3, first=1, n_own=20))
    drive(rig, before=lambda rig: rig.batcher.resume("0"))
    assert cached(rig) == {"0": 0, **dict.fromkeys("123", 96 if 100 + n_own >= 96 + 9 else 80)}
    check_alone(rig)


def test_prompts_of_other_adapters_share_nothing() -> None:
    rig = make_rig(adapters=("x",))
    rig.submit(*alike(2), *alike(2, first=2, adapter="x"))
    drive(rig)
    assert rig.stats.n_prompt_tokens == 2 * 106


def test_one_that_may_not_save_waits_for_nobody() -> None:
    rig = make_rig(memory=replace(at_end_only("recurrent", 1024), can_save=False))
    rig.submit(*alike(2))
    step(rig)
    assert rig.running() == ["0", "1"]


# ---- what comes later ----


@each_kind
def test_late_one_leaves_a_checkpoint_where_it_parts_from_what_was_seen(kind: Kind) -> None:
    rig = make_rig(kind)
    for i in range(3):
        rig.submit(*alike(1, first=i))
        drive(rig)
    assert cached(rig) == {"0": 0, "1": 0, "2": 100}
    check_alone(rig)


@each_kind
def test_next_turn_of_a_chat_goes_on_at_the_end_of_the_last_prompt(kind: Kind) -> None:
    rig = make_rig(kind)
    text, n_before = "x" * 50, 0
    for turn in range(5):
        rig.submit(chat(str(turn), text))
        drive(rig)
        n = len(text) + len("user:")
        assert rig.results[str(turn)].usage.cached_tokens == n_before
        n_before, text = n, text + "what was not said" + "a question of this turn"
    check_alone(rig)


def test_turns_that_end_otherwise_in_the_history_go_on_before_that_end() -> None:
    def tokens_of(prompt: BatchPrompt, _: RunOptions) -> list[int]:
        [message] = prompt.messages or ()
        return [*str(message["content"]).encode(), 250, 251]  # as the mark of a thought

    rig = make_rig(tokens_of=tokens_of)
    text, n_cached = "x" * 60, []
    for turn in range(4):
        rig.submit(chat(str(turn), text))
        drive(rig)
        n_cached.append(rig.results[str(turn)].usage.cached_tokens)
        text += "an answer, and then another question: it is longer"
    assert n_cached == [0, 0, 110, 160]


def test_same_chat_again_goes_on_before_its_last_token() -> None:
    rig = make_rig()
    for i in range(4):
        rig.submit(chat(str(i), "x" * 95, seed=i))
        drive(rig)
    assert [*cached(rig).values()] == [0, 0, 99, 99]
    check_alone(rig)


def test_long_prompt_leaves_checkpoints_on_its_way() -> None:
    rig = make_rig(n_window=8192, n_batch=3000, memory=at_end_only("recurrent", 4 * 8192))
    text = [i * i % 251 for i in range(5000)]
    rig.submit(make_request("a", text, max_tokens=1))
    drive(rig)
    for id, n in (("b", 4500), ("c", 2100), ("d", 4500)):
        rig.submit(make_request(id, [*text[:n], 255, 254], max_tokens=1))
        drive(rig)
    assert cached(rig) == {"a": 0, "b": 4096, "c": 2048, "d": 4500}
    check_alone(rig)


def test_short_turns_leave_no_checkpoint() -> None:
    rig = make_rig()
    rig.submit(chat("a", "x" * 20))
    assert not saved_in(drive(rig))


def test_two_go_on_from_one_slot_that_is_kept() -> None:
    rig = make_rig()
    rig.submit(make_request("a", COMMON, max_tokens=1))
    drive(rig)
    history = [*COMMON]
    rig.submit(*alike(3, common=history))
    drive(rig)
    assert cached(rig) == {"a": 0, "0": 100, "1": 100, "2": 100}
    check_alone(rig)


def test_one_that_chose_its_slot_goes_on_from_another() -> None:
    rig = make_rig()
    rig.submit(make_request("a", COMMON, max_tokens=1))
    drive(rig)
    rig.submit(make_request("b", [*COMMON, 7], max_tokens=2, slot=3))
    drive(rig)
    assert rig.drivers["b"].slot == 3
    assert cached(rig)["b"] == 100
    check_alone(rig)


def test_one_whose_cells_are_lost_goes_on_from_the_end_of_its_prompt() -> None:
    rig = make_rig(n_slots=1, swap_mib=0)
    rig.submit(chat("a", "x" * 95, pause_every=2))
    while rig.drivers["a"].n_output < 2:
        step(rig)
    step(rig)
    park_paused(rig)
    assert rig.batcher.resume("a")
    drive(rig, before=lambda rig: rig.batcher.resume("a"))
    assert rig.stats.n_recomputed_tokens <= 4
    check_alone(rig)


def test_choices_of_a_prompt_go_on_from_one() -> None:
    rig = make_rig(n_slots=2)
    rig.submit(*(make_request(str(i), COMMON, seed=i, max_tokens=30) for i in range(6)))
    drive(rig)
    assert rig.stats.n_prompt_tokens == 99 + 6
    check_alone(rig)


# ---- the budget ----


def half_a_mib(kind: Kind = "recurrent", **options: Any) -> Rig:
    """Each checkpoint takes half of a MiB."""
    memory = replace(at_end_only(kind, 4 * 256), saved_bytes=MIB // 2, saved_bytes_per_cell=0)
    return make_rig(memory=memory, **{"checkpoint_mib": 1, **options})


def beginning(i: int) -> list[int]:
    return [(i + 3 * j) % 256 for j in range(40)]


def test_least_recently_used_goes_first() -> None:
    rig = half_a_mib()
    for i, n_first in ((0, 0), (1, 10), (0, 20), (2, 30), (0, 40), (1, 50)):
        rig.submit(*alike(2, n_first, beginning(i)))
        drive(rig)
    given = cached(rig)
    firsts = [given[str(n)] for n in (0, 10, 20, 30, 40, 50)]
    assert firsts == [0, 0, 40, 0, 40, 0]
    assert len(checkpoints_by_key(rig)) == 2


@pytest.mark.parametrize("settings", [{"checkpoint_mib": 0}, {"share_prefixes": False}])
def test_without_a_budget_all_is_computed_and_nobody_waits(settings: dict[str, Any]) -> None:
    rig = make_rig(**settings)
    rig.submit(*alike(3))
    plans = drive(rig)
    assert rig.stats.n_prompt_tokens == 3 * 103
    assert not any(plan.saves for plan in plans)


def test_nobody_waits_for_a_state_that_is_larger_than_the_budget() -> None:
    memory = replace(at_end_only("recurrent", 4 * 256), saved_bytes=2 * MIB)
    rig = make_rig(memory=memory, checkpoint_mib=1)
    rig.submit(*alike(3))
    step(rig)
    assert rig.running() == ["0", "1", "2"]
    drive(rig)
    assert not rig.backend.saved
    check_alone(rig)


def test_true_sizes_are_counted_once_they_are_known() -> None:
    books = Checkpoints(replace(at_end_only("recurrent", 64), saved_bytes=MIB // 2), MIB)
    found = books.add(9)
    assert found is not None
    books.learn({found.key: 10, 5: 10})
    assert (books.n_bytes, len(books)) == (10, 1)


def test_checkpoints_that_take_nothing_are_limited_in_number() -> None:
    memory = replace(at_end_only("recurrent", 64), saved_bytes=0, saved_bytes_per_cell=0)
    books = Checkpoints(memory, MIB)
    for _ in range(N_CHECKPOINTS_MAX + 5):
        assert books.add(9) is not None
        books.settle()
    assert len(books) == N_CHECKPOINTS_MAX


def test_memory_stays_within_the_budget_in_many_requests() -> None:
    rig = half_a_mib("partitioned", n_slots=8, n_batch=512, checkpoint_mib=4)
    n_most = 0
    for first in range(0, examples(6_000), 40):
        i = first // 40
        rig.submit(
            *alike(32, first, beginning(i % 13), n_own=1, max_tokens=1),
            *(chat(str(first + 32 + j), chr(97 + (i + j) % 20) * 40) for j in range(8)),
        )
        drive(rig)
        n_most = max(n_most, len(rig.backend.saved))
        rig.chunks.clear()
        rig.drivers.clear()
        rig.results.clear()
    assert n_most == 8
    assert rig.batcher.occupancy().n_checkpoints == 8


# ---- a pool ----


def test_checkpoint_is_loaded_when_the_pool_has_room() -> None:
    rig = make_rig("unified", memory=at_end_only("unified", 256))
    rig.submit(*alike(6, max_tokens=20))
    drive(rig)
    assert rig.stats.n_prompt_tokens < 6 * 103
    check_alone(rig)


# ---- failures ----


@pytest.mark.parametrize("n_lost", [1, 2, 3])
def test_save_or_load_that_fails_costs_time_only(n_lost: int) -> None:
    n_asked = 0

    def swap(key: int) -> bool:
        nonlocal n_asked
        n_asked += 1
        return n_asked != n_lost

    rig = make_rig(swap=swap)
    rig.submit(*alike(8))
    drive(rig)
    assert n_asked >= n_lost
    check_alone(rig)


def test_run_that_was_broken_off_loses_what_it_saved() -> None:
    rig = make_rig(n_batch=128)
    rig.submit(*alike(3))
    step(rig)
    rig.scheduler.begin_step(rig.now)
    plan = rig.scheduler.plan(rig.now)
    assert plan is not None
    assert plan.step.saves
    rig.backend.run(plan.step)
    rig.batcher.lose_cells(plan.step)
    drive(rig)
    check_alone(rig)


def test_context_made_anew_keeps_checkpoints() -> None:
    failures = iter([0, 0, 0, -2, -2, 0])
    rig = make_rig(code=lambda _: next(failures, 0))
    rig.submit(*alike(3, max_tokens=9))
    drive(rig)
    assert rig.backend.n_rebuilt == 1
    rig.submit(*alike(1, first=5))
    drive(rig)
    assert cached(rig)["5"] == 100
    check_alone(rig)


# ---- marks ----


@pytest.mark.parametrize(
    ("marks", "n", "then"),
    [
        ((), 40, (40,)),
        ((40,), 40, (40,)),
        ((40,), 71, (40,)),
        ((40,), 72, (40, 72)),
        ((40,), 39, (39,)),
        ((40, 90), 20, (20, 90)),
    ],
)
def test_places_that_are_near_each_other_become_one(
    marks: tuple[int, ...], n: int, then: tuple[int, ...]
) -> None:
    assert with_mark(marks, n) == then


# ---- moves into gaps ----


@pytest.mark.parametrize("kind", ["partitioned", "recurrent"])
def test_sequence_above_a_gap_moves_by_saving(kind: Kind) -> None:
    rig = make_rig(kind)
    caps = (9, 40, 3, 40)
    rig.submit(*(make_request(str(i), [i] * 9, max_tokens=n) for i, n in enumerate(caps)))
    places = set[tuple[int | None, ...]]()
    while len(rig.results) < 4:
        step(rig)
        places.add(tuple(rig.drivers[id].slot for id in "13"))
    # slot 2 is free first; then slot 0, above which there is no gap
    assert places >= {(1, 3), (1, 2)}
    assert not places & {(0, 1), (1, 0), (0, 2)}
    loads = [load for plan in rig.backend.plans for load in plan.loads]
    assert [(slot, key) for slot, key, _ in loads] == [(2, rig.drivers["3"].number)]
    assert rig.backend.saved == {}
    assert rig.stats.n_recomputed_tokens == 0
    check_alone(rig)


def test_sequence_that_was_just_moved_can_be_parked() -> None:
    rig, caps = make_rig(), {"a": 60, "b": 8, "c": 3, "d": 60}
    rig.submit(*(make_request(id, [*id.encode()] * 9, max_tokens=n) for id, n in caps.items()))
    step(rig)
    step(rig)
    assert rig.drivers["d"].slot == 2  # of "c", which has ended
    assert rig.batcher.pause("d")
    park_paused(rig)
    assert rig.drivers["d"].saved_key is not None
    assert rig.batcher.resume("d")
    drive(rig)
    assert rig.stats.n_recomputed_tokens == 0
    check_alone(rig)


@pytest.mark.parametrize("n_swaps", [0, 1])
def test_move_that_fails_computes_its_sequence_again(n_swaps: int) -> None:
    swaps = iter([True] * n_swaps)
    rig = make_rig(swap=lambda _: next(swaps, False))
    caps = (40, 3, 40)
    rig.submit(*(make_request(str(i), [i] * 9, max_tokens=n) for i, n in enumerate(caps)))
    drive(rig)
    assert rig.stats.n_recomputed_tokens > 0
    check_alone(rig)


def test_nobody_moves_where_there_is_no_host_memory_for_it() -> None:
    rig = make_rig(swap_mib=0)
    caps = (40, 3, 40)
    rig.submit(*(make_request(str(i), [i] * 9, max_tokens=n) for i, n in enumerate(caps)))
    drive(rig)
    assert not [load for plan in rig.backend.plans for load in plan.loads]
    check_alone(rig)
