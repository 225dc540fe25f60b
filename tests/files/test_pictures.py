"""Rows with pictures, on a fake backend for which each byte of a picture is a row of the prompt."""

from __future__ import annotations

import base64
import csv
import json
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine
from cbatch.backend.fake.fake_backend import FakeBackend
from cbatch.errors import ConfigError
from cbatch.files import run_file, run_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPTIONS = {"max_tokens": 2, "seed": 1}
DATA = [b"a" * n for n in (3, 7, 11)]
TEXTS = ["one", "two", "three"]
N_TOKENS = [len(f"user:{text}") + len(data) for text, data in zip(TEXTS, DATA, strict=True)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    backend = FakeBackend(4, 256)
    backend.vocab.picture_refusal = ""
    with Engine(backend) as engine:
        yield engine


def as_csv(path: Path, cells: list[str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "text"])
        writer.writerows(zip(cells, TEXTS, strict=True))
    return path


def answered(source: Path, engine: Engine, **settings: Any) -> list[dict[str, Any]]:
    out = source.with_name("out.jsonl")
    run_file(source, out, engine=engine, options=OPTIONS, image_column="image", **settings)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return sorted(lines, key=lambda line: TEXTS.index(line["text"]))


def test_cells_are_names_of_files_beside_the_table(tmp_path: Path, engine: Engine) -> None:
    for i, data in enumerate(DATA):
        (tmp_path / f"{i}.png").write_bytes(data)
    source = as_csv(tmp_path / "in.csv", ["0.png", str(tmp_path / "1.png"), "2.png"])
    lines = answered(source, engine, output_format="jsonl")
    assert [line["prompt_tokens"] for line in lines] == N_TOKENS


def test_names_of_files_are_in_the_folder_of_their_own_table(
    tmp_path: Path, engine: Engine
) -> None:
    sources = []
    for i, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(DATA[i])
        sources.append(tmp_path / name / "in.csv")
        sources[i].write_text("image,text\n0.png,one\n")
    out = tmp_path / "out.jsonl"
    run_file(
        sources, out, engine=engine, options=OPTIONS, image_column="image", output_format="jsonl"
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = [len("user:one") + len(data) for data in DATA[:2]]
    assert sorted(line["prompt_tokens"] for line in lines) == expected


def test_cells_are_data_urls(tmp_path: Path, engine: Engine) -> None:
    cells = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in DATA]
    lines = answered(as_csv(tmp_path / "in.csv", cells), engine, output_format="jsonl")
    assert [line["prompt_tokens"] for line in lines] == N_TOKENS


@pytest.mark.parametrize("is_mapping", [False, True])
def test_cells_are_bytes_or_mappings_with_bytes(
    tmp_path: Path, engine: Engine, is_mapping: bool
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    cells: list[Any] = [{"bytes": data, "path": None} for data in DATA] if is_mapping else DATA
    table = pyarrow.table({"image": cells, "text": TEXTS})
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(table, source)
    run_file(source, out, engine=engine, options=OPTIONS, image_column="image")
    assert sorted(parquet.read_table(out)["prompt_tokens"].to_pylist()) == sorted(N_TOKENS)
    again = run_table(table, engine=engine, options=OPTIONS, image_column="image")
    assert again["prompt_tokens"].to_pylist() == N_TOKENS


def test_row_without_its_picture_fails_alone(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "0.png").write_bytes(DATA[0])
    source = as_csv(tmp_path / "in.csv", ["0.png", "none.png", ""])
    good, *bad = answered(source, engine, output_format="jsonl")
    assert good["error"] is None
    assert "none.png" in str(bad[0]["error"])
    assert "column 'image' has no picture: ''" in str(bad[1]["error"])


def test_other_column_of_pictures_is_another_run(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "0.png").write_bytes(DATA[0])
    source = as_csv(tmp_path / "in.csv", ["0.png"] * 3)
    answered(source, engine, output_format="jsonl")
    with pytest.raises(ConfigError, match="image column"):
        run_file(
            source, tmp_path / "out.jsonl", engine=engine, options=OPTIONS, output_format="jsonl"
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image_column": "nope"}, "no column 'nope' with pictures"),
        ({"image_column": "image", "is_raw": True}, "raw prompts have no pictures"),
    ],
)
def test_column_that_does_not_fit_is_refused(
    tmp_path: Path, engine: Engine, settings: dict[str, Any], words: str
) -> None:
    source = as_csv(tmp_path / "in.csv", ["a"] * 3)
    with pytest.raises(ConfigError, match=words):
        run_file(source, tmp_path / "out.csv", engine=engine, options=OPTIONS, **settings)
