"""How many prompt tokens a step takes: what steps cost, and how a budget of tokens is shared among prompts."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_N_DECODES = 9
"""Steps of each width whose median counts: half of them may be slow for other reasons."""

_N_PROMPTS = 32
"""Steps with prompts by which the cost of prompt tokens is fitted: about 500 pairs."""

_N_REFIT = 8
"""Steps with prompts after which their cost is fitted anew, once so many were seen: it takes 0.2 ms."""

_N_COPIES = 9

_SPREAD = 1.25
"""Two steps say what a token costs if one has at least so many times the prompt tokens of the other."""

_N_UNIFORM = 4
"""Steps alike after which another number of prompt tokens is tried."""

_N_ANY = 2**31 - 1

_SAME_WIDTH = 1.5
"""Up to this factor more rows are taken to cost the same, where a width was never seen."""


def split_budget(
    wanted: Sequence[int], left: Sequence[int], budget: int, n_enough: int | None = None
) -> list[int]:
    """Share `budget` tokens among prompts, those that come first in the lists.

    Args:
        wanted: the most tokens that each can compute now.
        left: the tokens that each has before its first output.
        budget: tokens to share.
        n_enough: once so many are shared, only prompts join that end with it: a part of another would make the step
            longer and no first token earlier. None: whatever fits joins.
    """
    shares = []
    for want, n_left in zip(wanted, left, strict=True):
        share = min(want, budget)
        if n_enough is not None and n_enough <= 0 and share < n_left:
            share = 0
        shares.append(share)
        budget -= share
        n_enough = None if n_enough is None else n_enough - share
    return shares


def whole_chunks(wanted: Sequence[int], budget: int) -> list[int]:
    """Give each prompt the whole of its chunk or nothing, the first ones first, while `budget` lasts."""
    shares = []
    for want in wanted:
        shares.append(want if want <= budget else 0)
        budget -= shares[-1]
    return shares


class PromptCost(NamedTuple):
    """What prompts add to a step: `run_s` seconds, because they are computed apart, and `token_s` for each token."""

    run_s: float
    token_s: float


class StepCosts:
    """What steps cost, in seconds, learned from those that were done.

    A step takes what its decoding rows take, by their number; with prompt tokens `PromptCost` more. Medians are kept,
    so that a step which was slow for other reasons changes nothing; the newest few count, so that the figures follow
    a sequence that grows or a machine that gets busy.
    """

    def __init__(self) -> None:
        self._decodes: dict[int, deque[float]] = {}  # by width
        self._prompts: deque[_Mixed] = deque(maxlen=_N_PROMPTS)
        self._copies: deque[float] = deque(maxlen=_N_COPIES)
        self._prompt: PromptCost | None = None
        self._left_s: dict[int, float] = {}
        """Seconds of widths that were seen with prompts alone: what is left for their rows."""
        self._is_uniform = False
        """Whether steps with rows and prompts had all the same number of prompt tokens."""
        self._n_unfitted = 0

    @property
    def has_decoded(self) -> bool:
        """Whether a step was seen that only decoded."""
        return bool(self._decodes)

    @property
    def widths_s(self) -> dict[int, float]:
        """Seconds of a step that only decodes, by its rows, of the widths that were seen."""
        return {n: median([*times]) for n, times in sorted(self._decodes.copy().items())}

    def learn_decode(self, n_rows: int, seconds: float) -> None:
        """Learn from one step of `n_rows` decoding rows."""
        times = self._decodes.get(n_rows)
        if times is None:
            times = self._decodes[n_rows] = deque(maxlen=_N_DECODES)
        times.append(seconds)
        if self._prompts and self._prompt is None:
            self._fit()

    def learn_mixed(self, n_rows: int, n_prompt: int, seconds: float) -> None:
        """Learn from a step of `n_rows` decoding rows and `n_prompt` prompt tokens."""
        self._prompts.append(_Mixed(n_rows, n_prompt, seconds))
        self._n_unfitted += 1
        if self.has_decoded and (self._n_unfitted >= _N_REFIT or len(self._prompts) < _N_REFIT):
            self._fit()

    def learn_copy(self, n_cells: int, seconds: float) -> None:
        """Learn from copying `n_cells` cells from slot to slot."""
        if n_cells and seconds:
            self._copies.append(seconds / n_cells)

    def n_copied_within(self, seconds: float) -> int | None:
        """Return how many cells are copied in `seconds`; None while too little is known."""
        cell_s = median(self._copies) if self._copies else 0.0
        return int(seconds / cell_s) if cell_s and seconds else None

    def decode_s(self, n_rows: int) -> float | None:
        """Return what a step of `n_rows` decoding rows takes; None where none was seen.

        A width that was not seen takes as long as the nearest, and in proportion longer where it is much wider: under
        load every step may have prompts in it, and an estimate that is too short would starve them for ever.
        """
        nearest = self._nearest(n_rows)
        return (
            None
            if nearest is None
            else self._width_s(nearest) * max(1.0, n_rows / (_SAME_WIDTH * nearest))
        )

    def seen_s(self, n_rows: int) -> float:
        """Return what a step of the width nearest to `n_rows` took; 0 where none was seen."""
        nearest = self._nearest(n_rows)
        return 0.0 if nearest is None else self._width_s(nearest)

    def _nearest(self, n_rows: int) -> int | None:
        if n_rows in self._decodes or n_rows in self._left_s:
            return n_rows
        return min(
            [*self._decodes, *self._left_s], key=lambda n: (abs(n - n_rows), n), default=None
        )

    def _width_s(self, n_rows: int) -> float:
        times = self._decodes.get(n_rows)
        return self._left_s[n_rows] if times is None else median(times)

    @property
    def prompt(self) -> PromptCost | None:
        """What prompts add to a step; None while too little is known."""
        return self._prompt

    def n_prompt_within(self, n_rows: int, seconds: float) -> int | None:
        """Return how many prompt tokens fit into a step with `n_rows` decoding rows; None while too little is known.

        Where none fit, because the rest of the step takes longer already, as many as make it half as long again.
        """
        decode_s, cost = self.decode_s(n_rows), self.prompt
        if decode_s is None or cost is None:
            return None
        left_s = seconds - decode_s - cost.run_s
        return self._n_in(left_s if left_s > 0 else (decode_s + cost.run_s) / 2, cost)

    def n_prompt_for(self, n_rows: int, share: float, least_s: float = 0.0) -> int | None:
        """Return with how many prompt tokens what else a step costs is at most `share` of it; None as above.

        As many as are computed in `least_s` at least.

        With more a prompt is ready no sooner than by this share; with fewer, steps go by in which little of it is
        computed.
        """
        cost = self.prompt
        if cost is None:
            return None
        rest_s = cost.run_s + (self.seen_s(n_rows) if n_rows else 0.0)
        return self._n_in(max(least_s, (1 / share - 1) * rest_s), cost)

    def _n_in(self, seconds: float, cost: PromptCost) -> int:
        """Return how many prompt tokens are computed in so many seconds, at least one.

        Where all steps had the same number of tokens, nobody knows which part of their time each token takes; then the
        next one has fewer.
        """
        n = int(min(_N_ANY, seconds / cost.token_s)) if cost.token_s else _N_ANY
        if self._is_uniform:
            n = min(n, int(self._prompts[-1].n_prompt / _SPREAD))
        return max(1, n)

    def _fit(self) -> None:
        """Fit what prompts cost: the median of the slopes of pairs, then that of what they leave over.

        Source: H. Theil, P. K. Sen: up to 29 % of the steps may be slow for other reasons.
        """
        self._n_unfitted = 0
        mixed = [step for step in self._prompts if step.n_rows]
        alone = [step for step in self._prompts if not step.n_rows]
        slopes = _slopes(mixed) + _slopes(alone)
        self._left_s = {}
        if slopes:
            token_s = max(0.0, median(slopes))
        else:
            each_s = [
                [self._beyond_s(s) / s.n_prompt for s in steps] for steps in (mixed, alone) if steps
            ]
            token_s = min([s for s in map(median, each_s) if s > 0], default=0.0)
        known = [step for step in mixed if step.n_rows in self._decodes] or mixed
        rest_s = [self._beyond_s(step) - step.n_prompt * token_s for step in known or alone]
        # a prompt alone has a step to itself, whose fixed part is that of a row beside others
        run_s = max(0.0, median(rest_s) - (0.0 if known else self.seen_s(1)))
        left_s: dict[int, list[float]] = {}
        for n_rows, n_prompt, seconds in mixed:
            if n_rows not in self._decodes:
                left_s.setdefault(n_rows, []).append(seconds - run_s - n_prompt * token_s)
        self._left_s = {n_rows: max(0.0, median(times)) for n_rows, times in left_s.items()}
        self._prompt = PromptCost(run_s, token_s)
        self._is_uniform = not slopes and len(mixed) >= _N_UNIFORM

    def _beyond_s(self, step: _Mixed) -> float:
        """Return what a step took beyond its rows."""
        return step.seconds - ((self.decode_s(step.n_rows) or 0.0) if step.n_rows else 0.0)


class _Mixed(NamedTuple):
    """A step with prompt tokens."""

    n_rows: int
    n_prompt: int
    seconds: float


def _slopes(steps: Sequence[_Mixed]) -> list[float]:
    """Return the seconds of one more token, by each pair of steps of one width that differ enough."""
    return [
        (one.seconds - other.seconds) / (one.n_prompt - other.n_prompt)
        for i, one in enumerate(steps)
        for other in steps[:i]
        if one.n_rows == other.n_rows
        and max(one.n_prompt, other.n_prompt) >= _SPREAD * min(one.n_prompt, other.n_prompt)
    ]
