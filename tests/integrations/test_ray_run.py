"""`cbatch run --ray`: a folder of answers, continued after the driver was killed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cbatch.cli import app
from tests.integrations.clusters import PATIENCE_S, WORDS, wait_until, with_ray

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SynthFactory

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

ENGINE = ["--parallel", "4", "--ctx-per-seq", "256", "--threads", "1", "--temperature", "0"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a file of 60 rows in three row groups; two of them cannot be asked."""
    words: list[str | None] = [WORDS[i % 5] for i in range(60)]
    prompts = [f"Say {word}." for word in words]
    prompts[7] = prompts[50] = ""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"n": range(60), "prompt": prompts}), path, row_group_size=20)
    return path


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["run", *map(str, args)])


def answers(folder: Path) -> list[dict[str, Any]]:
    rows = [row for path in folder.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    rows += [json.loads(line) for path in folder.glob("*.jsonl") for line in path.open()]
    return sorted(rows, key=lambda row: row["n"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--limit", "3"], "--limit has no effect with --ray"),
        (["--dry-run"], "--dry-run have no effect with --ray"),
        (["--format", "csv"], "--ray reads Parquet, not csv"),
        (["--output-format", "csv"], "parquet or jsonl"),
    ],
)
@with_ray
def test_options_without_effect_on_a_cluster_are_refused(
    tmp_path: Path, args: list[str], message: str
) -> None:
    result = run("in.parquet", "-o", tmp_path / "out", "--ray", "auto", *args)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.real
@with_ray
def test_cluster_that_is_not_there_is_named(table: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    command = [sys.executable, "-m", "cbatch", "run", str(table), "-o", out, "--ray", "auto"]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env["RAY_TMPDIR"] = str(tmp_path / "none")
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert "--ray auto: no cluster answers there" in done.stderr
    assert done.returncode == 2


@pytest.mark.real
@with_ray
def test_folder_of_json_lines_has_a_row_for_each_of_the_input(
    cluster: Any, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = run(table, "-o", out, "--ray", "auto", "--output-format", "jsonl", *ENGINE)
    assert "items   60 of 60, 2 failed" in result.output
    assert result.exit_code == 1
    rows = answers(out)
    assert [row["n"] for row in rows] == [*range(60)]
    assert [row["n"] for row in rows if row["error"]] == [7, 50]
    assert {type(row["prompt_tokens"]) for row in rows} == {int, type(None)}


@pytest.mark.real
@with_ray
def test_run_continues_with_the_rows_that_a_killed_driver_left(
    cluster: Any, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    address = cluster.get_runtime_context().gcs_address
    long = ["--max-tokens", "60", "--set", "ignore_eos=true"]
    args = [table, "-o", out, "--ray", address, *ENGINE, *long]
    driver = subprocess.Popen([sys.executable, "-m", "cbatch", "run", *map(str, args)])

    def committed() -> list[Path]:
        return [p for p in (out / "_done").glob("*.parquet") if ".pending." not in p.name]

    wait_until(committed)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait(PATIENCE_S)
    n_before = sum(pq.read_metadata(path).num_rows for path in committed())
    assert 0 < n_before < 60
    before = {path.name for path in out.glob("*.parquet")}
    result = run(*args)
    assert f"continuing: {n_before} rows are answered" in result.output
    assert [row["n"] for row in answers(out)] == [*range(60)]
    n_new = sum(
        pq.read_metadata(path).num_rows for path in out.glob("*.parquet") if path.name not in before
    )
    assert n_new == 60 - n_before  # no row was computed twice
    assert run(*args).exit_code == 1  # nothing is left; two rows have errors
    assert [row["n"] for row in answers(out)] == [*range(60)]
    next(out.glob("*.parquet")).unlink()
    assert "rows are answered again: their files are gone" in run(*args).output
    assert [row["n"] for row in answers(out)] == [*range(60)]
    for more, what in (
        (["--seed", "3"], "another options"),
        (["--chat-template", "chatml"], "another settings"),
    ):
        other = run(*args, *more)
        assert other.exit_code == 2
        assert f"was made with {what}" in other.output


@pytest.mark.real
@with_ray
def test_folder_that_another_run_has_is_refused(cluster: Any, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    folder = os.open(out, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    result = run(table, "-o", out, "--ray", "auto", *ENGINE)
    assert "another run is writing to it" in result.output
    os.close(folder)
    assert [*out.iterdir()] == []


@pytest.mark.real
@with_ray
def test_run_is_not_continued_with_other_rows_in_as_many_bytes(
    cluster: Any, tmp_path: Path
) -> None:
    table = tmp_path / "in.parquet"
    args = [table, "-o", tmp_path / "out", "--ray", "auto", *ENGINE, "--max-tokens", "2"]
    for word in ("red", "fox"):
        pq.write_table(pa.table({"prompt": [word] * 8}), table)
        result = run(*args)
    assert result.exit_code == 2
    assert f"was made with another {table}: use the same" in " ".join(result.output.split())


@pytest.mark.real
@with_ray
def test_run_is_not_continued_with_another_model_of_the_same_name(
    cluster: Any, table: Path, tmp_path: Path, synth: SynthFactory
) -> None:
    model = tmp_path / "model.gguf"
    args = [
        table,
        "-o",
        tmp_path / "out",
        "--ray",
        "auto",
        *ENGINE,
        "--max-tokens",
        "2",
        "-m",
        model,
    ]
    for i in range(2):
        shutil.copyfile(synth("test", seed=i), model)
        result = run(*args)
    assert result.exit_code == 2
    assert f"was made with another {model}: use the same" in " ".join(result.output.split())
