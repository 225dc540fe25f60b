from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.errors import ConfigError, RequestFailedError
from cbatch.files.input.source import open_source
from cbatch.files.output.encoders import AnswerColumns, CsvEncoder, ObjectEncoder
from cbatch.response import TokenLogprob, ToolCall, Usage
from tests.files.samples import ANSWER, error_of, failed, read, records, write

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.files.input.item import Item
    from cbatch.files.output.encoders import RowEncoder
    from cbatch.response import BatchResult


CALL = ToolCall("c1", "look", "{}")
REVIEWS = 'id,review\r\n1,"good,\r\n""really"""\r\n\r\n2,bad\r\n'


def asked(item: Item) -> list[tuple[str, str]]:
    """The roles and texts of an item's chat."""
    assert item.prompt is not None
    return [(m["role"], m["content"]) for m in item.prompt.messages or ()]


def table(data: bytes, delimiter: str = ",") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode(), newline=""), delimiter=delimiter))


# ItemStream


def test_rows_are_asked_by_the_template(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", REVIEWS)
    first, second = read(path, template="{id}: {review}?", system="Be {id}.")
    assert asked(first) == [("system", "Be 1."), ("user", '1: good,\r\n"really"?')]
    assert asked(second)[1] == ("user", "2: bad?")
    assert [(i.number, i.id, i.is_labelled) for i in (first, second)] == [
        (1, "1", False),
        (2, "2", False),
    ]
    assert [i.place[-6:] for i in (first, second)] == ["line 2", "line 5"]
    assert second.extra == {"id": "2", "review": "bad"}


def test_rows_can_be_asked_as_raw_text(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", REVIEWS)
    first, _ = read(path, template="{id}:", is_raw=True)
    assert first.prompt is not None
    assert first.prompt.prompt == "1:"


@pytest.mark.parametrize("column", ["prompt", "text"])
def test_column_named_prompt_or_text_needs_no_template(tmp_path: Path, column: str) -> None:
    [item] = read(write(tmp_path / "in.csv", f"id,{column}\n1,{{hi}}\n"))
    assert asked(item) == [("user", "{hi}")]


def test_column_named_messages_holds_chats(tmp_path: Path) -> None:
    cell = json.dumps([{"role": "user", "content": "hi", "name": None}]).replace('"', '""')
    [item] = read(write(tmp_path / "in.csv", f'messages\n"{cell}"\n'))
    assert asked(item) == [("user", "hi")]


@pytest.mark.parametrize("cell", ["nope", "5", '"[5]"', "[]"])
def test_chat_that_is_none_is_an_error_of_its_row(tmp_path: Path, cell: str) -> None:
    [item] = read(write(tmp_path / "in.csv", f"messages\n{cell}\n"))
    assert error_of(item).code == "invalid_request"


@pytest.mark.parametrize(
    ("header", "said", "message"),
    [
        ("id,review", {}, "no column prompt, text or messages: give a template .* id, review"),
        ("text,prompt", {}, "has columns prompt and text: give a template"),
        (
            "id,review",
            {"template": "Say {x}"},
            "template: there is no column 'x'; the columns are: id, review",
        ),
        ("id,text", {"system": "{x}"}, "system: there is no column 'x'"),
        ("id,text", {"system": "x", "is_raw": True}, "raw prompts have no messages"),
        ("messages,a", {"system": "x"}, "column messages holds whole chats"),
        ("messages,a", {"is_raw": True}, "column messages holds whole chats"),
        ("id,id", {"template": "{id}"}, "two columns named 'id'"),
        ('id,"review', {"template": "{id}"}, "the header cannot be read: not CSV"),
    ],
)
def test_table_that_does_not_fit_is_refused_at_once(
    tmp_path: Path, header: str, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path / "in.csv", f"{header}\n1,2\n"), **said)


def test_header_of_very_many_columns_is_checked_in_one_pass(tmp_path: Path) -> None:
    names = ",".join(f"c{i}" for i in range(500_000))
    with pytest.raises(ConfigError, match="two columns named 'c7'"):
        read(write(tmp_path / "a.csv", f"{names},c7\n1\n"), template="{c7}")
    with pytest.raises(ConfigError, match=r"no column prompt.* c0, c1, .*…$") as told:
        read(write(tmp_path / "b.csv", f"{names}\n1\n"))
    assert len(str(told.value)) < 5000


@pytest.mark.parametrize(
    ("row", "code", "said"),
    [
        (b"1", "invalid_row", "1 fields, the header 2"),
        (b'1,"a"b', "invalid_row", "not CSV: ',' expected"),
        (b"1,\xff", "invalid_utf8", "invalid start byte at byte 2"),
        (b'1,"a\n\xff"', "invalid_utf8", "invalid start byte at byte 5"),
        (b'"' + b"x" * 100 + b'",2', "line_too_long", "at most 60 are allowed"),
        (b'1,"' + b"x\n" * 100 + b'"', "line_too_long", "is a quotation mark not closed"),
        (b'1,"' + b"x" * 50 + b'\nx""\n""",""', "line_too_long", "is a quotation mark not closed"),
        (b'1,"' + b"x" * 100 + b'\nb"', "line_too_long", "at most 60 are allowed"),
        (b"1, ", "invalid_request", "the prompt is empty"),
    ],
)
def test_row_that_is_wrong_costs_that_row(tmp_path: Path, row: bytes, code: str, said: str) -> None:
    path = write(tmp_path / "in.csv", b"id,text\n" + row + b"\n9,good\n")
    bad, good = read(path, max_line_bytes=60)
    assert error_of(bad).code == code
    assert said in error_of(bad).message
    assert asked(good) == [("user", "good")]


def test_quotation_mark_that_is_never_closed_is_an_error(tmp_path: Path) -> None:
    good, bad = read(write(tmp_path / "in.csv", 'id,text\n1,a\n2,"b\n3,c\n'))
    assert asked(good) == [("user", "a")]
    assert "unexpected end of data" in error_of(bad).message


def test_tsv_is_split_at_tabs(tmp_path: Path) -> None:
    [item] = read(write(tmp_path / "in.tsv", "id\ttext\n1\ta, b\n"))
    assert item.extra == {"id": "1", "text": "a, b"}


def test_files_of_one_table_have_the_same_columns_in_any_order(tmp_path: Path) -> None:
    a = write(tmp_path / "a.csv", "id,text\n1,a\n")
    b = write(tmp_path / "b.csv", "text,id\nb,2\n")
    c = write(tmp_path / "c.csv", "text\nb\n")
    assert [(i.number, asked(i)) for i in read(a, b)] == [
        (1, [("user", "a")]),
        (2, [("user", "b")]),
    ]
    with pytest.raises(ConfigError, match=r"c.csv: its columns are text; those .* are id, text"):
        read(a, c)


def test_table_without_rows_is_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="empty_file"):
        read(write(tmp_path / "in.csv", "text\n"))


