from __future__ import annotations

import datetime
import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

import cbatch
from cbatch.errors import ConfigError
from cbatch.files.frames import run_table
from tests.files.runs import make_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cbatch.runtime.step_record import StepRecord

ADDED = ["response", "finish_reason", "error", "prompt_tokens", "completion_tokens", "warnings"]


@pytest.fixture(scope="module")
def engine(test_model: Path) -> Iterator[cbatch.Engine]:
    """An engine that two requests run in at once."""
    with cbatch.load(test_model, parallel=2, n_threads=1, options={"temperature": 0}) as engine:
        yield engine


def test_arrow_table_gets_columns_with_rows_in_order(engine: cbatch.Engine) -> None:
    table = pa.table({"word": ["red", "blue", "green"] * 4, "n": range(12)})
    out = run_table(table, engine=engine, template="Say {word}.")
    assert out.select(["word", "n"]).equals(table)
    assert out.column_names[2:] == ADDED
    assert out["response"].to_pylist() == table["word"].to_pylist()
    assert out["finish_reason"].to_pylist() == ["stop"] * 12
    assert out["prompt_tokens"].type == pa.int64()


def test_frame_gets_columns_and_keeps_its_index(engine: cbatch.Engine) -> None:
    frame = pd.DataFrame({"word": ["red", "blue"], "response": [1.5, None]}, index=[7, 3])
    before = frame.copy()
    out = run_table(frame, engine=engine, template="Say {word}.")
    assert list(out.index) == [7, 3]
    assert list(out["response_2"]) == ["red", "blue"]
    assert str(out["prompt_tokens"].dtype) == "Int64"
    pd.testing.assert_frame_equal(frame, before)
    pd.testing.assert_frame_equal(out[list(frame.columns)], before)


def test_row_that_cannot_be_asked_has_its_error_and_the_others_go_on(engine: cbatch.Engine) -> None:
    frame = pd.DataFrame({"prompt": ["Say red.", None, "x" * 100_000]})
    out = run_table(frame, engine=engine)
    assert list(out["finish_reason"]) == ["stop", "error", "error"]
    assert out["error"].isna()[0]
    assert out["error"][1] == "the prompt is empty"
    assert "one slot's window holds" in out["error"][2]
    assert list(out["completion_tokens"].isna()) == [False, True, False]


class Untold:
    """A value without a text."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


def test_cell_without_a_text_fails_its_row_alone(engine: cbatch.Engine) -> None:
    own: list[object] = []
    own.append(own)
    cells = pd.Series(["red", own, Untold(), {(1, 2): 3}, "blue"], dtype=object)
    out = run_table(pd.DataFrame({"word": cells}), engine=engine, template="Say {word}.")
    assert list(out["finish_reason"]) == ["stop", *["error"] * 3, "stop"]
    assert list(out["error"][1:3]) == [
        "no prompt can be made of the row's word: Circular reference detected",
        "no prompt can be made of the row's word: no words",
    ]


class Series:
    """Of polars, as far as the package uses it: the columns that are added."""

    def __init__(self, name: str, values: list[Any], dtype: str) -> None:
        self.name, self.values, self.dtype = name, values, dtype


class DataFrame:
    """Of polars, as far as the package uses it."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.data = columns

    @property
    def columns(self) -> list[str]:
        return list(self.data)

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    def iter_rows(self, *, named: bool) -> Iterator[dict[str, Any]]:
        assert named
        for values in zip(*self.data.values(), strict=True):
            yield dict(zip(self.data, values, strict=True))

    def with_columns(self, added: list[Series]) -> DataFrame:
        return DataFrame({**self.data, **{series.name: series.values for series in added}})


