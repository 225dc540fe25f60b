"""How many prompt tokens a step computes: costs of steps, and sharing a token budget among prompts."""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from cbatch.core.span import Pending
    from cbatch.engine_options import ScheduleOptions

SHORT_RUN_S = 0.02
"""Time limit of a run in seconds if output is streamed, a stop string may end it, or a slot is free while a sequence
waits."""

LEAST_OVER_ROWS = 3.0
"""While output is streamed, prompts may take at least this many times as long as the rest of their step. So a single
new prompt takes at most a third longer than alone. `SHORT_RUN_S` is always allowed, because output does not come more
often."""

FAIR_OVER_ROWS = 4.0
"""The factor if as many new sequences wait for their first token as rows for their next; otherwise it is in proportion
to new sequences per row."""

LONG_OVER_ROWS = 1.75
"""The least factor for a prompt that would need more than `N_SHORT` steps: readers would notice so many long steps.
It is relative to the decoding rows alone."""

N_SHORT = 8
"""Most steps of a prompt that does not count as long."""

MOST_OVER_ROWS = 9.0
"""The greatest factor, also used if no reader waits for a next token: only a tenth of the step is not spent on prompts,
so larger steps would hardly be faster."""

LEAST_BURST_S = 0.2
"""Least seconds that a step spends on prompts if many of them wait for a first token: readers do not notice shorter
waits, and each step has a fixed cost in Python and in programs that read."""

N_FIRST = 64
"""Prompt tokens of a step while their cost is unknown."""

_N_DECODES = 9
"""Steps of each width (number of decoding rows) whose median is taken; nearly half may be slow for other reasons."""

_N_PROMPTS = 32
"""Steps with prompts to which the cost of prompt tokens is fitted: about 500 pairs."""

_N_REFIT = 8
"""Steps with prompts between two fits, which take 0.2 ms each."""

_N_COPIES = 9

_N_WAITS = 31
"""Runs whose median says how much longer steps take because of other programs."""

_LEAST_BUSY = 0.1

_SPREAD = 1.25
"""Two steps tell the cost of a token if one has at least this many times the prompt tokens of the other."""

_ALIKE = 0.02
"""Steps whose prompt tokens differ by at most this share tell the cost of a cell."""

_LEAST_CELLS = 16_384
"""Such steps must also differ by this much in tokens × cells before them: less takes too little time to measure."""

_N_UNIFORM = 4
"""Steps with equal numbers of prompt tokens after which another number is tried."""

_N_FEW = 8
"""Fewest prompt tokens whose number is worth varying; a difference of fewer cannot be measured."""

_GROWTH = 2

_SAME_WIDTH = 1.5
"""A width that was never measured counts as costing the same as one that is smaller by up to this factor."""


def split_budget(
    wanted: Sequence[int],
    left: Sequence[int],
    budget: int,
    n_enough: int | None = None,
    *,
    n_whole: Sequence[Callable[[int], int]] | None = None,
) -> list[int]:
    """Share `budget` tokens among prompts, in the order of the lists.

    Args:
        wanted: the most tokens that each can compute now.
        left: the tokens that each has before its first output.
        budget: tokens to share.
        n_enough: after this many tokens, only prompts that fit completely are added, because a part of another would
            make the step longer and no first token earlier. None adds whatever fits.
        n_whole: for each prompt, how many of its next tokens can be computed if there is room for so many.
    """
    shares: list[int] = []
    for want, n_left in zip(wanted, left, strict=True):
        share = min(want, budget)
        if n_whole is not None:
            share = n_whole[len(shares)](share)
        if n_enough is not None and n_enough <= 0 and share < n_left:
            share = 0
        shares.append(share)
        budget -= share
        n_enough = None if n_enough is None else n_enough - share
    return shares


def whole_chunks(wanted: Sequence[int], budget: int) -> list[int]:
    """Give each prompt its whole chunk or nothing, in order, until `budget` is used up."""
    shares = []
    for want in wanted:
        shares.append(want if want <= budget else 0)
        budget -= shares[-1]
    return shares


