"""What sequences wait for outside the scheduler: tokenized prompts, compiled grammars, cells in files."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from cbatch.core.driver import SequenceDriver, Status, Wait
from cbatch.core.prefix import MIN_SHARED_TOKENS
from cbatch.core.saved_cells import ToStore
from cbatch.core.slots import N_LOOK
from cbatch.errors import CacheError, CBatchError, GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.request import Request
    from cbatch.options import AdapterSet, DryBreakers, Grammar

C = TypeVar("C", bound="Hashable")
V = TypeVar("V")

N_REFUSED_MAX = 64
"""Most requests refused before one plan, so that a step does not wait for many of them."""

_N_FILE_TOKENS_MAX = 2**20
"""Tokens of files on disk that are remembered, so that a file whose cells are in memory is not read: some 40 MB."""

_N_FILES_MAX = 256
"""Most of these files."""

_N_GRAMMARS_MAX = 32
"""Compiled grammars that are kept for later requests: each holds up to some ten MiB. Our choice."""


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
    drivers: Sequence[SequenceDriver]
    n_usable: Callable[[SequenceDriver, CacheEntry], int]
    """Returns how many of the file's cells a sequence can use."""
    n_read: int = 0
    """How many cells were read, from the file's beginning."""

    @property
    def is_wanted(self) -> bool:
        """Whether a sequence still waits for the file."""
        return any(_waiting(self.drivers, Wait.CACHE))

    def choose(self, found: CacheEntry) -> int:
        """Return how many cells of the file to read, and record the number: as many as any sequence can use.

        In memory that cannot be trimmed, it is all cells, a checkpoint's, or none.
        """
        drivers = _waiting(self.drivers, Wait.CACHE)
        self.n_read = max((self.n_usable(driver, found) for driver in drivers), default=0)
        return self.n_read


ToCompile: TypeAlias = "Grammar | DryBreakers"
Want: TypeAlias = "ToCompile | CacheRead | ToStore"
"""What is to be made: something compiled, a file read, or cells written to a file."""

Given: TypeAlias = "int | CacheError | None"
"""What a sequence gets from its file: the key under which the backend puts its cells, or why there are none. With None
the sequence tries again at its turn: it copies from a slot, or waits for the file again."""


def to_compile(driver: SequenceDriver) -> list[ToCompile]:
    """Return what must still be compiled before a sequence can run."""
    wants = driver.request.grammar, driver.request.dry_breakers
    return [want for want in wants if want is not None and want not in driver.compiled]


