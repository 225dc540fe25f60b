"""What an engine says of itself, without waiting for a run of it to end, and whether it gets on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from cbatch.errors import CBatchError
from cbatch.server.http_errors import words_for_clients

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.engine import Engine
    from cbatch.stats import EngineStats

T = TypeVar("T")

_PATIENCE_S = 0.5
"""Seconds that a client waits for an answer of the engine; a run of the engine may last longer."""

_GAP_S = 15.0
"""Seconds without a question after which the time before the next question does not count. Our choice."""


class EngineQuestion(Generic[T]):
    """A question of the engine, asked once at a time; its last answer stands until the next one."""

    def __init__(self, ask: Callable[[], T], clock: Callable[[], float]) -> None:
        self.clock = clock
        self.answer: T | None = None
        self.problem: str | None = None
        """Why the engine gives no answer."""
        self.asked_s = self.answered_s = clock()
        self._ask = ask
        self._asking = threading.Lock()

    @property
    def is_asking(self) -> bool:
        """Whether it was asked and is not answered yet."""
        return self._asking.locked()

    @property
    def age_s(self) -> float:
        """Seconds since the last answer."""
        return self.clock() - self.answered_s

    async def ask(self) -> T | None:
        """Ask, and return the newest answer after a short while: where the engine is in a long run, an old one."""
        with anyio.move_on_after(_PATIENCE_S):
            await anyio.to_thread.run_sync(self._once, abandon_on_cancel=True)
        return self.answer

    def _once(self) -> None:
        if not self._asking.acquire(blocking=False):
            return
        self.asked_s = self.clock()
        try:
            answer = self._ask()
            now = self.clock()
            self.take(answer, now)
            self.answered_s = now
            self.answer, self.problem = answer, None
        except CBatchError as error:
            self.problem = words_for_clients(error)
        finally:
            self._asking.release()

    def take(self, answer: T, now: float) -> None:
        """See a new answer while `answer` is still the one before."""


class Pulse(EngineQuestion["EngineStats"]):
    """The engine's figures, asked for when somebody wants to know, and how long it has not got on by them."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float], has_work: Callable[[], object] = bool
    ) -> None:
        """Make one; `has_work` tells of requests that the figures do not count yet, such as prompts being tokenized."""
        super().__init__(engine.stats, clock)
        self._has_work, self._was_idle = has_work, True
        self._moved_s = clock()

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's figures changed or it had nothing to do.

        If the engine does not answer: seconds since its last progress, or since the first question after a long pause.
        """
        is_unknown = self.is_asking and self.asked_s - self.answered_s > _GAP_S
        return self.clock() - (max(self._moved_s, self.asked_s) if is_unknown else self._moved_s)

    def take(self, answer: EngineStats, now: float) -> None:
        """See whether anything has moved since the last figures."""
        last, was_idle = self.answer, self._was_idle
        self._was_idle = not (answer.n_running or answer.n_waiting or self._has_work())
        if last is None or was_idle or self._was_idle or progress(last) != progress(answer):
            self._moved_s = now


def progress(stats: EngineStats) -> tuple[object, ...]:
    """Return what changes while the engine gets on."""
    tokens = stats.n_prompt_tokens, stats.n_output_tokens, stats.n_text_tokens
    return stats.n_steps, *tokens, stats.n_texts, stats.n_finished
