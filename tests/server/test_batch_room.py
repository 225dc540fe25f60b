"""Who has which slots: calls first, and items of batches in those that are left."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from cbatch.errors import EngineClosedError
from cbatch.server.batch_room import BatchRoom, ItemGate
from tests.runtime.backends import PATIENCE_S, in_thread
from tests.server.clients import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.engine import Engine


class Paused:
    """The face of an engine that knows who is paused."""

    def __init__(self, n_slots: int) -> None:
        self.parallel = n_slots
        self.ids: set[str] = set()
        self.n_unknown = 0
        """How often an item is not known yet."""
        self.n_lost = 0
        """How often the worker that has an item ends."""

    def pause(self, id: str) -> bool:
        self.lose()
        if self.n_unknown:
            self.n_unknown -= 1
            return False
        self.ids.add(id)
        return True

    def resume(self, id: str) -> bool:
        self.lose()
        self.ids.discard(id)
        return True

    def lose(self) -> None:
        if self.n_lost:
            self.n_lost -= 1
            raise EngineClosedError("its engine has ended")


@contextmanager
def room_of(n_slots: int) -> Iterator[tuple[BatchRoom, Paused]]:
    engine = Paused(n_slots)
    room = BatchRoom(cast("Engine", engine))
    try:
        yield room, engine
    finally:
        room.close()


def test_newest_items_give_way_to_calls_and_come_back() -> None:
    with room_of(3) as (room, engine):
        gate = ItemGate(room)
        assert all(gate.enter(id, 1) for id in "abc")
        for n_calls, paused in (
            (1, {"c"}),
            (3, {"a", "b", "c"}),
            (9, {"a", "b", "c"}),
            (2, {"b", "c"}),
        ):
            room.set_calls(n_calls)
            wait_until(lambda paused=paused: engine.ids == paused)  # type: ignore[misc]
        gate.leave("a")
        wait_until(lambda: engine.ids == {"c"})
        room.set_calls(0)
        wait_until(lambda: not engine.ids)


def asking(room: BatchRoom, id: str, n_sequences: int, entered: list[str]) -> Callable[[], Any]:
    """An item that waits for room, and then is one of those that have `entered`; return what waits for that."""
    waits = threading.Event()

    def is_stopped() -> bool:
        waits.set()
        return False

    def enter() -> None:
        assert room.enter(id, n_sequences, is_stopped)
        entered.append(id)

    wait = in_thread(enter)
    assert waits.wait(PATIENCE_S)
    return wait


def test_items_count_by_their_sequences() -> None:
    entered: list[str] = []
    with room_of(4) as (room, engine):
        asking(room, "a", 2, entered)()
        wait = asking(room, "b", 3, entered)
        assert entered == ["a"]
        room.leave("a")
        wait()
        room.set_calls(2)
        wait_until(lambda: engine.ids == {"b"})
        asking(room, "c", 2, entered)()
        room.set_calls(1)
        wait_until(lambda: engine.ids == {"c"})


def test_item_with_more_sequences_than_slots_runs_alone_and_without_calls() -> None:
    entered: list[str] = []
    with room_of(4) as (room, engine):
        room.set_calls(1)
        large = asking(room, "large", 32, entered)
        asking(room, "small", 1, entered)()  # passes: the large one cannot run now
        room.set_calls(0)
        late = asking(room, "late", 1, entered)
        assert entered == ["small"]  # the large one is the next
        room.leave("small")
        large()
        room.set_calls(1)
        wait_until(lambda: engine.ids == {"large"})
        late()
        room.set_calls(0)
        wait_until(lambda: engine.ids == {"late"})
        room.leave("large")
        wait_until(lambda: not engine.ids)
    assert entered == ["small", "large", "late"]


def test_gate_that_is_closed_lets_nobody_in() -> None:
    with room_of(1) as (room, _):
        one, other = ItemGate(room), ItemGate(room)
        assert one.enter("a", 1)
        waiting = in_thread(lambda: other.enter("b", 1))
        other.close()
        assert not waiting()
        one.clear()
        assert ItemGate(room).enter("c", 1)


def test_item_that_is_not_queued_yet_is_paused_later() -> None:
    with room_of(1) as (room, engine):
        engine.n_unknown = 2
        assert room.enter("a", 1, lambda: False)
        room.set_calls(1)
        wait_until(lambda: engine.ids == {"a"})


def test_item_whose_worker_ends_is_paused_and_resumed_later() -> None:
    with room_of(1) as (room, engine):
        engine.n_lost = 2
        assert room.enter("a", 1, lambda: False)
        room.set_calls(1)
        wait_until(lambda: engine.ids == {"a"})
        engine.n_lost = 2
        room.set_calls(0)
        wait_until(lambda: not engine.ids)
