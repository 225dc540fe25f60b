"""The exactness probe: what it finds where something is wrong, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.pad_rows import CHUNK_ALIGNMENT, RowShape
from cbatch.backend.llama.saved import SavedFormat
from cbatch.backend.load import probe as probe_module
from cbatch.backend.load.open_model import open_model
from cbatch.backend.load.probe import probe
from cbatch.core.plan import StepResult
from cbatch.engine import Engine
from cbatch.engine_options import BITWISE, EngineOptions, ScheduleOptions
from cbatch.loading import load
from cbatch.runtime.local import LocalRuntime
from tests.oracle.python_stepper import PythonStepper
from tests.runtime.backends import streams

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.core.plan import Slot
    from cbatch.core.span import Span

Touch = Callable[[Sequence["Span"], "Slot"], bool]


def options(*, exact: bool = True, parallel: int = 17, **given: Any) -> EngineOptions:
    return EngineOptions(
        **{"ctx_per_seq": 1024, "n_threads": 1, "exact": exact, "parallel": parallel, **given}
    )


@pytest.mark.parametrize("parallel", [1, 2, 17, 256])
def test_exact_settings_are_bitwise_whatever_the_slots(model: LlamaModel, parallel: int) -> None:
    assert probe(model, options(parallel=parallel)) == BITWISE


@pytest.mark.parametrize("given", [{"ctx_per_seq": 1}, {"n_batch": 17}, {"n_ubatch": 16}])
def test_small_windows_and_steps_are_probed_too(model: LlamaModel, given: dict[str, Any]) -> None:
    assert probe(model, options(**given)) == BITWISE


def test_nothing_is_promised_where_exactness_was_not_asked_for(model: LlamaModel) -> None:
    found = probe(model, options(exact=False, flash_attn="off"))
    assert found.startswith("not guaranteed: ")


@pytest.mark.parametrize(
    "given",
    [
        *({"kv": "unified", **sizes} for sizes in ({}, {"ctx_per_seq": 1}, {"n_ctx": 20_000})),
        {"kv": "unified", "ctx_per_seq": None, "n_ctx": 40},
        *({"parallel": 1 + (n > 1), "n_batch": n, "ctx_per_seq": 128} for n in (1, 2, 32)),
    ],
    ids=str,
)
def test_pools_and_small_steps_are_probed_too(model: LlamaModel, given: dict[str, Any]) -> None:
    found = probe(model, options(exact=False, **{"parallel": 5, **given}))
    assert found.startswith("not guaranteed: ")
    assert "could not run" not in found


# ---- what is wrong is found ----


def is_row_of(n_rows: int) -> Touch:
    return lambda chunks, slot: len(chunks) == n_rows and all(len(c.inputs) == 1 for c in chunks)


def has_prompt_of(n_tokens: int) -> Touch:
    return lambda chunks, slot: any(len(c.inputs) == n_tokens for c in chunks)


def is_merged(chunks: Sequence[Span], slot: Slot) -> bool:
    return sum(len(c.inputs) > 1 for c in chunks) > 1


def is_long_company(chunks: Sequence[Span], slot: Slot) -> bool:
    return slot > 0 and any(c.slot == slot and c.start >= 512 for c in chunks)


def replace_backend(monkeypatch: pytest.MonkeyPatch, touch: Touch) -> list[LlamaBackend]:
    """Let the probe see logits that differ in their last bit where `touch` says so."""
    made: list[LlamaBackend] = []

    class Touched(LlamaBackend):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            made.append(self)

        def logits(self, slot: Slot) -> NDArray[np.float32]:
            found = super().logits(slot)
            if touch(self.last_chunks, slot):
                found[7] = np.nextafter(found[7], np.float32(np.inf))
            return found

    monkeypatch.setattr(probe_module, "LlamaBackend", Touched)
    return made


@pytest.mark.parametrize("width", [2, 9, 16])
def test_last_bit_that_depends_on_the_width_is_found(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    made = replace_backend(monkeypatch, is_row_of(width))
    found = probe(model, options())
    assert f"with the width of a step ({width} rows against 1)" in found
    assert "q8_0" in found
    assert [backend.ctx for backend in made] == [None]


@pytest.mark.parametrize(
    ("touch", "words"),
    [
        (lambda chunks, slot: slot == 8, "with the width of a step"),
        (is_merged, "when prompts are merged into one step"),
        (has_prompt_of(70 % 33), "in chunks of 33"),
        (has_prompt_of(72), "computed again as a prompt"),
        (is_long_company, "when long prompts share a step"),
    ],
)
def test_last_bit_that_depends_on_company_or_chunks_is_found(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, touch: Touch, words: str
) -> None:
    # a model whose logits do not depend on anything: what differs is what is touched
    silence(monkeypatch)
    replace_backend(monkeypatch, touch)
    # in one pool, where a step with several prompts is one call
    assert words in probe(model, options(exact=False, flash_attn="off", kv="unified"))


@pytest.mark.parametrize("is_placed", [True, False])
def test_saved_cells_that_are_loaded_into_other_places_are_found(
    zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, *, is_placed: bool
) -> None:
    if not is_placed:
        monkeypatch.setattr(SavedFormat, "placed", lambda _, data: data)
    # packed weights have attention that rounds alike wherever cells lie
    with closing(open_model(zoo("gemma3"), EngineOptions(exact=True, repack="llama"))) as window:
        settings = options(parallel=4, flash_attn="on")
        found = probe(window, settings, shape=RowShape(2, 1, CHUNK_ALIGNMENT))
    assert (BITWISE if is_placed else "when saved cells are loaded") in found


def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LlamaBackend, "logits", lambda self, slot: np.ones(self.vocab.n_vocab, np.float32)
    )


def test_probe_that_finds_nothing_promises_nothing_without_exact(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    found = probe(model, options(exact=False))
    assert found.startswith("not guaranteed: the probe found no difference")
    assert "exact=True" in found


# ---- what stops it ----


def test_probe_that_cannot_run_says_why(test_model: Path) -> None:
    closed = open_model(test_model)
    closed.close()
    found = probe(closed, options())
    assert found.startswith("not guaranteed: the probe could not run: ")
    assert test_model.name in found


def test_failing_decode_is_no_answer(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(PythonStepper):
        n_runs = 0

        def run(self, spans: Sequence[Span], *args: Any, **given: Any) -> StepResult:
            self.n_runs += 1
            if self.n_runs > 4:
                return StepResult([], 0, -3)
            return super().run(spans, *args, **given)

    class Backend(LlamaBackend):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **{**given, "stepper": Failing})

    monkeypatch.setattr(probe_module, "LlamaBackend", Backend)
    found = probe(model, options())
    assert found == "not guaranteed: the probe could not run: llama_decode returned -3"


# ---- the engine's answer ----


def test_probe_leaves_the_engine_s_requests_alone(test_model: Path) -> None:
    given = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with load(test_model, parallel=4, exact=True, n_threads=1) as engine:
        expected = streams(engine.run(["a", "b", "c"], options=given))
        response = engine.run(["a", "b", "c"], options=given)
        assert engine.exactness == BITWISE
        assert streams(response) == expected


def test_exactness_is_asked_once() -> None:
    from cbatch.backend.fake import FakeBackend

    answers = iter(["bitwise"])
    schedule = ScheduleOptions()

    def opener(is_stopped: object) -> LocalRuntime:
        return LocalRuntime(FakeBackend(), schedule, exactness=lambda: next(answers))

    with Engine(opener=opener) as engine:
        assert [engine.exactness, engine.exactness] == ["bitwise"] * 2
    with Engine(FakeBackend()) as engine:
        assert engine.exactness == "not guaranteed: this backend has no probe"
