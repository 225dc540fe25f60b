"""Anthropic's messages, and their tokens counted. Source: Anthropic's API reference, messages and streaming."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.server.anthropic_fields import read_messages
from cbatch.server.call import Call
from cbatch.server.exchange import dumps
from cbatch.server.request_fields import check_continued
from cbatch.server.sse import BlockStream, named_frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cbatch.response import BatchResult, ToolCall
    from cbatch.server.http_errors import HttpProblemError
    from cbatch.support.model_facts import ModelFacts

_DELTA = "content_block_delta"

_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "window": "model_context_window_exceeded"}
"""Finish reasons, and Anthropic's; the others are `max_tokens`."""


class MessagesCall(Call):
    """One message to answer."""

    prompt_field = "messages"

    @classmethod
    def of(
        cls, body: Mapping[str, Any], *, is_strict: bool = False, is_capped: bool = True
    ) -> MessagesCall:
        """Return the call that a body asks for; `is_capped` as for `read_messages`. Raises a `HttpProblemError`."""
        asked, prompt = read_messages(body, is_strict=is_strict, is_capped=is_capped)
        check_continued(asked, prompt)
        return cls(asked, [prompt])

    def see_facts(self, facts: ModelFacts) -> None:
        """See what the model is: where its thinking cannot be limited, the limit is ignored."""
        super().see_facts(facts)
        asked = self.asked
        if asked.fields.get("thinking_budget") == "thinking" and not facts.limits_thinking:
            asked.options = replace(asked.options, thinking_budget=None)
            asked.ignored.append("thinking.budget_tokens")

    @property
    def is_counted(self) -> bool:
        """Whether the prompt's tokens are counted before it runs: a stream begins with their number."""
        return self.asked.common.stream

    def body(self, results: Sequence[BatchResult], model: str) -> dict[str, Any]:
        """Return the whole answer."""
        (result,) = results
        content: list[dict[str, Any]] = []
        if result.reasoning:
            signature = _signature(hashlib.sha256(result.reasoning.encode()))
            content.append(
                {"type": "thinking", "thinking": result.reasoning, "signature": signature}
            )
        if result.text or not (content or result.tool_calls or self.asked.options.prefill_only):
            content.append(_text(result.text))
        content += [_tool_use(call, json.loads(call.arguments)) for call in result.tool_calls]
        return {**_message(model), "content": content, **_ending(result), "usage": _usage(result)}

    def stream(self, model: str) -> MessagesStream:
        """Return what encodes the answer's events."""
        return MessagesStream(self, model)


class MessagesStream(BlockStream):
    """Encodes the events of one message."""

    def __init__(self, call: MessagesCall, model: str) -> None:
        super().__init__()
        self._call, self._model = call, model
        self._open: str | None = None
        """The type of the block that is open."""
        self._n_blocks = 0
        self._thought = hashlib.sha256()

    def end(self) -> bytes:
        """Return the last frame."""
        return named_frame({"type": "message_stop"})

    def idle(self) -> bytes:
        """Return what is sent in silence; a message begins before."""
        return self.begun() + named_frame({"type": "ping"})

    def error(self, problem: HttpProblemError) -> bytes:
        """Return the frame of an error, behind which nothing comes."""
        return named_frame(problem.as_anthropic())

    def beginning(self) -> bytes:
        """Return the beginning of the message."""
        usage = _tokens(self._call.n_prompt_tokens, 0, 0)
        nothing: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
        }
        message = {**_message(self._model), **nothing, "usage": usage}
        return named_frame({"type": "message_start", "message": message})

    def said(self, text: str) -> Iterator[bytes]:
        """Yield the delta of new text."""
        yield self._opened(_text(""))
        yield self._delta("text_delta", "text", text)

    def thought(self, text: str) -> Iterator[bytes]:
        """Yield the delta of new thinking."""
        yield self._opened({"type": "thinking", "thinking": "", "signature": ""})
        self._thought.update(text.encode())
        yield self._delta("thinking_delta", "thinking", text)

    def called(self, call: ToolCall) -> Iterator[bytes]:
        """Yield the block of a tool call."""
        yield self._opened(_tool_use(call, {}), is_new=True)
        yield self._delta("input_json_delta", "partial_json", call.arguments)

    def ended(self, result: BatchResult) -> Iterator[bytes]:
        """Yield the end of the last block, and why the answer ended."""
        if not self._n_blocks and not self._call.asked.options.prefill_only:
            yield self._opened(_text(""))
        yield self._closed()
        delta = {"type": "message_delta", "delta": _ending(result), "usage": _usage(result)}
        yield named_frame(delta)

    # ---- blocks, of which one is open at a time ----

    def _opened(self, block: Mapping[str, Any], *, is_new: bool = False) -> bytes:
        """Return the frames that open a block, unless one of its type is open."""
        if self._open == block["type"] and not is_new:
            return b""
        closed = self._closed()
        self._open = block["type"]
        self._n_blocks += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + named_frame(start)

    def _closed(self) -> bytes:
        """Return the frames that close the open block; that of a thinking signs it."""
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta("signature_delta", "signature", _signature(self._thought))
            self._thought = hashlib.sha256()
        self._open = None
        return signed + named_frame({"type": "content_block_stop", "index": self._index})

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        """Return the frame of a block's next part: most frames of a stream, so all but the text is written as it is."""
        head = f'event: {_DELTA}\ndata: {{"type":"{_DELTA}","index":{self._index},"delta":'
        return f'{head}{{"type":"{kind}","{key}":'.encode() + dumps(text) + b"}}\n\n"

    @property
    def _index(self) -> int:
        return self._n_blocks - 1


def _message(model: str) -> dict[str, Any]:
    """Return what is known of a message before its answer."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "container": None,
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _tool_use(call: ToolCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    caller = {"type": "direct"}
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": arguments,
        "caller": caller,
    }


def _signature(digest: Any) -> str:
    """Return what stands for a signature, which clients keep and send back: a digest, which nobody checks."""
    return base64.b64encode(digest.digest()).decode()


def _ending(result: BatchResult) -> dict[str, Any]:
    """Return why an answer ended. A stop string is told; a stop token is an end as the model's own."""
    reason, stop = _STOPS.get(result.finish_reason, "max_tokens"), None
    if reason == "end_turn" and isinstance(result.stop_reason, str):
        reason, stop = "stop_sequence", result.stop_reason
    return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}


def _usage(result: BatchResult) -> dict[str, Any]:
    usage = result.usage
    tokens = _tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    nulls = dict.fromkeys(("cache_creation", "inference_geo", "server_tool_use", "service_tier"))
    details = {"thinking_tokens": usage.reasoning_tokens}
    return {**tokens, "output_tokens_details": details, **nulls}


def _tokens(n_prompt: int, n_cached: int, n_output: int) -> dict[str, Any]:
    """Return tokens as Anthropic counts them: those of a cache are not input."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_output,
    }
