"""OpenAI's Responses, without a state. Source: OpenAI's API reference, responses and their streaming."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from cbatch.chat.openai_format import chat_tokens
from cbatch.server.answer_events import Event, Said
from cbatch.server.call import Call
from cbatch.server.exchange import dumps
from cbatch.server.openai_answers import extensions
from cbatch.server.request_fields import RequestFields, check_continued
from cbatch.server.responses_fields import read_response, repeated
from cbatch.server.sse import BlockStream, named_pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult, TokenLogprob, ToolCall
    from cbatch.server.http_errors import HttpProblemError

_CUT = ("length", "window", "timeout", "cancelled")
"""Finish reasons of answers that are not complete."""

_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""What a response tells of how it was sampled."""


class ResponsesCall(Call):
    """One response to make."""

    prompt_field = "input"

    def __init__(
        self, asked: RequestFields, prompts: Sequence[BatchPrompt], said: Mapping[str, Any]
    ) -> None:
        super().__init__(asked, prompts)
        self.said = said

    @classmethod
    def of(cls, body: Mapping[str, Any], *, is_strict: bool = False) -> ResponsesCall:
        """Return the call that a body asks for. Raises a `HttpProblemError`."""
        asked, prompt = read_response(body, is_strict=is_strict)
        check_continued(asked, prompt)
        return cls(asked, [prompt], repeated(body))

    def body(self, results: Sequence[BatchResult], model: str) -> dict[str, Any]:
        """Return the whole answer."""
        (result,) = results
        status, output = "completed", []
        if result.reasoning:
            output.append(_thought(_id("rs"), result.reasoning, status))
        if result.text or not (output or result.tool_calls):
            output.append(_message(_id("msg"), [_part(result.text, result.logprobs or ())], status))
        output += [_called(_id("fc"), call, call.arguments, status) for call in result.tool_calls]
        output[-1]["status"] = _status(result)  # the others had an end
        return _ended(self.response(model), output, result)

    def response(self, model: str) -> dict[str, Any]:
        """Return a new response before it has any output."""
        sampling = self.sampling
        nulls = ("completed_at", "error", "incomplete_details", "usage", "conversation", "prompt")
        return {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "background": False,
            "store": False,
            "service_tier": "default",
            "previous_response_id": None,
            **dict.fromkeys(nulls),
            **self.said,
            **{name: getattr(sampling, name) for name in _SAMPLED},
        }

    def stream(self, model: str) -> ResponsesStream:
        """Return what encodes the answer's events."""
        repeated = {name: value for name, value in self.said.items() if name not in _SAMPLED}
        return ResponsesStream(self.response(model), repeated)


