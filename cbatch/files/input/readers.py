"""What reads the files of one format, and the formats whose items are lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cbatch.files.input.item import Item, unlabelled
from cbatch.files.input.tables import long_line
from cbatch.files.input.text_files import LongLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.files.input.text_files import InputFile


class Reader(Protocol):
    """Reads the files of one format."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The names in its rows; None where its items are no rows."""

    def look(self, file: InputFile) -> None:
        """Check a file's beginning."""

    def items(self, file: InputFile, n_before: int) -> Iterator[Item]:
        """Yield a file's items; the first has the number `n_before` + 1."""


class Parser(Protocol):
    """Reads an item from a line."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The names in its rows; None where its items are no rows."""

    def parse(self, number: int, place: str, line: bytes) -> Item:
        """Return the item of a line; what is wrong with it is the item's error."""


class LineReader:
    """Reads formats whose items are lines, one each."""

    def __init__(self, parser: Parser) -> None:
        """Make one for all files of a run."""
        self._parser = parser

    @property
    def columns(self) -> Sequence[str] | None:
        """The names in its rows; None where its items are no rows."""
        return self._parser.columns

    def look(self, file: InputFile) -> None:
        """Check a file's beginning: each line is checked by itself."""

    def items(self, file: InputFile, n_before: int) -> Iterator[Item]:
        """Yield a file's items; the first has the number `n_before` + 1."""
        number, parse, prefix = n_before, self._parser.parse, f"{file.name}, line "
        for i_line, line in enumerate(file.lines(), 1):
            if isinstance(line, LongLine):
                number += 1
                error = long_line(line.n_bytes, file.max_line_bytes).error
                yield Item(number, f"{prefix}{i_line}", self._id(number), None, error)
            elif line.strip():
                number += 1
                yield parse(number, f"{prefix}{i_line}", line)

    def _id(self, number: int) -> str:
        return unlabelled(number) if self.columns is None else str(number)
