"""cbatch's errors as HTTP has them: status, headers, and the bodies of OpenAI's and Anthropic's APIs.

Source: OpenAI's API reference, error codes; Anthropic's API reference, errors; llama.cpp tools/server for
`n_prompt_tokens` and `n_ctx`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbatch.errors import (
    BannedTokensError,
    CacheError,
    CBatchError,
    DeadlineError,
    EngineClosedError,
    EngineError,
    GrammarError,
    ModelLoadError,
    NoThreadError,
    PromptError,
    PromptTooLongError,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
    UnsupportedOptionError,
    UnsupportedTaskError,
    WorkerDiedError,
    near,
)
from cbatch.support.checks import shown
from cbatch.support.logs import Log

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cbatch.server.server_settings import SizeLimit

_log = Log("cbatch.server")

NO_RETRY = {"x-should-retry": "false"}
"""Clients of OpenAI repeat a status of 500 and more, unless this header says no."""

SOON = {"retry-after": "1"}

LATER = {"retry-after": "60"}

_N_PARAM = 1024
"""Most characters of an unknown field's name in an answer. Our choice."""

_MENDED_S = 30.0
"""Seconds after which a model that failed to load is tried again. Source: the longest pause before a start."""

NO_WORKER = "no worker can be started now: the server's log says why"
"""The message for clients: the reason itself may contain paths."""

DROP = "cbatch.drop"
"""Name in a request's state, by which a connection has the function that ends it at once."""

CROWDED = "cbatch.crowded"
"""The mark, in the state of an ASGI scope, of a connection above the server's limit."""


@dataclass(eq=False)
class HttpProblemError(Exception):
    """An answer that is an error: what a client is told."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the error's body."""

    def __str__(self) -> str:
        return self.message

    @property
    def kind(self) -> str:
        """The error's `type` in OpenAI's form; as llama-server where OpenAI's clients look at the `code`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPES.get(self.code or "", kind)

    def as_openai(self) -> dict[str, Any]:
        """Return the body of the answer."""
        said = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**said, **self.more}}

    def as_anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        """Return the body of the answer in Anthropic's form, which has no place for a field but the message."""
        message, known = self.message, dict(self.more)
        if "n_prompt_tokens" in known:
            # clients search for these words
            message = (
                f"prompt is too long: {known['n_prompt_tokens']} tokens > {known['n_ctx']} maximum"
            )
        elif self.param is not None and self.param not in message:
            message = f"{self.param}: {message}"
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        error = {**known, "type": _ANTHROPIC_TYPES.get(self.status, kind), "message": message}
        said = {"type": "error", "error": error}
        return said if request_id is None else {**said, "request_id": request_id}


_TYPES = {
    "context_length_exceeded": "exceed_context_size_error",
    "invalid_api_key": "authentication_error",
    "not_implemented": "not_supported_error",
}
"""Types of errors by code; others are `invalid_request_error` and `server_error`. Source: llama.cpp tools/server."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status; the others are `invalid_request_error` and `api_error`."""

_OVERLOADED = 529
"""Anthropic's status for 503."""


