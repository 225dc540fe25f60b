"""Steps that are filled because it is faster: which, with what, and only where a trial says so."""

from __future__ import annotations

import random
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import pytest

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.pad_rows import PadRows
from cbatch.backend.llama.width_trials import WidthTrials
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import Binding, Chunk, Slot, StepPlan, StepResult
from cbatch.engine_options import EngineOptions
from cbatch.options import GREEDY
from tests.backend.llama.test_pad_rows import HeldCells, row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conftest import SynthFactory

N_SLOTS, N_WINDOW = 16, 64


def trials(n_cells: Sequence[int] = (0,) * N_SLOTS) -> WidthTrials:
    return WidthTrials(cast("Any", HeldCells(n_cells)), N_SLOTS, N_WINDOW)


def rows(n: int, first: int = 0) -> list[Chunk]:
    return [row(slot) for slot in range(first, first + n)]


def took(seconds: float, n_steps: int = 1, code: int = 0) -> StepResult:
    return StepResult([], n_steps, code, decode_s=seconds * n_steps)


def run(
    widths: WidthTrials, n: int, seconds: Callable[[int], float], n_runs: int = 1, first: int = 0
) -> list[int]:
    """Return how many rows each of these runs had, whose steps take what `seconds` says of that number."""
    seen = []
    for _ in range(n_runs):
        pads = widths.beside(rows(n, first), 4)
        seen.append(n + len(pads))
        widths.note(rows(n, first), pads, took(seconds(seen[-1]), 4))
    return seen


def in_passes(n_rows: int) -> float:
    """What a step takes where four rows are computed in one pass, and those left over in two."""
    return n_rows // 4 + 2 * (n_rows % 4 > 0)


@pytest.mark.parametrize("n", [5, 6, 7, 9, 10, 11, 13, 14, 15])
def test_trial_takes_turns_and_keeps_the_faster_kind(n: int) -> None:
    wide = n + -n % 4
    assert run(trials(), n, in_passes, 12) == [*[n, wide] * 4, *[wide] * 4]
    assert run(trials(), n, float, 12) == [*[n, wide] * 4, *[n] * 4]
    assert run(trials(), n, lambda n_rows: 1 - (n_rows > n) / 25, 9)[-1] == n, "not worth it"


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 12, 16])
def test_narrow_steps_and_those_of_whole_passes_are_left(n: int) -> None:
    assert run(trials(), n, in_passes, 20) == [n] * 20


def test_trials_are_made_again_later() -> None:
    widths = trials()
    assert run(widths, 6, in_passes, 308)[-1] == 8
    assert run(widths, 6, float, 10) == [8, 8, 6, 8, 6, 8, 6, 8, 6, 6]


def test_each_number_of_rows_has_its_trial() -> None:
    widths = trials()
    assert run(widths, 6, in_passes, 9)[-1] == 8
    assert run(widths, 7, in_passes, 2) == [7, 8]
    assert run(widths, 6, in_passes) == [8]


@pytest.mark.parametrize(
    ("first", "slots"), [(0, [6, 7]), (9, [15, 8]), (10, [8, 9]), (3, [9, 10])]
)
def test_pad_rows_stand_beside_the_rows(first: int, slots: list[int]) -> None:
    widths = trials(range(N_SLOTS))
    run(widths, 6, in_passes, 8)
    pads = widths.beside(rows(6, first), 4)
    assert sorted(c.slot for c in pads) == sorted(slots)
    assert all(c.start == c.slot and not c.has_output for c in pads)


@pytest.mark.parametrize(
    "given",
    [
        [*rows(3), *rows(3, 4)],
        [*rows(5), Chunk(Slot(5), 0, [1, 2], has_output=True)],
    ],
    ids=["gap", "prompt"],
)
def test_steps_with_gaps_or_prompts_are_left_and_teach_nothing(given: list[Chunk]) -> None:
    widths = trials()
    assert run(widths, 6, in_passes, 3) == [6, 8, 6]
    assert widths.beside(given, 1) == ()
    widths.note(given, (), took(0.0))
    assert run(widths, 6, in_passes, 6) == [8, 6, 8, 6, 8, 8]


def test_runs_that_failed_or_did_nothing_teach_nothing() -> None:
    widths = trials()
    assert run(widths, 6, in_passes, 1) == [6]
    for result in (took(0, 0), took(0, 1, code=2)):
        widths.note(rows(6), (), result)
    assert run(widths, 6, in_passes, 8)[-1] == 8


def test_no_pad_rows_without_slots_or_cells_for_them() -> None:
    widths = WidthTrials(cast("Any", HeldCells([0] * 7)), 7, N_WINDOW)
    assert run(widths, 6, in_passes, 10) == [6] * 10
    full = trials([0] * 6 + [N_WINDOW - 3] * 10)
    assert run(full, 6, in_passes, 10) == [6] * 10, "four steps do not fit"
    assert full.beside(rows(6), 3) == ()


def test_runs_of_a_trial_are_short() -> None:
    widths = trials()
    for _ in range(8):
        assert widths.most_steps(rows(6), 64) == 2
        assert widths.most_steps(rows(6), 1) == 1
        run(widths, 6, in_passes)
    assert widths.most_steps(rows(6), 64) == 64
    assert widths.most_steps(rows(8), 64) == 64


@pytest.mark.parametrize("n", [5, 6, 7])
def test_filled_steps_sample_what_they_did_and_leave_no_cells(
    synth: SynthFactory, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy texts of sequences with histories, beside idle slots with histories of their own, which stay."""
    dice = random.Random(n)
    texts = [dice.choices(range(1000), k=9 + i) for i in range(9)]

    def decode(*, trial: bool) -> tuple[list[list[int]], list[int]]:
        options = EngineOptions(parallel=9, ctx_per_seq=256, n_threads=1)
        if not trial:
            monkeypatch.setattr(WidthTrials, "beside", PadRows.beside)
        with closing(LlamaBackend(open_model(synth("test")), options)) as backend:
            binds = tuple(Binding(Slot(i), 0, GREEDY, ()) for i in range(9))
            histories = [Chunk(Slot(i), 0, t, has_output=True) for i, t in enumerate(texts)]
            last = backend.run(StepPlan(tuple(histories), binds=binds)).tokens
            said: list[list[int]] = [[] for _ in range(n)]
            widths = set()
            for _ in range(12):
                chunks = tuple(
                    Chunk(Slot(i), backend.n_cells[i], last[i][-1:], has_output=True)
                    for i in range(n)
                )
                last = backend.run(StepPlan(chunks, n_steps=4, slice_s=99.0)).tokens
                widths.add(len(backend.last_chunks))
                for i in range(n):
                    said[i] += last[i]
            assert widths == ({n, 8} if trial else {n})
            return said, list(backend.n_cells)

    tried, plain = decode(trial=True), decode(trial=False)
    assert tried == plain
    assert tried[1][n:] == [9 + i for i in range(n, 9)]
