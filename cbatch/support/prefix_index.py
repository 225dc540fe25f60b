"""Texts by their beginnings: which of them have how many leading tokens in common with another."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_N_BLOCK = 16
"""Tokens in the first comparison. Each further comparison has four times as many; list comparison is fast."""


@dataclass(eq=False, slots=True)
class Branch:
    """Tokens that follow the parent's tokens, and the places that end with them, in order of insertion."""

    tokens: Sequence[Hashable]
    parent: Branch | None
    children: dict[Hashable, Branch] = field(default_factory=dict)  # by first token
    slots: dict[int, None] = field(default_factory=dict)


class PrefixIndex:
    """The token sequences of slots and checkpoints, as a tree. Common prefixes are stored once.

    A place is a slot or the key of a checkpoint.
    """

    def __init__(self) -> None:
        self._root = Branch([], None)
        self._ends: dict[int, Branch] = {}

    def put(self, slot: int, tokens: Sequence[Hashable]) -> None:
        """Set the tokens of a place; without tokens, remove the place."""
        self.remove(slot)
        if not tokens:
            return
        node, i = self._root, 0
        while i < len(tokens):
            child = node.children.get(tokens[i])
            if child is None:
                child = node.children[tokens[i]] = Branch(tokens[i:], node)
                n = len(child.tokens)
            else:
                n = n_common(child.tokens, tokens, i)
                if n < len(child.tokens):
                    child = _split(node, child, n)
            child.slots[slot] = None
            node, i = child, i + n
        self._ends[slot] = node

    def remove(self, slot: int) -> None:
        """Remove a place; an unknown one is ignored."""
        node = self._ends.pop(slot, None)
        while node is not None and node.parent is not None:
            del node.slots[slot]
            if not node.slots:
                del node.parent.children[node.tokens[0]]
            elif len(node.children) == 1:
                self._join(node)
            node = node.parent

    def find(self, tokens: Sequence[Hashable]) -> dict[int, int]:
        """Return the length of each place's common prefix with `tokens`, longest first. Linear in the tokens."""
        path: list[tuple[int, Branch]] = []
        node, i = self._root, 0
        while i < len(tokens) and (child := node.children.get(tokens[i])) is not None:
            n = n_common(child.tokens, tokens, i)
            i += n
            path.append((i, child))
            if n < len(child.tokens):
                break
            node = child
        found: dict[int, int] = {}
        for n, node in reversed(path):
            for slot in node.slots:
                found.setdefault(slot, n)
        return found

    def _join(self, node: Branch) -> None:
        """Merge a node with its only child, unless a place ends between the two."""
        [child] = node.children.values()
        if len(child.slots) < len(node.slots):
            return
        node.tokens = [*node.tokens, *child.tokens]
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        for slot in node.slots:
            if self._ends[slot] is child:
                self._ends[slot] = node


def n_common(tokens: Sequence[object], others: Sequence[object], start: int = 0) -> int:
    """Return the length of the common prefix of `tokens` and `others[start:]`."""
    n, size = 0, _N_BLOCK
    n_most = min(len(tokens), len(others) - start)
    while n < n_most:
        size = min(size, n_most - n)
        if tokens[n : n + size] == others[start + n : start + n + size]:
            n, size = n + size, 4 * size
        elif size > _N_BLOCK:
            size, n_most = max(_N_BLOCK, size // 4), n + size
        else:
            break
    while n < n_most and tokens[n] == others[start + n]:
        n += 1
    return n


def _split(parent: Branch, child: Branch, n: int) -> Branch:
    """Insert a node with the child's first `n` tokens between parent and child; return it."""
    upper = Branch(child.tokens[:n], parent, slots=dict(child.slots))
    parent.children[child.tokens[0]] = upper
    child.tokens, child.parent = child.tokens[n:], upper
    upper.children[child.tokens[0]] = child
    return upper
