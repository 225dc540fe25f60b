"""Rows with pictures and sounds, on a fake backend for which each byte of one is a row of the prompt."""

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
of_each = pytest.mark.parametrize("kind", ["image", "audio"])


@pytest.fixture
def engine() -> Iterator[Engine]:
    backend = FakeBackend(4, 256)
    backend.vocab.picture_refusal = backend.vocab.sound_refusal = ""
    with Engine(backend) as engine:
        yield engine


def as_csv(path: Path, **columns: list[str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def answered(source: Any, engine: Engine, out: Path, **settings: Any) -> list[dict[str, Any]]:
    run_file(source, out, engine=engine, options=OPTIONS, output_format="jsonl", **settings)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return sorted(lines, key=lambda line: TEXTS.index(line["text"]))


@of_each
def test_cells_are_names_of_files_or_data_urls(tmp_path: Path, engine: Engine, kind: str) -> None:
    for i, data in enumerate(DATA):
        (tmp_path / str(i)).write_bytes(data)
    url = f"data:{kind}/any;base64,{base64.b64encode(DATA[2]).decode()}"
    source = as_csv(tmp_path / "in.csv", it=["0", str(tmp_path / "1"), url], text=TEXTS)
    lines = answered(source, engine, tmp_path / "out", **{f"{kind}_column": "it"})
    assert [line["prompt_tokens"] for line in lines] == N_TOKENS
    with pytest.raises(ConfigError, match=f"{kind} column"):  # without it, it is another run
        answered(source, engine, tmp_path / "out")


def test_row_has_a_picture_and_a_sound_beside_its_own_table(tmp_path: Path, engine: Engine) -> None:
    sources = []
    for name, text, data in zip("ab", TEXTS, DATA, strict=False):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0").write_bytes(data)
        columns = {"image": ["0"], "sound": ["0"], "text": [text]}
        sources.append(as_csv(tmp_path / name / "in.csv", **columns))
    asked = {"image_column": "image", "audio_column": "sound"}
    lines = answered(sources, engine, tmp_path / "out", **asked)
    expected = [n + len(data) for n, data in zip(N_TOKENS, DATA, strict=True)]
    assert [line["prompt_tokens"] for line in lines] == expected[:2]


@of_each
@pytest.mark.parametrize("is_mapping", [False, True])
def test_cells_are_bytes_or_mappings_with_bytes(
    tmp_path: Path, engine: Engine, kind: str, is_mapping: bool
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    cells: list[Any] = [{"bytes": data, "path": None} for data in DATA] if is_mapping else DATA
    table = pyarrow.table({"it": cells, "text": TEXTS})
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(table, source)
    column: dict[str, Any] = {f"{kind}_column": "it"}
    run_file(source, out, engine=engine, options=OPTIONS, **column)
    assert sorted(parquet.read_table(out)["prompt_tokens"].to_pylist()) == sorted(N_TOKENS)
    again = run_table(table, engine=engine, options=OPTIONS, **column)
    assert again["prompt_tokens"].to_pylist() == N_TOKENS


@pytest.mark.parametrize(("kind", "word"), [("image", "picture"), ("audio", "sound")])
def test_row_without_its_file_fails_alone(
    tmp_path: Path, engine: Engine, kind: str, word: str
) -> None:
    (tmp_path / "0").write_bytes(DATA[0])
    source = as_csv(tmp_path / "in.csv", it=["0", "none.any", ""], text=TEXTS)
    good, *bad = answered(source, engine, tmp_path / "out", **{f"{kind}_column": "it"})
    assert good["error"] is None
    assert "none.any" in str(bad[0]["error"])
    assert f"column 'it' has no {word}: ''" in str(bad[1]["error"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image_column": "nope"}, "no column 'nope' with pictures"),
        ({"audio_column": "nope"}, "no column 'nope' with sounds"),
        ({"image_column": "it", "is_raw": True}, "raw prompts have no pictures"),
        ({"audio_column": "it", "is_raw": True}, "raw prompts have no sounds"),
    ],
)
def test_column_that_does_not_fit_is_refused(
    tmp_path: Path, engine: Engine, settings: dict[str, Any], words: str
) -> None:
    source = as_csv(tmp_path / "in.csv", it=["a"], text=["one"])
    with pytest.raises(ConfigError, match=words):
        answered(source, engine, tmp_path / "out", **settings)
