"""Sequences that wait for more than a slot: another's prefix, cells on disk, or their grammar."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from cbatch.core.driver import Status
from cbatch.core.prefix import MIN_SHARED_TOKENS
from cbatch.errors import CacheError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from cbatch.core.cell_ops import SavedCells, ToStore
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.prefix import PrefixCache
    from cbatch.core.request import Request
    from cbatch.options import AdapterSet, DryBreakers, Grammar


C = TypeVar("C", bound="Hashable")
V = TypeVar("V")

_N_FILES_MAX = 256
"""Files on disk whose tokens are remembered, so that a file whose cells are in memory is not read."""

_N_GRAMMARS_MAX = 32
"""Compiled grammars that are kept for later requests: each holds up to some ten MiB. Our choice."""


@dataclass(eq=False, slots=True)
class _Follower:
    """A sequence that waits for its leader to have `n_cells` cells, or to stop running."""

    driver: SequenceDriver
    leader: SequenceDriver
    n_cells: int

    @property
    def is_over(self) -> bool:
        return self.leader.status is not Status.RUNNING or self.leader.n_computed >= self.n_cells


class PrefixWaiters:
    """Sequences that wait for another to compute the prefix that they share."""

    def __init__(self) -> None:
        self._followers: dict[int, _Follower] = {}  # by number

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, driver: SequenceDriver, leader: SequenceDriver, n_cells: int) -> None:
        """Make a held sequence wait until `leader` has `n_cells` cells."""
        self._followers[driver.number] = _Follower(driver, leader, n_cells)

    def pop_ready(self) -> list[SequenceDriver]:
        """Remove and return the sequences whose leader has computed the common prefix, or no longer runs."""
        if not self._followers:
            return []
        over = [f.driver for f in self._followers.values() if f.is_over]
        for driver in over:
            del self._followers[driver.number]
        return over

    def drop(self, driver: SequenceDriver) -> None:
        """Forget a sequence, if it waits here."""
        self._followers.pop(driver.number, None)


class PromptWaiters:
    """Sequences outside the queue until their prompts are tokenized; only a few are tokenized ahead."""

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._drivers: dict[int, SequenceDriver] = {}  # by number
        self._let_go: list[SequenceDriver] = []

    def __len__(self) -> int:
        return len(self._drivers)

    def add(self, driver: SequenceDriver) -> None:
        """Make a sequence wait."""
        self._drivers[driver.number] = driver

    def drop(self, driver: SequenceDriver) -> None:
        """Forget a sequence, if it waits here."""
        self._drivers.pop(driver.number, None)

    def let_go(self, driver: SequenceDriver) -> None:
        """Release a sequence whose prompt is tokenized."""
        self.drop(driver)
        self._let_go.append(driver)

    def due(self) -> list[SequenceDriver]:
        """Return the first sequences, whose prompts may be tokenized now."""
        if not self._drivers:
            return []
        self._let_go = [d for d in self._let_go if not d.has_run and d.finish_reason is None]
        n_ready = sum(d.status is Status.WAITING and d.waits_for is None for d in self._let_go)
        return [*islice(self._drivers.values(), max(0, self._n_max - n_ready))]


class WantWaiters(Generic[C, V]):
    """Sequences that wait for a file or a grammar. Each is requested once, and recent results are remembered."""

    def __init__(self, n_known_max: int) -> None:
        self._n_known_max = n_known_max
        self._waiting: dict[C, dict[int, SequenceDriver]] = {}  # by number
        self._known: dict[C, V] = {}  # learned longest ago first

    def __len__(self) -> int:
        return sum(map(len, [*self._waiting.values()]))  # a copy: called from any thread

    def drop(self, driver: SequenceDriver) -> None:
        """Forget a sequence, if it waits here."""
        for drivers in self._waiting.values():
            drivers.pop(driver.number, None)

    def _add(self, driver: SequenceDriver, wanted: C) -> bool:
        """Make a sequence wait; return whether it is the first to want this."""
        is_new = wanted not in self._waiting
        self._waiting.setdefault(wanted, {})[driver.number] = driver
        return is_new

    def _pop_waiting(self, wanted: C) -> list[SequenceDriver]:
        return [*self._waiting.pop(wanted, {}).values()]

    def learn(self, wanted: C, found: V) -> None:
        """Remember a result, and forget the oldest if there are too many."""
        self._known.pop(wanted, None)
        self._known[wanted] = found
        if len(self._known) > self._n_known_max:
            del self._known[next(iter(self._known))]


@dataclass(frozen=True, slots=True)
class CacheRef:
    """Identifies a file of cells: its key, and the adapters that the cells were computed with."""

    key: str
    adapters: AdapterSet = ()

    @classmethod
    def of(cls, request: Request) -> CacheRef:
        """Return the file that a request with a cache key reads or writes."""
        return cls(request.options.cache_key or "", request.adapters)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file's tokens, the first `n_given` of them a prompt's, with a checkpoint after the first `n_checkpoint`."""

    tokens: Sequence[int]
    n_given: int
    n_checkpoint: int = 0


