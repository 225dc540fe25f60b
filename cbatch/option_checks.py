"""Checks of options whose values are lists, mappings or JSON: each returns the plain value or raises `ConfigError`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache

from cbatch.checks import (
    MAX_KEY_LENGTH,
    check_flag,
    check_float,
    check_keys,
    check_path,
    check_text,
    json_text,
    shown,
    strings_of,
)
from cbatch.errors import ConfigError
from cbatch.plain import int_of, list_of, number_of, text_of

MAX_BIASES = 4096
"""Tokens that one request may give a bias: OpenAI takes 300, and a step must stay far below a pass over the row."""

MAX_BREAKERS = 64
MAX_BREAKER_BYTES = 40
"""llama.cpp cuts longer ones. Source: src/llama-sampler.cpp, llama_sampler_init_dry, MAX_CHAR_LEN."""

MAX_RPC_SERVERS = 16
"""Source: ggml/include/ggml-rpc.h, GGML_RPC_MAX_SERVERS."""


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
    return json_text("response_format: schema", inner["schema"])


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
    return float(check_float(f"the scale of adapter {adapter!r}", value, -100.0, 100.0))


def check_dry_breakers(name: str, value: object) -> tuple[str, ...]:
    """Return the strings past which DRY does not look."""
    strings = strings_of(name, value)
    if len(strings) > MAX_BREAKERS:
        raise ConfigError(f"{name} has {len(strings)} strings; at most {MAX_BREAKERS} are allowed")
    for text in strings:
        if len(text.encode()) > MAX_BREAKER_BYTES:
            raise ConfigError(
                f"{name}: {shown(text)} has {len(text.encode())} bytes; at most {MAX_BREAKER_BYTES} are allowed"
            )
    return strings


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
    return float(check_float(name, value, -1e4, 1e4))


def check_shares(name: str, value: object) -> tuple[float, ...]:
    """Return the shares of a model that devices hold."""
    items = list_of(value)
    if not items:
        raise ConfigError(
            f"{name} must be a list of numbers, one for each device, not {shown(value)}"
        )
    shares = tuple(float(check_float(f"a share in {name}", share, 0.0, 1e6)) for share in items)
    if not any(shares):
        raise ConfigError(f"{name} has no share above 0: leave it out to split by free memory")
    return shares


def check_servers(name: str, value: object) -> tuple[str, ...]:
    """Return the addresses of RPC servers."""
    items = list_of(value)
    if not items:
        raise ConfigError(f"{name} must be a list of 'host:port', not {shown(value)}")
    if len(items) > MAX_RPC_SERVERS:
        raise ConfigError(f"{name} has {len(items)} servers; at most {MAX_RPC_SERVERS} are allowed")
    return tuple(_server(name, item) for item in items)


def _server(name: str, value: object) -> str:
    text = text_of(value) or ""
    host, _, port = text.partition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not (host and is_number and 0 < int(port) < 2**16):
        raise ConfigError(
            f"{name}: a server must be 'host:port' with a port of 1 … 65535, not {shown(value)}"
        )
    return text


def check_adapter_files(name: str, value: object) -> dict[str, str]:
    """Return adapters' files by name."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of names to files, not {shown(value)}")
    files = {}
    for key, path in value.items():
        text = check_text(f"a name in {name}", key, MAX_KEY_LENGTH)
        files[text] = check_path(f"the file of {name} {text!r}", path)
    return files
