"""Checks of the request options that need more than a type and a range."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.support.checks import (
    MAX_GRAMMAR_LENGTH,
    MAX_KEY_LENGTH,
    check_flag,
    check_float,
    check_keys,
    check_text,
    json_object,
    json_text,
    shown,
    strings_of,
    token_ids,
)
from cbatch.support.plain import int_of, list_of, number_of, text_of
from cbatch.support.schemas import closed, schema_of_class

if TYPE_CHECKING:
    from cbatch.options import LogitsProcessor

MAX_TEXTS = 1000
"""Most texts of `choice`: our choice."""

MAX_BIASES = 4096
"""Most tokens with a bias in one request. OpenAI takes 300; applying them must cost far less than a pass over a row."""

MAX_STOPS = 256
"""Most stop strings of one request; OpenAI takes 4."""

MAX_STOP_BYTES = 4096
"""Most bytes of a request's stop strings together: each takes about 100 bytes of memory in a request in flight."""

MAX_BREAKERS = 64
MAX_BREAKER_BYTES = 40
"""llama.cpp cuts longer ones. Source: src/llama-sampler.cpp, llama_sampler_init_dry, MAX_CHAR_LEN."""


@lru_cache(maxsize=64)
def schema_of(response_format: str) -> str | None:
    """Return the schema that a response format asks for; None for text.

    Source: OpenAI's API reference, chat completions, `response_format`.
    """
    given = json.loads(response_format)
    kind, inner = given.get("type"), given.get("json_schema")
    if kind not in ("text", "json_object", "json_schema"):
        raise ConfigError(
            f"response_format: type must be text, json_object or json_schema, not {kind!r}"
        )
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    check_keys("response_format", given, known)
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise ConfigError(
            'response_format of type "json_schema" needs {"json_schema": {"schema": {…}}}'
        )
    check_keys("response_format: json_schema", inner, ("name", "description", "schema", "strict"))
    if inner.get("strict") is not None:
        check_flag("response_format: strict", inner["strict"])
    schema = closed(inner["schema"]) if inner.get("strict") else inner["schema"]
    return json_text("response_format: schema", schema)


def check_schema(name: str, value: object) -> str:
    """Return a JSON schema as JSON text: a mapping, JSON text, or a class that tells its schema."""
    return json_object(name, schema_of_class(value) or value)


def check_format(name: str, value: object) -> str:
    """Return a response format as JSON text: a mapping, JSON text, or a class that tells its schema."""
    schema = schema_of_class(value)
    if schema is None:
        return json_object(name, value)
    return json_object(name, {"type": "json_schema", "json_schema": {"schema": schema}})


def check_adapters(name: str, value: object) -> Mapping[str, float]:
    """Return adapters' names with their scales, sorted by name; a name alone has scale 1."""
    alone = text_of(value)
    scales = value if alone is None else {alone: 1.0}
    if not isinstance(scales, Mapping) or None in map(text_of, scales):
        raise ConfigError(
            f"{name} must be a name or a mapping of names to scales, not {shown(value)}"
        )
    found = {str(text_of(key)): scale for key, scale in scales.items()}
    return {key: _scale(key, found[key]) for key in sorted(found)}


def _scale(adapter: str, value: object) -> float:
    check_text("an adapter's name", adapter, MAX_KEY_LENGTH)
    return check_float(f"the scale of adapter {adapter!r}", value, -100.0, 100.0)


def check_stops(name: str, value: object) -> tuple[str, ...]:
    """Return the strings that end an answer."""
    strings = strings_of(name, value)
    if len(strings) > MAX_STOPS:
        raise ConfigError(f"{name} has {len(strings)} strings; at most {MAX_STOPS} are allowed")
    n_bytes = sum(len(text.encode()) for text in strings)
    if n_bytes > MAX_STOP_BYTES:
        raise ConfigError(
            f"{name} has {n_bytes} bytes in all; at most {MAX_STOP_BYTES} are allowed"
        )
    return strings


def check_dry_breakers(name: str, value: object) -> tuple[str, ...]:
    """Return the strings at which DRY's search for repetitions stops."""
    strings = strings_of(name, value)
    if len(strings) > MAX_BREAKERS:
        raise ConfigError(f"{name} has {len(strings)} strings; at most {MAX_BREAKERS} are allowed")
    for text in strings:
        if len(text.encode()) > MAX_BREAKER_BYTES:
            raise ConfigError(
                f"{name}: {shown(text)} has {len(text.encode())} bytes; at most {MAX_BREAKER_BYTES} are allowed"
            )
    return strings


def check_stop_tokens(name: str, value: object) -> tuple[int, ...]:
    """Return token ids, each once."""
    return tuple(dict.fromkeys(token_ids(name, value)))


def check_logit_bias(name: str, value: object) -> dict[int, float]:
    """Return biases by token id; ids may be strings, as JSON has them."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of token ids to numbers, not {shown(value)}")
    if len(value) > MAX_BIASES:
        raise ConfigError(f"{name} has {len(value)} tokens; at most {MAX_BIASES} are allowed")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = _token(name, key)
        if token in biases:
            raise ConfigError(f"{name} has token {token} twice: give it once")
        biases[token] = _bias(f"{name} of token {token} (−inf bans it)", bias)
    return biases


def _token(name: str, key: object) -> int:
    text = text_of(key) or ""
    token = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else int_of(key)
    if token is None or not 0 <= token < 2**31:
        raise ConfigError(f"{name}: a key must be a token id (0 and above), not {shown(key)}")
    return token


def _bias(name: str, value: object) -> float:
    if number_of(value) == -math.inf:
        return -math.inf
    return check_float(name, value, -1e4, 1e4)


def check_processor(name: str, value: object) -> LogitsProcessor:
    """Return a logits processor."""
    if not callable(value) or iscoroutinefunction(value):
        raise ConfigError(
            f"{name} works only in this process, and must be a Python function of (token_ids, logits), "
            f"not {shown(value)}"
        )
    return value


def check_texts(name: str, value: object) -> tuple[str, ...]:
    """Return the different texts among which an answer chooses."""
    found = None if text_of(value) is not None else list_of(value)
    texts = tuple(text for item in found or () if (text := text_of(item)))
    if found is None or not 0 < len(texts) == len(found) <= MAX_TEXTS:
        raise ConfigError(
            f"{name} must be a list of 1 … {MAX_TEXTS} texts that are not empty, not {shown(value)}"
        )
    if len(set(texts)) < len(texts):
        raise ConfigError(f"{name} has a text twice: {shown(value)}")
    check_text(name, "".join(texts), MAX_GRAMMAR_LENGTH)
    return texts
