"""The order of the items that were read: common prefixes together, long items first, no item waits for ever."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable

    from cbatch.files.input.item import Item
    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions

N_BEGINNING = 64
"""Characters of a common prefix: about 16 tokens, from which on sharing cells pays."""

N_CHARS_PER_TOKEN = 4
"""Of English text, with current vocabularies."""

MAX_CHARS = 64 * 2**20
"""Most characters of prompts in a window that has any."""


@dataclass(eq=False, slots=True)
class Entry:
    """An item that waits to run."""

    item: Item
    prompt: BatchPrompt
    digest: bytes
    n_chars: int = 0
    """Estimated characters of the prompt and of the longest answer."""
    number: int = 0
    """In order of arrival."""
    is_taken: bool = False


_Heap: TypeAlias = "list[tuple[int, int, Entry]]"


class Window:
    """Holds up to `n_max` items and chooses the next.

    Items with a common prefix go one after the other, the longest first; the next group is the one whose first item has
    waited longest. After the end of the input the longest of all goes first, so that no long item runs alone last.
    An item that `2 × n_max` others have passed goes next.
    """

    def __init__(self, n_max: int, max_chars: int = MAX_CHARS) -> None:
        """Begin without items.

        Args:
            n_max: most items.
            max_chars: most characters of all items; an empty window takes any item.
        """
        self._n_max, self._max_chars = n_max, max_chars
        self._groups: dict[Hashable, _Heap] = {}
        self._arrivals: deque[Entry] = deque()
        self._n_arrived = self._n_given = self._n_chars = self._n = self._n_gone = 0
        self._is_ending = False

    def __len__(self) -> int:
        return self._n

    @property
    def has_room(self) -> bool:
        """Whether another item may be added."""
        return not self._n or (self._n < self._n_max and self._n_chars < self._max_chars)

    def add(self, entry: Entry) -> None:
        """Add an item."""
        entry.number = self._n_arrived
        key = None if self._is_ending else beginning(entry.prompt)
        heappush(self._groups.setdefault(key, []), (-entry.n_chars, entry.number, entry))
        self._arrivals.append(entry)
        self._n_arrived += 1
        self._n += 1
        self._n_chars += entry.n_chars

    def end(self) -> None:
        """Note the end of the input: from now on the longest of all is next."""
        if not self._is_ending:
            self._is_ending = True
            rest: _Heap = [waiting for heap in self._groups.values() for waiting in heap]
            heapify(rest)
            self._groups = {None: rest} if rest else {}

    def take(self) -> Entry:
        """Remove and return the next item; IndexError where the window is empty."""
        entry = self._late() or self._first()
        entry.is_taken = True
        self._n -= 1
        self._n_given += 1
        self._n_chars -= entry.n_chars
        return entry

    def _late(self) -> Entry | None:
        """Return an item that was passed too often; it stays in its heap until it is popped there."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].is_taken:
            arrivals.popleft()
        if not arrivals or self._n_given - arrivals[0].number < 2 * self._n_max:
            return None
        self._n_gone += 1
        if self._n_gone > self._n_max:
            self._forget_gone()
        return arrivals.popleft()

    def _forget_gone(self) -> None:
        """Remove from the heaps the items that were taken out of turn."""
        kept = {key: [w for w in heap if not w[2].is_taken] for key, heap in self._groups.items()}
        self._groups = {key: heap for key, heap in kept.items() if heap}
        for heap in self._groups.values():
            heapify(heap)
        self._n_gone = 0

    def _first(self) -> Entry:
        while self._groups:
            key, heap = next(iter(self._groups.items()))
            entry = heappop(heap)[2]
            if not heap:
                del self._groups[key]
            if not entry.is_taken:
                return entry
        raise IndexError("the window is empty")


def beginning(prompt: BatchPrompt) -> Hashable:
    """Return the prefix by which prompts are grouped."""
    if prompt.messages is None:
        return prompt.prompt[:N_BEGINNING] if prompt.prompt else tuple((prompt.tokens or ())[:16])
    first = prompt.messages[0]
    text = str(first["content"])
    return text if first["role"] == "system" else text[:N_BEGINNING]


def length(prompt: BatchPrompt, options: RunOptions) -> int:
    """Estimate the characters of a prompt and its longest answer."""
    if prompt.messages is not None:
        n_prompt = sum(len(m.get("content") or "") for m in prompt.messages)
    else:
        n_prompt = len(prompt.prompt or "") or len(prompt.tokens or ()) * N_CHARS_PER_TOKEN
    return n_prompt + (options.max_tokens or 0) * N_CHARS_PER_TOKEN