@dataclass(eq=False, slots=True)
class CacheRead:
    """A file of cells to be read for the sequences that wait for it. Its methods are called from any thread."""

    ref: CacheRef
    drivers: Mapping[int, SequenceDriver]
    n_usable: Callable[[SequenceDriver, CacheEntry], int]
    """Returns how many of the file's cells a sequence can use."""
    n_read: int = 0
    """How many cells were read, from the file's beginning."""

    def choose(self, found: CacheEntry) -> int:
        """Return how many cells of the file to read, and record the number: as many as any sequence can use.

        In memory that cannot be trimmed, it is all cells, a checkpoint's, or none.
        """
        drivers = tuple(self.drivers.values())
        self.n_read = max((self.n_usable(driver, found) for driver in drivers), default=0)
        return self.n_read


ToCompile: TypeAlias = "Grammar | DryBreakers"
Want: TypeAlias = "ToCompile | CacheRead | ToStore"
"""What sequences want from outside: something compiled, a file read, or cells written to a file."""

Given: TypeAlias = "int | CacheError | None"
"""What a sequence gets from its file: the key under which the backend puts its cells, or why there are none. With None
the sequence tries again at its turn: it copies from a slot, or waits for the file again."""


class CacheReads(WantWaiters[CacheRef, CacheEntry]):
    """Sequences that wait for cells from disk. A file is read once for all sequences that wait for it."""

    def __init__(
        self, prefixes: Callable[[], PrefixCache], saved: SavedCells, wants: deque[Want]
    ) -> None:
        """`prefixes` returns what is in memory now."""
        super().__init__(_N_FILES_MAX)
        self._prefixes, self._saved, self._wants = prefixes, saved, wants

    def is_needed(self, driver: SequenceDriver, prefixes: PrefixCache) -> bool:
        """Whether a sequence that could get a slot should wait for cells from disk; `prefixes` are the plan's."""
        if not self._may_read(driver) or self.why_useless(driver) is not None:
            return False
        found = self._known.get(CacheRef.of(driver.request))
        return found is None or not self._is_in_memory(driver, found, prefixes)

    def why_useless(self, driver: SequenceDriver) -> CacheError | None:
        """Return why a sequence enters its slot without cells from its file, if the file is known to be useless.

        A required file is read anyway, because it may have been written again.
        """
        if driver.request.options.cache_required or not self._may_read(driver):
            return None
        found = self._known.get(CacheRef.of(driver.request))
        if found is None or self._n_usable(driver, found):
            return None
        return _no_beginning(CacheRef.of(driver.request), found)

    def _may_read(self, driver: SequenceDriver) -> bool:
        options = driver.request.options
        if options.cache_key is None or driver.is_done_with_disk or driver.has_run or driver.output:
            return False
        return options.n_prompt_logprobs is None  # a scored prompt is computed as a whole

    def add(self, driver: SequenceDriver) -> None:
        """Make a held sequence wait for its file."""
        driver.is_done_with_disk = True
        ref = CacheRef.of(driver.request)
        if self._add(driver, ref):
            self._wants.append(CacheRead(ref, self._waiting[ref], self._n_usable))

    def resolve(self, want: CacheRead, found: object) -> dict[SequenceDriver, Given]:
        """Take the result of reading a file; return what each waiting sequence gets from it."""
        drivers = self._pop_waiting(want.ref)
        if isinstance(found, CacheEntry):
            self.learn(want.ref, found)
            given = self._give_cells(want, found, drivers)
        else:
            error = found if isinstance(found, CacheError) else None
            given = dict.fromkeys(drivers, error)
            if error is not None:
                self._known.pop(want.ref, None)
        for driver, what in given.items():
            driver.is_done_with_disk = what is not None
        return given

    def _give_cells(
        self, want: CacheRead, found: CacheEntry, drivers: Sequence[SequenceDriver]
    ) -> dict[SequenceDriver, Given]:
        """Decide what each sequence gets from a file."""
        given: dict[SequenceDriver, Given] = {}
        n_loaded = 0
        for driver in drivers:
            n_cells = self._n_usable(driver, found)
            can_share = self._prefixes().can_share(driver)
            can_use = self._prefixes().can_begin_with(n_cells, want.n_read)
            is_late = driver.status is not Status.WAITING or not can_use
            is_loaded = min(n_cells, n_loaded) >= MIN_SHARED_TOKENS > n_cells - n_loaded
            if (
                is_late
                or (can_share and is_loaded)
                or self._is_in_memory(driver, found, self._prefixes())
            ):
                given[driver] = None
            elif not n_cells:
                given[driver] = _no_beginning(want.ref, found)
            else:
                given[driver] = self._saved.add_from_disk(driver, n_cells)
                if can_share:
                    n_loaded = n_cells
        return given

    def _is_in_memory(
        self, driver: SequenceDriver, found: CacheEntry, prefixes: PrefixCache
    ) -> bool:
        """Whether slots hold about as many of a prompt's leading tokens as the file, and at least some."""
        n_cells = self._n_usable(driver, found)
        best = prefixes.find(driver).source
        return n_cells > 0 and best is not None and n_cells < best.n_cells + MIN_SHARED_TOKENS

    def _n_usable(self, driver: SequenceDriver, found: CacheEntry) -> int:
        return self._prefixes().n_usable(driver, found.tokens, found.n_given, found.n_checkpoint)


