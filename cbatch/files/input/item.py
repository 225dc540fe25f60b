"""One item of a batch file: its prompt or its error, and its id."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.errors import CBatchError, ConfigError, OutputError, UnsupportedOptionError
from cbatch.files.units import cut
from cbatch.support.checks import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cbatch.messages import BatchPrompt


_N_MESSAGE = 2000
"""Characters of a message or a name: our choice; each may be as long as a line."""

_UNLABELLED = "line-"
_N_ID = 40  # characters of an id in a label: our choice


@dataclass(frozen=True, slots=True)
class ItemError:
    """Why one item cannot run.

    The code is OpenAI's where OpenAI has one (`invalid_json_line`, `duplicate_custom_id`, `url_mismatch`,
    `model_mismatch`), else cbatch's; `param` is the name in the request that is wrong.
    """

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One item as it was read.

    Args:
        number: 1, 2, … over all inputs, blank lines not counted.
        place: file and line, for people.
        id: the user's id, else an id made of the number.
        prompt: with its options, without an id; None where there is an `error`.
        error: why the item cannot run.
        extra: what the encoder of the format needs for the answer: OpenAI's url and model, a table's row.
        is_labelled: whether the user gave `id`.
        weight: of the line that it was read from, as `json_weight`, where what was read of it is kept.
    """

    number: int
    place: str
    id: str
    prompt: BatchPrompt | None
    error: ItemError | None = None
    extra: object = None
    is_labelled: bool = False
    weight: int = 0


class InputLineError(Exception):
    """A line that gives no prompt; caught where the item is made."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        self.error = ItemError(code, cut(message, _N_MESSAGE), param and cut(param, _N_MESSAGE))
        super().__init__(message)


WRONG = (
    InputLineError,
    ConfigError,
    RecursionError,
)  # errors of a line or a row that gives no prompt


def what_is_wrong(error: Exception, names: Collection[str] = ()) -> ItemError:
    """Return one of `WRONG` as an `ItemError`; its `param` is the first word of the message if that is in `names`."""
    if isinstance(error, InputLineError):
        return error.error
    if isinstance(error, RecursionError):
        return ItemError("invalid_json_line", f"its values are nested more than {MAX_DEPTH} deep")
    message = cut(str(error), _N_MESSAGE)
    if isinstance(error, UnsupportedOptionError):
        return ItemError("unsupported_parameter", message, cut(error.option, _N_MESSAGE))
    word = re.match(r"\w*", message)
    return ItemError("invalid_request", message, word[0] if word and word[0] in names else None)


def duplicate(item: Item, first: int) -> Item:
    """Return an item as one with an error: the item with the number `first` has its id."""
    twice = f"the id {item.id!r} occurs twice, first in request {first}"
    if not item.is_labelled:
        twice = f"the line has no id, and {item.id!r}, which its answer would have, is the id of request {first}"
    error = ItemError("duplicate_custom_id", f"{twice}: ids must be unique", "custom_id")
    return replace(item, prompt=None, error=item.error or error)


def in_own_words(error: CBatchError, id: str) -> CBatchError:
    """Return an error without the id that the engine uses for the item."""
    start = f"request {id!r}: "
    if type(error) is ConfigError and str(error).startswith(start):
        return ConfigError(str(error).removeprefix(start))
    return error


def label(item: Item) -> str:
    """Return an item's number and the beginning of its id, escaped, as reports and traces show it."""
    return f"{item.number} {cut(item.id, _N_ID)!r}" if item.is_labelled else str(item.number)


# ---- ids ----


def bytes_of(id: str) -> bytes:
    """Return an id as bytes; it may have half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    return id.encode("utf-8", "surrogatepass")


def unlabelled(number: int) -> str:
    """Return the id of an item whose line has no id."""
    return f"{_UNLABELLED}{number}"


def key_of_id(id: str, *, has_rows: bool) -> str:
    """Return the key of the item whose record has this id; see `item_key`.

    An id such as `line-7` counts as that of a line without an id.
    """
    if has_rows or re.fullmatch(rf"{_UNLABELLED}[1-9][0-9]*", id):
        return f"\0{id.removeprefix(_UNLABELLED)}"
    return f"\0:{id}" if id.startswith("\0") else id


def item_key(item: Item) -> str:
    """Return the key of an item: the user's id, else its number after a NUL, which no other key begins with."""
    if not item.is_labelled:
        return f"\0{item.number}"
    return f"\0:{item.id}" if item.id.startswith("\0") else item.id


def rival_key(item: Item) -> str | None:
    """Return the key of the item that would have the same id in its record: one of the two has no id of its own."""
    if not item.id.startswith(_UNLABELLED):
        return None
    return f"\0{item.id.removeprefix(_UNLABELLED)}" if item.is_labelled else item.id


class Seen:
    """The ids of the items so far, on disk as soon as they are many."""

    def __init__(self) -> None:
        self._db = scratch("CREATE TABLE seen (id BLOB PRIMARY KEY, number INT) WITHOUT ROWID")

    def add(self, key: str, number: int, rival: str | None = None) -> int | None:
        """Add the key of an item with a number; return the number of the item that has the key or its rival already.

        See `item_key` and `rival_key`.
        """
        row = _digest(key), number
        with scratch_told():
            if self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", row).rowcount < 1:
                return self._number(key)
            return None if rival is None else self._number(rival)

    def _number(self, key: str) -> int | None:
        found = self._db.execute("SELECT number FROM seen WHERE id = ?", (_digest(key),)).fetchone()
        return None if found is None else int(found[0])

    def error_of(self, item: Item) -> ItemError | None:
        """Return an item's error, also where its id is not new; call it once for each item."""
        rival = rival_key(item)
        if not item.is_labelled and rival is None:  # a row has only its number
            return item.error
        first = self.add(item_key(item), item.number, rival)
        return item.error if first is None else duplicate(item, first).error

    def close(self) -> None:
        """Drop all ids."""
        self._db.close()


def _digest(key: str) -> bytes:
    return blake2b(bytes_of(key), digest_size=16).digest()


@contextmanager
def scratch_told() -> Iterator[None]:
    """Raise an error of a temporary database, which has no room, as `OutputError`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        way_out = "free some space, or name another folder in TMPDIR"
        raise OutputError(Path(tempfile.gettempdir()), f"{error}: {way_out}") from error


def scratch(*statements: str) -> sqlite3.Connection:
    """Return a temporary database, on disk where it is large; any thread may use it, and closing it removes it."""
    db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for statement in ("PRAGMA journal_mode = OFF", *statements, "BEGIN"):
        db.execute(statement)
    return db
