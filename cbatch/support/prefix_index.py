"""Texts by their beginnings: which of them have how many leading tokens in common with another."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_N_BLOCK = 16
"""Tokens in the first comparison. Each further comparison has four times as many; list comparison is fast."""


@dataclass(eq=False, slots=True)
class Branch:
    """Tokens that follow the parent's tokens, and the places whose text ends with them.

    A branch does not know its parent, so that one that is removed is freed without the garbage collector.
    """

    tokens: Sequence[Hashable]
    children: dict[Hashable, Branch] = field(default_factory=dict)  # by first token
    places: dict[int, None] = field(default_factory=dict)


class PrefixIndex:
    """The token sequences of slots and checkpoints, as a tree. Common prefixes are stored once.

    A place is a slot or the key of a checkpoint.
    """

    def __init__(self) -> None:
        self._root = Branch([])
        self._ends: dict[int, Branch] = {}

    def copy(self) -> PrefixIndex:
        """Return an independent index of the same texts. The tokens are not copied."""
        index = PrefixIndex()
        twins = {id(self._root): index._root}
        todo = [self._root]
        while todo:
            node = todo.pop()
            twin = twins[id(node)]
            for token, child in node.children.items():
                other = Branch(child.tokens, places=child.places.copy())
                twin.children[token] = twins[id(child)] = other
                todo.append(child)
        index._ends = {place: twins[id(node)] for place, node in self._ends.items()}
        return index

    def put(self, place: int, tokens: Sequence[Hashable]) -> None:
        """Set the tokens of a place; without tokens, remove the place."""
        self.remove(place)
        if not tokens:
            return
        node, i = self._root, 0
        while i < len(tokens):
            child = node.children.get(tokens[i])
            if child is None:
                child = node.children[tokens[i]] = Branch(tokens[i:])
                n = len(child.tokens)
            else:
                n = n_common(child.tokens, tokens, i)
                if n < len(child.tokens):
                    child = _split(node, child, n)
            node, i = child, i + n
        node.places[place] = None
        self._ends[place] = node

    def remove(self, place: int) -> None:
        """Remove a place; an unknown one is ignored."""
        end = self._ends.pop(place, None)
        if end is None:
            return
        del end.places[place]
        path = self._path_to(end)
        while len(path) > 1 and not path[-1].places and len(path[-1].children) < 2:
            node, parent = path.pop(), path[-1]
            del parent.children[node.tokens[0]]
            for child in node.children.values():  # at most one, which takes over the tokens
                child.tokens = [*node.tokens, *child.tokens]
                parent.children[child.tokens[0]] = child

    def find(self, tokens: Sequence[Hashable]) -> dict[int, int]:
        """Return the length of each place's common prefix with `tokens`, longest first. Linear in tokens and places."""
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
        seen: Branch | None = None
        for n, node in reversed(path):
            todo = [node]
            while todo:
                branch = todo.pop()
                found.update(dict.fromkeys(branch.places, n))
                todo += [child for child in branch.children.values() if child is not seen]
            seen = node
        in_order = [place for place in self._ends if place in found]
        in_order.sort(key=found.__getitem__, reverse=True)  # stable
        return {place: found[place] for place in in_order}

    def _path_to(self, end: Branch) -> list[Branch]:
        """Return the branches from the root to `end`."""
        path, rest = [self._root], [iter(self._root.children.values())]
        while path[-1] is not end:
            child = next(rest[-1], None)
            if child is None:
                path.pop()
                rest.pop()
            else:
                path.append(child)
                rest.append(iter(child.children.values()))
        return path


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
    upper = Branch(child.tokens[:n])
    parent.children[child.tokens[0]] = upper
    child.tokens = child.tokens[n:]
    upper.children[child.tokens[0]] = child
    return upper