class SequenceWants:
    """Gets what sequences need from outside the scheduler, and lets the batcher queue them when they have it.

    Equal wants are ordered once: `take` returns each, other threads make it, `resolve` takes the result. All methods
    belong to the owner thread, except where noted.
    """

    def __init__(
        self,
        tokenize: Callable[[SequenceDriver], object],
        *,
        n_ahead: int = 0,
        takes_long: Callable[[SequenceDriver], bool] = lambda _: False,
    ) -> None:
        """Start without wants; a batcher calls `serve`.

        Args:
            tokenize: tokenizes a sequence's prompt, at once or later by a command that calls `take_prompt`.
            n_ahead: how many prompts are tokenized before a slot is free.
            takes_long: whether a prompt takes long to tokenize; others pass it meanwhile.
        """
        self.n_ahead = n_ahead
        self._tokenize, self._takes_long = tokenize, takes_long
        self._orders: deque[Want] = deque()
        self._builds: _Ordered[ToCompile, object] = _Ordered(Wait.COMPILE, _N_GRAMMARS_MAX)
        self._let_go: list[SequenceDriver] = []
        """Sequences that waited for their tokens and may still be in the queue."""

    def serve(self, batcher: MultiRequestBatcher) -> None:
        """Get what the sequences of this batcher need."""
        self._batcher, self.files = batcher, FileWants(batcher, self._orders)

    def take(self) -> Want | None:
        """Return the next want that was not returned before, or None."""
        return self._orders.popleft() if self._orders else None

    def lack_of(self, driver: SequenceDriver) -> Wait | None:
        """Order what a sequence lacks before it can be queued; return what it waits for.

        A prompt is tokenized at once where that is quick, asked for early, or needed for the queue's order.
        """
        if not driver.is_tokenized:
            is_by_prompt, takes_long = self._batcher.is_by_prompt, self._takes_long(driver)
            is_ready = driver.request.prompt.tokens is not None and not takes_long
            if is_by_prompt or driver.is_early or is_ready:
                self._tokenize(driver)
            must_know = takes_long or is_by_prompt or driver.request.is_grammar_open
            if must_know and not driver.is_tokenized:
                return Wait.PROMPT
        return None if driver.error is not None else self._lack_of_compiled(driver)

    # ---- prompts ----

    def look_ahead(self, ending: Collection[SequenceDriver], now: float) -> None:
        """Tokenize the prompts that the next plan may need, so the cost does not depend on the length of the queue.

        Args:
            ending: running sequences that are about to leave their slots.
            now: the time; sequences whose prompts are refused end.
        """
        batcher = self._batcher
        if batcher.held[Wait.PROMPT]:
            for driver in self._due():
                self._tokenize(driver)
                if driver.is_tokenized:  # an engine without threads tokenizes at once
                    self.take_prompt(driver, now)
        if batcher.queue and (n_wanted := batcher.n_open(ending) + self.n_ahead):
            self._tokenize_queued(n_wanted, ending, now)

    def take_prompt(self, driver: SequenceDriver, now: float) -> None:
        """Continue with a sequence whose prompt was tokenized or refused."""
        if self._batcher.in_flight.get(driver.request.id) is not driver:
            return  # `lack_of` will see it
        if driver.error is not None:
            self._batcher.fail(driver, driver.error, now)
        elif driver.waits_for is Wait.PROMPT:
            self._let_go.append(driver)
            self._batcher.go_on([driver])

    def _due(self) -> list[SequenceDriver]:
        """Return the first sequences that wait for tokens: as many as have no other ready before them."""
        batcher = self._batcher
        self._let_go = [d for d in self._let_go if not d.has_run and d.finish_reason is None]
        n_ready = sum(d.status is Status.WAITING and d.waits_for is None for d in self._let_go)
        n_due = max(0, batcher.ledger.n_slots + self.n_ahead - n_ready)
        return [*islice(batcher.held[Wait.PROMPT], n_due)]

    def _tokenize_queued(
        self, n_wanted: int, ending: Collection[SequenceDriver], now: float
    ) -> None:
        """Tokenize the first prompts in the queue, and prompts that may pass them.

        Sequences with refused prompts end. They, and prompts that take long to tokenize, do not count.
        """
        refused: list[tuple[SequenceDriver, CBatchError]] = []
        slow: list[SequenceDriver] = []
        n_ready, n_passed = 0, N_LOOK - 1 if self._batcher.ledger.is_overcommitted else 0
        for driver in self._batcher.candidates(ending):
            if not driver.is_tokenized and self._takes_long(driver):
                slow.append(driver)
            else:
                self._tokenize(driver)
                n_ready += driver.error is None
                has_key = driver.request.options.cache_key is not None
                n_passed = min(n_passed + has_key, N_LOOK - 1)
                if driver.error is not None:
                    refused.append((driver, driver.error))
            if n_ready == n_wanted + n_passed or N_REFUSED_MAX in (len(refused), len(slow)):
                break
        for driver, error in refused:
            self._batcher.fail(driver, error, now)
        for driver in slow:
            self._batcher.hold(driver, Wait.PROMPT)

    # ---- compiled grammars and DRY breakers ----

    def _lack_of_compiled(self, driver: SequenceDriver) -> Wait | None:
        """Give a sequence what is compiled already; order the first thing that is not."""
        builds = self._builds
        for want in to_compile(driver):
            if want not in builds.known:
                if builds.add(driver, want):
                    self._orders.append(want)
                return Wait.COMPILE
            driver.compiled[want] = builds.known[want]
            builds.learn(want, builds.known[want])  # use counts as learning
        return None

    def is_wanted(self, want: ToCompile) -> bool:
        """Whether a sequence still waits for `want`. From any thread."""
        return self._builds.is_wanted(want)

    def _take_compiled(self, want: ToCompile, found: object, now: float) -> None:
        """Take what was compiled, or its `GrammarError`; None if nothing was compiled because no sequence waited."""
        builds, batcher = self._builds, self._batcher
        if found is None and builds.is_wanted(want):  # by now one waits again
            self._orders.append(want)
            return
        drivers = builds.pop(want)
        if isinstance(found, GrammarError):
            for driver in drivers:
                batcher.fail(driver, GrammarError(found.kind, found.reason), now)
        elif found is not None:
            builds.learn(want, found)
            batcher.go_on(drivers)

    # ---- results ----

    def resolve(self, want: Want, found: object, now: float) -> list[tuple[SequenceDriver, int]]:
        """Give a result to the sequences that wait for it.

        Args:
            found: the compiled grammar, or a `GrammarError`; for a file to read or write its `CacheEntry`, or a
                `CacheError`; None if nothing was compiled or read because no sequence waited any more.

        Returns:
            The sequences for which the backend must load cells of the file, with a key for each. A negative key is that
            of a checkpoint, which other sequences may use too.
        """
        if isinstance(want, ToStore):
            self.files.end_storing(want, found)
        elif isinstance(want, CacheRead):
            return self.files.take_read(want, found, now)
        else:
            self._take_compiled(want, found, now)
        return []

    def store(self, want: ToStore) -> None:
        """Have cells written that a run has copied out."""
        self._orders.append(want)


