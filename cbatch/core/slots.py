"""What a plan does to slots: which sequences leave, enter, move and wait, decided against a view of the books."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from cbatch.core.lifecycle import Status
from cbatch.core.preemption import Demand, choose_mover, choose_victim

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.core.cell_ops import CellOps, SavedCells, SlotCells
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import Slot
    from cbatch.core.preemption import KvDemandEstimator
    from cbatch.core.prefix import PrefixChanges, PrefixMatch, Source
    from cbatch.core.queue import AdmissionQueue
    from cbatch.core.waiting import CacheReads, PrefixWaiters

N_LOOK = 4
"""How many waiting sequences are looked at where the first does not fit."""

N_OVERTAKEN_MAX = 16
"""How many may be admitted before one that waits for cells; then it holds up all behind it."""

N_READ_PER_SLOT = 2
"""How many may wait for cells from disk: others pass them, and what was read for them takes memory."""

N_STORED_PER_SLOT = 2
"""How many may wait for their cells to be written, in host memory meanwhile; then no sequence enters that saves."""


@dataclass(eq=False, slots=True)
class Books:
    """What is known of slots, cells and waiting sequences. Events and `apply` change it; a plan never does."""

    running: list[SequenceDriver | None]
    """The sequence in each slot; it may be a paused one."""
    cells: SlotCells
    saved: SavedCells
    queue: AdmissionQueue
    followers: PrefixWaiters
    reads: CacheReads
    demand: KvDemandEstimator
    storing: dict[str, SequenceDriver]
    """Ended sequences that wait for their cells to be on disk."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A sequence that gives up its slot: its turn is over, cells are needed, or it is paused and the slot is needed."""

    driver: SequenceDriver
    slot: Slot
    reason: Literal["turn", "cells", "pause"]
    key: int | None
    """Under which its cells are saved; None where they are lost."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence that gets a slot."""

    driver: SequenceDriver
    slot: Slot
    n_cells: int
    """Cells that it begins with: loaded, copied, or in the slot already."""
    is_copied: bool
    is_uncached: bool = False
    """Whether it begins without the cells of its file on disk, which is known to be no use."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A sequence that waits for cells from disk, or until its leader has `n_cells` cells."""

    driver: SequenceDriver
    leader: SequenceDriver | None = None
    n_cells: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence that goes on in a lower slot."""

    driver: SequenceDriver
    source: Slot
    slot: Slot


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """What a plan does to slots, for `apply` to commit."""

    leaves: tuple[Leave, ...]
    entries: tuple[Entry, ...]
    holds: tuple[Hold, ...]
    overtaken: tuple[tuple[SequenceDriver, int], ...]
    """How many more passed a sequence that was first."""
    move: Move | None
    prefixes: PrefixChanges | None
    """What the prefix cache knows of the slots then; None where no slot and no cell changes."""
    next_key: int


class SlotPlan:
    """The slots as a plan leaves them. The first change makes a view of the cells; without one nothing is copied."""

    def __init__(self, books: Books, order: list[SequenceDriver]) -> None:
        self._books, self._order = books, order
        self.cells = books.cells
        self.running: Sequence[SequenceDriver | None] = books.running
        self._running = books.running  # to be changed in a view alone
        self.placed: dict[SequenceDriver, tuple[Slot, int]] = {}
        """The sequences that are new in their slots, with their cells."""
        self._leaves: list[Leave] = []
        self._entries: list[Entry] = []
        self._holds: dict[SequenceDriver, Hold] = {}
        self._n_new_followers = 0
        self._overtaken: dict[SequenceDriver, int] = {}
        self._move: Move | None = None
        self._next_key, self._n_saved_bytes = books.saved.next_key, books.saved.n_bytes

    # ---- questions ----

    def rows(self) -> list[SequenceDriver]:
        """Return the sequences that run then, the oldest first."""
        if not (self._leaves or self.placed):
            return self._order
        left = {leave.driver for leave in self._leaves}
        rows = [d for d in self._order if d not in left and d not in self.placed]
        return sorted([*rows, *self.placed], key=lambda d: d.number)

    def leaving(self) -> list[SequenceDriver]:
        """Return the sequences that leave their slots."""
        return [leave.driver for leave in self._leaves]

    @property
    def n_waiting(self) -> int:
        """Sequences that wait for a slot then."""
        n_left = sum(leave.reason != "pause" for leave in self._leaves)
        return len(self._books.queue) - len(self._entries) - len(self._holds) + n_left

    @property
    def can_admit(self) -> bool:
        """Whether a slot is free, or can be made free by parking a paused sequence."""
        ledger = self.cells.ledger
        return ledger.has_free_slot or len(self._order) < ledger.n_slots

    @property
    def can_make_room(self) -> bool:
        """Whether cells of retained slots, of a paused sequence or of a victim can be had."""
        ledger = self.cells.ledger
        return (
            len(self._order) < ledger.n_lent
            or self.cells.prefixes.oldest_retained() is not None
            or choose_victim(self.running, ledger) is not None
        )

    @property
    def n_following(self) -> int:
        """Sequences that wait for another's prefix, each of which a slot is kept for."""
        return len(self._books.followers) + self._n_new_followers

    @property
    def n_awaited(self) -> int:
        """Sequences that wait for what they can begin with; a slot is kept free for those that follow another."""
        return len(self._books.followers) + len(self._books.reads) + len(self._holds)

    def changes(self) -> SlotChanges | None:
        """Return all changes as a value, None where there is none."""
        has_view = self.cells is not self._books.cells
        if not (has_view or self._holds or self._overtaken):
            return None
        return SlotChanges(
            tuple(self._leaves),
            tuple(self._entries),
            tuple(self._holds.values()),
            tuple(self._overtaken.items()),
            self._move,
            self.cells.prefixes.changes() if has_view else None,
            self._next_key,
        )

    def ops(self) -> CellOps:
        """Return what the plan does to cells, with what was left to do."""
        return self.cells.ops()

    # ---- leaving ----

    def end_turn(self, driver: SequenceDriver) -> None:
        """Take the slot of a sequence that has had its quantum."""
        self._leave(driver, "turn")

    def make_room(self, n_cells: int) -> bool:
        """Empty free slots until `n_cells` cells are free; return whether any was emptied."""
        if self.cells.ledger.n_free_cells >= n_cells:
            return False
        if self.cells.prefixes.oldest_retained() is None:
            return False
        return self._edit().make_room(n_cells)

    def preempt(self) -> bool:
        """Take the slot and cells of a paused sequence, else of a victim; False if there is neither."""
        if self.park():
            return True
        victim = choose_victim(self.running, self.cells.ledger)
        if victim is not None:
            self._leave(victim, "cells")
        return victim is not None

    def park(self) -> bool:
        """Take the slot of a paused sequence; False where there is none."""
        for driver in self.running:
            if driver is not None and driver.status is Status.PAUSED:
                self._leave(driver, "pause")
                return True
        return False

    def _leave(self, driver: SequenceDriver, reason: Literal["turn", "cells", "pause"]) -> None:
        cells, slot = self._edit(), driver.slot
        if slot is None:
            return
        key = self._save(driver, slot)
        self._leaves.append(Leave(driver, slot, reason, key))
        self._running[slot] = None
        cells.ledger.give_back(slot)
        cells.leave(driver, slot)

    def _save(self, driver: SequenceDriver, slot: Slot) -> int | None:
        """Save the cells of a sequence that leaves its slot, where that can be."""
        n_bytes = self._books.saved.n_bytes_of(driver.n_computed)
        has_room = self._n_saved_bytes + n_bytes <= self._books.saved.n_bytes_max
        if not n_bytes or not has_room or slot in self.cells.trims or slot in self.cells.shifts:
            return None
        self._n_saved_bytes += n_bytes
        self._next_key += 1
        self.cells.saves.append((slot, self._next_key - 1))
        return self._next_key - 1

    # ---- moving ----

    def compact(self) -> None:
        """Move the sequence of the highest slot into a gap below it, where that can be and pays."""
        mover = choose_mover(self.running, self.cells.ledger)
        if mover is None or mover.slot is None:
            return
        cells, source = self._edit(), mover.slot
        slot = cells.ledger.lend(min(cells.ledger.free_slots))
        cells.move(mover, source, slot)
        cells.ledger.give_back(source)
        self._running[slot], self._running[source] = mover, None
        self._move = Move(mover, source, slot)
        self.placed[mover] = slot, mover.n_computed

    # ---- entering ----

    def admit(self, n_copied_max: int | None = None) -> None:
        """Give free slots to waiting sequences whose cells fit, in the order of the queue.

        Admission stops once the plan copies more than `n_copied_max` cells; the copy past the limit is still made.
        """
        candidates = _Candidates(self._books.queue, N_LOOK if self.cells.ledger.is_shared else 1)
        demand = self._demand()
        while first := candidates.first():
            if not (self.cells.ledger.has_free_slot or self.park()):
                break
            if n_copied_max is not None and self.cells.n_to_copy > n_copied_max:
                break
            n_left = len(self._leaves)
            found = self._fitting(first, demand)
            if found is not None:
                if not self._let_in(*found, demand):
                    break
                candidates.remove(found[0])
            elif not self.park():
                break
            if len(self._leaves) > n_left:
                demand = self._demand()

    def _demand(self) -> Demand:
        """Return what running sequences will want; those that a plan lets in join one after the other."""
        demand = Demand(self._books.demand)
        for driver in self.running if self.cells.ledger.is_shared else ():
            if driver is not None:
                demand.join(driver, self.n_computed(driver))
        return demand

    def n_computed(self, driver: SequenceDriver) -> int:
        """Return the cells of a sequence as the plan leaves them."""
        return self.placed[driver][1] if driver in self.placed else driver.n_computed

    def _fitting(
        self, waiting: Sequence[SequenceDriver], demand: Demand
    ) -> tuple[SequenceDriver, PrefixMatch] | None:
        """Return the first that fits or follows, with what it begins with; the head lets some pass, not for ever."""
        head = waiting[0]
        for driver in waiting:
            found = self.cells.prefixes.find(driver)
            if found.leader is not None or self._fits(driver, found.source, demand):
                if driver is not head:
                    self._overtaken[head] = self._overtaken.get(head, 0) + 1
                return driver, found
            if head.n_overtaken + self._overtaken.get(head, 0) >= N_OVERTAKEN_MAX:
                break
        return None

    def _fits(self, driver: SequenceDriver, source: Source | None, demand: Demand) -> bool:
        """Whether there are cells for a waiting sequence besides those that run."""
        has_holder = source is not None and self.running[source.slot] is not None
        n_shared = source.n_cells if source is not None and has_holder else 0
        return demand.fits(driver, self.cells.ledger, n_shared)

    def _let_in(self, driver: SequenceDriver, found: PrefixMatch, demand: Demand) -> bool:
        """Give a slot to a sequence, or hold it until it can begin further on; False if no slot is free for it."""
        books, n_slots = self._books, self.cells.ledger.n_slots
        if self.cells.ledger.n_free_slots <= self.n_following:
            return False
        if driver.request.options.save_cache and len(books.storing) >= N_STORED_PER_SLOT * n_slots:
            return False
        if found.leader is not None:
            self._holds[driver] = Hold(driver, found.leader, found.n_then)
            self._n_new_followers += 1
            return True
        is_uncached = books.reads.why_useless(driver) is not None
        if not is_uncached and books.reads.is_needed(driver, self.cells.prefixes):
            if self.n_awaited - self.n_following >= N_READ_PER_SLOT * n_slots:
                return False
            self._holds[driver] = Hold(driver)
            return True
        self._enter(driver, found.source, is_uncached=is_uncached)
        if self.cells.ledger.is_shared:
            demand.join(driver, self.n_computed(driver))
        return True

    def _enter(self, driver: SequenceDriver, source: Source | None, *, is_uncached: bool) -> None:
        cells = self._edit()
        place = cells.prefixes.place(source, has_room=self._has_slot_to_spare())
        slot = cells.ledger.lend(place)
        self._running[slot] = driver
        n_cells = cells.enter(driver, slot, source)
        is_copied = source is not None and source.slot != slot
        self._entries.append(Entry(driver, slot, n_cells, is_copied, is_uncached))
        self.placed[driver] = slot, n_cells

    def _has_slot_to_spare(self) -> bool:
        """Whether a slot stays free when each sequence that wants one has one."""
        n_waiting = len(self._books.queue) - len(self._entries) - len(self._holds)
        n_taken = self.n_following + len(self.cells.prefixes.copied) + n_waiting - 1
        return self.cells.ledger.n_free_slots - n_taken > 1

    def _edit(self) -> SlotCells:
        """Return the view of the cells, which the first change makes."""
        if self.cells is self._books.cells:
            self._running = [*self._books.running]
            self.running = self._running
            self.cells = self._books.cells.view(self._running)
        return self.cells


class _Candidates:
    """The next sequences of a queue, as a plan takes them one after the other; the queue stays as it is."""

    def __init__(self, queue: AdmissionQueue, n_look: int) -> None:
        self._rest: Iterator[SequenceDriver] = iter(queue)
        self._n_look = n_look
        self._next: list[SequenceDriver] = []

    def first(self) -> list[SequenceDriver]:
        """Return the next waiting sequences, as far as their prompts are tokens."""
        n_missing = self._n_look - len(self._next)
        for driver in islice(self._rest, n_missing):
            if not driver.is_prepared or driver.error is not None:
                self._rest = iter(())
                break
            self._next.append(driver)
        return self._next

    def remove(self, driver: SequenceDriver) -> None:
        """Take out one that the plan has found a place for."""
        self._next.remove(driver)
