"""A line of the log for each request that ends, with its figures: those of its result, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.logs import Log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.response import BatchResult

_log = Log("cbatch")


class RequestLog:
    """Tells how requests ended, by a model's name; costs a look at the level where nobody listens."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __call__(self, results: Sequence[tuple[int, BatchResult]]) -> None:
        """Log these; from any thread."""
        if results and _log.has_info:
            for _, result in results:
                _log.tell("request", **figures(result, self._model))


def figures(result: BatchResult, model: str) -> dict[str, object]:
    """Return what a line says of a request; None where nothing was timed."""
    usage, timings = result.usage, result.timings
    n_total = usage.prompt_tokens + usage.completion_tokens
    return {
        "request_id": result.id,
        "model": model,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "queue_ms": _ms(timings.queue_s),
        "ttft_ms": _ms(timings.ttft_s),
        "prompt_tps": _rate(timings.prompt_tps),
        "generation_tps": _rate(timings.generation_tps),
        "total_tokens": n_total,
        "total_tps": _rate(n_total / timings.total_s if timings.total_s > 0 else None),
        "latency_ms": _ms(timings.total_s),
        "finish_reason": result.finish_reason,
        **({} if result.error is None else {"error": type(result.error).__name__}),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _rate(per_second: float | None) -> float | None:
    return None if per_second is None else round(per_second, 2)
