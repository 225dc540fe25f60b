"""Rows of tables, written: the input's columns, then those of the answer."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from cbatch.files.input.lines import dump
from cbatch.files.input.template import as_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from cbatch.files.input.item import Item, ItemError
    from cbatch.files.input.row_prompts import Row
    from cbatch.response import BatchResult

ANSWERS: Mapping[str, type] = MappingProxyType(
    {
        "response": str,
        "finish_reason": str,
        "error": str,
        "prompt_tokens": int,
        "completion_tokens": int,
    }
)
"""Columns that are added, and what is in them."""


def added_names(columns: Collection[str]) -> tuple[str, ...]:
    """Return the names of the columns that are added, with a number where the table has such a name."""
    return tuple(_free(name, columns) for name in ANSWERS)


def _free(name: str, taken: Collection[str]) -> str:
    candidate, n = name, 1
    while candidate in taken:
        n += 1
        candidate = f"{name}_{n}"
    return candidate


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
    """Return the values of the added columns for an item that could not be asked."""
    return "", "error", message, None, None


def _response(result: BatchResult) -> str:
    """Return the text; where tools are called and nothing is said, the calls as JSON; of several answers, a list."""
    if len(result.choices) > 1:
        return as_text([_response(choice) for choice in result.choices])
    if result.tool_calls and not result.text:
        return as_text([call.as_dict() for call in result.tool_calls])
    return result.text


_LINE_END = "\r\n"  # fields that hold a character of it are quoted


class _RowWriter(Protocol):
    """Writes rows of fixed columns as records."""

    def header(self) -> bytes:
        """Return what stands before the first record."""

    def record(self, number: int, row: Row) -> bytes:
        """Return a row as a whole record."""


class TableEncoder:
    """Writes what an item has of its own, then its answer."""

    def __init__(
        self, columns: Sequence[str] | None, make_writer: Callable[[Sequence[str]], _RowWriter]
    ) -> None:
        """Make one.

        Args:
            columns: those of the input's rows; None: its items are no rows, they have an id.
            make_writer: makes the writer of all columns.
        """
        self._has_rows = columns is not None
        own = ("id",) if columns is None else tuple(columns)
        self._added = added_names(own)
        self._writer = make_writer((*own, *self._added))

    def header(self) -> bytes:
        """Return what stands before the first record."""
        return self._writer.header()

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return a result as a whole record."""
        return self._record(item, answer(result))

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the record of an item that could not be asked."""
        return self._record(item, no_answer(f"{item.place}: {error.message}"))

    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        row = self._own(item)
        added = self._added if row.keys().isdisjoint(self._added) else added_names(row)
        return self._writer.record(item.number, {**row, **dict(zip(added, values, strict=True))})

    def _own(self, item: Item) -> Row:
        if not self._has_rows:
            return {"id": item.id}
        return item.extra if isinstance(item.extra, Mapping) else {}


class CsvWriter:
    """Writes CSV; what is nothing is an empty field, what is nested is JSON."""

    def __init__(self, columns: Sequence[str], delimiter: str) -> None:
        """Make one for these columns; a row's others are left out."""
        self._columns, self._text = columns, io.StringIO()
        self._csv = csv.writer(self._text, delimiter=delimiter, lineterminator=_LINE_END)

    def header(self) -> bytes:
        """Return the line of names."""
        return self._line(self._columns)

    def record(self, number: int, row: Row) -> bytes:
        """Return a row's fields."""
        return self._line([as_text(row.get(column)) for column in self._columns])

    def _line(self, cells: Sequence[str]) -> bytes:
        self._csv.writerow(cells)
        text = self._text.getvalue().removesuffix(_LINE_END)
        self._text.seek(0)
        self._text.truncate()
        return f"{text}\n".encode(errors="replace")


class ObjectWriter:
    """Writes JSON objects, one a line."""

    def __init__(self, columns: Sequence[str]) -> None:
        """Make one; an object has the keys that it has."""

    def header(self) -> bytes:
        """Return what stands before the first record: nothing."""
        return b""

    def record(self, number: int, row: Row) -> bytes:
        """Return a row as an object."""
        return dump(row)
