"""What chats and completions of OpenAI's API have in common: all but the form of text and log-probabilities."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from cbatch.chat.openai_format import NEAREST_FINISH, finish_of, token_as_json
from cbatch.response import BatchResult, Timings, TokenLogprob
from cbatch.server.answer_events import Ended, Event, Said, Text, choices_of
from cbatch.server.call import Call
from cbatch.server.exchange import dumps
from cbatch.server.sse import DONE, StreamEncoder, frame, frame_around, frame_pieces
from cbatch.support.lazy_json import LazyList


def head_of(call: OpenAICall, object: str, model: str) -> dict[str, Any]:
    """Return what is the same in all parts of a new answer to a call."""
    return {
        "id": f"{call.prefix}-{secrets.token_hex(12)}",
        "object": object,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": call.fingerprint,
    }


class OpenAICall(Call):
    """A chat or completions to answer; choices count through the prompts."""

    prefix: ClassVar[str]
    """How ids of answers begin."""
    object: ClassVar[str]
    """What an answer is called."""

    @abstractmethod
    def said(self, result: BatchResult) -> dict[str, Any]:
        """Return the text of a whole choice, and what stands around it."""

    @abstractmethod
    def scores(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probabilities of a whole choice."""

    def body(self, results: Sequence[BatchResult], model: str) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [choice for result in results for choice in choices_of(result)]
        more = {"timings": timings_of(results[0])} if len(results) == 1 else {}
        return {
            **head_of(self, self.object, model),
            "choices": LazyList(self._choice, [*enumerate(choices)]),
            "usage": usage_of(results),
            **more,
            **_extensions_of_all(results),
        }

    def _choice(self, told: tuple[int, BatchResult]) -> dict[str, Any]:
        index, result = told
        return {
            "index": index,
            **self.said(result),
            "logprobs": None if result.logprobs is None else self.scores(result.logprobs),
            "finish_reason": finish_of(result),
            **choice_extensions(result, has_tokens=self.asked.has_tokens),
        }


class OpenAIStream(StreamEncoder):
    """Encodes the events of an answer that both dialects have."""

    def __init__(self, call: OpenAICall, head: Mapping[str, Any]) -> None:
        super().__init__()
        self._head = head
        self._has_usage = call.asked.common.stream_options.include_usage
        self._has_tokens = call.asked.has_tokens
        self._is_alone = len(call.prompts) == 1
        self._results: list[BatchResult] = []
        self._around: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def choice(self, index: int, text: str | None = None) -> dict[str, Any]:
        """Return a choice that is new text alone, or nothing."""

    @abstractmethod
    def scores(self, event: Said) -> dict[str, Any]:
        """Return the log-probabilities of an event, which has some."""

    def other(self, event: Event) -> Iterator[bytes]:
        """Return the frame of an event that is neither text nor an end."""
        raise TypeError(f"not an event of such an answer: {event!r}")

    def frame(self, event: Event) -> Iterable[bytes]:
        """Return the frames of one event, in pieces."""
        if isinstance(event, Text):
            if more := self.of_tokens(event):
                return self.chunk([{**self.choice(event.i_choice, event.text), **more}])
            return [self.text(event.i_choice, event.text)] if event.text else ()
        if isinstance(event, Ended):
            return self._ended(event)
        return self.other(event)

    def of_tokens(self, event: Said) -> dict[str, Any]:
        """Return what a choice says of its new tokens, where that is asked for."""
        more: dict[str, Any] = {}
        if event.logprobs:
            more["logprobs"] = self.scores(event)
        if self._has_tokens:
            more["token_ids"] = event.token_ids
        return more

    def _ended(self, event: Ended) -> Iterator[bytes]:
        ending = self._ending(event.whole)
        choice = {
            **self.choice(event.i_choice),
            **self._no_tokens(event),
            "finish_reason": finish_of(event.choice),
            **choice_extensions(event.choice, has_tokens=False),
        }
        return self.chunk([choice], **ending)

    def _no_tokens(self, event: Ended) -> dict[str, Any]:
        """Return what a choice without a token says of its tokens, which no event before has told."""
        if event.choice.token_ids:
            return {}
        more: dict[str, Any] = {"token_ids": []} if self._has_tokens else {}
        if event.choice.logprobs is not None:
            more["logprobs"] = self.scores(Text(event.i_choice, "", (), ()))
        return more

    def text(self, index: int, text: str) -> bytes:
        """Return the frame of new text: most frames of a stream, so all but the text is made once."""
        around = self._around.get(index)
        if around is None:
            mark = f"text of {self._head['id']}"  # which no client can know
            value = self._chunk([self.choice(index, mark)])
            around = self._around[index] = frame_around(value, mark)
        before, after = around
        return before + dumps(text) + after

    def chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> Iterator[bytes]:
        """Return the pieces of the frame of some choices."""
        return frame_pieces(self._chunk(choices, **more))

    def _chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        usage = {"usage": None} if self._has_usage else {}
        return {**self._head, "choices": choices, **usage, **more}

    def _ending(self, result: BatchResult | None) -> dict[str, Any]:
        """Return what a chunk says besides at a prompt's end; None for a choice that is not its prompt's last."""
        if result is None:
            return {}
        self._results.append(result)
        timings = {"timings": timings_of(result)} if self._is_alone else {}
        return timings | extensions(result)

    def progress(self, told: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the frames of how far the prompt is, as llama-server's clients read it."""
        yield self.begun()
        yield from self.chunk([self.choice(0)], prompt_progress=told)

    def end(self) -> bytes:
        """Return the last frames."""
        if not self._has_usage:
            return DONE
        timings = [timings_of(result) for result in self._results] if self._is_alone else []
        more = {"timings": timings[-1]} if timings else {}
        last = {**self._head, "choices": [], "usage": usage_of(self._results), **more}
        return frame(last) + DONE


def usage_of(results: Sequence[BatchResult]) -> dict[str, Any]:
    """Return the tokens of all prompts and answers."""
    n_prompt = sum(result.usage.prompt_tokens for result in results)
    n_output = sum(result.usage.completion_tokens for result in results)
    n_thought = sum(result.usage.reasoning_tokens for result in results)
    details = {"cached_tokens": sum(result.usage.cached_tokens for result in results)}
    for name in ("image_tokens", "audio_tokens"):
        if n := sum(getattr(result.usage, name) for result in results):
            details[name] = n
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "total_tokens": n_prompt + n_output,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": n_thought},
    }


