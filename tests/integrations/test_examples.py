"""docs/examples/integrations: what each worker of a cluster does, and a configuration, tried without the cluster."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.server.conftest import served
from tests.test_docs import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = ROOT / "docs/examples/integrations"
QUESTIONS = [f"What is {n}+3?" for n in range(1, 6)]
LONG = "x " * 50_000


@pytest.fixture
def workplace(tmp_path: Path, test_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder with a model, and work there."""
    (tmp_path / "model.gguf").symlink_to(test_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_worker_of_spark_answers_a_batch(workplace: Path) -> None:
    predict = runpy.run_path(str(FOLDER / "spark.py"))["make_predict"]()
    answers = predict(np.array([*QUESTIONS, LONG], dtype=object))
    assert [*answers] == ["4", "5", "6", "7", "8", None]


@pytest.mark.slow
def test_spark_answers_a_table(workplace: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    if "JAVA_HOME" not in os.environ and shutil.which("java") is None:
        pytest.skip("Java is not installed")
    table = pyarrow.table({"question": [*QUESTIONS, None, LONG]})
    pyarrow.parquet.write_table(table, "questions.parquet")
    command = [sys.executable, str(FOLDER / "spark.py"), "questions.parquet", "answers.parquet"]
    subprocess.run(command, check=True, env={**os.environ, "PYSPARK_PYTHON": sys.executable})
    rows = pyarrow.parquet.read_table("answers.parquet").to_pylist()
    found = {row["question"]: row["answer"] for row in rows}
    assert found == dict(zip([*QUESTIONS, LONG], ["4", "5", "6", "7", "8", None], strict=True))


class SkyBatch(ModuleType):
    """What a worker of Sky Batch is given of it: batches, and a place for results."""

    def __init__(self, batches: list[list[dict[str, Any]]]) -> None:
        super().__init__("sky.batch")
        self.batches, self.saved = batches, list[dict[str, Any]]()

    def remote_function(self, function: Any) -> Any:
        return function

    def load(self) -> Iterator[list[dict[str, Any]]]:
        yield from self.batches

    def save_results(self, rows: list[dict[str, Any]]) -> None:
        self.saved += rows


def test_worker_of_sky_batch_answers_its_batches(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = SkyBatch([[{"question": text} for text in QUESTIONS], [{"question": LONG}]])
    sky: Any = ModuleType("sky")
    sky.batch = batch
    monkeypatch.setitem(sys.modules, "sky", sky)
    runpy.run_path(str(FOLDER / "sky_batch.py"))["answer"]()
    assert [row["answer"] for row in batch.saved] == ["4", "5", "6", "7", "8", ""]
    assert [bool(row["error"]) for row in batch.saved] == [False] * 5 + [True]


def test_configuration_of_promptfoo_asks_what_the_server_knows(test_model: Path) -> None:
    yaml = pytest.importorskip("yaml")
    told = yaml.safe_load((FOLDER / "promptfoo.yaml").read_text(encoding="utf-8"))
    [provider] = told["providers"]
    config = dict(provider["config"])
    assert config.pop("apiBaseUrl") == "http://127.0.0.1:8080/v1"
    config.pop("apiKey")
    with served(test_model) as server:
        for test in told["tests"]:
            text = told["prompts"][0]
            for name, value in test["vars"].items():
                text = text.replace("{{%s}}" % name, str(value))  # noqa: UP031  # braces
            body = {"model": "any", "messages": [{"role": "user", "content": text}], **config}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
            [expected] = test["assert"]
            assert expected["value"] in answer["choices"][0]["message"]["content"], json.dumps(
                answer
            )
