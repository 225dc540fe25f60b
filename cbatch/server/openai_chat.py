"""OpenAI's chat completions. Source: OpenAI's API reference, chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbatch.checks import shown
from cbatch.errors import ConfigError
from cbatch.messages import BatchPrompt
from cbatch.openai_format import chat_logprobs, chat_message, finish_of
from cbatch.server.answer_events import Called, Ended, Reasoning, Scored, Text, choices_of
from cbatch.server.call import Call
from cbatch.server.http_errors import bad_request, refused
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

    from cbatch.response import BatchResult
    from cbatch.server.answer_events import Event
    from cbatch.server.http_errors import HttpProblemError
    from cbatch.server.request_fields import Asked

OWN = ("messages",)


class ChatCall(Call):
    """One chat to answer."""

    prompt_field = "messages"

    @classmethod
    def of(cls, body: Mapping[str, Any], *, is_strict: bool = False) -> ChatCall:
        """Return the call that a body asks for. Raises a `HttpProblemError`."""
        logprobs = body.get("logprobs")
        if not isinstance(logprobs, bool | None):
            raise bad_request(f"logprobs must be true or false, not {shown(logprobs)}", "logprobs")
        asked = asked_of(body, OWN, defaults={}, is_strict=is_strict)
        prompt = chat_of(asked.own.get("messages"))
        _check_continued(asked, prompt)
        return cls(asked, [prompt])

    def body(self, results: Sequence[BatchResult], model: str) -> dict[str, Any]:
        """Return the whole answer."""
        (result,) = results
        return {
            **Head.of("chatcmpl", "chat.completion", model).as_dict(),
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices_of(result))],
            "usage": usage_of(results),
            "timings": timings_of(result),
            **extensions(result),
        }

    def _choice(self, index: int, result: BatchResult) -> dict[str, Any]:
        always: dict[str, Any] = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
        }
        return {
            "index": index,
            "message": always | chat_message(result),
            "logprobs": None if result.logprobs is None else chat_logprobs(result.logprobs),
            "finish_reason": finish_of(result),
            **choice_extensions(result, has_tokens=self.asked.has_tokens),
        }

    def stream(self, model: str) -> ChatStream:
        """Return what encodes the answer's events."""
        return ChatStream(self, Head.of("chatcmpl", "chat.completion.chunk", model))


class ChatStream(OpenAIStream):
    """Encodes the events of one chat."""

    def __init__(self, call: ChatCall, head: Head) -> None:
        super().__init__(head, has_usage=call.asked.has_usage)
        self._n_choices, self._has_tokens = call.n_choices, call.asked.has_tokens
        self._has_begun = False

    def frames(self, events: Sequence[Event]) -> bytes:
        """Return the frames of events; each choice's role comes first."""
        parts = [] if self._has_begun else [*map(self._beginning, range(self._n_choices))]
        self._has_begun = True
        parts += map(self._frame, events)
        return b"".join(parts)

    def _beginning(self, index: int) -> bytes:
        return self._delta(index, {"role": "assistant", "content": ""})

    def _frame(self, event: Event) -> bytes:
        if isinstance(event, Text):
            if self._has_tokens:
                choice = self.text_choice(event.i_choice, event.text)
                return self.chunk([{**choice, "token_ids": event.token_ids}])
            return self.text(event.i_choice, event.text) if event.text else b""
        if isinstance(event, Reasoning):
            return self._delta(event.i_choice, {"reasoning_content": event.text})
        if isinstance(event, Called):
            call = {"index": event.i_call, **event.call.as_dict()}
            return self._delta(event.i_choice, {"tool_calls": [call]})
        if isinstance(event, Scored):
            return self._delta(event.i_choice, {}, logprobs=chat_logprobs(event.tokens))
        if isinstance(event, Ended):
            return self._ended(event)
        raise TypeError(f"not an event of a chat: {event!r}")

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """Return a choice that is new text alone."""
        return _choice(index, {"content": text})

    def _delta(self, index: int, delta: Mapping[str, Any], **more: Any) -> bytes:
        return self.chunk([{**_choice(index, delta), **more}])

    def _ended(self, event: Ended) -> bytes:
        choice = {
            "index": event.i_choice,
            "delta": {},
            "finish_reason": finish_of(event.choice),
            "logprobs": None,
            **choice_extensions(event.choice, has_tokens=False),
        }
        return self.chunk([choice], **self.ending(event.whole))


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
        raise _wrong_messages(error) from None


def _message(message: Any) -> Any:
    """Return a message without nulls; a developer speaks as the system."""
    if not isinstance(message, dict):
        return message
    given = {name: value for name, value in message.items() if value is not None}
    return {**given, "role": "system"} if given.get("role") == "developer" else given


def _wrong_messages(error: ConfigError) -> HttpProblemError:
    message = str(error)
    place = message.partition(" ")[0].rstrip(":")
    is_place = place.startswith("messages[") and place.endswith("]")
    return bad_request(message, place if is_place else "messages")


def _check_continued(asked: Asked, prompt: BatchPrompt) -> None:
    """Refuse a wish about the last message that is not what is done: one of the assistant is continued."""
    wish, is_continued = asked.own.pop("continue_final_message"), False
    if prompt.messages:
        is_continued = prompt.messages[-1]["role"] == "assistant"
    if wish is not None and wish is not is_continued:
        what = "is" if is_continued else "is not"
        why = f"the last message {what} the assistant's, so it {what} continued"
        raise refused("continue_final_message", why)
