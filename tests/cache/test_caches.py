"""Cells on disk as a user meets them: saved under a key, read by others, refused where they do not fit."""

from __future__ import annotations

import errno
import gc
import os
import re
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import pytest

import cbatch.cache.store
from cbatch.backend.fake import FakeBackend, Faults
from cbatch.cache.store import CacheStore
from cbatch.core.plan import KvCapabilities
from cbatch.core.scheduler import ContinuousBatchScheduler
from cbatch.core.span import PromptCuts
from cbatch.engine import Engine
from cbatch.engine_options import Policy
from cbatch.errors import (
    CacheError,
    ConfigError,
    DeadlineError,
    DuplicateIdError,
    PlanError,
    PromptTooLongError,
    QueueFullError,
    RequestCancelledError,
)
from tests.helpers import A_SECOND_A_STEP
from tests.places import (
    DEFAULTS,
    ENDLESS,
    Place,
    can_all,
    expected,
    expects_little,
    first_chunk,
    item,
    plans_of,
    read_all,
    steps,
    text_of,
    wait_until,
)
from tests.runtime.backends import (
    PATIENCE_S,
    GatedBackend,
    backend_of,
    batcher_of,
    ids_in_flight,
    ids_outside,
    in_thread,
    loop_of,
    owner_of,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from cbatch.cache.cell_file import CachedCells, Fingerprint
    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.core.scheduler import Plan
    from cbatch.core.span import Span
    from cbatch.messages import BatchPrompt
    from cbatch.options import AdapterSet
    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse

SAVED: dict[str, Any] = {"cache_key": "k", "save_cache": True}
READ: dict[str, Any] = {"cache_key": "k"}
REQUIRED: dict[str, Any] = {"cache_key": "k", "cache_required": True}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the keys whose files are read, as it happens."""
    found, read = list[str](), CacheStore.read

    def noted(store: CacheStore, key: str, fingerprint: Fingerprint) -> CachedCells:
        found.append(key)
        return read(store, key, fingerprint)

    monkeypatch.setattr(CacheStore, "read", noted)
    return found


@dataclass(eq=False)
class Gate:
    """Stops whoever reads or writes files until it is let go, and counts the times."""

    n_times: int = 0
    arrived: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        self.n_times += 1
        self.arrived.set()
        assert self.go.wait(PATIENCE_S)

    def wait(self) -> None:
        assert self.arrived.wait(PATIENCE_S)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Stop every reading of a file."""
    gate, read = Gate(), CacheStore.read

    def gated(store: CacheStore, key: str, fingerprint: Fingerprint) -> CachedCells:
        gate.stop()
        return read(store, key, fingerprint)

    monkeypatch.setattr(CacheStore, "read", gated)
    yield gate
    gate.go.set()


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Stop every writing of a file."""
    gate, write = Gate(), CacheStore.write

    def gated(store: CacheStore, key: str, cells: CachedCells, fingerprint: Fingerprint) -> None:
        gate.stop()
        write(store, key, cells, fingerprint)

    monkeypatch.setattr(CacheStore, "write", gated)
    yield gate
    gate.go.set()


def save(place: Place, tokens: Sequence[int], **options: Any) -> BatchResult:
    """Have an engine save a prompt and its answer, and close it."""
    engine = place.engine()
    result = place.result(engine, tokens, **{**SAVED, **options})
    engine.close()
    return result


def n_cells_saved(place: Place) -> int:
    [file] = CacheStore(place.folder, 2**40).files()
    assert file.problem is None
    return file.n_tokens


# ---- saved, and begun with by another engine ----


@pytest.mark.parametrize("seed", [1, 2**64 - 1])
def test_prompt_that_was_saved_is_not_computed_by_the_next_engine(
    any_way: Place, seed: int
) -> None:
    tokens = text_of(100)
    assert save(any_way, tokens, seed=seed).warnings == ()
    engine = any_way.engine()
    result = any_way.result(engine, tokens, **READ, seed=seed)
    assert result.token_ids == expected(tokens, seed=seed)
    assert (result.usage.cached_tokens, result.warnings) == (99, ())
    assert engine.stats().n_prompt_tokens == 1


def test_prompt_that_goes_on_behind_a_saved_answer_computes_what_is_new(any_way: Place) -> None:
    first = save(any_way, text_of(50))
    tokens = [*text_of(50), *first.token_ids, 1, 2, 3]
    engine = any_way.engine()
    result = any_way.result(engine, tokens, **READ)
    assert result.token_ids == expected(tokens)
    assert result.usage.cached_tokens == 50 + 6 - 1  # the last token of an answer has no cell
    assert engine.stats().n_prompt_tokens == len(tokens) - 55


def test_chat_grows_turn_by_turn_under_one_key(any_way: Place) -> None:
    tokens, n_computed = text_of(40), 0
    for _ in range(4):
        engine = any_way.engine()
        answer = any_way.result(engine, tokens, **SAVED)
        assert answer.token_ids == expected(tokens)
        tokens = [*tokens, *answer.token_ids, 9, 9]
        n_computed += engine.stats().n_prompt_tokens
        engine.close()
    assert n_computed == 40 + 3 * 3  # the last token of each answer and two new ones


def test_key_that_is_required_and_not_there_fails_alone(any_way: Place) -> None:
    engine = any_way.engine()
    items = [item(text_of(40), **REQUIRED), item(text_of(40, 5)), item(text_of(40), **READ)]
    results = any_way.results(engine.run(items))
    assert [r.finish_reason for r in results] == ["error", "length", "length"]
    error = results[0].error
    assert isinstance(error, CacheError)
    assert (error.key, error.reason[:22]) == ("k", "no cells are saved und")
    assert [r.token_ids for r in results[1:]] == [expected(text_of(40, 5)), expected(text_of(40))]
    assert results[2].warnings == (f"cache_key: {error.reason}",)


def test_file_of_larger_windows_serves_small_ones(any_way: Place) -> None:
    save(any_way, text_of(200))
    result = any_way.result(any_way.engine(n_window=64), text_of(50), **READ)
    assert result.token_ids == expected(text_of(50))
    assert result.usage.cached_tokens == 49


def test_prompt_already_in_memory_is_not_read_again(place: Place, reads: list[str]) -> None:
    engine = place.engine()
    for _ in range(3):
        assert place.result(engine, text_of(50), **SAVED).token_ids == expected(text_of(50))
    assert reads == ["k"]  # before there was any


# ---- save, clear, free: in this order ----


def test_slot_whose_beginning_the_next_one_takes_over_is_saved_whole(by_hand: Place) -> None:
    engine = by_hand.engine(n_slots=1, kind=GatedBackend)
    saver = engine.submit(item(text_of(50), **SAVED))
    steps(engine, 3)
    [second] = by_hand.results(engine.submit(item([*text_of(40), 1, 2])))
    [first] = by_hand.results(saver)
    assert second.usage.cached_tokens == 40
    assert n_cells_saved(by_hand) == 55
    tokens = [*text_of(50), *first.token_ids]
    result = by_hand.result(by_hand.engine(), [*tokens, 1], **REQUIRED)
    assert (result.token_ids, result.usage.cached_tokens) == (expected([*tokens, 1]), 55)


def test_queue_of_savers_on_one_slot_leaves_every_file_right(any_way: Place) -> None:
    prompts = [text_of(30 + i, start=i) for i in range(12)]
    items = [item(p, cache_key=f"k{i}", save_cache=True) for i, p in enumerate(prompts)]
    any_way.results(any_way.engine(n_slots=1).run(items))
    again = [item(p, cache_key=f"k{i}", cache_required=True) for i, p in enumerate(prompts)]
    results = any_way.results(any_way.engine(n_slots=3).run(again))
    assert [r.token_ids for r in results] == [expected(p) for p in prompts]
    assert [r.usage.cached_tokens for r in results] == [len(p) - 1 for p in prompts]


def test_result_comes_when_the_file_is_there_and_holds_up_nobody(
    place: Place, writing: Gate
) -> None:
    engine = place.engine(n_slots=1)
    saver = engine.submit(item(text_of(40), **SAVED))
    writing.wait()
    assert place.result(engine, text_of(20, start=3)).finish_reason == "length"
    with pytest.raises(TimeoutError):
        saver.results(timeout=0.01)
    assert place.keys() == []
    writing.go.set()
    assert place.results(saver)[0].token_ids == expected(text_of(40))
    assert place.keys() == ["k"]


def test_reader_of_chunks_gets_the_last_one_when_the_file_is_there(any_way: Place) -> None:
    engine = any_way.engine()
    response = engine.submit(item(text_of(40), **SAVED))
    found = [(chunk, any_way.keys()) for chunk in read_all(any_way, response)]
    ends = [keys for chunk, keys in found if chunk.finish_reason is not None]
    assert ends == [["k"]]
    assert "".join(chunk.text for chunk, _ in found) == any_way.results(response)[0].text


# ---- a failed save keeps the answer ----


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def lightning(*_: object) -> None:
    raise RuntimeError("struck by lightning")


@pytest.mark.parametrize(
    ("where", "fails", "words"),
    [
        ("cbatch.cache.store._write_part", full_disk, "No space left.*cbatch cache rm"),
        ("cbatch.cache.store._write_part", read_only, "Permission denied"),
        ("cbatch.cache.store.CacheStore.write", lightning, "lightning"),
    ],
)
def test_file_that_cannot_be_written_leaves_the_answer_with_a_warning(
    any_way: Place,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    fails: Callable[..., None],
    words: str,
) -> None:
    engine = any_way.engine()
    save(any_way, text_of(30))
    before = any_way.file().read_bytes()
    monkeypatch.setattr(where, fails)
    result = any_way.result(engine, text_of(40), **SAVED)
    assert (result.error, result.token_ids) == (None, expected(text_of(40)))
    assert re.search(f"not saved.*{words}", result.warnings[-1])
    assert any_way.file().read_bytes() == before
    assert any_way.result(engine, text_of(40, 3)).token_ids == expected(text_of(40, 3))


def test_cells_larger_than_the_folder_leave_the_answer_with_a_warning(
    tmp_path: Path,
) -> None:
    backend = FakeBackend(1, 200_000, 4096, memory=can_all(200_000))
    tokens = text_of(150_000)
    with Engine(backend, options=DEFAULTS, cache_dir=tmp_path, cache_mib=1) as engine:
        result = engine.submit(item(tokens, **SAVED)).result(timeout=PATIENCE_S)
    assert result.finish_reason == "length"
    assert "raise cache_mib" in result.warnings[-1]
    assert list(tmp_path.iterdir()) == []


def test_cells_that_cannot_be_copied_out_leave_the_answer_with_a_warning(any_way: Place) -> None:
    engine = any_way.engine(faults=Faults(swap=lambda _: False))
    result = any_way.result(engine, text_of(40), **SAVED)
    assert result.token_ids == expected(text_of(40))
    assert "could not be copied to host memory" in result.warnings[-1]
    assert any_way.keys() == []


def test_failed_step_saves_what_was_computed_again(any_way: Place) -> None:
    codes = iter([0, 0, -3, -3, 0, 0, 2])
    engine = any_way.engine(faults=Faults(code=lambda _: next(codes, 0)))
    assert any_way.result(engine, text_of(70), **SAVED).token_ids == expected(text_of(70))
    result = any_way.result(any_way.engine(), text_of(70), **REQUIRED)
    assert (result.token_ids, result.usage.cached_tokens) == (expected(text_of(70)), 69)


# ---- every way to end ----


def test_step_that_fails_after_a_stop_string_loses_cells_but_no_answer(
    any_way: Place,
) -> None:
    memory = KvCapabilities("recurrent", 2, can_trim=False, can_save=True, saved_bytes=64)
    answer, vocab = expected(text_of(20), 30), FakeBackend(1).vocab
    k = next(i for i in range(3, 28) if answer[i] > 256 and answer.index(answer[i]) == i)
    chunks = list[tuple[int, int]]()

    def code(step: Sequence[Span]) -> int:
        chunks.extend((c.slot, c.start) for c in step)
        return -3 if any((c.slot, c.start) == (1, 20 + k) for c in step) else 0

    engine = any_way.engine(2, memory=memory, faults=Faults(code=code))
    beside = item(text_of(10, start=5), max_tokens=200)
    stopped = item(text_of(20), **SAVED, max_tokens=30, stop=vocab.piece(answer[k]).decode())
    other, result = any_way.results(engine.run([beside, stopped]))
    assert (1, 20 + k) in chunks  # the run went on behind the stop string
    assert other.token_ids == expected(text_of(10, start=5), 200)
    assert result.finish_reason == "stop"
    assert "not saved" in result.warnings[-1]
    assert any_way.keys() == []


def saver(**options: Any) -> BatchPrompt:
    """One that goes on until it is cancelled."""
    return item(text_of(40), "saver", **{**SAVED, "max_tokens": ENDLESS - 40, **options})


def proves(place: Place, n_cells: int) -> None:
    """The file has so many cells, and they are right."""
    assert n_cells_saved(place) == n_cells
    tokens = [*text_of(40), *expected(text_of(40), n_cells)][:n_cells]
    result = place.result(place.engine(1, n_cells + 64), [*tokens, 1], **REQUIRED)
    assert result.token_ids == expected([*tokens, 1])
    assert result.usage.cached_tokens == n_cells


def test_stop_token_saves_what_stands_before_it(any_way: Place) -> None:
    answer = expected(text_of(40), 20)
    n = answer.index(answer[9]) + 1
    result = save(any_way, text_of(40), max_tokens=20, stop_token_ids=[answer[9]])
    assert (result.finish_reason, result.usage.completion_tokens) == ("stop", n)
    proves(any_way, 40 + n - 1)


def test_stop_string_saves_no_token_past_it(any_way: Place) -> None:
    vocab = FakeBackend(1).vocab
    answer = expected(text_of(40), 40)
    i = next(i for i, t in enumerate(answer) if i > 4 and t > 256)
    result = save(any_way, text_of(40), max_tokens=40, stop=vocab.piece(answer[i]).decode())
    assert result.finish_reason == "stop"
    n_known = n_cells_saved(any_way) - 40
    assert 0 < n_known <= result.usage.completion_tokens
    proves(any_way, 40 + n_known)


def test_end_of_the_window_saves_all_of_it(any_way: Place) -> None:
    engine = any_way.engine(n_window=64)
    result = any_way.result(engine, text_of(40), **SAVED, max_tokens=None, seed=1)
    assert result.finish_reason == "length"  # the engine's own cap
    engine = Engine(
        FakeBackend(1, 64, 64, memory=can_all(64)),
        options={"ignore_eos": True, "seed": 1},
        cache_dir=any_way.folder,
    )
    with engine:
        assert any_way.result(engine, text_of(40), **SAVED).finish_reason == "window"
    proves(any_way, 63)


def test_cancel_in_a_slot_saves_what_there_is(any_way: Place) -> None:
    engine = any_way.engine(n_window=ENDLESS, kind=GatedBackend)
    response = engine.run([saver()])
    first_chunk(response)
    assert engine.cancel("saver")
    [result] = any_way.results(response)
    assert (result.finish_reason, result.error) == ("cancelled", None)
    assert result.token_ids == expected(text_of(40), len(result.token_ids))
    proves(any_way, 40 + len(result.token_ids) - 1)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_end_of_a_batch_saves_what_ran_and_nothing_else(any_way: Place, end: str) -> None:
    engine = any_way.engine(n_slots=2, n_window=ENDLESS, kind=GatedBackend)
    items = [item(text_of(40, i), cache_key=f"k{i}", save_cache=True) for i in range(5)]
    response = engine.run(items, options={"max_tokens": ENDLESS - 100})
    first_chunk(response)
    if end == "cancel":
        assert response.cancel() == 5
    else:
        engine.close()
    results = any_way.results(response)
    assert [r.finish_reason for r in results] == ["cancelled"] * 5
    saved = [i for i, r in enumerate(results) if r.error is None and not r.warnings]
    assert saved  # the others have a slot, and nothing of their prompts is computed
    assert any_way.keys() == [f"k{i}" for i in saved]
    assert not ids_in_flight(engine)


def test_time_that_is_over_in_a_slot_saves_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GatedBackend(1, 256, 64, cost=A_SECOND_A_STEP, memory=can_all(256))
    monkeypatch.setattr("time.perf_counter", lambda: backend.now_s)
    engine = Engine(backend, options=DEFAULTS, threaded=False, cache_dir=tmp_path)
    results = engine.run(
        [
            item(text_of(40), **SAVED, max_tokens=50, timeout_s=4.0),
            item(text_of(40), cache_key="queued", save_cache=True, timeout_s=4.0),
        ]
    ).results(return_errors=True)
    assert [(r.finish_reason, len(r.token_ids)) for r in results] == [
        ("timeout", 4),
        ("timeout", 0),
    ]
    assert isinstance(results[1].error, DeadlineError)
    engine.close()
    monkeypatch.undo()
    place = Place(tmp_path, "by hand")
    assert place.keys() == ["k"]
    proves(place, 43)


def test_request_that_fails_saves_nothing(any_way: Place) -> None:
    backend_faults = Faults(broken=lambda chunk: chunk.start > 42)
    engine = any_way.engine(faults=backend_faults)
    result = any_way.result(engine, text_of(40), **SAVED, max_tokens=20)
    assert result.finish_reason == "error"
    assert any_way.keys() == []
    assert any_way.result(engine, text_of(30)).token_ids == expected(text_of(30))


def test_prompt_that_is_refused_saves_nothing_and_frees_its_key(any_way: Place) -> None:
    engine = any_way.engine(n_window=64)
    result = any_way.result(engine, text_of(64), **SAVED)
    assert isinstance(result.error, PromptTooLongError)
    assert any_way.keys() == []
    assert any_way.result(engine, text_of(40), **SAVED).finish_reason == "length"


def test_paused_one_that_is_cancelled_in_its_slot_saves_what_there_is(by_hand: Place) -> None:
    engine = by_hand.engine(n_window=ENDLESS, kind=GatedBackend)
    response = engine.run([saver()])
    steps(engine, 5)
    assert engine.pause("saver")
    assert engine.cancel("saver")
    [result] = by_hand.results(response)
    proves(by_hand, 40 + len(result.token_ids) - 1)


def test_paused_one_without_a_slot_ends_with_a_warning(by_hand: Place) -> None:
    engine = by_hand.engine(n_slots=1, n_window=ENDLESS, kind=GatedBackend)
    response = engine.run([saver()])
    steps(engine, 5)
    engine.pause("saver")
    by_hand.result(engine, text_of(10, start=3))
    engine.cancel("saver")
    [result] = by_hand.results(response)
    assert (result.finish_reason, by_hand.keys()) == ("cancelled", [])
    assert "not saved" in result.warnings[-1]


def test_preempted_ones_save_all_their_cells(any_way: Place) -> None:
    memory = KvCapabilities("unified", 160, can_save=True, can_copy=True, saved_bytes_per_cell=1024)
    prompts = [text_of(20, start=i) for i in range(6)]
    engine = any_way.engine(
        4, 128, memory=memory, schedule={"admission": "optimistic", "swap_mib": 0}
    )
    expects_little(any_way, engine)
    items = [item(p, cache_key=f"k{i}", save_cache=True) for i, p in enumerate(prompts)]
    results = any_way.results(engine.run(items, options={"max_tokens": 60}))
    assert [r.token_ids for r in results] == [expected(p, 60) for p in prompts]
    if any_way.way == "by hand":  # with a thread that reads, they may come one after the other
        assert engine.stats().n_preempted > 0
    again = any_way.engine(4, 128, memory=memory)
    for i, (p, r) in enumerate(zip(prompts, results, strict=True)):
        tokens = [*p, *r.token_ids, 7]
        found = any_way.result(again, tokens, cache_key=f"k{i}", cache_required=True)
        assert (found.token_ids, found.usage.cached_tokens) == (expected(tokens), 79)


# ---- close, Ctrl-C ----


def test_close_while_a_file_is_written_waits_for_it(place: Place, writing: Gate) -> None:
    engine = place.engine()
    response = engine.submit(item(text_of(40), **SAVED))
    writing.wait()
    closed = in_thread(engine.close)
    with pytest.raises(TimeoutError):
        response.results(timeout=0.01)
    writing.go.set()
    closed()
    assert place.results(response)[0].token_ids == expected(text_of(40))
    assert place.keys() == ["k"]


def test_close_while_a_file_is_read_ends_who_waits_for_it(place: Place, reading: Gate) -> None:
    engine = place.engine()
    response = engine.submit(item(text_of(40), **READ))
    reading.wait()
    closed = in_thread(engine.close)
    [result] = place.results(response)
    assert isinstance(result.error, RequestCancelledError)
    reading.go.set()
    closed()


def test_close_by_the_thread_that_reads_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [Engine(FakeBackend(memory=can_all(1024)), cache_dir=tmp_path)]
    owner, loop = owner_of(made[0]), loop_of(made[0])

    def read(*_: object) -> None:
        loop.close()  # the collector may run in any thread, and find an engine that nobody has
        raise OSError(5, "I/O")

    monkeypatch.setattr(CacheStore, "read", read)
    response = made.pop().submit(item(text_of(40), **READ))
    [result] = response.results(timeout=PATIENCE_S, return_errors=True)
    assert isinstance(result.error, RequestCancelledError)
    owner.join(PATIENCE_S)
    assert not owner.is_alive()


def test_engine_dropped_after_a_save_is_freed_without_the_collector(tmp_path: Path) -> None:
    gc.disable()
    try:
        engine = Engine(FakeBackend(memory=can_all(1024)), options=DEFAULTS, cache_dir=tmp_path)
        owner, ref = owner_of(engine), weakref.ref(engine)
        engine.submit(item(text_of(40), **SAVED)).result(timeout=PATIENCE_S)
        del engine
        owner.join(PATIENCE_S)
        assert not owner.is_alive()
        assert ref() is None
    finally:
        gc.enable()


def test_close_with_a_disk_that_is_full_loses_no_answer(
    any_way: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cbatch.cache.store, "_write_part", full_disk)
    engine = any_way.engine(n_window=ENDLESS, kind=GatedBackend)
    response = engine.run([saver()])
    first_chunk(response)
    engine.close()
    [result] = any_way.results(response)
    assert (result.finish_reason, result.error) == ("cancelled", None)
    assert "No space left" in result.warnings[-1]


def test_plan_that_fails_at_close_ends_savers_and_frees_the_backend(
    any_way: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ContinuousBatchScheduler.plan

    def fails_last(scheduler: ContinuousBatchScheduler, now: float) -> Plan | None:
        if scheduler.batcher.storing:
            raise PlanError("no plan")
        return plan(scheduler, now)

    engine = any_way.engine(n_window=ENDLESS, kind=GatedBackend)
    backend = backend_of(engine, GatedBackend)
    response = engine.run([saver()])
    first_chunk(response)
    monkeypatch.setattr(ContinuousBatchScheduler, "plan", fails_last)
    engine.close()
    [result] = any_way.results(response)
    assert (result.finish_reason, result.error) == ("cancelled", None)
    assert "could not be copied" in result.warnings[-1]
    assert backend.is_closed


@pytest.mark.parametrize("is_threaded", [True, False])
def test_engine_that_fails_ends_savers_with_its_error(tmp_path: Path, is_threaded: bool) -> None:
    place = Place(tmp_path, "threaded" if is_threaded else "by hand")
    engine = place.engine(faults=Faults(code=lambda _: -3))
    results = place.results(
        engine.run([item(text_of(9, i), cache_key=f"k{i}", save_cache=True) for i in range(30)])
    )
    assert {r.finish_reason for r in results} == {"error"}
    assert place.keys() == []
    engine.close()


class Struck(FakeBackend):
    """Fails in every run that computes."""

    def run(self, plan: StepPlan) -> StepResult:
        if plan.spans:
            raise RuntimeError("struck by lightning")
        return super().run(plan)


def test_engine_that_fails_while_files_are_read_closes(tmp_path: Path, reading: Gate) -> None:
    place = Place(tmp_path, "threaded")
    engine = place.engine(kind=Struck)
    waiting = engine.run([item(text_of(9), **{**REQUIRED, "cache_key": f"k{i}"}) for i in range(3)])
    reading.wait()
    failed = [*place.results(engine.submit(item(text_of(9)))), *place.results(waiting)]
    assert {r.finish_reason for r in failed} == {"error"}
    reading.go.set()
    engine.close()  # where the thread of the engine has failed, pytest tells


class Interrupted(FakeBackend):
    """Ctrl-C strikes in the first run that copies cells out, before or after its work."""

    is_late = False
    has_struck = False

    def run(self, plan: StepPlan) -> StepResult:
        if self.has_struck or not plan.saves:
            return super().run(plan)
        self.has_struck = True
        if self.is_late:
            super().run(plan)
        raise KeyboardInterrupt


class LateInterrupted(Interrupted):
    is_late = True


@pytest.mark.parametrize("kind", [Interrupted, LateInterrupted])
def test_ctrl_c_while_cells_are_copied_out_disturbs_nobody_beside(
    by_hand: Place, kind: type[FakeBackend]
) -> None:
    engine = by_hand.engine(kind=kind)
    other = engine.submit(item(text_of(20, start=3), max_tokens=40))
    response = engine.submit(item(text_of(40), **SAVED))
    with pytest.raises(KeyboardInterrupt):
        response.results(timeout=PATIENCE_S)
    [result], [beside] = by_hand.results(response), by_hand.results(other)
    assert result.token_ids == expected(text_of(40))
    assert "not saved" in result.warnings[-1]
    assert beside.token_ids == expected(text_of(20, start=3), 40)


class StruckBeforeCopies(FakeBackend):
    """Ctrl-C strikes in the first run that copies cells from slot to slot, before its work."""

    has_struck = False

    def run(self, plan: StepPlan) -> StepResult:
        if self.has_struck or not plan.copies:
            return super().run(plan)
        self.has_struck = True
        raise KeyboardInterrupt


def test_close_after_ctrl_c_saves_nothing_that_the_slots_do_not_hold(by_hand: Place) -> None:
    engine = by_hand.engine(n_slots=2, kind=StruckBeforeCopies)
    engine.submit(item(text_of(100), max_tokens=150))
    backend_of(engine, FakeBackend).interrupt()
    engine.step()
    by_hand.result(
        engine, text_of(150, start=5), max_tokens=3
    )  # its cells stay where the copy goes
    response = engine.submit(item([*text_of(100), 9], **SAVED, max_tokens=20))
    with pytest.raises(KeyboardInterrupt):
        response.results(timeout=PATIENCE_S)
    engine.close()
    [result] = by_hand.results(response)
    assert result.finish_reason == "cancelled"
    assert by_hand.keys() == []


@pytest.mark.parametrize("what", ["read", "write"])
def test_ctrl_c_while_a_file_is_read_or_written_leaves_nobody_waiting(
    by_hand: Place, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    engine = by_hand.engine()
    response = engine.submit(item(text_of(40), **SAVED))

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CacheStore, what, strike)
        with pytest.raises(KeyboardInterrupt):
            all(iter(engine.step, False))
    [result] = by_hand.results(response)
    assert result.token_ids == expected(text_of(40))
    assert "broken off" in result.warnings[0]
    assert by_hand.result(engine, text_of(40), **READ).token_ids == expected(text_of(40))


def test_ctrl_c_while_run_waits_for_room_leaves_the_engine_usable(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = place.engine(1, ENDLESS, kind=GatedBackend, schedule={"max_queue": 0})
    in_flight = batcher_of(engine).in_flight

    def strike(*_: object) -> None:
        wait_until(lambda: in_flight["a"].n_output > 0)
        raise KeyboardInterrupt

    items = [item(text_of(9), id, cache_key=id, save_cache=True, max_tokens=9999) for id in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(loop_of(engine), "wait_for_change", strike)
        with pytest.raises(KeyboardInterrupt):
            engine.run(items)
    wait_until(lambda: not ids_in_flight(engine))
    assert not ids_outside(engine)
    assert place.result(engine, text_of(9)).token_ids == expected(text_of(9))


# ---- one key, several savers ----


def refuses(call: Callable[[], object]) -> CacheError:
    with pytest.raises(CacheError, match="save it: give each its own cache_key") as caught:
        call()
    return caught.value


def test_key_that_stands_twice_in_a_batch_is_refused_and_nothing_is_queued(any_way: Place) -> None:
    engine = any_way.engine()
    items = [item(text_of(40), **SAVED), item(text_of(30)), item(text_of(20), **SAVED)]
    assert refuses(lambda: engine.run(items)).key == "k"
    refuses(lambda: engine.run([item(text_of(9)), item(text_of(8))], options=SAVED))
    assert not ids_in_flight(engine)
    assert engine.stats().n_submitted == 0
    assert any_way.keys() == []
    assert not any_way.folder.exists()
    assert any_way.result(engine, text_of(40), **SAVED).finish_reason == "length"


def test_key_that_is_in_flight_is_refused_until_its_request_has_ended(any_way: Place) -> None:
    engine = any_way.engine(n_window=ENDLESS, kind=GatedBackend)
    first = engine.run([saver()])
    refuses(lambda: engine.submit(item(text_of(30), **SAVED)))
    refuses(lambda: engine.run([item(text_of(20)), item(text_of(30), **SAVED)]))
    assert ids_in_flight(engine) == ["saver"]
    assert any_way.result(engine, text_of(20), cache_key="other", save_cache=True).error is None
    engine.cancel("saver")
    any_way.results(first)
    assert any_way.result(engine, text_of(30), **SAVED).finish_reason == "length"
    assert any_way.keys() == ["k", "other"]


def test_key_is_free_though_another_has_the_id_of_who_saved_it(any_way: Place) -> None:
    engine = any_way.engine(n_window=ENDLESS, kind=GatedBackend)
    any_way.results(engine.run([item(text_of(20), "saver", **SAVED)]))
    holder = engine.run([saver(save_cache=False)])
    assert any_way.result(engine, text_of(30), **SAVED).error is None
    engine.cancel("saver")
    any_way.results(holder)


def test_key_whose_file_is_being_written_is_in_flight(place: Place, writing: Gate) -> None:
    engine = place.engine()
    first = engine.submit(item(text_of(40), "a", **SAVED))
    writing.wait()
    refuses(lambda: engine.submit(item(text_of(30), **SAVED)))
    with pytest.raises(DuplicateIdError):
        engine.submit(item(text_of(30), "a"))
    assert not engine.cancel("a")
    assert not engine.pause("a")
    writing.go.set()
    place.results(first)
    assert place.result(engine, text_of(30), **SAVED).error is None


def test_key_from_many_threads_is_taken_by_one(place: Place) -> None:
    engine = place.engine(n_slots=8, n_window=ENDLESS, kind=GatedBackend)
    start = threading.Barrier(8)
    taken: list[BatchResponse] = []

    def submit() -> bool:
        start.wait(PATIENCE_S)
        with suppress(CacheError):
            taken.append(engine.submit(item(text_of(20), **SAVED, max_tokens=9999)))
            return True
        return False

    waits = [in_thread(submit) for _ in range(8)]
    assert sum(wait() for wait in waits) == 1
    engine.cancel_all()
    assert [r.finish_reason for r in place.results(taken[0])] == ["cancelled"]


def test_key_that_a_generator_gives_twice_fails_that_item_alone(any_way: Place) -> None:
    engine = any_way.engine(n_window=ENDLESS, kind=GatedBackend)
    holder = engine.run([saver()])
    items = [item(text_of(20)), item(text_of(30), **SAVED), item(text_of(25, start=3))]
    results = any_way.results(engine.run(iter(items)))
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert isinstance(results[1].error, CacheError)
    assert results[2].token_ids == expected(text_of(25, start=3))
    assert any_way.keys() == []
    engine.cancel("saver")
    any_way.results(holder)
    [again] = any_way.results(engine.run(iter([item(text_of(30), **SAVED)])))
    assert again.finish_reason == "length"


def test_key_of_a_batch_that_was_rejected_is_free(by_hand: Place) -> None:
    engine = by_hand.engine(n_slots=1, schedule={"max_queue": 0, "when_full": "reject"})
    with pytest.raises(QueueFullError):
        engine.run([item(text_of(20), **SAVED), item(text_of(30))])
    assert by_hand.result(engine, text_of(20), **SAVED).finish_reason == "length"


def test_key_may_be_read_while_somebody_saves_it(any_way: Place) -> None:
    save(any_way, text_of(60))
    engine = any_way.engine()
    tokens = [[*text_of(60), 200, i] for i in range(4)]
    items = [item(t, **(SAVED if i == 0 else READ)) for i, t in enumerate(tokens)]
    results = any_way.results(engine.run(items))
    assert [r.token_ids for r in results] == [expected(t) for t in tokens]
    assert engine.stats().n_prompt_tokens <= 2 * 4


@pytest.mark.parametrize("name", ["save_cache", "cache_required"])
def test_option_without_its_key_is_refused(any_way: Place, name: str) -> None:
    options: dict[str, Any] = {name: True}
    with pytest.raises(ConfigError, match="cache_key"):
        any_way.engine().submit(item(text_of(9), **options))


@pytest.mark.parametrize(
    ("can", "options", "words"),
    [
        ({}, READ, "cannot save this model's memory"),
        ({"can_save": True, "can_check": False}, READ, r"cache_key='k' .* layout"),
        ({"can_save": True, "can_check": False}, SAVED, r"cache_key='k' .* layout"),
    ],
    ids=["no save", "read", "save"],
)
def test_key_where_cells_could_not_be_saved_or_checked_is_refused(
    place: Place, can: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    engine = place.engine(memory=KvCapabilities("partitioned", 1024, **can))
    with pytest.raises(ConfigError, match=words):
        engine.submit(item(text_of(9), **options))


# ---- one file, many readers ----


def test_file_that_has_a_first_token_in_common_alone_is_none(any_way: Place) -> None:
    save(any_way, text_of(200))
    other = [text_of(1)[0], *text_of(60, start=99)]  # as every chat begins with its template
    failed, warned = any_way.results(
        any_way.engine().run([item(other, **REQUIRED), item(other, **READ)])
    )
    assert isinstance(failed.error, CacheError)
    assert "no usable beginning" in failed.error.reason
    assert warned.warnings == (f"cache_key: {failed.error.reason}",)
    assert (warned.token_ids, warned.usage.cached_tokens) == (expected(other), 0)


def test_file_known_to_be_of_no_use_is_not_read_again(by_hand: Place, reads: list[str]) -> None:
    save(by_hand, text_of(200))
    reads.clear()
    engine = by_hand.engine()
    prompts = [[text_of(1)[0], *text_of(60, start=i)] for i in range(1, 6)]
    results = [by_hand.result(engine, p, **READ) for p in prompts]
    assert [r.token_ids for r in results] == [expected(p) for p in prompts]
    assert [len(r.warnings) for r in results] == [1] * 5
    assert reads == ["k"]


@pytest.mark.parametrize("n_shared", [(40, 200, 200), (1, 200, 200), (200, 40, 200)])
def test_first_of_those_waiting_for_a_file_takes_nothing_from_the_others(
    any_way: Place, reads: list[str], n_shared: tuple[int, ...]
) -> None:
    save(any_way, text_of(200))
    reads.clear()
    prompts = [[*text_of(n), *text_of(20, start=90 + i)] for i, n in enumerate(n_shared)]
    with together(len(prompts)):
        results = any_way.results(any_way.engine().run([item(p, **READ) for p in prompts]))
    assert [r.token_ids for r in results] == [expected(p) for p in prompts]
    assert [r.usage.cached_tokens for r in results] == [n if n > 1 else 0 for n in n_shared]
    assert reads == ["k"]


@pytest.mark.parametrize(("n_slots", "is_shared"), [(1, True), (4, True), (20, False)])
def test_many_readers_read_once_and_compute_what_is_their_own(
    any_way: Place, reads: list[str], n_slots: int, is_shared: bool
) -> None:
    save(any_way, text_of(80), prefill_only=True)
    reads.clear()
    engine = any_way.engine(n_slots=n_slots, schedule={"share_prefixes": is_shared})
    prompts = [[*text_of(80), 200, i] for i in range(20)]
    results = any_way.results(engine.run([item(p, **REQUIRED) for p in prompts]))
    assert [r.token_ids for r in results] == [expected(p) for p in prompts]
    assert min(r.usage.cached_tokens for r in results) >= 80
    assert len(reads) == 1 if is_shared else len(reads) <= 20


def test_readers_that_begin_with_just_the_file_compute_what_is_their_own(any_way: Place) -> None:
    engine = any_way.engine(cuts=PromptCuts.every(16))
    any_way.result(engine, text_of(64), **SAVED)
    engine.close()
    engine = any_way.engine(cuts=PromptCuts.every(16))
    prompts = [[*text_of(64), i] for i in range(4)]
    results = any_way.results(engine.run([item(p, **REQUIRED) for p in prompts]))
    assert [r.token_ids for r in results] == [expected(p) for p in prompts]
    assert [r.usage.cached_tokens for r in results] == [64] * 4


def test_followers_are_not_overtaken_by_those_behind_them(by_hand: Place) -> None:
    engine = by_hand.engine(kind=GatedBackend)
    response = engine.run([item([*text_of(70), i], max_tokens=50) for i in range(12)])
    order = [int(result.id) for result in response.as_completed()]
    assert [sorted(order[i : i + 4]) for i in (0, 4, 8)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_readers_of_a_unified_pool_share_the_cells(any_way: Place) -> None:
    memory = KvCapabilities("unified", 200, can_save=True, can_copy=True)
    engine = any_way.engine(4, 128, memory=memory)
    any_way.result(engine, text_of(80), **SAVED, prefill_only=True)
    engine.close()
    engine = any_way.engine(4, 128, memory=memory)
    prompts = [[*text_of(80), 200, i] for i in range(12)]
    results = any_way.results(engine.run([item(p, **REQUIRED) for p in prompts]))
    assert [r.token_ids for r in results] == [expected(p) for p in prompts]
    assert engine.stats().n_prompt_tokens <= 2 * 12


def at_ends(kind: str = "recurrent") -> KvCapabilities:
    """Memory of four slots that can be kept at the end of a sequence alone."""
    kinds = {"recurrent": 4, "partitioned": 1024, "unified": 600}
    return KvCapabilities(
        cast("Any", kind),
        kinds[kind],
        can_trim=False,
        can_save=True,
        saved_bytes=64,
        saved_bytes_per_cell=0 if kind == "recurrent" else 8,
    )


@pytest.mark.parametrize("kind", ["recurrent", "partitioned", "unified"])
def test_memory_that_cannot_be_cut_begins_at_two_places_of_a_file(
    any_way: Place, kind: str
) -> None:
    engine = any_way.engine(memory=at_ends(kind))
    first = any_way.result(engine, text_of(50), **SAVED)
    engine.close()
    whole, same, part = [*text_of(50), *first.token_ids, 1], text_of(50), [*text_of(50), 1]
    other = [*text_of(10), 1]
    engine = any_way.engine(memory=at_ends(kind))
    prompts = [whole, same, other, part, same, whole]
    found = any_way.results(engine.run([item(p, **READ) for p in prompts]))
    assert [r.token_ids for r in found] == [expected(p) for p in prompts]
    assert [r.usage.cached_tokens for r in found] == [55, 49, 0, 49, 49, 55]
    assert [len(r.warnings) for r in found] == [0, 0, 1, 0, 0, 0]


def test_prompt_that_is_saved_again_is_begun_before_its_answer_again(any_way: Place) -> None:
    for n_cached in (0, 49, 49):
        engine = any_way.engine(memory=at_ends())
        result = any_way.result(engine, text_of(50), **SAVED)
        assert (result.token_ids, result.usage.cached_tokens) == (expected(text_of(50)), n_cached)
        engine.close()


def test_file_that_was_read_is_a_checkpoint_for_those_who_come_later(any_way: Place) -> None:
    engine = any_way.engine(memory=at_ends())
    any_way.result(engine, text_of(50), **SAVED)
    engine.close()
    engine = any_way.engine(memory=at_ends())
    assert any_way.result(engine, text_of(50), **READ).usage.cached_tokens == 49
    any_way.file().unlink()
    for options in (READ, REQUIRED, {}):
        result = any_way.result(engine, [*text_of(50), 2], **options)
        assert (result.usage.cached_tokens, result.warnings) == (49, ())
    assert engine.stats().n_checkpoints == 1


def test_file_of_an_engine_without_checkpoints_is_begun_with_whole(any_way: Place) -> None:
    schedule = {"checkpoint_mib": 0}
    engine = any_way.engine(memory=at_ends(), schedule=schedule)
    first = any_way.result(engine, text_of(50), **SAVED)
    engine.close()
    engine = any_way.engine(memory=at_ends(), schedule=schedule)
    prompts = [text_of(50), [*text_of(50), *first.token_ids, 1]]
    found = [any_way.result(engine, p, **READ) for p in prompts]
    assert [r.token_ids for r in found] == [expected(p) for p in prompts]
    assert [r.usage.cached_tokens for r in found] == [0, 55]


def test_prompt_alone_is_begun_again_by_itself_where_memory_cannot_be_cut(any_way: Place) -> None:
    engine = any_way.engine(memory=at_ends())
    any_way.result(engine, text_of(50), **SAVED, prefill_only=True)
    engine.close()
    for prompt, n_cached in ((text_of(50), 49), ([*text_of(50), 1], 50)):
        engine = any_way.engine(memory=at_ends())
        result = any_way.result(engine, prompt, **REQUIRED)
        assert (result.token_ids, result.usage.cached_tokens) == (expected(prompt), n_cached)
        engine.close()


def test_answer_cut_behind_a_stop_string_leaves_a_file_of_its_prompt(
    any_way: Place,
) -> None:
    answer, vocab = expected(text_of(50), 30), FakeBackend(1).vocab
    k = next(i for i in range(3, 28) if answer[i] > 256 and answer.index(answer[i]) == i)
    engine = any_way.engine(2, memory=at_ends())
    stopped = item(text_of(50), **SAVED, max_tokens=30, stop=vocab.piece(answer[k]).decode())
    [result] = any_way.results(engine.run([stopped]))
    assert (result.finish_reason, result.warnings) == ("stop", ())
    engine.close()
    [file] = CacheStore(any_way.folder, 2**40).files()
    result = any_way.result(any_way.engine(memory=at_ends()), text_of(50), **REQUIRED)
    assert (result.token_ids, result.usage.cached_tokens) == (expected(text_of(50)), 49)
    assert file.n_tokens in (49, 50 + k)


def test_exact_begins_with_whole_pieces_of_the_prompt_only(any_way: Place) -> None:
    first = any_way.engine(cuts=PromptCuts.every(16))
    answer = any_way.result(first, text_of(50), **SAVED, max_tokens=40)
    first.close()
    engine = any_way.engine(cuts=PromptCuts.every(16))
    prompts = [text_of(50), [*text_of(50), *answer.token_ids, 1], [*text_of(40), 1]]
    results = [any_way.result(engine, p, **READ) for p in prompts]
    assert [r.token_ids for r in results] == [expected(p) for p in prompts]
    assert [r.usage.cached_tokens for r in results] == [48, 48, 32]
    starts = {c.start for p in plans_of(engine) for c in p.spans if len(c.inputs) > 1}
    assert all(start % 16 == 0 for start in starts)


@pytest.mark.parametrize("policy", get_args(Policy))
def test_policy_changes_nothing_about_files(by_hand: Place, policy: str) -> None:
    quantum = {"quantum": 3} if policy == "round_robin" else {}
    prompts = [text_of(40 + i, start=i) for i in range(8)]
    said: list[dict[str, Any]] = [{"save_cache": True}, {"cache_required": True}]
    for options in said:
        engine = by_hand.engine(n_slots=2, schedule={"policy": policy, **quantum})
        items = [item(p, cache_key=f"k{i}", **options) for i, p in enumerate(prompts)]
        results = by_hand.results(engine.run(items, options={"max_tokens": 12}))
        assert [r.token_ids for r in results] == [expected(p, 12) for p in prompts]
        engine.close()
    assert [r.usage.cached_tokens for r in results] == [len(p) - 1 for p in prompts]


# ---- while a file is read ----


@pytest.mark.parametrize("keys", ["kkkk", "abcd"])
def test_readers_for_every_slot_leave_the_slots_to_those_without_a_key(
    place: Place, reading: Gate, keys: str
) -> None:
    engine = place.engine(n_slots=4)
    prompts = [text_of(40, i) for i in range(4)]
    items = [item(p, cache_key=key) for p, key in zip(prompts, keys, strict=True)]
    waits = engine.run(items)
    reading.wait()
    assert place.result(engine, text_of(20, 9)).token_ids == expected(text_of(20, 9))
    assert engine.stats().n_held == 4
    reading.go.set()
    assert [r.token_ids for r in place.results(waits)] == [expected(p) for p in prompts]


def test_cancel_while_its_file_is_read_ends_it_at_once(place: Place, reading: Gate) -> None:
    engine = place.engine(n_slots=1)
    responses = [engine.submit(item([*text_of(40), i], id, **READ)) for i, id in enumerate("ab")]
    reading.wait()
    assert engine.cancel("a")
    [result] = place.results(responses[0])
    assert isinstance(result.error, RequestCancelledError)
    reading.go.set()
    assert place.results(responses[1])[0].token_ids == expected([*text_of(40), 1])
    assert place.result(engine, text_of(30)).token_ids == expected(text_of(30))


def test_time_that_passes_while_its_file_is_read_ends_it(place: Place, reading: Gate) -> None:
    engine = place.engine()
    [result] = place.results(engine.submit(item(text_of(40), **READ, timeout_s=0.01)))
    assert isinstance(result.error, DeadlineError)
    reading.go.set()
    assert place.result(engine, text_of(40), **READ).token_ids == expected(text_of(40))


def test_pause_while_its_file_is_read_holds_it_until_it_is_resumed(
    place: Place, monkeypatch: pytest.MonkeyPatch, reading: Gate
) -> None:
    reading.go.set()
    save(place, text_of(40))
    reading.go.clear()
    reading.arrived.clear()
    engine = place.engine()
    response = engine.submit(item(text_of(40), "a", **READ))
    reading.wait()
    assert [engine.pause("a"), engine.pause("a")] == [True, False]
    reading.go.set()
    place.result(engine, text_of(40, start=3), cache_key="other")  # read behind it
    assert engine.stats().n_held == 1
    assert engine.resume("a")
    [result] = place.results(response)
    assert (result.token_ids, result.usage.cached_tokens) == (expected(text_of(40)), 39)


def test_resume_while_its_file_is_still_read_waits_for_it(place: Place, reading: Gate) -> None:
    engine = place.engine()
    response = engine.submit(item(text_of(40), "a", **READ))
    reading.wait()
    assert [engine.pause("a"), engine.resume("a")] == [True, True]
    with pytest.raises(TimeoutError):
        response.results(timeout=0.01)
    reading.go.set()
    assert place.results(response)[0].token_ids == expected(text_of(40))
    assert reading.n_times == 1


def test_all_who_wait_for_one_file_may_leave(place: Place, reading: Gate) -> None:
    engine = place.engine(schedule={"max_queue": 0, "when_full": "reject"})
    response = engine.run([item([*text_of(40), i], **READ) for i in range(4)])
    reading.wait()
    assert response.cancel() == 4
    assert all(r.error is not None for r in place.results(response))
    others = place.results(engine.run([item(text_of(20, i)) for i in range(4)]))
    assert [r.token_ids for r in others] == [expected(text_of(20, i)) for i in range(4)]
    reading.go.set()
    stats = engine.stats()
    assert (stats.n_held, stats.n_waiting, stats.n_running) == (0, 0, 0)
    assert place.result(engine, text_of(40), **READ).token_ids == expected(text_of(40))


def test_those_beside_one_that_is_paused_meanwhile_begin_with_the_file(
    place: Place, monkeypatch: pytest.MonkeyPatch, reading: Gate
) -> None:
    reading.go.set()
    save(place, text_of(100), prefill_only=True)
    reading.go.clear()
    reading.arrived.clear()
    engine = place.engine()
    prompts = [[*text_of(100), i] for i in range(3)]
    response = engine.run([item(p, f"{i}", **REQUIRED) for i, p in enumerate(prompts)])
    reading.wait()
    assert engine.pause("0")
    reading.go.set()
    wait_until(lambda: engine.stats().n_held == 1)
    assert engine.resume("0")
    results = place.results(response)
    assert [r.token_ids for r in results] == [expected(p) for p in prompts]
    assert [r.usage.cached_tokens for r in results] == [100] * 3


def test_file_that_was_not_read_for_want_of_readers_is_read_for_the_next(
    place: Place, reading: Gate
) -> None:
    engine = place.engine()
    first = engine.submit(item(text_of(40), cache_key="first"))
    reading.wait()
    engine.submit(item(text_of(40, 1), "left", **READ))
    wait_until(lambda: engine.stats().n_held == 2)
    assert engine.cancel("left")
    reading.go.set()
    place.results(first)
    assert place.result(engine, text_of(40, 1), **READ).token_ids == expected(text_of(40, 1))


def test_close_reads_no_file_that_nobody_waits_for(
    place: Place, reads: list[str], reading: Gate
) -> None:
    engine = place.engine(n_slots=16)
    response = engine.run([item(text_of(40, i), cache_key=f"k{i}") for i in range(20)])
    reading.wait()
    closed = in_thread(engine.close)
    assert {r.finish_reason for r in place.results(response)} == {"cancelled"}
    reading.go.set()
    closed()
    assert (reads, reading.n_times) == (["k0"], 1)


class Fitting(FakeBackend):
    """Notes who fits cells from disk into its memory, and what it is to keep."""

    def __init__(self, *sizes: int, **given: Any) -> None:
        super().__init__(*sizes, **given)
        self.fitters: list[str] = []
        self.kept: list[NDArray[np.uint8]] = []

    def validate_state(self, data: NDArray[np.uint8], n_wanted: int) -> NDArray[np.uint8]:
        self.fitters.append(threading.current_thread().name)
        return super().validate_state(data, n_wanted).copy()

    def import_state(self, key: int, data: NDArray[np.uint8], n_cells: int) -> None:
        self.kept.append(data)
        super().import_state(key, data, n_cells)


def test_cells_are_fitted_once_for_all_and_not_by_the_thread_that_computes(place: Place) -> None:
    save(place, text_of(80), prefill_only=True)
    engine = place.engine(n_slots=8, kind=Fitting, schedule={"share_prefixes": False})
    prompts = [[*text_of(80), i] for i in range(4)]
    with together(len(prompts)):
        place.results(engine.run([item(p, **REQUIRED) for p in prompts]))
    backend = backend_of(engine, Fitting)
    assert backend.fitters == ["cbatch-cache"]
    assert len(backend.kept) == 4
    assert len({id(data) for data in backend.kept}) == 1


def test_no_more_cells_are_loaded_than_a_prompt_begins_with(any_way: Place) -> None:
    save(any_way, text_of(200), prefill_only=True)
    engine = any_way.engine(kind=Fitting)
    result = any_way.result(engine, [*text_of(60), 3], **REQUIRED)
    backend = backend_of(engine, Fitting)
    assert [data.size for data in backend.kept] == [8 * 60]
    assert (result.usage.cached_tokens, result.token_ids) == (60, expected([*text_of(60), 3]))


class SlowlyFitting(FakeBackend):
    """Fits no cells until it is let go."""

    def __init__(self, *sizes: int, **given: Any) -> None:
        super().__init__(*sizes, **given)
        self.gate = Gate()

    def validate_state(self, data: NDArray[np.uint8], n_wanted: int) -> NDArray[np.uint8]:
        self.gate.stop()
        return super().validate_state(data, n_wanted)


def test_request_during_a_cut_of_its_file_to_too_little_has_it_read_again(place: Place) -> None:
    save(place, text_of(200), prefill_only=True)
    engine = place.engine(kind=SlowlyFitting)
    backend = backend_of(engine, SlowlyFitting)
    prompts = [[*text_of(n), 3] for n in (60, 60, 150)]
    early = engine.run([item(tokens, **REQUIRED) for tokens in prompts[:2]])
    backend.gate.wait()
    late = engine.submit(item(prompts[2], **REQUIRED))
    place.result(engine, text_of(20, start=3))  # behind which the late one waits for the file
    backend.gate.go.set()
    results = [*place.results(early), *place.results(late)]
    assert [r.usage.cached_tokens for r in results] == [60, 60, 150]
    assert [r.token_ids for r in results] == [expected(tokens) for tokens in prompts]


def test_relative_folder_of_cells_stays_where_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.folder.mkdir()
    monkeypatch.chdir(place.folder)
    engine = place.engine(folder=Path("here"))
    monkeypatch.chdir("/")
    assert place.result(engine, text_of(40), **SAVED).warnings == ()
    assert place.keys(place.folder / "here") == ["k"]


def test_folder_of_a_user_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_dir='~nobody-of-this-name/x'"):
        Engine(FakeBackend(), cache_dir="~nobody-of-this-name/x")


# ---- files that are no good ----


def change(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def in_place_of(make: Callable[[Path], object]) -> Callable[[Path, bytes], None]:
    def replaced(path: Path, _: bytes) -> None:
        path.unlink()
        make(path)

    return replaced


BAD: dict[str, tuple[Callable[[Path, bytes], object], str]] = {
    "far longer": (lambda p, _: os.truncate(p, 2**40), "should have"),
    "one bit of the cells": (lambda p, d: put(p, change(d, len(d) - 60)), "is damaged"),
    "a FIFO": (in_place_of(os.mkfifo), "is not a regular file"),
}
"""Every other damage is in tests/cache/test_store.py."""


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_named_where_it_is_required_and_warned_of_where_not(
    any_way: Place, name: str
) -> None:
    save(any_way, text_of(60))
    damage, words = BAD[name]
    damage(any_way.file(), any_way.file().read_bytes())
    engine = any_way.engine()
    items = [item(text_of(60), **REQUIRED), item(text_of(60), **READ), item(text_of(30, start=3))]
    failed, warned, neighbour = any_way.results(engine.run(items))
    assert isinstance(failed.error, CacheError)
    assert failed.error.key == "k"
    [warning] = warned.warnings
    assert re.search(words, str(failed.error))
    assert re.search(words, warning)
    assert warned.token_ids == expected(text_of(60))
    assert (neighbour.token_ids, neighbour.warnings) == (expected(text_of(30, start=3)), ())


def test_bad_file_is_replaced_by_the_next_save(any_way: Place) -> None:
    save(any_way, text_of(60))
    put(any_way.file(), b"foreign")
    assert len(save(any_way, text_of(60)).warnings) == 1
    result = any_way.result(any_way.engine(), text_of(60), **REQUIRED)
    assert result.usage.cached_tokens == 59


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seed": 5}, "seed is 5, but was 0"),
        (
            {"memory": KvCapabilities("unified", 512, can_save=True, can_copy=True)},
            "kind is unified, but was partitioned",
        ),
    ],
    ids=["model", "kind"],
)
def test_file_of_another_engine_is_told_apart(
    any_way: Place, given: dict[str, Any], words: str
) -> None:
    save(any_way, text_of(60))
    engine = any_way.engine(**given)
    failed, warned = any_way.results(
        engine.run([item(text_of(60), **REQUIRED), item(text_of(60), **READ)])
    )
    assert isinstance(failed.error, CacheError)
    assert words in failed.error.reason
    assert warned.warnings == (f"cache_key: {failed.error.reason}",)
    assert (warned.usage.cached_tokens, len(warned.token_ids)) == (0, 6)


def test_files_of_two_models_live_beside_each_other_under_one_key(any_way: Place) -> None:
    first = save(any_way, text_of(60))
    other = any_way.engine(seed=5)
    second = any_way.result(other, text_of(60), **SAVED)
    other.close()
    assert any_way.keys() == ["k", "k"]
    for seed, answer in ((0, first), (5, second)):
        found = any_way.result(any_way.engine(seed=seed), text_of(60), **REQUIRED)
        assert (found.token_ids, found.usage.cached_tokens) == (answer.token_ids, 59)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError("lightning"), "lightning"),
        (OSError("gone"), "gone"),
    ],
)
def test_whatever_reading_raises_is_the_requests_own_error(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(CacheStore, "read", broken)
    engine = place.engine()
    failed, warned = place.results(
        engine.run([item(text_of(60), **REQUIRED), item(text_of(60), **READ)])
    )
    assert isinstance(failed.error, CacheError)
    assert failed.error.__cause__ is error
    assert failed.error.reason == f"the saved cells cannot be read: {words}"
    assert warned.warnings == (f"cache_key: {failed.error.reason}",)
    assert warned.token_ids == expected(text_of(60))


@pytest.mark.parametrize("options", [READ, REQUIRED], ids=["asked", "required"])
def test_cells_that_the_backend_refuses_are_so_for_all(
    any_way: Place, options: dict[str, Any]
) -> None:
    save(any_way, text_of(80))
    engine = any_way.engine(faults=Faults(swap=lambda _: False))
    prompts = [[*text_of(80), i] for i in range(10)]
    beside = engine.submit(item(text_of(20, start=3)))
    results = any_way.results(engine.run([item(p, **options) for p in prompts]))
    wanted = [expected(p) for p in prompts] if options is READ else [()] * 10
    assert [r.token_ids for r in results] == wanted
    assert {r.finish_reason for r in results} == {"length" if options is READ else "error"}
    said = results[0].warnings[0] if options is READ else str(results[0].error)
    assert "cannot load these cells" in said
    assert any_way.results(beside)[0].token_ids == expected(text_of(20, start=3))


def test_cells_that_the_backend_refuses_fail_nobody_who_got_the_file_too(by_hand: Place) -> None:
    memory = KvCapabilities("recurrent", 1, can_trim=False, can_save=True, saved_bytes=4096)
    by_hand.result(by_hand.engine(1, memory=memory), text_of(80), **SAVED, prefill_only=True)
    n_swaps = count()
    engine = by_hand.engine(1, memory=memory, faults=Faults(swap=lambda _: next(n_swaps) > 0))
    prompts = [[*text_of(80), i] for i in range(3)]
    first, *others = by_hand.results(engine.run([item(p, **REQUIRED) for p in prompts]))
    assert isinstance(first.error, CacheError)
    assert [r.token_ids for r in others] == [expected(p) for p in prompts[1:]]
    assert [r.usage.cached_tokens for r in others] == [80, 80]


def test_cells_without_room_fail_or_are_computed_and_touch_nobody_else(
    any_way: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(any_way, text_of(60))
    engine = any_way.engine()

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(backend_of(engine, FakeBackend), "import_state", full)
    beside = engine.submit(item(text_of(20, start=3), max_tokens=100))
    for options, reason in ((REQUIRED, "error"), (READ, "length")):
        result = any_way.result(engine, text_of(60), **options)
        assert (result.finish_reason, result.usage.cached_tokens) == (reason, 0)
        assert "no room for its cells: MemoryError" in (
            str(result.error) + "".join(result.warnings)
        )
    assert result.token_ids == expected(text_of(60))
    assert any_way.results(beside)[0].token_ids == expected(text_of(20, start=3), 100)


def test_cache_without_a_thread_harms_nobody(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    save(place, text_of(60))
    engine, start = place.engine(), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "cbatch-cache":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    beside = engine.submit(item(text_of(20, start=3), max_tokens=100))
    result = place.result(engine, text_of(60), **REQUIRED)
    assert (result.token_ids, result.usage.cached_tokens) == (expected(text_of(60)), 59)
    assert place.results(beside)[0].token_ids == expected(text_of(20, start=3), 100)
    engine.close()


# ---- adapters ----


def with_adapter(tokens: Sequence[int], name: str | None, **options: Any) -> BatchPrompt:
    return item(tokens, **({"adapter": name} if name else {}), **options)


SETS: list[str | None] = ["a", "b", None]


def scaled(name: str | None) -> AdapterSet:
    return ((name, 1.0),) if name else ()


def test_unknown_adapter_is_refused_with_the_names_that_there_are(any_way: Place) -> None:
    engine = any_way.engine(adapters=("a", "b"))
    with pytest.raises(ConfigError, match="'c' is not loaded; loaded are: a, b"):
        engine.submit(with_adapter(text_of(9), "c"))
    with pytest.raises(ConfigError, match="'c' is not loaded"):
        engine.submit(item(text_of(9), adapter={"a": 1.0, "c": 0.0}))
    assert not ids_in_flight(engine)
    with pytest.raises(ConfigError, match="loaded are: none"):
        any_way.engine().submit(with_adapter(text_of(9), "a"))


def test_each_set_of_adapters_answers_as_alone_and_shares_nothing(
    any_way: Place,
) -> None:
    engine = any_way.engine(adapters=("a", "b"))
    items = [with_adapter([*text_of(60), i], SETS[i % 3]) for i in range(12)]
    results = any_way.results(engine.run(items))
    wanted = [expected([*text_of(60), i], adapters=scaled(SETS[i % 3])) for i in range(12)]
    assert [r.token_ids for r in results] == wanted
    assert len(set(wanted)) == 12
    assert [r.usage.cached_tokens for r in results[:3]] == [0, 0, 0]
    assert engine.stats().n_prompt_tokens >= 3 * 60


def test_scales_and_several_adapters_are_sets_of_their_own(any_way: Place) -> None:
    engine = any_way.engine(adapters=("a", "b"))
    scales: list[dict[str, float]] = [{"a": 1}, {"a": 0.5}, {"a": 1, "b": 1}, {"b": 0}]
    results = any_way.results(engine.run([item(text_of(40), adapter=s) for s in scales]))
    sets: list[AdapterSet] = [(("a", 1.0),), (("a", 0.5),), (("a", 1.0), ("b", 1.0)), ()]
    assert [r.token_ids for r in results] == [expected(text_of(40), adapters=s) for s in sets]


def test_no_set_of_adapters_starves(by_hand: Place) -> None:
    engine = by_hand.engine(adapters=("a", "b"), n_slots=3, n_window=512, kind=GatedBackend)
    names: list[str | None] = ["a", "b", None]
    engine.run([with_adapter(text_of(8, i), n, max_tokens=400) for i, n in enumerate(names)])
    steps(engine, 60)
    n_output = [d.n_output for d in batcher_of(engine).in_flight.values()]
    assert min(n_output) >= 18
    engine.cancel_all()


def test_file_of_one_adapter_is_not_used_for_another(any_way: Place) -> None:
    first = any_way.engine(adapters=("a", "b"))
    saved = any_way.result(first, text_of(60), **SAVED, adapter="a")
    first.close()
    engine = any_way.engine(adapters=("a", "b"))
    items = [with_adapter(text_of(60), n, **REQUIRED) for n in SETS]
    right, other, none = any_way.results(engine.run(items))
    assert (right.token_ids, right.usage.cached_tokens) == (saved.token_ids, 59)
    for failed in (other, none):
        assert isinstance(failed.error, CacheError)
        assert "adapters is" in failed.error.reason


# ---- prompts alone ----


def test_prompt_alone_with_a_movable_window_leaves_its_cells_in_a_pool(
    any_way: Place,
) -> None:
    memory = KvCapabilities("unified", 1024, can_copy=True, can_shift=True)
    engine = any_way.engine(memory=memory)
    any_way.result(engine, text_of(60), prefill_only=True, n_discard=8)
    result = any_way.result(engine, [*text_of(60), 7])
    assert result.usage.cached_tokens == 60


def test_prompt_alone_scored_in_other_pieces_warns_that_it_leaves_no_cells(
    any_way: Place,
) -> None:
    alone = {"prefill_only": True, "prompt_logprobs": 1}
    for chunk_alignment, n_warnings in ((128, 1), (64, 0), (0, 0)):
        result = any_way.result(
            any_way.engine(cuts=PromptCuts.every(chunk_alignment)), text_of(200), **alone
        )
        assert len(result.prompt_logprobs or ()) == 200
        assert ["leaves no cells" in words for words in result.warnings] == [True] * n_warnings


def test_prompt_alone_gives_nothing_and_its_follower_computes_the_rest(any_way: Place) -> None:
    engine = any_way.engine()
    result = any_way.result(engine, text_of(60), prefill_only=True)
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "length")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (60, 0)
    assert engine.stats().n_running == 0
    follower = any_way.result(engine, [*text_of(60), 1])
    assert (follower.usage.cached_tokens, engine.stats().n_prompt_tokens) == (60, 61)
    assert follower.token_ids == expected([*text_of(60), 1])
    assert any_way.result(engine, text_of(60)).usage.cached_tokens == 59


def test_prompt_alone_streams_one_last_chunk_without_text(any_way: Place) -> None:
    response = any_way.engine().submit(item(text_of(100), prefill_only=True))
    [chunk] = read_all(any_way, response)
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", (), "length")


@pytest.mark.parametrize("chunk_alignment", [0, 16])
def test_prompt_alone_is_saved_for_the_next_engine(any_way: Place, chunk_alignment: int) -> None:
    engine = any_way.engine(cuts=PromptCuts.every(chunk_alignment))
    result = any_way.result(engine, text_of(64), **SAVED, prefill_only=True)
    assert (result.finish_reason, result.text) == ("length", "")
    engine.close()
    found = any_way.result(
        any_way.engine(cuts=PromptCuts.every(chunk_alignment)), [*text_of(64), 1], **REQUIRED
    )
    assert (found.token_ids, found.usage.cached_tokens) == (expected([*text_of(64), 1]), 64)


def test_prompt_alone_with_a_cap_beyond_the_window_fits(any_way: Place) -> None:
    engine = any_way.engine(n_window=64)
    said: dict[str, Any] = {"max_tokens": 99, "stop": ["x"], "seed": 7}
    result = any_way.result(engine, text_of(64), prefill_only=True, **said)
    assert (result.finish_reason, result.token_ids, result.seed) == ("length", (), 7)


def test_prompt_alone_can_be_cancelled_paused_and_timed(by_hand: Place) -> None:
    engine = by_hand.engine(n_window=ENDLESS)
    response = engine.run([item(text_of(500), "a", prefill_only=True)])
    engine.step()
    assert engine.pause("a")
    assert engine.step() is False
    assert engine.resume("a")
    engine.step()
    assert engine.cancel("a")
    [result] = by_hand.results(response)
    assert (result.finish_reason, result.error, result.token_ids) == ("cancelled", None, ())
    late = by_hand.result(engine, text_of(50, 3), prefill_only=True, timeout_s=0.0)
    assert late.finish_reason == "timeout"


def test_many_prompts_alone_leave_nothing_behind(place: Place) -> None:
    engine = place.engine()
    prompts = [item(text_of(9, i), prefill_only=True) for i in range(200)]
    results = place.results(engine.run(prompts))
    assert {(r.finish_reason, r.token_ids) for r in results} == {("length", ())}
    batcher = batcher_of(engine)
    assert (batcher.in_flight, batcher.occupancy().n_storing, ids_in_flight(engine)) == ({}, 0, [])
