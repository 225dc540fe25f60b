"""The ledger: which sequence has each slot, and how many cells the slot holds. Also checks all counts of core."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.driver import SequenceDriver, Status
from cbatch.core.plan import KvCapabilities, Slot
from cbatch.core.saved_cells import N_CHECKPOINTS_MAX
from cbatch.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from cbatch.core.batcher import MultiRequestBatcher


@dataclass(eq=False, slots=True)
class _Block:
    """A run of cells that one or more slots share; a slot has all of them or none."""

    n: int
    n_slots: int = 1


class KvLedger:
    """`n_slots` slots of at most `n_window` cells each.

    Partitioned and recurrent memory have room for every slot's window. Unified memory has `n_pool` cells for all slots.
    If it is overcommitted, a cell that several slots share counts once.
    """

    # without __slots__, each step of 16 rows takes 8 µs more
    __slots__ = (
        "_blocks",
        "holders",
        "is_overcommitted",
        "memory",
        "n_cells",
        "n_free_slots",
        "n_pool",
        "n_slots",
        "n_used",
        "n_window",
    )

    def __init__(self, n_slots: int, n_window: int, memory: KvCapabilities) -> None:
        self.memory = memory
        self.n_slots = n_slots
        self.n_window = n_window
        self.n_pool = memory.n_cells if memory.kind == "unified" else n_slots * n_window
        self.is_overcommitted = self.n_pool < n_slots * n_window
        """Whether all windows together exceed the pool, so that slots compete for cells."""
        self.holders: list[SequenceDriver | None] = [None] * n_slots
        """The sequence in each slot, running or paused. A free slot may hold cells."""
        self.n_free_slots = n_slots
        self.n_cells = [0] * n_slots
        self.n_used = 0
        self._blocks: list[list[_Block]] = [[] for _ in range(n_slots)]

    @property
    def blocks(self) -> Sequence[Sequence[_Block]]:
        """The runs of cells of each slot in an overcommitted pool."""
        return self._blocks

    @property
    def n_used_slots(self) -> int:
        """Slots in use."""
        return self.n_slots - self.n_free_slots

    @property
    def n_free_cells(self) -> int:
        """Cells that no slot holds."""
        return self.n_pool - self.n_used

    @property
    def free_slots(self) -> list[Slot]:
        """Slots without a sequence, ascending."""
        return [Slot(i) for i, driver in enumerate(self.holders) if driver is None]

    def assign(self, slot: Slot, driver: SequenceDriver) -> None:
        """Give a free slot to a sequence; raises `LedgerError` if it is not free."""
        if self.holders[slot] is not None:
            raise LedgerError(f"slot {slot} is in use")
        self.holders[slot] = driver
        self.n_free_slots -= 1

    def free(self, slot: Slot) -> None:
        """Take a slot back; its cells stay. Raises `LedgerError` if it is free."""
        if self.holders[slot] is None:
            raise LedgerError(f"slot {slot} is free")
        self.holders[slot] = None
        self.n_free_slots += 1

    def add(self, slot: Slot, n_cells: int) -> None:
        """Record `n_cells` more cells of a slot in use; raises the errors of `add_all`."""
        self.add_all([(slot, n_cells)])

    def add_all(self, cells: Iterable[tuple[Slot, int]]) -> None:
        """Record more cells of slots in use.

        Raises:
            LedgerError: a slot is free, or it or the pool has no room for its cells.
        """
        for slot, n_more in cells:
            n = self.n_cells[slot] + n_more
            if (
                self.holders[slot] is None
                or n > self.n_window
                or n_more > self.n_pool - self.n_used
            ):
                raise LedgerError(
                    f"slot {slot} cannot hold {n} cells: the slot must be in use, its window is {self.n_window}, "
                    f"and {self.n_free_cells} cells are free"
                )
            self.n_cells[slot] = n
            self.n_used += n_more
            if self.is_overcommitted and n_more:
                blocks = self._blocks[slot]
                if blocks and blocks[-1].n_slots == 1:
                    blocks[-1].n += n_more
                else:
                    blocks.append(_Block(n_more))

    def trim(self, slot: Slot, n_cells: int) -> None:
        """Remove all but the first `n_cells` cells of a slot."""
        n_less = self.n_cells[slot] - n_cells
        if n_less < 0:
            raise LedgerError(
                f"slot {slot} has {self.n_cells[slot]} cells and cannot keep {n_cells}"
            )
        self.n_cells[slot] = n_cells
        self.n_used -= self._drop_blocks(slot, n_less) if self.is_overcommitted else n_less

    def share(self, source: Slot, slot: Slot, n_cells: int) -> None:
        """Record that an empty slot shares the first `n_cells` of `source`; an overcommitted pool counts them once."""
        if not self.is_overcommitted:
            self.add(slot, n_cells)
            return
        if self.holders[slot] is None or self.n_cells[slot] or n_cells > self.n_cells[source]:
            raise LedgerError(f"slot {slot} cannot share {n_cells} cells of slot {source}")
        n = 0
        for block in self._blocks[source]:
            if n == n_cells:
                break
            if n + block.n > n_cells:
                self._split(block, n_cells - n)
            block.n_slots += 1
            self._blocks[slot].append(block)
            n += block.n
        self.n_cells[slot] = n_cells

    def view(self) -> KvLedger:
        """Return an independent copy for a plan to change."""
        view = copy(self)
        view.n_cells, view.holders = self.n_cells.copy(), self.holders.copy()
        if self.is_overcommitted:
            copies = {id(b): _Block(b.n, b.n_slots) for blocks in self._blocks for b in blocks}
            view._blocks = [[copies[id(b)] for b in blocks] for blocks in self._blocks]
        return view

    def n_own(self, slot: Slot) -> int:
        """Return how many cells emptying the slot would free."""
        if not self.is_overcommitted:
            return self.n_cells[slot]
        return sum(block.n for block in self._blocks[slot] if block.n_slots == 1)

    def n_in_use(
        self, copied: Collection[Slot] = (), leaving: Collection[SequenceDriver] = ()
    ) -> int:
        """Return the number of distinct cells of slots in use or in `copied`; 0 unless the pool is overcommitted.

        `leaving` sequences count as gone.
        """
        in_use = (d is not None and d not in leaving for d in self.holders)
        slots = (s for s, is_used in enumerate(in_use) if is_used or s in copied)
        used = [self._blocks[s] for s in slots]
        return sum({id(b): b.n for blocks in used for b in blocks}.values())

    def _drop_blocks(self, slot: Slot, n_less: int) -> int:
        """Remove `n_less` cells from the end of a slot; return how many of them no other slot shares."""
        blocks, n_freed = self._blocks[slot], 0
        while n_less:
            block = blocks[-1]
            if block.n > n_less:
                self._split(block, block.n - n_less)
                continue
            blocks.pop()
            block.n_slots -= 1
            n_less -= block.n
            n_freed += 0 if block.n_slots else block.n
        return n_freed

    def _split(self, block: _Block, n: int) -> None:
        """Split a block after its first `n` cells, in every slot that has it."""
        rest = _Block(block.n - n, block.n_slots)
        block.n = n
        for blocks in self._blocks:
            if block in blocks:
                blocks.insert(blocks.index(block) + 1, rest)


def find_imbalance(batcher: MultiRequestBatcher) -> str:
    """Return what is wrong with the counts; "" if they balance. Changes nothing. Call it between two runs."""
    return next(_problems(batcher), "")


def find_ledger_imbalance(ledger: KvLedger) -> str:
    """Return what is wrong with a ledger; "" if it balances."""
    return next(_of_ledger(ledger), "")


def _problems(batcher: MultiRequestBatcher) -> Iterator[str]:
    yield from _of_ledger(batcher.ledger)
    yield from _of_slots(batcher.ledger, batcher.in_flight)
    yield from _of_waiting(batcher)
    yield from _of_saved(batcher)


def _of_ledger(ledger: KvLedger) -> Iterator[str]:
    n_free = ledger.holders.count(None)
    if n_free != ledger.n_free_slots:
        yield f"{n_free} slots are free, but the count is {ledger.n_free_slots}"
    if not all(0 <= n <= ledger.n_window for n in ledger.n_cells):
        yield f"slots with windows of {ledger.n_window} cells hold {ledger.n_cells} cells"
    n_used = sum(ledger.n_cells)
    if ledger.is_overcommitted:
        held = [b for blocks in ledger.blocks for b in blocks]
        n_used = sum({id(b): b.n for b in held}.values())
        n_slots = Counter(map(id, held))
        if any(b.n < 1 or b.n_slots != n_slots[id(b)] for b in held):
            yield "a block of cells is in another number of slots than its count says"
        if [sum(b.n for b in blocks) for blocks in ledger.blocks] != ledger.n_cells:
            yield f"slots hold {ledger.n_cells} cells, but their blocks have other lengths"
    if not n_used == ledger.n_used <= ledger.n_pool:
        yield f"{n_used} of {ledger.n_pool} cells are used, but the count is {ledger.n_used}"


def _of_slots(ledger: KvLedger, in_flight: Mapping[str, SequenceDriver]) -> Iterator[str]:
    for slot, driver in enumerate(ledger.holders):
        if driver is None:
            continue
        if in_flight.get(driver.request.id) is not driver:
            yield f"slot {slot} is held by a request that is not in flight"
        elif driver.slot != slot or driver.chosen_slot not in (None, slot):
            yield f"slot {slot} is held by a request that has slot {driver.slot}"
        elif driver.status not in (Status.RUNNING, Status.PAUSED):
            yield f"slot {slot} is held by a request that is {driver.status.name.lower()}"
        elif not ledger.n_cells[slot] == driver.n_computed < driver.n_tokens or (
            driver.n_tokens > ledger.n_window and driver.window is None
        ):
            yield (
                f"slot {slot} holds {ledger.n_cells[slot]} cells of a request with {driver.n_computed} of "
                f"{driver.n_tokens} tokens computed"
            )


def _of_waiting(batcher: MultiRequestBatcher) -> Iterator[str]:
    n_queued = 0
    for driver in batcher.in_flight.values():
        if driver.slot is None:
            n_queued += driver.status is Status.WAITING and driver.waits_for is None
            if driver.n_computed and driver.saved_key is None:
                yield "a request without a slot has computed tokens, but no saved cells"
        elif batcher.ledger.holders[driver.slot] is not driver:
            yield f"a request in flight has slot {driver.slot}, which another request holds"
        if driver.status is Status.FINISHED:
            yield "a request counted as in flight has ended"
    if n_queued != len(batcher.queue):
        yield f"{n_queued} requests wait for a slot, but {len(batcher.queue)} are queued"


def _of_saved(batcher: MultiRequestBatcher) -> Iterator[str]:
    saved, books = batcher.saved, batcher.cells.prefixes.checkpoints
    if not saved.n_counted == saved.n_bytes <= saved.n_bytes_max:
        n_bytes, n_limit = saved.n_counted, saved.n_bytes_max
        yield f"saved cells take {n_bytes} bytes, the count is {saved.n_bytes}, the limit {n_limit}"
    n_bytes = sum(kept.n_bytes for kept in books.kept.values())
    if not n_bytes == books.n_bytes <= books.n_bytes_max:
        n_limit = books.n_bytes_max
        yield f"checkpoints take {n_bytes} bytes, the count is {books.n_bytes}, the limit {n_limit}"
    if len(books) > N_CHECKPOINTS_MAX:
        yield f"there are {len(books)} checkpoints, the limit is {N_CHECKPOINTS_MAX}"
