"""Who waits for something that a free slot does not bring: another's prefix, cells on disk, or its own grammar."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.driver import SequenceDriver, Status
from cbatch.core.sharing import MIN_SHARED_TOKENS
from cbatch.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.core.cell_ops import Cells
    from cbatch.core.request import Request
    from cbatch.core.sharing import PrefixCache
    from cbatch.options import AdapterSet, Breakers, Grammar

    Want = Grammar | Breakers

_N_KNOWN_MAX = 256
"""Files on disk whose tokens are remembered, so that what is in memory anyway is not read again."""

_N_GRAMMARS_MAX = 32
"""Compiled grammars that are kept for those who will want them: each holds up to some ten MiB. Our choice."""


@dataclass(eq=False, slots=True)
class _Follower:
    """One that waits until another has `n_cells` cells; not longer than that one gets on with it."""

    driver: SequenceDriver
    leader: SequenceDriver
    n_cells: int
    n_seen: int = -1

    def goes_on_waiting(self, adapters: AdapterSet) -> bool:
        n_computed, is_stuck = self.leader.n_computed, False
        if self.leader.request.adapters == adapters:  # else it was not its turn
            is_stuck, self.n_seen = n_computed <= self.n_seen, n_computed
        is_running = self.leader.status is Status.RUNNING
        return is_running and not is_stuck and n_computed < self.n_cells


class PrefixWaiters:
    """Those that wait for another to compute what they share."""

    def __init__(self) -> None:
        self._waiting: list[_Follower] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, driver: SequenceDriver, leader: SequenceDriver, n_cells: int) -> None:
        """Have a held driver wait until `leader` has `n_cells` cells."""
        self._waiting.append(_Follower(driver, leader, n_cells))

    def take_released(self, adapters: AdapterSet) -> list[SequenceDriver]:
        """Return those whose leader has computed what they share, or stopped, or left; asked once a plan.

        Args:
            adapters: what the last step was computed with: who was left out of it has not stopped.
        """
        followers, self._waiting = self._waiting, []
        released = []
        for follower in followers:
            if follower.goes_on_waiting(adapters):
                self._waiting.append(follower)
            else:
                released.append(follower.driver)
        return released

    def drop(self, driver: SequenceDriver) -> None:
        """Forget one that waits no more; nothing happens where it never did."""
        self._waiting = [f for f in self._waiting if f.driver is not driver]


@dataclass(frozen=True, slots=True)
class CacheRef:
    """Names a file of cells: its key, and the adapters that the cells were computed with."""

    key: str
    adapters: AdapterSet = ()

    @classmethod
    def of(cls, request: Request) -> CacheRef:
        """Return the file that a request with a cache key reads or writes."""
        return cls(request.options.cache_key or "", request.adapters)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The tokens of a file of cells, `n_given` of them a prompt's."""

    tokens: Sequence[int]
    n_given: int


