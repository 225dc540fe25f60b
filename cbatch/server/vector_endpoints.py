"""`/embeddings`, `/rerank` and `/score`: read, computed while the client waits, and answered whole."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from cbatch.chat.vector_calls import VectorCall, error_in
from cbatch.errors import CBatchError, ConfigError, PromptTooLongError, UnsupportedTaskError
from cbatch.files.judged_run import judge_prompts
from cbatch.response import BatchError
from cbatch.runtime.reranking import N_SEQUENCES
from cbatch.server.exchange import ClientGoneError, Exchange
from cbatch.server.http_errors import (
    HttpProblemError,
    absent,
    bad_request,
    problem_of,
    unknown_field,
)
from cbatch.server.prompt_size import check_vectors, needs_slots
from cbatch.server.request_fields import ignored_header
from cbatch.server.small_endpoints import body_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anyio.abc import TaskGroup

    from cbatch.engine import Engine
    from cbatch.server.desk import Desk
    from cbatch.server.server_settings import ServerSettings


_N_RESULT_BYTES = 400
"""What a result takes besides its numbers. Measured, CPython 3.11."""


async def answer_vectors(kind: type[VectorCall], desk: Desk, exchange: Exchange) -> None:
    """Answer a call for embeddings or scores."""
    made = partial(call_of, kind, settings=desk.settings)
    call, ignored = await body_of(desk, exchange, made)
    sizes = await desk.sizes()
    await exchange.aside(check_vectors, call, sizes.facts, sizes.n_window)
    has_slots = needs_slots(call, sizes.facts)
    n_sequences = N_SEQUENCES * len(call.texts) if has_slots else 1
    with desk.visit(n_sequences, sizes.n_slots, exchange.held) as visit:
        with visit.scope:
            if has_slots and desk.settings.max_queue_tokens is not None:
                counts = await desk.ask_each(exchange, _n_tokens(call, desk.engine))
                desk.count_tokens(visit, sum(counts), sizes.n_slots)
            results = await _results(desk, exchange, call)
            visit.is_computed = True
            if visit.held is not None:
                visit.held.add(sum(map(_size_of, results)))
            if (found := error_in(results)) is not None:
                raise problem_at(call, *found)
            body = await desk.in_thread(call.body, results, call.model or desk.model_name)
            await exchange.respond_long(body, ignored_header(ignored) if ignored else None)
        if visit.scope.cancelled_caught:
            raise visit.problem or ClientGoneError


async def _results(desk: Desk, exchange: Exchange, call: VectorCall) -> list[list[Any]]:
    """Return the results of each response; none is left running where the client leaves."""
    responses: list[Any] = []
    found: list[list[Any]] = []

    async def work(tasks: TaskGroup) -> None:
        responses.extend(await desk.ask(exchange, _begun, call, desk.engine))
        found.extend([await _gathered(response) for response in responses])

    try:
        await exchange.while_client_stays(work)
    finally:
        for response in responses[len(found) :]:
            response.leave()
    return found


async def _gathered(response: Any) -> list[Any]:
    """Return all results of a response, in order of its texts: its reader is woken once, at their end."""
    try:
        ended = await response.gather(return_errors=True)
    except BatchError as error:
        problem = error.__cause__ or error  # of the engine: it has closed, say
    else:
        return sorted(ended, key=lambda result: result.index)
    raise problem


def _size_of(results: Sequence[Any]) -> int:
    """Return about the bytes of the results of a response."""
    vectors = (getattr(result, "embedding", None) for result in results)
    return sum(_N_RESULT_BYTES + (0 if v is None else int(v.nbytes)) for v in vectors)


def _n_tokens(call: Any, engine: Engine) -> Iterator[int]:
    """Yield the tokens of each request by which a document is judged; one that cannot be judged has none."""
    for _, _, made in judge_prompts(call, engine):
        n_tokens = 0
        if not isinstance(made, CBatchError):
            with suppress(CBatchError):
                n_tokens = engine.count_tokens(made, options=made.options)
        yield n_tokens


def _begun(call: VectorCall, engine: Engine) -> list[Any]:
    check_engine(call, engine)
    try:
        return call.begun(engine)
    except UnsupportedTaskError:
        raise
    except ConfigError as error:
        raise _of_field(error, type(call)) from None


def check_engine(call: VectorCall, engine: Engine) -> None:
    """Refuse a call that the engine cannot answer."""
    if why := call.lack(engine):
        raise absent(why)
    if call.model in engine.model_facts.adapters:
        raise bad_request(
            f"model {call.model!r} is an adapter, which has no effect on embeddings and scores: leave model out",
            "model",
        )


def call_of(
    kind: type[VectorCall], body: Mapping[str, Any], settings: ServerSettings
) -> tuple[VectorCall, list[str]]:
    """Return the call of a body, and the fields that are ignored.

    Raises:
        HttpProblemError: a field is wrong, or the call is too large.
    """
    given = {name: value for name, value in body.items() if value is not None}
    unknown = [name for name in given if name not in (*kind.fields, *kind.ignored)]
    if unknown and settings.strict_fields:
        raise unknown_field(unknown[0], kind.fields)
    try:
        call = kind.of(given)
    except ConfigError as error:
        raise _of_field(error, kind) from None
    if call.model is None and settings.model_required:
        raise bad_request("model is missing", "model")
    if len(call.texts) > settings.max_choices:
        words = f"{call.prompt_field} has {len(call.texts)} texts; at most {settings.max_choices} are allowed"
        raise bad_request(words, call.prompt_field)
    ignored = [name for name in given if name in unknown or name in kind.ignored]
    return call, ignored


def problem_at(call: VectorCall, i_result: int, error: CBatchError) -> HttpProblemError:
    """Return what a client is told of a result that is an error."""
    if isinstance(error, ConfigError) and not isinstance(error, UnsupportedTaskError):
        return _of_field(error, type(call))
    place = call.place_of_result(i_result)
    problem = problem_of(error, re.split(r"\W", place, maxsplit=1)[0])
    if isinstance(error, PromptTooLongError):  # clients search for the first words
        is_cut = "truncate" in call.settings
        advice = (
            "; the instruction or query leaves no room for it" if is_cut else ", or give truncate"
        )
        problem.message = problem.message.replace("the prompt has", f"{place} has", 1) + advice
    elif problem.status == 400 and place not in problem.message:
        problem.message = f"{place}: {problem.message}"
    return problem


def _of_field(error: ConfigError, kind: type[VectorCall]) -> HttpProblemError:
    """Return the problem of a field, by whose name its words begin."""
    found = re.match(r"\w+", str(error))
    is_field = found is not None and found[0] in kind.fields
    return bad_request(str(error), found[0] if found and is_field else kind.prompt_field)
