"""Answers as JSON lines, those of cbatch and those of OpenAI's batch files.

Source: OpenAI's API reference, batch: the request output object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from cbatch.chat.openai_format import (
    NEAREST_FINISH,
    chat_logprobs,
    chat_message,
    completion_logprobs,
    finish_of,
    tokens_as_json,
)
from cbatch.chat.vector_calls import VectorPrompt
from cbatch.errors import (
    BannedTokensError,
    CBatchError,
    DeadlineError,
    EngineError,
    PromptError,
    PromptTooLongError,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
    UnsupportedOptionError,
)
from cbatch.files.input.item import InputLineError, Item, ItemError, bytes_of
from cbatch.files.input.json_requests import CHAT, COMPLETIONS, RequestEcho
from cbatch.files.output.encoders import Known, TraceableEncoder, dump
from cbatch.response import DRAFT_COUNTS, BatchResult, Timings, Usage

_USAGE = tuple(f.name for f in fields(Usage))
_TIMINGS = tuple(f.name for f in fields(Timings) if f.name not in DRAFT_COUNTS)


def _error_as_json(error: CBatchError) -> dict[str, object]:
    return {"type": type(error).__name__, "message": str(error)}


# ---- cbatch ----


class CbatchEncoder(TraceableEncoder):
    """Writes cbatch's lines of results."""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return a result as a line."""
        return dump({**result_as_json(result), "id": item.id, "digest": digest.hex()})

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the line of an item that could not run."""
        said = {"type": "ConfigError", "message": f"{item.place}: {error.message}"}
        more = {"code": error.code, **({"param": error.param} if error.param else {})}
        return dump({"id": item.id, "text": "", "finish_reason": "error", "error": said | more})

    def known(self, record: Mapping[str, object]) -> Known | None:
        """Return the item of a record; see `TraceableEncoder.known`."""
        id, error = record.get("id"), record.get("error")
        digest = _digest_in(record.get("digest"))
        if not isinstance(id, str) or not (digest or (error and "digest" not in record)):
            raise InputLineError("no_record", "is not an answer of cbatch")
        return self._known(id, digest, is_error=error is not None)


def result_as_json(result: BatchResult) -> dict[str, object]:
    """Return a result as it is in cbatch's lines."""
    return {
        "id": result.id,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": result.error and _error_as_json(result.error),
        "usage": {name: getattr(result.usage, name) for name in _USAGE},
        "timings": _times_as_json(result.timings),
        "seed": result.seed,
        **_more(result),
    }


def _times_as_json(timings: Timings) -> dict[str, object]:
    """Return the times of a result, and the numbers of its draft tokens if there were any."""
    names = (*_TIMINGS, *DRAFT_COUNTS) if timings.n_draft_tokens else _TIMINGS
    return {name: getattr(timings, name) for name in names}


def _more(result: BatchResult) -> dict[str, object]:
    """Return the fields of a result that are often empty, without the empty ones."""
    more = {
        "stop_reason": result.stop_reason,
        "reasoning": result.reasoning,
        "tool_calls": [call.as_dict() for call in result.tool_calls],
        "logprobs": tokens_as_json(result.logprobs or ()),
        "prompt_logprobs": tokens_as_json(result.prompt_logprobs or ()),
        "choices": [_choice(choice) for choice in result.choices],
        "choice_probs": result.choice_probs,
        "warnings": result.warnings,
    }
    return {name: value for name, value in more.items() if value or value == 0}  # a token's id


def _choice(choice: BatchResult) -> dict[str, object]:
    return {
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "error": choice.error and _error_as_json(choice.error),
        "seed": choice.seed,
        **_more(choice),
    }


# ---- OpenAI ----

_ANSWERED = {"invalid_request": None, "unsupported_parameter": "unsupported_parameter"}
"""Errors of a body that a server answers with status 400, and the `code` in that answer."""


class OpenAIEncoder(TraceableEncoder):
    """Writes OpenAI's lines of output and errors."""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return a result as a line: answered, refused, or never run."""
        if result.error is not None:
            return _failed(item, *_error_of(result.error), digest.hex())
        url, asked_model = _call_of(item)
        if isinstance(item.prompt, VectorPrompt) and item.prompt.call is not None:
            found: Any = result.origin
            answer = item.prompt.call.body(found, asked_model or model)
            return line_of(item, 200, answer, digest.hex())
        body = _body(url, _key(item.id), result, created, asked_model or model)
        return line_of(item, 200, body, digest.hex())

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the line of an item that could not run."""
        status = 400 if error.code in _ANSWERED else None
        message = f"{item.place}: {error.message}"
        return _failed(item, ItemError(error.code, message, error.param), status, _key(item.id))

    def known(self, record: Mapping[str, object]) -> Known | None:
        """Return the item of a record; see `TraceableEncoder.known`."""
        id, response = record.get("custom_id"), record.get("response")
        if not isinstance(id, str) or record.get("id") != f"batch_req_{_key(id)}":
            raise InputLineError("no_record", "is not an answer of cbatch in OpenAI's format")
        if not isinstance(response, dict):
            return None
        digest = _digest_in(str(response.get("request_id")).removeprefix("req_"))
        return self._known(id, digest, is_error=response.get("status_code") != 200)


