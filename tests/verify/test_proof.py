"""`cbatch verify MODEL`: what is proven of one model, in words, as JSON and as a page."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.load import row_shapes
from cbatch.backend.load.loader import find_widths
from cbatch.cli.verify_page import lines_of, proof_page, ranges
from cbatch.engine_options import EngineOptions
from cbatch.verify import proof as proof_module
from cbatch.verify.proof import Check, Price, ProbeAnswers, Proof, Tie
from tests.cli.conftest import invoke

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROOF = Proof(
    model="a <b>.gguf",
    exactness="bitwise",
    parallel=4,
    n_window=512,
    flash_attn="auto",
    step_rows="2 rows or more",
    probe_s=1.25,
    is_remembered=True,
    widths=[[2, 3, 4], [1]],
    checks=[Check("in company", 10, 10, 0, 5), Check("shared", 10, 10, 7, 0)],
    ties=[Tie(3, 1, 0.012)],
    median_margin=0.5,
    prices=[Price("4 at once", 99.0, 100.0, 0.99)],
)


@pytest.mark.parametrize(
    ("widths", "said"),
    [([1], "1"), ([1, 2, 3], "1–3"), ([1, 4, 5, 9], "1, 4–5, 9"), ([], "")],
)
def test_numbers_are_said_as_ranges(widths: list[int], said: str) -> None:
    assert ranges(widths) == said


def test_proof_is_told_in_lines() -> None:
    assert list(lines_of(PROOF)) == [
        "exactness: bitwise, in steps of 2 rows or more (probe: 1.2 s, in an earlier load)",
        "numbers of rows in a step with bit-identical results: 2–4; 1",
        "in company: all of 10 tokens as alone, 5 pad rows",
        "shared: all of 10 tokens as alone, 7 prompt tokens shared, 0 pad rows",
        "smallest leads of the likeliest token, in log-probability: 0.012 (median 0.5)",
        "price, 4 at once: 99 tokens/s with exact, 100 without, median ratio of all rounds 0.99",
    ]
    differs = replace(PROOF, checks=[Check("in company", 10, 9, 0, 5)])
    assert "in company: only 9 of 10 tokens as alone, 5 pad rows" in lines_of(differs)
    assert (PROOF.is_exact, differs.is_exact) == (True, False)
    assert not replace(PROOF, exactness="not guaranteed: so").is_exact


@pytest.mark.parametrize("n", [2, 8, 24])
def test_longest_prompts_have_a_common_beginning(n: int) -> None:
    prompts = [prompt.tokens for prompt in proof_module.different_prompts(n, 2048, 1000)]
    beginnings = [tuple(tokens[:500]) for tokens in prompts if tokens and len(tokens) > 520]
    assert len(prompts) == n
    assert beginnings.count(beginnings[-1]) == max(2, n // 6)


def test_page_shows_each_number_of_rows_and_escapes_texts() -> None:
    page = proof_page(PROOF, {"parallel": 4}, {"cores": "2"})
    assert page.count("<rect") == 4
    assert page.count('class="teal"') == 3
    assert "a &lt;b&gt;.gguf" in page
    assert "<b>" not in page.partition("<h1>")[2].partition("</h1>")[0]
    assert "0.99" in page
    refused = replace(PROOF, checks=[], ties=[], prices=[], step_rows=None)
    assert "What it costs" not in proof_page(refused, {}, {})


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("all alike", [[1, 2, 3, 4]]), ("one row", [[2, 3, 4], [1]]), ("odd", [[2, 4], [1, 3]])],
)
def test_numbers_of_rows_are_grouped_by_their_bits(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, kind: str, groups: list[list[int]]
) -> None:
    class Touched(LlamaBackend):
        def logits(self, slot: Any) -> Any:
            n_rows = len(self.last_chunks)
            is_other = {"all alike": False, "one row": n_rows == 1, "odd": n_rows % 2 == 1}[kind]
            return super().logits(slot) * 0 + is_other

    monkeypatch.setattr(row_shapes, "LlamaBackend", Touched)
    options = EngineOptions(parallel=4, ctx_per_seq=256, exact=True, n_threads=1)
    assert find_widths(test_model, options) == groups


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_module, "_LONGEST", 40)
    monkeypatch.setattr(proof_module, "_N_ROUNDS", 1)
    monkeypatch.setattr(proof_module, "_N_TIMED", 4)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["llama-f16", "mamba2"])
def test_model_is_proven_and_its_page_is_written(
    zoo: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    page = tmp_path / "proof.html"
    done = invoke("verify", zoo(name), "--count", 6, "--json", "--html", page)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["is_exact"], found["exactness"]) == (0, True, "bitwise")
    assert sorted(n for group in found["widths"] for n in group) == [1, 2, 3, 4]
    assert {(c["n_tokens"], c["n_equal"]) for c in found["checks"]} == {(72, 72)}
    assert len(found["checks"]) == 4
    assert [price["name"] for price in found["prices"]] == ["4 at once", "one"]
    assert all(price["ratio"] > 0 for price in found["prices"])
    assert "bitwise" in page.read_text()


@pytest.mark.usefixtures("quick")
def test_answer_that_differs_is_found(
    zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = proof_module.compare

    def compare(name: str, made: Any, rows: Any, items: Any, alone: ProbeAnswers) -> Check:
        first = next(iter(alone.rows))
        other = replace(alone, rows={**alone.rows, first: b"another row"})
        return real(name, made, rows, items, other)

    monkeypatch.setattr(proof_module, "compare", compare)
    done = invoke("verify", zoo("llama-f16"), "--count", 3)
    assert done.exit_code == 1
    assert "in a batch: only 35 of 36 tokens as alone" in done.stdout


@pytest.mark.usefixtures("quick")
def test_model_or_folder_is_asked_for(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    monkey = zoo("llama-f16")
    done = invoke("verify", monkey, "--archs", tmp_path)
    assert done.exit_code == 2
    assert "MODEL or --archs" in done.stderr
    assert invoke("verify").exit_code == 2
    before = monkey.read_bytes()
    done = invoke("verify", monkey, "--html", monkey)
    assert (done.exit_code, monkey.read_bytes() == before) == (2, True)
    assert "is not a page of cbatch" in done.stderr
    assert invoke("verify", "--archs", tmp_path, "--html", tmp_path / "x").exit_code == 2
