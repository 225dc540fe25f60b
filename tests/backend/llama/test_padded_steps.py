"""Steps with pad rows on a real llama.cpp: what they leave in the cells, and whose results are whose."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.llama.context import sequences_of
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.memory import LlamaCells
from cbatch.backend.llama.model import LlamaModel
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.native import NativeStepper
from cbatch.backend.llama.pad_rows import RowShape
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import N_STEPS_MAX, Binding, Slot, StepPlan, StepResult
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.options import GREEDY, RunOptions
from tests.backend.slots import bound_backends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.conftest import SynthFactory

    MakeBackend = Callable[..., LlamaBackend]

N_SLOTS, N_WINDOW = 5, 256
SHAPES = [RowShape(2, 1), RowShape(8, 8)]
TEXTS = [[300 + 7 * i + 11 * slot for i in range(20 + slot)] for slot in range(N_SLOTS)]
LONGER = [400 + i for i in range(30)]


@pytest.fixture
def make(synth: SynthFactory) -> Iterator[MakeBackend]:
    """Return a factory of backends with pad rows: 5 slots of 256 cells, all bound to greedy sampling."""

    def make_backend(shape: RowShape, *, stepper: Any = None) -> LlamaBackend:
        options = EngineOptions(parallel=N_SLOTS, ctx_per_seq=100, n_threads=1, exact=True)
        tuning = Tuning(options, shape=shape)
        backend = bound(LlamaBackend(open_model(synth()), tuning, stepper=stepper))
        assert backend.n_window == N_WINDOW
        return backend

    with bound_backends() as bound:
        yield make_backend


def bind(backend: LlamaBackend, **given: Any) -> None:
    binds = tuple(Binding(Slot(i), 0, GREEDY, (), **given) for i in range(N_SLOTS))
    backend.run(StepPlan((), binds=binds))


def row(backend: LlamaBackend, slot: int, *tokens: int) -> Span:
    """A slot's next chunk, of token 7 where none are given."""
    return Span(Slot(slot), backend.n_cells[slot], tokens or (7,), has_output=True)


def rows(backend: LlamaBackend, *slots: int) -> tuple[Span, ...]:
    return tuple(row(backend, slot) for slot in slots)


def fill(backend: LlamaBackend, *slots: int) -> None:
    """Compute a text in each of these slots."""
    for slot in slots:
        assert backend.run(StepPlan((row(backend, slot, *TEXTS[slot]),))).code == 0


def held(backend: LlamaBackend) -> list[int]:
    """Each slot's cells as llama.cpp has them, which must be as they are counted; sequences above must be empty."""
    cells, n_sequences = LlamaCells(backend.ctx), sequences_of(backend.options)
    found = [cells.count(i) for i in range(n_sequences)]
    assert n_sequences == 8
    assert found == [*backend.n_cells, 0, 0, 0]
    return found[:N_SLOTS]


def padded(backend: LlamaBackend) -> list[int]:
    """The slots and sequences that had pad rows in the last call."""
    return [c.slot for c in backend.last_chunks if not c.has_output]


# ---- cells ----


@pytest.mark.parametrize(
    ("shape", "slots", "n_steps"),
    [
        (RowShape(2, 1), (0,), N_STEPS_MAX),
        (RowShape(2, 1), (1, 3), 1),
        (RowShape(4, 4), (1, 3), N_STEPS_MAX),
        (RowShape(8, 8), (0,), 1),
        (RowShape(8, 8), (0, 1, 2, 3, 4), N_STEPS_MAX),
    ],
    ids=str,
)
def test_steps_leave_the_cells_that_are_counted(
    make: MakeBackend, shape: RowShape, slots: tuple[int, ...], n_steps: int
) -> None:
    backend = make(shape)
    fill(backend, 0, 2, 4)
    before = held(backend)
    result = backend.run(StepPlan(rows(backend, *slots), n_steps=n_steps))
    assert (result.code, result.n_steps) == (0, n_steps)
    assert len(backend.last_chunks) == shape.width(len(backend.last_chunks))
    assert len(padded(backend)) == len(backend.last_chunks) - len(slots)
    assert result.n_pad_rows == n_steps * len(padded(backend))
    assert held(backend) == [n + n_steps * (i in slots) for i, n in enumerate(before)]


def test_run_that_is_interrupted_leaves_the_cells_that_are_counted(make: MakeBackend) -> None:
    backend = make(RowShape(8, 8))
    fill(backend, 0, 2)
    backend.interrupt()
    result = backend.run(StepPlan(rows(backend, 1, 2), n_steps=9))
    assert (result.code, result.n_steps) == (0, 1)
    assert held(backend) == [len(TEXTS[0]), 1, len(TEXTS[2]) + 1, 0, 0]