def test_objects_are_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", '{"a": {"b": 1}, "id": 5}\n{"id": 6}\n[1]\n')
    good, short, wrong = read(path, template="{id} {a}")
    assert (asked(good), good.id) == ([("user", '5 {"b": 1}')], "1")
    assert (error_of(short).code, error_of(short).param) == ("missing_field", "a")
    assert error_of(wrong).code == "invalid_json_line"


def test_plain_lines_are_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "in.txt", b"one\r\n\n  two {x}\n\xff\n")
    first, second, third = read(path)
    assert asked(first) == [("user", "one")]
    assert asked(second) == [("user", "  two {x}")]
    assert (error_of(third).code, third.id) == ("invalid_utf8", "3")


@pytest.mark.parametrize("flaw", [rb"\ud800", b"\xff"])
@pytest.mark.parametrize("to", ["jsonl", "csv"])
def test_flaw_in_a_text_leaves_the_row_its_columns(tmp_path: Path, flaw: bytes, to: str) -> None:
    path = write(
        tmp_path / "in.jsonl", b'{"n": "1", "text": "a"}\n{"n": "7", "text": "b%b"}' % flaw
    )
    _, wrong = read(path)
    assert error_of(wrong).code.startswith("invalid_")
    row = records(path, to=to).decode().splitlines()[-1]
    assert row.startswith({"jsonl": '{"n": "7", "text": "b\ufffd", ', "csv": "7,b\ufffd,"}[to])


def test_plain_lines_can_be_framed(tmp_path: Path) -> None:
    [item] = read(write(tmp_path / "in.txt", "one\n"), template="Say {line}.", system="Be brief.")
    assert asked(item) == [("system", "Be brief."), ("user", "Say one.")]


# Writing


def test_csv_keeps_the_columns_and_adds_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", REVIEWS)
    first, second = table(records(path, template="{review}"))
    assert first == {
        "id": "1",
        "review": 'good,\r\n"really"',
        "response": "Hi!",
        "finish_reason": "stop",
        "error": "",
        "prompt_tokens": "3",
        "completion_tokens": "2",
        "warnings": "",
    }
    assert second["review"] == "bad"


