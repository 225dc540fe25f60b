"""Runs a prompt for each row of a table in memory, of pandas or Arrow, and adds the answers as columns."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from cbatch.checks import check_flag, check_string
from cbatch.errors import ConfigError, EngineClosedError, RequestCancelledError
from cbatch.files.input.row_prompts import Asking, RowPrompts
from cbatch.files.input.tables import check_unique, item_of_row
from cbatch.files.output.encoders import ANSWERS, added_names, answer, no_answer
from cbatch.files.settings import check_engine
from cbatch.response import BatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions
    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse

T = TypeVar("T")

_N_ROWS = 1024
"""Rows of an Arrow table to have as Python values at once: our choice."""


class _Column(NamedTuple):
    name: str
    type: type
    values: list[Any]


class _Frame(Protocol):
    """A table of either library."""

    columns: Sequence[str]

    def __len__(self) -> int:
        """Return the number of rows."""

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield every row."""

    def with_columns(self, columns: Sequence[_Column]) -> Any:
        """Return a copy of the table with more columns."""


def run_table(
    table: T,
    *,
    engine: Engine,
    template: str | None = None,
    system: str | None = None,
    is_raw: bool = False,
    options: RunOptions | Mapping[str, Any] | None = None,
    progress: bool = False,
) -> T:
    """Run a prompt for each row of a table; return the table with the columns of the answers, rows in their order.

    The columns: response, finish_reason, error, prompt_tokens, completion_tokens; with a number where the table has
    a column of that name. A row that fails, or gives no prompt, has an `error`. So has a row that did not run because
    the engine was closed, or `cancel_all` called, before its turn.

    Args:
        table: a `pandas.DataFrame` or a `pyarrow.Table`; it is not changed.
        engine: runs the prompts.
        template: the text of a prompt, columns' names in braces; None: a column named prompt, text or messages.
        system: the text of a system message, with fields too.
        is_raw: rows are text to complete as it is, instead of chats.
        options: for every row.
        progress: whether to show progress on stderr.

    Raises:
        ConfigError: no table, no row, two columns of one name, or a template that does not fit.
    """
    check_engine(engine)
    asking = Asking(
        check_string("template", template),
        check_string("system", system),
        check_flag("is_raw", is_raw),
    )
    frame = _frame(table)
    check_unique(frame.columns, "table")
    prompt_of = RowPrompts(asking, frame.columns, "table")
    items: list[Item | None] = []
    asked = _prompts(frame, prompt_of, items)
    results, end = _results(engine.run(asked, options=options, progress=progress))
    answers = _answers(items, results, f"not asked: {end}")
    answers += [no_answer(f"not asked: {end}")] * (len(frame) - len(answers))
    added = zip(added_names(frame.columns), ANSWERS.values(), strict=True)
    columns = [_Column(*named, [row[i] for row in answers]) for i, named in enumerate(added)]
    return frame.with_columns(columns)  # type: ignore[no-any-return]


def _prompts(
    frame: _Frame, prompt_of: RowPrompts, items: list[Item | None]
) -> Iterator[BatchPrompt]:
    """Yield the prompts of the rows that give one; add for each row its item if it has an error, else None."""
    for number, row in enumerate(frame.rows(), 1):
        item = item_of_row(number, f"row {number}", row, prompt_of)
        items.append(None if item.error is None else item)
        if item.prompt is not None:
            yield item.prompt


def _results(response: BatchResponse) -> tuple[list[BatchResult], BaseException | None]:
    """Return the results of the rows that ran, and the error that ended the run early, if any."""
    try:
        return response.results(return_errors=True), None
    except BatchError as error:
        if not isinstance(error.__cause__, EngineClosedError | RequestCancelledError):
            raise
        return error.results, error.__cause__


def _answers(
    items: Sequence[Item | None], results: Sequence[BatchResult], left_out: str
) -> list[tuple[object, ...]]:
    """Return the added values of the rows that were read; the last rows may not have run."""
    left = iter(results)
    answers: list[tuple[object, ...]] = []
    for item in tuple(items):  # which may still be read, in another thread
        if item is not None and item.error:
            answers.append(no_answer(item.error.message))
        else:
            result = next(left, None)
            answers.append(no_answer(left_out) if result is None else answer(result))
    return answers


def _frame(table: Any) -> _Frame:
    for module, name, frame in (
        ("pandas", "DataFrame", _PandasFrame),
        ("pyarrow", "Table", _ArrowFrame),
    ):
        kind = getattr(sys.modules.get(module), name, None)  # whose table it is has been imported
        if kind is not None and isinstance(table, kind):
            return frame(table)
    raise ConfigError(
        f"a table is a pandas.DataFrame or a pyarrow.Table, not {type(table).__name__}"
    )


class _PandasFrame:
    def __init__(self, table: Any) -> None:
        self._table, self._pandas = table, sys.modules["pandas"]
        self.columns: Sequence[str] = [str(name) for name in table.columns]

    def __len__(self) -> int:
        return len(self._table)

    def rows(self) -> Iterator[dict[str, object]]:
        for values in self._table.itertuples(index=False, name=None):
            yield dict(zip(self.columns, map(self._known, values), strict=True))

    def _known(self, value: object) -> object:
        """Return a cell's value; None for the missing values of pandas."""
        if value is self._pandas.NA or value is self._pandas.NaT:
            return None
        return None if isinstance(value, float) and math.isnan(value) else value

    def with_columns(self, columns: Sequence[_Column]) -> Any:
        array, dtypes = self._pandas.array, {str: "string", int: "Int64"}
        return self._table.assign(
            **{c.name: array(c.values, dtype=dtypes[c.type]) for c in columns}
        )


class _ArrowFrame:
    def __init__(self, table: Any) -> None:
        self._table = table
        self.columns: Sequence[str] = table.column_names

    def __len__(self) -> int:
        return len(self._table)

    def rows(self) -> Iterator[dict[str, object]]:
        for batch in self._table.to_batches(max_chunksize=_N_ROWS):
            yield from batch.to_pylist()

    def with_columns(self, columns: Sequence[_Column]) -> Any:
        pyarrow, table = sys.modules["pyarrow"], self._table
        types = {str: pyarrow.string(), int: pyarrow.int64()}
        for column in columns:
            table = table.append_column(
                column.name, pyarrow.array(column.values, types[column.type])
            )
        return table
