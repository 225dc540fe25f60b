"""OpenAI's completions: text or token ids, one prompt or several. Source: OpenAI's API reference, completions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.checks import shown
from cbatch.errors import ConfigError
from cbatch.messages import BatchPrompt
from cbatch.openai_format import completion_logprobs, finish_of
from cbatch.plain import int_of
from cbatch.server.answer_events import Ended, Scored, Text, choices_of
from cbatch.server.call import Call
from cbatch.server.http_errors import bad_request
from cbatch.server.openai_answers import (
    Head,
    OpenAIStream,
    choice_extensions,
    extensions,
    timings_of,
    usage_of,
)
from cbatch.server.request_fields import asked_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.options import RunOptions
    from cbatch.response import BatchResult
    from cbatch.server.answer_events import Event

OWN = ("prompt",)

N_TOKENS = 16
"""Tokens of an answer where the request names no cap. Source: OpenAI's API reference, completions, `max_tokens`."""


class CompletionCall(Call):
    """Prompts to complete."""

    prompt_field = "prompt"

    @classmethod
    def of(cls, body: Mapping[str, Any], *, is_strict: bool = False) -> CompletionCall:
        """Return the call that a body asks for. Raises a `HttpProblemError`."""
        logprobs = body.get("logprobs")
        if logprobs is not None and int_of(logprobs) is None:
            raise bad_request(f"logprobs must be a number, not {shown(logprobs)}", "logprobs")
        asked = asked_of(body, OWN, defaults={"max_tokens": N_TOKENS}, is_strict=is_strict)
        asked.own.pop("continue_final_message")
        asked.options = _with_end(asked.options)
        options = asked.options
        if asked.is_streamed and options.n_choices > (options.n or 1):
            raise bad_request(
                "best_of cannot be streamed: its answers are known at the end", "best_of"
            )
        return cls(asked, _prompts(asked.own.get("prompt")))

    def body(self, results: Sequence[BatchResult], model: str) -> dict[str, Any]:
        """Return the whole answer; choices count through the prompts."""
        choices = [choice for result in results for choice in choices_of(result)]
        more: dict[str, Any] = {}
        if len(results) == 1:
            more = {"timings": timings_of(results[0]), **extensions(results[0])}
        return {
            **Head.of("cmpl", "text_completion", model).as_dict(),
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage_of(results),
            **more,
        }

    def _choice(self, index: int, result: BatchResult) -> dict[str, Any]:
        return {
            "index": index,
            "text": result.text,
            "logprobs": None if result.logprobs is None else completion_logprobs(result.logprobs),
            "finish_reason": finish_of(result),
            **choice_extensions(result, has_tokens=self.asked.has_tokens),
        }

    def stream(self, model: str) -> CompletionStream:
        """Return what encodes the answer's events."""
        return CompletionStream(self, Head.of("cmpl", "text_completion", model))


class CompletionStream(OpenAIStream):
    """Encodes the events of some completions."""

    def __init__(self, call: CompletionCall, head: Head) -> None:
        super().__init__(head, has_usage=call.asked.has_usage)
        self._has_tokens, self._is_alone = call.asked.has_tokens, len(call.prompts) == 1

    def frames(self, events: Sequence[Event]) -> bytes:
        """Return the frames of events."""
        return b"".join(map(self._frame, events))

    def _frame(self, event: Event) -> bytes:
        if isinstance(event, Text):
            if self._has_tokens:
                return self._part(event.i_choice, event.text, token_ids=event.token_ids)
            return self.text(event.i_choice, event.text) if event.text else b""
        if isinstance(event, Scored):
            return self._part(event.i_choice, "", logprobs=completion_logprobs(event.tokens))
        if isinstance(event, Ended):
            more = choice_extensions(event.choice, has_tokens=False)
            ending = self.ending(event.whole)
            reason = finish_of(event.choice)
            choice = self._choice(event.i_choice, "", finish_reason=reason, **more)
            return self.chunk([choice], **(ending if self._is_alone else {}))
        raise TypeError(f"not an event of a completion: {event!r}")

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """Return a choice that is new text alone."""
        return self._choice(index, text)

    def _part(self, index: int, text: str, **more: Any) -> bytes:
        return self.chunk([self._choice(index, text, **more)])

    @staticmethod
    def _choice(index: int, text: str, **more: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}


def _with_end(options: RunOptions) -> RunOptions:
    """Have the token that ends an answer counted among scored ones, or their sum would lack it.

    Source: lm-evaluation-harness, `local-completions`, which leaves out the last log-probability.
    """
    if options.echo and options.logprobs and not options.stop and options.include_stop is None:
        return replace(options, include_stop=True)
    return options


def _prompts(said: Any) -> list[BatchPrompt]:
    """Return prompts: a text, token ids, or a list of these. Raises a `HttpProblemError`."""
    if said is None:
        raise bad_request("prompt is missing", "prompt")
    is_one = isinstance(said, str) or (isinstance(said, list) and said and _is_token(said[0]))
    listed = [said] if is_one else said
    if not isinstance(listed, list) or not listed:
        words = "a string, a list of token ids, or a list of these"
        raise bad_request(f"prompt must be {words}, not {shown(said)}", "prompt")
    return [_prompt(item, "prompt" if is_one else f"prompt[{i}]") for i, item in enumerate(listed)]


def _is_token(value: Any) -> bool:
    return int_of(value) is not None


def _prompt(item: Any, place: str) -> BatchPrompt:
    try:
        if isinstance(item, str):
            return BatchPrompt(prompt=item)
        if isinstance(item, list):
            return BatchPrompt(tokens=item)
    except ConfigError as error:
        raise bad_request(f"{place}: {error}", "prompt") from None
    raise bad_request(f"{place} must be a string or token ids, not {shown(item)}", "prompt")
