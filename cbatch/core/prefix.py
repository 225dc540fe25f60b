"""Which tokens stand in which slot: a radix tree, for the longest beginning that is computed already."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.core.plan import Slot

_N_BLOCK = 64
"""Tokens compared at once: by the interpreter's own loop, not by ours."""


@dataclass(eq=False, slots=True)
class _Node:
    """Tokens that follow those of the parent; `slots` are those whose sequences end here."""

    tokens: list[int]
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)  # by first token
    slots: dict[Slot, None] = field(default_factory=dict)


class PrefixIndex:
    """The token sequences of slots. Memory is linear in their tokens, common beginnings counted once."""

    def __init__(self) -> None:
        self._root = _Node([], None)
        self._ends: dict[Slot, _Node] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no slot is in it."""
        return not self._ends

    def put(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Say what stands in a slot, instead of what was said before."""
        self.remove(slot)
        node, i = self._root, 0
        while i < len(tokens):
            child = node.children.get(tokens[i])
            if child is None:
                child = node.children[tokens[i]] = _Node(list(tokens[i:]), node)
            n = n_common(child.tokens, tokens, i)
            if n < len(child.tokens):
                child = _split(node, child, n)
            node, i = child, i + n
        node.slots[slot] = None
        self._ends[slot] = node

    def remove(self, slot: Slot) -> None:
        """Forget a slot; one that is not there does no harm."""
        node = self._ends.pop(slot, None)
        if node is None:
            return
        del node.slots[slot]
        while node.parent is not None and not node.slots and not node.children:
            del node.parent.children[node.tokens[0]]
            node = node.parent
        if node.parent is not None and not node.slots and len(node.children) == 1:
            self._join(node)

    def matches(self, tokens: Sequence[int]) -> Iterator[tuple[int, Slot]]:
        """Yield (tokens in common, slot) of every slot that begins as `tokens` do, the longest first.

        Looks at each token once, then at as many slots as are asked for.
        """
        path: list[tuple[int, _Node]] = []
        node, i = self._root, 0
        while i < len(tokens) and (child := node.children.get(tokens[i])) is not None:
            n = n_common(child.tokens, tokens, i)
            i += n
            path.append((i, child))
            if n < len(child.tokens):
                break
            node = child
        below: _Node | None = None
        for i, node in reversed(path):
            for slot in _slots_under(node, below):
                yield i, slot
            below = node

    def n_tokens(self) -> int:
        """Return the tokens that are kept; looks at the whole tree."""
        todo, n = [self._root], 0
        while todo:
            node = todo.pop()
            n += len(node.tokens)
            todo += node.children.values()
        return n

    def _join(self, node: _Node) -> None:
        """Make one node of one without slots and its only child."""
        [child] = node.children.values()
        node.tokens += child.tokens
        node.children, node.slots = child.children, child.slots
        for grandchild in node.children.values():
            grandchild.parent = node
        for slot in node.slots:
            self._ends[slot] = node


def n_common(tokens: Sequence[int], others: Sequence[int], start: int) -> int:
    """Return how many tokens are equal at the beginning of `tokens` and of `others[start:]`."""
    n_most, n = min(len(tokens), len(others) - start), 0
    while n < n_most:
        block = [*tokens[n : n + _N_BLOCK]]
        if block != [*others[start + n : start + n + len(block)]]:
            break
        n += len(block)
    while n < n_most and tokens[n] == others[start + n]:
        n += 1
    return min(n, n_most)


def _split(parent: _Node, child: _Node, n: int) -> _Node:
    """Put a node with the first `n` of the child's tokens between the two; return it."""
    upper = parent.children[child.tokens[0]] = _Node(child.tokens[:n], parent)
    child.tokens, child.parent = child.tokens[n:], upper
    upper.children[child.tokens[0]] = child
    return upper


def _slots_under(node: _Node, except_for: _Node | None) -> Iterator[Slot]:
    """Yield the slots that end at a node or below it, but for one branch."""
    todo = [node]
    while todo:
        node = todo.pop()
        if node is not except_for:
            yield from node.slots
            todo += node.children.values()
