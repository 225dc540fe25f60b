"""The ledger of slots and of the KV cache's cells: which slots are lent, and how many cells each slot holds."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.core.plan import Slot
from cbatch.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from cbatch.core.plan import KvCapabilities, StepPlan


@dataclass(eq=False, slots=True)
class _Block:
    """A run of cells that slots share as a whole: a slot has all of them or none."""

    n: int
    n_slots: int = 1


class KvLedger:
    """`n_slots` slots of at most `n_window` cells each, lent lowest id first where none is asked for.

    Partitioned and recurrent memory have room for every slot's window; unified memory has `n_pool` cells for all, and
    what one slot has of another is counted once. Low ids close together are what the decode speed needs in partitioned
    KV (a gap costs a graph run).
    """

    __slots__ = (
        "_blocks",
        "_free",
        "_lent",
        "is_shared",
        "memory",
        "n_cells",
        "n_pool",
        "n_slots",
        "n_used",
        "n_window",
    )

    def __init__(self, n_slots: int, n_window: int, memory: KvCapabilities | None = None) -> None:
        self.memory = memory
        self.n_slots = n_slots
        self.n_window = n_window
        self.n_pool = memory.n_cells if memory and memory.kind == "unified" else n_slots * n_window
        self.is_shared = self.n_pool < n_slots * n_window
        """Whether slots can take cells from each other."""
        self.n_cells = [0] * n_slots
        self.n_used = 0
        self._blocks: list[list[_Block]] = [[] for _ in range(n_slots)]
        self._lent = [False] * n_slots
        self._free = [Slot(i) for i in range(n_slots)]

    @property
    def has_free_slot(self) -> bool:
        """Whether `lend` would find a slot."""
        return bool(self._free)

    @property
    def n_free_slots(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    @property
    def n_lent(self) -> int:
        """Slots in use."""
        return self.n_slots - len(self._free)

    @property
    def n_free_cells(self) -> int:
        """Cells that no slot holds."""
        return self.n_pool - self.n_used

    @property
    def free_slots(self) -> Sequence[Slot]:
        """The slots that nobody has, in no order; what they hold may be of use still."""
        return self._free

    def lend(self, slot: Slot | None = None) -> Slot:
        """Give out a free slot: this one, or else the lowest.

        Raises:
            LedgerError: none is free, or this one is not.
        """
        if not self._free:
            raise LedgerError(f"all {self.n_slots} slots are lent")
        if slot is None or slot == self._free[0]:
            slot = heapq.heappop(self._free)
        elif self._lent[slot]:
            raise LedgerError(f"slot {slot} is lent")
        else:
            self._free.remove(slot)
            heapq.heapify(self._free)
        self._lent[slot] = True
        return slot

    def give_back(self, slot: Slot) -> None:
        """Take a slot back; its cells are still in it."""
        if not self._lent[slot]:
            raise LedgerError(f"slot {slot} is not lent")
        self._lent[slot] = False
        heapq.heappush(self._free, slot)

    def add(self, slot: Slot, n_cells: int) -> None:
        """Enter `n_cells` more cells of a lent slot; raises as `add_all`."""
        self.add_all([(slot, n_cells)])

    def add_all(self, cells: Iterable[tuple[Slot, int]]) -> None:
        """Enter more cells of lent slots.

        Raises:
            LedgerError: a slot is not lent, or it or the pool has no room for its cells.
        """
        for slot, n_more in cells:
            n = self.n_cells[slot] + n_more
            if not self._lent[slot] or n > self.n_window or n_more > self.n_pool - self.n_used:
                raise LedgerError(
                    f"slot {slot} cannot hold {n} of {self.n_window} cells, "
                    f"{self.n_free_cells} are free"
                )
            self.n_cells[slot] = n
            self.n_used += n_more
            if self.is_shared and n_more:
                blocks = self._blocks[slot]
                if blocks and blocks[-1].n_slots == 1:
                    blocks[-1].n += n_more
                else:
                    blocks.append(_Block(n_more))

    def trim(self, slot: Slot, n_cells: int) -> None:
        """Strike out all but the first `n_cells` cells of a slot."""
        n_less = self.n_cells[slot] - n_cells
        if n_less < 0:
            raise LedgerError(f"slot {slot} has {self.n_cells[slot]} cells, not {n_cells}")
        self.n_cells[slot] = n_cells
        self.n_used -= self._drop_blocks(slot, n_less) if self.is_shared else n_less

    def share(self, source: Slot, slot: Slot, n_cells: int) -> None:
        """Enter the first `n_cells` cells of one slot for another, empty one; in a pool they take no further room."""
        if not self.is_shared:
            self.add(slot, n_cells)
            return
        if not self._lent[slot] or self.n_cells[slot] or n_cells > self.n_cells[source]:
            raise LedgerError(f"slot {slot} cannot have {n_cells} cells of slot {source}")
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

    def copy(self) -> KvLedger:
        """Return a ledger that says the same and changes on its own."""
        other = KvLedger(self.n_slots, self.n_window, self.memory)
        other.n_used = self.n_used
        other.n_cells, other._lent, other._free = self.n_cells[:], self._lent[:], self._free[:]
        if self.is_shared:
            blocks = {id(b): _Block(b.n, b.n_slots) for held in self._blocks for b in held}
            other._blocks = [[blocks[id(b)] for b in held] for held in self._blocks]
        return other

    def do(self, plan: StepPlan, lost: Container[int] = ()) -> None:
        """Enter what a run did to cells before it computed: clears, trims, loads and copies, in this order.

        Args:
            plan: what was run.
            lost: keys that could not be loaded; where one is, nothing was copied.
        """
        for slot in plan.clears:
            self.trim(slot, 0)
        for slot, n in plan.trims:
            self.trim(slot, n)
        for slot, key, n in plan.loads:
            if key not in lost:
                self.add(slot, n)
        if not any(key in lost for _, key, _ in plan.loads):
            for source, slot, n in plan.copies:
                self.share(source, slot, n)

    def n_own(self, slot: Slot) -> int:
        """Return the cells that would be free if the slot were emptied."""
        if not self.is_shared:
            return self.n_cells[slot]
        return sum(block.n for block in self._blocks[slot] if block.n_slots == 1)

    def n_in_use(self) -> int:
        """Return the cells of the slots that are lent, those of several counted once."""
        lent = (i for i, is_lent in enumerate(self._lent) if is_lent)
        return sum({id(b): b.n for i in lent for b in self._blocks[i]}.values())

    def _drop_blocks(self, slot: Slot, n_less: int) -> int:
        """Take `n_less` cells off the end of a slot; return how many of them nobody else has."""
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
        """Make the cells of a block behind the first `n` one of their own, in every slot that has it."""
        rest = _Block(block.n - n, block.n_slots)
        block.n = n
        for blocks in self._blocks:
            if block in blocks:
                blocks.insert(blocks.index(block) + 1, rest)

    def check(self) -> None:
        """Prove that the books balance.

        Raises:
            LedgerError: a slot is both free and lent, counted twice, or overfull; or the sums differ.
        """
        lent = {i for i, is_lent in enumerate(self._lent) if is_lent}
        if len(set(self._free)) != len(self._free) or lent & set(self._free):
            raise LedgerError(f"slots lent twice: free {sorted(self._free)}, lent {sorted(lent)}")
        if len(lent) + len(self._free) != self.n_slots:
            raise LedgerError(f"{len(lent)} lent and {len(self._free)} free of {self.n_slots}")
        if any(not 0 <= n <= self.n_window for n in self.n_cells):
            raise LedgerError(f"cells out of bounds: {self.n_cells} of {self.n_window}")
        held = [b for blocks in self._blocks for b in blocks]
        counted = {id(b): b.n for b in held} if self.is_shared else dict(enumerate(self.n_cells))
        if sum(counted.values()) != self.n_used or self.n_used > self.n_pool:
            raise LedgerError(f"{self.n_cells} are not {self.n_used} of {self.n_pool} cells")
        if any(b.n < 1 or b.n_slots != held.count(b) for b in held):
            raise LedgerError("a block of cells is empty or has other slots than it says")
