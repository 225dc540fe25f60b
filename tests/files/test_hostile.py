"""Whatever stands in a file, its items or one clear error come of it, and records that can be read."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.errors import ConfigError
from cbatch.options import RunOptions
from tests.files.samples import records, write
from tests.profiles import examples

if TYPE_CHECKING:
    from pathlib import Path

OPENAI = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x"},
}

few = settings(deadline=None, max_examples=examples(40))

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
names = st.sampled_from(
    ["messages", "prompt", "model", "stream", "user", *sorted(RunOptions.__dataclass_fields__)]
)
objects = st.dictionaries(names | st.text(), values, max_size=5)
messages = st.fixed_dictionaries({"role": values, "content": values}, optional={"name": values})
bodies = objects | st.builds(
    lambda body, chat: body | {"messages": chat}, objects, st.lists(messages)
)
requests = st.fixed_dictionaries(
    {"body": bodies | values},
    optional={
        "custom_id": st.text() | values,
        "method": st.just("POST") | values,
        "url": st.sampled_from(["/v1/chat/completions", "/v1/completions"]) | values,
    },
)
own = st.fixed_dictionaries(
    {}, optional={"id": values, "messages": values, "prompt": values, "options": objects | values}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def written(folder: Path, data: bytes | str, format: str, **said: Any) -> bytes:
    try:
        return records(write(folder / "in", data), format=format, max_line_bytes=200, **said)
    except ConfigError:
        return b""


@few
@given(st.lists(st.binary() | st.just(b'"') | st.just(b"\n")))
@pytest.mark.parametrize("format", ["openai", "cbatch", "jsonl", "text", "auto"])
def test_any_bytes_give_whole_lines(folder: Path, format: str, pieces: list[bytes]) -> None:
    said = {"template": "x{a}"} if format == "jsonl" else {}
    start = b'{"a": 1}\n' if format == "jsonl" else b""
    for line in written(folder, start + b"".join(pieces), format, **said).splitlines():
        assert isinstance(json.loads(line), dict)


@few
@given(st.lists(st.binary() | st.just(b'"') | st.just(b"\n") | st.just(b"a,")))
def test_any_bytes_under_a_header_give_whole_rows(folder: Path, pieces: list[bytes]) -> None:
    data = written(folder, b"a,b\n" + b"".join(pieces), "csv", template="x{a}")
    rows = list(csv.reader(io.StringIO(data.decode(), newline=""), strict=True))
    assert {len(row) for row in rows} <= {8}


@few
@given(st.lists(requests, min_size=1))
def test_any_request_gives_a_line_of_openais(folder: Path, asked: list[Any]) -> None:
    data = "\n".join(map(json.dumps, asked))
    lines = [json.loads(line) for line in _all(folder, data, "openai")]
    assert len(lines) == len(asked)
    for line in lines:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert isinstance(line["custom_id"], str)
        assert (line["response"] is None) != (line["error"] is None)


@few
@given(st.lists(own, min_size=1))
def test_any_line_of_cbatchs_is_answered(folder: Path, asked: list[Any]) -> None:
    lines = [json.loads(line) for line in _all(folder, "\n".join(map(json.dumps, asked)), "cbatch")]
    assert len(lines) == len(asked)
    assert all(isinstance(line["id"], str) and "finish_reason" in line for line in lines)


def _all(folder: Path, data: str, format: str) -> list[bytes]:
    return records(write(folder / "in", data), format=format).splitlines()


def test_error_that_repeats_a_long_value_is_cut(folder: Path) -> None:
    data = json.dumps(OPENAI | {"body": "x" * 100_000})
    assert len(records(write(folder / "in", data), format="openai")) < 5000
