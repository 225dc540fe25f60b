"""Writes Parquet and Arrow files at the end of a run, of a file of records."""

from __future__ import annotations

import json
import os
from array import array
from contextlib import closing
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.errors import ConfigError
from cbatch.files.input.columnar import N_ROWS, import_pyarrow, open_table, types_of
from cbatch.files.input.row_prompts import as_text
from cbatch.files.output.durable import mode_of, whole
from cbatch.files.output.encoders import ANSWERS, RowEncoder
from cbatch.files.output.identity import as_json
from cbatch.files.output.json_answers import dump

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cbatch.files.input.item import Item
    from cbatch.files.input.source import Source


class _ChangedError(ConfigError):
    """An input was changed while it was read."""

    def __init__(self, path: str, what: str, records: Path) -> None:
        super().__init__(
            f"{path}: was changed while the run read it: {what}. No answer is lost: they are in {records}: run the "
            "same command again, with the file as it is or as it was"
        )


class ColumnarEncoder(RowEncoder):
    """Writes records, of which `finish` makes a Parquet or Arrow file.

    A record is the item's number, a tab, and a JSON list. Of a columnar input it has the added values and the digest of
    the row, whose own values are read again at the end; of another input it has the row's values as text and the added
    ones.
    """

    def __init__(self, format: str, source: Source) -> None:
        """Take the columns of a source.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        import_pyarrow()
        super().__init__(source.columns)
        self._format, self._paths = format, source.paths
        self._input = source.format if source.format in ("parquet", "arrow") else None
        self._fields = self._fields_of_input()

    def _fields_of_input(self) -> list[Any]:
        """Return the columns of a columnar input, as they are before it is read."""
        if not self._input:
            return []
        with open_table(self._paths[0], self._input) as (schema, _, _):
            return [schema.field(name) for name in self._own]

    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        if self._input:
            return b"%d\t%b" % (item.number, dump([*values, _digest(item.extra)]))
        return b"%d\t%b" % (item.number, dump([*self._values(item), *values]))

    def _values(self, item: Item) -> list[str | None]:
        row = self._row(item)
        return [None if row.get(name) is None else as_text(row[name]) for name in self._own]

    def finish(self, records: Path, target: Path, n_items: int | None = None) -> None:
        """Write the rows that have a record, in the input's order, to a new file.

        Args:
            records: one for each item, in order; of several records for one row the last counts.
            target: is replaced when all rows are written.
            n_items: of the input; None where it is unknown.

        Raises:
            ConfigError: the input, which is read again, was changed.
        """
        try:
            with closing(_Records(records)) as found, whole(target, mode=mode_of(records)) as part:
                self._write(part, found, n_items)
        except _ChangedError:
            raise
        except ConfigError as error:
            raise _ChangedError(", ".join(self._paths), str(error), records) from error

    def _write(self, part: Path, found: _Records, n_items: int | None) -> None:
        pyarrow, schema = import_pyarrow(), self._schema()
        rows = self._kept_rows(found, n_items) if self._input else self._text_rows(found)
        with part.open("wb") as file:
            if self._format == "parquet":
                writer = pyarrow.parquet.ParquetWriter(file, schema)
            else:
                writer = pyarrow.ipc.new_file(file, schema)
            with writer:
                for columns in rows:
                    writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            file.flush()
            os.fsync(file.fileno())

    def _schema(self) -> Any:
        """Return the columns of the output: those of the input with their types, and the added ones."""
        pyarrow = import_pyarrow()
        types = {str: pyarrow.string(), int: pyarrow.int64()}
        added = [
            pyarrow.field(name, types[type])
            for name, type in zip(self._added, ANSWERS.values(), strict=True)
        ]
        own = self._fields or [pyarrow.field(name, types[str]) for name in self._own]
        return pyarrow.schema([*own, *added])

    def _kept_rows(self, found: _Records, n_items: int | None) -> Iterator[list[Any]]:
        """Yield the columns of batches of rows that have a record, with the added values."""
        n_before = 0
        for path in self._paths:
            with open_table(path, str(self._input)) as (schema, _, batches):
                types = types_of(schema)
                if any(types.get(f.name) != str(f.type) for f in self._fields):
                    raise _ChangedError(path, "its columns are others", found.path)
                for batch in batches:
                    yield from self._kept(batch, n_before, found, path)
                    n_before += batch.num_rows
        if n_items not in (None, n_before):
            what = f"{n_before:,} rows are there, and {n_items:,} were read"
            raise _ChangedError(", ".join(self._paths), what, found.path)

    def _kept(self, batch: Any, n_before: int, found: _Records, path: str) -> Iterator[list[Any]]:
        n_columns = len(self._added)
        rows, values = list[int](), list[list[Any]]()
        for i, row in enumerate(batch.to_pylist()):
            value = found.of(n_before + i + 1)
            if value is None:
                continue
            if value[n_columns:] not in ([], [_digest(row)]):
                what = f"row {n_before + i + 1:,} is not the one that was answered"
                raise _ChangedError(path, what, found.path)
            rows.append(i)
            values.append(value)
        if rows:
            kept = batch.take(import_pyarrow().array(rows))
            yield [*(kept.column(name) for name in self._own), *_turned(values, n_columns)]

    def _text_rows(self, found: _Records) -> Iterator[list[Any]]:
        values = iter(found)
        while rows := list(islice(values, N_ROWS)):
            yield _turned(rows, len(self._own) + len(self._added))


def _digest(row: object) -> str:
    """Return a digest of a row's values."""
    return blake2b(as_json(row).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _turned(rows: Sequence[Sequence[Any]], n_columns: int) -> list[list[Any]]:
    """Return columns of rows."""
    return [[row[i] for row in rows] for i in range(n_columns)]


class _Records:
    """The values in a file of records, by number: sixteen bytes of memory each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        numbers, offsets, offset = array("q"), array("q"), 0
        self._file = path.open("rb")
        for line in self._file:
            numbers.append(int(line[: line.index(b"\t")]))
            offsets.append(offset)
            offset += len(line)
        order = np.argsort(np.asarray(numbers), kind="stable")
        self._numbers, self._offsets = np.asarray(numbers)[order], np.asarray(offsets)[order]

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the values of every record, in the order of the file."""
        return map(self._at, np.sort(self._offsets).tolist())

    def of(self, number: int) -> list[Any] | None:
        """Return the values of the last record with a number, or None."""
        i = int(np.searchsorted(self._numbers, number, side="right")) - 1
        return self._at(int(self._offsets[i])) if i >= 0 and self._numbers[i] == number else None

    def _at(self, offset: int) -> list[Any]:
        self._file.seek(offset)
        line = self._file.readline()
        values: list[Any] = json.loads(line[line.index(b"\t") :])
        return values

    def close(self) -> None:
        self._file.close()
