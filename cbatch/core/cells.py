"""What the next plan has to do to cells before it computes: empty, trim, save, load, forget."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import Memory, Slot


class Orders(TypedDict, total=False):
    """Fields of a `StepPlan`; only those with something in them."""

    clears: tuple[Slot, ...]
    trims: tuple[tuple[Slot, int], ...]
    saves: tuple[tuple[Slot, int], ...]
    loads: tuple[tuple[Slot, int], ...]
    forgets: tuple[int, ...]


class Cells:
    """Keeps the ledger and the drivers' counters in step with the orders that go with the next plan.

    Cells of a sequence that leaves its slot are saved in host memory where the backend can and the budget allows;
    otherwise they are lost, and computed again.
    """

    def __init__(self, ledger: KvLedger, memory: Memory | None, n_bytes_max: int) -> None:
        self.ledger = ledger
        self.n_saved_bytes = 0
        self._memory = memory if memory and memory.can_save else None
        self._n_bytes_max = n_bytes_max
        self._keys = count()
        self._saved: dict[int, tuple[SequenceDriver, int]] = {}  # by key, with the bytes
        self._loading: dict[int, SequenceDriver] = {}
        self._clears: list[Slot] = []
        self._trims: dict[Slot, int] = {}
        self._saves: list[tuple[Slot, int]] = []
        self._loads: list[tuple[Slot, int]] = []
        self._forgets: list[int] = []

    def clear(self, slot: Slot) -> None:
        """Have a slot emptied, whatever is in it: a failed step may have left more than the books say."""
        self.ledger.trim(slot, 0)
        self._trims.pop(slot, None)
        self._clears.append(slot)

    def trim(self, driver: SequenceDriver, slot: Slot, n_cells: int) -> None:
        """Have all but the first `n_cells` cells of a slot taken off; it may hold more than the books say."""
        driver.rewind(n_cells)
        self.ledger.trim(slot, 0)
        self.ledger.add(slot, n_cells)
        self._trims[slot] = n_cells

    def save(self, driver: SequenceDriver, slot: Slot) -> None:
        """Have the cells of a driver that leaves `slot` saved, if that can be."""
        n_bytes = self._memory.n_saved_bytes(driver.n_computed) if self._memory else 0
        has_room = self.n_saved_bytes + n_bytes <= self._n_bytes_max
        if not n_bytes or not driver.n_computed or not has_room or slot in self._trims:
            driver.rewind()
            return
        key = driver.saved_key = next(self._keys)
        self._saved[key] = driver, n_bytes
        self.n_saved_bytes += n_bytes
        self._saves.append((slot, key))

    def load(self, driver: SequenceDriver, slot: Slot) -> None:
        """Have a driver's saved cells put into its new slot, if it has any."""
        key = driver.saved_key
        if key is not None:
            self._drop(key)
            self._loading[key] = driver
            self._loads.append((slot, key))
            self.ledger.add(slot, driver.n_computed)

    def forget(self, driver: SequenceDriver) -> None:
        """Give up a driver's saved cells, if it has any."""
        key = driver.saved_key
        if key is None:
            return
        self._drop(key)
        n_ordered = len(self._saves)
        self._saves = [(slot, other) for slot, other in self._saves if other != key]
        if len(self._saves) == n_ordered:  # it is saved already
            self._forgets.append(key)

    def forget_all(self) -> None:
        """Give up all saved cells: nobody knows which of the last orders were done."""
        for driver, _ in list(self._saved.values()):
            self.forget(driver)
            driver.rewind()
        self._loading.clear()

    def settle(self, lost: Iterable[int]) -> None:
        """Take in what a run made of the orders; the tokens of lost cells are pending again."""
        for key in lost:
            driver = self._loading.get(key) or self._saved[key][0]
            if driver.saved_key is not None:
                self._drop(key)
            driver.rewind()
            if driver.slot is not None:
                self.ledger.trim(driver.slot, 0)
        self._loading.clear()

    def take(self) -> Orders:
        """Return the orders; each once."""
        orders = Orders()
        if self._clears:
            orders["clears"] = tuple(sorted(set(self._clears)))
            self._clears = []
        if self._trims:
            orders["trims"] = tuple(sorted(self._trims.items()))
            self._trims = {}
        if self._saves or self._loads or self._forgets:
            orders["saves"], orders["loads"] = tuple(self._saves), tuple(self._loads)
            orders["forgets"] = tuple(self._forgets)
            self._saves, self._loads, self._forgets = [], [], []
        return orders

    def _drop(self, key: int) -> None:
        driver, n_bytes = self._saved.pop(key)
        driver.saved_key = None
        self.n_saved_bytes -= n_bytes
