"""Parquet and Arrow files, a batch of rows at a time."""

from __future__ import annotations

import json
import os
from array import array
from contextlib import closing, contextmanager
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.checks import readable
from cbatch.errors import ConfigError
from cbatch.files.input.digest import as_json
from cbatch.files.input.lines import dump
from cbatch.files.input.row_prompts import RowPrompts
from cbatch.files.input.tables import check_columns, item_of_row
from cbatch.files.input.template import as_text
from cbatch.files.output.answers import ANSWERS, added_names, answer, no_answer
from cbatch.files.output.durable import mode_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cbatch.files.input.item import Item, ItemError
    from cbatch.files.input.row_prompts import Asking
    from cbatch.files.input.source import Source
    from cbatch.files.input.text_files import InputFile
    from cbatch.response import BatchResult

_N_ROWS = 1024
"""Rows to have in memory at once: our choice."""

_ARROW_MAGIC = b"ARROW1"  # Source: Arrow's format, IPC file format; a stream has none


def _import_pyarrow() -> Any:
    """Return pyarrow.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            'Parquet and Arrow files need pyarrow: pip install "cbatch[parquet]"'
        ) from error
    return pyarrow


class _ChangedError(ConfigError):
    """An input is not as it was read."""

    def __init__(self, path: str, what: str, records: Path) -> None:
        super().__init__(
            f"{path}: was changed while the run read it: {what}. No answer is lost, they are in {records}: run the "
            "same command again, with the file as it is or as it was"
        )


@contextmanager
def _opened(path: str, format: str) -> Iterator[tuple[Any, int | None, Iterator[Any]]]:
    """Open a file: its schema, its number of rows where that is known, and its batches.

    Raises:
        ConfigError: it is not what its name says, or is damaged.
    """
    pyarrow = _import_pyarrow()
    try:
        if format == "parquet":  # by a file of Python's, for pyarrow opens no name that is no UTF-8
            with open(path, "rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
                yield file.schema_arrow, file.metadata.num_rows, file.iter_batches(_N_ROWS)
        else:
            with open(path, "rb") as file:
                is_file = file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
                file.seek(0)
                opener = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
                with opener(file) as reader:
                    yield reader.schema, None, _arrow_batches(reader, is_file=is_file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{readable(path)}: cannot be read as {format}: {error}") from error


def _arrow_batches(reader: Any, *, is_file: bool) -> Iterator[Any]:
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        for start in range(0, batch.num_rows, _N_ROWS):
            yield batch.slice(start, _N_ROWS)


class ColumnarReader:
    """Reads Parquet and Arrow files."""

    def __init__(self, asking: Asking, format: str) -> None:
        """Make one for all files of a run.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        _import_pyarrow()
        self.columns: tuple[str, ...] = ()
        self._asking, self._format = asking, format
        self._prompt_of: RowPrompts | None = None
        self._types: dict[str, str] = {}

    def look(self, file: InputFile) -> None:
        """Check a file's columns.

        Raises:
            ConfigError: it cannot be read, or does not fit the template or the files before.
        """
        with _opened(file.path, self._format) as (schema, _, _):
            if self._prompt_of is None:
                check_columns(schema.names, None, file.name)
                self._types = _types_of(schema)
                self.columns = tuple(self._types)
                self._prompt_of = RowPrompts(self._asking, self.columns, file.name)
            self._check(schema, file.name)

    def _check(self, schema: Any, name: str) -> None:
        """Check that a file has the columns of those before it."""
        check_columns(schema.names, self.columns, name)
        for column, type in _types_of(schema).items():
            if type != (known := self._types[column]):
                raise ConfigError(
                    f"{name}: column {column!r} is {type}, in the files before {known}"
                )

    def items(self, file: InputFile, n_before: int) -> Iterator[Item]:
        """Yield a file's rows; the first has the number `n_before` + 1."""
        assert self._prompt_of is not None  # `look` came before
        n_done = 0
        with _opened(file.path, self._format) as (schema, n_rows, batches):
            self._check(schema, file.name)  # for it may have been replaced since `look`
            for batch in batches:
                for row in batch.to_pylist():
                    n_done += 1
                    place = f"{file.name}, row {n_done}"
                    yield item_of_row(n_before + n_done, place, row, self._prompt_of)
                if n_rows:
                    file.tell_share(n_done / n_rows)


