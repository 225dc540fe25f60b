"""Readers of tables that are text: CSV and TSV, JSON objects, plain lines."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.input.item import WRONG, Item, ItemError, what_is_wrong
from cbatch.files.input.json_requests import loaded, mended
from cbatch.files.input.row_prompts import RowPrompts
from cbatch.files.input.text_files import LineReader, LongLine, long_line, not_utf8

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.files.input.row_prompts import Asking, Row
    from cbatch.files.input.text_files import InputFile


def check_columns(columns: Sequence[str], known: Sequence[str] | None, name: str) -> None:
    """Check the columns of a table, and that the tables before it have the same.

    Raises:
        ConfigError: two columns of one name, or other columns than before.
    """
    twice = [c for i, c in enumerate(columns) if c in columns[:i]]
    if twice:
        raise ConfigError(f"{name}: has two columns named {twice[0]!r}: names must be unique")
    if known is not None and set(known) != set(columns):
        raise ConfigError(
            f"{name}: its columns are {', '.join(columns)}; those of the files before it are {', '.join(known)}"
        )


def item_of_row(
    number: int, place: str, row: Row, prompt_of: RowPrompts, error: ItemError | None = None
) -> Item:
    """Return the item of a row; `error` is a known error of the row."""
    try:
        if error is None:
            return Item(number, place, str(number), prompt_of(row), None, row)
    except WRONG as wrong:
        error = what_is_wrong(wrong, ("messages", "prompt"))
    return Item(number, place, str(number), None, error, row)


# ---- CSV and TSV ----


class CsvReader:
    """Reads CSV with a header; quoted fields may hold line ends."""

    def __init__(self, asking: Asking, delimiter: str, max_line_bytes: int) -> None:
        """Make a reader for all files of a run."""
        self.columns: tuple[str, ...] = ()
        self._asking, self._delimiter = asking, delimiter
        self._prompt_of: RowPrompts | None = None
        # it holds for the whole process, so it is never lowered
        csv.field_size_limit(max(csv.field_size_limit(), max_line_bytes))

    def look(self, file: InputFile) -> None:
        """Check a file's header.

        Raises:
            ConfigError: it cannot be read, or does not fit the template or the files before.
        """
        columns = _CsvRows(file, file.ahead(), self._delimiter).header()
        if self._prompt_of is None:
            check_columns(columns, None, file.name)
            self._prompt_of = RowPrompts(self._asking, columns, file.name)
            self.columns = columns
        check_columns(columns, self.columns, file.name)

    def items(self, file: InputFile, n_before: int) -> Iterator[Item]:
        """Yield a file's rows; the first has the number `n_before` + 1."""
        rows = _CsvRows(file, file.lines(), self._delimiter)
        columns, prompt_of, number = rows.header(), self._prompt_of, n_before
        check_columns(
            columns, self.columns, file.name
        )  # for it may have been replaced since `look`
        assert prompt_of is not None  # `look` came before
        for i_line, cells, error in rows:
            number += 1
            if error is None and len(cells) != len(columns):
                error = _ragged(len(cells), len(columns))
            row = dict(zip(columns, cells, strict=False))
            yield item_of_row(number, f"{file.name}, line {i_line}", row, prompt_of, error)


def _ragged(n_cells: int, n_columns: int) -> ItemError:
    message = f"the row has {n_cells} fields, the header {n_columns}"
    return ItemError("invalid_row", f"{message}: quote fields that hold a separator")


class _CsvRows:
    """Rows of a CSV file, each with its first line and its error."""

    def __init__(self, file: InputFile, lines: Iterator[bytes | LongLine], delimiter: str) -> None:
        self._name, self._n_most = file.name, file.max_line_bytes
        self._n_lines = self._n_row_bytes = 0
        self._error: ItemError | None = None
        self._reader = csv.reader(map(self._text, lines), delimiter=delimiter, strict=True)

    def header(self) -> tuple[str, ...]:
        """Read the first row.

        Raises:
            ConfigError: it cannot be read.
        """
        for _, cells, error in self:
            if error is not None:
                raise ConfigError(f"{self._name}: the header cannot be read: {error.message}")
            return tuple(cells)
        return ()

    def __iter__(self) -> Iterator[tuple[int, list[str], ItemError | None]]:
        while True:
            i_first, self._n_row_bytes, self._error = self._n_lines + 1, 0, None
            try:
                cells = next(self._reader)
            except StopIteration:
                return
            except csv.Error as wrong:
                yield i_first, [], self._error or ItemError("invalid_row", f"not CSV: {wrong}")
            else:
                if cells or self._error:
                    yield i_first, cells, self._error

    def _text(self, line: bytes | LongLine) -> str:
        """Return a line as text, and note its error; text over the limit is left out."""
        self._n_lines += 1
        n_before = self._n_row_bytes
        if isinstance(line, LongLine):
            self._n_row_bytes += line.n_bytes
            self._error = self._error or long_line(line.n_bytes, self._n_most).error
            return '"' if line.n_quotes % 2 else ""
        self._n_row_bytes += len(line)
        if n_before and self._n_row_bytes > self._n_most:
            self._error = self._error or self._long_row()
            line = _from_closing_quote(line)
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            self._error = self._error or not_utf8(error, n_before).error
            return line.decode(errors="replace")

    def _long_row(self) -> ItemError:
        message = f"the row is longer than {self._n_most} bytes (max_line_bytes): is a quotation mark not closed?"
        return ItemError("line_too_long", message)


def _from_closing_quote(line: bytes) -> bytes:
    """Return a line that begins inside quotes, from the closing quotation mark on."""
    line = line.replace(b'""', b"")
    return line[line.index(b'"') :] if b'"' in line else b""


# ---- objects and plain lines ----


class ObjectReader(LineReader):
    """Reads JSON objects, one a line, as rows."""

    def __init__(self, asking: Asking, name: str, first: Row | None) -> None:
        """Make a reader for all files of a run; the template may have the keys of `first`, the first object.

        Raises:
            ConfigError: there is no object, or the template does not fit it.
        """
        if first is None:
            raise ConfigError(f"{name}: its first lines hold no JSON object")
        self.columns = tuple(first)
        self._prompt_of = RowPrompts(asking, self.columns, name)

    def parse(self, number: int, place: str, line: bytes) -> Item:
        """Return the item of a line, with an error where it gives no prompt."""
        try:
            row, wrong = loaded(line)
            if isinstance(wrong, RecursionError):
                raise wrong
        except WRONG as error:
            return Item(number, place, str(number), None, what_is_wrong(error))
        if wrong is None:
            return item_of_row(number, place, row, self._prompt_of)
        return item_of_row(number, place, mended(row), self._prompt_of, wrong.error)


class TextReader(LineReader):
    """Reads plain text: a prompt a line, in the template's field `line`."""

    columns = ("line",)

    def __init__(self, asking: Asking, name: str) -> None:
        """Make a reader for all files of a run.

        Raises:
            ConfigError: a template with another field.
        """
        if asking.template is None:
            asking = replace(asking, template="{line}")
        self._prompt_of = RowPrompts(asking, self.columns, name)

    def parse(self, number: int, place: str, line: bytes) -> Item:
        """Return the item of a line, with an error where it gives no prompt."""
        try:
            text, error = line.decode(), None
        except UnicodeDecodeError as wrong:
            text, error = line.decode(errors="replace"), not_utf8(wrong).error
        row = {"line": text.rstrip("\r\n")}
        return item_of_row(number, place, row, self._prompt_of, error)