def _even(n_left: int, n_most: int) -> int:
    """Return how many of a prompt's `n_left` tokens each step takes, at most `n_most`, in equal parts.

    The parts need no more steps than `n_most` tokens at a time would; they only make the longest step shorter. If all
    tokens fit, the result is `n_most`, which leaves room for other prompts.
    """
    if not 0 < n_most < n_left:
        return n_most
    return math.ceil(n_left / math.ceil(n_left / n_most))


class PromptCost(NamedTuple):
    """What prompts add to a step, in seconds."""

    run_s: float
    """For each step: its prompt tokens need a graph run of their own."""
    token_s: float
    """For each token."""
    cell_s: float = 0.0
    """For each token and each cell before it."""


class StepCosts:
    """The cost of steps in seconds, learned from completed steps.

    A step costs an amount that depends on the number of decoding rows, plus `PromptCost` if it has prompt tokens: those
    late in a long prompt cost more than the first, because each attends to all cells before it.
    Medians make single slow steps harmless. Only recent steps count, so the costs follow longer sequences. The
    costs exclude the time in which other programs had the cores; `slower` is the factor by which that lengthens steps.
    """

    def __init__(self) -> None:
        self._decodes: dict[int, deque[float]] = {}  # by width
        self._prompts: deque[_Mixed] = deque(maxlen=_N_PROMPTS)
        self._copies: deque[float] = deque(maxlen=_N_COPIES)
        self._slower: deque[float] = deque([1.0], maxlen=_N_WAITS)
        """The duration of each run, divided by the time in which it computed."""
        self._prompt: PromptCost | None = None
        self._cell_s = 0.0
        self._left_s: dict[int, float] = {}
        """Seconds of the decoding rows alone, for widths that were measured only in steps with prompts."""
        self._is_uniform = False
        """Whether all recent steps with rows and prompts had the same number of prompt tokens."""
        self._n_unfitted = 0
        self._n_most = N_FIRST
        """The most prompt tokens that a step had."""

    @property
    def has_decoded(self) -> bool:
        """Whether a step without prompt tokens was measured."""
        return bool(self._decodes)

    @property
    def widths_s(self) -> dict[int, float]:
        """Seconds of computing of a step without prompt tokens, by number of rows, for the measured widths."""
        return {n: median([*times]) for n, times in sorted(self._decodes.copy().items())}

    def learn_decode(self, n_rows: int, seconds: float) -> None:
        """Learn from one step of `n_rows` decoding rows."""
        times = self._decodes.get(n_rows)
        if times is None:
            times = self._decodes[n_rows] = deque(maxlen=_N_DECODES)
        times.append(seconds)
        if self._prompts and self._prompt is None:
            self._fit()

    def learn_mixed(
        self, n_rows: int, n_prompt: int, seconds: float, n_before: float = 0.0
    ) -> None:
        """Learn from a step of `n_rows` decoding rows and `n_prompt` prompt tokens.

        Args:
            n_rows: decoding rows of the step.
            n_prompt: prompt tokens of the step.
            seconds: what the step took.
            n_before: cells before each prompt token, summed over the tokens.
        """
        self._prompts.append(_Mixed(n_rows, n_prompt, seconds, n_before))
        self._n_most = max(self._n_most, n_prompt)
        self._n_unfitted += 1
        if self.has_decoded and (self._n_unfitted >= _N_REFIT or len(self._prompts) < _N_REFIT):
            self._fit()

    def learn_waits(self, seconds: float, waited_s: float) -> float:
        """Learn that a run waited for `waited_s` of its `seconds`; return the share in which it computed."""
        busy = max(_LEAST_BUSY, 1 - waited_s / seconds) if seconds else 1.0
        self._slower.append(1 / busy)
        return busy

    def learn_copy(self, n_cells: int, seconds: float) -> None:
        """Learn from a copy of `n_cells` cells between slots."""
        if n_cells and seconds:
            self._copies.append(seconds / n_cells)

    def n_copied_within(self, seconds: float) -> int | None:
        """Return how many cells can be copied in `seconds`; None while too little is known."""
        cell_s = median(self._copies) if self._copies else 0.0
        return int(seconds / cell_s) if cell_s and seconds else None

    def decode_s(self, n_rows: int) -> float | None:
        """Return the seconds of computing of a step of `n_rows` decoding rows; None if no step was measured.

        An unmeasured width gets the time of the nearest measured one, scaled up if the measured one is much smaller.
        Under load every step may have prompts, so no better estimate comes; one that is too short would starve prompts.
        """
        nearest = self._nearest(n_rows)
        return (
            None
            if nearest is None
            else self._width_s(nearest) * max(1.0, n_rows / (_SAME_WIDTH * nearest))
        )

    def seen_s(self, n_rows: int) -> float:
        """Return the seconds of computing of the measured width nearest to `n_rows`; 0 if no step was measured."""
        nearest = self._nearest(n_rows)
        return 0.0 if nearest is None else self._width_s(nearest)

    def _nearest(self, n_rows: int) -> int | None:
        if n_rows in self._decodes or n_rows in self._left_s:
            return n_rows
        return min(
            [*self._decodes, *self._left_s], key=lambda n: (abs(n - n_rows), n), default=None
        )

    def _width_s(self, n_rows: int) -> float:
        """Return the seconds of a measured width, at most those of the next wider: some steps may have been slow."""
        times = self._decodes.get(n_rows)
        if times is None:
            return self._left_s[n_rows]
        wider = min([n for n in self._decodes if n > n_rows], default=n_rows)
        return min(median(times), median(self._decodes[wider]))

    @property
    def slower(self) -> float:
        """A run's current duration divided by its computing time: above 1 if other programs use the cores."""
        return median(self._slower)

    @property
    def prompt(self) -> PromptCost | None:
        """How much computing time prompts add to a step; None until enough steps are measured."""
        return self._prompt

    def n_prompt_within(self, n_rows: int, seconds: float, start: int = 0) -> int | None:
        """Return how many prompt tokens from position `start` fit into a step of `n_rows` decoding rows and `seconds`.

        None if unknown. If the rows alone take longer than `seconds`, the result is the number that makes the step 1.5
        times as long as they are.
        """
        decode_s, cost = self.decode_s(n_rows), self.prompt
        if decode_s is None or cost is None:
            return None
        left_s = seconds - decode_s - cost.run_s
        return self._n_in(left_s if left_s > 0 else (decode_s + cost.run_s) / 2, cost, start)

    def n_prompt_for(
        self, n_rows: int, share: float, least_s: float = 0.0, start: int = 0
    ) -> int | None:
        """Return how many prompt tokens from position `start` make the rest of a step at most `share` of its time.

        None if unknown, otherwise at least the number that is computed in `least_s` seconds.

        More tokens would compute a prompt faster by at most this share; with fewer, the rest takes a larger share.
        """
        cost = self.prompt
        if cost is None:
            return None
        rest_s = cost.run_s + (self.seen_s(n_rows) if n_rows else 0.0)
        return self._n_in(max(least_s, (1 / share - 1) * rest_s), cost, start)

    def _n_in(self, seconds: float, cost: PromptCost, start: int) -> int:
        """Return how many prompt tokens from position `start` are computed in `seconds`, at least one.

        A cost fitted to few, noisy steps may be far off, so a step has at most `_GROWTH` times the most tokens so far.
        If all steps had the same number of tokens, the cost of one token is unknown; then the next step has fewer.
        """
        first_s = cost.token_s + cost.cell_s * start
        # the root of n · first_s + n² / 2 · cell_s = seconds
        both_s = first_s + math.sqrt(first_s * first_s + 2 * cost.cell_s * seconds)
        n = _GROWTH * self._n_most
        if both_s:
            n = int(min(n, 2 * seconds / both_s))
        if self._is_uniform and (n_last := self._prompts[-1].n_prompt) >= _N_FEW:
            n = min(n, int(n_last / _SPREAD))
        return max(1, n)

    def _fit(self) -> None:
        """Fit the cost of prompts: the median slopes of pairs of steps, then the median of the remainders.

        Source: H. Theil, P. K. Sen. Up to 29 % of the steps may be slow for other reasons.
        """
        self._n_unfitted = 0
        widths_s = self.widths_s
        if of_cells := _slopes(self._prompts, _CELLS):
            self._cell_s = max(0.0, median(of_cells))
        steps = [s._replace(seconds=s.seconds - self._cell_s * s.n_before) for s in self._prompts]
        mixed = [step for step in steps if step.n_rows]
        alone = [step for step in steps if not step.n_rows]
        slopes = _slopes(mixed, _TOKENS) + _slopes(alone, _TOKENS)
        self._left_s = {}
        token_s = median(slopes) if slopes else 0.0
        if token_s <= 0:  # no slope is known, or only noise
            each_s = [
                [self._beyond_s(s) / s.n_prompt for s in steps] for steps in (mixed, alone) if steps
            ]
            token_s = min([s for s in map(median, each_s) if s > 0], default=0.0)
        # a token of a prompt takes no longer than a row, and a run of the graph no longer than a step of rows
        token_s = min([token_s, *(s / n for n, s in widths_s.items())])
        known = [step for step in mixed if step.n_rows in self._decodes] or mixed
        rest_s = [self._beyond_s(step) - step.n_prompt * token_s for step in known or alone]
        # a step with one prompt and nothing else has the fixed cost of one row
        run_s = max(0.0, median(rest_s) - (0.0 if known else self.seen_s(1)))
        run_s = min([run_s, *widths_s.values()])
        left_s: dict[int, list[float]] = {}
        for n_rows, n_prompt, seconds, _ in mixed:
            if n_rows not in self._decodes:
                left_s.setdefault(n_rows, []).append(seconds - run_s - n_prompt * token_s)
        self._left_s = {n_rows: max(0.0, median(times)) for n_rows, times in left_s.items()}
        self._prompt = PromptCost(run_s, token_s, self._cell_s)
        self._is_uniform = not slopes and len(mixed) >= _N_UNIFORM

    def _beyond_s(self, step: _Mixed) -> float:
        """Return by how many seconds a step took longer than its decoding rows take alone."""
        return step.seconds - ((self.decode_s(step.n_rows) or 0.0) if step.n_rows else 0.0)


