"""Lines whose values are nested deeply cost themselves alone, whatever is done with the file."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file
from cbatch.files.preview import check_file, estimate_file
from cbatch.options import RunOptions
from cbatch.support.checks import MAX_DEPTH, is_text_too_deep, is_too_deep
from tests.files.runs import SHORT, records
from tests.profiles import some

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


DEPTHS = some((MAX_DEPTH + 1, 480, 965, 100_000))


def nested(depth: int) -> str:
    """JSON text of so many lists in each other."""
    return "[" * depth + "]" * depth


def in_objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def row(depth: int) -> str:
    return f'{{"q": "deep", "more": {nested(depth)}}}'


def chat(body: str) -> str:
    return f'{{"messages": [{{"role": "user", "content": "a"{body}}}]}}'


def call(body: str) -> str:
    return (
        '{"custom_id": "deep", "method": "POST", "url": "/v1/chat/completions", '
        f'"body": {{"messages": [{{"role": "user", "content": "a"}}], {body}}}}}'
    )


GOOD_ROW = '{"q": "good", "more": 1}'
GOOD_CALL = call('"max_tokens": 2').replace('"deep"', '"good"')
PLACES: dict[str, tuple[Callable[[int], str], str]] = {
    "row": (row, GOOD_ROW),
    "row of objects": (lambda n: f'{{"q": "deep", "more": {in_objects(n)}}}', GOOD_ROW),
    "id": (lambda n: f'{{"id": {nested(n)}, "prompt": "a"}}', '{"prompt": "b"}'),
    "prompt": (lambda n: f'{{"prompt": {nested(n)}}}', '{"prompt": "b"}'),
    "tokens": (lambda n: f'{{"tokens": {nested(n)}}}', '{"prompt": "b"}'),
    "content": (lambda n: chat(f', "x": {nested(n)}'), '{"prompt": "b"}'),
    "option": (lambda n: f'{{"prompt": "a", "options": {{"x": {nested(n)}}}}}', '{"prompt": "b"}'),
    "schema": (
        lambda n: f'{{"prompt": "a", "options": {{"json_schema": {in_objects(n)}}}}}',
        '{"prompt": "b"}',
    ),
    "schema as text": (
        lambda n: json.dumps({"prompt": "a", "options": {"json_schema": in_objects(n)}}),
        '{"prompt": "b"}',
    ),
    "template variables": (
        lambda n: f'{{"prompt": "a", "options": {{"chat_template_kwargs": {in_objects(n)}}}}}',
        '{"prompt": "b"}',
    ),
    "tools": (
        lambda n: call(
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": '
            f"{in_objects(n)}}}}}]"
        ),
        GOOD_CALL,
    ),
    "arguments": (
        lambda n: chat(
            '}, {"role": "assistant", "tool_calls": [{"type": "function", "function": '
            f'{{"name": "f", "arguments": {json.dumps(in_objects(n))}}}}}]}}, '
            '{"role": "tool", "content": "b"'
        ),
        '{"prompt": "b"}',
    ),
    "ignored": (lambda n: call(f'"metadata": {in_objects(n)}'), GOOD_CALL),
    "custom_id": (
        lambda n: call('"n": 1').replace('"deep"', nested(n)),
        GOOD_CALL,
    ),
    "method": (lambda n: call('"n": 1').replace('"POST"', nested(n)), GOOD_CALL),
    "stream": (lambda n: call(f'"stream": {nested(n)}'), GOOD_CALL),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffle": {"shuffle": True},
    "report": {"report": "report.html", "trace": "trace.json"},
}


@pytest.mark.parametrize(
    ("place", "how"),
    [
        *((place, "plain") for place in PLACES),
        *product(("row", "schema as text"), ("shuffle", "report")),
    ],
)
def test_deep_line_costs_that_line_alone(
    engine: Engine, tmp_path: Path, place: str, how: str
) -> None:
    deep, good = PLACES[place]
    source = tmp_path / "in.jsonl"
    said: dict[str, Any] = {
        name: tmp_path / value if isinstance(value, str) else value
        for name, value in SETTINGS[how].items()
    }
    asked: dict[str, Any] = (
        {"template": "{q}", "system": "{more}"} if place.startswith("row") else {}
    )
    for depth in DEPTHS:
        source.write_text(f"{good}\n{deep(depth)}\n")
        out = tmp_path / f"{depth}.jsonl"
        summary = run_file(source, out, engine=engine, **said, **asked)
        assert (summary.n_items, summary.n_failed, summary.n_left) == (2, 1, 0), depth
        assert len(records(out)) == 2
        assert "nested" in json.dumps(records(out)), depth


def test_deep_line_is_told_by_check_and_strict_and_left_out_of_an_estimate(
    engine: Engine, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for depth in DEPTHS:
        source.write_text(f"{GOOD_ROW}\n{row(depth)}\n")
        said: dict[str, Any] = {"engine": engine, "template": "{q}"}
        found = check_file(source, **said)
        assert found.n_by_code == {"invalid_json_line": 1}
        assert estimate_file(source, **said).n_items == 1
        with pytest.raises(ConfigError, match=r"in\.jsonl, line 2: .*nested"):
            run_file(source, out, strict=True, **said)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_deep_cell_costs_its_row_alone(engine: Engine, tmp_path: Path, suffix: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    source = tmp_path / f"in.{suffix}"
    good = json.dumps([{"role": "user", "content": "a"}])
    for depth in DEPTHS:
        deep = f'[{{"role": "user", "content": "a", "x": {nested(depth)}}}]'
        if suffix == "csv":
            cells = [f'"{cell}"' for cell in (t.replace('"', '""') for t in (good, deep))]
            source.write_text("\n".join(["messages,n", *(f"{cell},1" for cell in cells)]) + "\n")
        elif suffix == "parquet":
            parquet.write_table(pyarrow.table({"messages": [good, deep], "n": [1, 2]}), source)
        else:
            rows = [{"row": 1, "text": "a"}, {"row": 2, "text": "b"}]
            lines = [json.dumps(r) for r in rows]
            source.write_text(f'{lines[0]}\n{lines[1][:-1]}, "x": {nested(depth)}}}\n')
        out = tmp_path / f"{depth}.jsonl"
        summary = run_file(source, out, engine=engine, shuffle=True, output_format="jsonl")
        assert (summary.n_items, summary.n_failed) == (2, 1), depth
        assert "nested" in out.read_text()


def test_what_is_nested_as_deep_as_may_be_runs(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    deepest = row(MAX_DEPTH - 1)  # the object is a level too
    source.write_text(f"{GOOD_ROW}\n{deepest}\n")
    said: dict[str, Any] = {"template": "{q} {more}", "shuffle": True, "strict": True}
    with Engine(FakeBackend(2, 512, 64), options=SHORT, threaded=False) as engine:
        assert run_file(source, out, engine=engine, **said).n_failed == 0
    assert sorted(json.dumps(r["more"]) for r in records(out)) == ["1", nested(MAX_DEPTH - 1)]


def test_depth_is_counted_in_lists_and_objects_as_they_are_in_each_other() -> None:
    assert not is_too_deep(json.loads(nested(MAX_DEPTH)))
    assert is_too_deep(json.loads(nested(MAX_DEPTH + 1)))
    assert is_too_deep(json.loads(in_objects(MAX_DEPTH + 1)))
    wide = [[1], {"a": [2]}, *([3] for _ in range(10 * MAX_DEPTH))]
    assert not is_too_deep(wide)
    assert not is_too_deep("[" * 10 * MAX_DEPTH)


@pytest.mark.parametrize(
    "said",
    ["", "]", "[", '"', "\\", "\\]", '\\"[', '\\\\"]', "é[", "\ud800]", '"]' * 9, "[{" * MAX_DEPTH],
)
def test_depth_of_text_is_that_of_its_value_whatever_its_strings_say(said: str) -> None:
    for depth in (1, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, MAX_DEPTH + 2):
        value: Any = said
        for i in range(depth):
            value = {said: value} if i % 2 else [said, value, said]
        for ensure_ascii in (True, False):
            text = json.dumps([value, said, {"a": said}], ensure_ascii=ensure_ascii, indent=1)
            assert is_text_too_deep(text) is is_too_deep(json.loads(text)) is (depth >= MAX_DEPTH)


@pytest.mark.parametrize("name", ["json_schema", "chat_template_kwargs", "tools"])
def test_options_nested_too_deeply_are_refused_by_name(name: str) -> None:
    value: Any = json.loads(in_objects(700))
    if name == "tools":
        value = [{"type": "function", "function": {"name": "f", "parameters": value}}]
    with pytest.raises(ConfigError, match=rf"{name}.* nested .*{MAX_DEPTH}"):
        RunOptions.of({name: value})