def test_added_columns_get_a_number_where_the_table_has_such(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", "text,response,response_2\nx,old,older\n")
    [row] = table(records(path))
    assert (row["response"], row["response_2"], row["response_3"]) == ("old", "older", "Hi!")
    layout = AnswerColumns(("text", "error"), output_column="error_2")
    assert len({*layout.added}) == len(layout.types)


class CountedName(str):
    """A name that counts its comparisons, in the list that all of them share."""

    __slots__ = ()
    found: ClassVar[list[object]] = []
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        self.found.append(other)
        return super().__eq__(other)


def test_names_of_added_columns_are_not_compared_with_every_column() -> None:
    names = ["response", *(f"response_{n}" for n in range(2, 300))]
    layout = AnswerColumns(["text"])
    CountedName.found.clear()
    assert layout.names_beside([CountedName(name) for name in names])[0] == "response_300"
    assert 0 < len(CountedName.found) <= 2 * len(names)


def test_row_that_is_wrong_or_failed_is_written_with_its_error(tmp_path: Path) -> None:
    path = write(tmp_path / "in.tsv", "id\ttext\n1\n2\tx\n")
    wrong, failure = table(records(path, result=failed(RequestFailedError("oh"))), "\t")
    assert (wrong["id"], wrong["text"], wrong["finish_reason"]) == ("1", "", "error")
    assert wrong["error"].startswith(f"{path}, line 2: the row has 1 fields")
    assert (failure["response"], failure["error"]) == ("", "oh")


@pytest.mark.parametrize(
    ("changed", "response"),
    [
        ({"text": "", "tool_calls": (CALL,)}, [CALL.as_dict()]),
        ({"choices": (ANSWER, replace(ANSWER, text="Ho!"))}, ["Hi!", "Ho!"]),
    ],
)
def test_calls_and_several_answers_are_a_list_in_a_rows_response(
    tmp_path: Path, changed: dict[str, Any], response: object
) -> None:
    path = write(tmp_path / "in.csv", "text\nx\n")
    [row] = table(records(path, result=replace(ANSWER, **changed)))
    assert json.loads(row["response"]) == response


def test_objects_are_written_with_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", '{"text": "x", "n": 1}\n{"text": "x", "error": 2}\n')
    first, second = map(json.loads, records(path).splitlines())
    assert (first["n"], first["response"], first["error"]) == (1, "Hi!", None)
    assert (second["error"], second["error_2"]) == (2, None)


@pytest.mark.parametrize(
    ("name", "text", "column", "value"),
    [("in.txt", "x, y\n", "line", "x, y"), ("in.jsonl", '{"id": "a", "prompt": "x"}', "id", "a")],
)
def test_lines_and_requests_can_become_a_table(
    tmp_path: Path, name: str, text: str, column: str, value: str
) -> None:
    [row] = table(records(write(tmp_path / name, text), to="csv"))
    assert (row[column], row["response"]) == (value, "Hi!")


cells = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(cells, cells), min_size=1))
def test_any_table_comes_back_with_its_columns(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([("a", "b"), *rows])
    path = write(tmp_path / "in.csv", text.getvalue())
    again = table(records(path, template="x{a}{b}"))
    assert [(row["a"], row["b"]) for row in again] == rows


# ---- columns of the answer ----


def encoded(encode: RowEncoder, item: Item, result: BatchResult) -> dict[str, str]:
    line = encode.result(item, result, digest=bytes(16), created=1, model="m")
    [row] = table(encode.header() + line)
    return row


def test_log_probability_of_an_answer_is_the_sum_of_its_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", "text\nx\n")
    tokens = tuple(TokenLogprob(i, b"a", -0.5) for i in range(3))
    scored = replace(ANSWER, logprobs=tokens, warnings=("one", "two"))
    first = TokenLogprob(0, b"a", math.nan)
    echoed = replace(ANSWER, logprobs=(first, *tokens, *tokens), usage=Usage(4, 3))
    with open_source(path) as source:
        [item] = source
        layout = AnswerColumns(source.columns, extra={"logprob"})
        encode = CsvEncoder(layout, ",")
    row = encoded(encode, item, scored)
    assert (row["logprob"], row["warnings"]) == ("-1.5", "one; two")
    assert encoded(encode, item, echoed)["logprob"] == "-1.5"
    assert encoded(encode, item, ANSWER)["logprob"] == ""
    unasked = CsvEncoder(AnswerColumns(source.columns), ",")
    assert "logprob" not in encoded(unasked, item, scored)
    objects = ObjectEncoder(layout)
    line = objects.result(item, scored, digest=bytes(16), created=1, model="m")
    assert list(json.loads(line))[-2:] == ["logprob", "warnings"]
    line = objects.result(item, ANSWER, digest=bytes(16), created=1, model="m")
    assert list(json.loads(line))[-1] == "completion_tokens"


def test_output_has_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", "id,text,label,response\n7,x,y,z\n")
    with open_source(path) as source:
        [item] = source
    encode = CsvEncoder(
        AnswerColumns(source.columns, keep=["label", "id"], output_column="class"), ","
    )
    row = encoded(encode, item, ANSWER)
    assert list(row)[:4] == ["label", "id", "class", "finish_reason"]
    assert (row["label"], row["id"], row["class"]) == ("y", "7", "Hi!")
    bare = CsvEncoder(AnswerColumns(source.columns, keep=[]), ",")
    assert next(iter(encoded(bare, item, ANSWER))) == "response"
    line = ObjectEncoder(AnswerColumns(source.columns, keep=["id"])).result(
        item, ANSWER, digest=bytes(16), created=1, model="m"
    )
    assert list(json.loads(line))[:2] == ["id", "response"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"keep": ["idd"]}, "keep_columns has 'idd', which is not a column; columns are id, text"),
        ({"output_column": "text"}, "output_column='text' is the name of another column"),
        ({"output_column": "error"}, "output_column='error' is the name of another column"),
    ],
)
def test_columns_that_do_not_fit_are_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AnswerColumns(["id", "text"], **said)