class _Mixed(NamedTuple):
    """A step with prompt tokens."""

    n_rows: int
    n_prompt: int
    seconds: float
    n_before: float


_TOKENS, _CELLS = attrgetter("n_prompt"), attrgetter("n_before")
"""The sizes with which the time of a step with prompts grows."""


def _slopes(steps: Collection[_Mixed], amount: Callable[[_Mixed], float]) -> list[float]:
    """Return the seconds of one more token or cell, for each pair of steps of equal width that differ enough in it.

    Steps tell the cost of a cell if their tokens hardly differ.
    """
    return [
        (one.seconds - other.seconds) / (amount(one) - amount(other))
        for one, other in combinations(steps, 2)
        if one.n_rows == other.n_rows
        and (amount is _TOKENS or _tell_cells(one, other))
        and _differ(amount(one), amount(other))
    ]


def _tell_cells(one: _Mixed, other: _Mixed) -> bool:
    are_alike = abs(one.n_prompt - other.n_prompt) <= _ALIKE * one.n_prompt
    return are_alike and abs(one.n_before - other.n_before) >= _LEAST_CELLS


def _differ(one: float, other: float) -> bool:
    return one != other and max(one, other) >= _SPREAD * min(one, other)


class PromptBudget:
    """Decides how many prompt tokens a step takes beside its decoding rows: by the options, or by measured costs."""

    def __init__(self, options: ScheduleOptions) -> None:
        self.costs = StepCosts()
        self._options = options
        self.itl_s = None if options.itl_ms is None else options.itl_ms * 1e-3
        """Target seconds of a step that also decodes; None if the options set none."""

    def of(
        self, prefills: Sequence[Pending], n_rows: int, n_first: int, *, is_watched: bool
    ) -> tuple[int | None, int | None]:
        """Return the most prompt tokens of a step, and how many are enough; None for no limit.

        If readers wait for first tokens, a step that has enough tokens only takes further prompts whole.

        Args:
            prefills: sequences with more than one pending token, in order.
            n_rows: decoding rows of the step.
            n_first: the most tokens that the first of `prefills` can compute now.
            is_watched: whether a reader waits for the next token of a row.
        """
        n_new, start = self._n_eager(prefills), prefills[0].start
        if n_rows and (n_set := self._n_as_set(n_rows, start)) is not None:
            return (n_set if self.itl_s is None else _even(prefills[0].n, n_set)), None
        are_few = len(prefills) < max(2, n_rows) if n_new else len(prefills) <= n_rows
        if n_rows and is_watched and are_few:
            if prefills[0].driver.pictures:
                # encoding its pictures took longer than their rows will: large steps would hardly save time
                n_most = self._n_within(n_rows, self._short_s, start)
            else:
                n_left = prefills[0].n
                n_most = self._n_beside(n_rows, len(prefills), n_new, start, start + n_left)
                n_most = _even(n_left, n_most)
        elif (n_new or (is_watched and self._options.ttft != "any")) and len(prefills) > 1:
            share = 1 / (1 + MOST_OVER_ROWS)
            n_most = self.costs.n_prompt_for(n_rows, share, LEAST_BURST_S, start) or N_FIRST
            if n_new:  # the first prompt is not cut, because that would make no first token earlier
                n_most = max(n_first, n_most)
        else:
            return None, None
        return n_most, (n_most + 1) // 2

    def _n_as_set(self, n_rows: int, start: int = 0) -> int | None:
        """Return how many prompt tokens may join `n_rows` decoding rows by the options; None if they set no limit."""
        if self.itl_s is not None:
            return self._n_within(n_rows, self.itl_s / self.costs.slower, start)
        return self._options.prefill_budget

    def beside_rows(self) -> dict[int, int]:
        """Return, by the number of decoding rows, how many prompt tokens of one new sequence join them.

        The numbers of rows are 1, 2, 4 and so on, as far as such steps were seen. All output counts as streamed.
        """
        if self.costs.prompt is None:
            return {}
        widths = [n for n in self.costs.widths_s if n & (n - 1) == 0]
        return {n: self._n_as_set(n) or self._n_beside(n, 1, 1) for n in widths}

    def _n_eager(self, prefills: Sequence[Pending]) -> int:
        """Return for how many prompts an early first token matters more than the fastest steps."""
        if self._options.ttft == "auto":
            return sum(p.driver.reply.is_read for p in prefills)
        return len(prefills) if self._options.ttft == "first" else 0

    @property
    def _short_s(self) -> float:
        """Computing time of a run that takes `SHORT_RUN_S` on a quiet machine.

        If other programs make runs f times as long, this one computes √f times less and takes √f times longer: the
        newcomer and those who read along share the loss.
        """
        return SHORT_RUN_S / math.sqrt(self.costs.slower)

    def _n_within(self, n_rows: int, seconds: float, start: int) -> int:
        """Return how many prompt tokens keep a step within `seconds` of computing.

        At least one, but 0 while no step without prompt tokens was measured.
        """
        if not self.costs.has_decoded:
            return 0  # this step measures what decoding takes
        n_tokens = self.costs.n_prompt_within(n_rows, seconds, start)
        return N_FIRST if n_tokens is None else n_tokens

    def _n_beside(
        self, n_rows: int, n_prefills: int, n_new: int, start: int = 0, n_all: int = 0
    ) -> int:
        """Return how many prompt tokens may join decoding rows whose output is streamed.

        The more new sequences wait for their first token, and the fewer rows for their next, the longer prompts may
        take in relation to the rest of the step. The rest counts as long as decoding the rows now, or with the new
        sequences once their prompts are done, whichever takes longer. `n_all` is the length of the first prompt.
        """
        n_short = self._n_within(n_rows, self._short_s, start)
        fair = min(MOST_OVER_ROWS, FAIR_OVER_ROWS * n_new / n_rows)
        n_wide = max(n_rows, n_rows + n_prefills, key=self.costs.seen_s)
        share = 1 / (1 + max(LEAST_OVER_ROWS, fair))
        n_fair = self.costs.n_prompt_for(n_wide, share, start=start)
        n_most = n_short if n_fair is None or not n_short else max(n_short, n_fair)
        if n_all <= N_SHORT * n_most:
            return n_most
        long_s = (1 + max(LONG_OVER_ROWS, fair)) * self.costs.seen_s(n_rows)
        return min(n_most, max(n_short, self._n_within(n_rows, long_s, start)))
