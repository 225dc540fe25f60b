"""Books of time and work: of one request, and of the engine since it was loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.response import Timings


@dataclass(eq=False, slots=True)
class RequestClock:
    """When one request passed its stations, in seconds of the engine's clock."""

    submitted_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def timings(self, n_prompt: int, n_output: int) -> Timings:
        """Return the request's times; a rate is None where nothing was timed, never a division by zero."""
        end = self.finished_s if self.finished_s is not None else self.submitted_s
        admitted, first = self.admitted_s, self.first_token_s
        return Timings(
            queue_s=(end if admitted is None else admitted) - self.submitted_s,
            ttft_s=None if first is None else first - self.submitted_s,
            total_s=end - self.submitted_s,
            prompt_tps=_rate(n_prompt, admitted, first),
            generation_tps=_rate(n_output - 1, first, end),
        )


def _rate(n_tokens: int, start_s: float | None, end_s: float | None) -> float | None:
    if start_s is None or end_s is None or end_s <= start_s or n_tokens < 1:
        return None
    return n_tokens / (end_s - start_s)


@dataclass(eq=False, slots=True)
class EngineStats:
    """Work done since the engine was loaded; a snapshot where `Engine.stats()` returns it.

    `n_active_steps` sums the sequences in each step, so `n_active_steps / n_steps` is the mean width. A step that
    computes a prompt chunk and decodes counts in both token totals. Seconds are of the owner thread.
    """

    n_submitted: int = 0
    n_steps: int = 0
    n_runs: int = 0
    n_active_steps: int = 0
    n_active_max: int = 0
    n_prompt_tokens: int = 0
    n_output_tokens: int = 0
    n_waiting: int = 0
    n_running: int = 0
    n_finished: dict[str, int] = field(default_factory=dict)
    decode_s: float = 0.0
    sample_s: float = 0.0
    plan_s: float = 0.0
    run_s: float = 0.0
    apply_s: float = 0.0
