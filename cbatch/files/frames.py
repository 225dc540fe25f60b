"""Runs a prompt for each row of a table in memory, of pandas, polars or Arrow; the answers are added as columns."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeVar

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
    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions
    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse

T = TypeVar("T")

_N_ROWS = 1024  # rows of an Arrow table to have as Python values at once: our choice


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
        table: a `pandas.DataFrame`, a `polars.DataFrame` or a `pyarrow.Table`; it is not changed.
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
    errors: list[str | None] = []  # of the rows that were read; None for a row with a prompt

    def prompts() -> Iterator[BatchPrompt]:
        for number, row in enumerate(frame.rows(), 1):
            item = item_of_row(number, "", row, prompt_of)
            errors.append(None if item.error is None else item.error.message)
            if item.prompt is not None:
                yield item.prompt

    results, end = _results(engine.run(prompts(), options=options, progress=progress))
    answers = _answers(tuple(errors), results, len(frame), no_answer(f"not asked: {end}"))
    columns = [[row[i] for row in answers] for i in range(len(ANSWERS))]
    return frame.with_columns(dict(zip(added_names(frame.columns), columns, strict=True)))  # type: ignore[no-any-return]


def _results(response: BatchResponse) -> tuple[list[BatchResult], BaseException | None]:
    """Return the results of the rows that ran, and the error that ended the run early, if any."""
    try:
        return response.results(return_errors=True), None
    except BatchError as error:
        if not isinstance(error.__cause__, EngineClosedError | RequestCancelledError):
            raise
        return error.results, error.__cause__


def _answers(
    errors: Sequence[str | None],
    results: Sequence[BatchResult],
    n_rows: int,
    not_asked: tuple[object, ...],
) -> list[tuple[object, ...]]:
    """Return the added values of all rows; the last rows may not have been read, or may not have run."""
    left = iter(results)
    answers = []
    for error in errors:
        result = next(left, None) if error is None else None
        answered = not_asked if result is None else answer(result)
        answers.append(answered if error is None else no_answer(error))
    return answers + [not_asked] * (n_rows - len(answers))


def _frame(table: Any) -> _PandasFrame | _PolarsFrame | _ArrowFrame:
    pandas, polars, pyarrow = (sys.modules.get(name) for name in ("pandas", "polars", "pyarrow"))
    if pandas is not None and isinstance(table, pandas.DataFrame):  # its library is imported
        return _PandasFrame(table, pandas)
    if polars is not None and isinstance(table, polars.DataFrame):
        return _PolarsFrame(table, polars)
    if pyarrow is not None and isinstance(table, pyarrow.Table):
        return _ArrowFrame(table, pyarrow)
    lazy = " (collect it)" if callable(getattr(table, "collect", None)) else ""
    raise ConfigError(
        "a table is a pandas.DataFrame, a polars.DataFrame or a pyarrow.Table, "
        f"not {type(table).__module__.partition('.')[0]}.{type(table).__name__}{lazy}"
    )


class _PandasFrame:
    def __init__(self, table: Any, pandas: Any) -> None:
        self._table, self._pandas = table, pandas
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

    def with_columns(self, columns: Mapping[str, list[object]]) -> Any:
        dtypes = {str: "string", int: "Int64"}
        added = zip(columns.items(), ANSWERS.values(), strict=True)
        return self._table.assign(
            **{
                name: self._pandas.array(values, dtype=dtypes[type])
                for (name, values), type in added
            }
        )


class _PolarsFrame:
    def __init__(self, table: Any, polars: Any) -> None:
        self._table, self._polars = table, polars
        self.columns: Sequence[str] = [str(name) for name in table.columns]

    def __len__(self) -> int:
        return len(self._table)

    def rows(self) -> Iterator[dict[str, object]]:
        return self._table.iter_rows(named=True)  # type: ignore[no-any-return]

    def with_columns(self, columns: Mapping[str, list[object]]) -> Any:
        dtypes = {str: self._polars.String, int: self._polars.Int64}
        added = zip(columns.items(), ANSWERS.values(), strict=True)
        return self._table.with_columns(
            [self._polars.Series(name, values, dtypes[type]) for (name, values), type in added]
        )


class _ArrowFrame:
    def __init__(self, table: Any, pyarrow: Any) -> None:
        self._table, self._pyarrow = table, pyarrow
        self.columns: Sequence[str] = table.column_names

    def __len__(self) -> int:
        return len(self._table)

    def rows(self) -> Iterator[dict[str, object]]:
        for batch in self._table.to_batches(max_chunksize=_N_ROWS):
            yield from batch.to_pylist()

    def with_columns(self, columns: Mapping[str, list[object]]) -> Any:
        table, types = self._table, {str: self._pyarrow.string(), int: self._pyarrow.int64()}
        for (name, values), type in zip(columns.items(), ANSWERS.values(), strict=True):
            table = table.append_column(name, self._pyarrow.array(values, types[type]))
        return table