@dataclass(eq=False, slots=True)
class Runs:
    """What native calls have computed, and what those from now on return."""

    codes: list[int] = field(default_factory=list)
    """One a call; 0 for what it did."""
    widths: list[int] = field(default_factory=list)
    """How many chunks each call had."""

    def stepper(self, ctx: Any, **sizes: Any) -> NativeStepper:
        runs = self

        class Stepper(NativeStepper):
            """Computes a step more than it says where it fails, as llama.cpp's earlier parts of a batch stay."""

            def run(self, spans: Sequence[Span], *args: Any, **given: Any) -> StepResult:
                runs.widths.append(len(spans))
                result = super().run(spans, *args, **given)
                code = runs.codes.pop(0) if runs.codes else 0
                if not code:
                    return result
                n_done = result.n_steps - 1
                tokens = [found[:n_done] for found in result.tokens]
                return replace(result, code=code, n_steps=n_done, tokens=tokens)

        return Stepper(ctx, **sizes)


@pytest.mark.parametrize(
    ("shape", "code", "n_steps"), [(SHAPES[0], 2, 5), (SHAPES[1], -3, 1)], ids=str
)
def test_failed_steps_leave_no_cells_of_pad_rows(
    make: MakeBackend, shape: RowShape, code: int, n_steps: int
) -> None:
    runs = Runs()
    backend = make(shape, stepper=runs.stepper)
    fill(backend, 0, 2, 3)
    before = held(backend)
    runs.codes = [code]
    plan = StepPlan(rows(backend, 1, 3), n_steps=n_steps)
    result = backend.run(plan)
    assert (result.code, result.n_steps) == (code, n_steps - 1)
    assert len(result.tokens) == 2
    assert padded(backend)
    found = held(backend)
    assert [found[0], found[2], found[4]] == [before[0], before[2], 0]
    assert list(result.n_kept) == [found[1], found[3]]
    assert backend.run(StepPlan(rows(backend, 0, 4))).code == 0
    held(backend)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_beside_rows_leave_the_cells_that_are_counted(
    make: MakeBackend, shape: RowShape
) -> None:
    runs = Runs()
    backend = make(shape, stepper=runs.stepper)
    fill(backend, 1, 4)
    runs.widths.clear()
    prompts = {0: LONGER, 3: TEXTS[3]}
    chunks = [*rows(backend, 1, 4), *(row(backend, i, *tokens) for i, tokens in prompts.items())]
    plan = StepPlan(tuple(sorted(chunks, key=lambda c: c.slot)))
    result = backend.run(plan)
    assert (result.code, result.n_steps) == (0, 1)
    assert runs.widths == [shape.width(4), 1, 1]
    assert result.n_pad_rows == shape.width(4) - 2
    assert held(backend) == [len(LONGER), len(TEXTS[1]) + 1, 0, len(TEXTS[3]), len(TEXTS[4]) + 1]
    alone = make(shape)
    fill(alone, 1, 4)
    by_slot = {c.slot: alone.run(StepPlan((c,))).tokens[0] for c in plan.spans}
    assert result.tokens == [by_slot[c.slot] for c in plan.spans]


