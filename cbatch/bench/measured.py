"""A request that a measurement sends, its answer, and the figures of all answers of one round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from cbatch.bench.harness import percentile

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One request of a workload; it generates `n_output` tokens whatever the model says.

    `n_prompt` counts tokens of the model's own vocabulary, its beginning mark included. `options` are fields of
    `RunOptions`.
    """

    id: str
    prompt: str
    n_prompt: int
    n_output: int
    options: Mapping[str, Any] = field(default_factory=dict)


Chains = list[list[WorkRequest]]
"""Requests that follow each other, as a chat's turns do: each is sent when the one before it is answered."""


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """What a client saw of one request. Seconds count from the round's beginning.

    Args:
        sent_s: when it was sent; in an open loop, when it was due.
        first_s: when the first token came; None where none did.
        end_s: when the answer ended.
        n_prompt: tokens of the prompt as the other side counts them; None where it does not say.
        gaps_s: times between two tokens; tokens that are delivered together have equal gaps.
        n_distinct: how many different tokens, or pieces of text, the answer has.
        finish: the finish reason; None where the answer ended without one.
    """

    id: str
    sent_s: float
    first_s: float | None
    end_s: float
    n_output: int
    n_prompt: int | None = None
    gaps_s: tuple[float, ...] = ()
    n_distinct: int = 0
    finish: str | None = None
    tokens: tuple[int, ...] = ()
    text: str = ""
    error: str = ""


def per_token(gap_s: float, n_tokens: int) -> tuple[float, ...]:
    """Return the gaps of tokens that were delivered together, so long after the token before them."""
    return (gap_s / n_tokens,) * n_tokens


@dataclass(slots=True)
class Arrivals:
    """Notes when the tokens of an answer are delivered."""

    sent_s: float
    times_s: list[float] = field(default_factory=list)
    """Of each delivery."""
    n_each: list[int] = field(default_factory=list)
    """Tokens of each delivery."""

    def note(self, now_s: float, n_tokens: int = 1) -> None:
        """Note that tokens were delivered now."""
        self.times_s.append(now_s)
        self.n_each.append(n_tokens)

    def answer(self, id: str, end_s: float, n_output: int, **more: Any) -> MeasuredAnswer:
        """Return the answer."""
        deliveries = zip(pairwise(self.times_s), self.n_each[1:], strict=True)
        gaps = tuple(gap for (a, b), n in deliveries for gap in per_token(b - a, n))
        first = self.times_s[0] if self.times_s else None
        return MeasuredAnswer(id, self.sent_s, first, end_s, n_output, gaps_s=gaps, **more)


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one side. Times are percentiles in milliseconds by their number; empty where nothing was timed."""

    n_requests: int
    seconds: float
    n_prompt: int
    n_output: int
    ttft_ms: Mapping[int, float]
    itl_ms: Mapping[int, float]
    total_ms: Mapping[int, float]

    @classmethod
    def of(
        cls, requests: Sequence[WorkRequest], answers: Sequence[MeasuredAnswer], seconds: float
    ) -> Figures:
        """Return the figures of answers that came in so many seconds."""
        return cls(
            len(answers),
            seconds,
            sum(request.n_prompt for request in requests),
            sum(answer.n_output for answer in answers),
            percentiles_ms(a.first_s - a.sent_s for a in answers if a.first_s is not None),
            percentiles_ms(gap for a in answers for gap in a.gaps_s),
            percentiles_ms(a.end_s - a.sent_s for a in answers),
        )

    @property
    def output_tps(self) -> float:
        """Generated tokens a second."""
        return self.n_output / self.seconds

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens a second, computed or taken over."""
        return self.n_prompt / self.seconds

    @property
    def rps(self) -> float:
        """Requests a second."""
        return self.n_requests / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values, with the rates."""
        rates = {
            name: round(getattr(self, name), 3) for name in ("output_tps", "prompt_tps", "rps")
        }
        return {**asdict(self), **rates}


def percentiles_ms(times_s: Iterable[float]) -> dict[int, float]:
    """Return percentiles of times in milliseconds; none of no times."""
    found = sorted(times_s)
    return {p: round(1e3 * percentile(found, p / 100), 3) for p in PERCENTS} if found else {}
