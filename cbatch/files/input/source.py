"""The items of batch files, one after another, in constant memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.file_formats import COLUMNAR, Format, check_format, format_of
from cbatch.files.input.json_requests import CbatchReader, OpenAIReader, RequestReader
from cbatch.files.input.row_prompts import Asking
from cbatch.files.input.tables import RowReader, csv_table, object_table, text_table
from cbatch.files.input.text_files import MAX_LINE_BYTES, InputFile, find_files
from cbatch.support.checks import check_flag, check_path, reading, shown
from cbatch.support.plain import is_table, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.files.input.item import Item


class Source:
    """The items of one or several files, once, read as they are needed."""

    def __init__(
        self, files: Sequence[InputFile], format: Format, reader: RequestReader | RowReader
    ) -> None:
        self.format = format
        self.paths = [file.path for file in files]
        self._files, self._reader = files, reader
        self.n_items_read = 0
        self._n_bytes_before = 0
        self._file: InputFile | None = None

    @property
    def columns(self) -> Sequence[str] | None:
        """The names in its rows; None where its items are not rows."""
        return self._reader.columns

    @property
    def n_bytes(self) -> int | None:
        """Bytes of all files; None where one is a pipe."""
        sizes = [file.n_bytes for file in self._files]
        return None if None in sizes else sum(filter(None, sizes))

    @property
    def n_bytes_read(self) -> int:
        """Bytes read so far, of compressed files compressed bytes."""
        return self._n_bytes_before + (self._file.n_bytes_read if self._file else 0)

    def __iter__(self) -> Iterator[Item]:
        """Yield every item; ConfigError where a file cannot be read to its end, or there is no item at all."""
        self.n_items_read = self._n_bytes_before = 0
        for file in self._files:
            self._file = file
            for item in self._reader.items(file, self.n_items_read):
                self.n_items_read = item.number
                yield item
            self._n_bytes_before += file.n_bytes or file.n_bytes_read
            self._file = None
            file.close()
        if not self.n_items_read:
            raise _empty(self._files)

    def stop(self) -> None:
        """End the reading of pipes, also where another thread waits for one."""
        for file in self._files:
            file.stop()

    def close(self) -> None:
        """Close the files. Twice is harmless."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_source(  # noqa: PLR0913  # how rows are asked, and which files are read
    paths: str | Path | Sequence[str | Path],
    *,
    format: str = "auto",
    template: str | None = None,
    system: str | None = None,
    is_raw: bool | None = None,
    image_column: str | None = None,
    audio_column: str | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
    url: str | None = None,
    without: Collection[str] = (),
) -> Source:
    """Look at batch files and return their items.

    Args:
        paths: files, patterns such as `part-*.jsonl`, or `-` for stdin; all of one format.
        format: one of `Format`; auto: by the files' names, and for JSON lines by the first object.
        template: the text of a prompt with columns' names in braces, for tables, plain text and JSON objects.
        system: the text of a system message, with fields too.
        is_raw: see `FileOptions`.
        image_column: see `FileOptions`.
        audio_column: see `FileOptions`.
        max_line_bytes: a longer line, or row, becomes an item with an error.
        url: of every line of OpenAI's requests; None: any that is served.
        without: real paths of files that patterns leave out.

    Raises:
        ConfigError: no such file, a directory, an empty file, files of several formats, a format that cannot be told,
            or a template that does not fit.
    """
    if is_raw is not None:
        check_flag("is_raw", is_raw)
    check_format(format, "auto")
    named = find_files(names_of("source", paths), without)
    asking = Asking(
        template, system, is_raw is True, image_column=image_column, audio_column=audio_column
    )
    with ExitStack() as stack:
        files = [stack.enter_context(closing(InputFile(name, max_line_bytes))) for name in named]
        source = _looked_at(files, format, asking, url, is_raw=is_raw)
        stack.pop_all()
    return source


def names_of(name: str, paths: object) -> list[str]:
    """Return names of files, given alone or in a list; a ConfigError for another value calls them `name`."""
    with reading(name):
        if isinstance(paths, os.PathLike) or text_of(paths) is not None:
            return [check_path(name, paths)]
        is_single = isinstance(paths, Mapping | Set | bytes) or is_table(paths)
        if not isinstance(paths, Iterable) or is_single or hasattr(paths, "readline"):
            raise ConfigError(
                f"{name} must be the name of a file, or a list of names, not {shown(paths)}"
            )
        return [check_path(f"{name}[{i}]", path) for i, path in enumerate(paths)]


def _looked_at(
    files: Sequence[InputFile], format: str, asking: Asking, url: str | None, *, is_raw: bool | None
) -> Source:
    found = [
        (file, one)
        for file in files
        if (one := format_of(file, format, has_template=asking.template is not None)) is not None
    ]
    if not found:
        raise _empty(files)
    first, known = found[0]
    for file, other in found:
        if other != known:
            raise ConfigError(
                f"{first.name} is {known} and {file.name} is {other}: give files of one format, "
                "or say which it is (format)"
            )
    if known == "openai" and is_raw is not None:
        raise ConfigError(
            f"{first.name}: the url of each line says whether it is a chat: leave out is_raw (--raw, --chat)"
        )
    if known in ("openai", "cbatch") and not asking.is_empty:
        raise ConfigError(
            f"{first.name}: its lines are requests ({known}), which take no template, system message or column of "
            "pictures or sounds: leave that out, or give format='jsonl' for objects of your own"
        )
    kept = [file for file, _ in found]
    reader = CbatchReader(as_chats=is_raw is False) if known == "cbatch" else None
    return Source(kept, known, reader or _reader(known, kept, asking, url))


def _empty(files: Sequence[InputFile]) -> ConfigError:
    names = ", ".join(file.name for file in files[:3]) + ", …" * (len(files) > 3)
    return ConfigError(f"{names}: no requests found (empty_file)")


def _reader(
    format: Format, files: Sequence[InputFile], asking: Asking, url: str | None
) -> RequestReader | RowReader:
    if format == "openai":
        return OpenAIReader(url)
    if format == "jsonl":
        return RowReader(files, asking, object_table)
    if format == "text":
        template = "{line}" if asking.template is None else asking.template
        return RowReader(files, replace(asking, template=template), text_table)
    if format in COLUMNAR:
        from cbatch.files.input.columnar import columnar_table, import_pyarrow  # which is slow

        import_pyarrow()
        return RowReader(files, asking, partial(columnar_table, format=format))
    delimiter = "\t" if format == "tsv" else ","
    return RowReader(files, asking, partial(csv_table, delimiter=delimiter))