@pytest.mark.parametrize("i_failing", [0, 2])
def test_failed_prompt_beside_rows_takes_all_back(make: MakeBackend, i_failing: int) -> None:
    runs = Runs()
    backend = make(RowShape(4, 4), stepper=runs.stepper)
    fill(backend, 1, 4)
    before = held(backend)
    runs.codes = [0] * i_failing + [-3]
    chunks = (row(backend, 0, *LONGER), *rows(backend, 1), row(backend, 3, 7, 8))
    assert backend.run(StepPlan(chunks)).code == -3
    found = held(backend)
    assert [found[2], found[4]] == [0, before[4]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_context_that_is_made_anew_is_padded_as_before(make: MakeBackend, shape: RowShape) -> None:
    backend = make(shape)
    fill(backend, 0, 2, 4)
    backend.run(StepPlan(rows(backend, 1), n_steps=3))
    binds = tuple(Binding(Slot(i), 0, GREEDY, ()) for i in range(N_SLOTS))
    backend.run(StepPlan((), is_rebuild=True, binds=binds))
    assert held(backend) == [0] * N_SLOTS
    fill(backend, 2)
    assert backend.run(StepPlan(rows(backend, 1), n_steps=3)).n_steps == 3
    assert padded(backend)
    assert held(backend) == [0, 3, len(TEXTS[2]), 0, 0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_longest_run_fits_beside_slots_that_are_full(make: MakeBackend, shape: RowShape) -> None:
    backend = make(shape)
    full = [300 + i for i in range(N_WINDOW)]
    for slot in (0, 2):
        backend.run(StepPlan((row(backend, slot, *full),)))
    result = backend.run(StepPlan(rows(backend, 1), n_steps=N_STEPS_MAX))
    assert (result.code, result.n_steps) == (0, N_STEPS_MAX)
    assert {0, 2} & set(padded(backend))
    assert held(backend) == [N_WINDOW, N_STEPS_MAX, N_WINDOW, 0, 0]


# ---- idle slots ----


def answer(backend: LlamaBackend, slot: int, n: int = 5) -> list[bytes]:
    """Go on with token 7 in a slot; return the logits of each step."""
    found = []
    for _ in range(n):
        assert backend.run(StepPlan(rows(backend, slot))).code == 0
        found.append(backend.logits(Slot(slot)).tobytes())
    return found


@pytest.mark.parametrize(("shape", "n_steps"), [*zip(SHAPES, (1, 30), strict=True)], ids=str)
def test_idle_slot_answers_as_if_no_pad_rows_had_been_there(
    make: MakeBackend, shape: RowShape, n_steps: int
) -> None:
    found = []
    for has_pads in (False, True):
        backend = make(shape)
        fill(backend, 1, 2)
        if has_pads:
            backend.run(StepPlan(rows(backend, 1), n_steps=n_steps))
            assert 2 in padded(backend)
        found.append(answer(backend, 2))
        assert held(backend) == [0, len(TEXTS[1]) + n_steps * has_pads, len(TEXTS[2]) + 5, 0, 0]
    assert found[0] == found[1]


@pytest.mark.parametrize("moves", ["copies", "shifts"])
def test_cells_that_move_with_a_step_are_not_hurt_by_its_pad_rows(
    make: MakeBackend, moves: str
) -> None:
    orders: dict[str, Any] = {
        "copies": ((Slot(1), Slot(2), len(TEXTS[1])),),
        "shifts": ((Slot(2), 4, 7),),
    }
    found = []
    for has_pads in (False, True):
        backend = make(RowShape(8, 8))
        fill(backend, 1, *(2,) * (moves == "shifts"))
        ordered = {moves: orders[moves]}
        if has_pads:
            backend.run(StepPlan(rows(backend, 0), **ordered))
            assert 2 in padded(backend)
        else:
            backend.run(StepPlan((), **ordered))
        held(backend)
        found.append(answer(backend, 2))
        held(backend)
    assert found[0] == found[1]


# ---- whose results are whose ----


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_and_logprobs_are_those_of_the_rows(make: MakeBackend, shape: RowShape) -> None:
    backend = make(shape)
    fill(backend, 1, 2, 4)
    bind(backend, n_logprobs=0)
    backend.run(StepPlan((), binds=(Binding(Slot(4), 0, GREEDY, ()),)))
    result = backend.run(StepPlan(rows(backend, 1, 3, 4)))
    assert padded(backend)
    for slot, [token] in zip((1, 3, 4), result.tokens, strict=True):
        assert token == int(backend.logits(Slot(slot)).argmax())
    reports = [[found.logprob for found in of_row] for of_row in result.logprobs]
    expected = [[own_logprob(backend, slot)] for slot in (1, 3)]
    assert reports == [*(pytest.approx(e, abs=1e-4) for e in expected), []]
    held(backend)
    several = backend.run(StepPlan(rows(backend, 1, 3), n_steps=4))
    assert [len(of_row) for of_row in several.logprobs] == [4, 4]
    held(backend)


def own_logprob(backend: LlamaBackend, slot: int) -> float:
    """The likeliest token's log-probability after a slot's last token."""
    logits = backend.logits(Slot(slot)).astype(np.float64)
    return float(logits.max() - np.log(np.exp(logits).sum()))


@pytest.mark.parametrize(
    ("shape", "has_prompt"), [*zip(SHAPES, (False, True), strict=True)], ids=str
)
def test_grammar_masks_are_those_of_the_rows(
    make: MakeBackend, shape: RowShape, has_prompt: bool
) -> None:
    backend = make(shape)
    fill(backend, 1, 2, 4)
    grammar = RunOptions(regex="[a]+").structure
    assert grammar is not None
    constraint = backend.grammars.compile(grammar)
    binds = tuple(Binding(Slot(i), 0, GREEDY, (), constraint=constraint) for i in (2, 4))
    backend.run(StepPlan((), binds=binds))
    prompts = (row(backend, 0, *LONGER),) * has_prompt
    result = backend.run(StepPlan((*prompts, *rows(backend, 1, 4))))
    texts = [backend.vocab.piece(found) for [found] in result.tokens[has_prompt:]]
    assert set(texts[1]) == {ord("a")}
    assert set(texts[0]) != {ord("a")}
    assert result.code == 0
    assert held(backend)[2] == len(TEXTS[2])


def test_learned_positions_leave_room_for_pad_rows(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaModel, "has_learned_positions", True)
    model = open_model(test_model)
    with closing(model):
        settings = EngineOptions(parallel=2, ctx_per_seq=model.n_ctx_train, exact=True)
        backend = LlamaBackend(model, Tuning(settings), owns_model=False)
        assert backend.n_window == model.n_ctx_train - N_STEPS_MAX
        backend.close()
