"""Makes the chunks and the result of a sequence for its reader."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from cbatch.chat.answers import Answer
from cbatch.core.driver import Status
from cbatch.core.plan import NO_DRAFTS
from cbatch.errors import SequenceStateError
from cbatch.response import BatchOutputChunk, BatchResult, Timings, TokenLogprob, ToolCall, Usage
from cbatch.tools import call_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.core.plan import DraftCounts, TokenLogprobs
    from cbatch.core.request import Request, RequestClock
    from cbatch.response import FinishReason


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a result comes from, to go on from it: kept apart, for a caller may change the result."""

    request: Request
    number: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage


def take_chunk(driver: SequenceDriver, *, by_token: bool = False) -> BatchOutputChunk | None:
    """Return the output since the last call, or None where there is none; the last chunk has the finish reason.

    Tokens wait until they are text, but not `by_token`, nor where the sequence is paused, for whoever lets it go on
    waits for them: then a chunk may have tokens alone.
    """
    reply = driver.reply
    reply.feed(driver.output)
    parts, n_tokens = reply.text.parts, reply.text.n_fed
    n_parts = len(parts)
    old_parts, old_tokens = reply.delivered or (0, 0)
    is_new = old_parts < n_parts
    if by_token or driver.status is Status.PAUSED:
        is_new = old_tokens < n_tokens
    if not is_new and driver.finish_reason is None:
        return None
    is_first = reply.delivered is None
    echo, tokens = _echo(driver) if is_first else ("", ())
    reply.delivered = n_parts, n_tokens
    new = content = echo + "".join(parts[old_parts:])
    reasoning = ""
    if reply.parts is not None:
        said, reasoning = reply.parts.take()
        content = echo + said
    tokens = (*tokens, *driver.output[old_tokens:n_tokens])
    reason, logprobs = driver.finish_reason, None
    if driver.request.n_logprobs is not None:
        echoed = _echoed_logprobs(driver) if is_first else ()
        logprobs = (*echoed, *_output_logprobs(driver)[old_tokens:])
    error = None if reason is None else driver.error
    return BatchOutputChunk(
        driver.request.id, new, tokens, 0, reason, content, reasoning, logprobs, error
    )


def make_logprobs(driver: SequenceDriver) -> None:
    """Make the log-probabilities of new tokens for the result: all at its end would hold up the other sequences."""
    driver.reply.feed(driver.output)
    _output_logprobs(driver)


def make_scores(driver: SequenceDriver) -> Sequence[TokenLogprob]:
    """Make the log-probabilities of newly scored tokens of the prompt; return all so far."""
    made, scores = driver.reply.prompt_logprobs, driver.scores
    if scores is not None and (new := scores.found[len(made) :]):
        tokens = driver.given[1 + scores.first + len(made) :]
        made += map(partial(_logprob, driver.reply.text.piece), tokens, new)
    return made


def result_of(driver: SequenceDriver, i_item: int = 0) -> BatchResult:
    """Return the result of a sequence that ended, of the item at a place of its batch."""
    if driver.finish_reason is None:
        raise SequenceStateError(f"{driver.request.id!r} has not finished")
    n_new = driver.n_output - len(driver.request.output)
    parts = driver.reply.parts
    answer = (parts and parts.answer) or Answer("".join(driver.reply.text.parts))
    text, tokens = _echo(driver)
    token_ids = (*tokens, *driver.output[: driver.reply.text.n_fed])
    n_thought = parts.n_thought(driver.output[: driver.reply.text.n_fed]) if parts else 0
    usage = Usage(
        driver.n_given,
        driver.n_output,
        driver.n_cached,
        driver.n_shifts,
        n_thought,
        driver.n_image_tokens,
        driver.n_audio_tokens,
    )
    return BatchResult(
        id=driver.request.id,
        text=text + answer.text,
        token_ids=token_ids,
        finish_reason=driver.finish_reason,
        error=driver.error,
        usage=usage,
        timings=timings_of(driver.clock, _n_begun(driver), n_new, driver.drafted),
        seed=driver.request.sampling.seed,
        warnings=(*driver.warnings, *answer.warnings),
        tool_calls=_tool_calls(driver, answer),
        reasoning=answer.reasoning,
        logprobs=_logprobs(driver),
        prompt_logprobs=_prompt_logprobs(driver),
        stop_reason=_stop_reason(driver),
        i_item=i_item,
        origin=Origin(driver.request, driver.number, token_ids, driver.finish_reason, usage),
    )


def timings_of(
    clock: RequestClock, n_computed: int, n_output: int, drafted: DraftCounts = NO_DRAFTS
) -> Timings:
    """Return a request's times; a rate is None where nothing was timed, never a division by zero.

    Args:
        clock: when it passed its stations.
        n_computed: tokens that were computed for the first one to be sampled.
    """
    total_s = clock.after_s(clock.finished_s) or 0.0
    if clock.admitted_s is None:
        return Timings(total_s, None, total_s, None, None)
    admitted_s, first_s, last_s = clock.admitted_s, clock.first_token_s, clock.last_token_s
    return Timings(
        queue_s=admitted_s - clock.submitted_s,
        ttft_s=clock.after_s(first_s),
        total_s=total_s,
        prompt_tps=_rate(n_computed, admitted_s, clock.computed_s if first_s is None else first_s),
        generation_tps=_rate(n_output - 1, first_s, last_s),
        last_token_s=clock.after_s(last_s),
        n_draft_tokens=drafted.n_own + drafted.n_job + drafted.n_model,
        n_accepted_tokens=sum(drafted[3:]),
        n_job_draft_tokens=drafted.n_job,
        n_job_accepted_tokens=drafted.n_job_accepted,
        n_model_draft_tokens=drafted.n_model,
        n_model_accepted_tokens=drafted.n_model_accepted,
    )


