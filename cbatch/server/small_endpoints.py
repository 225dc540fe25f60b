"""What a server says of its model and its work. Source: llama.cpp tools/server; vLLM's API server."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timezone
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cbatch
from cbatch.errors import CBatchError, PromptError
from cbatch.options import RunOptions, Sampling
from cbatch.server.exposition import CONTENT_TYPE
from cbatch.server.http_errors import (
    HttpProblemError,
    absent,
    bad_request,
    draining,
    problem_of,
    refused,
    unwell,
)
from cbatch.server.openai_chat import ChatCall
from cbatch.server.prompt_size import check_call, check_text, check_tokens
from cbatch.server.request_fields import field_errors, ignored_header, with_param
from cbatch.support.checks import check_flag, shown, token_ids
from cbatch.support.lazy_json import LazyList

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cbatch.runtime.step_record import SlotState
    from cbatch.server.call import Call
    from cbatch.server.desk import Desk, EngineSizes
    from cbatch.server.exchange import Exchange

T = TypeVar("T")


async def health(desk: Desk, exchange: Exchange) -> None:
    """Say whether the engine gets on."""
    found = await desk.health()
    if not found.problem:
        state = "none" if desk.front is None else desk.front.state
        reload = {} if state == "none" else {"reload": state}
        files = {"files": "not open"} if desk.lacks_files else {}
        said = {"status": found.status, "in_flight": desk.n_in_flight, **reload, **files}
        await exchange.respond_json(said)
        return
    problem = unwell(found.problem, found.retry_s)
    body = {"status": found.status, **problem.as_openai()}
    await exchange.respond_json(body, problem.status, problem.headers)


async def models(desk: Desk, exchange: Exchange) -> None:
    """List the model and its adapters."""
    sizes = await desk.sizes()
    names = [desk.model_name, *sizes.facts.adapters]
    if _is_anthropic(exchange):
        told = [_model_of_anthropic(desk, sizes, name) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        await exchange.respond_json({"data": told, **ends})
        return
    listed = [_model(desk, sizes, name) for name in names]
    await exchange.respond_json({"object": "list", "data": listed})


async def model(desk: Desk, exchange: Exchange) -> None:
    """Say what one model is."""
    sizes, name = await desk.sizes(), exchange.scope["path_params"]["name"]
    if name not in (desk.model_name, *sizes.facts.adapters):
        message = f"the model {shown(name)} does not exist"
        raise HttpProblemError(404, message, "model_not_found", "model")
    of = _model_of_anthropic if _is_anthropic(exchange) else _model
    await exchange.respond_json(of(desk, sizes, name))


async def load_model(desk: Desk, exchange: Exchange) -> None:
    """Start a reload of the served model. No other model can be loaded: clients cannot name files of the server."""
    if not (exchange.owner or _is_local(exchange)):
        message = "without API keys, the model can be reloaded only from the server's own machine"
        raise HttpProblemError(403, message, "not_local")
    headers = exchange.headers
    has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
    name = await body_of(desk, exchange, lambda body: body.get("model")) if has_body else None
    if name not in (None, desk.model_name):
        message = (
            f"the model {shown(name)} is not served here: only {desk.model_name} can be reloaded"
        )
        raise HttpProblemError(404, message, "model_not_found", "model")
    if desk.front is None or not desk.front.can_reload:
        raise absent("only cbatch serve can reload its model: restart this application instead")
    if not desk.front.ask():
        raise (
            draining() if desk.is_draining else HttpProblemError(409, "a reload is already running")
        )
    await exchange.respond_json({"success": True, "model": desk.model_name})


def _is_local(exchange: Exchange) -> bool:
    """Whether a request comes from this machine: from a loopback address, or over a Unix socket."""
    client = exchange.scope.get("client")
    if not client or not client[0]:
        return True
    with suppress(ValueError):
        return ip_address(client[0].partition("%")[0]).is_loopback
    return False


def _is_anthropic(exchange: Exchange) -> bool:
    """Whether a client speaks Anthropic's API, where both have the same path."""
    return b"anthropic-version" in exchange.headers


