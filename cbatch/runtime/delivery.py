"""Delivers new output to the targets of batches after a step, and logs the requests that ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.errors import failure_of
from cbatch.runtime.choices import Members
from cbatch.runtime.mailbox import Parcel, refused
from cbatch.runtime.output import make_logprobs, make_scores, result_of, take_chunk
from cbatch.support.logs import Log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.driver import SequenceDriver
    from cbatch.response import BatchResult
    from cbatch.runtime.in_flight import Route
    from cbatch.runtime.interface import Target
    from cbatch.stats import EngineStats

_log = Log("cbatch")


def deliver(
    routes: dict[str, Route],
    batcher: MultiRequestBatcher,
    stats: EngineStats,
    changed: Sequence[SequenceDriver],
) -> bool:
    """Deliver new output, one delivery a batch; return False where there was none.

    Sequences that ended are taken from the batcher, counted, and taken out of `routes`.
    """
    ended = batcher.take_ended()
    parcels: dict[Target, Parcel] = {}
    for driver in changed:
        if driver.finish_reason is None:
            target = routes[driver.request.id].target
            driver.reply.is_watched = target.is_streamed
            if target.is_streamed:
                if chunk := take_chunk(driver, by_token=target.wants_tokens):
                    parcels.setdefault(target, ([], []))[0].append(chunk)
            elif driver.request.n_logprobs is not None:
                make_logprobs(driver)
            if driver.scores is not None:
                make_scores(driver)
    for driver in ended:
        route = routes.pop(driver.request.id)
        chunks, results = parcels.setdefault(route.target, ([], []))
        last, ending = _last_parcel(driver, route)
        chunks += last
        results += ending
        count_end(stats, driver)
        driver.reply.reader = None  # a thread that has just written its cells may hold it
    for target, (chunks, results) in parcels.items():
        if isinstance(target, Members) and target.ends_with(results):
            routes.pop(target.id, None)  # first: a reader of the answer may use its id again
        target.deliver(chunks, results)
    return bool(parcels)


def count_end(stats: EngineStats, driver: SequenceDriver) -> None:
    """Count a request that ended."""
    clock = driver.clock
    stats.count_end(
        str(driver.finish_reason),
        clock.after_s(clock.admitted_s),
        clock.after_s(clock.first_token_s),
        n_preempted=driver.n_preempted,
        n_cached=driver.n_cached,
    )


def _last_parcel(driver: SequenceDriver, route: Route) -> Parcel:
    """Return the last chunk and the result of a sequence that ended; text that cannot be made fails it alone."""
    target, place, _ = route
    try:
        last = take_chunk(driver)
        result = result_of(driver, 0 if isinstance(target, Members) else place)
        return [last] if last else [], [(place, result)]
    except Exception as error:
        failure = failure_of("the answer could not be made into text", error)
        return refused(driver.request.id, place, failure)


# ---- the log ----


def log_results(model: str, results: Sequence[tuple[int, BatchResult]]) -> None:
    """Log one line for each of these requests that ended; cheap where the lines are not wanted."""
    if results and _log.has_info:
        for _, result in results:
            _log.tell("request", **figures(result, model))


def figures(result: BatchResult, model: str) -> dict[str, object]:
    """Return the values of a request's line: those of its result; None where nothing was timed."""
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
