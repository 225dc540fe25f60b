"""What the body of a batch's line asks: the same call as at its endpoint, and the same answer."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from cbatch.chat.vector_calls import CALLS as VECTOR_CALLS
from cbatch.chat.vector_calls import VectorCall, VectorPrompt, error_in
from cbatch.errors import CBatchError
from cbatch.files.served_batch import Ask, Check, ServedReply
from cbatch.server.anthropic_messages import MessagesCall
from cbatch.server.batch_index import MESSAGES, StoredBatch
from cbatch.server.call import Call, fingerprint_of
from cbatch.server.exchange import dumps
from cbatch.server.http_errors import (
    HttpProblemError,
    bad_request,
    problem_of,
    refused,
    told,
)
from cbatch.server.openai_chat import ChatCall
from cbatch.server.openai_completions import CompletionCall
from cbatch.server.prompt_size import check_call, check_vectors
from cbatch.server.request_fields import with_param
from cbatch.server.responses_api import ResponsesCall
from cbatch.server.vector_endpoints import call_of as vector_call_of
from cbatch.server.vector_endpoints import check_engine, problem_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from cbatch.engine import Engine
    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult
    from cbatch.server.server_settings import ServerSettings

CALLS: Mapping[str, Callable[..., Call]] = {
    "/v1/chat/completions": ChatCall.of,
    "/v1/completions": CompletionCall.of,
    "/v1/responses": ResponsesCall.of,
}
"""Endpoints of batches of texts over a file, and what reads their bodies."""

ENDPOINTS = (*CALLS, *VECTOR_CALLS)
"""Endpoints of batches over a file."""

_OF_ALL = {**CALLS, MESSAGES: MessagesCall.of}


class LineQuestion:
    """One call of a batch."""

    def __init__(self, call: Call, model: str, endpoint: str) -> None:
        (prompt,) = call.prompts
        self._call, self._model, self._endpoint = call, model, endpoint
        self.prompt = replace(prompt, options=call.asked.options)

    def reply(self, result: BatchResult) -> ServedReply:
        """Return the answer that the endpoint would give."""
        if result.error is None:
            return ServedReply(200, self._call.body([result], self._model))
        call = self._call
        error = with_param(result.error, call.asked, call.prompt_field)
        return _refusal(problem_of(error, call.prompt_field), self._endpoint)


class VectorQuestion:
    """One call of a batch for embeddings or scores."""

    def __init__(self, call: VectorCall, model: str, endpoint: str) -> None:
        self._call, self._model, self._endpoint = call, model, endpoint
        self.prompt: BatchPrompt = VectorPrompt.of(call)

    def reply(self, result: BatchResult) -> ServedReply:
        """Return the answer that the endpoint would give."""
        found: Any = result.origin
        if result.error is None:
            return ServedReply(200, self._call.body(found, self._model))
        i_result, _ = error_in(found) or (0, None)
        return _refusal(problem_at(self._call, i_result, result.error), self._endpoint)


def _vector_asker(batch: StoredBatch, settings: ServerSettings, model: str, engine: Engine) -> Ask:
    kind, facts, n_window = VECTOR_CALLS[batch.endpoint], engine.model_facts, engine.n_window

    def ask(body: dict[str, Any]) -> VectorQuestion | ServedReply:
        try:
            _check_numbers(body)
            call, _ = vector_call_of(kind, body, settings)
            check_engine(call, engine)
            check_vectors(call, facts, n_window)
            return VectorQuestion(call, call.model or model, batch.endpoint)
        except (HttpProblemError, CBatchError) as error:
            return _refusal(problem_of(error), batch.endpoint)

    return ask


def asker(batch: StoredBatch, settings: ServerSettings, model: str, engine: Engine) -> Ask:
    """Return the function that reads the bodies of a batch.

    Args:
        batch: its endpoint is one of `ENDPOINTS`, or that of messages.
        model: name of the model in answers to lines that name none.
        engine: answers the requests; `model` may name one of its adapters.
    """
    if batch.endpoint in VECTOR_CALLS:
        return _vector_asker(batch, settings, model, engine)
    endpoint, facts, fingerprint = batch.endpoint, engine.model_facts, fingerprint_of(engine)
    n_window = engine.n_window
    call_of = _OF_ALL[endpoint]

    def ask(body: dict[str, Any]) -> LineQuestion | ServedReply:
        try:
            _check_numbers(body)
            call = call_of(body, is_strict=settings.strict_fields)
            _check(call, settings)
            check_call(call, n_window)
            call.see_client(batch.kept_owner, settings)
            call.see_facts(facts)
            deque(call.see_vocabulary(engine, facts), maxlen=0)
            call.see_defaults(engine.options, facts.sampling, fingerprint)
            return LineQuestion(call, call.asked.common.model or model, endpoint)
        except (HttpProblemError, CBatchError) as error:
            return _refusal(problem_of(error), endpoint)

    return ask


class _CountedBody(Struct):
    usage: dict[str, Any]


class _CountedReply(Struct):
    body: _CountedBody | list[Raw]


class _AnswerLine(Struct):
    """What is read of a line of answers: all else may be tens of megabytes, and is passed over."""

    response: _CountedReply


class _ErrorLine(Struct):
    """What is read of a line of errors."""

    response: Raw


_answer_of = msgspec.json.Decoder(_AnswerLine).decode
_error_of = msgspec.json.Decoder(_ErrorLine).decode


def usage_of(answers: Path, check: Check = bool) -> dict[str, Any]:
    """Return the tokens of a file of answers, by the names of OpenAI's batches."""
    n: Counter[str] = Counter()
    with answers.open("rb") as lines:
        for line in lines:
            check()
            body = _answer_of(line).response.body
            if isinstance(body, list):  # scores as TEI tells them, without tokens
                continue
            usage = body.usage
            is_response = "input_tokens" in usage
            given, made = ("input", "output") if is_response else ("prompt", "completion")
            n["input"] += usage[f"{given}_tokens"]
            n["output"] += usage.get(f"{made}_tokens", 0)  # embeddings have none
            n["cached"] += usage.get(f"{given}_tokens_details", {}).get("cached_tokens", 0)
            thought = usage.get(f"{made}_tokens_details")
            n["untold"] += thought is None
            n["reasoning"] += thought["reasoning_tokens"] if thought else 0
    found: dict[str, Any] = {
        "input_tokens": n["input"],
        "input_tokens_details": {"cached_tokens": n["cached"]},
        "output_tokens": n["output"],
        "total_tokens": n["input"] + n["output"],
    }
    if not n["untold"]:  # thinking is not always counted
        found["output_tokens_details"] = {"reasoning_tokens": n["reasoning"]}
    return found