def rfc3339(seconds: int | None) -> str | None:
    """Return seconds since 1970 as the text of a time; None for None."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def _model_of_anthropic(desk: Desk, sizes: EngineSizes, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": rfc3339(desk.created),
        "max_input_tokens": sizes.n_window,
        "max_tokens": sizes.n_window,
    }


def _model(desk: Desk, sizes: EngineSizes, name: str) -> dict[str, Any]:
    facts = sizes.facts
    return {
        "id": name,
        "object": "model",
        "created": desk.created,
        "owned_by": "cbatch",
        "max_model_len": sizes.n_window,
        "capabilities": sizes.can,
        "meta": {
            "n_ctx": sizes.n_window,
            "n_ctx_train": facts.n_ctx_train,
            "n_vocab": facts.n_vocab,
            "n_embd": facts.n_embedding,
            "n_params": facts.n_params,
            "size": facts.n_bytes,
        },
    }


async def props(desk: Desk, exchange: Exchange) -> None:
    """Say what the server is, as llama-server does."""
    sizes = await desk.sizes()
    options, facts = desk.engine.options, sizes.facts
    await exchange.respond_json(
        {
            "default_generation_settings": {
                "n_ctx": sizes.n_window,
                "params": settings_of(options, facts.sampling),
            },
            "total_slots": sizes.n_slots,
            "model_alias": desk.model_name,
            "model_path": Path(facts.path).name,
            "modalities": {"vision": facts.can_see, "audio": facts.can_hear},
            "chat_template": facts.chat_template,
            "bos_token": facts.bos_token,
            "eos_token": facts.eos_token,
            "build_info": f"cbatch {cbatch.__version__}",
        }
    )


async def adapters(desk: Desk, exchange: Exchange) -> None:
    """List the adapters; a scale of 0 says that a request gets one only if it names it."""
    names = (await desk.sizes()).facts.adapters
    listed = [{"id": i, "path": name, "scale": 0.0} for i, name in enumerate(names)]
    await exchange.respond_json(listed)


async def refuse(why: str, desk: Desk, exchange: Exchange) -> None:
    """Refuse what another server does and this one does not."""
    raise absent(why)


def settings_of(options: RunOptions, of_model: Mapping[str, float]) -> dict[str, Any]:
    """Return the sampling settings of a request with these options: its own, else the model's, else cbatch's."""
    sampling = options.sampling(of_model, seed=0)
    said = {f.name: getattr(sampling, f.name) for f in fields(RunOptions) if f.name in _SAMPLED}
    said |= {name: getattr(options, name) for name in ("seed", "max_tokens", "timeout_s")}
    return {name: value for name, value in said.items() if value is not None}


_SAMPLED = frozenset(f.name for f in fields(Sampling)) - {"seed", "logit_bias"}


async def tokenizer_info(desk: Desk, exchange: Exchange) -> None:
    """Say what lm-evaluation-harness asks of a tokenizer."""
    facts = (await desk.sizes()).facts
    await exchange.respond_json(
        {
            "eos_token": facts.eos_token,
            "bos_token": facts.bos_token,
            "pad_token": None,
            "chat_template": facts.chat_template,
        }
    )


_N_TOKEN, _N_PIECE, _N_CHARACTER = 40, 220, 6
"""Bytes in memory of an answer's token, of one with its piece, and of a character with its copies."""


async def tokenize(desk: Desk, exchange: Exchange) -> None:
    """Return tokens: of `content` as llama-server does, of `prompt` or `messages` as vLLM does."""
    body = await body_of(desk, exchange, _tokenized)
    sizes = await desk.sizes()
    if "content" in body:
        if not _flag(body, "parse_special", default=True):
            raise refused("parse_special", "control tokens in a text are always read as such")
        has_special = _flag(body, "add_special", default=False)
        tokens = await _tokens(desk, exchange, body["content"], "content", has_special=has_special)
        listed, n_each = LazyList(int, tokens), _N_TOKEN
        if _flag(body, "with_pieces", default=False):
            pieces = await desk.ask(exchange, desk.engine.pieces, tokens)
            listed, n_each = LazyList(_with_piece, [*zip(tokens, pieces, strict=True)]), _N_PIECE
        await desk.respond_held(exchange, {"tokens": listed}, n_each * len(tokens))
        return
    if "messages" in body:
        call = await _checked(body["messages"], desk, exchange)
        (prompt,), options = call.prompts, call.asked.options
        tokens = await desk.ask(exchange, desk.engine.tokenize, prompt, options=options)
    else:
        has_special = _flag(body, "add_special_tokens", default=True)
        tokens = await _tokens(
            desk, exchange, body.get("prompt"), "prompt", has_special=has_special
        )
    said = {"count": len(tokens), "max_model_len": sizes.n_window, "tokens": LazyList(int, tokens)}
    await desk.respond_held(exchange, said, _N_TOKEN * len(tokens))


