"""What writes the records of a batch file's answers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from cbatch.errors import ConfigError
from cbatch.files.input.detect import COLUMNAR, JSON_LINES, check_format, named_format
from cbatch.files.input.lines import LineEncoder
from cbatch.files.input.openai import OpenAIEncoder
from cbatch.files.input.text_files import COMPRESSED, UNREAD
from cbatch.files.output.answers import CsvWriter, ObjectWriter, TableEncoder

if TYPE_CHECKING:
    from pathlib import Path, PurePath

    from cbatch.files.input.detect import Format
    from cbatch.files.input.item import Item, ItemError
    from cbatch.files.input.source import Source
    from cbatch.response import BatchResult


_NO_TEXT = "answers are not written as plain text, for they have several lines"


class Encoder(Protocol):
    """Writes records: each is whole, with its line end."""

    def header(self) -> bytes:
        """Return what stands before the first record."""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return the record of an item that was asked, failed or not.

        Args:
            item: as it was read.
            result: what became of it; its id is not looked at.
            digest: of what was asked, for formats that repeat it.
            created: seconds since 1970.
            model: the name of the model, where the request named none.
        """

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the record of an item that could not be asked."""


@runtime_checkable
class Finisher(Protocol):
    """An encoder whose records become the output at the end of a run."""

    def finish(self, records: Path, target: Path, n_items: int | None = None) -> None:
        """Write the output from a file of records, of an input of so many items."""


class NoEncoder:
    """Writes nothing."""

    def header(self) -> bytes:
        """Return nothing."""
        return b""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return nothing."""
        return b""

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return nothing."""
        return b""


def output_format(source: Source, asked: str = "auto", path: PurePath | None = None) -> Format:
    """Return the format of an output: as it is asked for, else as its name says, else that of the input.

    Plain text is answered in cbatch's lines; a name that says JSON lines says nothing of whose they are.

    Raises:
        ConfigError: there is no such format, or answers cannot be written so.
    """
    check_format(asked, "auto")
    if asked == "text":
        raise ConfigError(f"{_NO_TEXT}: say cbatch or csv")
    if asked != "auto":
        return cast("Format", asked)
    own: Format = "cbatch" if source.format == "text" else source.format
    named = None if path is None else named_format(path)
    if named is None or (named == "jsonl" and own in JSON_LINES):
        return own
    if named == "text":
        raise ConfigError(
            f"{path}: {_NO_TEXT}: give another name, such as one in .jsonl or .csv, or say the format "
            "(--output-format)"
        )
    return named


def check_name(path: PurePath, format: str, *, is_asked: bool = False) -> None:
    """Check that the name of a file of answers does not promise what will not be in it.

    Args:
        path: of the file.
        format: in which it is written.
        is_asked: whether that was said, so that a name may say another format that is text.

    Raises:
        ConfigError: a compressed file, or a name that says another format.
    """
    if path.suffix.lower() in (*COMPRESSED, *UNREAD):
        raise ConfigError(
            f"{path}: answers are not written compressed, for a run goes on in its file: leave out {path.suffix}"
        )
    named = named_format(path)
    if named is None or named == ("jsonl" if format in JSON_LINES else format):
        return
    if is_asked and not {named, format} & set(COLUMNAR):
        return
    raise ConfigError(f"{path}: its name says {named}, and answers are {format}: give another name")


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
        from cbatch.files.input.columnar import ColumnarEncoder  # pyarrow is slow to import

        return ColumnarEncoder(format, source)
    return TableEncoder(columns, partial(CsvWriter, delimiter="\t" if format == "tsv" else ","))
