"""`cbatch bench --workload embed,rerank`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.bench.server_process import served
from tests.cli.conftest import invoke

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SynthFactory

SHORT = ("--rounds", 1, "--count", 2, "--at-once", 2, "--prompt-tokens", "3-12")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--workload", "embed,decode"), "embed and decode cannot be measured together"),
        (("--output-tokens", "4"), "--output-tokens has no effect on embeddings and rerank"),
        (("--rate", "2"), "--rate has no effect"),
        (("--warm",), "--warm has no effect"),
        (("--no-stream",), "--no-stream has no effect"),
        (("--html", "a.html"), "--html has no effect"),
        (("--sides", "bare"), "unknown side 'bare'; known are engine, serve, llama"),
        (("--common-tokens", "9"), "texts of embed have no common tokens"),
    ],
)
def test_what_is_not_of_embeddings_is_refused(args: tuple[str, ...], words: str) -> None:
    shown = invoke("bench", "--workload", "embed", *args)
    assert shown.exit_code == 2
    assert words in shown.stderr


@pytest.mark.real
def test_model_without_room_for_the_texts_says_so(synth: SynthFactory) -> None:
    path = synth("bert")
    shown = invoke("bench", path, "--workload", "embed", "--prompt-tokens", "5-600")
    assert shown.exit_code == 2
    assert "embed needs 632 tokens, but the model takes 512: lower" in shown.stderr
    shown = invoke("bench", path, "--workload", "rerank")
    assert shown.exit_code == 2
    assert "the model cannot rerank: leave rerank out of --workload" in shown.stderr


@pytest.mark.real
def test_embeddings_are_measured_beside_servers_and_llama(
    synth: SynthFactory, tmp_path: Path
) -> None:
    path, file, page = synth("bert"), tmp_path / "a.json", tmp_path / "a.md"
    args = ("--workload", "embed", *SHORT, "--sides", "llama,engine")
    with served(str(path)) as server, served(str(synth("bert", seed=1))) as other:
        url, wrong = (f"http://127.0.0.1:{s.port}/v1" for s in (server, other))
        shown = invoke(
            "bench", path, *args, "--against", url, "--against", wrong, "--json", file,
            "--markdown", page,
        )  # fmt: skip
    assert shown.exit_code == 1
    [refused] = re.findall(r"refused: (.*)", shown.stderr)
    assert refused.startswith(f"embed: {wrong}: has another model or other results: cosine")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert [m["side"] for m in found["rounds"]] == ["engine", "Llama.embed", url]
    assert all(m["n_texts"] == 32 and m["seconds"] > 0 for m in found["rounds"])
    assert [m["cpu_s"] is None for m in found["rounds"]] == [False, False, True]
    assert min(a["apart"] for a in found["apart"]) > 0.999
    assert "embed: embeddings of texts of all lengths (16 texts of 3–12 a call)" in shown.stdout
    assert "| 2 at once | Llama.embed |" in page.read_text(encoding="utf-8")


@pytest.mark.real
def test_scores_are_measured_beside_a_server(synth: SynthFactory, tmp_path: Path) -> None:
    path, file = synth("bert-rerank"), tmp_path / "a.json"
    args = ("--workload", "rerank", *SHORT, "--common-tokens", 20, "--sides", "engine,serve")
    shown = invoke("bench", path, *args, "--json", file)
    assert shown.exit_code == 0, shown.stderr
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert [m["side"] for m in found["rounds"]] == ["engine", "serve"]
    assert all(m["cpu_s"] > 0 for m in found["rounds"])
    assert max(a["apart"] for a in found["apart"]) < 0.05
