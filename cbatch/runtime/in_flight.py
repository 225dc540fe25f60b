"""Requests in flight: where the output of each goes, how it enters the queue, and commands by its id."""

from __future__ import annotations

import math
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from cbatch.core.batcher import N_ENDED_MAX
from cbatch.core.driver import Wait
from cbatch.core.queue import Deadlines
from cbatch.errors import CacheError, ConfigError, EngineClosedError, QueueFullError, RequestError
from cbatch.runtime.choices import Choices, Labels, Members, request_id
from cbatch.runtime.ids import RequestId, check_own, is_meant
from cbatch.runtime.waking import is_in_event_loop
from cbatch.support.interrupts import HeldBack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.driver import SequenceDriver
    from cbatch.runtime.interface import BatchTarget, Target
    from cbatch.runtime.loop import Loop
    from cbatch.runtime.row_comparison import RowComparison
    from cbatch.runtime.text_room import Texts


N_ENTERED_MAX = 4096
"""Most sequences of one call that are queued before one plan, in about 15 ms, so that no step waits until many
thousands are queued. Our choice."""

_N_ENDED_SAVERS = 64
"""Cache keys of requests that ended that may be kept beyond those in flight."""


class Route(NamedTuple):
    """Where a request's output goes; the object stands for one request, also where a later one has an equal id."""

    target: Target
    place: int
    """The request's place in its batch; −1 for an id that stands for several choices."""
    id: str
    """The id as it was handed out."""


