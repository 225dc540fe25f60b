"""What writes the records of a batch file's answers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from cbatch.errors import ConfigError
from cbatch.files.answers import CsvWriter, ObjectWriter, TableEncoder
from cbatch.files.detect import COLUMNAR, SUFFIXES, check_format
from cbatch.files.inputs import COMPRESSED
from cbatch.files.lines import LineEncoder
from cbatch.files.openai import OpenAIEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.files.detect import Format
    from cbatch.files.item import Item, ItemError
    from cbatch.files.source import Source
    from cbatch.response import BatchResult


class Encoder(Protocol):
    """Writes records: each is whole, with its line end."""

    def header(self) -> bytes:
        """Return what stands before the first record."""

    def result(self, item: Item, result: BatchResult, *, created: int, model: str) -> bytes:
        """Return the record of an item that was asked, failed or not.

        Args:
            item: as it was read.
            result: what became of it; its id is not looked at.
            created: seconds since 1970.
            model: the name of the model, where the request named none.
        """

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the record of an item that could not be asked."""


@runtime_checkable
class Finisher(Protocol):
    """An encoder whose records become the output at the end of a run."""

    def finish(self, records: Path, target: Path) -> None:
        """Write the output from a file of records."""


class NoEncoder:
    """Writes nothing."""

    def header(self) -> bytes:
        """Return nothing."""
        return b""

    def result(self, item: Item, result: BatchResult, *, created: int, model: str) -> bytes:
        """Return nothing."""
        return b""

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return nothing."""
        return b""


def output_format(source: Source, asked: str = "auto") -> Format:
    """Return the format of the output: that of the input, but cbatch's lines for plain text.

    Raises:
        ConfigError: there is no such format, or it cannot be written.
    """
    check_format(asked, "auto")
    if asked == "text":
        raise ConfigError(
            "answers are not written as plain text: they have several lines; say cbatch or csv"
        )
    if asked == "auto":
        return "cbatch" if source.format == "text" else source.format
    return cast("Format", asked)


def check_name(path: Path, format: str, *, is_asked: bool) -> None:
    """Check that the name of an output does not promise what will not be in it.

    Args:
        path: of the output.
        format: of the output.
        is_asked: whether the format was said by its name.

    Raises:
        ConfigError: a compressed file, or a table of another format unless that is asked for.
    """
    if path.suffix.lower() in COMPRESSED:
        raise ConfigError(
            f"{path}: answers are not written compressed, for a run goes on in its file: leave out {path.suffix}"
        )
    named = SUFFIXES.get(path.suffix.lower(), "text")
    if named not in ("text", format) and not is_asked:
        raise ConfigError(
            f"{path}: answers would be {format}, as the input: say output_format={named!r} (--output-format {named}), "
            "or give another name"
        )


def encoder(format: str, source: Source) -> Encoder:
    """Return what writes records of a format for the items of a source."""
    columns = source.columns
    if format == "openai":
        return OpenAIEncoder()
    if format == "cbatch":
        return LineEncoder()
    if format == "jsonl":
        return TableEncoder(columns, ObjectWriter)
    if format in COLUMNAR:
        from cbatch.files.columnar import ColumnarEncoder  # pyarrow is slow to import

        return ColumnarEncoder(format, source)
    return TableEncoder(columns, partial(CsvWriter, delimiter="\t" if format == "tsv" else ","))
