"""Encoders turn results into records; those of rows write the input's columns, then those of the answer."""

from __future__ import annotations

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import chain, count
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from cbatch.files.input.item import key_of_id
from cbatch.files.input.row_prompts import as_text

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from cbatch.files.input.item import Item, ItemError
    from cbatch.files.input.row_prompts import Row
    from cbatch.response import BatchResult


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode


def dump(value: object) -> bytes:
    """Return a value as a line of JSON; a type that JSON lacks as text, NaN and infinities as null."""
    try:
        text = _encode(value)
    except ValueError:
        text = _encode(_finite(value))
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        return f"{json.dumps(json.loads(text))}\n".encode()


def _finite(value: object) -> object:
    """Return a value with null in place of NaN and infinities, which tables may have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Encoder:
    """Writes records, each whole with its line end; this class itself writes nothing."""

    def header(self) -> bytes:
        """Return the bytes before the first record."""
        return b""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return the record of an item that ran, failed or not.

        Args:
            item: as it was read.
            result: of the item; its id is not used.
            digest: of the item, for formats that repeat it.
            created: seconds since 1970.
            model: the name of the model, where the request named none.
        """
        return b""

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the record of an item that could not run."""
        return b""

    def finish(self, records: Path, target: Path, n_items: int) -> None:
        """Write the output from the file of records of `n_items`, for formats that are written at the end of a run."""


class Known(NamedTuple):
    """The item of a record: its key, its digest, and whether the record is an error."""

    key: str
    digest: bytes
    is_error: bool


class TraceableEncoder(Encoder, ABC):
    """An encoder whose records name their item."""

    def __init__(self, *, has_rows: bool) -> None:
        """Take whether an item's id is the number of its row."""
        self._has_rows = has_rows

    def _known(self, id: str, digest: bytes | None, *, is_error: bool) -> Known | None:
        if digest is None:
            return None
        return Known(key_of_id(id, has_rows=self._has_rows), digest, is_error)

    @abstractmethod
    def known(self, record: Mapping[str, object]) -> Known | None:
        """Return the item of a record; None for the error of an item that could not run.

        Raises:
            LineError: the record is not one of this encoder's.
        """


# ---- rows ----

ANSWERS: Mapping[str, type] = MappingProxyType(
    {
        "response": str,
        "finish_reason": str,
        "error": str,
        "prompt_tokens": int,
        "completion_tokens": int,
    }
)
"""The added columns, and their types."""


def added_names(columns: Collection[str]) -> tuple[str, ...]:
    """Return the names of the added columns, with a number where the table has a column of that name."""
    return tuple(_free(name, columns) for name in ANSWERS)


def _free(name: str, taken: Collection[str]) -> str:
    names = chain([name], (f"{name}_{n}" for n in count(2)))
    return next(candidate for candidate in names if candidate not in taken)


def answer(result: BatchResult) -> tuple[object, ...]:
    """Return the values of the added columns."""
    usage = result.usage
    return (
        _response(result),
        result.finish_reason,
        None if result.error is None else str(result.error),
        usage.prompt_tokens,
        usage.completion_tokens,
    )


def no_answer(message: str) -> tuple[object, ...]:
    """Return the values of the added columns for an item that could not run."""
    return "", "error", message, None, None


def _response(result: BatchResult) -> str:
    """Return the text; of tool calls without text, the calls as JSON; of several answers, a list."""
    if len(result.choices) > 1:
        return as_text([_response(choice) for choice in result.choices])
    if result.tool_calls and not result.text:
        return as_text([call.as_dict() for call in result.tool_calls])
    return result.text


class RowEncoder(Encoder, ABC):
    """Writes an item's own columns, then its answer."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        """Take the columns of the input's rows; None: its items are requests, which have an id."""
        self._has_rows = columns is not None
        self._own = ("id",) if columns is None else tuple(columns)
        self._added = added_names(self._own)

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return a result as a whole record."""
        return self._record(item, answer(result))

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the record of an item that could not run."""
        return self._record(item, no_answer(f"{item.place}: {error.message}"))

    def _row(self, item: Item) -> Row:
        if not self._has_rows:
            return {"id": item.id}
        return item.extra if isinstance(item.extra, Mapping) else {}

    def _whole_row(self, item: Item, values: tuple[object, ...]) -> Row:
        row = self._row(item)
        added = self._added if row.keys().isdisjoint(self._added) else added_names(row)
        return {**row, **dict(zip(added, values, strict=True))}

    @abstractmethod
    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        """Return a record of the values of the added columns."""


class ObjectEncoder(RowEncoder):
    """Writes JSON objects, one a line; each has the keys of its row."""

    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        return dump(self._whole_row(item, values))


class CsvEncoder(RowEncoder):
    """Writes CSV; a missing value is an empty field, a nested one is JSON."""

    def __init__(self, columns: Sequence[str] | None, delimiter: str) -> None:
        """Take the columns; other values of a row are left out."""
        super().__init__(columns)
        self._columns, self._delimiter = (*self._own, *self._added), delimiter

    def header(self) -> bytes:
        """Return the line of names."""
        return self._line(self._columns)

    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        row = self._whole_row(item, values)
        return self._line([as_text(row.get(column)) for column in self._columns])

    def _line(self, cells: Sequence[str]) -> bytes:
        text = io.StringIO()
        # fields that have one of the characters of a line's end are quoted
        csv.writer(text, delimiter=self._delimiter, lineterminator="\r\n").writerow(cells)
        return text.getvalue().removesuffix("\r\n").encode(errors="replace") + b"\n"