class ResponsesStream(BlockStream):
    """Encodes the events of one response."""

    def __init__(self, response: Mapping[str, Any], repeated: Mapping[str, Any]) -> None:
        """Make one. `repeated` are fields of the response that never change and may be large: they are encoded once."""
        super().__init__()
        self._response = {name: value for name, value in response.items() if name not in repeated}
        self._repeated = dumps(repeated)[1:-1]
        self._output: list[dict[str, Any]] = []
        self._open: list[str] = []
        """The parts of the text of the item that is open."""
        self._is_open = False
        self._scores: list[TokenLogprob] = []
        """Log-probabilities of all tokens so far, those of thinking too."""
        self._n_told = 0
        """How many of them stand beside a delta of the text."""
        self._n_events = 0

    def error(self, problem: HttpProblemError) -> bytes:
        """Return the frames of an error: a response that failed."""
        error = {"code": problem.code or "server_error", "message": problem.message}
        failed = {"status": "failed", "error": error, "output": self._output}
        return self.begun() + b"".join(self._told("failed", {**self._response, **failed}))

    def _event(self, kind: str, **more: Any) -> Iterator[bytes]:
        value = {"type": f"response.{kind}", "sequence_number": self._n_events, **more}
        self._n_events += 1
        return named_pieces(value)

    def _told(self, kind: str, response: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the frame of an event with the whole response."""
        pieces = self._event(kind, response=response)
        if not self._repeated:
            yield from pieces
            return
        last = end = b""
        for piece in pieces:
            yield last
            last, end = end, piece
        yield last.removesuffix(b"}}") + b"," + self._repeated + b"}}" + end

    def beginning(self) -> bytes:
        """Return that the response was created, and is in progress."""
        kinds = ("created", "in_progress")
        return b"".join(piece for kind in kinds for piece in self._told(kind, self._response))

    def frame(self, event: Event) -> Iterable[bytes]:
        """Return the frames of one event, whose log-probabilities are kept for the item's end."""
        if isinstance(event, Said) and event.logprobs:
            self._scores += event.logprobs
        return super().frame(event)

    # ---- items, of which one is open at a time ----

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    @property
    def _kind(self) -> str:
        return self._output[-1]["type"] if self._is_open else ""

    def _added(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._closed("completed")
        self._output.append(item)
        self._is_open, self._open = True, []
        index = len(self._output) - 1
        yield from self._event("output_item.added", output_index=index, item=item)

    def said(self, text: str) -> Iterator[bytes]:
        """Yield the delta of new text."""
        if self._kind != "message":
            yield from self._added(_message(_id("msg"), [], "in_progress"))
            part = _part("", [])
            yield from self._event("content_part.added", **self._place, content_index=0, part=part)
        self._open.append(text)
        if not text:
            return
        new, self._n_told = chat_tokens(self._scores[self._n_told :]), len(self._scores)
        more = {**self._place, "content_index": 0, "delta": text, "logprobs": new}
        yield from self._event("output_text.delta", **more)

    def thought(self, text: str) -> Iterator[bytes]:
        """Yield the delta of new thinking."""
        if self._kind != "reasoning":
            yield from self._added(_thought(_id("rs"), None, "in_progress"))
        self._open.append(text)
        more = {**self._place, "content_index": 0, "delta": text}
        yield from self._event("reasoning_text.delta", **more)

    def called(self, call: ToolCall) -> Iterator[bytes]:
        """Yield the item of a tool call."""
        yield from self._added(_called(_id("fc"), call, "", "in_progress"))
        self._open.append(call.arguments)
        more = {**self._place, "delta": call.arguments}
        yield from self._event("function_call_arguments.delta", **more)

    def _closed(self, status: str) -> Iterator[bytes]:
        if not self._is_open:
            return
        item, text, place = self._output[-1], "".join(self._open), self._place
        kind = item["type"]
        if kind == "message":
            part = _part(text, self._scores)
            at = {**place, "content_index": 0}
            scores = chat_tokens(self._scores)
            yield from self._event("output_text.done", **at, text=text, logprobs=scores)
            yield from self._event("content_part.done", **at, part=part)
            item = {**item, "content": [part]}
            self._scores, self._n_told = [], 0
        elif kind == "reasoning":
            yield from self._event("reasoning_text.done", **place, content_index=0, text=text)
            item = _thought(item["id"], text, status)
        else:
            more = {**place, "name": item["name"], "arguments": text}
            yield from self._event("function_call_arguments.done", **more)
            item = {**item, "arguments": text}
        item = {**item, "status": status}
        self._output[-1], self._is_open = item, False
        index = len(self._output) - 1
        yield from self._event("output_item.done", output_index=index, item=item)

    def ended(self, result: BatchResult) -> Iterator[bytes]:
        """Yield the end of the last item, and of the response."""
        if not self._output:
            yield from self.said("")
        status = _status(result)
        yield from self._closed(status)
        response = _ended(self._response, self._output, result)
        yield from self._told(status, response)


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _status(result: BatchResult) -> str:
    return "incomplete" if result.finish_reason in _CUT else "completed"


def _part(text: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    scores = chat_tokens(tokens)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def _message(id: str, content: Sequence[Any], status: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [*content],
    }


def _thought(id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    item = {"id": id, "type": "reasoning", "summary": [], "content": content}
    return {**item, "encrypted_content": None, "status": status}


def _called(id: str, call: ToolCall, arguments: str, status: str) -> dict[str, Any]:
    said = {"call_id": call.id, "name": call.name, "arguments": arguments}
    return {"id": id, "type": "function_call", **said, "status": status}


def _ended(
    response: Mapping[str, Any], output: Sequence[Any], result: BatchResult
) -> dict[str, Any]:
    usage, status = _usage(result), _status(result)
    is_cut = status == "incomplete"
    return {
        **response,
        "status": status,
        "completed_at": None if is_cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [*output],
        "usage": usage,
        **extensions(result),
    }


def _usage(result: BatchResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
