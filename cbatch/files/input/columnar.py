"""Reads Parquet and Arrow files, a batch of rows at a time."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from cbatch.errors import ConfigError
from cbatch.files.input.item import ItemError
from cbatch.files.input.row_prompts import Unread
from cbatch.files.input.tables import InputTable, check_unique
from cbatch.files.input.text_files import InputFile, not_utf8, rewritten
from cbatch.support.checks import readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.files.input.tables import Rows

N_ROWS = 1024  # rows in memory at once: our choice
_N_LARGE_ROWS = 16  # of a table with files in its cells, such as pictures
_ALL = 2**31 - 1
"""Values that pyarrow's text of an array shows at most; without a number it leaves some out."""
_ARROW_MAGIC = b"ARROW1"  # Source: Arrow's format, IPC file format; a stream has none


def import_pyarrow() -> Any:
    """Return pyarrow; ConfigError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet and Arrow files need pyarrow: pip install pyarrow") from error
    return pyarrow


@contextmanager
def open_table(path: str, format: str) -> Iterator[tuple[Any, int | None, Iterator[Any]]]:
    """Open a file: its schema, its number of rows where the file tells it, and its batches.

    ConfigError where it is of another format, or damaged; of batches, too, and where the file is written to.
    """
    with ExitStack() as stack:
        with _readable(path, format):
            file = stack.enter_context(open(path, "rb"))  # pyarrow opens no name that is not UTF-8
            before = os.fstat(file.fileno())
            schema, n_rows, batches = _opened(stack, file, format)
            check_unique(schema.names, readable(path))
        yield schema, n_rows, _unchanged(_told(batches, path, format), path, file, before)


def _opened(stack: ExitStack, file: BinaryIO, format: str) -> tuple[Any, int | None, Iterator[Any]]:
    pyarrow = import_pyarrow()
    if format == "parquet":
        reader = stack.enter_context(pyarrow.parquet.ParquetFile(file))
        n_rows = _N_LARGE_ROWS if _has_files(reader.schema_arrow) else N_ROWS
        return reader.schema_arrow, reader.metadata.num_rows, reader.iter_batches(n_rows)
    is_file = file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    file.seek(0)
    opener = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    reader = stack.enter_context(opener(file))
    return reader.schema, None, _arrow_batches(reader, is_file=is_file)


def _has_files(schema: Any) -> bool:
    """Whether cells may be whole files: bytes, or Hugging Face's mappings with bytes."""
    return any("binary" in str(field.type) for field in schema)


@contextmanager
def _readable(path: str, format: str) -> Iterator[None]:
    try:
        yield
    except (import_pyarrow().ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{readable(path)}: cannot be read as {format}: {error}") from error


def _told(batches: Iterator[Any], path: str, format: str) -> Iterator[Any]:
    while True:
        with _readable(path, format):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _unchanged(
    batches: Iterator[Any], path: str, file: BinaryIO, before: os.stat_result
) -> Iterator[Any]:
    """Yield batches as long as nobody writes to the file; ConfigError where somebody did.

    A batch may be of another version, and a stream that is cut off between two batches seems to be whole.
    """
    while True:
        batch = next(batches, None)
        now = os.fstat(file.fileno())
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise rewritten(readable(path))
        if batch is None:
            return
        yield batch


def _arrow_batches(reader: Any, *, is_file: bool) -> Iterator[Any]:
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        for start in range(0, batch.num_rows, N_ROWS):
            yield batch.slice(start, N_ROWS)


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch or a table; a cell whose value Python cannot hold is `Unread`."""
    columns = {name: _values(table.column(i)) for i, name in enumerate(table.schema.names)}
    return [{name: values[i] for name, values in columns.items()} for i in range(table.num_rows)]


def _values(column: Any) -> list[Any]:
    odd = (import_pyarrow().ArrowException, ValueError, LookupError, ArithmeticError)
    try:
        return list(column.to_pylist())
    except odd:
        if hasattr(column.type, "value_type") and hasattr(column.type, "index_type"):
            column = column.cast(column.type.value_type)  # of a dictionary
        return [_value(column, i, odd) for i in range(len(column))]


def _value(column: Any, i: int, odd: tuple[type[Exception], ...]) -> Any:
    cell = column[i]
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        why = not_utf8(error).error
    except odd as error:
        why = ItemError("invalid_row", f"its {column.type} cannot be read: {error}")
    if hasattr(cell, "as_buffer"):
        return Unread(bytes(cell.as_buffer()).decode(errors="replace"), why)
    text = column.slice(i, 1).to_string(window=_ALL, container_window=_ALL)
    return Unread(text.removeprefix("[").removesuffix("]").strip(), why)


@contextmanager
def columnar_table(
    file: InputFile, lines: object, known: object, *, format: str
) -> Iterator[InputTable]:
    """Open the table of an input file."""
    with _readable(file.path, format):
        n_bytes = os.path.getsize(file.path)
    file.check_size(n_bytes)
    with open_table(file.path, format) as (schema, n_rows, batches):
        yield InputTable(types_of(schema), _rows(file, n_rows, batches))


def _rows(file: InputFile, n_rows: int | None, batches: Iterator[Any]) -> Rows:
    n_done = 0
    for batch in batches:
        for row in rows_of(batch):
            n_done += 1
            yield f"{file.name}, row {n_done}", row, None
        if n_rows:
            file.tell_share(n_done / n_rows)


def types_of(schema: Any) -> dict[str, str]:
    """Return the type of each column."""
    return {field.name: str(field.type) for field in schema}
