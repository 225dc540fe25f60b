"""Cells in host memory: those of sequences that lost their slots, checkpoints, and cells to be written to disk."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import KvCapabilities

N_CHECKPOINTS_MAX = 512
"""Most checkpoints, because each plan that changes slots copies the table of checkpoints. Our choice."""


@dataclass(eq=False, slots=True)
class _Saved:
    """Cells in host memory of a sequence that waits for a slot."""

    driver: SequenceDriver
    n_bytes: int
    is_from_disk: bool = False


@dataclass(frozen=True, slots=True)
class ToStore:
    """An ended sequence whose first `n_cells` cells, saved under `key`, will be written to disk.

    The cells of `checkpoint` (key, number of cells) are written too: sequences can also start from there.
    """

    driver: SequenceDriver
    key: int
    n_cells: int
    checkpoint: tuple[int, int] | None = None


class SavedCells:
    """Saved cells of sequences that lost their slots: in host memory, within the budget, if the backend can save.

    Other cells are lost and computed again. The key is the number of the sequence.
    """

    def __init__(self, memory: KvCapabilities, n_bytes_max: int) -> None:
        self.n_bytes = 0
        self.n_bytes_max = n_bytes_max
        self._memory = memory
        self._saved: dict[int, _Saved] = {}  # by key

    @property
    def can_save(self) -> bool:
        """Whether the backend can copy cells to host memory."""
        return self._memory.can_save

    @property
    def n_counted(self) -> int:
        """Bytes of all saved cells, counted again to check `n_bytes`."""
        return sum(saved.n_bytes for saved in self._saved.values())

    @property
    def keys(self) -> list[int]:
        """The keys of all saved cells."""
        return [*self._saved]

    def n_bytes_of(self, n_cells: int) -> int:
        """Return the bytes of `n_cells` saved cells of one sequence; 0 if cells cannot be saved."""
        return self._memory.n_saved_bytes(n_cells) if self.can_save and n_cells else 0

    def add(self, driver: SequenceDriver) -> None:
        """Record that a sequence's cells were saved."""
        driver.saved_key = driver.number
        saved = self._saved[driver.number] = _Saved(driver, self.n_bytes_of(driver.n_computed))
        self.n_bytes += saved.n_bytes

    def add_from_disk(self, driver: SequenceDriver, n_cells: int) -> int:
        """Add `n_cells` cells that a waiting sequence will load from disk at its start; return their key."""
        driver.saved_key, driver.n_computed = driver.number, n_cells
        self._saved[driver.number] = _Saved(driver, 0, is_from_disk=True)
        return driver.number

    def take(self, key: int) -> bool:
        """Record that saved cells were loaded, or could not be; return whether they came from disk."""
        saved = self._saved.pop(key)
        saved.driver.saved_key = None
        self.n_bytes -= saved.n_bytes
        return saved.is_from_disk

    def give_up(self, keys: Iterable[int]) -> list[SequenceDriver]:
        """Drop saved cells, so that their tokens are pending again; return the sequences whose cells came from disk.

        Keys that a partly committed plan has loaded already are skipped.
        """
        from_disk = []
        for saved in [self._saved[key] for key in keys if key in self._saved]:
            if self.take(saved.driver.number):
                from_disk.append(saved.driver)
            saved.driver.keep(0)
        return from_disk


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Saved cells of the first `n_cells` tokens of a text, which the prefix index has under the same key."""

    n_cells: int
    n_bytes: int


class KeptCheckpoint(NamedTuple):
    """A checkpoint that a plan takes, or that exists already."""

    key: int
    is_new: bool = False
    gone: Sequence[int] = ()
    """The keys of checkpoints that are dropped to make room."""


class Checkpoints:
    """Checkpoints by key, the least recently used first, which are dropped first when the budget is full.

    Keys are negative, because the saved cells of a sequence have its number as key. A plan changes a `view`, which
    replaces this object once the plan has run.
    """

    def __init__(self, memory: KvCapabilities, n_bytes_max: int) -> None:
        self.is_on = memory.can_save and not memory.can_trim and n_bytes_max > 0
        """Whether checkpoints are used. Memory that can be trimmed needs none: it shares the cells in its slots."""
        self.n_bytes = 0
        self.n_bytes_max = n_bytes_max
        self._memory = memory
        self.kept: dict[int, Checkpoint] = {}
        """Read-only outside this class."""
        self._n_made = 0
        self._in_plan: set[int] = set()
        """Keys that the plan saves or loads; only in a view."""

    def __len__(self) -> int:
        return len(self.kept)

    def view(self) -> Checkpoints:
        """Return a copy for a plan to change."""
        if not self.is_on:
            return self
        view = copy(self)
        view.kept, view._in_plan = self.kept.copy(), self._in_plan.copy()
        return view

    def settle(self) -> None:
        """Release the keys of a plan that was run."""
        self._in_plan.clear()

    def has_room(self, n_cells: int) -> bool:
        """Whether a checkpoint of `n_cells` cells fits the budget; no sequence waits for one that does not."""
        return self.is_on and self._memory.n_saved_bytes(n_cells) <= self.n_bytes_max

    def n_cells(self, key: int) -> int:
        """Return how many cells a checkpoint has."""
        return self.kept[key].n_cells

    def add(self, n_cells: int) -> KeptCheckpoint | None:
        """Add a checkpoint, and drop the least recently used ones if needed; None if there is no room."""
        n_bytes, n_freed, gone = self._memory.n_saved_bytes(n_cells), 0, list[int]()
        for key, kept in self.kept.items():
            has_room = self.n_bytes - n_freed + n_bytes <= self.n_bytes_max
            if has_room and len(self.kept) - len(gone) < N_CHECKPOINTS_MAX:
                break
            if key not in self._in_plan:
                gone.append(key)
                n_freed += kept.n_bytes
        is_full = len(self.kept) - len(gone) >= N_CHECKPOINTS_MAX
        if is_full or self.n_bytes - n_freed + n_bytes > self.n_bytes_max:
            return None
        self.drop(gone)
        self._n_made += 1
        self.kept[-self._n_made] = Checkpoint(n_cells, n_bytes)
        self._in_plan.add(-self._n_made)
        self.n_bytes += n_bytes
        return KeptCheckpoint(-self._n_made, True, gone)

    def use(self, key: int) -> None:
        """Mark a checkpoint as recently used and as one that the plan needs."""
        self.touch(key)
        self._in_plan.add(key)

    def touch(self, key: int) -> None:
        """Mark a checkpoint as recently used, so that others are dropped first."""
        self.kept[key] = self.kept.pop(key)

    def drop(self, keys: Collection[int]) -> list[int]:
        """Remove checkpoints; return the keys that existed. None of the keys is used again."""
        found = [key for key in dict.fromkeys(keys) if key in self.kept]
        for key in found:
            self.n_bytes -= self.kept.pop(key).n_bytes
        self._n_made = max(self._n_made, *(-key for key in keys), 0)
        return found

    def learn(self, saved_bytes: Mapping[int, int]) -> None:
        """Record the true sizes. Sliding windows drop old cells, so most sizes are smaller than expected."""
        for key, n_bytes in saved_bytes.items():
            if kept := self.kept.get(key):
                self.n_bytes += n_bytes - kept.n_bytes
                self.kept[key] = Checkpoint(kept.n_cells, n_bytes)
