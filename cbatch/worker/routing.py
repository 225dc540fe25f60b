"""Which of several workers gets a request: the one that has its beginning, unless others wait there for too long."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING

from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.messages import BatchPrompt

N_BLOCK = 256
"""Characters of a block: about the 64 tokens from which sharing a prefix pays. Our choice."""

N_BLOCKS_MAX = 64
"""Blocks of a prompt that are looked at. Our choice."""

N_KNOWN_MAX = 100_000
"""Beginnings that are remembered, the most recently used. Our choice."""

N_TOKENS_PER_BLOCK = 64


def beginnings(prompt: BatchPrompt, options: RunOptions) -> Iterator[int]:
    """Yield a number for each beginning of a prompt, the shortest first: equal beginnings have equal numbers.

    A cache key counts as a beginning, for its cells are in the memory of the worker that computed them last.
    """
    own = RunOptions.of(prompt.options)
    key = options.cache_key if own.cache_key is None else own.cache_key
    if key is not None:
        yield hash(("cache_key", key))
    seen = hash(options.adapters if own.adapter is None else own.adapters)
    for block in _blocks(prompt):
        seen = hash((seen, block))
        yield seen


def _blocks(prompt: BatchPrompt) -> Iterator[object]:
    """Yield the whole blocks of a prompt, as far as they are looked at."""
    if prompt.tokens is not None:
        tokens, n = prompt.tokens, N_TOKENS_PER_BLOCK
        for start in range(0, min(len(tokens) // n, N_BLOCKS_MAX) * n, n):
            yield tuple(tokens[start : start + n])
        return
    text = prompt.prompt or ""
    if prompt.messages is not None:
        text = _start_of_chat(prompt.messages)
    for start in range(0, min(len(text) // N_BLOCK, N_BLOCKS_MAX) * N_BLOCK, N_BLOCK):
        yield text[start : start + N_BLOCK]


def _start_of_chat(messages: Sequence[object]) -> str:
    """Return the messages as text, as far as it is looked at."""
    parts: list[str] = []
    n = 0
    for message in messages:
        parts.append(json.dumps(_cut(message), default=str))
        n += len(parts[-1])
        if n >= N_BLOCK * N_BLOCKS_MAX:
            break
    return "".join(parts)


def _cut(value: object) -> object:
    """Return a value of a message without what of its texts is not looked at: pictures have many megabytes."""
    if isinstance(value, str):
        return value[: N_BLOCK * N_BLOCKS_MAX]
    if isinstance(value, dict):
        return {key: _cut(inner) for key, inner in value.items()}
    return [*map(_cut, value)] if isinstance(value, list | tuple) else value


class Routing:
    """Remembers which worker got which beginning. For one thread at a time."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, int] = OrderedDict()

    def choose(self, keys: Sequence[int], loads: Sequence[float]) -> int:
        """Return the number of the worker for a prompt with these beginnings.

        That worker gets it which had the longest of them, unless it has more than one request for each slot beyond
        the worker with the least; without a known beginning, the worker with the least.

        Args:
            loads: for each worker, its requests in flight per slot; infinite for one that takes none.
        """
        least = min(range(len(loads)), key=lambda i: loads[i])
        found = next((self._last[key] for key in reversed(keys) if key in self._last), least)
        if found >= len(loads) or loads[found] > loads[least] + 1:
            found = least
        for key in keys:
            self._last[key] = found
            self._last.move_to_end(key)
        while len(self._last) > N_KNOWN_MAX:
            self._last.popitem(last=False)
        return found