def _tokenized(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `tokenize` reads of a body; a chat as a call."""
    read = {name: body[name] for name in _TOKENIZED if name in body}
    has_chat = "messages" in body and "content" not in body
    return {**read, "messages": ChatCall.of(body)} if has_chat else read


_TOKENIZED = (
    *("content", "parse_special", "add_special", "with_pieces"),
    *("prompt", "add_special_tokens"),
)


async def _tokens(
    desk: Desk, exchange: Exchange, text: Any, field: str, *, has_special: bool
) -> list[Any]:
    """Return the tokens of a text, as `Engine.tokenize` does. Raises a `HttpProblemError` that names the field."""
    if not isinstance(text, str):
        raise bad_request(f"{field} must be a string, not {shown(text)}", field)
    if not text:
        return []
    with field_errors(field):
        engine, sizes = desk.engine, await desk.sizes()
        check_text(text, sizes.n_window, field)
        return await desk.ask(exchange, engine.tokenize, text, add_special=has_special)


def _with_piece(told: tuple[int, bytes]) -> dict[str, Any]:
    """Return a token with its text, or with its bytes as numbers where they are not whole characters."""
    token, piece = told
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": [*piece]}


async def detokenize(desk: Desk, exchange: Exchange) -> None:
    """Return the text of tokens, by llama-server's name and by vLLM's."""
    with field_errors("tokens"):
        tokens = await body_of(desk, exchange, lambda body: token_ids("tokens", body.get("tokens")))
        check_tokens(tokens, (await desk.sizes()).n_window, "tokens")
    try:
        text = await desk.ask(exchange, desk.engine.detokenize, tokens)
    except PromptError as error:
        raise problem_of(error, "tokens") from None
    await desk.respond_held(exchange, {"content": text, "prompt": text}, _N_CHARACTER * len(text))


async def apply_template(desk: Desk, exchange: Exchange) -> None:
    """Return a chat as the model sees it."""
    call = await _checked(await body_of(desk, exchange, ChatCall.of), desk, exchange)
    (prompt,), options = call.prompts, call.asked.options
    text = await desk.ask(exchange, desk.engine.render, prompt, options=options)
    await desk.respond_held(exchange, {"prompt": text}, _N_CHARACTER * len(text))


async def count_tokens(
    call_of: Callable[..., Call], more: Mapping[str, str], desk: Desk, exchange: Exchange
) -> None:
    """Say how many tokens the prompt of a call has, tools included."""
    made = partial(call_of, is_strict=desk.settings.strict_fields)
    call = await _checked(await body_of(desk, exchange, made), desk, exchange)
    (prompt,), asked = call.prompts, call.asked
    call.see_facts((await desk.sizes()).facts)
    try:
        n_tokens = await desk.ask(exchange, desk.engine.count_tokens, prompt, options=asked.options)
    except CBatchError as error:
        problem = with_param(error, asked, call.prompt_field)
        raise problem from (error.__cause__ if problem is error else None)
    headers = ignored_header(asked.ignored)
    await exchange.respond_json({"input_tokens": n_tokens, **more}, headers=headers)


async def _checked(call: Call, desk: Desk, exchange: Exchange) -> Call:
    """Return a call whose prompts are not too large."""
    await exchange.aside(check_call, call, (await desk.sizes()).n_window)
    return call


async def body_of(desk: Desk, exchange: Exchange, made: Callable[[dict[str, Any]], T]) -> T:
    """Return what `made` makes of the JSON object that a request has, within the server's limits."""
    settings = desk.settings
    return await exchange.json(settings.body_limit, settings.body_timeout_s, made)


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    with field_errors(name):
        return default if value is None else check_flag(name, value)


# ---- what others see of the work ----


async def metrics(desk: Desk, exchange: Exchange) -> None:
    """Tell all metrics, as Prometheus reads them."""
    await desk.pulse.ask()
    headers = {"process-start-time-unix": str(desk.created)}
    await exchange.respond(200, desk.exposition.text(), headers, media_type=CONTENT_TYPE)


async def slots(desk: Desk, exchange: Exchange) -> None:
    """Tell what each slot does, by llama-server's names; never a text. The header `age` tells how old that is."""
    found = await desk.slots.ask()
    if (words := desk.slots.problem) is not None:
        raise unwell(words)
    if found is None:
        raise unwell("the engine is in a long step: try again")
    if _needs_one(exchange) and not any(slot.status == "free" for slot in found):
        raise unwell("no slot is free")
    n_window = (await desk.sizes()).n_window
    headers = {"age": f"{desk.slots.age_s:.0f}"}
    await exchange.respond_json([_as_json(slot, n_window) for slot in found], headers=headers)


def _needs_one(exchange: Exchange) -> bool:
    """Return whether the client wants an error where no slot is free."""
    return exchange.query.get("fail_on_no_slot", ["0"])[-1] not in ("0", "false")


def _as_json(slot: SlotState, n_window: int) -> dict[str, Any]:
    is_processing = slot.status == "running"
    return {
        "id": slot.slot,
        "id_task": slot.id,
        "n_ctx": n_window,
        "is_processing": is_processing,
        "status": slot.status,
        "n_cells": slot.n_cells,
        "n_prompt_tokens": slot.n_prompt,
        "n_prompt_tokens_processed": max(0, min(slot.n_computed, slot.n_prompt) - slot.n_cached),
        "n_prompt_tokens_cache": slot.n_cached,
        "next_token": [
            {
                "has_next_token": is_processing,
                "n_remain": -1 if slot.id is None else slot.n_left,
                "n_decoded": slot.n_output,
            }
        ],
    }