def timings_of(result: BatchResult) -> dict[str, Any]:
    """Return a prompt's times as llama-server has them; 0 of what was not timed, as of one token's rate.

    Source: llama.cpp tools/server, result_timings.
    """
    times, usage = result.timings, result.usage
    prompt_tps, output_tps = times.prompt_tps or 0.0, times.generation_tps or 0.0
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": usage.prompt_tokens - usage.cached_tokens,
        "prompt_ms": times.prompt_s * 1e3,
        "prompt_per_token_ms": 1e3 / prompt_tps if prompt_tps else 0.0,
        "prompt_per_second": prompt_tps,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": times.output_s * 1e3,
        "predicted_per_token_ms": 1e3 / output_tps if output_tps else 0.0,
        "predicted_per_second": output_tps,
        "queue_ms": times.queue_s * 1e3,
        **_drafts_of(times),
    }


def _drafts_of(times: Timings) -> dict[str, int]:
    """Return how many draft tokens there were, if any: all of them, and those of some sources."""
    if not times.n_draft_tokens:
        return {}
    return {
        "draft_n": times.n_draft_tokens,
        "draft_n_accepted": times.n_accepted_tokens,
        "draft_job_n": times.n_job_draft_tokens,
        "draft_job_n_accepted": times.n_job_accepted_tokens,
        "draft_model_n": times.n_model_draft_tokens,
        "draft_model_n_accepted": times.n_model_accepted_tokens,
    }


def extensions(result: BatchResult) -> dict[str, Any]:
    """Return the fields that OpenAI's format lacks, where there are any."""
    more: dict[str, Any] = {}
    reasons = [choice.finish_reason for choice in choices_of(result)]
    if any(reason in NEAREST_FINISH for reason in reasons):
        more["finish_reasons"] = reasons
    if result.prompt_logprobs is not None:
        more["prompt_logprobs"] = LazyList(token_as_json, result.prompt_logprobs)
    if result.choice_probs is not None:
        more["choice_probs"] = dict(result.choice_probs)
    if result.warnings:
        more["warnings"] = [*result.warnings]
    return {"cbatch": more} if more else {}


def _extensions_of_all(results: Sequence[BatchResult]) -> dict[str, Any]:
    """Return the fields that OpenAI's format lacks: of several prompts a list, which has an object for each."""
    found = [extensions(result) for result in results]
    if len(found) == 1:
        return found[0]
    return {"cbatch": [each.get("cbatch", {}) for each in found]} if any(found) else {}


def choice_extensions(result: BatchResult, *, has_tokens: bool) -> dict[str, Any]:
    """Return vLLM's and llama-server's fields of a choice."""
    more: dict[str, Any] = {}
    if result.stop_reason is not None:
        more["stop_reason"] = result.stop_reason
    if has_tokens:
        more["token_ids"] = [*result.token_ids]
    return more
