"""From sequences to mailboxes: what a step brought, and how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.core.output import result_of, take_chunk
from cbatch.errors import RequestFailedError, words_of
from cbatch.runtime.choices import Choices
from cbatch.runtime.mailbox import refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.scheduler import ContinuousBatchScheduler
    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.in_flight import Route
    from cbatch.runtime.mailbox import Mailbox


def deliver(
    routes: dict[str, Route], scheduler: ContinuousBatchScheduler, changed: Sequence[SequenceDriver]
) -> bool:
    """Hand out what is new, one delivery per batch; False where there was nothing.

    Who ended is taken from the scheduler, counted, and out of `routes`.
    """
    ended = scheduler.batcher.take_ended()
    parcels: dict[
        Mailbox | Choices, tuple[list[BatchOutputChunk], list[tuple[int, BatchResult]]]
    ] = {}
    for driver in changed:
        if driver.finish_reason is None:
            mailbox = routes[driver.request.id].target
            driver.is_watched = mailbox.is_streamed
            if mailbox.is_streamed and (chunk := take_chunk(driver)):
                parcels.setdefault(mailbox, ([], []))[0].append(chunk)
    for driver in ended:
        mailbox, i, _ = routes.pop(driver.request.id)
        chunks, results = parcels.setdefault(mailbox, ([], []))
        last, ending = _outcome(driver, i)
        chunks += last
        results += ending
        scheduler.stats.count_end(driver)
    for mailbox, (chunks, results) in parcels.items():
        if isinstance(mailbox, Choices) and mailbox.ends_with(results):
            routes.pop(mailbox.id, None)  # first: who reads the answer may use its id again
        mailbox.deliver(chunks, results)
    return bool(parcels)


def _outcome(
    driver: SequenceDriver, place: int
) -> tuple[list[BatchOutputChunk], list[tuple[int, BatchResult]]]:
    """Return the last chunk of a sequence that ended, and its result; text that cannot be made is its own failure."""
    try:
        last = take_chunk(driver)
        return [last] if last else [], [(place, result_of(driver))]
    except Exception as error:
        failure = RequestFailedError(f"the answer could not be made into text: {words_of(error)}")
        failure.__cause__ = error
        return refused(driver.request.id, place, failure)