def _rate(n_tokens: int, start_s: float | None, end_s: float | None) -> float | None:
    if start_s is None or end_s is None or end_s <= start_s or n_tokens < 1:
        return None
    return n_tokens / (end_s - start_s)


def _n_begun(driver: SequenceDriver) -> int:
    """Return how many tokens were computed before the first was sampled: of the prompt, and of output to go on from."""
    n_left_out = driver.window.n_left_out if driver.window else 0
    return driver.n_given + len(driver.request.output) - driver.n_reused - n_left_out


def _stop_reason(driver: SequenceDriver) -> str | int | None:
    """Return the stop string, or the caller's stop token, that ended a sequence."""
    if driver.finish_reason not in ("stop", "tool_calls"):
        return None
    last = driver.output[-1] if driver.output else None
    if last in driver.request.stop_tokens:
        return last if last in driver.request.asked_stops else None
    return driver.reply.text.stop


def _tool_calls(driver: SequenceDriver, answer: Answer) -> tuple[ToolCall, ...]:
    if not answer.calls:
        return ()
    owner, number = driver.request.owner, driver.number
    return tuple(
        ToolCall(call_id(owner, number, i), call.name, call.arguments)
        for i, call in enumerate(answer.calls)
    )


def _echo(driver: SequenceDriver) -> tuple[str, Sequence[int]]:
    """Return what stands before the answer: the prompt, where it is echoed and the sequence has run."""
    if not (driver.request.options.echo and driver.has_run):
        return "", ()
    tokens, echo = driver.given, driver.reply.echo
    if echo.text is None:
        echo.text = driver.request.prompt.prompt
    if echo.text is None:
        echo.text = b"".join(map(driver.reply.text.piece, tokens)).decode("utf-8", "replace")
    return echo.text, tokens


def _logprobs(driver: SequenceDriver) -> tuple[TokenLogprob, ...] | None:
    """Return a log-probability for each token of the result, or None where the request asks for none."""
    if driver.request.n_logprobs is None:
        return None
    return (*_echoed_logprobs(driver), *_output_logprobs(driver))


def _output_logprobs(driver: SequenceDriver) -> list[TokenLogprob]:
    """Return a log-probability for each token that was fed to the text; new ones are made."""
    request, found, text = driver.request, driver.reply.logprobs, driver.reply.text
    n_old, n_fed = len(request.output), text.n_fed  # 0 where it never ran
    found += request.output_logprobs[len(found) : n_fed]
    if (n_made := len(found)) >= n_old:
        new = driver.output[n_made:n_fed], driver.logprobs[n_made - n_old :]
        found += map(partial(_logprob, text.piece), *new)
    return found


def _echoed_logprobs(driver: SequenceDriver) -> Iterable[TokenLogprob]:
    """Return a log-probability for each token that is echoed; NaN where it is not known."""
    _, tokens = _echo(driver)
    n_top, unscored = driver.request.n_logprobs, driver.reply.echo.unscored

    def unknown(token: int) -> TokenLogprob:
        return TokenLogprob(token, driver.reply.text.piece(token), math.nan)

    scored = _scored_prompt(driver) if tokens else ()
    if scored is None:
        if not unscored:
            unscored += map(unknown, tokens)
        return unscored
    both = zip_longest(tokens, scored)
    return (unknown(token) if found is None else _with_top(found, n_top) for token, found in both)


def _prompt_logprobs(driver: SequenceDriver) -> tuple[TokenLogprob | None, ...] | None:
    """Return a log-probability for each token of the prompt; None for the first and where it was not computed."""
    found, options = _scored_prompt(driver), driver.request.options
    n_top = options.prompt_logprobs
    if not found or n_top is None or n_top == options.n_prompt_logprobs:
        return found
    return tuple(token and _with_top(token, n_top) for token in found)


def _with_top(token: TokenLogprob, n_top: int | None) -> TokenLogprob:
    if len(token.top) == len(token.top[:n_top]):
        return token
    return TokenLogprob(token.token_id, token.data, token.logprob, token.top[:n_top])


def _scored_prompt(driver: SequenceDriver) -> tuple[TokenLogprob | None, ...] | None:
    """Return the same as `_prompt_logprobs`, with as many alternatives as were computed."""
    request = driver.request
    if request.n_prompt_logprobs is None:
        return request.prompt_logprobs
    if not driver.has_run:
        return ()
    n_before = 1 + (driver.scores.first if driver.scores else 0)
    found = make_scores(driver)
    n_behind = driver.n_given - n_before - len(found)
    return (*[None] * n_before, *found, *[None] * n_behind)


def _logprob(piece: Callable[[int], bytes], token: int, found: TokenLogprobs) -> TokenLogprob:
    top = tuple(TokenLogprob(t, piece(t), logprob) for t, logprob in found.top)
    return TokenLogprob(token, piece(token), found.logprob, top)
