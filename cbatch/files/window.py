"""The order of the items that were read: common prefixes together, long items first, no item waits for ever."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable

    from cbatch.files.input.item import Item
    from cbatch.messages import BatchPrompt, Message
    from cbatch.options import RunOptions

N_BEGINNING = 64  # characters of a common prefix: about 16 tokens, from which on sharing cells pays
N_CHARS_PER_TOKEN = 4  # of English text, with current vocabularies
MAX_HELD = 64 * 2**20  # most characters and bytes of items in a window that has any


@dataclass(eq=False, slots=True)
class Entry:
    """An item that waits to run."""

    item: Item
    prompt: BatchPrompt
    digest: bytes
    n_chars: int = 0
    """Estimated characters of the prompt's text and of the longest answer."""
    n_held: int = 0
    """See the function of that name."""
    number: int = 0
    """In order of arrival."""

    @property
    def rank(self) -> _Rank:
        """The place in a group: the longest last, of equally long items the first that arrived."""
        return self.n_chars, -self.number, self


_Rank: TypeAlias = "tuple[int, int, Entry]"


class ItemWindow:
    """Holds up to `n_max` items and chooses the next.

    Items with a common prefix go one after the other, the longest first; the next group is the one whose first item has
    waited longest. After the end of the input the longest of all goes first, so that no long item runs alone last.
    An item that `2 × n_max` others have passed goes next.
    """

    def __init__(self, n_max: int, max_held: int = MAX_HELD) -> None:
        """Begin without items; `max_held` is the most that all items hold, but an empty window takes any item."""
        self._n_max, self._max_held = n_max, max_held
        self._waiting: OrderedDict[int, Entry] = OrderedDict()  # by number
        self._groups: dict[Hashable, list[_Rank]] = {}  # each sorted
        self._n_arrived = self._n_given = self._n_held = 0
        self._is_ending = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether another item may be added."""
        return not self._waiting or (len(self) < self._n_max and self._n_held < self._max_held)

    def add(self, entry: Entry) -> None:
        """Add an item."""
        entry.number = self._n_arrived
        insort(self._groups.setdefault(self._key(entry), []), entry.rank)
        self._waiting[entry.number] = entry
        self._n_arrived += 1
        self._n_held += entry.n_held

    def end(self) -> None:
        """Note the end of the input: from now on the longest of all is next."""
        self._is_ending = True
        self._groups = {None: sorted(entry.rank for entry in self._waiting.values())}

    def take(self) -> Entry:
        """Remove and return the next item; IndexError where the window is empty."""
        if not self._waiting:
            raise IndexError("the window is empty")
        oldest = next(iter(self._waiting.values()))
        if self._n_given - oldest.number >= 2 * self._n_max:
            entry, key = oldest, self._key(oldest)
            del self._groups[key][bisect_left(self._groups[key], entry.rank)]
        else:
            key = next(iter(self._groups))
            entry = self._groups[key].pop()[2]
        if not self._groups[key]:
            del self._groups[key]
        del self._waiting[entry.number]
        self._n_given += 1
        self._n_held -= entry.n_held
        return entry

    def _key(self, entry: Entry) -> Hashable:
        return None if self._is_ending else beginning(entry.prompt)


def beginning(prompt: BatchPrompt) -> Hashable:
    """Return the prefix by which prompts are grouped."""
    if prompt.messages is None:
        return prompt.prompt[:N_BEGINNING] if prompt.prompt else tuple((prompt.tokens or ())[:16])
    first = prompt.messages[0]
    text = _text_of(first)
    return text if first["role"] == "system" else text[:N_BEGINNING]


def _text_of(message: Message) -> str:
    """Return the text of a message, without its pictures and sounds."""
    content = message["content"] or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def length(prompt: BatchPrompt, options: RunOptions) -> int:
    """Estimate the characters of a prompt's text and its longest answer."""
    if prompt.messages is not None:
        n_prompt = sum(len(_text_of(message)) for message in prompt.messages)
    else:
        n_prompt = len(prompt.prompt or "") or len(prompt.tokens or ()) * N_CHARS_PER_TOKEN
    return n_prompt + (options.max_tokens or 0) * N_CHARS_PER_TOKEN


def n_held(item: Item) -> int:
    """Return about the characters and bytes of an item: of its prompt, with pictures and sounds, and of its row."""
    prompt = item.prompt
    asked = prompt and (prompt.messages or prompt.prompt or prompt.tokens)
    return max(_size(asked) + _size(item.extra), item.weight)


def _size(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if not isinstance(value, list | tuple) or not value:
        return 0
    if isinstance(value[0], int | float):
        return len(value) * N_CHARS_PER_TOKEN
    return sum(map(_size, value))
