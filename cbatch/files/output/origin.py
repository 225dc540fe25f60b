"""Which input an output is of: another one is refused before it takes the places of the answers that are there."""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.checks import readable
from cbatch.files.output.manifest import NUMBERED, record_key
from cbatch.files.places import is_dash
from cbatch.files.units import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cbatch.files.output.manifest import Manifest

_FIRST, _OTHERS, _ITEM = "first input", "other inputs", "first item"
NAMES = (_FIRST, _OTHERS, _ITEM)
"""Under these a manifest keeps where the input was, the names of its other files, and the digest of its first item."""

_PIPE = "a pipe"
_N_SHOWN = 200

_ANSWER = "SELECT digest FROM records WHERE key = ? AND NOT is_error"
_ANY = "SELECT 1 FROM records WHERE key > ? AND key < ? AND NOT is_error LIMIT 1"


class Origin:
    """An input as a run finds it."""

    def __init__(
        self,
        paths: Sequence[str],
        output: Path,
        look: Callable[[], Sequence[tuple[str, bytes]]],
        *,
        is_at_hand: bool,
    ) -> None:
        """Look at nothing yet.

        Args:
            paths: of the input.
            output: from its folder the first input's place is told, so that both may be moved together.
            look: returns keys and digests of the first items, at least of one.
            is_at_hand: whether `look` need not wait for somebody to write.
        """
        folder = Path(os.path.realpath(output)).parent
        self._first, self._others = _place(paths[0], folder), _names(paths)
        self._look, self._is_at_hand = look, is_at_hand

    @cached_property
    def _sample(self) -> Sequence[tuple[str, bytes]]:
        return self._look()

    def noted(self) -> dict[str, str]:
        """Return what a manifest keeps of it."""
        first = self._sample[0][1].hex() if self._is_at_hand else ""
        return {_FIRST: self._first or _PIPE, _OTHERS: json.dumps(self._others), _ITEM: first}

    def difference(self, manifest: Manifest) -> str | None:
        """Return what tells it from the input whose answers are there; None: it is the same, or puts none at risk.

        The same is a file at the same place, whatever was edited in it. A file elsewhere or a pipe is the same if most
        of its first items that have an answer ask what they did; where none has an answer, if it begins alike. Its
        other files must be those that were, or more behind them; but what is known by its id may come from any file.
        """
        before = manifest.settings()
        was, is_now = before.get(_FIRST, _PIPE), self._first or _PIPE
        if (self._first is None or was != is_now) and not self._begins_as(manifest, before):
            return f"{_FIRST} was {readable(was)}, is {readable(is_now)}, and its items are others"
        others = json.loads(before.get(_OTHERS, "[]"))
        if others != self._others[: len(others)] and _has_numbered(manifest):
            return f"{_OTHERS} were {_shown(others)}, are {_shown(self._others)}"
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


def _place(path: str, folder: Path) -> str | None:
    """Return where a file is, as seen from a folder; None for what is no file."""
    if is_dash(path) or not Path(path).is_file():
        return None
    return os.path.relpath(os.path.realpath(path), folder)


def inputs_of(settings: Mapping[str, str], folder: Path) -> list[str]:
    """Return the files that an output in this folder was made of; none where one was a pipe."""
    first, others = settings.get(_FIRST, _PIPE), json.loads(settings.get(_OTHERS, "[]"))
    if first == _PIPE or any(map(is_dash, others)):
        return []
    path = os.path.normpath(folder / first)
    return [path, *(os.path.normpath(Path(path).parent / other) for other in others)]


def _names(paths: Sequence[str]) -> list[str]:
    """Return the names of all files but the first, as seen from the folder of that one."""
    folder = Path(paths[0]).parent
    return [path if is_dash(path) else os.path.relpath(path, folder) for path in paths[1:]]


def _has_numbered(manifest: Manifest) -> bool:
    """Whether there are answers that are known by the number of their item alone."""
    return manifest.execute(_ANY, *NUMBERED).fetchone() is not None


def _shown(names: Sequence[str]) -> str:
    return cut(", ".join(map(readable, names)) or "none", _N_SHOWN)
