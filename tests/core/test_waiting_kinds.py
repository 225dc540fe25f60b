"""Who waits for cells on disk: what of a file each one gets, and whom they hold up."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.core.driver import Status, Wait
from cbatch.core.prefix import MIN_SHARED_TOKENS
from cbatch.core.saved_cells import ToStore
from cbatch.core.slots import N_LOOK, N_OVERTAKEN_MAX, N_READ_PER_SLOT, N_STORING_PER_SLOT
from cbatch.errors import CacheError
from cbatch.runtime.wants import _N_FILES_MAX, CacheEntry, CacheRead, CacheRef
from tests.helpers import (
    Rig,
    drive,
    make_request,
    make_scheduler,
    partitioned,
    saved_by_key,
    settle_disk,
    step,
    store,
)

if TYPE_CHECKING:
    from cbatch.core.request import Request

FETCH = CacheRef("k")
FILE = CacheEntry(range(100), 100)


def make_rig(n_slots: int = 4, **options: Any) -> Rig:
    given: dict[str, Any] = {"n_batch": 64, "share_prefixes": True, **options}
    return make_scheduler(n_slots, 256, memory=partitioned(n_slots * 256), **given)


def reader(id: str, n_shared: int, key: str = "k", **options: Any) -> Request:
    """One whose prompt begins with so many tokens of the file, and goes on for 20."""
    prompt = [*FILE.tokens[:n_shared], *range(200, 220)]
    return make_request(id, prompt, cache_key=key, max_tokens=2, **options)


def waiting(rig: Rig, *requests: Request) -> Rig:
    """Have them wait for their files."""
    rig.submit(*requests)
    step(rig)
    assert all(rig.drivers[r.id].waits_for is Wait.CACHE for r in requests)
    return rig


def read_of(n_read: int) -> CacheRead:
    """A read of the file's first cells."""
    return CacheRead(FETCH, (), lambda *_: 0, n_read)


def adopted(
    rig: Rig, found: CacheEntry | CacheError | None = FILE, n_read: int = len(FILE.tokens)
) -> list[tuple[str, int]]:
    """Let all go on that waited; return which get cells of the file, of which the first were read, and how many."""
    loads = rig.wants.resolve(read_of(n_read), found, rig.now)
    return [(driver.request.id, driver.n_computed) for driver, _ in loads]


def arrive(rig: Rig, n_read: int = len(FILE.tokens)) -> list[tuple[str, int]]:
    """Do as `adopted`; cells are put into the backend for those that get some."""
    given = adopted(rig, FILE, n_read)
    for id, _ in given:
        data = np.array(FILE.tokens[:n_read], np.int64).view(np.uint8)
        rig.backend.import_state(rig.drivers[id].number, data, n_read)
    return given


# ---- what each one gets ----


@pytest.mark.parametrize(
    ("n_shared", "who"),
    [
        ((100, 100, 100), [("0", 100)]),
        ((100, 40, 100), [("0", 100)]),
        ((40, 100, 100), [("0", 40), ("1", 100)]),
        ((1, 100), [("1", 100)]),
        ((60, 60 + MIN_SHARED_TOKENS - 1), [("0", 60)]),
        ((60, 60 + MIN_SHARED_TOKENS), [("0", 60), ("1", 60 + MIN_SHARED_TOKENS)]),
    ],
)
def test_requests_that_share_much_more_get_cells_of_their_own(
    n_shared: tuple[int, ...], who: list[tuple[str, int]]
) -> None:
    rig = make_rig()
    waiting(rig, *(reader(f"{i}", n) for i, n in enumerate(n_shared)))
    assert adopted(rig) == who


def test_without_sharing_each_one_gets_cells_of_its_own() -> None:
    rig = waiting(make_rig(share_prefixes=False), *(reader(f"{i}", 100) for i in range(3)))
    assert adopted(rig) == [("0", 100), ("1", 100), ("2", 100)]


@pytest.mark.parametrize("n_shared", [0, 1, MIN_SHARED_TOKENS - 1])
def test_one_that_shares_next_to_nothing_goes_without(n_shared: int) -> None:
    rig = waiting(make_rig(), reader("a", n_shared), reader("b", n_shared, cache_required=True))
    assert adopted(rig) == []
    warned, refused = rig.drivers["a"], rig.drivers["b"]
    assert "no usable beginning" in warned.warnings[0]
    assert isinstance(refused.error, CacheError)


