"""Runs a prompt for each row of a table in memory, of pandas, polars or Arrow; the answers are added as columns."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from cbatch.errors import (
    ConfigError,
    EngineClosedError,
    RequestCancelledError,
    RequestFailedError,
    words_of,
)
from cbatch.files.input.columnar import rows_of
from cbatch.files.input.item import Item, ItemError
from cbatch.files.input.row_prompts import Asking, RowPrompts
from cbatch.files.input.tables import check_unique, item_of_row
from cbatch.files.output.encoders import AnswerColumns, columns_asked
from cbatch.files.settings import check_engine
from cbatch.files.units import listed
from cbatch.options import RunOptions
from cbatch.response import BatchError, BatchResult
from cbatch.support.checks import check_flag, check_string, strings_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from cbatch.engine import Engine
    from cbatch.messages import BatchPrompt
    from cbatch.runtime.batch_response import BatchResponse

    Rows: TypeAlias = "Iterator[tuple[dict[str, object] | None, ItemError | None]]"
    """The values of each row, and its error; None for no values, and for no error."""

T = TypeVar("T")

_N_ROWS = 1024  # rows of an Arrow table to have as Python values at once: our choice


def run_table(  # noqa: PLR0913  # how rows are asked, and what becomes of the table
    table: T,
    *,
    engine: Engine,
    template: str | None = None,
    system: str | None = None,
    is_raw: bool = False,
    options: RunOptions | Mapping[str, Any] | None = None,
    options_column: str | None = None,
    image_column: str | None = None,
    audio_column: str | None = None,
    output_column: str | None = None,
    keep_columns: Sequence[str] | None = None,
    progress: bool = False,
    raise_errors: bool = False,
) -> T:
    """Run a prompt for each row of a table; return the table with the columns of the answers, rows in their order.

    The columns: response, finish_reason, error, prompt_tokens, completion_tokens, logprob where the options ask for
    log-probabilities (the sum of those of the answer's tokens), warnings; with a number where the table has a column of
    that name. A row that fails, or gives no prompt, has an `error`. So has a row that did not run because
    the engine was closed, or `cancel_all` called, before its turn.

    Args:
        table: a `pandas.DataFrame`, a `polars.DataFrame` or a `pyarrow.Table`; it is not changed.
        engine: runs the prompts.
        template: the text of a prompt, columns' names in braces; None: a column named prompt, text or messages.
        system: the text of a system message, with fields too.
        is_raw: rows are text to complete as it is, instead of chats.
        options: for every row.
        options_column: a column with options of each row, before those of all: JSON text, or a value with their names.
        image_column: a column with a picture for each row, which stands before its text: the bytes of a file, a data
            URL, or the name of a file.
        audio_column: a column with a sound for each row, as `image_column`.
        output_column: the name of the column with the answer's text; None: "response".
        keep_columns: columns of the table that the result has, in this order; None: all.
        progress: whether to show progress on stderr.
        raise_errors: raise an error where a row failed, when all have ended.

    Raises:
        RequestFailedError: with `raise_errors`, a row failed.
        ConfigError: no table, no row, two columns of one name, or a template or columns that do not fit.
    """
    check_engine(engine)
    check_flag("raise_errors", raise_errors)  # before answers would be lost
    asking = Asking(
        check_string("template", template),
        check_string("system", system),
        check_flag("is_raw", is_raw),
        check_string("options_column", options_column),
        check_string("image_column", image_column),
        check_string("audio_column", audio_column),
    )
    frame = _frame(table)
    check_unique(frame.columns, "table")
    prompt_of = RowPrompts(asking, frame.columns, "table")
    layout = AnswerColumns(
        frame.columns,
        keep=None if keep_columns is None else strings_of("keep_columns", keep_columns),
        output_column=check_string("output_column", output_column),
        extra=columns_asked(RunOptions.of(options).over(engine.options)),
    )
    errors: list[str | None] = []  # of the rows that were read; None for a row with a prompt

    def prompts() -> Iterator[BatchPrompt]:
        for number, (row, wrong) in enumerate(frame.rows(prompt_of.columns), 1):
            item = _item(number, row, prompt_of, wrong)
            errors.append(None if item.error is None else item.error.message)
            if item.prompt is not None:
                yield item.prompt

    response = engine.run(prompts(), options=options, progress=progress, ask_again=True)
    results, end = _results(response)
    answers = _answers(tuple(errors), results, len(frame), layout, f"not run: {end}")
    columns = [[row[i] for row in answers] for i in range(len(layout.added))]
    if raise_errors:
        _raise_first(columns[[*layout.types].index("error")])
    return frame.with_columns(layout, columns)  # type: ignore[no-any-return]


def _item(
    number: int, row: dict[str, object] | None, prompt_of: RowPrompts, wrong: ItemError | None
) -> Item:
    """Return the item of a row. Its cells may be any objects: an error in one's `__str__`, say, is the item's error."""
    try:
        return item_of_row(number, "", row, prompt_of, wrong)
    except Exception as error:
        columns = listed(sorted(prompt_of.columns))
        wrong = ItemError(
            "invalid_row", f"no prompt can be made of the row's {columns}: {words_of(error)}"
        )
        return item_of_row(number, "", row, prompt_of, wrong)


def _raise_first(errors: Sequence[object]) -> None:
    failed = [(row, message) for row, message in enumerate(errors, 1) if message is not None]
    if failed:
        row, message = failed[0]
        raise RequestFailedError(
            f"{len(failed)} of {len(errors)} rows failed; the first, row {row}: {message}"
        )


def _results(response: BatchResponse) -> tuple[list[BatchResult], BaseException | None]:
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
    layout: AnswerColumns,
    not_asked: str,
) -> list[tuple[object, ...]]:
    """Return the added values of all rows; the last rows may not have been read, or may not have run."""
    left, missing = iter(results), layout.no_answer(not_asked)
    answers = []
    for error in errors:
        result = next(left, None) if error is None else None
        answered = missing if result is None else layout.answer(result)
        answers.append(answered if error is None else layout.no_answer(error))
    return answers + [missing] * (n_rows - len(answers))


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
        "a table must be a pandas.DataFrame, a polars.DataFrame or a pyarrow.Table, "
        f"not {type(table).__module__.partition('.')[0]}.{type(table).__name__}{lazy}"
    )


def _named(all: Sequence[str], wanted: Collection[str]) -> list[str]:
    """Return the wanted columns; all if none is, for a table without columns has no rows."""
    return [name for name in all if name in wanted] or [*all]


class _PandasFrame:
    def __init__(self, table: Any, pandas: Any) -> None:
        self._table, self._pandas = table, pandas
        self.columns: Sequence[str] = [str(name) for name in table.columns]

    def __len__(self) -> int:
        return len(self._table)

    def rows(self, columns: Collection[str]) -> Rows:
        for values in self._table.itertuples(index=False, name=None):
            row = zip(self.columns, values, strict=True)
            yield {name: self._known(value) for name, value in row if name in columns}, None

    def _known(self, value: object) -> object:
        """Return a cell's value; None for the missing values of pandas, a list for what Parquet has as one."""
        if getattr(value, "ndim", 0):
            value = value.tolist()  # type: ignore[attr-defined]  # an array of NumPy
        if value is self._pandas.NA or value is self._pandas.NaT:
            return None
        return None if isinstance(value, float) and math.isnan(value) else value

    def with_columns(self, layout: AnswerColumns, columns: list[list[object]]) -> Any:
        dtypes = {str: "string", int: "Int64", float: "Float64"}
        added = zip(layout.added, columns, layout.types.values(), strict=True)
        table = self._table
        if not layout.keeps_all:  # names of columns may be no text
            names = dict(zip(self.columns, table.columns, strict=True))
            table = table[[names[name] for name in layout.own]]
        return table.assign(
            **{name: self._pandas.array(each, dtype=dtypes[type]) for name, each, type in added}
        )


class _PolarsFrame:
    def __init__(self, table: Any, polars: Any) -> None:
        self._table, self._polars = table, polars
        self.columns: Sequence[str] = [str(name) for name in table.columns]

    def __len__(self) -> int:
        return len(self._table)

    def rows(self, columns: Collection[str]) -> Rows:
        for row in self._table.iter_rows(named=True):
            yield row, None

    def with_columns(self, layout: AnswerColumns, columns: list[list[object]]) -> Any:
        polars = self._polars
        dtypes = {str: polars.String, int: polars.Int64, float: polars.Float64}
        added = zip(layout.added, columns, layout.types.values(), strict=True)
        table = self._table if layout.keeps_all else self._table.select(list(layout.own))
        return table.with_columns(
            [polars.Series(name, each, dtypes[type]) for name, each, type in added]
        )


class _ArrowFrame:
    def __init__(self, table: Any, pyarrow: Any) -> None:
        self._table, self._pyarrow = table, pyarrow
        self.columns: Sequence[str] = table.column_names

    def __len__(self) -> int:
        return len(self._table)

    def rows(self, columns: Collection[str]) -> Rows:
        table = self._table.select(_named(self.columns, columns))
        for batch in table.to_batches(max_chunksize=_N_ROWS):
            yield from ((row, None) for row in rows_of(batch))

    def with_columns(self, layout: AnswerColumns, columns: list[list[object]]) -> Any:
        pyarrow = self._pyarrow
        types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
        table = self._table if layout.keeps_all else self._table.select(list(layout.own))
        if not layout.own:  # a table without columns has no rows
            arrays = [
                pyarrow.array(values, types[type])
                for values, type in zip(columns, layout.types.values(), strict=True)
            ]
            return pyarrow.table(dict(zip(layout.added, arrays, strict=True)))
        for name, values, type in zip(layout.added, columns, layout.types.values(), strict=True):
            table = table.append_column(name, pyarrow.array(values, types[type]))
        return table
