"""OpenAI's batch files: requests in, responses and errors out.

Source: OpenAI's API reference, batch: the request input and output objects.
"""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from cbatch.errors import (
    CBatchError,
    ConfigError,
    DeadlineError,
    EngineError,
    PromptError,
    PromptTooLongError,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
    UnsupportedOptionError,
)
from cbatch.files.input.item import (
    WRONG,
    Item,
    ItemError,
    LineError,
    bytes_of,
    unlabelled,
    what_is_wrong,
)
from cbatch.files.input.known import Known, digest_in
from cbatch.files.input.lines import (
    OptionsOf,
    dump,
    is_text,
    loaded,
    logprob_of,
    token_text,
    tokens_as_json,
    without_nulls,
)
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.response import BatchResult, TokenLogprob

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_URLS = (CHAT, COMPLETIONS)

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "stream_options", "prediction"}
    | {"safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Names in a body that say nothing about the answer."""

_HARMLESS = {
    "stream": (False,),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Names in a body that are ignored where they ask for what is done anyway."""

_KEYS = ("custom_id", "method", "url", "body")
_ANSWERED = {"invalid_request": None, "unsupported_parameter": "unsupported_parameter"}
"""Errors of a body that a server answers with status 400, and the `code` they have there."""

_FINISH = {"window": "length", "timeout": "length", "cancelled": "length"}
"""Finish reasons that OpenAI has no word for."""


class Call(NamedTuple):
    """What an answer repeats of its request: the url, and the body's model or ""."""

    url: str
    model: str


# ---- reading ----


class OpenAIParser:
    """Reads OpenAI's batch requests."""

    columns = None

    def __init__(self, url: str | None = None) -> None:
        """Make one for all lines of a run.

        Args:
            url: what every line must have; None: each line one of those that are served.

        Raises:
            ConfigError: a url that is not served.
        """
        if url is not None and url not in _URLS:
            raise ConfigError(f"url={url!r} is not served; there is: {', '.join(_URLS)}")
        self._url = url
        self._model: str | None = None
        self._options_of = OptionsOf()

    def parse(self, number: int, place: str, line: bytes) -> Item:
        """Return the item of a line; what is wrong with it is the item's error."""
        id, is_labelled, call = unlabelled(number), False, None
        names: tuple[str, ...] = ()
        try:
            request, wrong = loaded(line)
            if wrong is None or is_text(request.get("custom_id")):
                id, is_labelled = _custom_id(request), True
            if wrong is not None:
                raise wrong
            call, body = self._call(request)
            names = tuple(body)
            if b"null" in line:
                body = _without_nulls(body)
            prompt = self._prompt(call.url, body)
            return Item(number, place, id, prompt, None, call, is_labelled)
        except WRONG as error:
            return Item(number, place, id, None, what_is_wrong(error, names), call, is_labelled)

    def _call(self, request: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
        for key in request:
            if key not in _KEYS:
                message = f"unknown key {key!r}; there is: {', '.join(_KEYS)}"
                raise LineError("invalid_request", message, key)
        method, url, body = request.get("method"), request.get("url"), request.get("body")
        if method != "POST":
            raise LineError("invalid_method", f"method must be POST, not {method!r}", "method")
        self._check_url(url)
        if not isinstance(body, dict):
            raise LineError("invalid_request", f"body must be an object, not {body!r}", "body")
        return Call(str(url), self._model_of(body)), body

    def _check_url(self, url: object) -> None:
        if url not in _URLS:
            message = f"url {url!r} is not served; there is: {', '.join(_URLS)}"
            raise LineError("invalid_url", message, "url")
        if self._url is not None and url != self._url:
            message = f"url {url!r} is not that of the batch: {self._url}"
            raise LineError("url_mismatch", message, "url")

    def _model_of(self, body: dict[str, Any]) -> str:
        model = body.pop("model", None)
        if model is None:
            return ""
        if not isinstance(model, str):
            raise LineError("invalid_request", f"model must be a string, not {model!r}", "model")
        if self._model is None:
            self._model = model
        if model != self._model:
            message = f"model {model!r} is not that of the lines before: {self._model!r}"
            raise LineError("model_mismatch", message, "model")
        return model

    def _prompt(self, url: str, body: dict[str, Any]) -> BatchPrompt:
        asked = "messages" if url == CHAT else "prompt"
        content = body.pop(asked, None)
        if content is None:
            raise LineError("invalid_request", f"{asked} is missing: {url} needs it", asked)
        options = self._options_of(
            {name: value for name, value in body.items() if not _is_ignored(name, value)}
        )
        if asked == "messages":
            return BatchPrompt(messages=content, options=options)
        content = _only_prompt(content)
        if isinstance(content, list):
            return BatchPrompt(tokens=content, options=options)
        return BatchPrompt(prompt=content, options=options)


def _custom_id(request: dict[str, Any]) -> str:
    id = request.get("custom_id")
    if id is None:
        raise LineError("missing_custom_id", "custom_id is missing", "custom_id")
    if not isinstance(id, str) or not id:
        message = f"custom_id must be a non-empty string, not {id!r}"
        raise LineError("invalid_custom_id", message, "custom_id")
    return id


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without what stands for "not said", in its messages too: clients write out all they know."""
    said = {name: value for name, value in body.items() if value is not None}
    if isinstance(said.get("messages"), list):
        said["messages"] = [without_nulls(message) for message in said["messages"]]
    return said


def _is_ignored(name: str, value: object) -> bool:
    if name in IGNORED:
        return True
    if name not in _HARMLESS:
        return False
    if value not in _HARMLESS[name]:
        can = " or ".join(map(repr, _HARMLESS[name]))
        raise LineError(
            "invalid_request", f"{name} must be {can} in a batch file, not {value!r}", name
        )
    return True


def _only_prompt(prompt: object) -> Any:
    """Return the prompt of a completion, of a list of one its only one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return prompt
    if len(prompt) > 1:
        raise LineError(
            "invalid_request",
            f"prompt is a list of {len(prompt)} prompts: give each a line of its own",
            "prompt",
        )
    return prompt[0]


# ---- writing ----


class OpenAIEncoder:
    """Writes OpenAI's lines of output and errors."""

    def header(self) -> bytes:
        """Return what stands before the first record: nothing."""
        return b""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return a result as a line: answered, refused, or never run."""
        if result.error is not None:
            return _failed(item, _error_of(result.error), _status(result.error), digest.hex())
        url, asked_model = _call_of(item)
        key = _key(item.id)
        body = _chat_body if url == CHAT else _completion_body
        said = body(key, result, created, asked_model or model)
        return _answer(item, 200, said, digest.hex())

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the line of an item that could not be asked."""
        status = 400 if error.code in _ANSWERED else None
        message = f"{item.place}: {error.message}"
        return _failed(item, ItemError(error.code, message, error.param), status, _key(item.id))

    def known(self, record: Mapping[str, object]) -> Known | None:
        """Return what a record tells of itself; None: it is the error of an item that was never asked.

        Raises:
            LineError: it is none of cbatch's.
        """
        id, response = record.get("custom_id"), record.get("response")
        if not isinstance(id, str) or record.get("id") != f"batch_req_{_key(id)}":
            raise LineError("no_record", "is no answer of cbatch in OpenAI's format")
        if not isinstance(response, dict):
            return None
        digest = digest_in(str(response.get("request_id")).removeprefix("req_"))
        return Known(id, digest, response.get("status_code") != 200) if digest else None


def _call_of(item: Item) -> Call:
    if isinstance(item.extra, Call):
        return item.extra
    is_chat = item.prompt is not None and item.prompt.messages is not None
    return Call(CHAT if is_chat else COMPLETIONS, "")


def _key(id: str) -> str:
    """Return what the ids in a line are made of: the same for the same request."""
    return blake2b(bytes_of(id), digest_size=12).hexdigest()


def _answer(item: Item, status: int, body: dict[str, Any], request: str) -> bytes:
    response = {"status_code": status, "request_id": f"req_{request}", "body": body}
    return dump(
        {
            "id": f"batch_req_{_key(item.id)}",
            "custom_id": item.id,
            "response": response,
            "error": None,
        }
    )


def _failed(item: Item, error: ItemError, status: int | None, request: str) -> bytes:
    """Return the line of an item that a server would answer with `status`; None: would not answer."""
    if status is None:
        return dump(
            {
                "id": f"batch_req_{_key(item.id)}",
                "custom_id": item.id,
                "response": None,
                "error": {"code": error.code, "message": error.message},
            }
        )
    said = {
        "message": error.message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": error.param,
        "code": _ANSWERED.get(error.code, error.code),
    }
    return _answer(item, status, {"error": said}, request)


def _error_of(error: CBatchError) -> ItemError:
    """Return a failed request's error by OpenAI's codes, where they have one."""
    message = str(error)
    if isinstance(error, RequestCancelledError):
        return ItemError("batch_cancelled", message)
    if isinstance(error, DeadlineError):
        return ItemError("request_timeout", message)
    if isinstance(error, PromptTooLongError):
        return ItemError("context_length_exceeded", message)
    if isinstance(error, UnsupportedOptionError):
        return ItemError("unsupported_parameter", message, error.option)
    return ItemError("server_error" if _status(error) == 500 else "invalid_request", message)


def _status(error: CBatchError) -> int | None:
    """Return what a server would answer with; None where the request never ran."""
    if isinstance(error, RequestCancelledError | DeadlineError | QueueFullError):
        return None
    if isinstance(error, PromptError):
        return 400
    return 500 if isinstance(error, RequestFailedError | EngineError) else 400


def _chat_body(key: str, result: BatchResult, created: int, model: str) -> dict[str, Any]:
    choices = [_chat_choice(i, choice) for i, choice in enumerate(_choices(result))]
    return _body(f"chatcmpl-{key}", "chat.completion", created, model, choices, result)


def _chat_choice(index: int, result: BatchResult) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text}
    if result.reasoning:
        message["reasoning_content"] = result.reasoning
    if result.tool_calls:
        message["content"] = result.text or None
        message["tool_calls"] = [call.as_dict() for call in result.tool_calls]
    return {
        "index": index,
        "message": message,
        "finish_reason": _finish(result),
        "logprobs": None if result.logprobs is None else _chat_logprobs(result.logprobs),
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [_token(t) | {"top_logprobs": list(map(_token, t.top))} for t in tokens]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": logprob_of(token), "bytes": list(token.data)}


def _completion_body(key: str, result: BatchResult, created: int, model: str) -> dict[str, Any]:
    choices = [_completion_choice(i, choice) for i, choice in enumerate(_choices(result))]
    return _body(f"cmpl-{key}", "text_completion", created, model, choices, result)


def _completion_choice(index: int, result: BatchResult) -> dict[str, Any]:
    logprobs = None if result.logprobs is None else _completion_logprobs(result.logprobs)
    return {
        "index": index,
        "text": result.text,
        "finish_reason": _finish(result),
        "logprobs": logprobs,
    }


def _completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    has_tops = any(token.top for token in tokens)
    return {
        "tokens": [token_text(token) for token in tokens],
        "token_logprobs": [logprob_of(_alternative(token)) for token in tokens],
        "top_logprobs": [_tops(token) for token in tokens] if has_tops else None,
        "text_offset": _offsets(tokens),
    }


def _alternative(token: TokenLogprob) -> TokenLogprob:
    """Return a token as it stands among the likeliest, where it is one of them: its number is the very same then."""
    return next((top for top in token.top if top.token_id == token.token_id), token)


def _tops(token: TokenLogprob) -> dict[str, float | None] | None:
    """Return the likeliest tokens, and behind them the one that is there, by their text; None where none has a number.

    Of several with one text the likelier is kept.
    """
    if math.isnan(token.logprob):
        return None
    found: dict[str, float | None] = {}
    for each in (*token.top, token):
        found.setdefault(token_text(each), logprob_of(each))
    return found


def _offsets(tokens: Sequence[TokenLogprob]) -> list[int]:
    """Return where each token's text begins, in characters."""
    decoder = getincrementaldecoder("utf-8")("replace")
    lengths = [len(decoder.decode(token.data)) for token in tokens]
    return list(accumulate(lengths, initial=0))[:-1]


def _choices(result: BatchResult) -> tuple[BatchResult, ...]:
    return result.choices or (result,)


def _finish(result: BatchResult) -> str:
    return _FINISH.get(result.finish_reason, result.finish_reason)


def _body(
    id: str,
    kind: str,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    result: BatchResult,
) -> dict[str, Any]:
    usage = result.usage
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    body = {
        "id": id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": choices,
        "usage": counts,
    }
    return body | _more(result)


def _more(result: BatchResult) -> dict[str, Any]:
    """Return what OpenAI has no place for, where there is any."""
    more: dict[str, Any] = {}
    if any(c.finish_reason in _FINISH for c in _choices(result)):
        more["finish_reasons"] = [c.finish_reason for c in _choices(result)]
    if any(c.stop_reason is not None for c in _choices(result)):
        more["stop_reasons"] = [c.stop_reason for c in _choices(result)]
    if result.prompt_logprobs is not None:
        more["prompt_logprobs"] = tokens_as_json(result.prompt_logprobs)
    if result.warnings:
        more["warnings"] = list(result.warnings)
    return {"cbatch": more} if more else {}