def test_one_that_requires_its_file_fails_though_no_slot_is_free() -> None:
    rig = waiting(make_rig(1), reader("a", 0, cache_required=True))
    want = rig.fetching.pop()
    rig.submit(make_request("b", max_tokens=200))
    step(rig)
    rig.wants.resolve(want, CacheError("k", "there is none"), rig.now)
    step(rig)
    assert rig.running() == ["b"]
    assert isinstance(rig.drivers["a"].error, CacheError)
    assert rig.drivers["a"].status is Status.FINISHED


# ---- how much of a file is read ----


@pytest.mark.parametrize("n_shared", [(100,), (40, 60), (60, 40, 1), (1,)])
def test_as_much_of_a_file_is_wanted_as_the_longest_common_beginning(
    n_shared: tuple[int, ...],
) -> None:
    rig = waiting(make_rig(), *(reader(f"{i}", n) for i, n in enumerate(n_shared)))
    n_wanted = max(n if n >= MIN_SHARED_TOKENS else 0 for n in n_shared)
    assert rig.fetching[0].choose(FILE) == n_wanted


# ---- one that is to load for all, and leaves ----


def with_file(n_slots: int = 4, **options: Any) -> Rig:
    """A rig with the file on its disk."""
    rig, writer = make_rig(n_slots, **options), make_rig()
    writer.submit(reader("saver", 100, save_cache=True, prefill_only=True))
    drive(writer)
    rig.disk.update(writer.disk)
    return rig


def test_request_too_late_for_the_part_read_has_it_read_again() -> None:
    rig = waiting(with_file(), reader("early", 40), reader("as early", 40))
    n_read = rig.fetching.pop().choose(FILE)
    waiting(rig, reader("late", 100, cache_required=True))
    assert arrive(rig, n_read=n_read) == [("early", 40)]
    drive(rig)
    assert rig.results["late"].usage.cached_tokens >= 100


@pytest.mark.parametrize("leave", ["pause", "cancel"])
def test_those_beside_one_that_leaves_before_it_loads_ask_again(leave: str) -> None:
    requests = [reader(f"{i}", 100, cache_required=True) for i in range(3)]
    rig = waiting(with_file(), *requests)
    settle_disk(rig)
    if leave == "pause":
        rig.batcher.pause("0")
    else:
        rig.cancel("0")
    step(rig)
    assert [want.ref for want in rig.fetching] == [FETCH]
    step(rig)
    rig.batcher.resume("0")
    drive(rig)
    assert [rig.results[id].usage.cached_tokens >= 100 for id in "12"] == [True, True]


def two_that_load(**options: Any) -> Rig:
    """A rig with one slot and two readers, each of which has its own cells of the file."""
    rig = with_file(1, **options)
    requests = [reader(f"{i}", n, cache_required=True) for i, n in enumerate((40, 100))]
    waiting(rig, *requests)
    settle_disk(rig)
    assert [rig.drivers[id].n_computed for id in "01"] == [40, 119]
    return rig


@pytest.mark.parametrize("has_plan", [False, True])
def test_requests_whose_cells_are_gone_after_ctrl_c_ask_again(has_plan: bool) -> None:
    rig = waiting(with_file(1), *(reader(f"{i}", 100, cache_required=True) for i in range(2)))
    settle_disk(rig)
    if has_plan:
        rig.scheduler.begin_step(rig.now)
        plan = rig.scheduler.plan(rig.now)
        assert plan is not None
        assert plan.step.loads
        rig.backend.run(plan.step)
        rig.batcher.lose_cells(plan.step)
        step(rig)
        assert [want.ref for want in rig.fetching] == [FETCH]
    drive(rig)
    assert [rig.results[id].usage.cached_tokens for id in "01"] == [119, 119]


def test_request_with_cells_of_its_own_asks_for_none_when_another_leaves() -> None:
    rig = two_that_load()
    rig.cancel("0")
    drive(rig, before=lambda rig: rig.fetching and pytest.fail("it is read again"))
    assert rig.results["1"].usage.cached_tokens == 119
    assert not saved_by_key(rig)


def test_one_with_cells_of_its_own_is_not_refused_with_the_one_before() -> None:
    n_swaps = count()
    rig = two_that_load(swap=lambda _: next(n_swaps) > 0)
    drive(rig)
    assert isinstance(rig.results["0"].error, CacheError)
    assert rig.results["1"].error is None
    assert rig.results["1"].usage.cached_tokens == 119


