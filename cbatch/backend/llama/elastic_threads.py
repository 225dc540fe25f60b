"""How threads compute: while other programs take their cores, they sleep sooner where they wait, or are fewer.

Threads wait for each other thousands of times a step, so a step is as slow as the thread that gets the least of a core.
The owner thread's own CPU time tells: what it lacks of a step's time it was without a core, or waited for a thread that
was. Whether short waits or fewer threads are faster then, or long waits of all threads again, only a trial can tell: a
short run with another setting, next to runs of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from cbatch.backend.llama.row_threads import RowThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.core.plan import StepPlan, StepResult

WINDOW_S = 0.1
"""Seconds of computing after which it is decided whether another setting is tried."""

TRIAL_S = 0.25
"""Seconds of computing with another setting: many slices that a system gives programs in turn. As long are windows
beside other programs, to which trials are compared."""

CLEAR_S, CLEAR = 0.05, 0.6
"""A trial ends after so many seconds already where its steps take less than this share of those before it, or those
less than this share of its own."""

WAITED = 0.2
"""Share of a step's time that the owner thread may be without a core.

Source: `cbatch.bench.experiments.beside_loops`.
"""

MOST_OF_OTHER = 0.95
"""A gain: a trial's steps take at most this much of those before it. Less is noise."""

MOST_IF_WAITED, WAITED_TRIAL_S = 0.75, 1.0
"""The same for long waits where others had cores meanwhile, and the seconds of such a trial: which threads share a core
with other programs changes only now and then, and sometimes long waits do no harm for a while."""

UP_WAIT_S, DOWN_WAIT_S = 0.5, 1.0
"""Shortest seconds before a trial of what is best alone, twice as many after one that failed, and four times as many as
that took; and between two of what is better beside other programs."""

WAIT_FOR_LOST = 20
"""A trial without a gain is repeated no sooner than after so many times the seconds that it cost."""

LEFT = 0.5
"""Cores that others no longer keep busy, after which what is best alone is tried at once."""

MOST_DOUBLED = 3
"""So often the wait for a trial of fewer threads, or of short waits, doubles while they bring nothing."""


class Setting(NamedTuple):
    """How a run is computed."""

    n_threads: int
    is_short: bool = False
    """Whether threads that wait sleep almost at once; only with the most threads: others leave cores to programs."""


@dataclass(eq=False, slots=True)
class _Window:
    setting: Setting
    spent_s: float = 0.0
    waited_s: float = 0.0
    paces: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    """Seconds and tokens by the shape of steps: their chunks, and the magnitude of the prompt tokens. And of all steps
    with prompts, and all without, as if they had no chunk."""

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        self.spent_s += result.decode_s + result.sample_s
        self.waited_s += result.waited_s
        n_chunks = len(plan.spans)
        n_tokens = sum([len(c.inputs) for c in plan.spans])
        self._add((n_chunks, (n_tokens - n_chunks).bit_length()), result.first_s, n_tokens)
        if result.n_steps > 1:
            self._add((n_chunks, 0), result.later_s, n_chunks * (result.n_steps - 1))

    def _add(self, shape: tuple[int, int], seconds: float, n_tokens: int) -> None:
        for key in (shape, (0, min(1, shape[1]))):
            before_s, n_before = self.paces.get(key, (0.0, 0))
            self.paces[key] = before_s + seconds, n_before + n_tokens

    def share_of(self, other: _Window) -> tuple[float | None, bool]:
        """Return the time of this window's steps over that of the other's, and whether it is of steps of equal shape.

        Without those, steps with prompts count as alike, and those without. None if these have none in common either.
        """
        common = [shape for shape in self.paces if shape in other.paces]
        alike = [shape for shape in common if shape[0]]
        own_s = others_s = 0.0
        for shape in alike or common:
            seconds, n_tokens = self.paces[shape]
            before_s, n_before = other.paces[shape]
            own_s += seconds
            others_s += before_s / n_before * n_tokens
        return own_s / others_s if others_s else None, bool(alike)


