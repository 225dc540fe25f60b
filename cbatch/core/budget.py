"""How the token budget of a step is shared among those whose prompts are not yet computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

LONG_CONTEXT = 256
"""Cells before a chunk from which attention is much of what it costs. Source: docs/performance.md."""


def split_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Share `budget` tokens among newcomers that want `wanted`, the oldest first in the list.

    The oldest gets up to half, so nobody waits for ever behind shorter prompts; the rest goes to the shortest first,
    whole as far as it lasts, so short prompts pass long ones and equals stay in order; what is left over goes back to
    the oldest. Few long chunks are computed faster than many short ones of as many tokens; see docs/performance.md.
    """
    shares = [0] * len(wanted)
    if not wanted:
        return shares
    shares[0] = min(wanted[0], (budget + 1) // 2)
    left = budget - shares[0]
    for i in sorted(range(1, len(wanted)), key=lambda i: wanted[i]):
        shares[i] = min(wanted[i], left)
        left -= shares[i]
    shares[0] += min(wanted[0] - shares[0], left)
    return shares


def whole_pieces(wanted: Sequence[int], budget: int) -> list[int]:
    """Give each newcomer all of its piece or nothing, the oldest first, while `budget` lasts."""
    shares = []
    for want in wanted:
        shares.append(want if want <= budget else 0)
        budget -= shares[-1]
    return shares


def limit_long_context_prefills(
    wanted: list[int], n_before: Sequence[int], n_long_context_prefills: int
) -> None:
    """Have few chunks in a step that go on behind many cells: the oldest, then the shortest; mutates `wanted`.

    Args:
        wanted: tokens of each newcomer, the oldest first.
        n_before: cells that each has.
        n_far_chunks: how many, as of `KvCapabilities`.
    """
    far = [i for i, n in enumerate(n_before) if n >= LONG_CONTEXT and wanted[i] > 1]
    by_size = far[:1] + sorted(far[1:], key=lambda i: wanted[i])
    for i in by_size[n_long_context_prefills:]:
        wanted[i] = 0


def even_out(shares: dict[int, int], cut: Collection[int]) -> None:
    """Shorten chunks of neighbours to one length where that saves a run of llama.cpp's graph; mutates `shares`.

    In partitioned memory llama.cpp computes equally long chunks of adjacent slots in one run of the graph, and what one
    is longer in another. A chunk that does not end its prompt anyway may as well end with its neighbour's, unless that
    leaves much of the step's room unused.

    Args:
        shares: tokens by slot; a decode row has 1.
        cut: slots whose chunk does not end their prompt.
    """
    for slot, n_below in sorted(shares.items()):
        n = shares.get(slot + 1, 1)
        shorter, longer = sorted((slot, slot + 1), key=lambda s: shares.get(s, 1))
        if min(n_below, n) > 1 and longer in cut and 4 * shares[shorter] >= 3 * shares[longer]:
            shares[longer] = shares[shorter]
