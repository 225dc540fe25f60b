"""What an item asks, as a digest: where it is as before, so is the answer, and it need not run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from hashlib import blake2b
from json import JSONEncoder
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from cbatch.files.input.item import bytes_of
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from cbatch.files.input.item import Item

_N_BYTES = 16

_NAMES = tuple(
    f.name for f in fields(RunOptions) if f.name not in ("max_completion_tokens", "priority")
)
"""Options that an answer depends on; `max_completion_tokens` is settled as `max_tokens`."""

_STRUCTURE = ("json_schema", "response_format", "regex", "grammar")
"""One that is said stands for all of them. Source: `RunOptions.over`."""

_values = attrgetter(*_NAMES)


def _plain(value: object) -> object:
    """Return what JSON has no word for as something that it has."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (set, frozenset)) else repr(value)


# The order of keys says nothing in a message, but much in a schema: models write its properties in that order.
_messages = JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain).encode
as_json = JSONEncoder(separators=(",", ":"), default=_plain).encode


class Digests:
    """Makes the digests of the items of one run."""

    def __init__(self, defaults: RunOptions, fingerprint: str) -> None:
        """Keep what all items have in common.

        Args:
            defaults: options that hold where an item says nothing.
            fingerprint: of the model and of what else answers depend on.
        """
        self._defaults = _said(defaults)
        self._start = blake2b(fingerprint.encode("utf-8", "surrogatepass"), digest_size=_N_BYTES)
        self._start.update(b"\0")

    def __call__(self, item: Item) -> bytes:
        """Return 16 bytes: the same for the same question, whatever its number and id.

        Of what is no question, its place counts too: the record of its error says where it stands.
        """
        digest = self._start.copy()
        digest.update(self._question(item).encode("utf-8", "surrogatepass"))
        return digest.digest()

    def _question(self, item: Item) -> str:
        prompt, error = item.prompt, item.error
        if prompt is None:
            said = error and (item.place, error.code, error.message, error.param)
            return f"error {as_json(said)}{as_json(item.extra)}"
        asked = _messages((prompt.messages, prompt.prompt, prompt.tokens))
        return (
            f"{asked}{as_json(self._settled(RunOptions.of(prompt.options)))}{as_json(item.extra)}"
        )

    def _settled(self, options: RunOptions) -> dict[str, Any]:
        said = _said(options)
        if not said:
            return self._defaults
        defaults = self._defaults
        if not said.keys().isdisjoint(_STRUCTURE):
            defaults = {name: v for name, v in defaults.items() if name not in _STRUCTURE}
        both = {**defaults, **said}
        return {name: both[name] for name in _NAMES if name in both}


def placed(digest: bytes, place: str) -> bytes:
    """Return the digest of an item that is an error for its id alone: its record says where it stands, if anywhere."""
    if not place:
        return digest
    return blake2b(bytes_of(place), key=digest, digest_size=_N_BYTES).digest()


def _said(options: RunOptions) -> dict[str, Any]:
    """Return the options that say something, in one order; 1.0 is written as 1."""
    return {
        name: int(value) if type(value) is float and value.is_integer() else value
        for name, value in zip(_NAMES, _values(options), strict=True)
        if value is not None
    }