class ElasticThreads:
    """Chooses the setting of each run of one backend."""

    def __init__(
        self,
        n_most: int,
        *,
        want_waits: Callable[..., None] | None = None,
        n_taken: Callable[[], float | None] | None = None,
        is_fixed: bool = False,
    ) -> None:
        """Make one.

        Args:
            want_waits: makes waits short or long, as `ShortWaits.want` does; None where nothing can.
            n_taken: tells how many cores others kept busy since the last call; None where nothing can.
        """
        self._n_most, self._want_waits = n_most, want_waits
        self._is_fixed = is_fixed
        self._rows = None if is_fixed else RowThreads(n_most)
        self._best_alone = self._now = Setting(n_most)
        self._window = _Window(self._now)
        self._trial: _Window | None = None
        self._up_wait_s = self._down_wait_s = 0.0
        """Seconds of computing before the next trial."""
        self._n_failed_ups = self._n_failed_downs = 0
        self._ask_taken, self._n_taken, self._n_taken_then = n_taken, 0.0, 0.0
        """Cores that others kept busy in the last window beside them, and when what is best alone was last tried."""

    def run(self, plan: StepPlan, compute: Callable[[StepPlan, int], StepResult]) -> StepResult:
        """Compute a plan with the setting that is best now, or that is tried."""
        window, most_s = self._window, WINDOW_S
        if self._trial is not None:
            window, most_s = self._trial, CLEAR_S
        if plan.n_steps > 1 and not 0 < plan.slice_s <= most_s:
            plan = replace(plan, slice_s=most_s)
        if self._want_waits is not None:
            self._want_waits(self, self._n_most, is_wanted=window.setting.is_short)
        result = self._compute(plan, window.setting, compute)
        if result.code or not result.n_steps:
            return result
        window.learn(plan, result)
        if window is self._trial:
            self._judge(window)
        elif window.spent_s >= (WINDOW_S if self._now == self._best_alone else TRIAL_S):
            self._decide(window)
        return result

    def _compute(
        self, plan: StepPlan, setting: Setting, compute: Callable[[StepPlan, int], StepResult]
    ) -> StepResult:
        """Compute with a setting, and with no more threads than are best for so many rows."""
        if self._rows is None:
            return compute(plan, setting.n_threads)
        if setting != self._best_alone:
            return compute(plan, min(setting.n_threads, self._rows.n_best(plan)))
        result = self._rows.run(plan, compute)
        if result.waited_s > WAITED * (result.decode_s + result.sample_s):
            self._rows.end_trial()
        return result

    def rest(self) -> None:
        """Let waits be long for others while nothing is computed here; safe to call twice."""
        if self._want_waits is not None:
            self._want_waits(self, self._n_most, is_wanted=False)

    def _decide(self, window: _Window) -> None:
        self._up_wait_s -= window.spent_s
        self._down_wait_s -= window.spent_s
        tried = self._now
        if self._ask_taken is not None and self._now != self._best_alone:
            self._n_taken = self._ask_taken() or 0.0
            if self._n_taken < self._n_taken_then - LEFT:
                self._up_wait_s, self._n_failed_ups = 0.0, 0  # another program has ended
        if self._now != self._best_alone and self._up_wait_s <= 0:
            tried = self._up() if self._n_failed_ups % 2 else self._best_alone
        elif window.waited_s > WAITED * window.spent_s and self._down_wait_s <= 0:
            tried = self._down(is_half=bool(self._n_failed_downs % 2))
        if tried == self._now:
            self._window = _Window(self._now)
            return
        self._trial = _Window(tried)
        if tried == self._best_alone:
            self._n_taken_then = self._n_taken

    def _up(self) -> Setting:
        """Return the setting with one thread more, or with long waits if there are no more."""
        n_threads = self._now.n_threads + 1
        if n_threads > self._n_most:
            return self._best_alone
        return Setting(
            n_threads, is_short=n_threads == self._n_most and self._want_waits is not None
        )

    def _down(self, *, is_half: bool) -> Setting:
        """Return the setting with short waits, or with fewer threads: one fewer, or half of them."""
        n_threads, is_short = self._now
        can_wait_less = self._want_waits is not None and n_threads == self._n_most and not is_short
        if can_wait_less and (self._is_fixed or not is_half):
            return Setting(n_threads, is_short=True)
        if self._is_fixed:
            return self._now
        return Setting(max(1, n_threads // 2 if is_half else n_threads - 1))

    def _would_wait(self, trial: _Window) -> bool:
        """Whether waits were long in a trial, and others had cores meanwhile: steps may have been fast by chance."""
        is_long = self._want_waits is not None and trial.setting == self._best_alone
        return is_long and trial.waited_s > WAITED * trial.spent_s

    def _judge(self, trial: _Window) -> None:
        """Take over the trial's setting if its steps are faster; go on if it is too early to say."""
        share, are_alike = trial.share_of(self._window)
        would_wait = self._would_wait(trial)
        is_clear = are_alike and share is not None and (share > 1 / CLEAR or share < CLEAR)
        least_s = CLEAR_S if is_clear else TRIAL_S
        if would_wait and share is not None and share < 1:
            least_s = WAITED_TRIAL_S
        if trial.spent_s < least_s:
            return
        is_up = trial.setting == self._best_alone or trial.setting.n_threads > self._now.n_threads
        # beside other programs waits are short unless long ones are faster
        most = 1 / MOST_OF_OTHER if trial.setting.is_short and not is_up else MOST_OF_OTHER
        if would_wait:
            most = MOST_IF_WAITED
        if share is not None and share <= most:
            self._now, self._n_taken_then = trial.setting, 0.0
            self._n_failed_ups = self._n_failed_downs = 0
            self._up_wait_s = UP_WAIT_S if not is_up else 0.0
            self._down_wait_s = 0.0
        else:
            lost_s = trial.spent_s * (1 - 1 / share) if share and share > 1 else 0.0
            if is_up:
                self._n_failed_ups += 1
                self._up_wait_s = max(2 * UP_WAIT_S, 4 * trial.spent_s, WAIT_FOR_LOST * lost_s)
            else:
                wait_s = max(DOWN_WAIT_S, WAIT_FOR_LOST * lost_s)
                self._down_wait_s = wait_s * 2 ** min(self._n_failed_downs, MOST_DOUBLED)
                self._n_failed_downs += 1
        self._trial, self._window = None, _Window(self._now)
