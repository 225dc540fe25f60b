"""OpenAI's chat completions. Source: OpenAI's API reference, chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cbatch.chat.openai_format import chat_message, chat_tokens
from cbatch.errors import ConfigError
from cbatch.messages import BatchPrompt
from cbatch.response import BatchResult, TokenLogprob
from cbatch.server.answer_events import Called, Event, Reasoning, Said
from cbatch.server.http_errors import bad_request
from cbatch.server.openai_answers import OpenAICall, OpenAIStream, head_of
from cbatch.server.request_fields import Dialect, asked_of, check_continued
from cbatch.support.checks import shown

DIALECT = Dialect(own=("messages",))


class ChatCall(OpenAICall):
    """One chat to answer."""

    prompt_field = "messages"
    prefix, object = "chatcmpl", "chat.completion"

    @classmethod
    def of(cls, body: Mapping[str, Any], *, is_strict: bool = False) -> ChatCall:
        """Return the call that a body asks for. Raises a `HttpProblemError`."""
        logprobs = body.get("logprobs")
        if not isinstance(logprobs, bool | None):
            raise bad_request(f"logprobs must be true or false, not {shown(logprobs)}", "logprobs")
        asked = asked_of(body, DIALECT, is_strict=is_strict)
        prompt = chat_of(body.get("messages"))
        check_continued(asked, prompt)
        return cls(asked, [prompt])

    def said(self, result: BatchResult) -> dict[str, Any]:
        """Return the message of a choice."""
        always: dict[str, Any] = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
        }
        return {"message": always | chat_message(result)}

    def scores(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return log-probabilities as a chat has them."""
        return _scores(tokens)

    def stream(self, model: str) -> ChatStream:
        """Return what encodes the answer's events."""
        return ChatStream(self, head_of(self, "chat.completion.chunk", model))


class ChatStream(OpenAIStream):
    """Encodes the events of one chat."""

    def __init__(self, call: ChatCall, head: Mapping[str, Any]) -> None:
        super().__init__(call, head)
        self._n_choices = call.n_choices

    def beginning(self) -> bytes:
        """Return the role of each choice."""
        role = {"role": "assistant", "content": ""}
        return b"".join(piece for i in range(self._n_choices) for piece in self._delta(i, role))

    def other(self, event: Event) -> Iterator[bytes]:
        """Return the frame of thinking, or of a call."""
        if isinstance(event, Reasoning):
            delta = {"reasoning_content": event.text}
            return self._delta(event.i_choice, delta, **self.of_tokens(event))
        if isinstance(event, Called):
            call = {"index": event.i_call, **event.call.as_dict()}
            return self._delta(event.i_choice, {"tool_calls": [call]})
        return super().other(event)

    def choice(self, index: int, text: str | None = None) -> dict[str, Any]:
        """Return a choice that is new text alone, or nothing."""
        return _choice(index, {} if text is None else {"content": text})

    def scores(self, event: Said) -> dict[str, Any]:
        """Return log-probabilities as a chat has them."""
        return _scores(event.logprobs or ())

    def _delta(self, index: int, delta: Mapping[str, Any], **more: Any) -> Iterator[bytes]:
        return self.chunk([{**_choice(index, delta), **more}])


def _scores(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": chat_tokens(tokens), "refusal": None}


def _choice(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def chat_of(messages: Any) -> BatchPrompt:
    """Return the chat of `messages`. Raises a `HttpProblemError`."""
    if messages is None:
        raise bad_request("messages is missing", "messages")
    if isinstance(messages, list):
        messages = [_message(message) for message in messages]
    try:
        return BatchPrompt(messages=messages)
    except ConfigError as error:
        place = str(error).partition(" ")[0].rstrip(":")
        is_place = place.startswith("messages[") and place.endswith("]")
        raise bad_request(str(error), place if is_place else "messages") from None


def _message(message: Any) -> Any:
    """Return a message without nulls; a developer speaks as the system."""
    if not isinstance(message, dict):
        return message
    given = {name: value for name, value in message.items() if value is not None}
    return {**given, "role": "system"} if given.get("role") == "developer" else given
