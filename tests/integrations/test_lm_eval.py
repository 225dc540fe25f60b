"""lm-evaluation-harness on the shipped model: its own evaluation, in process, in workers and alone."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.server import create_app
from tests.server.clients import running

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytest.importorskip("lm_eval", reason="lm_eval is not installed")
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

ALL = ("choice", "answer", "text")
COLOURS = ["red", "blue", "green", "black", "white", "brown"]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a task of choices, one of answers and one of whole texts."""
    rows = [
        {
            "question": f"What colour is thing {i}?",
            "answer": i % 4,
            "text": f"{c} is a colour. " * 30,
        }
        for i, c in enumerate(COLOURS * 2)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    choice = {
        **common,
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "answer",
        "doc_to_choice": COLOURS[:4],
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "num_fewshot": 2,
        "fewshot_split": "test",
    }
    answer = {
        **common,
        "task": "answer",
        "output_type": "generate_until",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    }
    text = {
        **common,
        "task": "text",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    for task in (choice, answer, text):
        # JSON is YAML
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task))
    return tmp_path


def evaluated(tasks: Path, model: Any, names: Sequence[str] = ALL, **more: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model,
        tasks=[*names],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **more,
    )
    return {
        name: [(sample["resps"], sample["target"]) for sample in samples]
        for name, samples in found["samples"].items()
    }


EXACT: dict[str, Any] = {"exact": True, "ctx_per_seq": 128, "n_threads": 1}


def test_evaluation_is_the_same_alone_in_company_and_in_workers(tasks: Path) -> None:
    """The harness's own results, with all samples, to the last bit."""
    from cbatch.integrations.lm_eval import CbatchLM

    ways: list[dict[str, Any]] = [
        {"parallel": 4},
        {"parallel": 1},
        {"parallel": 4, "threaded": False},
        {"parallel": 4, "replicas": 1},
        {"parallel": 4, "replicas": 2, "n_threads": 2},
    ]
    found = []
    for way in ways:
        with cbatch.load(**{**EXACT, **way}) as engine:
            found.append(evaluated(tasks, CbatchLM(engine=engine)))
    assert [way for way, said in zip(ways, found, strict=True) if said != found[0]] == []
    assert {name: len(samples) for name, samples in found[0].items()} == dict.fromkeys(ALL, 12)


def test_evaluation_over_http_is_that_of_this_process_to_the_bit(tasks: Path) -> None:
    """The harness's own client of a server asks for whole texts; it has no windows for texts without a context."""
    pytest.importorskip("tenacity", reason="lm_eval[api] is not installed")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from cbatch.integrations.lm_eval import CbatchLM

    names = ("choice", "answer")
    with cbatch.load(parallel=4, **EXACT) as engine:
        here = evaluated(tasks, CbatchLM(engine=engine, add_bos_token=False), names)
        app = create_app(engine)
        with running(app) as server:
            client = LocalCompletionsAPI(
                model="any",
                base_url=f"{server.url}/v1/completions",
                tokenizer_backend="remote",
                num_concurrent=4,
                max_length=128,
            )
            there = evaluated(tasks, client, names)
        app.state.desk.close()
    assert here == there


def test_context_is_computed_once_for_all_of_its_continuations() -> None:
    from lm_eval.api.instance import Instance

    from cbatch.integrations.lm_eval import CbatchLM

    context = "The colours of the flag, from the left to the right, are as follows. " * 3 + "First"
    with cbatch.load(parallel=4, ctx_per_seq=128, n_threads=1) as engine:
        model = CbatchLM(engine=engine)
        asked = [
            Instance("loglikelihood", {}, (context, f" {c}"), i) for i, c in enumerate(COLOURS)
        ]
        engine.reset_stats()
        model.loglikelihood(asked, disable_tqdm=True)
        n_computed = engine.stats().n_prompt_tokens
        n_context = len(model.tok_encode(context))
        n_ends = sum(len(model.tok_encode(f"{context} {c}")) - n_context for c in COLOURS)
    # each continuation, with the token before it: its logits are wanted
    assert n_computed == (n_context - 1) + n_ends + len(COLOURS)


def test_harness_finds_the_model_by_its_name(tasks: Path) -> None:
    import_module("cbatch.integrations.lm_eval")  # which tells the harness its name
    found = evaluated(tasks, "cbatch", model_args="parallel=4,ctx_per_seq=256", batch_size=8)
    assert len(found["choice"]) == 12


def test_unknown_argument_of_an_answer_is_refused_by_name() -> None:
    from lm_eval.api.instance import Instance

    from cbatch.integrations.lm_eval import CbatchLM

    with cbatch.load(parallel=2, ctx_per_seq=128) as engine:
        model = CbatchLM(engine=engine)
        asked = Instance("generate_until", {}, ("a", {"num_beams": 4}), 0)
        with pytest.raises(cbatch.CBatchError, match="num_beams"):
            model.generate_until([asked], disable_tqdm=True)
