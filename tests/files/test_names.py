"""The name of an output says its format; what contradicts it is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file
from cbatch.files.output.sorting import sort_to
from tests.files.runs import records

if TYPE_CHECKING:
    from cbatch.engine import Engine

INPUTS = {
    "in.csv": "prompt,n\na,1\n",
    "in.tsv": "prompt\tn\na\t1\n",
    "in.txt": "a\n",
    "openai.jsonl": '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n',
    "cbatch.jsonl": '{"id": "x", "prompt": "a"}\n',
    "objects.jsonl": '{"text": "a", "n": 1}\n',
}


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    for name, text in INPUTS.items():
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in INPUTS}


def kind_of(path: Path) -> str:
    """Tell what stands in a file, by its bytes."""
    data = path.read_bytes()
    if data.startswith((b"PAR1", b"ARROW1")):
        return "parquet" if data.startswith(b"PAR1") else "arrow"
    text = data.decode()
    if not text.startswith("{"):
        return "tsv" if "\t" in text else "csv"
    record = json.loads(text)
    if "custom_id" in record:
        return "openai"
    return "cbatch" if "usage" in record else "jsonl"


OWN = {
    "in.csv": "csv",
    "in.tsv": "tsv",
    "in.txt": "cbatch",
    "openai.jsonl": "openai",
    "cbatch.jsonl": "cbatch",
    "objects.jsonl": "jsonl",
}


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("out", None),
        ("out.dat", None),
        ("OUT.CSV", "csv"),
        ("out.tab", "tsv"),
        ("out.pq", "parquet"),
        ("out.feather", "arrow"),
        ("out.ndjson", "json lines"),
    ],
)
def test_name_of_the_output_says_its_format(
    engine: Engine, inputs: dict[str, Path], source: str, name: str, format: str | None
) -> None:
    if format in ("parquet", "arrow"):
        pytest.importorskip("pyarrow")
    own = OWN[source]
    if format == "json lines":
        format = own if own in ("openai", "cbatch", "jsonl") else "jsonl"
    out = inputs[source].with_name(name)
    assert run_file(inputs[source], out, engine=engine).is_complete
    assert kind_of(out) == (format or own)
    assert run_file(inputs[source], out, engine=engine).n_before == 1


@pytest.mark.parametrize(
    ("source", "name", "asked", "kind"),
    [
        ("in.csv", "out.jsonl", "csv", "csv"),
        ("cbatch.jsonl", "out.csv", "cbatch", "cbatch"),
        ("cbatch.jsonl", "out.jsonl", "openai", "openai"),
        ("openai.jsonl", "out.txt", "csv", "csv"),
        ("in.txt", "out.jsonl", "jsonl", "jsonl"),
    ],
)
def test_text_is_of_the_format_that_is_asked_for(
    engine: Engine, inputs: dict[str, Path], source: str, name: str, asked: str, kind: str
) -> None:
    out = inputs[source].with_name(name)
    run_file(inputs[source], out, engine=engine, output_format=asked)
    assert kind_of(out) == kind


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("out.txt", {}, r"out\.txt: answers cannot be written as plain text.*--output-format"),
        ("out.jsonl.gz", {}, r"cannot be compressed.*leave out \.gz"),
        ("out.jsonl.xz", {"output_format": "jsonl"}, "cannot be compressed"),
        ("out.jsonl.zip", {}, "cannot be compressed"),
        ("out.parquet", {"output_format": "csv"}, "its name says parquet, but answers are csv"),
        ("out.csv", {"output_format": "parquet"}, "its name says csv, but answers are parquet"),
        ("out.jsonl", {"output_format": "arrow"}, "its name says jsonl, but answers are arrow"),
        ("out.jsonl", {"errors": "e.csv"}, r"e\.csv: its name says csv, but answers are jsonl"),
        ("out.csv", {"errors": "e.jsonl"}, r"e\.jsonl: its name says jsonl, but answers are csv"),
        ("out.csv", {"errors": "e.csv.gz"}, r"e\.csv\.gz: answers cannot be compressed"),
    ],
    ids=str,
)
def test_name_that_contradicts_is_refused(
    engine: Engine, inputs: dict[str, Path], name: str, said: dict[str, Any], words: str
) -> None:
    pytest.importorskip("pyarrow")
    source = inputs["in.csv"]
    asked: dict[str, Any] = {
        key: source.with_name(v) if key == "errors" else v for key, v in said.items()
    }
    before = set(source.parent.iterdir())
    with pytest.raises(ConfigError, match=words):
        run_file(source, source.with_name(name), engine=engine, **asked)
    assert set(source.parent.iterdir()) == before


def test_errors_have_a_name_of_the_same_kind(engine: Engine, inputs: dict[str, Path]) -> None:
    source = inputs["in.csv"]
    source.write_text("prompt\na\n \n")
    out, errors = source.with_name("out.jsonl"), source.with_name("errors.ndjson")
    assert run_file(source, out, engine=engine, errors=errors).n_failed == 1
    assert [len(records(out)), len(records(errors))] == [1, 1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sorted.csv", "its name says csv, but answers are cbatch"),
        ("sorted.jsonl.gz", "cannot be compressed"),
    ],
)
def test_sorting_does_not_change_the_format(
    engine: Engine, inputs: dict[str, Path], name: str, words: str
) -> None:
    source = inputs["cbatch.jsonl"]
    out, target = source.with_name("out.jsonl"), source.with_name(name)
    run_file(source, out, engine=engine)
    with pytest.raises(ConfigError, match=words):
        sort_to(out, target)
    Path(f"{out}.manifest").unlink()
    with pytest.raises(ConfigError, match=words.replace("cbatch", "jsonl")):
        sort_to(out, target, by=[source])
    assert not target.exists()
    assert sort_to(out, source.with_name("sorted"), by=[source]).n_records == 1