class InFlight:
    """Submits sequences to a loop, within the queue's limit; its `Orders`. From any thread."""

    def __init__(
        self, loop: Loop, batcher: MultiRequestBatcher, clock: Callable[[], float], texts: Texts
    ) -> None:
        self.routes = loop.routes  # the loop takes out requests that ended
        self._loop, self._batcher, self._clock = loop, batcher, clock
        self._texts = texts
        self._outside: dict[str, SequenceDriver] = {}
        """Sequences that wait for room in the queue, by id."""
        self._late: dict[SequenceDriver, None] = {}
        """Those of them for which no thread waits, in order."""
        self._late_deadlines = Deadlines()
        self._next_look_s = math.inf
        """When the deadlines of these are looked at; infinity for never."""
        self._n_late_limit: float = 0
        self._given_up: dict[SequenceDriver, None] = {}
        """Sequences cancelled before they were queued, if too many to end at once: some end before each plan."""
        loop.admit_late = self._admit_late
        self._n_promised = 0
        """Number of sequences that were submitted during a step and will be queued after it."""
        self._savers: dict[str, str] = {}
        """Ids of requests that save cells, by their cache key; some of them have ended."""

    def find(self, id: str) -> Route | None:
        """Return the route of the request that a caller means; None where it is not in flight."""
        route = self.routes.get(id)
        return route if route is not None and is_meant(id, route.id) else None

    def add(
        self,
        routes: dict[str, Route],
        target: Target,
        ids: Sequence[RequestId],
        items: Sequence[Sequence[SequenceDriver]],
        places: Sequence[int] = (0,),
    ) -> None:
        """Make requests known, with where their output goes; their routes are added to `routes`, too.

        Nothing is added where an id, or a cache key to save cells under, is in flight: DuplicateIdError, CacheError.
        """
        savers = self._checked_savers([d for item in items for d in item])
        for place, id, drivers in zip(places, ids, items, strict=True):
            request = drivers[0].request
            if request.id == id:
                routes[id] = Route(target, place, id)
                continue
            members = (Labels if request.ending else Choices)(target, place, id, request.options)
            target.expect_choices(members.n_kept)
            routes[id] = Route(members, -1, id)  # taken until the last member has ended
            own = [d.request.id for d in drivers]
            routes.update((member, Route(members, i, member)) for i, member in enumerate(own))
        with HeldBack():
            check_own(list(routes), self.routes)  # a handler may have taken one meanwhile
            self.routes.update(routes)
        self._savers.update(savers)

    def add_texts(self, routes: Mapping[str, Route]) -> None:
        """Make texts to embed known, with where their vectors go. A DuplicateIdError where an id is in flight."""
        with HeldBack():
            check_own(list(routes), self.routes)
            self.routes.update(routes)

    def _checked_savers(self, drivers: Sequence[SequenceDriver]) -> dict[str, str]:
        """Return the ids of requests that save cells, by cache key; each key must be theirs alone."""
        saving = [d.request for d in drivers if d.request.options.save_cache]
        if saving and len(self._savers) > 2 * len(self.routes) + _N_ENDED_SAVERS:
            self._savers = {key: id for key, id in self._savers.items() if self.find(id)}
        savers: dict[str, str] = {}
        for request in saving:
            key = str(request.options.cache_key)
            saver = self._savers.get(key)
            if key in savers or (saver is not None and self.find(saver)):
                what = "two requests in flight would save it: give each its own cache_key"
                raise CacheError(key, what)
            savers[key] = request.id
        return savers

    @contextmanager
    def undone_if_it_raises(
        self, routes: dict[str, Route] | None = None
    ) -> Iterator[dict[str, Route]]:
        """Take back the requests that a block has added, and submitted, if the block raises; it names their routes."""
        routes = {} if routes is None else routes
        try:
            yield routes
        except (RequestError, ConfigError):  # nothing was queued
            self.drop(routes)
            raise
        except BaseException:  # closed, or Ctrl-C: some may be queued
            if routes:
                self.forget(routes)
            raise

    # ---- into the queue ----

    def submit(self, drivers: Sequence[SequenceDriver]) -> None:
        """Queue sequences whose routes are set. Does not wait.

        Behind others that wait there is no hurry: a run in flight ends by itself before a slot is free. But a refused
        prompt ends its request at once. Many prompts are queued in portions, between steps.
        """
        is_first = self._batcher.n_waiting <= self._loop.n_entering
        if len(drivers) > N_ENTERED_MAX:
            self.submit_late(drivers, math.inf, is_urgent=is_first)
        else:
            self._loop.post(partial(self._loop.enqueue, drivers), is_urgent=is_first)
        if any(driver.error is not None for driver in drivers):
            self._loop.hurry()

    def submit_paused(self, drivers: Sequence[SequenceDriver]) -> None:
        """Queue sequences whose routes are set, and pause them before the next plan. Does not wait, not for room."""

        def submit() -> None:
            self._loop.enqueue(drivers)
            for driver in drivers:
                self._batcher.pause(driver.request.id)

        self._loop.post(submit)

    def submit_within(self, drivers: Sequence[SequenceDriver], n_limit: int) -> None:
        """Queue sequences, all or none. Raises as `check_room`."""

        def submit() -> None:
            self.check_room(len(drivers), n_limit)
            self._loop.enqueue(drivers)

        def keep() -> None:
            self._n_promised -= len(drivers)
            self._loop.enqueue(drivers)

        if not self._loop.must_not_wait:
            self._loop.call(submit)
            return
        self.check_room(len(drivers), n_limit)
        self._n_promised += len(drivers)
        self._loop.post(keep)

    def check_room(self, n_sequences: int, n_limit: int) -> None:
        """Raise a `QueueFullError` where more than `n_limit` sequences would wait for a slot. From any thread."""
        n_waiting, n_room = self._room(n_limit)
        if n_sequences > n_room:
            raise QueueFullError(n_waiting, n_limit, n_sequences)

    def submit_as_room_comes(self, drivers: Sequence[SequenceDriver], n_limit: int) -> None:
        """Queue sequences while no more than `n_limit` wait for a slot; return when the last one is queued.

        A sequence that is cancelled or paused meanwhile, or runs out of time, is queued without room. For a caller that
        must not wait, this does what `submit_within` does.
        """
        if self._loop.must_not_wait:
            self.submit_within(drivers, n_limit)
            return
        todo = deque(drivers)
        until_s = _first_deadline(todo)
        self._outside.update((d.request.id, d) for d in todo)

        def can_submit() -> bool:
            return self._room(n_limit)[1] > 0 or not self._is_outside(todo[0])

        def submit_some() -> int:
            nonlocal todo, until_s
            now, n_room = self._clock(), self._room(n_limit)[1]
            some = self._take_first(todo, n_room)
            if until_s <= now:
                some += [d for d in todo if d.request.deadline_s <= now]
                todo = deque(d for d in todo if d.request.deadline_s > now)
                until_s = _first_deadline(todo)
            self._enter(some)
            return len(some)

        while todo:
            if not self._loop.call(submit_some) and todo:
                self._loop.wait_for_change(can_submit, until_s)

    def submit_late(
        self, drivers: Sequence[SequenceDriver], n_limit: float, *, is_urgent: bool = True
    ) -> None:
        """Queue sequences as `submit_as_room_comes` does, but return at once: the owner thread queues them."""

        def submit() -> None:
            self._n_late_limit = n_limit
            self._late.update(dict.fromkeys(drivers))
            self._admit_late()
            for driver in drivers:
                if driver in self._late:
                    self._late_deadlines.add(driver)
            self._look_in_time()

        self._outside.update((d.request.id, d) for d in drivers)
        self._loop.post(submit, is_urgent=is_urgent)

    def _admit_late(self) -> bool:
        """Queue a portion of the `submit_late` sequences for which there is room; all, once the loop is closed.

        Cancelled and overdue ones end in portions, too. Return whether more can be queued or ended. Owner thread.
        """
        if not (self._late or self._given_up):
            return False
        is_closed, now = self._loop.is_closed, self._clock()
        overdue = iter(lambda: self._late_deadlines.pop_due(now), None)
        self._enter([*islice(overdue, N_ENDED_MAX)])
        gone = [*islice(self._given_up, None if is_closed else N_ENDED_MAX)]
        for driver in gone:
            del self._given_up[driver]
        self._enter(gone)
        ids = [d.request.id for d in gone]
        self._batcher.cancel_all(
            [id for id, d in zip(ids, gone, strict=True) if self._batcher.in_flight.get(id) is d],
            now,
        )
        n_most = len(self._late) if is_closed else N_ENTERED_MAX
        while self._late and n_most and (n_room := self._n_late_room()):
            some = [*islice(self._late, min(n_most, n_room))]
            n_most -= len(some)
            self._enter(some)
        self._look_in_time()
        return bool(self._given_up or (self._late and self._n_late_room()))

    def _n_late_room(self) -> int:
        n_late = len(self._late)
        if self._loop.is_closed:
            return n_late
        return int(min(n_late, self._room(self._n_late_limit)[1]))

    def _look_in_time(self) -> None:
        """Have a step done at the next deadline of late sequences: one timer, however many there are. Owner thread."""
        next_s = self._late_deadlines.next_s()
        if next_s is not None and next_s < self._next_look_s:
            self._next_look_s = next_s
            with suppress(EngineClosedError):
                self._loop.call_at(next_s, self._looked)

    def _looked(self) -> None:
        """Note that the timer is over; `_admit_late` follows. Owner thread."""
        self._next_look_s = math.inf

    def _take_first(self, todo: deque[SequenceDriver], n_max: float) -> list[SequenceDriver]:
        """Take up to `n_max` sequences that still wait for room from the left of `todo`, and drop the queued ones."""
        found: list[SequenceDriver] = []
        while todo and (len(found) < n_max or not self._is_outside(todo[0])):
            driver = todo.popleft()
            if self._is_outside(driver):
                found.append(driver)
        return found

    def _is_outside(self, driver: SequenceDriver) -> bool:
        return self._outside.get(driver.request.id) is driver

    def _enter(self, drivers: Iterable[SequenceDriver]) -> None:
        """Queue the sequences among these that wait for room, whether there is room or not. Owner thread."""
        newcomers: list[SequenceDriver] = []
        for driver in drivers:
            if driver in self._late:
                del self._late[driver]
                self._late_deadlines.note_end()
            if self._is_outside(driver):
                del self._outside[driver.request.id]
                newcomers.append(driver)
        if newcomers:
            self._loop.enqueue(newcomers)
            self._loop.waiters.wake()  # the submitting thread may wait for these alone

    def _room(self, n_limit: float) -> tuple[int, float]:
        """Return how many sequences wait and how many more may: those for which a slot is free do not count."""
        seen = self._batcher.occupancy()
        n_waiting = seen.n_unserved + self._n_promised
        return n_waiting, max(0, n_limit + seen.n_open_slots - n_waiting)

    def forget(self, routes: Mapping[str, Route]) -> None:
        """End the queued requests of a submission that was broken off, and drop the others."""

        def forget() -> None:
            lives = {id: route for id, route in routes.items() if self.routes.get(id) is route}
            for id in lives:
                self._outside.pop(id, None)
            batcher = self._batcher
            self._cancel([route for id, route in lives.items() if id in batcher.in_flight])
            ending = {id for id in lives if id in batcher.in_flight or batcher.is_storing(id)}
            self.drop({id: lives[id] for id in lives if id not in ending})

        try:
            self._loop.post(forget)
        except EngineClosedError:
            self._loop.wait_for_end()  # for the thread ends what was queued
            self._outside.clear()
            self.drop(routes)

    def drop(self, gone: Mapping[str, Route]) -> None:
        """Take out the routes of requests that were not queued, but for ids that other requests have by now."""
        for id, route in gone.items():
            if self.routes.get(id) is route:
                del self.routes[id]

    # ---- orders ----

    def check_wait(self) -> None:
        """Raise an `InsideStepError` if the caller's thread would wait for itself."""
        self._loop.check_wait()

    def cancel(self, ids: Iterable[str], *, is_for_waiting: bool = False) -> int:
        """End requests by id, or those alone that never had a slot; return how many. Waits for the current step.

        A request that ends meanwhile is not touched, nor is a new request with the same id.
        """
        return self._cancel_now(self._meant(ids, is_for_waiting=is_for_waiting))

    def cancel_soon(self, ids: Iterable[str], *, is_for_waiting: bool = False) -> None:
        """End requests before the next plan; else as `cancel`. Does not wait."""
        meant = self._meant(ids, is_for_waiting=is_for_waiting)
        self._loop.post(lambda: self._cancel(meant()), is_urgent=not is_for_waiting)

    def _meant(self, ids: Iterable[str], *, is_for_waiting: bool) -> Callable[[], list[Route]]:
        """Return a function that gives the requests that are in flight both now and when it is called."""
        lives = self._lives(ids)
        return lambda: [
            r for r in self._still(lives) if not (is_for_waiting and self._has_begun(r))
        ]

    def take_back(self, ids: Iterable[str]) -> list[str]:
        """Take out requests that never had a slot, as if they had not been submitted; return the ids."""
        lives = self._lives(ids)
        return self._loop.call(lambda: [r.id for r in self._still(lives) if self._take_out(r)])

    def _take_out(self, route: Route) -> bool:
        """Take out a request that never had a slot, without a result; False for another. Owner thread."""
        if self._texts.take_out(route):
            self.drop({route.id: route})
            return True
        members = _member_ids(route)
        if any(map(self._has_run, members)):  # or it is a text that has begun or ended meanwhile
            return False
        self._loop.take_out([m for m in members if self._outside.pop(m, None) is None])
        self.drop({member: self.routes[member] for member in {route.id, *members}})
        return True

    def _lives(self, ids: Iterable[str]) -> dict[str, Route]:
        """Return the routes of the requests that a caller means and that are in flight."""
        return {id: route for id in ids if (route := self.find(id))}

    def _still(self, lives: Mapping[str, Route]) -> list[Route]:
        """Return the routes of the requests that are still in flight. For the owner, or to look only."""
        return [route for id, route in lives.items() if self.routes.get(id) is route]

    def pause(self, id: str) -> bool:
        """Stop a request where it is; False where it is not in flight or paused already."""
        return self._order(
            id, self._batcher.pause, lambda m: not self._batcher.is_paused(m), enters=True
        )

    def resume(self, id: str, n_tokens: int | None = None) -> bool:
        """Let a paused request go on, for `n_tokens` where given; False where it is not in flight or not paused."""
        resume = partial(self._batcher.resume, n_tokens=n_tokens)
        return self._order(id, resume, self._batcher.is_paused, enters=False)

    def resume_soon(self, turns: Iterable[tuple[str, int]]) -> None:
        """Resume paused requests before the next plan, each for its number of tokens. Does not wait."""
        lives = [(route, n_tokens) for id, n_tokens in turns if (route := self.find(id))]

        def resume() -> None:
            for route, n_tokens in lives:
                if self.routes.get(route.id) is route and route.id not in self._texts:
                    for member in _member_ids(route):
                        self._batcher.resume(member, n_tokens)

        self._loop.post(resume)

    def run_on_soon(self, ids: Iterable[str]) -> None:
        """Let requests go on to their ends before the next plan, paused or not: none pauses again. Does not wait."""
        lives = self._lives(ids)

        def run_on() -> None:
            for member in (m for route in self._still(lives) for m in _member_ids(route)):
                self._batcher.run_on(member)
                if (driver := self._outside.get(member)) is not None:
                    driver.go_on_for(None)

        self._loop.post(run_on)

    def _order(
        self, id: str, do: Callable[[str], bool], would: Callable[[str], bool], *, enters: bool
    ) -> bool:
        """Do something to every sequence of a request. With `enters`, first queue sequences that wait for room.

        `would` tells whether `do` would have an effect, and changes nothing.
        """
        life = self.find(id)
        if life is None or id in self._texts:
            return False

        def order() -> bool:
            if self.routes.get(id) is not life:
                return False
            members = self._queued_members(life) if enters else _member_ids(life)
            return sum(map(do, members)) > 0

        return self._loop.call(
            order, lambda: any(would(m) for m in _member_ids(life) if self._is_open(m))
        )

    def compare_rows(self, ids: Iterable[str] | None = None) -> list[RowComparison]:
        """Compare the next rows of requests in a shared step and alone; see `Engine.compare_rows`."""
        lives = None if ids is None else self._lives(ids)

        def compare() -> list[RowComparison]:
            if lives is None:
                return self._loop.compare_rows(None)
            known = self._still(lives)
            return self._loop.compare_rows({m for route in known for m in _member_ids(route)})

        return self._loop.call(compare)

    def watch(self, target: BatchTarget) -> None:
        """Deliver what paused requests and ended choices have, after the current step.

        Other deliveries look whether it `is_streamed`.
        """

        def deliver() -> None:
            members = [m for route in self._of(target) for m in _member_ids(route)]
            members = [m for m in members if m not in self._texts]
            self._loop.deliver(
                [self._batcher.in_flight[m] for m in members if self._batcher.is_paused(m)]
            )
            for route in self._of(target):
                if isinstance(route.target, Members):
                    route.target.deliver((), ())

        with suppress(EngineClosedError):
            self._loop.post(deliver)

    def cancel_batch(self, target: BatchTarget) -> int:
        """End a batch's requests in flight; else as `cancel`."""
        return self._cancel_now(lambda: self._of(target))

    def cancel_batch_soon(self, target: BatchTarget) -> None:
        """End a batch's requests in flight before the next plan. Does not wait; a closed engine has ended them."""
        with suppress(EngineClosedError):
            self._loop.post(lambda: self._cancel(self._of(target)))

    def cancel_waiting_soon(self, target: BatchTarget) -> None:
        """End a batch's requests that never had a slot. Does not wait, nor does a run in flight end for it."""

        def cancel() -> None:
            self._cancel([route for route in self._of(target) if not self._has_begun(route)])

        with suppress(EngineClosedError):
            self._loop.post(cancel, is_urgent=False)

    def _cancel_now(self, find: Callable[[], Sequence[Route]]) -> int:
        """Cancel requests; return how many. Wait until all have ended, also many: their ids are free then.

        An event loop does not wait for many.
        """
        loop = self._loop
        found = loop.call(lambda: self._cancel(find()), lambda: self._open(find()))
        left = deque(found)

        def have_ended() -> bool:
            while left and not self._is_ending(left[0]):
                left.popleft()
            return not left

        if not (loop.must_not_wait or is_in_event_loop()):
            with suppress(EngineClosedError):  # that ended them
                while not (have_ended() or loop.is_closed):
                    loop.wait_for_change(have_ended, math.inf)
        return len({request_id(route.id) for route in found})

    def _is_ending(self, route: Route) -> bool:
        """Whether a cancelled sequence has not ended; one that waits only for its file has."""
        return self.routes.get(route.id) is route and not self._batcher.is_storing(route.id)

    def _cancel(self, some: Sequence[Route]) -> list[Route]:
        """Cancel requests, with all their choices; return the routes of their sequences. Owner thread.

        Many end some at a time, between steps.
        """
        members = [m for r in some if r.id not in self._texts for m in _member_ids(r)]
        found = [r for r in some if r.id in self._texts and self._texts.cancel(r)]
        outside = [d for m in members if (d := self._outside.get(m)) and d not in self._given_up]
        if len(outside) > N_ENDED_MAX:
            self._give_up(outside)
            found += [self.routes[d.request.id] for d in outside]
        else:
            self._enter(outside)
        found += [self.routes[id] for id in self._batcher.cancel_all(members, self._clock())]
        self._loop.deliver(())
        return found

    def _give_up(self, drivers: Iterable[SequenceDriver]) -> None:
        """End sequences that wait for room in the queue, in portions. Owner thread."""
        for driver in drivers:
            self._given_up[driver] = None
            if driver in self._late:
                del self._late[driver]
                self._late_deadlines.note_end()

    def _open(self, some: Iterable[Route]) -> list[Route]:
        """Return the routes of those sequences of requests that have not ended. Changes nothing."""
        members = [m for route in some for m in _member_ids(route)]
        return [r for m in members if self._is_open(m) and (r := self.routes.get(m))]

    def _is_open(self, id: str) -> bool:
        """Whether a sequence has not ended; it may not be queued yet. Changes nothing."""
        if id in self._texts:
            return True
        return id in self.routes and not self._batcher.has_ended(id)

    def _queued_members(self, route: Route) -> list[str]:
        """Return the ids of a request's sequences; sequences that waited for room are queued first."""
        members = _member_ids(route)
        self._enter([d for m in members if (d := self._outside.get(m))])
        return members

    def _of(self, target: BatchTarget) -> list[Route]:
        """Return the routes of a batch's requests in flight."""
        return [route for id in [*target.ids.values()] if (route := self.find(id))]

    def _has_begun(self, route: Route) -> bool:
        """Whether a request, or one of its choices, ever had a slot or is cancelled; or a text is being computed."""
        if route.id in self._texts:
            return self._texts.has_begun(route.id)
        return any(map(self._has_run, _member_ids(route)))

    def _has_run(self, id: str) -> bool:
        driver = self._batcher.in_flight.get(id)
        if id in self._outside:
            return False
        return driver is None or driver.has_run or driver.waits_for is Wait.END


def _member_ids(route: Route) -> list[str]:
    target, place, id = route
    return target.member_ids if isinstance(target, Members) and place < 0 else [id]


def _first_deadline(drivers: Iterable[SequenceDriver]) -> float:
    return min((d.request.deadline_s for d in drivers), default=math.inf)
