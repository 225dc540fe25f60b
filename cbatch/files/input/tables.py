"""Readers of tables: rows become prompts. CSV and TSV, JSON objects and plain lines are here."""

from __future__ import annotations

import csv
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cbatch.errors import ConfigError
from cbatch.files.file_formats import first_object
from cbatch.files.input.item import WRONG, Item, ItemError, what_is_wrong
from cbatch.files.input.json_requests import loaded, mended
from cbatch.files.input.row_prompts import Asking, Row, RowPrompts
from cbatch.files.input.text_files import InputFile, LongLine, not_utf8, numbered
from cbatch.files.units import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Lines: TypeAlias = "Iterator[bytes | LongLine]"

    Rows: TypeAlias = "Iterator[tuple[str, Row | None, ItemError | None]]"
    """The place of each row, its values, and its error; None for no values, and for no error."""

    OpenTable: TypeAlias = (
        "Callable[[InputFile, Lines, Sequence[str]], AbstractContextManager[InputTable]]"
    )
    """Opens a file, of which the lines may be read already, and whose columns may be known by files before it."""


class InputTable(NamedTuple):
    """An open table; the type of a column of text is empty."""

    columns: Mapping[str, str]
    rows: Rows


class RowReader:
    """Reads tables of one format, each row a prompt; one reader for all files of a run."""

    def __init__(self, files: Sequence[InputFile], asking: Asking, open_table: OpenTable) -> None:
        """Look at the columns of the files; ConfigError where they differ, or do not fit the template."""
        self._open_table = open_table
        self.columns: Sequence[str] = ()
        self._types = self._types_of(files[0])
        self.columns = tuple(self._types)
        self._prompt_of = RowPrompts(asking, self.columns, files[0].name)
        for file in files[1:]:
            self._check(self._types_of(file), file.name)

    def _types_of(self, file: InputFile) -> Mapping[str, str]:
        with self._open_table(file, file.ahead(), self.columns) as table:
            types = table.columns
        file.rewind()
        return types

    def items(self, file: InputFile, n_before: int) -> Iterator[Item]:
        """Yield a file's rows; the first has the number `n_before` + 1."""
        prompt_of = self._prompt_of.in_folder(Path(file.path).parent)
        with self._open_table(file, file.lines(), self.columns) as table:
            self._check(table.columns, file.name)  # the file may have been replaced
            for number, (place, row, error) in enumerate(table.rows, n_before + 1):
                yield item_of_row(number, place, row, prompt_of, error)

    def _check(self, columns: Mapping[str, str], name: str) -> None:
        if columns.keys() != self._types.keys():
            raise ConfigError(
                f"{name}: its columns are {listed(columns)}; those of the files before it are "
                f"{listed(self.columns)}"
            )
        for column, type in columns.items():
            if type != (known := self._types[column]):
                raise ConfigError(
                    f"{name}: column {column!r} is {type}, but {known} in the files before"
                )


def check_unique(columns: Sequence[str], name: str) -> None:
    """Raise ConfigError where two columns of a table have one name."""
    seen: set[str] = set()
    for column in columns:
        if column in seen:
            raise ConfigError(f"{name}: has two columns named {column!r}: names must be unique")
        seen.add(column)


def item_of_row(
    number: int,
    place: str,
    row: Row | None,
    prompt_of: RowPrompts,
    error: ItemError | None = None,
) -> Item:
    """Return the item of a row; `error` is a known error of the row."""
    try:
        if row is not None and error is None:
            return Item(number, place, str(number), prompt_of(row), None, row)
    except WRONG as wrong:
        error = what_is_wrong(wrong, ("messages", "prompt"))
    return Item(number, place, str(number), None, error, row)


# ---- CSV and TSV ----


@contextmanager
def csv_table(
    file: InputFile, lines: Lines, known: Sequence[str], *, delimiter: str
) -> Iterator[InputTable]:
    """Open CSV with a header; quoted fields may hold line ends."""
    # it holds for the whole process, so it is never lowered
    csv.field_size_limit(max(csv.field_size_limit(), file.max_line_bytes))
    table = _CsvTable(file, lines, delimiter)
    header = table.header()
    check_unique(header, file.name)
    yield InputTable(dict.fromkeys(header, ""), table.rows(header))


class _CsvTable:
    """The rows of a CSV file, each with its first line and its error."""

    def __init__(self, file: InputFile, lines: Lines, delimiter: str) -> None:
        self._name, self._n_most = file.name, file.max_line_bytes
        self._n_lines = self._n_row_bytes = 0
        self._error: ItemError | None = None
        self._reader = csv.reader(map(self._text, lines), delimiter=delimiter, strict=True)

    def header(self) -> list[str]:
        _, cells, error = next(self._cells(), (0, [], None))
        if error is not None:
            raise ConfigError(f"{self._name}: the header cannot be read: {error.message}")
        return cells

    def rows(self, header: Sequence[str]) -> Rows:
        for i_line, cells, error in self._cells():
            if error is None and len(cells) != len(header):
                error = ItemError(
                    "invalid_row",
                    f"the row has {len(cells)} fields, the header {len(header)}: quote fields that hold a separator",
                )
            yield f"{self._name}, line {i_line}", dict(zip(header, cells, strict=False)), error

    def _cells(self) -> Iterator[tuple[int, list[str], ItemError | None]]:
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
            self._error = self._error or line.error.error
            return '"' if line.n_quotes % 2 else ""
        self._n_row_bytes += len(line)
        if n_before and self._n_row_bytes > self._n_most:
            message = f"the row is longer than {self._n_most} bytes (max_line_bytes): is a quotation mark not closed?"
            self._error = self._error or ItemError("line_too_long", message)
            line = _from_closing_quote(line)
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            self._error = self._error or not_utf8(error, n_before).error
            return line.decode(errors="replace")


def _from_closing_quote(line: bytes) -> bytes:
    """Return a line that begins inside quotes, from the closing quotation mark on."""
    line = line.replace(b'""', b"")
    return line[line.index(b'"') :] if b'"' in line else b""


# ---- objects and plain lines ----


@contextmanager
def object_table(file: InputFile, lines: Lines, known: Sequence[str]) -> Iterator[InputTable]:
    """Open JSON objects, one a line; the template may have the keys of the first of all."""
    first = known or first_object(file)
    if first is None:
        raise ConfigError(f"{file.name}: its first lines hold no JSON object")
    rows = ((place, *_object(line)) for place, line in numbered(file, lines))
    yield InputTable(dict.fromkeys(first, ""), rows)


def _object(line: bytes | LongLine) -> tuple[Row | None, ItemError | None]:
    try:
        row, wrong = loaded(line)
    except WRONG as error:
        return None, what_is_wrong(error)
    if wrong is None:
        return row, None
    return None if isinstance(wrong, RecursionError) else mended(row), what_is_wrong(wrong)


@contextmanager
def text_table(file: InputFile, lines: Lines, known: Sequence[str]) -> Iterator[InputTable]:
    """Open plain text: a table of one column, `line`."""
    yield InputTable({"line": ""}, ((place, *_text(line)) for place, line in numbered(file, lines)))


def _text(line: bytes | LongLine) -> tuple[Row | None, ItemError | None]:
    if isinstance(line, LongLine):
        return None, line.error.error
    try:
        text, error = line.decode(), None
    except UnicodeDecodeError as wrong:
        text, error = line.decode(errors="replace"), not_utf8(wrong).error
    return {"line": text.rstrip("\r\n")}, error