class GrammarBuilds(WantWaiters[ToCompile, object]):
    """Sequences that wait for a grammar or DRY breakers. Each is compiled once and kept."""

    def __init__(self, wants: deque[Want]) -> None:
        super().__init__(_N_GRAMMARS_MAX)
        self._wants = wants

    def wait(self, driver: SequenceDriver) -> bool:
        """Give a sequence what is compiled already; return whether it must wait for the rest."""
        for want in driver.lacks:
            if want not in self._known:
                if self._add(driver, want):
                    self._wants.append(want)
                return True
            self._known[want] = self._known.pop(want)  # use counts as learning
            driver.compiled[want] = self._known[want]
        return False

    def is_wanted(self, want: ToCompile) -> bool:
        """Whether a sequence waits for `want`. From any thread."""
        return bool(self._waiting.get(want))

    def pass_over(self, want: ToCompile) -> None:
        """Record that `want` was not compiled because no sequence waited for it; request it again if one does now."""
        if self.is_wanted(want):
            self._wants.append(want)
        else:
            self._waiting.pop(want, None)

    def resolve(self, want: ToCompile, made: object) -> list[SequenceDriver]:
        """Take the compiled result, None if it was not compiled; return the sequences that waited for it."""
        drivers = self._pop_waiting(want)
        if made is not None:
            for driver in drivers:
                driver.compiled[want] = made
            self.learn(want, made)
        return drivers


def _no_beginning(ref: CacheRef, found: CacheEntry) -> CacheError:
    n = len(found.tokens)
    return CacheError(ref.key, f"the prompt does not begin with any of its {n} tokens to be had")
