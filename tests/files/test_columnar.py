from __future__ import annotations

import datetime
import json
import pickle
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file
from cbatch.files.input.columnar import rows_of
from cbatch.files.input.source import open_source
from cbatch.files.output import durable
from cbatch.files.output.columnar_answers import ColumnarEncoder
from cbatch.files.output.encoders import AnswerColumns
from cbatch.files.output.target import encoder
from tests.files.runs import make_engine, write_requests
from tests.files.samples import ANSWER, error_of, read, records, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.files.input.item import Item
    from cbatch.response import BatchResult

DAY = datetime.date(2024, 5, 1)
TABLE = pa.table(
    {
        "review": ["good", None, "bad"],
        "n": pa.array([1, 2, None], pa.int8()),
        "day": [DAY, DAY, DAY],
        "tags": [["a"], [], None],
    },
    metadata={"owner": "me"},
)


def save(path: Path, table: Any = TABLE, *, is_stream: bool = False) -> str:
    """Write a table as the file's name says."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
        return str(path)
    maker = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, maker(file, table.schema) as writer:
        writer.write_table(table, 2)
    return str(path)


def load(path: Path) -> Any:
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


def finished(target: Path, *paths: str, to: str = "auto", only: set[int] | None = None) -> Any:
    """Return the table that comes of files whose rows were answered."""
    with open_source(list(paths), **_template(paths)) as source:
        encode = encoder(source.format if to == "auto" else to, source)
        assert isinstance(encode, ColumnarEncoder)
        items = list(source)
    kept = [item for item in items if only is None or item.number in only]
    lines = [encode.result(i, ANSWER, digest=bytes(16), created=1, model="m") for i in kept]
    written = target.with_name("records")
    written.write_bytes(encode.header() + b"".join(lines))
    encode.finish(written, target, len(items), [item.number for item in kept])
    return load(target)


def _template(paths: tuple[str, ...]) -> dict[str, Any]:
    is_columnar = paths[0].endswith((".parquet", ".arrow"))
    return {"template": "Classify: {review}"} if is_columnar else {}


def test_rows_are_asked_with_their_values(tmp_path: Path) -> None:
    path = save(tmp_path / "in.parquet")
    items = read(path, template="{review} {n} {day} {tags}")
    assert [i.prompt.messages[0]["content"] for i in items if i.prompt and i.prompt.messages] == [
        'good 1 2024-05-01 ["a"]',
        " 2 2024-05-01 []",
        "bad  2024-05-01 ",
    ]
    assert [i.place for i in items] == [f"{path}, row {n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("is_stream", [True, False])
def test_arrow_files_and_streams_are_read(tmp_path: Path, is_stream: bool) -> None:
    path = save(tmp_path / "in.arrow", is_stream=is_stream)
    assert [item.id for item in read(path, template="{day}")] == ["1", "2", "3"]


def test_column_of_chats_is_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi", "name": None}]
    [item] = read(save(tmp_path / "in.parquet", pa.table({"messages": [chat]})))
    assert item.prompt is not None
    assert item.prompt.messages == ({"role": "user", "content": "hi"},)


def test_row_that_is_wrong_costs_that_row(tmp_path: Path) -> None:
    path = save(tmp_path / "in.parquet", pa.table({"text": ["x", None]}))
    good, bad = read(path)
    assert good.error is None
    assert error_of(bad).message == "the prompt is empty"


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_output_has_the_input_and_the_answers_in_order(tmp_path: Path, name: str) -> None:
    out = finished(tmp_path / f"out-{name}", save(tmp_path / name))
    assert out.select(TABLE.column_names).equals(TABLE)
    assert out.column_names[4:] == [
        "response",
        "finish_reason",
        "error",
        "prompt_tokens",
        "completion_tokens",
        "warnings",
    ]
    assert out["response"].to_pylist() == ["Hi!"] * 3
    assert out["prompt_tokens"].type == pa.int64()


def test_rows_without_a_record_are_left_out(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a.parquet"), save(tmp_path / "b.parquet")
    out = finished(tmp_path / "out.parquet", a, b, only={2, 3, 4})
    assert out["review"].to_pylist() == [None, "bad", "good"]
    assert finished(tmp_path / "out.parquet", a, only=set()).num_rows == 0
    many = pa.table({"review": [str(i) for i in range(1, 3001)]})
    kept = [*range(1, 3), *range(4, 2000), *range(2002, 3001)]
    out = finished(tmp_path / "out.arrow", save(tmp_path / "in.arrow", many), only={*kept})
    assert out["review"].to_pylist() == [str(i) for i in kept]


def test_text_becomes_columns_of_text(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '{"text": ""}', '{"text": "b\\ud800"}']
    path = write(tmp_path / "in.jsonl", "\n".join(lines))
    with open_source(path) as source:
        encode = encoder("parquet", source)
        written = [
            encode.error(i, i.error)
            if i.error
            else encode.result(i, ANSWER, digest=bytes(16), created=1, model="m")
            for i in source
        ]
    assert isinstance(encode, ColumnarEncoder)
    (tmp_path / "records").write_bytes(b"".join(written))
    encode.finish(tmp_path / "records", tmp_path / "out.parquet", 3, [1, 2, 3])
    out = load(tmp_path / "out.parquet").to_pylist()
    assert [(row["text"], row["finish_reason"]) for row in out] == [
        ("a", "stop"),
        ("", "error"),
        ("b\ufffd", "error"),
    ]


def test_requests_with_one_number_are_all_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", '{"id": "a", "prompt": "x"}')
    with open_source(path) as source:
        encode = ColumnarEncoder("parquet", source, AnswerColumns(source.columns))
    values = '"Hi!", "stop", null, 1, 2, null]\n'
    write(tmp_path / "records", f'["a", {values}["b", {values}["c", {values}')
    encode.finish(tmp_path / "records", tmp_path / "out.parquet", 3, [1, 1, 2])
    assert load(tmp_path / "out.parquet")["id"].to_pylist() == ["a", "b", "c"]


def test_parquet_can_be_answered_in_lines(tmp_path: Path) -> None:
    path = save(tmp_path / "in.parquet")
    rows = [json.loads(r) for r in records(path, template="{n}", to="jsonl").splitlines()[:1]]
    assert rows[0]["tags"] == ["a"]
    assert rows[0]["response"] == "Hi!"


def test_files_with_other_types_are_refused(tmp_path: Path) -> None:
    a = save(tmp_path / "a.parquet", pa.table({"text": ["x"], "n": [1]}))
    b = save(tmp_path / "b.parquet", pa.table({"text": ["x"], "n": ["1"]}))
    with pytest.raises(
        ConfigError, match=r"b.parquet: column 'n' is string, but int64 in the files before"
    ):
        read(a, b)


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_file_that_is_something_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read as"):
        read(write(tmp_path / name, "not this at all"))


# ---- columns that Python, or pyarrow's own functions, cannot hold ----

TEXTS = pa.array(["a", "b", None])
NO_TEXT = pa.array([b"a", b"b\xff", None], pa.binary()).view(pa.string())
ENDS = pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"])
LISTS = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array([[1, 2], [3]]))
UNREADABLE = {
    "text": NO_TEXT,
    "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), NO_TEXT),
    "seconds": pa.array([1, 2**62, None], pa.timestamp("s")),
    "microseconds": pa.array([1, 10**18, None], pa.timestamp("us")),
    "zone": pa.array([1, 2, None], pa.timestamp("s", tz="Mars/Olympus")),
    "date": pa.array([0, 2**60, None], pa.date64()),
    "duration": pa.array([1, 2**62, None], pa.duration("s")),
    "one name twice": pa.StructArray.from_arrays([TEXTS, TEXTS], ["a", "a"]),
    "text inside": pa.StructArray.from_arrays([NO_TEXT], ["a"]),
}
UNTAKEN = {
    "text view": TEXTS.cast(pa.string_view()),
    "bytes view": TEXTS.cast(pa.binary()).cast(pa.binary_view()),
    "list of views": pa.array([["a"], None, ["b"]], pa.list_(pa.string_view())),
    "runs": ENDS,
    "runs inside": pa.StructArray.from_arrays([ENDS], ["a"]),
}


@pytest.mark.parametrize("only", [{1, 2, 3}, {1, 3}])
@pytest.mark.parametrize("name", [*UNREADABLE, *UNTAKEN])
def test_column_that_no_prompt_reads_is_kept_as_it_is(
    tmp_path: Path, name: str, only: set[int]
) -> None:
    column = {**UNREADABLE, **UNTAKEN}[name]
    table = pa.table({"review": ["x", "y", "z"], "odd": column})
    out = finished(tmp_path / "out.arrow", save(tmp_path / "in.arrow", table), only=only)
    assert out["response"].to_pylist() == ["Hi!"] * len(only)
    rows = rows_of(table.select(["odd"]))
    assert rows_of(out.select(["odd"])) == [rows[number - 1] for number in sorted(only)]
    assert out["odd"].type == (pa.string() if name == "dictionary" else column.type)


@pytest.mark.parametrize("name", UNREADABLE)
def test_value_that_cannot_be_read_costs_its_row(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "in.arrow", pa.table({"odd": UNREADABLE[name], "text": TEXTS}))
    wrong = read(path, template="{text} {odd}")[1]
    assert error_of(wrong).message.startswith("column 'odd': ")
    assert error_of(wrong).param == "odd"
    assert pickle.loads(pickle.dumps(wrong)) == wrong
    [item] = [i for i in read(path, template="{text}") if i.number == 2]
    assert item.error is None


def test_column_whose_name_is_no_text_is_told(tmp_path: Path) -> None:
    table = pa.table([TEXTS], schema=pa.schema([pa.field(b"a\xff", pa.string())]))
    with pytest.raises(ConfigError, match=r"in.arrow: cannot be read as arrow: 'utf-8' codec"):
        read(save(tmp_path / "in.arrow", table), template="x")


def test_value_that_cannot_be_read_is_text_in_lines(tmp_path: Path) -> None:
    odd = pa.array([1, 2**62, None], pa.timestamp("s"))
    path = save(tmp_path / "in.arrow", pa.table({"text": TEXTS, "a": NO_TEXT, "b": odd}))
    rows = [json.loads(r) for r in records(path, template="{text}.", to="jsonl").splitlines()]
    assert [(row["a"], row["b"]) for row in rows] == [
        ("a", "1970-01-01 00:00:01"),
        ("b\ufffd", f"<value out of range: {2**62}>"),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("format", "column"),
    [
        ("parquet", ENDS),
        ("parquet", pa.array([pa.MonthDayNano([1, 2, 3])] * 3)),
        ("parquet", LISTS),
        ("arrow", LISTS),
    ],
)
def test_column_that_the_output_cannot_hold_is_refused_before_the_run(
    tmp_path: Path, format: str, column: Any
) -> None:
    path = save(tmp_path / "in.arrow", pa.table({"text": TEXTS, "odd": column}))
    out, words = tmp_path / f"out.{format}", rf"column 'odd' is .*{format} files cannot hold.*keep"
    with make_engine() as engine:
        with pytest.raises(ConfigError, match=words):
            run_file(path, out, engine=engine)
        assert not out.exists()
        said: dict[str, Any] = {"engine": engine, "keep_columns": ["text"]}
        assert run_file(path, out, **said).n_items == 3


def test_dictionaries_that_differ_are_written_as_values(tmp_path: Path) -> None:
    paths = []
    for texts in (["a", "b"], ["c", "a"]):
        table = pa.table({"review": pa.array(texts).dictionary_encode()})
        paths.append(save(tmp_path / f"{texts[0]}.arrow", table))
    out = finished(tmp_path / "out.arrow", *paths)
    assert out["review"].to_pylist() == ["a", "b", "c", "a"]
    assert out["review"].type == pa.string()


def test_finish_compares_each_row_with_the_one_that_was_answered(tmp_path: Path) -> None:
    path = save(tmp_path / "in.parquet")
    (tmp_path / "records").write_bytes(b'["too", "few"]\n')
    with open_source(path, template="{review}") as source:
        encode = ColumnarEncoder("parquet", source, AnswerColumns(source.columns))
    with pytest.raises(ConfigError, match="row 1 differs from the row"):
        encode.finish(tmp_path / "records", tmp_path / "part", 3, [1])


# ---- an input that changes while a run reads it ----


def rows(start: int, n: int, name: str = "q") -> Any:
    texts = [f"{name} {i}" for i in range(start, start + n)]
    return pa.table({"text": texts, "n": pa.array(range(start, start + n), pa.int8())})


def pairs(out: Path, column: str = "text") -> dict[str, str]:
    found = load(out)
    return dict(zip(found[column].to_pylist(), found["response"].to_pylist(), strict=True))


BEFORE = rows(0, 30)
REPLACED = {
    "others": (rows(30, 30), "row 1 differs from the row that was answered"),
    "some others": (pa.concat_tables([rows(0, 20), rows(50, 10)]), "row 21 differs from the row"),
    "fewer": (rows(0, 15), "the file has 15 rows, but 30 were read"),
    "fewer in front": (rows(15, 15), "row 1 differs from the row that was answered"),
    "more": (rows(0, 40), "the file has 40 rows, but 30 were read"),
    "another column beside": (
        BEFORE.set_column(1, "n", pa.array([1] * 30, pa.int8())),
        "row 1 differs from the row",
    ),
    "other columns": (BEFORE.rename_columns(["prompt", "n"]), "the columns of .* have changed"),
    "other types": (
        BEFORE.set_column(1, "n", pa.array(range(30))),
        "the columns of .* have changed",
    ),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("in.parquet", how) for how in REPLACED),
        ("in.arrow", "others"),
        ("in.arrow", "other types"),
    ],
)
def test_input_that_was_replaced_pairs_no_answer_with_another_row(
    tmp_path: Path, name: str, how: str
) -> None:
    source, out = tmp_path / name, tmp_path / f"out-{name}"
    save(source, BEFORE)
    said: dict[str, Any] = {"template": "{text}"}
    after, words = REPLACED[how]

    def replace(item: Item, result: BatchResult | None) -> None:
        if item.number == 7:
            save(source.with_name(f"new-{name}"), after)
            source.with_name(f"new-{name}").replace(source)

    with make_engine() as engine:
        run_file(save(source, BEFORE), tmp_path / f"right-{name}", engine=engine, **said)
        out.write_bytes(b"of a run before")
        with pytest.raises(
            ConfigError, match=f"was changed while the run read it: {words}.*No ans"
        ):
            run_file(source, out, engine=engine, on_result=replace, force=True, **said)
        assert out.read_bytes() == b"of a run before"
        save(source, BEFORE)  # as it was: every answer is there
        assert run_file(source, out, engine=engine, **said).n_done == 0
        assert pairs(out) == pairs(tmp_path / f"right-{name}")


def test_input_that_was_replaced_runs_again_where_it_differs(tmp_path: Path) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    said: dict[str, Any] = {"template": "{text}"}
    after = [REPLACED["some others"][0], BEFORE]  # first anew as it was

    def change(item: Item, result: BatchResult | None) -> None:
        if item.number in (20, 30):
            save(source, after.pop())

    with make_engine() as engine:
        with pytest.raises(ConfigError, match="row 21 differs from the row"):
            run_file(save(source, BEFORE), out, engine=engine, on_result=change, **said)
        assert run_file(source, out, engine=engine, **said).n_done == 10
        run_file(source, tmp_path / "right.parquet", engine=engine, **said)
    assert pairs(out) == pairs(tmp_path / "right.parquet")


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("no table")])
def test_input_that_is_gone_at_the_end_costs_no_answer(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    said: dict[str, Any] = {"template": "{text}"}
    left = [30]

    def spoil(item: Item, result: BatchResult | None) -> None:
        left[0] -= 1
        if not left[0]:
            change(source)

    with make_engine() as engine:
        with pytest.raises(
            ConfigError, match=r"in\.parquet: was changed .*cannot be read as parquet"
        ):
            run_file(save(source, BEFORE), out, engine=engine, on_result=spoil, **said)
        assert run_file(save(source, BEFORE), out, engine=engine, **said).n_done == 0
    assert load(out).num_rows == 30


@pytest.mark.parametrize("name", ["{}.parquet", "{}.csv"])
def test_further_file_with_other_columns_than_when_the_run_began_ends_it(
    tmp_path: Path, name: str
) -> None:
    def put(letter: str, column: str) -> str:
        path = tmp_path / name.format(letter)
        if path.suffix == ".csv":
            return write(path, f"{column}\n" + "x\n" * 1500)
        return save(path, pa.table({column: ["x"] * 1500}))

    with open_source([put("a", "text"), put("b", "text")]) as source:
        items = iter(source)
        next(items)
        put("b", "other")
        with pytest.raises(
            ConfigError, match=r"its columns are other; those .* before it are text"
        ):
            list(items)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "in.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        read(path, template="{review}")


def test_file_of_errors_beside_parquet_is_refused_with_its_reason(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 1)
    with make_engine() as engine, pytest.raises(ConfigError, match="leave --errors out"):
        run_file(source, tmp_path / "o.parquet", engine=engine, errors=tmp_path / "e.jsonl")


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow"])
def test_columnar_output_that_somebody_changed_is_replaced_if_forced_only(
    tmp_path: Path, name: str
) -> None:
    source, out = save(tmp_path / "in.parquet"), tmp_path / name
    with make_engine() as engine:

        def run(**more: Any) -> Any:
            run_file(source, out, engine=engine, template="{review}", **more)
            return load(out)

        whole = run()
        assert run() == whole
        changed = whole.append_column("mine", pa.array([1] * len(whole)))
        save(out, changed)
        for _ in range(2):
            with pytest.raises(
                ConfigError, match=f"{name}: another program has put it there, or changed it"
            ):
                run()
        assert load(out) == changed
        assert run(force=True) == whole
        out.unlink()
        assert run() == whole


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow"])
@pytest.mark.parametrize("when", ["after a part", "while it runs"])
def test_file_that_comes_to_the_place_of_a_columnar_output_is_kept(
    tmp_path: Path, name: str, when: str
) -> None:
    source, out = save(tmp_path / "in.parquet"), tmp_path / name

    def put(*_: object) -> None:
        out.write_text("mine")

    with make_engine() as engine:

        def run(**more: Any) -> None:
            run_file(source, out, engine=engine, template="{review}", **more)

        if when == "after a part":
            run(limit=1)
            out.unlink(missing_ok=True)
            put()
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"{name}: another program has put it there"):
                run(on_result=put)
        assert out.read_text() == "mine"
        out.unlink()
        run()
        assert len(load(out)) == len(TABLE)


def test_run_killed_while_its_columnar_output_is_replaced_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save(tmp_path / "in.parquet"), tmp_path / "out.parquet"
    replace = durable.replace
    with make_engine() as engine:
        for options in ({"seed": 1}, {"seed": 2}):

            def run(options: Any = options) -> None:
                run_file(
                    source, out, engine=engine, template="{review}", options=options, force=True
                )

            run()
            for is_late in (False, True):

                def killed(new: Path, old: Path, *, is_late: bool = is_late) -> None:
                    if is_late or old != out:
                        replace(new, old)
                    if old == out:
                        raise KeyboardInterrupt

                monkeypatch.setattr(durable, "replace", killed)
                with suppress(KeyboardInterrupt):
                    run()
                monkeypatch.setattr(durable, "replace", replace)
                run_file(source, out, engine=engine, template="{review}", options=options)