def told(problem: HttpProblemError, scope: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status and body of a problem in the format to which the path of an ASGI scope belongs."""
    path = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/v1")
    if path.split("/")[1:2] != ["messages"]:
        return problem.status, problem.as_openai()
    status = _OVERLOADED if problem.status == 503 else problem.status
    return status, problem.as_anthropic(scope.get("state", {}).get("request_id"))


def bad_request(
    message: str, param: str | None = None, code: str | None = None
) -> HttpProblemError:
    """Return the problem of a request that can never succeed."""
    return HttpProblemError(400, message, code, param)


def unknown_field(name: str, known: Iterable[str]) -> HttpProblemError:
    """Return the problem of a field that no endpoint reads; `known` are those that this one does."""
    others = near(name, known)
    words = f"unknown field {shown(name)}" + (f"; {others}" if others else "")
    return bad_request(words, name[:_N_PARAM], "unknown_parameter")


def too_large(
    what: str, limit: SizeLimit, param: str | None = None, headers: Mapping[str, str] | None = None
) -> HttpProblemError:
    """Return the problem of something that is larger than the server takes."""
    message = f"{what} is larger than {limit.n_bytes:,} bytes: the server has {limit.option}"
    return HttpProblemError(413, message, "request_too_large", param, headers or {})


def refused(name: str, why: str) -> HttpProblemError:
    """Return the problem of a field that would change the answer and is not there."""
    return bad_request(f"{name} is not supported: {why}", name, "unsupported_parameter")


def absent(message: str) -> HttpProblemError:
    """Return the problem of an endpoint that another server has and this one lacks."""
    return HttpProblemError(501, message, "not_implemented", headers=NO_RETRY)


def draining() -> HttpProblemError:
    """Return the problem of a server that is being stopped."""
    return HttpProblemError(503, "the server is shutting down", "shutting_down", headers=SOON)


def reloading() -> HttpProblemError:
    """Return the problem of a call that outlasts the model it runs on."""
    message = "the model was reloaded before the answer ended: ask again"
    return HttpProblemError(503, message, "model_reloading", headers=SOON)


def files_not_open() -> HttpProblemError:
    """Return the problem of a call for files or batches that comes before their folder is open."""
    message = "files and batches are not available yet after the reload of the model: ask again"
    return HttpProblemError(503, message, "files_not_open", headers=SOON)


def no_worker(seconds: float) -> HttpProblemError:
    """Return the problem of a server without a worker; the next start is in `seconds`."""
    headers = {"retry-after": str(whole_seconds(seconds))}
    return HttpProblemError(503, NO_WORKER, "no_worker", headers=headers)


def unwell(message: str, retry_s: int = 1) -> HttpProblemError:
    """Return the problem of an engine that cannot serve now."""
    more = {"type": "unavailable_error", "code": 503}  # as in llama-server
    return HttpProblemError(503, message, headers={"retry-after": str(retry_s)}, more=more)


def whole_seconds(seconds: float) -> int:
    """Return the seconds of a `retry-after` header: at least 1."""
    return max(1, math.ceil(seconds))


def queue_full(waiting: str, n_own: int, n_limit: int, seconds: int) -> HttpProblemError:
    """Return the problem of a request for which the queue has no room for about so many seconds."""
    return _full(
        f"{waiting} wait already, of at most {n_limit}, and this request has {n_own}", seconds
    )


def answers_full(n_mib: int, seconds: int) -> HttpProblemError:
    """Return the problem of a request for whose answer there may be no room for some seconds."""
    words = f"answers that are being computed take half of --max-answers-mib {n_mib}"
    return _full(words, seconds)


def bodies_full(n_mib: int) -> HttpProblemError:
    """Return the problem of a large body for which there is no room beside others."""
    return _full(f"the bodies of other requests take --max-bodies-mib {n_mib}", 1)


def too_much_held(n_mib: int) -> HttpProblemError:
    """Return the problem of the call whose answer is the largest, or waits for its client, where there is no room."""
    words = (
        f"answers take more than --max-answers-mib {n_mib}, and this one is the largest or was read too slowly: "
        "read faster, or ask for less at once"
    )
    return HttpProblemError(503, words, "answers_full", headers=SOON)


def _full(message: str, seconds: int) -> HttpProblemError:
    headers = {"retry-after": str(seconds)}
    return HttpProblemError(
        429, f"{message}: try again later", "rate_limit_exceeded", headers=headers
    )


def crowded() -> HttpProblemError:
    """Return the problem of a request over a connection above the server's limit."""
    message = "the server has too many connections: try again later"
    headers = {**SOON, "connection": "close"}
    return HttpProblemError(503, message, "too_many_connections", headers=headers)


def problem_of(error: BaseException, prompt_field: str | None = None) -> HttpProblemError:
    """Return what a client is told of an error; `prompt_field` is the field that has the prompt."""
    if isinstance(error, HttpProblemError):
        return error
    if isinstance(error, PromptTooLongError):
        return _too_long(error, prompt_field)
    if isinstance(error, CacheError):
        return bad_request(f"cache_key: {error.reason}", "cache_key", "cache_unusable")
    if not isinstance(error, CBatchError):
        return HttpProblemError(500, "an internal error", "internal_error", headers=NO_RETRY)
    if isinstance(error, ModelLoadError):
        return no_worker(_MENDED_S)
    if type(error) is RequestFailedError and isinstance(error.__cause__, OSError):
        return HttpProblemError(503, words_for_clients(error), "no_resources", headers=SOON)
    param = prompt_field if isinstance(error, PromptError) else _param_of(error)
    for kind, status, code, headers in _STATUS:
        if isinstance(error, kind):
            if isinstance(error, WorkerDiedError) and not error.n_alone:
                headers = {}
            return HttpProblemError(status, words_for_clients(error), code, param, headers)
    return bad_request(str(error), param)


def words_for_clients(error: CBatchError) -> str:
    """Return an error's message for clients, without text of the system or another program: it may contain paths.

    The log has the whole error.
    """
    if isinstance(error, WorkerDiedError):
        words = error.what
    elif isinstance(error, EngineClosedError):
        words = "the engine has ended"
    elif isinstance(error, EngineError):
        words = "the engine failed"
    elif type(error) is RequestFailedError and error.__cause__ is not None:
        words = "the request could not be computed"
    else:
        return str(error)
    _log.warn("a client got the message %r for: %s", words, error)
    return words


def _param_of(error: CBatchError) -> str | None:
    if isinstance(error, UnsupportedOptionError):
        return error.option
    if isinstance(error, BannedTokensError):
        return "logit_bias"
    return error.kind if isinstance(error, GrammarError) else None


def _too_long(error: PromptTooLongError, prompt_field: str | None) -> HttpProblemError:
    """Return the problem of a prompt without room; clients search for its first words and for the code."""
    message = f"This model's maximum context length is {error.n_limit} tokens. However, {error.size}: shorten it"
    more = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_limit}
    return HttpProblemError(400, message, "context_length_exceeded", prompt_field, more=more)


_STATUS: tuple[tuple[type[CBatchError], int, str | None, Mapping[str, str]], ...] = (
    (DeadlineError, 504, "timeout", NO_RETRY),
    (QueueFullError, 429, "rate_limit_exceeded", SOON),
    (RequestCancelledError, 503, "cancelled", SOON),
    (NoThreadError, 503, "no_threads", SOON),
    (UnsupportedOptionError, 400, "unsupported_parameter", {}),
    (UnsupportedTaskError, 501, "not_implemented", NO_RETRY),
    (GrammarError, 400, "invalid_grammar", {}),
    (PromptError, 400, "invalid_prompt", {}),
    (BannedTokensError, 400, "no_token_left", {}),
    (WorkerDiedError, 500, "worker_died", NO_RETRY),
    (RequestFailedError, 500, "request_failed", NO_RETRY),
    (EngineClosedError, 503, "engine_closed", SOON),
    (EngineError, 500, "engine_error", NO_RETRY),
)
"""Status, code and headers of errors; the first class that an error belongs to counts."""
