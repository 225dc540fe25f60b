"""Reads Parquet and Arrow files, a batch of rows at a time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cbatch.errors import ConfigError
from cbatch.files.input.tables import InputTable, check_unique
from cbatch.support.checks import readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.files.input.tables import Rows
    from cbatch.files.input.text_files import InputFile

N_ROWS = 1024  # rows in memory at once: our choice
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

    ConfigError where it is of another format, or damaged.
    """
    pyarrow = import_pyarrow()
    try:
        if format == "parquet":  # by a file of Python's, for pyarrow opens no name that is no UTF-8
            with open(path, "rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
                yield file.schema_arrow, file.metadata.num_rows, file.iter_batches(N_ROWS)
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
        for start in range(0, batch.num_rows, N_ROWS):
            yield batch.slice(start, N_ROWS)


@contextmanager
def columnar_table(
    file: InputFile, lines: object, known: object, *, format: str
) -> Iterator[InputTable]:
    """Open the table of an input file."""
    with open_table(file.path, format) as (schema, n_rows, batches):
        check_unique(schema.names, file.name)
        yield InputTable(types_of(schema), _rows(file, n_rows, batches))


def _rows(file: InputFile, n_rows: int | None, batches: Iterator[Any]) -> Rows:
    n_done = 0
    for batch in batches:
        for row in batch.to_pylist():
            n_done += 1
            yield f"{file.name}, row {n_done}", row, None
        if n_rows:
            file.tell_share(n_done / n_rows)


def types_of(schema: Any) -> dict[str, str]:
    """Return the type of each column."""
    return {field.name: str(field.type) for field in schema}
