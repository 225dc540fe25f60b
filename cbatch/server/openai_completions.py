"""OpenAI's completions: text or token ids, one prompt or several. Source: OpenAI's API reference, completions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.chat.openai_format import TextPlace, completion_logprobs
from cbatch.errors import ConfigError
from cbatch.messages import BatchPrompt
from cbatch.server.call import EMPTY
from cbatch.server.http_errors import bad_request
from cbatch.server.openai_answers import OpenAICall, OpenAIStream, head_of
from cbatch.server.request_fields import Dialect, asked_of
from cbatch.support.checks import shown
from cbatch.support.plain import int_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.options import RunOptions
    from cbatch.response import BatchResult, TokenLogprob
    from cbatch.server.answer_events import Said

_OF_CHATS = ("continue_final_message", "add_generation_prompt")
"""Names that concern the messages of a chat, so that they do nothing here."""

N_TOKENS = 16
"""Tokens of an answer where the request names no cap. Source: OpenAI's API reference, completions, `max_tokens`."""
OF_TEXT: Mapping[str, Any] = {"chat_template_kwargs": {}}
"""The server's variables of the chat template are not for these prompts."""

DIALECT = Dialect(own=("prompt",), defaults={"max_tokens": N_TOKENS, **OF_TEXT})


class CompletionCall(OpenAICall):
    """Prompts to complete."""

    prompt_field = "prompt"
    prefix, object = "cmpl", "text_completion"

    @classmethod
    def of(cls, body: Mapping[str, Any], *, is_strict: bool = False) -> CompletionCall:
        """Return the call that a body asks for. Raises a `HttpProblemError`."""
        logprobs = body.get("logprobs")
        if logprobs is not None and int_of(logprobs) is None:
            raise bad_request(f"logprobs must be a number, not {shown(logprobs)}", "logprobs")
        asked = asked_of(body, DIALECT, is_strict=is_strict)
        asked.ignored += moot_in(body)
        asked.options = _with_end(asked.options)
        options = asked.options
        if asked.common.stream and options.n_choices > (options.n or 1):
            raise bad_request(
                "best_of cannot be streamed: the best answers are known only at the end", "best_of"
            )
        return cls(asked, _prompts(body))

    @property
    def has_tops(self) -> bool:
        """Whether the likeliest tokens are asked for."""
        return bool(self.asked.options.top_logprobs)

    def said(self, result: BatchResult) -> dict[str, Any]:
        """Return the text of a choice."""
        return {"text": result.text}

    def scores(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return log-probabilities as a completion has them."""
        return completion_logprobs(tokens, has_tops=self.has_tops)

    def stream(self, model: str) -> CompletionStream:
        """Return what encodes the answer's events."""
        return CompletionStream(self, head_of(self, self.object, model))


class CompletionStream(OpenAIStream):
    """Encodes the events of some completions."""

    def __init__(self, call: CompletionCall, head: Mapping[str, Any]) -> None:
        super().__init__(call, head)
        self._has_tops = call.has_tops
        self._places: dict[int, TextPlace] = {}
        """How far the text of each choice is scored."""

    def choice(self, index: int, text: str | None = None) -> dict[str, Any]:
        """Return a choice that is new text alone, or nothing."""
        return {"index": index, "text": text or "", "logprobs": None, "finish_reason": None}

    def scores(self, event: Said) -> dict[str, Any]:
        """Return log-probabilities as a completion has them; their places run on through the chunks."""
        place = self._places.setdefault(event.i_choice, TextPlace())
        return completion_logprobs(event.logprobs or (), has_tops=self._has_tops, place=place)


def _with_end(options: RunOptions) -> RunOptions:
    """Have the token that ends an answer counted among scored ones, or their sum would lack it.

    Source: lm-evaluation-harness, `local-completions`, which leaves out the last log-probability.
    """
    if options.echo and options.logprobs and not options.stop and options.include_stop is None:
        return replace(options, include_stop=True)
    return options


def moot_in(body: Mapping[str, Any]) -> list[str]:
    """Return the fields of a body that concern only chats."""
    return [name for name in _OF_CHATS if body.get(name) is not None]


def _prompts(body: Mapping[str, Any]) -> list[BatchPrompt]:
    """Return prompts: a text, token ids, or a list of these; null is an empty text. Raises a `HttpProblemError`."""
    if "prompt" not in body:
        raise bad_request("prompt is missing", "prompt")
    said = "" if body["prompt"] is None else body["prompt"]
    is_one = isinstance(said, str) or (isinstance(said, list) and said and is_token(said[0]))
    listed = [said] if is_one else said
    if not isinstance(listed, list) or not listed:
        words = "a string, a list of token ids, or a list of these"
        raise bad_request(f"prompt must be {words}, not {shown(said)}", "prompt")
    return [
        prompt_of(item, "prompt" if is_one else f"prompt[{i}]") for i, item in enumerate(listed)
    ]


def is_token(value: Any) -> bool:
    """Whether a value can be the id of a token."""
    return int_of(value) is not None


def prompt_of(item: Any, place: str) -> BatchPrompt:
    """Return the prompt of a text or token ids; `place` is where it stands. Raises a `HttpProblemError`."""
    try:
        if isinstance(item, str):
            return BatchPrompt(prompt=item) if item else EMPTY
        if isinstance(item, list):
            return BatchPrompt(tokens=item)
    except ConfigError as error:
        raise bad_request(f"{place}: {error}", "prompt") from None
    raise bad_request(
        f"{place} must be a string or a list of token ids, not {shown(item)}", "prompt"
    )
