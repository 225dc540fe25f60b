"""What tells one question, and one input, from another.

An item has a digest of its question: as long as that is the same, so is the answer, and the item need not run again. An
output has the origin of its items: another input is refused before its answers replace those in the output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from hashlib import blake2b
from json import JSONEncoder
from operator import attrgetter
from pathlib import Path
from typing import Any

from cbatch.files.input.item import Item, bytes_of
from cbatch.files.output.manifest import NUMBERED, Manifest, record_key
from cbatch.files.places import is_dash, real
from cbatch.files.units import cut
from cbatch.options import STRUCTURE, RunOptions
from cbatch.support.checks import readable

_N_BYTES = 16

_WITHOUT_EFFECT = ("cache_salt", "max_completion_tokens", "pause_every", "priority", "slot")
"""What an answer does not depend on; `max_completion_tokens` is merged into `max_tokens`."""

_NAMES = tuple(f.name for f in fields(RunOptions) if f.name not in _WITHOUT_EFFECT)

_values = attrgetter(*_NAMES)


def _plain(value: object) -> object:
    """Return a value of a type that JSON lacks as one of a type that it has."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (set, frozenset)) else repr(value)


# The order of keys means nothing in a message; in a schema it is the order in which models write properties.
_messages = JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain).encode
as_json = JSONEncoder(separators=(",", ":"), default=_plain).encode


class Digests:
    """Computes the digests of the items of one run."""

    def __init__(self, defaults: RunOptions, fingerprint: str) -> None:
        """Take the values that all items share.

        Args:
            defaults: of the options that an item leaves out.
            fingerprint: of the model and of everything else that answers depend on.
        """
        self._defaults = _said(defaults)
        self._start = blake2b(fingerprint.encode("utf-8", "surrogatepass"), digest_size=_N_BYTES)
        self._start.update(b"\0")

    def __call__(self, item: Item) -> bytes:
        """Return 16 bytes: the same for the same question, whatever the item's number and id are.

        Of an item with an error the place counts too, for the record of the error names it.
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
        if not said.keys().isdisjoint(STRUCTURE):
            defaults = {name: v for name, v in defaults.items() if name not in STRUCTURE}
        both = {**defaults, **said}
        return {name: both[name] for name in _NAMES if name in both}


def placed(digest: bytes, place: str, first: int) -> bytes:
    """Return the digest of a duplicate: its error names its place, and the number of the first item with its id."""
    return blake2b(bytes_of(f"{first} {place}"), key=digest, digest_size=_N_BYTES).digest()


def _said(options: RunOptions) -> dict[str, Any]:
    """Return the options that have a value, in a fixed order; 1.0 is written as 1."""
    return {
        name: int(value) if type(value) is float and value.is_integer() else value
        for name, value in zip(_NAMES, _values(options), strict=True)
        if value is not None
    }


# ---- inputs ----

_FIRST, _OTHERS, _ITEM = "first input", "other inputs", "first item"
ORIGIN_NAMES = (_FIRST, _OTHERS, _ITEM)
"""Names in a manifest's settings: the place of the input's first file, its other files, its first item's digest."""

ERRORS = "errors so far"
"""A name in a manifest's settings: kinds and first message of the errors among its records, as JSON."""

MADE = "output as written"
"""A name in a manifest's settings: `mark_of` the columnar output that may be replaced.

It was written from the records, or was there when a run began with --force. While it is replaced, the new one's too.
"""

_PIPE = "a pipe"
_N_SHOWN = 200
_N_MARKED = 2**16

_ANSWER = "SELECT digest FROM records WHERE key = ? AND NOT is_error"
_ANY = "SELECT 1 FROM records WHERE key > ? AND key < ? AND NOT is_error LIMIT 1"