def test_followers_of_one_whose_load_fails_read_the_file_themselves() -> None:
    n_swaps = count()
    rig = with_file(4, swap=lambda _: next(n_swaps) > 0)
    requests = [reader(f"{i}", 100, cache_required=True) for i in range(3)]
    waiting(rig, *requests)
    drive(rig)
    assert isinstance(rig.results["0"].error, CacheError)
    assert [rig.results[id].usage.cached_tokens >= 100 for id in "12"] == [True, True]


def test_followers_whose_cells_can_never_be_loaded_end_with_an_error_each() -> None:
    rig = with_file(4, swap=lambda _: False)
    requests = [reader(f"{i}", 100, cache_required=True) for i in range(3)]
    waiting(rig, *requests)
    drive(rig)
    assert [type(rig.results[id].error) for id in "012"] == [CacheError] * 3


def test_followers_take_over_what_one_computes_whose_load_has_failed() -> None:
    rig = with_file(4, swap=lambda _: False)
    others = [reader(f"{i}", 100, cache_required=True) for i in "12"]
    waiting(rig, reader("0", 100), *others)
    drive(rig)
    assert "cannot load these cells" in rig.results["0"].warnings[0]
    assert [rig.results[id].usage.cached_tokens >= 100 for id in "12"] == [True, True]


def test_one_that_is_paused_when_the_file_comes_loads_it_for_nobody() -> None:
    rig = waiting(make_rig(), *(reader(f"{i}", 100) for i in range(3)))
    rig.batcher.pause("0")
    assert adopted(rig) == [("1", 100)]
    assert not rig.drivers["0"].is_done_with_disk


def test_those_beside_one_that_has_loaded_ask_for_nothing_when_it_ends() -> None:
    requests = [reader(f"{i}", 100, cache_required=True) for i in range(6)]
    rig = waiting(with_file(2), *requests[:4])
    rig.submit(*requests[4:])
    step(rig)
    drive(rig, after=lambda rig, _: rig.fetching and pytest.fail("it is read again"))
    assert [rig.results[r.id].usage.cached_tokens >= 100 for r in requests] == [True] * 6


def test_request_during_the_drop_of_an_unwanted_read_orders_it_again() -> None:
    rig = waiting(make_rig(), reader("left", 100))
    rig.cancel("left")
    assert not rig.fetching.pop().is_wanted  # so it is dropped
    waiting(rig, reader("a", 100, cache_required=True))
    assert rig.fetching == []
    assert adopted(rig, None, 0) == []
    step(rig)
    assert [want.ref for want in rig.fetching] == [FETCH]
    assert arrive(rig) == [("a", 100)]


def test_one_who_asks_after_a_read_that_nobody_wanted_gets_it_ordered() -> None:
    rig = waiting(make_rig(), reader("left", 100))
    rig.cancel("left")
    rig.fetching.clear()
    assert adopted(rig, None, 0) == []
    waiting(rig, reader("a", 100))
    assert [want.ref for want in rig.fetching] == [FETCH]


# ---- what is known of a file ----


def test_file_known_to_be_of_no_use_is_not_ordered() -> None:
    rig = make_rig()
    rig.wants.files.learn(FETCH, FILE)
    rig.submit(reader("a", 1))
    plan = step(rig)
    assert plan is not None
    assert rig.fetching == []
    assert "no usable beginning" in rig.drivers["a"].warnings[0]
    drive(rig)


def test_file_that_is_required_is_ordered_whatever_is_known_of_it() -> None:
    rig = make_rig()
    rig.wants.files.learn(FETCH, FILE)
    waiting(rig, reader("a", 1, cache_required=True))
    assert [want.ref for want in rig.fetching] == [FETCH]


# ---- whom they hold up ----


def test_only_newcomers_that_nothing_is_scored_of_ask_for_files() -> None:
    asked = reader("a", 100)
    others = reader("b", 100, prompt_logprobs=0), replace(asked, id="c", output=(7,))
    rig = make_rig()
    rig.submit(asked, *others)
    assert [rig.wants.files.must_read(d, 0) for d in rig.drivers.values()] == [True, False, False]
    rig.drivers["a"].clock.admitted_s = 0.0  # it ran before
    assert not rig.wants.files.must_read(rig.drivers["a"], 0)


@pytest.mark.parametrize("keys", ["kkkk", "abcd"])
def test_others_pass_those_that_wait_for_files(keys: str) -> None:
    rig = make_rig()
    readers = [reader(f"{i}", 9, key) for i, key in enumerate(keys)]
    others = [make_request(f"o{i}", [i] * 30, max_tokens=9) for i in range(4)]
    rig.submit(*readers, *others)
    step(rig)
    assert rig.running() == ["o0", "o1", "o2", "o3"]
    assert len(rig.fetching) == len(set(keys))
    drive(rig)