class CacheReads:
    """Those that wait for cells from disk; each file is read once for all who want it at that time."""

    def __init__(self, sharing: PrefixCache, cells: Cells) -> None:
        self._sharing, self._cells = sharing, cells
        self._waiting: dict[CacheRef, list[SequenceDriver]] = {}
        self._orders: deque[CacheRef] = deque()
        self._known: dict[CacheRef, CacheEntry] = {}

    @property
    def n_waiting(self) -> int:
        """Sequences that wait; others pass them."""
        return sum(map(len, self._waiting.values()))

    def is_needed(self, driver: SequenceDriver) -> bool:
        """Whether a driver that could enter a slot should wait for cells from disk first."""
        options = driver.request.options
        if options.cache_key is None or driver.has_fetched or driver.has_run or driver.output:
            return False
        if options.n_prompt_logprobs is not None:  # it computes all of its prompt
            return False
        found = self._known.get(CacheRef.of(driver.request))
        if found is None or options.cache_required:
            return found is None or not self._is_in_memory(driver, found)
        if not self._n_usable(driver, found):
            driver.has_fetched = True
            driver.proceed_uncached(_no_beginning(CacheRef.of(driver.request), found))
        return not driver.has_fetched and not self._is_in_memory(driver, found)

    def add(self, driver: SequenceDriver) -> None:
        """Have a held driver wait for its file."""
        fetch = CacheRef.of(driver.request)
        driver.has_fetched = True
        if fetch not in self._waiting:
            self._orders.append(fetch)
        self._waiting.setdefault(fetch, []).append(driver)

    def take_order(self) -> CacheRef | None:
        """Return a file to read, each once, or None."""
        return self._orders.popleft() if self._orders else None

    def arrive(
        self, fetch: CacheRef, found: CacheEntry | CacheError | None, n_read: int
    ) -> tuple[list[SequenceDriver], list[tuple[SequenceDriver, int]]]:
        """Let the sequences go on that wait for a file.

        Args:
            fetch: the file.
            found: what it holds, why it could not be read, or None where it was not read, for nobody wanted it.
            n_read: how many of its cells were read.

        Returns:
            The sequences, and for which of them the backend is to get these cells, under which key. One that begins
            as far into the file as one before it copies from that, where it can. One that came during the read and
            could use more than was read asks again when its turn comes.
        """
        drivers = [d for d in self._waiting.pop(fetch, []) if d.finish_reason is None]
        if isinstance(found, CacheEntry):
            self.learn(fetch, found)
            return drivers, [*self._adopt(fetch, found, drivers, n_read)]
        for driver in drivers:
            if found is None:
                driver.has_fetched = False
            else:
                driver.proceed_uncached(found)
        if found is not None:
            self._known.pop(fetch, None)
        return drivers, []

    def _adopt(
        self, fetch: CacheRef, found: CacheEntry, drivers: Sequence[SequenceDriver], n_read: int
    ) -> Iterator[tuple[SequenceDriver, int]]:
        """Yield who gets cells of its own; the others have some, copy from one before them, or go without."""
        loader, n_most = None, 0
        for driver in drivers:
            n_cells = self._n_usable(driver, found)
            can_share = self._sharing.can_share(driver)
            if driver.status is not Status.WAITING or n_cells > n_read:  # it asks at its next turn
                driver.has_fetched = False
            elif not n_cells:
                driver.proceed_uncached(_no_beginning(fetch, found))
            elif self._is_in_memory(driver, found):
                continue
            elif can_share and loader is not None and n_cells < n_most + MIN_SHARED_TOKENS:
                loader.load_followers += (driver,)
            else:
                yield driver, self._cells.adopt(driver, n_cells)
                if can_share:
                    loader, n_most = driver, n_cells

    def n_wanted(self, fetch: CacheRef, found: CacheEntry | None = None) -> int:
        """Return how many of a file's cells they want who wait for it, how many do before it is read. From any thread.

        Only a whole state, or window, is of any use: so it is all of them or none where memory cannot trim.
        """
        drivers = tuple(self._waiting.get(fetch, ()))
        if found is None:
            return len(drivers)
        return max((self._n_usable(driver, found) for driver in drivers), default=0)

    def learn(self, fetch: CacheRef, found: CacheEntry) -> None:
        """Take in what a file holds now."""
        self._known.pop(fetch, None)
        self._known[fetch] = found
        if len(self._known) > _N_KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def drop(self, driver: SequenceDriver) -> None:
        """Forget one that waits no more; nothing happens where it never did."""
        for drivers in self._waiting.values():
            if driver in drivers:
                drivers.remove(driver)

    def _is_in_memory(self, driver: SequenceDriver, found: CacheEntry) -> bool:
        """Whether slots hold about as much of a prompt's beginning as the file does, which is something."""
        n_cells = self._n_usable(driver, found)
        best = self._sharing.best(driver)
        return n_cells > 0 and best is not None and n_cells < best.n_cells + MIN_SHARED_TOKENS

    def _n_usable(self, driver: SequenceDriver, found: CacheEntry) -> int:
        return self._sharing.n_usable(driver, found.tokens, found.n_given)


class GrammarBuilds:
    """Those that wait for their grammar, or DRY's breakers; each is compiled once for all who want it, and kept."""

    def __init__(self) -> None:
        self._waiting: dict[Want, dict[int, SequenceDriver]] = {}  # by number
        self._orders: list[Want] = []
        self._kept: dict[Want, object] = {}  # the one unused for longest first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def missing(self, driver: SequenceDriver) -> Want | None:
        """Give a driver what is kept of what it lacks; return what it has to wait for, None for nothing."""
        for want in driver.lacks:
            if want not in self._kept:
                return want
            self._kept[want] = self._kept.pop(want)
            driver.equip(want, self._kept[want])
        return None

    def add(self, driver: SequenceDriver, want: Want) -> None:
        """Have a held driver wait for what it lacks."""
        if want not in self._waiting:
            self._orders.append(want)
            self._waiting[want] = {}
        self._waiting[want][driver.number] = driver

    def take_orders(self) -> list[Want]:
        """Return what is to be compiled; each once."""
        orders, self._orders = self._orders, []
        return orders

    def arrive(self, want: Want, made: object) -> list[SequenceDriver]:
        """Take what was compiled, None where that failed; return who waited for it."""
        drivers = [*self._waiting.pop(want, {}).values()]
        if made is None:
            return drivers
        for driver in drivers:
            driver.equip(want, made)
        self._kept[want] = made
        if len(self._kept) > _N_GRAMMARS_MAX:
            del self._kept[next(iter(self._kept))]
        return drivers

    def drop(self, driver: SequenceDriver) -> None:
        """Forget one that waits no more; nothing happens where it never did."""
        for want in driver.lacks:
            self._waiting.get(want, {}).pop(driver.number, None)


def _no_beginning(fetch: CacheRef, found: CacheEntry) -> CacheError:
    n = len(found.tokens)
    return CacheError(fetch.key, f"the prompt does not begin with any of its {n} tokens to be had")
