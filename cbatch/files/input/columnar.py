"""Reads Parquet and Arrow files, a batch of rows at a time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cbatch.checks import readable
from cbatch.errors import ConfigError
from cbatch.files.input.row_prompts import RowPrompts
from cbatch.files.input.tables import check_columns, item_of_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.files.input.item import Item
    from cbatch.files.input.row_prompts import Asking
    from cbatch.files.input.text_files import InputFile

N_ROWS = 1024
"""Rows in memory at once: our choice."""

_ARROW_MAGIC = b"ARROW1"  # Source: Arrow's format, IPC file format; a stream has none


def import_pyarrow() -> Any:
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


@contextmanager
def open_table(path: str, format: str) -> Iterator[tuple[Any, int | None, Iterator[Any]]]:
    """Open a file: its schema, its number of rows where the file tells it, and its batches.

    Raises:
        ConfigError: it is of another format, or damaged.
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


class ColumnarReader:
    """Reads Parquet and Arrow files."""

    def __init__(self, asking: Asking, format: str) -> None:
        """Make a reader for all files of a run.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        import_pyarrow()
        self.columns: tuple[str, ...] = ()
        self._asking, self._format = asking, format
        self._prompt_of: RowPrompts | None = None
        self._types: dict[str, str] = {}

    def look(self, file: InputFile) -> None:
        """Check a file's columns.

        Raises:
            ConfigError: it cannot be read, or does not fit the template or the files before.
        """
        with open_table(file.path, self._format) as (schema, _, _):
            if self._prompt_of is None:
                check_columns(schema.names, None, file.name)
                self._types = types_of(schema)
                self.columns = tuple(self._types)
                self._prompt_of = RowPrompts(self._asking, self.columns, file.name)
            self._check(schema, file.name)

    def _check(self, schema: Any, name: str) -> None:
        """Check that a file has the columns of the files before it."""
        check_columns(schema.names, self.columns, name)
        for column, type in types_of(schema).items():
            if type != (known := self._types[column]):
                raise ConfigError(
                    f"{name}: column {column!r} is {type}, in the files before {known}"
                )

    def items(self, file: InputFile, n_before: int) -> Iterator[Item]:
        """Yield a file's rows; the first has the number `n_before` + 1."""
        assert self._prompt_of is not None  # `look` came before
        n_done = 0
        with open_table(file.path, self._format) as (schema, n_rows, batches):
            self._check(schema, file.name)  # for the file may have been replaced since `look`
            for batch in batches:
                for row in batch.to_pylist():
                    n_done += 1
                    place = f"{file.name}, row {n_done}"
                    yield item_of_row(n_before + n_done, place, row, self._prompt_of)
                if n_rows:
                    file.tell_share(n_done / n_rows)


def types_of(schema: Any) -> dict[str, str]:
    """Return the type of each column."""
    return {field.name: str(field.type) for field in schema}
