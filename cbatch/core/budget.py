"""How many prompt tokens a step takes: what steps cost, and how a budget of tokens is shared among prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WEIGHT = 0.125
"""Weight of a new figure in a smoothed one, as in TCP's round-trip time. Source: RFC 6298, alpha."""

_SAME_WIDTH = 1.5
"""Up to this factor more rows cost about the same: 24 rows took 1.4 times as long as 16 in our measurements."""


def split_budget(wanted: Sequence[int], budget: int) -> list[int]:
    """Share `budget` tokens among prompts that want `wanted`, the oldest first in the list.

    The oldest gets up to half, so no prompt waits for ever while others pass. The rest goes to the shortest first:
    short prompts pass long ones, and equals stay in order. What is left over goes back to the oldest. Few long chunks
    are computed faster than many short ones of as many tokens; see docs/performance.md.
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


def whole_chunks(wanted: Sequence[int], budget: int) -> list[int]:
    """Give each prompt the whole of its chunk or nothing, the oldest first, while `budget` lasts."""
    shares = []
    for want in wanted:
        shares.append(want if want <= budget else 0)
        budget -= shares[-1]
    return shares


class StepCosts:
    """Learned seconds of a decoding step by its width, of a prompt token that joins it, and of a cell's copy."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # by width
        self._prompt_s = self._n_prompt = 0.0  # prompt tokens of a step, and what they add to it
        self._copy_s = 0.0
        self.n_at_no_cost = 0
        """The most prompt tokens of a step that was no longer than one that only decodes."""

    @property
    def has_decoded(self) -> bool:
        """Whether a step was seen that only decoded."""
        return bool(self._decode_s)

    def learn_decode(self, n_rows: int, seconds: float) -> None:
        """Learn from one step of `n_rows` decoding rows."""
        self._decode_s[n_rows] = _smooth(self._decode_s.get(n_rows, 0.0), seconds)

    def learn_mixed(self, n_rows: int, n_prompt: int, seconds: float) -> None:
        """Learn from a step of `n_rows` decoding rows and `n_prompt` prompt tokens."""
        decode_s = self.decode_s(n_rows) if n_rows else 0.0
        if seconds > (decode_s or 0.0):
            if decode_s is not None:
                # apart, so that steps of many tokens count for more: a chunk of one costs as much as one of ten
                self._prompt_s = _smooth(self._prompt_s, seconds - decode_s)
                self._n_prompt = _smooth(self._n_prompt, n_prompt)
        else:
            self.n_at_no_cost = max(self.n_at_no_cost, n_prompt)

    def learn_copy(self, n_cells: int, seconds: float) -> None:
        """Learn from copying `n_cells` cells from slot to slot."""
        if n_cells:
            self._copy_s = _smooth(self._copy_s, seconds / n_cells)

    def n_copied_within(self, seconds: float) -> int | None:
        """Return how many cells are copied in `seconds`; None while too little is known."""
        return int(seconds / self._copy_s) if self._copy_s and seconds else None

    def decode_s(self, n_rows: int) -> float | None:
        """Return what a step of `n_rows` decoding rows takes; None where none was seen.

        A width that was not seen takes as long as the nearest, and in proportion longer where it is much wider: under
        load every step may have prompts in it, and an estimate that is too short would starve them for ever.
        """
        nearest = self._nearest(n_rows)
        if nearest is None:
            return None
        return self._decode_s[nearest] * max(1.0, n_rows / (_SAME_WIDTH * nearest))

    def seen_s(self, n_rows: int) -> float:
        """Return what a step of the width nearest to `n_rows` took; 0 where none was seen."""
        nearest = self._nearest(n_rows)
        return 0.0 if nearest is None else self._decode_s[nearest]

    def _nearest(self, n_rows: int) -> int | None:
        if n_rows in self._decode_s:
            return n_rows
        return min(self._decode_s, key=lambda n: (abs(n - n_rows), n), default=None)

    def n_prompt_within(self, n_rows: int, seconds: float) -> int | None:
        """Return how many prompt tokens fit into a step with `n_rows` decoding rows; None while too little is known."""
        decode_s = self.decode_s(n_rows)
        if decode_s is None or not self._prompt_s:
            return None
        return int((seconds - decode_s) * self._n_prompt / self._prompt_s)


def _smooth(known: float, new: float) -> float:
    return known + _WEIGHT * (new - known) if known else new