def _check_numbers(body: dict[str, Any]) -> None:
    """Refuse numbers that JSON does not have: a file may contain them, but an answer could not repeat them."""
    try:
        dumps(body)
    except ValueError:
        words = "the body has NaN, Infinity, or a number above 1.79e308"
        raise bad_request(words, code="invalid_json") from None


def _check(call: Call, settings: ServerSettings) -> None:
    """Refuse what a line of a batch cannot be."""
    if call.asked.common.stream:
        raise refused("stream", "answers in a batch are not streamed")
    if len(call.prompts) != 1:
        words = f"{call.prompt_field} is a list of {len(call.prompts)} prompts"
        raise bad_request(f"{words}: give each a line of its own", call.prompt_field)
    call.check_size(settings.max_choices)
    if call.asked.common.model is None and settings.model_required:
        raise bad_request("model is missing", "model")


def n_never_ran_in(errors: Path, check: Check = bool) -> int:
    """Return how many lines of a file of errors are of requests that were not asked."""
    n_lines = 0
    with errors.open("rb") as lines:
        for line in lines:
            check()
            n_lines += bytes(_error_of(line).response) == b"null"
    return n_lines


def _refusal(problem: HttpProblemError, endpoint: str) -> ServedReply:
    return ServedReply(*told(problem, {"path": endpoint}))
