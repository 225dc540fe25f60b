"""Work that the owner thread does besides its steps: vectors of texts. It is interrupted for steps.

Two threads that compute have two teams of OpenMP's, which take cores from each other amid a step whatever their
priorities are; on two cores a step then takes up to twice as long. So the owner thread computes both: work beside steps
gives them turns between the nodes of its graphs. It has a share of the time, a small one while readers wait for tokens,
else half of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cbatch.runtime.commands import Command

T = TypeVar("T")

SHARE = 0.03
"""Time for work beside steps, over that of the steps, while a reader waits for a token of a row. The gaps between
tokens grow by it, and by the length of a node. Our choice."""

N_SAVED = 30
"""Most steps whose time work may have saved up by that share: a query that comes now and then has as much time as steps
until its vector is there, while a job that goes on has its share alone. Our choice."""

_MOST_S = 0.1
"""Most time that work has before the next step where no reader waits. Our choice."""

_IDLE_S = 0.01
"""Time that work has before the next step where there is nothing else to do: it is told if there is."""


@dataclass(eq=False, slots=True)
class _Piece:
    """One call's work."""

    do: Command[Any]
    hurry: Callable[[], object]
    took_s: float = 0.0


class SideWork:
    """Does work between the steps of an owner thread. All of it in that thread, but for `do` and `hurry`."""

    def __init__(
        self,
        step: Callable[[], bool],
        is_watched: Callable[[], bool],
        check_open: Callable[[], object],
        clock: Callable[[], float],
        itl_s: float | None = None,
    ) -> None:
        """Make one without work.

        Args:
            step: does a step; False where there was nothing to compute. What it raises ends the work that it is amid.
            is_watched: whether a reader waits for the next token of a row.
            check_open: raises an `EngineClosedError` once no more work is to be done.
            clock: in seconds.
            itl_s: up to how long a step may take while a reader waits; None where nobody has said it.
        """
        self._step, self._is_watched = step, is_watched
        self._check_open, self._clock = check_open, clock
        self._itl_s = itl_s or 0.0
        self._waiting: deque[_Piece] = deque()
        self._current: _Piece | None = None
        self._left_s = 0.0
        """Time that work has before the next step."""
        self._saved_s = 0.0
        """Time that it has not had of its share."""
        self._is_idle = True
        """Whether there was nothing else to do."""
        self._has_readers = False
        """Whether a reader waited for a token of the last step."""
        self._is_hurried = False
        """Whether a step is to be done although work has time left."""
        self._since_s = 0.0
        """When `_current` went on."""

    def do(
        self,
        work: Callable[[Callable[[], float]], T],
        hurry: Callable[[], object],
        wake: Callable[[bool], object],
    ) -> tuple[T, float]:
        """Have work done by the owner thread; return its result and the seconds that it took. Waits; any other thread.

        Args:
            work: is given what it calls amid its computing: that does steps, and returns for how many seconds to go on
                before it is called again.
            hurry: has `work` call that soon. From any thread.
            wake: has the owner thread look at its work, after a run of steps or amid it (True). It calls `close` later.
        """
        asked = _Piece(Command(lambda: self._begin(work)), hurry)
        self._waiting.append(asked)
        wake(self._left_s > 0 and not self._has_readers)
        return asked.do.wait(), asked.took_s

    def hurry(self) -> None:
        """Have steps done soon. From any thread."""
        self._is_hurried = True
        current = self._current
        if current is not None:
            current.hurry()

    @property
    def is_due(self) -> bool:
        """Whether work waits and has time."""
        return self._left_s > 0 and len(self._waiting) > 0

    def earn(self, took_s: float) -> None:
        """Give work time for a step that took so long."""
        self._is_idle = False
        self._saved_s = min(self._saved_s + SHARE * took_s, N_SAVED * took_s)
        if self._current is None and not self._waiting:
            return
        self._has_readers = self._is_watched()
        if self._has_readers:
            saved_s = min(self._saved_s, took_s)
            self._saved_s -= saved_s
            earned_s = max(saved_s, self._itl_s - took_s)
            self._left_s = min(self._left_s, 0.0) + earned_s
        else:
            self._left_s = min(self._left_s + took_s, _MOST_S)

    def begin_idle(self) -> bool:
        """Give work time where there is nothing else to do; False where none waits."""
        self._left_s, self._is_idle = _IDLE_S, True
        return len(self._waiting) > 0

    def do_next(self) -> None:
        """Do the work that came first, and steps amid it."""
        self._current = asked = self._waiting.popleft()
        self._since_s = self._clock()
        asked.do()
        self._current = None

    def close(self) -> None:
        """Have all work that waits end by the error of `check_open`."""
        while self._waiting:
            self._waiting.popleft().do()

    def _begin(self, work: Callable[[Callable[[], float]], T]) -> T:
        self._check_open()
        try:
            return work(self._take_turn)
        finally:
            self._pause()

    def _pause(self) -> None:
        """Count the time since the current work went on."""
        used_s = self._clock() - self._since_s
        self._left_s -= used_s
        if self._is_idle:
            self._saved_s = max(0.0, self._saved_s - used_s)
        if self._current is not None:
            self._current.took_s += used_s

    def _take_turn(self) -> float:
        """Do steps until work has time again; return how much, infinity where there is nothing else to do."""
        self._pause()
        while self._left_s <= 0 or self._is_hurried:
            self._check_open()
            self._is_hurried = False
            if not self._step():
                self.begin_idle()
        self._since_s = self._clock()
        return math.inf if self._is_idle else self._left_s
