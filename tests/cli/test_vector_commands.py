"""`cbatch embed` and `cbatch rerank` on small random models."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.cli.conftest import invoke
from tests.oracle.embeddings import PlainEmbedder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SynthFactory


def write_table(path: Path, n: int) -> Path:
    with path.open("w", newline="") as file:
        rows = [(i, f"text number {i} of the house " + "red " * (i % 17)) for i in range(n)]
        csv.writer(file).writerows([("id", "text"), *rows])
    return path


def texts_of(path: Path) -> list[str]:
    with path.open() as file:
        return [row["text"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", ["bert", "qwen3-embedding"])
def test_embeddings_are_llama_cpps(synth: SynthFactory, tmp_path: Path, name: str) -> None:
    import pyarrow.parquet

    model_file = synth(name, type="f32")  # rounding of q8_0 is larger in a random model
    source, out = write_table(tmp_path / "in.csv", 40), tmp_path / "out.parquet"
    done = invoke("embed", source, "--column", "text", "-m", model_file, "-o", out, "--threads", 1)
    assert done.exit_code == 0, done.stderr
    found = np.array(pyarrow.parquet.read_table(out)["embedding"].to_pylist())
    with PlainEmbedder(model_file) as model:
        rows = np.stack([model.embed(model.tokenize(text)) for text in texts_of(source)])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert (found * rows).sum(axis=1).min() >= 0.9999


def test_too_long_rows_are_errors_unless_truncated(synth: SynthFactory, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text(f"id,text\n1,{'red ' * 600}\n2,blue\n")
    model, out = synth("bert"), tmp_path / "out.npy"
    done = invoke("embed", source, "-m", model, "-o", out, "--threads", 1)
    assert done.exit_code == 1
    assert np.isnan(np.load(out)).any(axis=1).tolist() == [True, False]
    cut = tmp_path / "cut.npy"
    again = invoke("embed", source, "-m", model, "-o", cut, "--threads", 1, "--truncate", "end")
    assert again.exit_code == 0, again.stderr
    assert not np.isnan(np.load(cut)).any()


def test_more_dimensions_than_the_model_has_are_refused(
    synth: SynthFactory, tmp_path: Path
) -> None:
    source, out = write_table(tmp_path / "in.csv", 3), tmp_path / "out.npy"
    done = invoke("embed", source, "-m", synth("bert"), "-o", out, "--dimensions", 65)
    assert done.exit_code == 2
    assert "dimensions=65 is more than the 64 numbers" in done.stderr


def test_best_rows_come_first(synth: SynthFactory, tmp_path: Path) -> None:
    source, model = write_table(tmp_path / "in.csv", 12), synth("bert-rerank")
    done = invoke("rerank", "what is red?", source, "-m", model, "--threads", 1, "-n", 5)
    assert done.exit_code == 0, done.stderr
    lines = [*csv.DictReader(done.stdout.splitlines())]
    with PlainEmbedder(model) as plain:
        scores = [plain.score("what is red?", text) for text in texts_of(source)]
    best = sorted(range(12), key=lambda i: -scores[i])[:5]
    assert [int(line["id"]) for line in lines] == best


def test_chat_model_embeds_rows(test_model: Path, tmp_path: Path) -> None:
    source, out = write_table(tmp_path / "in.csv", 3), tmp_path / "out.npy"
    done = invoke("embed", source, "-m", test_model, "-o", out, "--threads", 1)
    assert done.exit_code == 0, done.stderr
    assert np.linalg.norm(np.load(out), axis=1) == pytest.approx(np.ones(3), abs=1e-4)