def _call_of(item: Item) -> RequestEcho:
    if isinstance(item.extra, RequestEcho):
        return item.extra
    is_chat = item.prompt is not None and item.prompt.messages is not None
    return RequestEcho(CHAT if is_chat else COMPLETIONS, "")


def _key(id: str) -> str:
    """Return the common part of the ids in a line: the same for the same request."""
    return blake2b(bytes_of(id), digest_size=12).hexdigest()


def line_of(item: Item, status: int | None, body: Mapping[str, Any], request: str) -> bytes:
    """Return a line with a server's answer; where a server would not answer, with an error alone."""
    response = {"status_code": status, "request_id": f"req_{request}", "body": body}
    return dump(
        {
            "id": f"batch_req_{_key(item.id)}",
            "custom_id": item.id,
            "response": None if status is None else response,
            "error": body if status is None else None,
        }
    )


def _failed(item: Item, error: ItemError, status: int | None, request: str) -> bytes:
    """Return the line of an item that failed; `status` is a server's, None where a server would not answer."""
    if status is None:
        return line_of(item, None, {"code": error.code, "message": error.message}, request)
    said = {
        "message": error.message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": error.param,
        "code": _ANSWERED.get(error.code, error.code),
    }
    return line_of(item, status, {"error": said}, request)


_ERRORS: tuple[tuple[type[CBatchError], str, int | None], ...] = (
    (RequestCancelledError, "batch_cancelled", None),
    (DeadlineError, "request_timeout", None),
    (QueueFullError, "invalid_request", None),
    (PromptTooLongError, "context_length_exceeded", 400),
    (UnsupportedOptionError, "unsupported_parameter", 400),
    (PromptError, "invalid_request", 400),
    (BannedTokensError, "invalid_request", 400),
    (RequestFailedError, "server_error", 500),
    (EngineError, "server_error", 500),
    (CBatchError, "invalid_request", 400),
)
"""OpenAI's codes, where it has one, and the status that a server would answer with, None for a request that never ran.

The first class that an error belongs to counts.
"""


def _error_of(error: CBatchError) -> tuple[ItemError, int | None]:
    """Return a failed request's error, and the status that a server would answer with."""
    code, status = next((code, status) for kind, code, status in _ERRORS if isinstance(error, kind))
    option = error.option if isinstance(error, UnsupportedOptionError) else None
    return ItemError(code, str(error), option), status


def _chat_choice(index: int, result: BatchResult) -> dict[str, Any]:
    return {
        "index": index,
        "message": chat_message(result),
        "finish_reason": finish_of(result),
        "logprobs": None if result.logprobs is None else chat_logprobs(result.logprobs),
    }


def _completion_choice(index: int, result: BatchResult) -> dict[str, Any]:
    logprobs = None if result.logprobs is None else completion_logprobs(result.logprobs)
    return {
        "index": index,
        "text": result.text,
        "finish_reason": finish_of(result),
        "logprobs": logprobs,
    }


def _choices(result: BatchResult) -> tuple[BatchResult, ...]:
    return result.choices or (result,)


def _body(url: str, key: str, result: BatchResult, created: int, model: str) -> dict[str, Any]:
    usage, is_chat = result.usage, url == CHAT
    choice = _chat_choice if is_chat else _completion_choice
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    names = ("cached_tokens", "image_tokens", "audio_tokens")
    shown = {name: getattr(usage, name) for name in names}
    if details := {name: n for name, n in shown.items() if n}:
        counts["prompt_tokens_details"] = details
    if usage.reasoning_tokens:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice(i, each) for i, each in enumerate(_choices(result))],
        "usage": counts,
    }
    return body | _extensions(result)


def _extensions(result: BatchResult) -> dict[str, Any]:
    """Return the fields that OpenAI's format lacks, where there are any."""
    more: dict[str, Any] = {}
    if any(c.finish_reason in NEAREST_FINISH for c in _choices(result)):
        more["finish_reasons"] = [c.finish_reason for c in _choices(result)]
    if any(c.stop_reason is not None for c in _choices(result)):
        more["stop_reasons"] = [c.stop_reason for c in _choices(result)]
    if result.prompt_logprobs is not None:
        more["prompt_logprobs"] = tokens_as_json(result.prompt_logprobs)
    if result.choice_probs is not None:
        more["choice_probs"] = dict(result.choice_probs)
    if result.warnings:
        more["warnings"] = list(result.warnings)
    return {"cbatch": more} if more else {}


def _digest_in(text: object) -> bytes | None:
    is_digest = isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text)
    return bytes.fromhex(str(text)) if is_digest else None
