"""Checkpoints: cells or states in host memory, within a budget, from which any number of sequences continue."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cbatch.core.plan import KvCapabilities

N_CHECKPOINTS_MAX = 512
"""Most checkpoints, because each plan that changes slots copies the table of checkpoints. Our choice."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The first `n_cells` tokens of a text; the prefix index has the text under the same key."""

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
    replaces this object once the plan was run.
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
