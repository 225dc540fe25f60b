"""The settings of a server, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cbatch.errors import ConfigError
from cbatch.support.checks import (
    MAX_INT,
    MAX_KEY_LENGTH,
    MAX_TIME_S,
    check_fields,
    check_flag,
    check_float,
    check_int,
    check_names,
    check_path,
    check_seconds,
    check_text,
    checked,
    strings_of,
)
from cbatch.support.plain import list_of, text_of

MIB = 2**20

_LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
"""What `localhost` stands for. Source: llama.cpp tools/server, origin_is_localhost."""


class SizeLimit(NamedTuple):
    """How large something of a client may be, and the option that says so."""

    n_bytes: int
    option: str


def _keys_of(name: str, value: object) -> tuple[str, ...]:
    """Return keys without surrounding white space, as clients send them; refuse a blank key, which would let all in."""
    given = list_of(value) if (text := text_of(value)) is None else [text]
    if any(key is not None and not key.strip() for key in map(text_of, given or ())):
        raise ConfigError(f"{name} has a blank key: remove it, or give a key")
    return tuple(key.strip() for key in strings_of(name, value))


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server treats its clients.

    Args:
        model_name: what answers call the model. Default: the engine's name.
        api_keys: clients must give one of these; without any, everybody is served.
        cors_origins: web pages from these origins may call, "localhost" for those of this machine at any port, "*" for
            all. Default: none.
        allowed_hosts: host names that requests may use besides IP addresses and localhost, "*" for all; others are
            refused. With keys, every name is allowed.
        max_queue: most requests, each choice counted, that wait beside those that run; further ones get status 429.
        max_queue_tokens: most tokens of the prompts that wait; a request that has to wait and has more gets status 429.
        max_body_mib: most mebibytes of a request's body.
        max_bodies_mib: most mebibytes of all bodies above 64 KiB together, from their first bytes until their requests
            are computed; further ones get status 429. Default: an eighth of the free memory.
        max_choices: most answers, prompts × n, of one call; with `choice_probs`, prompts × texts of `choice`;
            texts of a call for embeddings or scores.
        max_answers_mib: most mebibytes of memory, about, for answers that are computed or wait for their clients.
            While those being computed take half of it, new calls get status 429; above it, the call is ended whose
            answer is the largest or is read the slowest.
        body_timeout_s: seconds in which a request's body must arrive.
        status_after_s: seconds after which a stream's status is sent though nothing was computed yet; an error before
            has a status of its own.
        keep_alive_s: seconds of silence in a stream, after which a comment is sent.
        stall_s: seconds without progress of the engine, while requests are in flight, after which `/health` says so.
        strict_fields: refuse requests with unknown fields. Default: ignore these, and name them in a header.
        model_required: refuse requests that name no model.
        allow_cache_keys: let clients save cells on disk (`cache_key`); each API key has a namespace of its own.
        files_dir: folder of uploaded files and batches, made where it is new; one server at a time uses it. Default:
            neither files nor batches.
        max_file_mib: most mebibytes of an uploaded file.
        max_stored_mib: most mebibytes of all files together, above which no more are taken.
        page: serve the page at `/`, to try the model and to see the engine at work.

    Raises:
        ConfigError: a value of the wrong type, or out of range.
        UnsupportedOptionError: a name that is not listed above.
    """

    model_name: str | None = checked(check_text, MAX_KEY_LENGTH)
    api_keys: Sequence[str] = field(
        default=(), repr=False, metadata={"check": _keys_of, "limits": ()}
    )
    cors_origins: Sequence[str] = checked(strings_of, default=())
    allowed_hosts: Sequence[str] = checked(strings_of, default=())
    max_queue: int | None = checked(check_int, 0, MAX_INT)
    max_queue_tokens: int | None = checked(check_int, 0, MAX_INT)
    max_body_mib: int = checked(check_int, 1, 1024, default=32)
    max_bodies_mib: int | None = checked(check_int, 1, MAX_INT)
    max_choices: int = checked(check_int, 1, MAX_INT, default=2048)
    max_answers_mib: int = checked(check_int, 1, MAX_INT, default=2048)
    body_timeout_s: float = checked(check_seconds, default=60.0)
    status_after_s: float = checked(check_seconds, default=10.0)
    keep_alive_s: float = checked(check_float, 0.01, MAX_TIME_S, default=1.0)
    stall_s: float = checked(check_seconds, default=60.0)
    strict_fields: bool = checked(check_flag, default=False)
    model_required: bool = checked(check_flag, default=False)
    allow_cache_keys: bool = checked(check_flag, default=False)
    files_dir: str | os.PathLike[str] | None = checked(check_path)
    max_file_mib: int = checked(check_int, 1, MAX_INT, default=512)
    max_stored_mib: int = checked(check_int, 1, MAX_INT, default=10_240)
    page: bool = checked(check_flag, default=True)

    def __new__(cls, **settings: Any) -> ServerSettings:
        """Refuse unknown names with cbatch's own error."""
        check_names(cls.__dataclass_fields__, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_bodies_mib is not None and self.max_bodies_mib < self.max_body_mib:
            raise ConfigError(
                f"max_bodies_mib is {self.max_bodies_mib}, and max_body_mib {self.max_body_mib}: "
                "raise the first, or lower the second"
            )

    @property
    def cors_pattern(self) -> str | None:
        """A regular expression of more origins that may call; None for no more."""
        return _LOCAL_ORIGIN if "localhost" in self.cors_origins else None

    def is_allowed_origin(self, origin: str) -> bool:
        """Return whether web pages of an origin may call."""
        pattern, origins = self.cors_pattern, self.cors_origins
        is_local = pattern is not None and re.fullmatch(pattern, origin) is not None
        return "*" in origins or origin in origins or is_local

    @property
    def body_limit(self) -> SizeLimit:
        """The limit of a request's body, and of a line of a batch."""
        return SizeLimit(self.max_body_mib * MIB, f"--max-body-mib {self.max_body_mib}")

    @property
    def file_limit(self) -> SizeLimit:
        """The limit of an uploaded file."""
        return SizeLimit(self.max_file_mib * MIB, f"--max-file-mib {self.max_file_mib}")