class _Ordered(Generic[C, V]):
    """Sequences that wait for a file or a grammar. Each is ordered once, and recent results are remembered."""

    def __init__(
        self, reason: Wait, n_known_max: int, size: Callable[[V], int] = lambda _: 1
    ) -> None:
        """Start with nothing known; results of at most `n_known_max` in `size` are remembered, and the last one."""
        self._reason, self._n_known_max, self._size = reason, n_known_max, size
        self._drivers: dict[C, list[SequenceDriver]] = {}
        self.known: dict[C, V] = {}
        """Recent results, learned longest ago first. Read-only outside this class."""

    def add(self, driver: SequenceDriver, wanted: C) -> bool:
        """Make a sequence wait; return whether it is the first to want this."""
        is_new = wanted not in self._drivers
        self._drivers.setdefault(wanted, []).append(driver)
        return is_new

    def drivers(self, wanted: C) -> Sequence[SequenceDriver]:
        """Return all sequences that have come to wait for this; more may join."""
        return self._drivers.get(wanted, ())

    def is_wanted(self, wanted: C) -> bool:
        """Whether a sequence still waits for this. From any thread."""
        return any(_waiting(self.drivers(wanted), self._reason))

    def pop(self, wanted: C) -> list[SequenceDriver]:
        """Remove and return the sequences that still wait for this."""
        return [*_waiting(self._drivers.pop(wanted, ()), self._reason)]

    def learn(self, wanted: C, found: V) -> None:
        """Remember a result, and forget the oldest if they are too much."""
        self.known.pop(wanted, None)
        self.known[wanted] = found
        n_more = sum(map(self._size, self.known.values())) - self._n_known_max
        while n_more > 0 and len(self.known) > 1:
            n_more -= self._size(self.known.pop(next(iter(self.known))))


def _waiting(drivers: Sequence[SequenceDriver], reason: Wait) -> Iterator[SequenceDriver]:
    """Yield the sequences that still wait for this reason: the others have ended."""
    return (driver for driver in tuple(drivers) if driver.waits_for is reason)


