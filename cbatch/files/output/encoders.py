"""Encoders turn results into records; those of rows write the input's columns, then those of the answer."""

from __future__ import annotations

import csv
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cbatch.errors import ConfigError
from cbatch.files.input.item import Item, ItemError, key_of_id
from cbatch.files.input.row_prompts import Row, as_text
from cbatch.files.units import listed
from cbatch.support.lazy_json import LazyList, pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.options import RunOptions
    from cbatch.response import BatchResult


def dump(value: object) -> bytes:
    """Return a value as a line of JSON; a type that JSON lacks as text, NaN and infinities as null."""
    try:
        return _encode(value)
    except ValueError:
        value = _finite(value)
    try:
        return _encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        return _encode(value, ensure_ascii=True)


def _encode(value: object, *, ensure_ascii: bool = False) -> bytes:
    """Return a value as a line of JSON, of which there is no second copy meanwhile: it may be long."""
    pieces = pieces_of(value, default=str, ensure_ascii=ensure_ascii)
    return b"".join([*map(str.encode, pieces), b"\n"])


def _finite(value: object) -> object:
    """Return a value with null in place of NaN and infinities, which tables may have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | LazyList):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Encoder:
    """Writes records, each whole with its line end; this class itself writes nothing."""

    def header(self) -> bytes:
        """Return the bytes before the first record."""
        return b""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return the record of an item that ran, failed or not.

        Args:
            result: of the item; its id is not used.
            digest: of the item, for formats that repeat it.
            created: seconds since 1970.
            model: the name of the model, where the request named none.
        """
        return b""

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the record of an item that could not run."""
        return b""

    def finish(self, records: Path, part: Path, n_items: int, numbers: Iterable[int]) -> None:
        """Write the output from the file of records of `n_items`, for formats that are written at the end of a run.

        `numbers` are those of the items of the records, in the order of the file.
        """


class Known(NamedTuple):
    """The item of a record: its key, its digest, and whether the record is an error."""

    key: str
    digest: bytes
    is_error: bool


class TraceableEncoder(Encoder, ABC):
    """An encoder whose records name their item."""

    def __init__(self, *, has_rows: bool) -> None:
        self._has_rows = has_rows

    def _known(self, id: str, digest: bytes | None, *, is_error: bool) -> Known | None:
        if digest is None:
            return None
        return Known(key_of_id(id, has_rows=self._has_rows), digest, is_error)

    @abstractmethod
    def known(self, record: Mapping[str, object]) -> Known | None:
        """Return the item of a record; None for the error of an item that could not run.

        Raises:
            LineError: the record is not one of this encoder's.
        """


# ---- rows ----

_ANSWERS: Mapping[str, type] = MappingProxyType(
    {
        "response": str,
        "finish_reason": str,
        "error": str,
        "prompt_tokens": int,
        "completion_tokens": int,
        "logprob": float,
        "choice_probs": str,
        "warnings": str,
    }
)
"""The columns that an answer may have, and their types."""

WHERE_ASKED = ("logprob", "choice_probs")
"""Columns that a table has only where the options ask for them."""

_WHERE_PRESENT = (*WHERE_ASKED, "warnings")
"""Keys that an object has where they have a value."""


def columns_asked(options: RunOptions) -> frozenset[str]:
    """Return the optional columns of a table that the options ask for."""
    asked = {"logprob": options.logprobs, "choice_probs": options.choice_probs}
    return frozenset(name for name in WHERE_ASKED if asked[name])


class AnswerColumns:
    """The columns of a table of answers: those of the input, then those of the answer.

    Attributes:
        has_rows: whether items are rows; else they are requests, which have an id.
        own: the columns of the input that are kept.
        keeps_all: whether these are all.
        types: the columns of the answer, and their types.
        added: their names, with a number where the table has a column of that name.
    """

    of_answer: ClassVar[Mapping[str, type]] = _ANSWERS
    main: ClassVar[str] = "response"
    """The column that `output_column` names."""

    def __init__(
        self,
        columns: Sequence[str] | None,
        *,
        keep: Sequence[str] | None = None,
        output_column: str | None = None,
        extra: Collection[str] = (),
    ) -> None:
        """Choose the columns.

        Args:
            columns: of the input's rows; None: its items are requests.
            keep: columns of the input that the output has; None: all.
            output_column: the name of the answer's text; None: "response".
            extra: columns beside those that every table has, as `columns_asked` returns them.

        Raises:
            ConfigError: a column to keep is not there, or the answer's name is that of another column.
        """
        known = dict.fromkeys(("id",) if columns is None else columns)
        for name in keep or ():
            if name not in known:
                raise ConfigError(
                    f"keep_columns has {name!r}, which is not a column; columns are {listed(known)}"
                )
        self.has_rows, self.keeps_all = columns is not None, keep is None
        self.own = tuple(known if keep is None else dict.fromkeys(keep))
        self._kept = [n for n in self.of_answer if n in extra or n not in WHERE_ASKED]
        text = output_column or self.main
        if output_column in (*self.own, *(name for name in self._kept[1:])):
            raise ConfigError(
                f"output_column={output_column!r} is the name of another column: give another name"
            )
        self.types = {
            text if name == self.main else name: self.of_answer[name] for name in self._kept
        }
        self.added = self.names_beside(self.own)

    def names_beside(self, columns: Collection[str]) -> tuple[str, ...]:
        """Return the names of the answer's columns beside others."""
        taken = set(columns)
        return tuple(_taken(name, taken) for name in self.types)

    def answer(self, result: BatchResult) -> tuple[object, ...]:
        """Return the values of the answer's columns."""
        usage = result.usage
        values = {
            "response": _response(result),
            "finish_reason": result.finish_reason,
            "error": None if result.error is None else str(result.error),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "logprob": _logprob(result),
            "choice_probs": None if result.choice_probs is None else as_text(result.choice_probs),
            "warnings": "; ".join(result.warnings) or None,
        }
        return tuple(values[name] for name in self._kept)

    def no_answer(self, message: str) -> tuple[object, ...]:
        """Return these values for an item that could not run."""
        values = {"response": "", "finish_reason": "error", "error": message}
        return tuple(values.get(name) for name in self._kept)