def test_no_more_wait_for_files_than_twice_the_slots() -> None:
    rig = make_rig(2)
    n_most = 2 * N_READ_PER_SLOT
    rig.submit(*(reader(f"{i}", 9, f"{i}") for i in range(n_most + 3)))
    step(rig)
    assert len(rig.batcher.held[Wait.CACHE]) == len(rig.fetching) == n_most
    assert rig.batcher.occupancy().n_waiting == 3
    drive(rig)


def steps_without_writing(rig: Rig, n: int) -> list[ToStore]:
    """Do some steps in which nothing that is copied out is written; return what is to be written."""
    copied_out = list[ToStore]()
    for _ in range(n):
        settle_disk(rig)
        rig.scheduler.begin_step(rig.now)
        plan = rig.scheduler.plan(rig.now)
        if plan is not None:
            result = rig.backend.run(plan.step)
            rig.scheduler.apply(plan, result, rig.now)
        while (want := rig.wants.take()) is not None:
            if isinstance(want, CacheRead):
                rig.fetching.append(want)
            elif isinstance(want, ToStore):
                copied_out.append(want)
    return copied_out


def test_savers_wait_for_a_slow_disk_so_that_their_cells_do_not_pile_up() -> None:
    rig, n_slots = make_rig(2), 2
    savers = [reader(f"{i}", 9, f"{i}", save_cache=True) for i in range(20)]
    rig.submit(*savers)
    copied_out = steps_without_writing(rig, 60)
    n_most = N_STORING_PER_SLOT * n_slots
    assert (
        n_most <= rig.batcher.occupancy().n_storing < n_most + n_slots
    )  # with those that ran when it was full
    for want in copied_out:
        store(rig, want)
    drive(rig)
    assert [rig.results[r.id].finish_reason for r in savers] == ["length"] * 20


@pytest.mark.parametrize("n_readers", [1, N_LOOK - 1])
def test_others_pass_readers_for_which_there_is_no_room_to_read(n_readers: int) -> None:
    rig = make_rig(2)
    n_most = 2 * N_READ_PER_SLOT
    rig.submit(*(reader(f"{i}", 9, f"{i}") for i in range(n_most + n_readers)))
    rig.submit(*(make_request(f"o{i}", [i] * 30, max_tokens=9) for i in range(2)))
    step(rig)
    assert len(rig.fetching) == n_most
    assert [*rig.results] == ["o0", "o1"]
    drive(rig)
    assert all(r.finish_reason == "length" for r in rig.results.values())


def test_others_pass_savers_while_too_many_cells_are_being_written() -> None:
    rig = make_rig(2)
    savers = [reader(f"{i}", 9, f"{i}", save_cache=True) for i in range(2 * N_STORING_PER_SLOT + 2)]
    others = [make_request(f"o{i}", [i] * 30, max_tokens=2) for i in range(2 * N_OVERTAKEN_MAX)]
    rig.submit(*savers)
    copied_out = steps_without_writing(rig, 60)
    assert {d.status for d in rig.drivers.values()} >= {Status.STORING, Status.WAITING}
    rig.submit(*others)
    copied_out += steps_without_writing(rig, 80)
    assert all(rig.drivers[r.id].finish_reason == "length" for r in others)
    for want in copied_out:
        store(rig, want)
    drive(rig)
    assert all(r.finish_reason == "length" for r in rig.results.values())


def test_files_whose_tokens_are_remembered_are_the_last_few() -> None:
    rig = make_rig(1)
    fetches = rig.wants.files
    rig.submit(*(reader(key, 0, key) for key in ("0", "1")))
    for i in range(_N_FILES_MAX + 1):
        fetches.learn(CacheRef(str(i)), FILE)
    assert fetches.why_useless(rig.drivers["0"]) is None  # it is asked for again
    assert fetches.why_useless(rig.drivers["1"]) is not None


def test_tokens_of_files_that_are_remembered_are_bounded() -> None:
    rig = make_rig(1)
    fetches = rig.wants.files
    rig.submit(*(reader(key, 0, key) for key in ("small", "large")))
    fetches.learn(CacheRef("small"), FILE)
    fetches.learn(CacheRef("large"), CacheEntry(range(1, 2**20), 9))
    assert fetches.why_useless(rig.drivers["small"]) is None
    assert fetches.why_useless(rig.drivers["large"]) is not None