class FileWants:
    """Sequences that wait for cells from disk. A file is read once for all sequences that wait for it."""

    def __init__(self, batcher: MultiRequestBatcher, orders: deque[Want]) -> None:
        self._batcher, self._orders = batcher, orders
        self._reads: _Ordered[CacheRef, CacheEntry] = _Ordered(
            Wait.CACHE, _N_FILE_TOKENS_MAX, _size_of
        )

    def must_read(self, driver: SequenceDriver, n_found: int) -> bool:
        """Whether a sequence that could get a slot should wait for cells from disk. Changes nothing.

        Args:
            n_found: how many leading cells of its prompt are in memory.
        """
        if not _may_read(driver) or self.why_useless(driver) is not None:
            return False
        found = self._reads.known.get(CacheRef.of(driver.request))
        return found is None or not self._is_in_memory(driver, found, n_found)

    def why_useless(self, driver: SequenceDriver) -> CacheError | None:
        """Return why a sequence enters its slot without cells from its file, if the file is known to be useless.

        A required file is read anyway, because it may have been written again.
        """
        if driver.request.options.cache_required or not _may_read(driver):
            return None
        found = self._reads.known.get(CacheRef.of(driver.request))
        if found is None or self._n_usable(driver, found):
            return None
        return _no_beginning(CacheRef.of(driver.request), found)

    def enter(self, driver: SequenceDriver) -> None:
        """Note that a sequence gets its first slot, with a warning if its file is known to be useless."""
        if (problem := self.why_useless(driver)) is not None:
            driver.is_done_with_disk = True
            _warn(driver, problem)

    def lose(self, driver: SequenceDriver, now: float) -> None:
        """Continue with a sequence for which llama.cpp could not load the cells of its file."""
        key = CacheRef.of(driver.request).key
        self.refuse(driver, CacheError(key, "llama.cpp cannot load these cells"), now)

    def read(self, driver: SequenceDriver) -> None:
        """Order the file of a held sequence."""
        driver.is_done_with_disk = True
        ref = CacheRef.of(driver.request)
        if self._reads.add(driver, ref):
            self._orders.append(CacheRead(ref, self._reads.drivers(ref), self._n_usable))

    def learn(self, ref: CacheRef, found: CacheEntry) -> None:
        """Remember the tokens of a file."""
        self._reads.learn(ref, found)

    def take_read(
        self, want: CacheRead, found: object, now: float
    ) -> list[tuple[SequenceDriver, int]]:
        """Take the result of reading a file; see `SequenceWants.resolve`."""
        drivers = self._reads.pop(want.ref)
        given: dict[SequenceDriver, Given] = dict.fromkeys(drivers)
        if isinstance(found, CacheEntry):
            self.learn(want.ref, found)
            given = self._give_cells(want, found, drivers)
        elif isinstance(found, CacheError):
            self._reads.known.pop(want.ref, None)
            given = dict.fromkeys(drivers, found)
        for driver, what in given.items():
            driver.is_done_with_disk = what is not None
            if isinstance(what, CacheError):
                self.refuse(driver, what, now)
        self._batcher.go_on([driver for driver in given if driver.error is None])
        loads = [(driver, what) for driver, what in given.items() if isinstance(what, int)]
        if loads and (key := self._batcher.adopt(loads[0][0])) is not None:
            loads.append((loads[0][0], key))
        return loads

    def refuse(self, driver: SequenceDriver, error: CacheError, now: float) -> None:
        """Let a sequence continue without the cells of its file, or end it if it requires them."""
        if driver.request.options.cache_required:
            self._batcher.fail(driver, error, now)
        else:
            _warn(driver, error)
            self._batcher.forget_cells(driver)

    def end_storing(self, want: ToStore, found: object) -> None:
        """End a sequence whose cells were written to disk, or were not; `found` says why."""
        if isinstance(found, CacheEntry):
            self.learn(CacheRef.of(want.driver.request), found)
        else:
            want.driver.warnings.append(str(found))
        self._batcher.end_storing(want.driver)

    def _give_cells(
        self, want: CacheRead, found: CacheEntry, drivers: Sequence[SequenceDriver]
    ) -> dict[SequenceDriver, Given]:
        """Decide what each sequence gets from a file."""
        given: dict[SequenceDriver, Given] = {}
        prefixes, n_loaded = self._batcher.cells.prefixes, 0
        can_trim = self._batcher.ledger.memory.can_trim
        for driver in drivers:
            n_cells = self._n_usable(driver, found)
            can_share = prefixes.can_share(driver)
            can_use = n_cells in (0, want.n_read) or (can_trim and n_cells < want.n_read)
            is_late = driver.status is not Status.WAITING or not can_use
            is_loaded = min(n_cells, n_loaded) >= MIN_SHARED_TOKENS > n_cells - n_loaded
            source = prefixes.find(driver).source
            n_found = source.n_cells if source else 0
            if is_late or (can_share and is_loaded) or self._is_in_memory(driver, found, n_found):
                given[driver] = None
            elif not n_cells:
                given[driver] = _no_beginning(want.ref, found)
            else:
                given[driver] = self._batcher.give_cells(driver, n_cells)
                if can_share:
                    n_loaded = n_cells
        return given

    def _is_in_memory(self, driver: SequenceDriver, found: CacheEntry, n_found: int) -> bool:
        """Whether slots hold about as many of a prompt's leading tokens as the file, and at least some."""
        n_cells = self._n_usable(driver, found)
        return n_found > 0 and 0 < n_cells < n_found + MIN_SHARED_TOKENS

    def _n_usable(self, driver: SequenceDriver, found: CacheEntry) -> int:
        prefixes = self._batcher.cells.prefixes
        return prefixes.n_usable(driver, found.tokens, found.n_given, found.n_checkpoint)


def _may_read(driver: SequenceDriver) -> bool:
    options = driver.request.options
    if options.cache_key is None or driver.is_done_with_disk or driver.has_run or driver.output:
        return False
    return options.n_prompt_logprobs is None  # a scored prompt is computed as a whole


def _size_of(found: CacheEntry) -> int:
    """Return the tokens of a file, at least those of an average one of the most files."""
    return max(len(found.tokens), _N_FILE_TOKENS_MAX // _N_FILES_MAX)


def _warn(driver: SequenceDriver, error: CacheError) -> None:
    """Warn that a sequence runs without cells from disk, unless its file does not exist yet and it will write it."""
    if not (error.is_missing and driver.request.options.save_cache):
        driver.warnings.append(f"cache_key: {error.reason}")


def _no_beginning(ref: CacheRef, found: CacheEntry) -> CacheError:
    n = len(found.tokens)
    return CacheError(ref.key, f"the prompt shares no usable beginning with its {n} saved tokens")