class InputIdentity:
    """The input of a run, to be compared with the input of an output."""

    def __init__(
        self,
        paths: Sequence[str],
        output: Path,
        look: Callable[[], Sequence[tuple[str, bytes]]],
        *,
        is_at_hand: bool,
    ) -> None:
        """Keep the arguments; nothing is read yet.

        Args:
            paths: of the input.
            output: the place of the first file is relative to its folder, so that both may be moved together.
            look: returns keys and digests of the first items, at least of one.
            is_at_hand: whether `look` returns without waiting for a pipe.
        """
        self._first, folder = _place(paths[0], real(output).parent), Path(paths[0]).parent
        self._others = [p if is_dash(p) else os.path.relpath(p, folder) for p in paths[1:]]
        self._look, self._is_at_hand = look, is_at_hand

    @cached_property
    def _sample(self) -> Sequence[tuple[str, bytes]]:
        return self._look()

    def noted(self) -> dict[str, str]:
        """Return the settings that a manifest keeps of it."""
        first = self._sample[0][1].hex() if self._is_at_hand else ""
        return {_FIRST: self._first, _OTHERS: json.dumps(self._others), _ITEM: first}

    def difference(self, manifest: Manifest) -> str | None:
        """Return how this input differs from that of the manifest; None: it is the same, or no answer is at risk.

        A file at the same place is the same input, whatever was edited in it. A file elsewhere or a pipe is the same if
        most of its first items that have an answer have the same digest as then; if none has an answer, the first item
        must have the same digest. The other files must be the same, with more after them if need be, unless all items
        have ids.
        """
        before = manifest.settings()
        was, is_now = before.get(_FIRST, _PIPE), self._first
        if (is_now == _PIPE or was != is_now) and not self._begins_as(manifest, before):
            return f"{_FIRST} was {readable(was)}, is now {readable(is_now)}, and its items differ"
        others = json.loads(before.get(_OTHERS, "[]"))
        if others != self._others[: len(others)] and _has_numbered(manifest):
            return f"{_OTHERS} were {_shown(others)}, are now {_shown(self._others)}"
        return None

    def _begins_as(self, manifest: Manifest, before: dict[str, str]) -> bool:
        n_same = n_changed = 0
        for id, digest in self._sample:
            for (found,) in manifest.rows(_ANSWER, record_key(id)):
                n_same += found == digest
                n_changed += found != digest
        if n_same or n_changed:
            return n_same >= n_changed
        return before.get(_ITEM) == self._sample[0][1].hex() or not _has_numbered(manifest)


def _place(path: str, folder: Path) -> str:
    if is_dash(path) or not Path(path).is_file():
        return _PIPE
    return os.path.relpath(os.path.realpath(path), folder)


def mark_of(path: Path) -> str:
    """Return a file's size and a digest of its beginning and end; a changed file hardly ever has the same."""
    with path.open("rb") as file:
        return mark_of_opened(file)


def mark_of_opened(file: Any) -> str:
    """Return `mark_of` a file that is open for reading bytes, also one of pyarrow's."""
    file.seek(0, os.SEEK_END)
    size, digest = file.tell(), blake2b(digest_size=16)
    for start in (0, max(0, size - _N_MARKED)):
        file.seek(start)
        digest.update(file.read(_N_MARKED))
    return f"{size} {digest.hexdigest()}"


def inputs_of(settings: Mapping[str, str], folder: Path) -> list[str]:
    """Return the input files of an output in this folder; none where one was a pipe."""
    first, others = settings.get(_FIRST, _PIPE), json.loads(settings.get(_OTHERS, "[]"))
    if first == _PIPE or any(map(is_dash, others)):
        return []
    path = os.path.normpath(folder / first)
    return [path, *(os.path.normpath(Path(path).parent / other) for other in others)]


def _has_numbered(manifest: Manifest) -> bool:
    """Whether there are answers to items without an id, which have only their number."""
    return manifest.execute(_ANY, *NUMBERED).fetchone() is not None


def _shown(names: Sequence[str]) -> str:
    return cut(", ".join(map(readable, names)) or "none", _N_SHOWN)
