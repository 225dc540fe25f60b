"""Writes Parquet and Arrow files at the end of a run, of a file of records."""

from __future__ import annotations

import base64
import io
import json
import os
from contextlib import ExitStack, closing
from hashlib import blake2b
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cbatch.chat.vector_calls import as_base64
from cbatch.errors import ConfigError
from cbatch.files.input.columnar import N_ROWS, import_pyarrow, open_table, rows_of, types_of
from cbatch.files.input.row_prompts import as_text
from cbatch.files.output.encoders import AnswerColumns, RowEncoder, Vector, dump
from cbatch.files.output.identity import as_json

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from pathlib import Path

    from cbatch.files.input.item import Item
    from cbatch.files.input.source import Source


_Record: TypeAlias = "tuple[int, list[Any]]"
"""The item's number, and values."""


class ColumnarEncoder(RowEncoder):
    """Writes records, of which `finish` makes a Parquet or Arrow file.

    A record is a JSON list. Of a columnar input it has the added values and the digest of the row, whose own values are
    read again at the end; of another input it has the row's values as text and the added ones.
    """

    def __init__(self, format: str, source: Source, layout: AnswerColumns) -> None:
        """Take the columns of a source, and those to write.

        Raises:
            ConfigError: pyarrow is not installed; a column that the format cannot hold.
        """
        import_pyarrow()
        super().__init__(layout)
        self._format, self._paths = format, source.paths
        self._input = source.format if source.format in ("parquet", "arrow") else None
        self._fields: list[Any] = []  # of a columnar input, as they are before it is read
        if self._input:
            with open_table(self._paths[0], self._input) as (schema, _, batches):
                self._fields = [schema.field(name) for name in layout.own]
                first = next((batch for batch in batches if batch.num_rows), None)
                for field in self._fields:
                    self._check_type(field, first)

    def _check_type(self, field: Any, rows: Any | None) -> None:
        """Refuse a column that cannot be written, before the run; the first of `rows` is written as a test."""
        pyarrow = import_pyarrow()
        schema = pyarrow.schema([self._written(field)])
        try:
            with self._writer(io.BytesIO(), schema) as writer:
                if rows is not None:
                    column = self._taken(rows, field, [0])
                    writer.write_batch(pyarrow.record_batch([column], schema=schema))
        except pyarrow.ArrowException as error:
            raise ConfigError(
                f"column {field.name!r} is {field.type}, which {self._format} files cannot hold ({error}): "
                "leave it out (--keep-columns), or write another format (--output-format)"
            ) from error

    def _writer(self, file: Any, schema: Any) -> Any:
        pyarrow = import_pyarrow()
        if self._format == "parquet":
            return pyarrow.parquet.ParquetWriter(file, schema)
        return pyarrow.ipc.new_file(file, schema)

    def _written(self, field: Any) -> Any:
        """Return a column of the input as the output has it: Arrow files hold one dictionary for all their batches."""
        if self._format == "arrow" and hasattr(field.type, "index_type"):
            return field.with_type(field.type.value_type)
        return field

    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        values = _packed(values)
        if self._input:
            return dump([*values, _digest(item.extra)])
        row = self._row(item)
        own = [None if row.get(name) is None else as_text(row[name]) for name in self.layout.own]
        return dump([*own, *values])

    def finish(self, records: Path, part: Path, n_items: int, numbers: Iterable[int]) -> None:
        """Write the rows that have a record, in the input's order, to a new file.

        Args:
            records: one for each item, in the order of the items.
            part: the new file.
            numbers: of the items that have a record; those that are in the input no more come last.

        Raises:
            ConfigError: the input, which is read again, was changed; or pyarrow cannot write the output.
        """
        kept = f"No answer is lost: they are in {records}"
        try:
            with closing(_read(records)) as found:
                numbered = zip(numbers, found, strict=True)
                self._write(part, numbered, n_items, self._embeddings(records))
        except ConfigError as error:
            raise ConfigError(
                f"{', '.join(self._paths)}: was changed while the run read it: {error}. {kept}: run the same command "
                "again, with the new or the old file"
            ) from error
        except import_pyarrow().ArrowException as error:
            raise ConfigError(
                f"the answers cannot be written as {self._format}: {error}. {kept}"
            ) from error

    def _embeddings(self, records: Path) -> _Embeddings:
        if Vector not in self.layout.types.values():
            return _Embeddings(0, has_all=False)
        return _embeddings(records, 0 if self._input else len(self.layout.own))

    def _write(
        self, part: Path, records: Iterator[_Record], n_items: int, embeddings: _Embeddings
    ) -> None:
        pyarrow, schema = import_pyarrow(), self._schema(embeddings)
        rows = self._kept_rows(records, n_items) if self._input else self._text_rows(records)
        with part.open("wb") as file:
            with self._writer(file, schema) as writer:
                for columns in rows:
                    if embeddings.n_numbers:
                        i = len(columns) - len(self.layout.added)
                        columns[i] = _lists(columns[i], embeddings)
                    writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            file.flush()
            os.fsync(file.fileno())

    def _schema(self, embeddings: _Embeddings) -> Any:
        pyarrow = import_pyarrow()
        types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
        n_each = embeddings.n_numbers if embeddings.has_all else -1
        types[Vector] = pyarrow.list_(pyarrow.float32(), n_each)
        layout = self.layout
        added = [
            pyarrow.field(name, types[type])
            for name, type in zip(layout.added, layout.types.values(), strict=True)
        ]
        own = [self._written(field) for field in self._fields]
        if not self._input:
            own = [pyarrow.field(name, types[str]) for name in layout.own]
        return pyarrow.schema([*own, *added])

    def _kept_rows(self, records: Iterator[_Record], n_items: int) -> Iterator[list[Any]]:
        """Yield the columns of batches of rows that have a record, with the added values."""
        n_before, ahead = 0, next(records, None)
        for path in self._paths:
            with open_table(path, str(self._input)) as (schema, _, batches):
                types = types_of(schema)
                if any(types.get(f.name) != str(f.type) for f in self._fields):
                    raise ConfigError(f"the columns of {path} have changed")
                for batch in batches:
                    found = []
                    while ahead is not None and ahead[0] <= n_before + batch.num_rows:
                        found.append(ahead)
                        ahead = next(records, None)
                    if found:
                        yield self._kept(batch, n_before, found)
                    n_before += batch.num_rows
        if n_items != n_before:
            raise ConfigError(f"the file has {n_before:,} rows, but {n_items:,} were read")

    def _kept(self, batch: Any, n_before: int, found: Sequence[_Record]) -> list[Any]:
        n_columns, rows = len(self.layout.added), rows_of(batch)
        places = [number - n_before - 1 for number, _ in found]
        for place, (number, values) in zip(places, found, strict=True):
            if values[n_columns:] != [_digest(rows[place])]:
                raise ConfigError(f"row {number:,} differs from the row that was answered")
        own = [self._taken(batch, field, places) for field in self._fields]
        return [*own, *_turned([values for _, values in found], n_columns)]

    def _taken(self, batch: Any, field: Any, places: Sequence[int]) -> Any:
        """Return a column of some rows, by slices: pyarrow's `take` does not know all types."""
        column, written = batch.column(field.name), self._written(field)
        if written.type != field.type:
            column = column.cast(written.type)
        if len(places) == batch.num_rows:
            return column
        return import_pyarrow().concat_arrays([column.slice(i, n) for i, n in _runs(places)])

    def _text_rows(self, records: Iterator[_Record]) -> Iterator[list[Any]]:
        while found := list(islice(records, N_ROWS)):
            yield _turned(
                [values for _, values in found], len(self.layout.own) + len(self.layout.added)
            )


