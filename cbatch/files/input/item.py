"""One item of a batch file: what it asks, or why it cannot be asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cbatch.checks import MAX_DEPTH
from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.files.units import cut

if TYPE_CHECKING:
    from collections.abc import Collection

    from cbatch.errors import CBatchError
    from cbatch.messages import BatchPrompt


_N_MESSAGE = 2000
"""Characters of a message: our choice; a wrong value in it may be as long as a line."""

_UNLABELLED = "line-"

_N_ID = 40
"""Characters of an id in a label: our choice; a bar's words stand beside others."""


@dataclass(frozen=True, slots=True)
class ItemError:
    """Why one item cannot be asked.

    Args:
        code: OpenAI's code where it has one: `invalid_json_line`, `duplicate_custom_id`, `url_mismatch`,
            `model_mismatch`; else one of ours.
        message: what is wrong, for people.
        param: the name in the request that it is about.
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
        id: the user's name for it, else one made of its number.
        prompt: what it asks, with its options, without an id; None where there is an `error`.
        error: why it cannot be asked.
        extra: what the format's encoder needs to write its answer: OpenAI's url and model, a table's row.
        is_labelled: whether `id` was given by the user.
    """

    number: int
    place: str
    id: str
    prompt: BatchPrompt | None
    error: ItemError | None = None
    extra: object = None
    is_labelled: bool = False


class LineError(Exception):
    """A line that gives no prompt; caught where its item is made."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        """Keep what becomes an `ItemError`; of a message that repeats a long value, the beginning."""
        self.error = ItemError(code, cut(message, _N_MESSAGE), param)
        super().__init__(message)


WRONG = (LineError, ConfigError, RecursionError)
"""What is raised where a line or a row gives no prompt."""


def what_is_wrong(error: Exception, names: Collection[str] = ()) -> ItemError:
    """Return what one of `WRONG` comes to; `names` are those that a refused prompt or option may be about."""
    if isinstance(error, LineError):
        return error.error
    if isinstance(error, RecursionError):
        return ItemError("invalid_json_line", f"its values are nested more than {MAX_DEPTH} deep")
    if isinstance(error, UnsupportedOptionError):
        return ItemError("unsupported_parameter", cut(str(error), _N_MESSAGE), error.option)
    message = cut(str(error), _N_MESSAGE)
    word = re.match(r"\w*", message)
    param = word[0] if word and word[0] in names else None
    return ItemError("invalid_request", message, param)


def duplicate(item: Item) -> Item:
    """Return an item whose id stands twice in the input as one that cannot be asked, with what is wrong with it."""
    error = item.error or _duplicate_id(item)
    return replace(item, prompt=None, error=error)


def _duplicate_id(item: Item) -> ItemError:
    twice = f"the id {item.id!r} stands twice"
    if not item.is_labelled:
        twice = f"it has no id, and {item.id!r}, under which it would be answered, is another's"
    elif item.id.startswith(_UNLABELLED):
        twice += ", or a request without an id is answered under it"
    return ItemError("duplicate_custom_id", f"{twice}: ids must be unique", "custom_id")


def in_own_words(error: CBatchError, id: str) -> CBatchError:
    """Return an error without the id by which the engine knows the item."""
    start = f"request {id!r}: "
    if type(error) is ConfigError and str(error).startswith(start):
        return ConfigError(str(error).removeprefix(start))
    return error


def label(item: Item) -> str:
    """Return an item's number and the beginning of its id, escaped: by it people find it in reports and traces."""
    return f"{item.number} {cut(item.id, _N_ID)!r}" if item.is_labelled else str(item.number)


def bytes_of(id: str) -> bytes:
    """Return an id as bytes, also one with half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return id.encode("utf-8", "surrogatepass")


def unlabelled(number: int) -> str:
    """Return the id of an item whose line should have one and has none."""
    return f"{_UNLABELLED}{number}"


def key_of_id(id: str, *, has_rows: bool) -> str:
    """Return what an item is claimed by that is answered under this id; see `item_key`.

    An id of lines that one without an id would be answered under is taken for that of such a line.
    """
    if has_rows or re.fullmatch(rf"{_UNLABELLED}[1-9][0-9]*", id):
        return f"\0{id.removeprefix(_UNLABELLED)}"
    return f"\0:{id}" if id.startswith("\0") else id


def item_key(item: Item) -> str:
    """Return what to claim an item by: the user's name for it, else its number behind what no key of a name has."""
    if not item.is_labelled:
        return f"\0{item.number}"
    return f"\0:{item.id}" if item.id.startswith("\0") else item.id


def rival_key(item: Item) -> str | None:
    """Return the key of an item that would be answered under the same id, one of both having none; None: no such."""
    if not item.id.startswith(_UNLABELLED):
        return None
    return f"\0{item.id.removeprefix(_UNLABELLED)}" if item.is_labelled else item.id
