"""DRY's breakers as the native library takes them, and as sequences of tokens."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def pack(breakers: Iterable[Sequence[int]]) -> bytes:
    """Return sequences of at least one token, packed; each head has a group of its own."""
    tails: dict[int, list[list[int]]] = {}
    for head, *tail in sorted(map(tuple, breakers)):
        tails.setdefault(head, []).append(tail)
    numbers = [len(tails), *(n for i, head in enumerate(tails) for n in (head, i))]
    for group in tails.values():
        numbers += [len(group), *(n for tail in group for n in (len(tail), *tail))]
    return array("i", numbers).tobytes()


def unpack(packed: bytes) -> set[tuple[int, ...]]:
    """Return the sequences of tokens."""
    numbers = iter(array("i", packed))
    pairs = [(next(numbers), next(numbers)) for _ in range(next(numbers, 0))]
    groups = []
    for n_tails in numbers:
        lengths = (next(numbers) for _ in range(n_tails))
        groups.append([tuple(next(numbers) for _ in range(n)) for n in lengths])
    return {(head, *tail) for head, i in pairs for tail in groups[i]}
