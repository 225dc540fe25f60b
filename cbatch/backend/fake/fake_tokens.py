"""What a backend without a model makes of the tokens before one."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

from cbatch.core.plan import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.options import AdapterSet

_MASK = 2**64 - 1


def mix(state: int, key: int) -> int:
    """Return the state that follows one when `key` is added to it."""
    state = ((state ^ key) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    return state ^ state >> 29


def state_after(state: int, cells: Sequence[int]) -> int:
    """Return the state that cells lead to from another: it depends on each of them and on their order."""
    for cell in cells:
        state = mix(state, cell)
    return state


def fake_logprobs(token: int, n_top: int) -> TokenLogprobs:
    """Return what the fake backend reports of a token, a function of it alone: it is the likeliest, id 0 comes next."""
    if token < 0:
        return TokenLogprobs(math.nan)
    others = [i for i in range(n_top) if i != token][: n_top - 1]
    top = [(t, -(1 + token % 7 + 3 * i) / 8) for i, t in enumerate((token, *others))]
    return TokenLogprobs(top[0][1], tuple(top[:n_top]))


def fake_score(state: int, token: int, n_top: int) -> TokenLogprobs:
    """Return what the fake backend reports of a given token: it depends on all cells before it."""
    found = fake_logprobs(token, n_top)
    depth = mix(state, token) % 64
    return TokenLogprobs(found.logprob - depth, tuple((t, p - depth) for t, p in found.top))


def tag_of(adapters: AdapterSet) -> int:
    """Return bits above those of a token that tell apart cells computed with other adapters."""
    return zlib.crc32(repr(adapters).encode()) << 24 if adapters else 0