class Vector:
    """The type of a column of embeddings, whose values are arrays of float32."""


class VectorColumns(AnswerColumns):
    """The columns of a table with embeddings: those of the input, then those of the embedding."""

    of_answer = MappingProxyType({"embedding": Vector, "prompt_tokens": int, "error": str})
    main = "embedding"

    def answer(self, result: BatchResult) -> tuple[object, ...]:
        """Return the values of an embedding's columns."""
        if result.error is not None:
            return self.no_answer(str(result.error))
        found: Any = result.origin
        return found[0][0].embedding, result.usage.prompt_tokens, None


class ScoreColumns(AnswerColumns):
    """The columns of a table with scores: those of the input, then those of the score."""

    of_answer = MappingProxyType({"score": float, "error": str})
    main = "score"

    def answer(self, result: BatchResult) -> tuple[object, ...]:
        """Return the values of a score's columns."""
        if result.error is not None:
            return self.no_answer(str(result.error))
        found: Any = result.origin
        return float(found[0][0].score), None


def _plain_value(value: Any) -> object:
    """Return a value as JSON has it: an embedding as numbers."""
    return value.tolist() if hasattr(value, "astype") else value


def _taken(name: str, taken: set[str]) -> str:
    """Add a name to `taken`, with a number if it is there already, and return it."""
    names = chain([name], (f"{name}_{n}" for n in count(2)))
    found = next(candidate for candidate in names if candidate not in taken)
    taken.add(found)
    return found


def _logprob(result: BatchResult) -> float | None:
    """Return the log-probability of an answer, the sum of its tokens'; of several answers that of the first."""
    if result.logprobs is None:
        return None
    tokens = result.logprobs
    if tokens and math.isnan(tokens[0].logprob):  # the prompt is echoed before the answer
        tokens = tokens[result.usage.prompt_tokens :]
    return math.fsum(token.logprob for token in tokens)


def _response(result: BatchResult) -> str:
    """Return the text; of tool calls without text, the calls as JSON; of several answers, a list."""
    if len(result.choices) > 1:
        return as_text([_response(choice) for choice in result.choices])
    if result.tool_calls and not result.text:
        return as_text([call.as_dict() for call in result.tool_calls])
    return result.text


class RowEncoder(Encoder, ABC):
    """Writes an item's own columns, then its answer."""

    def __init__(self, layout: AnswerColumns) -> None:
        self.layout = layout

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return a result as a whole record."""
        return self._record(item, self.layout.answer(result))

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the record of an item that could not run."""
        return self._record(item, self.layout.no_answer(f"{item.place}: {error.message}"))

    def _row(self, item: Item) -> Row:
        """Return the columns of an item that are kept."""
        layout = self.layout
        row: Row = {"id": item.id}
        if layout.has_rows:
            row = item.extra if isinstance(item.extra, Mapping) else {}
        return row if layout.keeps_all else {n: row[n] for n in layout.own if n in row}

    def _whole_row(self, item: Item, values: tuple[object, ...]) -> Row:
        row, added = self._row(item), self.layout.added
        if not row.keys().isdisjoint(added):
            added = self.layout.names_beside(row)
        return {**row, **dict(zip(added, map(_plain_value, values), strict=True))}

    @abstractmethod
    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        """Return a record of the values of the added columns."""


class ObjectEncoder(RowEncoder):
    """Writes JSON objects, one a line; each has the keys of its row."""

    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        row = dict(self._whole_row(item, values))
        names = list(row)[-len(values) :]
        for name, column, value in zip(names, self.layout.types, values, strict=True):
            if value is None and column in _WHERE_PRESENT:
                del row[name]
        return dump(row)


class CsvEncoder(RowEncoder):
    """Writes CSV; a missing value is an empty field, a nested one is JSON."""

    def __init__(self, layout: AnswerColumns, delimiter: str) -> None:
        super().__init__(layout)
        self._columns, self._delimiter = (*layout.own, *layout.added), delimiter

    def header(self) -> bytes:
        """Return the line of names."""
        return self._line(self._columns)

    def _record(self, item: Item, values: tuple[object, ...]) -> bytes:
        row = self._whole_row(item, values)
        return self._line([as_text(row.get(column)) for column in self._columns])

    def _line(self, cells: Sequence[str]) -> bytes:
        text = io.StringIO()
        # fields that have one of the characters of a line's end are quoted
        csv.writer(text, delimiter=self._delimiter, lineterminator="\r\n").writerow(cells)
        return text.getvalue().removesuffix("\r\n").encode(errors="replace") + b"\n"
