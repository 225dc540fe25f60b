"""Which tokens stand in which slot: a radix tree, for the longest beginning that is computed already."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch.core.plan import Slot

_N_BLOCK = 16
"""Tokens compared at first; four times as many each time, by the interpreter's own loop, not by ours."""


@dataclass(eq=False, slots=True)
class Branch:
    """Tokens that follow those of the parent, and the slots that hold them: in use or left, the one put first first."""

    tokens: list[int]
    parent: Branch | None
    children: dict[int, Branch] = field(default_factory=dict)  # by first token
    in_use: dict[Slot, None] = field(default_factory=dict)
    left: dict[Slot, None] = field(default_factory=dict)

    @property
    def n_slots(self) -> int:
        """How many slots hold its tokens."""
        return len(self.in_use) + len(self.left)


class PrefixIndex:
    """The token sequences of slots. Memory is linear in their tokens, common beginnings counted once."""

    def __init__(self) -> None:
        self._root = Branch([], None)
        self._ends: dict[Slot, Branch] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no slot is in it."""
        return not self._ends

    def put(self, slot: Slot, tokens: list[int], *, is_left: bool = False) -> None:
        """Say what stands in a slot, which somebody has unless it `is_left`, instead of what was said before."""
        self.remove(slot)
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
            (child.left if is_left else child.in_use)[slot] = None
            node, i = child, i + n
        self._ends[slot] = node

    def remove(self, slot: Slot) -> None:
        """Forget a slot; one that is not there does no harm."""
        node = self._ends.pop(slot, None)
        while node is not None and node.parent is not None:
            node.in_use.pop(slot, None)
            node.left.pop(slot, None)
            if not node.n_slots:
                del node.parent.children[node.tokens[0]]
            elif len(node.children) == 1:
                self._join(node)
            node = node.parent

    def matches(self, tokens: list[int]) -> list[tuple[int, Branch]]:
        """Return (tokens in common, who holds them), the most first; looks at each token once.

        A slot that has more in common is among those that have less, too.
        """
        path: list[tuple[int, Branch]] = []
        node, i = self._root, 0
        while i < len(tokens) and (child := node.children.get(tokens[i])) is not None:
            n = n_common(child.tokens, tokens, i)
            i += n
            path.append((i, child))
            if n < len(child.tokens):
                break
            node = child
        path.reverse()
        return path

    def n_tokens(self) -> int:
        """Return the tokens that are kept; looks at the whole tree."""
        todo, n = [self._root], 0
        while todo:
            node = todo.pop()
            n += len(node.tokens)
            todo += node.children.values()
        return n

    def _join(self, node: Branch) -> None:
        """Make one node of one and its only child, unless a slot ends between the two."""
        [child] = node.children.values()
        if child.n_slots < node.n_slots:
            return
        node.tokens += child.tokens
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        for slot in (*node.in_use, *node.left):
            if self._ends[slot] is child:
                self._ends[slot] = node


def n_common(tokens: list[int], others: list[int], start: int = 0) -> int:
    """Return how many tokens are equal at the beginning of `tokens` and of `others[start:]`."""
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
    """Put a node with the first `n` of the child's tokens between the two; return it."""
    upper = Branch(child.tokens[:n], parent, in_use=dict(child.in_use), left=dict(child.left))
    parent.children[child.tokens[0]] = upper
    child.tokens, child.parent = child.tokens[n:], upper
    upper.children[child.tokens[0]] = child
    return upper