class NpyEncoder(RowEncoder):
    """Writes records, of which `finish` makes an array of NumPy, a row for each item: NaN where it has no embedding."""

    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        return dump(_packed(values))

    def finish(self, records: Path, part: Path, n_items: int, numbers: Iterable[int]) -> None:
        """Write the array; see `ColumnarEncoder.finish`."""
        import numpy as np

        n_numbers = _n_numbers(records, 0)
        row = np.empty(n_numbers, "<f4")
        head = np.lib.format.header_data_from_array_1_0(row) | {"shape": (n_items, n_numbers)}
        with ExitStack() as stack:
            found = stack.enter_context(closing(_read(records)))
            file = stack.enter_context(part.open("wb"))
            np.lib.format.write_array_header_1_0(file, head)
            numbered = zip(numbers, found, strict=True)
            ahead = next(numbered, None)
            for number in range(1, n_items + 1):
                row.fill(np.nan)
                if ahead is not None and ahead[0] == number:
                    if (packed := ahead[1][0]) is not None:
                        row[:] = np.frombuffer(base64.b64decode(packed), "<f4")
                    ahead = next(numbered, None)
                file.write(row.tobytes())
            file.flush()
            os.fsync(file.fileno())


def _packed(values: tuple[Any, ...]) -> tuple[object, ...]:
    """Return values as a record has them: an embedding as base64."""
    return tuple(as_base64(value) if hasattr(value, "astype") else value for value in values)


class _Embeddings(NamedTuple):
    n_numbers: int
    """Numbers of each; 0 where no row has one."""
    has_all: bool
    """Whether each row has one. Lists of one size need that: before version 26 pyarrow reads no Parquet file that has
    a null among them."""


def _embeddings(records: Path, place: int) -> _Embeddings:
    """Return what the embeddings of a file of records are like, at a place of the values."""
    with closing(_read(records)) as found:
        has_all = all(values[place] is not None for values in found)
    return _Embeddings(_n_numbers(records, place), has_all)


def _n_numbers(records: Path, place: int) -> int:
    """Return how many numbers an embedding of a file of records has, at a place of the values."""
    with closing(_read(records)) as found:
        packed = (values[place] for values in found)
        return len(base64.b64decode(next(filter(None, packed), ""))) // 4


def _lists(column: Sequence[str | None], embeddings: _Embeddings) -> Any:
    pyarrow, n_numbers = import_pyarrow(), embeddings.n_numbers
    data = b"".join(base64.b64decode(packed) for packed in column if packed is not None)
    numbers = pyarrow.Array.from_buffers(
        pyarrow.float32(), len(data) // 4, [None, pyarrow.py_buffer(data)]
    )
    if embeddings.has_all:
        return pyarrow.FixedSizeListArray.from_arrays(numbers, n_numbers)
    ends = accumulate((n_numbers * (packed is not None) for packed in column), initial=0)
    starts = [
        start if packed is not None else None for packed, start in zip(column, ends, strict=False)
    ]
    return pyarrow.ListArray.from_arrays(
        pyarrow.array([*starts, len(numbers)], pyarrow.int32()), numbers
    )


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of each run of successive places."""
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield places[start], end - start
            start = end


def _digest(row: object) -> str:
    return blake2b(as_json(row).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _turned(rows: Sequence[Sequence[Any]], n_columns: int) -> list[list[Any]]:
    return [[row[i] for row in rows] for i in range(n_columns)]


def _read(records: Path) -> Generator[list[Any]]:
    with records.open("rb") as file:
        yield from map(json.loads, file)
