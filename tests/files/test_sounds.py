"""Rows with sounds, on a fake backend for which each byte of a sound is a row of the prompt."""

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
    backend.vocab.picture_refusal = backend.vocab.sound_refusal = ""
    with Engine(backend) as engine:
        yield engine


def as_csv(path: Path, **columns: list[str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def answered(source: Path, engine: Engine, **settings: Any) -> list[dict[str, Any]]:
    out = source.with_name("out.jsonl")
    run_file(source, out, engine=engine, options=OPTIONS, output_format="jsonl", **settings)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return sorted(lines, key=lambda line: TEXTS.index(line["text"]))


def test_cells_are_names_of_files_or_data_urls(tmp_path: Path, engine: Engine) -> None:
    for i, data in enumerate(DATA):
        (tmp_path / f"{i}.wav").write_bytes(data)
    url = f"data:audio/wav;base64,{base64.b64encode(DATA[2]).decode()}"
    source = as_csv(tmp_path / "in.csv", sound=["0.wav", str(tmp_path / "1.wav"), url], text=TEXTS)
    lines = answered(source, engine, audio_column="sound")
    assert [line["prompt_tokens"] for line in lines] == N_TOKENS
    with pytest.raises(ConfigError, match="audio column"):
        answered(source, engine)


@pytest.mark.parametrize("is_mapping", [False, True])
def test_cells_are_bytes_or_mappings_with_bytes(engine: Engine, is_mapping: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    cells: list[Any] = [{"bytes": data, "path": None} for data in DATA] if is_mapping else DATA
    table = pyarrow.table({"audio": cells, "text": TEXTS})
    found = run_table(table, engine=engine, options=OPTIONS, audio_column="audio")
    assert found["prompt_tokens"].to_pylist() == N_TOKENS


def test_row_has_a_picture_and_a_sound(tmp_path: Path, engine: Engine) -> None:
    for name in ("0.png", "0.wav"):
        (tmp_path / name).write_bytes(DATA[1])
    source = as_csv(tmp_path / "in.csv", image=["0.png"], sound=["0.wav"], text=["one"])
    [line] = answered(source, engine, image_column="image", audio_column="sound")
    assert line["prompt_tokens"] == len("user:one") + 2 * len(DATA[1])


def test_row_without_its_sound_fails_alone(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "0.wav").write_bytes(DATA[0])
    source = as_csv(tmp_path / "in.csv", sound=["0.wav", "none.wav", ""], text=TEXTS)
    good, *bad = answered(source, engine, audio_column="sound")
    assert good["error"] is None
    assert "none.wav" in str(bad[0]["error"])
    assert "column 'sound' has no sound: ''" in str(bad[1]["error"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"audio_column": "nope"}, "no column 'nope' with sounds"),
        ({"audio_column": "sound", "is_raw": True}, "raw prompts have no sounds"),
    ],
)
def test_column_that_does_not_fit_is_refused(
    tmp_path: Path, engine: Engine, settings: dict[str, Any], words: str
) -> None:
    source = as_csv(tmp_path / "in.csv", sound=["a"], text=["one"])
    with pytest.raises(ConfigError, match=words):
        answered(source, engine, **settings)