def test_frame_of_polars_gets_columns(
    engine: cbatch.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    polars = SimpleNamespace(
        DataFrame=DataFrame, Series=Series, String="String", Int64="Int64", Float64="Float64"
    )
    monkeypatch.setitem(sys.modules, "polars", polars)
    frame = DataFrame({"word": ["red", "blue", None]})
    out = run_table(frame, engine=engine, template="{word}", options={"max_tokens": 4})
    assert frame.columns == ["word"]
    assert out.columns == ["word", *ADDED]
    assert out.data["finish_reason"][2] == "error"
    assert out.data["error"] == [None, None, "the prompt is empty"]


def test_real_frame_of_polars_gets_columns(engine: cbatch.Engine) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"word": ["red", "blue"], "chat": [[{"role": "user"}], None]})
    out = run_table(frame, engine=engine, template="Say {word}.")
    assert out["response"].to_list() == ["red", "blue"]
    assert out["prompt_tokens"].dtype == polars.Int64
    assert out.select("word", "chat").equals(frame)
    with pytest.raises(ConfigError, match=r"not polars\.LazyFrame \(collect it\)"):
        run_table(frame.lazy(), engine=engine)
    response = engine.run(frame["word"], options={"max_tokens": 2})
    assert len(response.results()) == 2


@pytest.mark.parametrize(
    "values", [["red", None], ["red", pd.NA], ["red", float("nan")]], ids=["none", "na", "nan"]
)
def test_cell_without_a_value_is_no_text(engine: cbatch.Engine, values: list[Any]) -> None:
    frame = pd.DataFrame({"a": values, "day": [datetime.date(2024, 5, 1)] * 2})
    frames = frame, pa.table({"a": ["red", None], "day": frame["day"]})
    outs = [run_table(f, engine=engine, template="{a}", options={"max_tokens": 2}) for f in frames]
    assert [list(map(str, out["error"])) for out in outs] == [
        ["<NA>", "the prompt is empty"],
        ["None", "the prompt is empty"],
    ]


def test_row_of_bytes_that_are_no_text_costs_itself(engine: cbatch.Engine) -> None:
    text = pa.array([b"Say red.", b"\xff\xfe", b"Say blue."], pa.binary()).view(pa.string())
    table = pa.table({"prompt": text, "image": pa.array([b"\xff"] * 3)})
    out = run_table(table, engine=engine)
    assert out["response"].to_pylist() == ["red", "", "blue"]
    assert "not UTF-8" in out["error"][1].as_py()


@pytest.mark.parametrize("as_text", [True, False])
def test_options_of_a_row_come_before_those_of_all(engine: cbatch.Engine, as_text: bool) -> None:
    own = [{"max_tokens": 1}, None, {"max_tokens": 0.5}, {"choice": ["green"]}]
    texts = [json.dumps(each) if each else None for each in own]
    column = texts if as_text else pa.array([own[0], None, None, None])
    table = pa.table({"word": ["red", "blue", "red", "blue"], "own": column})
    if not as_text:
        table = table.slice(0, 2)
    out = run_table(
        table,
        engine=engine,
        template="Say {word} and {word}.",
        options={"max_tokens": 3, "ignore_eos": True},
        options_column="own",
    )
    assert out["completion_tokens"].to_pylist()[:2] == [1, 3]
    if as_text:
        assert "max_tokens" in out["error"][2].as_py()
        assert out["response"][3].as_py() == "green"


def test_wrong_options_of_a_row_are_its_error(engine: cbatch.Engine) -> None:
    values = ["{", "[1]", "7", '{"nope": 1}', '{"pause_every": 2}', None]
    table = pa.table({"own": values})
    out = run_table(table, engine=engine, template="Say blue.", options_column="own")
    words = ("nope", "options", "pause_every")
    assert all(any(w in error for w in words) for error in out["error"].to_pylist()[:-1])
    assert out["response"][5].as_py() == "blue"
    with pytest.raises(ConfigError, match="no column 'mine' with options"):
        run_table(table, engine=engine, template="a", options_column="mine")


