"""The owner thread: commands between runs, no spinning, nobody forgotten at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeConstraint, FakeGrammars, Faults
from cbatch.core.driver import SequenceDriver
from cbatch.engine import Engine
from cbatch.errors import EngineClosedError, RequestCancelledError
from cbatch.runtime.in_flight import InFlight, Route
from cbatch.runtime.mailbox import Mailbox
from tests.helpers import Rig, make_request, make_scheduler
from tests.runtime.backends import (
    PATIENCE_S,
    GatedBackend,
    all_results,
    in_owner,
    in_thread,
    loop_over,
    no_texts,
)

if TYPE_CHECKING:
    from cbatch.backend.fake import FakeBackend
    from cbatch.core.scheduler import Plan
    from cbatch.options import Grammar
    from cbatch.runtime.loop import Loop


@dataclass(eq=False)
class LoopRig:
    """A loop on a fake backend, counting its plans."""

    loop: Loop
    in_flight: InFlight
    backend: FakeBackend
    rig: Rig
    n_plans: int = 0
    owner: threading.Thread | None = None

    def submit(self, *ids: str, **options: Any) -> Mailbox:
        """Queue one batch whose items are these ids."""
        box = Mailbox(len(ids), self.in_flight, None)
        self.loop.routes.update((id, Route(box, i, id)) for i, id in enumerate(ids))
        piece = self.backend.vocab.piece
        self.in_flight.submit(
            [SequenceDriver.of(make_request(id, **options), piece, 0.0) for id in ids]
        )
        return box


def make_loop(backend: FakeBackend, *, is_threaded: bool = True) -> LoopRig:
    rig = make_scheduler(backend.n_slots, backend.n_window, backend.n_batch)
    loop = loop_over(backend, rig, time.perf_counter)
    made = LoopRig(
        loop, InFlight(loop, rig.batcher, time.perf_counter, no_texts(loop, rig)), backend, rig
    )
    plan = rig.scheduler.plan

    def counted(now: float) -> Plan | None:
        made.n_plans += 1
        return plan(now)

    rig.scheduler.plan = counted  # type: ignore[method-assign]
    if is_threaded:
        made.loop.start()
        made.owner = made.loop.call(threading.current_thread)
    return made


def owner(made: LoopRig) -> threading.Thread:
    assert made.owner is not None
    return made.owner


@pytest.fixture
def gated() -> Iterator[Callable[..., tuple[LoopRig, GatedBackend]]]:
    made: list[tuple[LoopRig, GatedBackend]] = []

    def make(hold_at: int | None = 0) -> tuple[LoopRig, GatedBackend]:
        backend = GatedBackend(2, 64, 16, hold_at=hold_at)
        made.append((make_loop(backend), backend))
        return made[-1]

    yield make
    for rig, backend in made:
        backend.release()
        rig.loop.close()


Make = Callable[..., tuple[LoopRig, GatedBackend]]


def test_idle_loop_plans_once_for_each_command(gated: Make) -> None:
    made, _ = gated(hold_at=None)
    made.submit("a", max_tokens=3).wait(PATIENCE_S)
    made.loop.call(int)
    n_before, n_commands = made.n_plans, 200
    for _ in range(n_commands):
        made.loop.call(int)
    assert made.n_plans - n_before <= n_commands + 1


def test_backend_rests_once_nothing_comes_for_a_while(gated: Make) -> None:
    made, backend = gated(hold_at=None)
    rested: list[threading.Thread] = []
    is_told = threading.Event()

    def rest() -> None:
        rested.append(threading.current_thread())
        is_told.set()

    backend.rest = rest  # type: ignore[method-assign]
    made.submit("a", max_tokens=3).wait(PATIENCE_S)
    assert is_told.wait(PATIENCE_S)
    assert set(rested) == {owner(made)}
    [result] = made.submit("b", max_tokens=2).wait(PATIENCE_S)
    assert result.finish_reason == "length"


def test_command_waits_for_the_run_and_comes_before_the_next(gated: Make) -> None:
    made, backend = gated(hold_at=2)
    box = made.submit("a", max_tokens=6)
    backend.wait_until_held()
    backend.release_when_asked()
    assert made.loop.call(lambda: backend.n_runs) == 3
    assert len(box.wait(PATIENCE_S)) == 1
    assert backend.n_runs > 3


# ---- the end ----


def test_call_that_comes_as_the_loop_ends_is_done(
    gated: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = gated(hold_at=None)
    made.loop.close()
    with pytest.raises(EngineClosedError):
        made.loop.call(int)
    monkeypatch.setattr(made.loop, "check_open", lambda: None)  # as if it had passed just before
    assert in_thread(lambda: made.loop.call(int))() == 0


def test_submissions_that_come_as_the_loop_ends_are_answered(
    gated: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = gated(hold_at=None)
    made.loop.close()
    monkeypatch.setattr(made.loop, "check_open", lambda: None)
    waits = [in_thread(partial(made.submit, f"a{i}", f"b{i}")) for i in range(8)]
    for wait in waits:
        results = wait().wait(PATIENCE_S)
        assert [type(r.error) for r in results] == [RequestCancelledError] * 2
    assert not made.loop.routes


def test_failing_owner_does_what_waits_for_it() -> None:
    backend = GatedBackend(2, 64, 16, hold_at=1, faults=Faults(broken=lambda _: bool(1 // 0)))
    backend.hold_at = 0
    made = make_loop(backend)
    made.submit("a")
    backend.wait_until_held()
    backend.release_when_asked()
    assert made.loop.call(lambda: "done") == "done"
    owner(made).join(PATIENCE_S)
    made.loop.close()


def test_failing_owner_answers_those_it_could_not_queue(
    gated: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, backend = gated()
    boxes = [made.submit("a")]
    backend.wait_until_held()

    def fail_once(drivers: object) -> None:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(made.rig.batcher.queue, "add", fail_once)
    boxes += [made.submit("b"), made.submit("c"), made.submit("d")]
    backend.release()
    for box in boxes:
        assert [type(r.error) for r in box.wait(PATIENCE_S)] == [EngineClosedError]
    owner(made).join(PATIENCE_S)
    assert not made.loop.routes


# ---- by hand ----


def test_pump_says_whether_there_was_something_to_do() -> None:
    made = make_loop(GatedBackend(2, 64, 16), is_threaded=False)
    assert not made.loop.pump()
    assert made.backend.n_rests == 1
    box = made.submit("a", max_tokens=2)
    assert [made.loop.pump() for _ in range(2)] == [True, True]
    assert [r.finish_reason for r in box.wait(0)] == ["length"]
    assert made.backend.n_rests == 1
    while made.loop.pump():
        pass
    assert made.backend.n_rests == 2
    made.loop.close()
    with pytest.raises(EngineClosedError):
        made.loop.pump()


def test_failure_between_an_end_and_its_leaving_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_loop(GatedBackend(2, 64, 16), is_threaded=False)

    def fail_once(driver: SequenceDriver, **_: bool) -> None:
        monkeypatch.undo()
        raise ValueError(f"{driver.request.id} cannot leave")

    monkeypatch.setattr(made.rig.batcher, "retire", fail_once)
    box = made.submit("a", "b", max_tokens=1)
    with pytest.raises(EngineClosedError, match="a cannot leave"):
        made.loop.pump()
    assert [r.finish_reason for r in box.wait(0)] == ["length", "length"]  # both had ended
    made.loop.close()


class HeldGrammars(FakeGrammars):
    """Compiles when it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.go = threading.Event(), threading.Event()

    def compile(self, grammar: Grammar) -> FakeConstraint:
        self.has_begun.set()
        assert self.go.wait(PATIENCE_S)
        return super().compile(grammar)


def test_run_in_flight_ends_where_a_grammar_is_compiled() -> None:
    backend = GatedBackend(2, 10_000, 16)
    backend.grammars = grammars = HeldGrammars()
    with Engine(backend, options={"ignore_eos": True}) as engine:
        engine.run("a")
        response = engine.run("b", options={"regex": "1", "max_tokens": 3})
        assert grammars.has_begun.wait(PATIENCE_S)
        in_owner(engine, lambda: setattr(backend, "hold_at", backend.n_runs))
        backend.wait_until_held()
        backend.release()
        grammars.go.set()
        assert len(all_results(response)[0].token_ids) == 3
