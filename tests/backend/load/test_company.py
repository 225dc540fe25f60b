"""Company tried at load: where llama.cpp computes several sequences wrongly, one is computed at a time, and right."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest

import cbatch
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load.company import find_known, try_company
from cbatch.backend.load.loader import describe_model
from cbatch.backend.load.open_model import open_model
from cbatch.engine_options import EngineOptions
from cbatch.errors import EngineError
from cbatch.messages import BatchPrompt
from tests.backend.lora import write_lora

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from cbatch.core.plan import Slot, StepPlan, StepResult

pytestmark = pytest.mark.real

PROMPTS = [tuple(range(i, 13 * i, i + 1)) for i in range(1, 9)]


class Wrong(LlamaBackend):
    """Computes a sequence of a step otherwise than alone, or a prompt otherwise than its tokens."""

    place = 0
    n_least = 2
    code = 0
    is_of_prompt = False
    n_rows = 0

    def run(self, plan: StepPlan) -> StepResult:
        n_rows = len(plan.spans)
        if self.code and n_rows >= self.n_least:
            raise EngineError(f"llama_decode returned {self.code}")
        self.n_rows = n_rows
        self.is_long = any(len(chunk.inputs) > 1 for chunk in plan.spans)
        return super().run(plan)

    def logits(self, slot: Slot) -> NDArray[np.float32]:
        found = super().logits(slot)
        if self.is_of_prompt and self.is_long:
            return -found
        is_wrong = not self.is_of_prompt and self.n_rows >= self.n_least and slot == self.place
        return np.roll(found, 1) if is_wrong else found


@pytest.fixture
def backend(test_model: Path) -> Iterator[Wrong]:
    backend = Wrong(open_model(test_model), Tuning(EngineOptions(parallel=4, ctx_per_seq=256)))
    with closing(backend):
        yield backend


@pytest.mark.parametrize(("place", "n_least"), [(0, 2), (1, 3), (2, 4), (3, 2)])
def test_wrong_row_of_a_step_is_found_in_each_place(
    backend: Wrong, place: int, n_least: int
) -> None:
    backend.place, backend.n_least = place, n_least
    found = try_company(backend)
    assert not found.is_sound
    assert found.company.startswith("one at a time: ")
    assert f"sequence {place + 1} of 4" in found.company
    assert (found.options.parallel, found.options.n_ubatch) == (1, 512)


def test_prompt_that_is_wrong_alone_is_computed_token_by_token(backend: Wrong) -> None:
    backend.is_of_prompt = True
    found = try_company(backend)
    assert not found.is_sound
    assert (found.options.parallel, found.options.n_ubatch) == (1, 1)


def test_step_that_fails_in_company_is_no_company(backend: Wrong) -> None:
    backend.code = -3
    found = try_company(backend)
    assert not found.is_sound
    assert "returned -3" in found.company


def test_sound_backend_is_left_empty(backend: Wrong) -> None:
    backend.n_least = 5
    found = try_company(backend)
    assert found.is_sound
    assert found.options is backend.options
    assert set(backend.n_cells) == {0}


def test_trial_that_is_stopped_tells_so(backend: Wrong) -> None:
    with pytest.raises(EngineError, match="stopped"):
        try_company(backend, lambda: True)


def answers(engine: cbatch.Engine) -> list[tuple[int, ...]]:
    said: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    results = engine.run([BatchPrompt(tokens=p) for p in PROMPTS], options=said).results()
    return [result.token_ids for result in results]


def test_models_that_end_the_process_are_computed_with_other_settings(
    zoo: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = zoo("kimi-linear")
    with cbatch.load(path, parallel=1, n_ubatch=1, ctx_per_seq=256) as engine:
        expected = answers(engine)
    for n_slots, n_ubatch in ((3, 510), (12, 504)):
        caplog.clear()
        with cbatch.load(path, parallel=n_slots, ctx_per_seq=256) as engine:
            assert engine.parallel == n_slots
            assert engine.company.startswith("together: ")
            assert f"n_ubatch={n_ubatch}, because llama.cpp crashes" in engine.company
            assert answers(engine) == expected
        [warning] = [r.getMessage() for r in caplog.records if "crashes" in r.getMessage()]
        assert str(path) in warning


@pytest.mark.parametrize("name", ["arwkv7", "cogvlm", "plamo2"])
def test_model_that_is_wrong_in_company_is_right_one_at_a_time(
    name: str, zoo: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = zoo(name)
    with caplog.at_level(logging.WARNING), cbatch.load(path, parallel=4) as engine:
        assert engine.company.startswith("one at a time: ")
        assert engine.parallel == 1
        found = answers(engine)
    [warning] = [r.getMessage() for r in caplog.records if "one at a time" in r.getMessage()]
    assert str(path) in warning
    with cbatch.load(path, parallel=1, n_ubatch=1, ctx_per_seq=256) as engine:
        assert found == answers(engine)


def test_adapters_and_a_borrowed_model_outlive_the_backend_that_was_tried(
    zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_unsound(backend: LlamaBackend, *_: object) -> Tuning:
        alone = replace(backend.options, parallel=1)
        return Tuning(alone, "one at a time: made up", is_sound=False)

    monkeypatch.setattr("cbatch.backend.load.company.try_company", find_unsound)
    architecture = {"general.architecture": "stablelm"}
    llama = llama_cpp.Llama(str(zoo("stablelm")), n_ctx=256, verbose=False)
    with closing(llama):
        adapter = write_lora(tmp_path / "a.gguf", zoo("stablelm"), std=0.5, metadata=architecture)
        with cbatch.load(llama, parallel=4, adapters={"a": adapter}) as engine:
            assert (engine.parallel, engine.company) == (1, "one at a time: made up")
            greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
            prompt = BatchPrompt(tokens=(5, 6, 7), options=greedy)
            plain, adapted = (
                engine.submit(prompt, options={"adapter": name}).result() for name in (None, "a")
            )
        assert plain.token_ids != adapted.token_ids
        assert llama.create_completion([5, 6, 7], max_tokens=2)


@pytest.mark.parametrize(
    ("name", "parallel"), [("cogvlm", 1), ("cogvlm", 4), ("falcon-h1", 1), ("llama", 4)]
)
def test_description_is_what_an_engine_finds(
    zoo: Callable[[str], Path], name: str, parallel: int
) -> None:
    with cbatch.load(zoo(name), parallel=parallel) as engine:
        company, n_slots = engine.company, engine.parallel
    options = EngineOptions(parallel=parallel)
    if name == "cogvlm":  # in one slot, too
        assert "one by one" in company
    for asked in ({"asks_probe": True}, {"asks_probe": False, "asks_company": True}):
        found = describe_model(zoo(name), options, **asked)
        assert (found["company"], found["parallel"]) == (company, n_slots)
    is_known = name == "llama"
    found = describe_model(zoo(name), options, asks_probe=False)
    assert found["company"] == (company if is_known else None)


def test_plain_transformers_are_not_tried(test_model: Path, zoo: Callable[[str], Path]) -> None:
    known = {}
    for name in ("llama", "llama-moe", "gemma3", "mamba", "olmo2"):
        with closing(open_model(zoo(name))) as model:
            known[name] = find_known(model, EngineOptions(parallel=2)) is not None
    assert known == {
        "llama": True,
        "llama-moe": False,
        "gemma3": False,
        "mamba": False,
        "olmo2": False,
    }
    with cbatch.load(test_model, parallel=2) as engine:
        assert engine.company.startswith("together: llama")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gemma3", {"parallel": 4, "n_batch": 4}),
        ("mamba", {"parallel": 1, "n_batch": 1}),
        ("llama-moe", {"parallel": 8, "n_batch": 9, "kv": "unified"}),
        ("llama-moe", {"parallel": 128, "n_ctx": 256, "kv": "unified"}),
    ],
)
def test_trial_fits_whatever_sizes_are_asked_for(
    name: str, given: dict[str, Any], zoo: Callable[[str], Path]
) -> None:
    with cbatch.load(zoo(name), **given) as engine:
        is_one = given["parallel"] == 1
        assert engine.company.startswith("one at a time: there" if is_one else "together: a trial")
        assert engine.parallel == given["parallel"]


def test_company_is_tried_once_for_a_machine(
    zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("cogvlm", "qwen35"):
        said = []
        for _ in range(2):
            with cbatch.load(zoo(name), parallel=3) as engine:
                said.append((engine.company, engine.parallel))
            monkeypatch.setattr("cbatch.backend.load.company._CompanyTrial", None)
            monkeypatch.setattr("cbatch.backend.load.load_trial.run_apart", None)
        assert said[0] == said[1]
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