class ColumnarEncoder:
    """Writes records that `finish` makes a Parquet or Arrow file of.

    A record is the item's number, a tab, and as JSON the values that are added. Where the input is of this kind the
    row's digest stands behind them, for its own values are read once more at the end; else they stand before, as text.
    """

    def __init__(self, format: str, source: Source) -> None:
        """Make one for the items of a source.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        _import_pyarrow()
        self._format, self._paths = format, source.paths
        self._input = source.format if source.format in ("parquet", "arrow") else None
        self._has_rows = source.columns is not None
        self._own = ("id",) if source.columns is None else tuple(source.columns)
        self._added = added_names(self._own)
        self._fields = self._fields_of_input()

    def _fields_of_input(self) -> list[Any]:
        """Return the columns of an input of this kind, as they are before it is read."""
        if not self._input:
            return []
        with _opened(self._paths[0], self._input) as (schema, _, _):
            return [schema.field(name) for name in self._own]

    def header(self) -> bytes:
        """Return what stands before the first record: nothing."""
        return b""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return a result as a record."""
        return self._record(item, answer(result))

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the record of an item that could not be asked."""
        return self._record(item, no_answer(f"{item.place}: {error.message}"))

    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        if self._input:
            return b"%d\t%b" % (item.number, dump([*values, _digest(item.extra)]))
        return b"%d\t%b" % (item.number, dump([*self._values(item), *values]))

    def _values(self, item: Item) -> list[str | None]:
        if not self._has_rows:
            return [item.id]
        row = item.extra if isinstance(item.extra, dict) else {}
        return [None if row.get(name) is None else as_text(row[name]) for name in self._own]

    def finish(self, records: Path, target: Path, n_items: int | None = None) -> None:
        """Write the rows that have a record, in the input's order, to a new file.

        Args:
            records: the file of records, each item's once, in order; of several for one row the last counts.
            target: is replaced when all is written.
            n_items: how many there are in the input; None: nobody knows.

        Raises:
            ConfigError: the input, which is read once more, is not as it was.
        """
        try:
            with closing(_Records(records)) as found, whole(target, mode=mode_of(records)) as part:
                self._write(part, found, n_items)
        except _ChangedError:
            raise
        except ConfigError as error:
            raise _ChangedError(", ".join(self._paths), str(error), records) from error

    def _write(self, part: Path, found: _Records, n_items: int | None) -> None:
        pyarrow, schema = _import_pyarrow(), self._schema()
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
        pyarrow = _import_pyarrow()
        types = {str: pyarrow.string(), int: pyarrow.int64()}
        added = [
            pyarrow.field(name, types[type])
            for name, type in zip(self._added, ANSWERS.values(), strict=True)
        ]
        own = self._fields or [pyarrow.field(name, types[str]) for name in self._own]
        return pyarrow.schema([*own, *added])

    def _kept_rows(self, found: _Records, n_items: int | None) -> Iterator[list[Any]]:
        """Yield the columns of batches of rows that have a record, with what was added."""
        n_before = 0
        for path in self._paths:
            with _opened(path, str(self._input)) as (schema, _, batches):
                types = _types_of(schema)
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
            kept = batch.take(_import_pyarrow().array(rows))
            yield [*(kept.column(name) for name in self._own), *_turned(values, n_columns)]

    def _text_rows(self, found: _Records) -> Iterator[list[Any]]:
        values = iter(found)
        while rows := list(islice(values, _N_ROWS)):
            yield _turned(rows, len(self._own) + len(self._added))


def _types_of(schema: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def _digest(row: object) -> str:
    """Return what tells a row's values from others."""
    return blake2b(as_json(row).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _turned(rows: Sequence[Sequence[Any]], n_columns: int) -> list[list[Any]]:
    """Return columns of rows."""
    return [[row[i] for row in rows] for i in range(n_columns)]


class _Records:
    """The values in a file of records, in order of numbers: sixteen bytes of memory each."""

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
        """Return the values of the last record with a number; None where there is none."""
        i = int(np.searchsorted(self._numbers, number, side="right")) - 1
        return self._at(int(self._offsets[i])) if i >= 0 and self._numbers[i] == number else None

    def _at(self, offset: int) -> list[Any]:
        self._file.seek(offset)
        line = self._file.readline()
        values: list[Any] = json.loads(line[line.index(b"\t") :])
        return values

    def close(self) -> None:
        self._file.close()