@pytest.mark.parametrize(
    "table", [pa.table({"text": pa.array([], pa.string())}), pd.DataFrame({"text": []})]
)
def test_table_without_rows_gets_empty_columns(engine: cbatch.Engine, table: Any) -> None:
    out = run_table(table, engine=engine)
    assert len(out) == 0
    assert list(out.to_pandas() if isinstance(out, pa.Table) else out) == ["text", *ADDED]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([{"text": "x"}], r"a polars.DataFrame or a pyarrow.Table, not builtins\.list"),
        (pa.table({"a": ["x"]}), "table: has no column prompt, text or messages"),
        (pd.DataFrame([["x", "y"]], columns=["a", "a"]), "two columns named 'a'"),
    ],
)
def test_table_that_cannot_be_asked_is_refused(
    engine: cbatch.Engine, table: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run_table(table, engine=engine)


@pytest.mark.parametrize("table", [pa.table, pd.DataFrame])
@pytest.mark.parametrize("end", [cbatch.Engine.close, cbatch.Engine.cancel_all])
def test_rows_never_reached_have_an_error_and_the_others_their_answers(
    table: Callable[[dict[str, list[str]]], Any], end: Callable[[cbatch.Engine], object]
) -> None:
    n_runs = 0

    def end_in_the_midst(record: StepRecord) -> None:
        nonlocal n_runs
        n_runs += 1
        if n_runs == 12:
            end(ours)

    rows = table({"prompt": [f"row {i}" for i in range(100)]})
    with make_engine(2) as ours:
        ours.record_steps(end_in_the_midst)
        out = run_table(rows, engine=ours, options={"max_tokens": 4})
    found = out.to_pandas() if isinstance(out, pa.Table) else out
    assert len(found) == 100
    reasons = list(found["finish_reason"])
    assert reasons[0] == "length"
    assert reasons[-1] == "error"
    assert "not run: " in found["error"].iloc[-1]
    assert list(found["prompt"]) == [f"row {i}" for i in range(100)]
    assert len(set(reasons[: reasons.index("error")]) - {"length", "cancelled"}) == 0


@pytest.mark.parametrize("make", [pd.DataFrame, pa.table])
def test_table_has_the_columns_that_are_asked_for(
    engine: cbatch.Engine, make: Callable[[Any], Any]
) -> None:
    table = make({"word": ["red", "blue"], "n": [1, 2]})
    said: dict[str, Any] = {"template": "Say {word}.", "options": {"logprobs": True}}
    out = run_table(table, engine=engine, output_column="said", keep_columns=["n"], **said)
    names = list(out.columns) if make is pd.DataFrame else out.column_names
    assert names == ["n", "said", *ADDED[1:-1], "logprob", "warnings"]
    assert all(-5 < float(value) <= 0 for value in list(out["logprob"]))
    only = run_table(table, engine=engine, keep_columns=[], **said)
    assert [str(text) for text in only["response"]] == ["red", "blue"]
    with pytest.raises(ConfigError, match="keep_columns has 'm'"):
        run_table(table, engine=engine, keep_columns=["m"], **said)


def test_frame_read_from_parquet_holds_chats_as_arrays(
    engine: cbatch.Engine, tmp_path: Path
) -> None:
    chats = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Bye"}]]
    pa.parquet.write_table(pa.table({"messages": chats}), tmp_path / "chats.parquet")
    found = run_table(pd.read_parquet(tmp_path / "chats.parquet"), engine=engine)
    assert found["error"].isna().all()
    row = pd.DataFrame({"a": [np.arange(2000)]})  # of which NumPy shows the ends alone
    assert "the prompt has" in run_table(row, engine=engine, template="{a}")["error"][0]


def test_wrong_flag_is_refused_before_anything_runs(engine: cbatch.Engine) -> None:
    n_before = engine.stats().n_output_tokens
    with pytest.raises(ConfigError, match="raise_errors"):
        run_table(pa.table({"prompt": ["Hi"]}), engine=engine, raise_errors="yes")  # type: ignore[arg-type]
    assert engine.stats().n_output_tokens == n_before
