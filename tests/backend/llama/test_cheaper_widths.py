"""Steps that are filled where that is faster: what is tried and settled, and on a real llama.cpp what it leaves."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from cbatch.backend.llama import cheaper_widths
from cbatch.backend.llama.cheaper_widths import (
    MOST_LOST,
    MOST_OF_NATURAL,
    N_LOST,
    N_PAIRS,
    N_STEPS_TRIED,
    CheaperWidths,
)
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.pad_rows import PAD_TOKEN
from cbatch.backend.load import find_tuning
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import BROKEN_ROW, N_STEPS_MAX, Slot, StepPlan, StepResult
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.loading import load
from tests.backend.damage import without_numbers
from tests.backend.slots import FailingStepper, bound_backends, chunk, held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.conftest import SynthFactory

    MakeBackend = Callable[..., LlamaBackend]

pytestmark = pytest.mark.cpu("pads are for kernels of processors")

N_SLOTS = 8
BY_FOURS = {1: 2.0, 2: 9.0, 3: 9.0, 4: 4.0, 5: 9.0, 6: 9.0, 7: 9.0, 8: 8.0}
"""Seconds of a step of so many rows: full fours are cheap."""
BY_ROWS = {n: float(n) for n in range(1, N_SLOTS + 1)}
N_BEFORE = int(N_LOST / MOST_LOST)
"""Steps before the first trial."""
N_RUNS = 2 * N_PAIRS
"""Of a trial whose series are one run each."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: how many rows of sequences it had, the slots of its pad rows, and its most steps."""

    n_rows: int
    pads: list[int]
    n_steps: int


@dataclass(eq=False, slots=True)
class Machine:
    """What `CheaperWidths` asks a memory, and what computes: a step takes the seconds of its width."""

    step_s: dict[int, float]
    full: set[int] = field(default_factory=set)
    runs: list[Run] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    """What the next runs return, 0 after the last."""
    n_done_most: int = 1000
    """Steps after which runs end."""
    now: float = 0.0

    def clock(self) -> float:
        return self.now

    def has_pad_room(self, slot: Slot, n_steps: int, n_longest: int) -> bool:
        return slot not in self.full

    def place_pad(self, slot: Slot) -> int:
        return 10 + slot

    def compute(
        self,
        rows: Sequence[Span],
        pads: Sequence[Span],
        n_steps: int,
        slice_s: float,
        n_drafts: int,
    ) -> StepResult:
        assert not (n_drafts and pads)
        assert all(p.start == 10 + p.slot and p.inputs == (PAD_TOKEN,) for p in pads)
        self.runs.append(Run(len(rows), [p.slot for p in pads], n_steps))
        code = self.codes.pop(0) if self.codes else 0
        n_done = 0 if code else min(n_steps, self.n_done_most)
        self.now += n_done * self.step_s[len(rows) + len(pads)]
        return StepResult([[7]] * len(rows), n_done, code)


def widths(machine: Machine, n_most: int = N_SLOTS, *, n_before: int = N_BEFORE) -> CheaperWidths:
    """Return widths of 8 slots after so many steps of a row."""
    found = CheaperWidths(cast("Any", machine), n_slots=N_SLOTS, n_most=n_most, clock=machine.clock)
    for _ in range(n_before):
        found.run(plan(0, n_steps=1), lambda *_: StepResult([[7]], 1))
    return found


def plan(*slots: int, n_steps: int = N_STEPS_MAX, start: int = 3, **given: Any) -> StepPlan:
    return StepPlan(tuple(chunk(slot, start, [7]) for slot in slots), n_steps=n_steps, **given)


def do(found: CheaperWidths, machine: Machine, n: int, wanted: StepPlan) -> list[Run]:
    """Run a plan so many times; return these runs."""
    n_before = len(machine.runs)
    for _ in range(n):
        found.run(wanted, machine.compute)
    return machine.runs[n_before:]


# ---- what is tried and settled ----


def test_ways_take_turns_in_short_series_and_the_cheaper_one_stays() -> None:
    machine = Machine(BY_FOURS)
    found = widths(machine)
    tried = do(found, machine, N_RUNS, plan(0, 1, 2, 3, 4))
    assert [r.pads for r in tried] == [[], [5, 6, 7]] * N_PAIRS
    assert {r.n_steps for r in tried} == {N_STEPS_TRIED}
    settled = do(found, machine, 5, plan(0, 1, 2, 3, 4))
    assert settled == [Run(5, [5, 6, 7], N_STEPS_MAX)] * 5


def test_series_of_dearer_pads_is_the_only_one() -> None:
    machine = Machine(BY_ROWS)
    found = widths(machine)
    runs = do(found, machine, 999, plan(0, 1, 2))
    assert runs == [Run(3, [], 8), Run(3, [3], 8), *[Run(3, [], N_STEPS_MAX)] * 997]


def test_nothing_is_tried_or_shortened_before_the_steps_that_allow_a_loss() -> None:
    machine = Machine(BY_FOURS)
    found = widths(machine, n_before=0)
    n = N_BEFORE // N_STEPS_MAX + 1
    assert do(found, machine, n, plan(0, 1, 2)) == [Run(3, [], N_STEPS_MAX)] * n
    assert do(found, machine, 2, plan(0, 1, 2)) == [Run(3, [], 8), Run(3, [3], 8)]


@pytest.mark.parametrize("n_done_most", [1, 3, 64])
def test_trials_without_gain_cost_less_than_a_hundredth(n_done_most: int) -> None:
    machine = Machine({n: 4.0 + n for n in range(1, N_SLOTS + 1)}, n_done_most=n_done_most)
    found = widths(machine, n_before=0)
    natural_s, n_tried = 0.0, set[int]()
    for i in range(30_000 // n_done_most):
        slots = range(2 + i // 20 % 6)
        found.run(plan(*slots, start=2 ** (i // 120 % 11)), machine.compute)
        run = machine.runs[-1]
        n_tried |= {run.n_rows} if run.pads else set()
        natural_s += min(run.n_steps, n_done_most) * machine.step_s[run.n_rows]
        assert machine.now <= 1.01 * natural_s
    assert n_tried


def test_other_steps_in_between_begin_a_trial_anew() -> None:
    machine = Machine(BY_FOURS)
    found = widths(machine, n_before=9 * N_BEFORE)
    do(found, machine, N_RUNS - 1, plan(0, 1, 2))
    assert do(found, machine, 1, plan(0, 1)) == [Run(2, [], 8)]
    tried = do(found, machine, N_RUNS, plan(0, 1, 2))
    assert [r.pads for r in tried] == [[], [3]] * N_PAIRS
    assert do(found, machine, 1, plan(0, 1, 2)) == [Run(3, [3], N_STEPS_MAX)]


@pytest.mark.parametrize(
    ("times", "is_kept"),
    [
        ([9.0, 8.0, 9.0, 8.0, 9.0, 8.0], True),
        ([90.0, 8.0, 9.0, 5.0, 9.0, 8.0], True),
        ([9.0, 8.0, 9.0, 9.5, 9.0, 8.0], False),
        ([9.0, 8.0, 8.1, 8.0, 9.0, 8.0], False),
        ([9.0, 8.0, 18.0, 16.0, 9.0, 8.0], True),
        ([1.0, MOST_OF_NATURAL] * 3, True),
        ([1.0, 0.98] * 3, False),
    ],
)
def test_pads_stay_where_every_pair_showed_a_gain(times: list[float], is_kept: bool) -> None:
    machine = Machine({})
    found = widths(machine)
    for step_s in [9.0, 8.0] * (N_PAIRS - 3) + times:
        machine.step_s = {5: step_s, 8: step_s}
        do(found, machine, 1, plan(0, 1, 2, 3, 4))
    assert bool(do(found, machine, 1, plan(0, 1, 2, 3, 4))[0].pads) == is_kept


def test_each_number_of_rows_and_class_of_histories_is_tried_for_itself() -> None:
    machine = Machine({**BY_FOURS, 6: 1.0})
    found = widths(machine, n_before=99 * N_BEFORE)
    for n in (5, 6):
        do(found, machine, N_RUNS, plan(*range(n)))
    assert do(found, machine, 1, plan(*range(5)))[0].pads == [5, 6, 7]
    assert do(found, machine, 1, plan(*range(6)))[0].pads == []
    machine.step_s = BY_ROWS
    do(found, machine, 2, plan(*range(5), start=256))
    assert do(found, machine, 1, plan(*range(5), start=511))[0].pads == []
    assert do(found, machine, 1, plan(*range(5), start=255))[0].pads == [5, 6, 7]


def test_failed_run_teaches_nothing() -> None:
    machine = Machine(BY_FOURS, codes=[1, 0, -3, 2])
    found = widths(machine, n_before=9 * N_BEFORE)
    tried = do(found, machine, N_RUNS + 3, plan(0, 1, 2))
    assert [bool(r.pads) for r in tried[:6]] == [False, False, True, True, True, False]
    assert do(found, machine, 1, plan(0, 1, 2)) == [Run(3, [3], N_STEPS_MAX)]


@pytest.mark.parametrize(
    "wanted",
    [
        plan(0),
        plan(0, 1, 2, 3),
        plan(*range(8)),
        plan(0, 2),
        plan(0, 1, 3),
        plan(0, 1, 2, adapters=(("a", 1.0),)),
        StepPlan((chunk(0, 3, [7]), chunk(1, 3, [7, 8]))),
        StepPlan((chunk(0, 3, [7]), Span(Slot(1), 3, (7,), has_output=False))),
    ],
    ids=["one row", "four", "all", "apart", "a gap", "adapters", "prompt", "part of a prompt"],
)
def test_other_steps_are_left_as_they_are(wanted: StepPlan) -> None:
    machine = Machine(BY_FOURS)
    runs = do(widths(machine), machine, 9, wanted)
    assert runs == [Run(len(wanted.spans), [], wanted.n_steps)] * 9


# ---- which slots are padded ----


@pytest.mark.parametrize(
    ("slots", "full", "padded"),
    [
        ((0, 1, 2), (), [3]),
        ((5, 6, 7), (), [4]),
        ((2, 3), (), [4, 5]),
        ((2, 3), (5,), [1, 4]),
        ((2, 3), (4,), [0, 1]),
        ((2, 3), (1, 5), []),
    ],
    ids=str,
)
def test_pads_are_idle_slots_with_room_beside_the_rows(
    slots: tuple[int, ...], full: tuple[int, ...], padded: list[int]
) -> None:
    machine = Machine(dict.fromkeys(range(9), 1.0), set(full))
    runs = do(widths(machine), machine, 2, plan(*slots))
    assert [r.pads for r in runs] == [[], padded]


# ---- on a real llama.cpp ----

SIZES: dict[str, Any] = {"parallel": N_SLOTS, "ctx_per_seq": 512, "kv": "partitioned"}


@pytest.fixture(autouse=True)
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have real backends try pads at once, in series of one run, and take any pair for a gain."""
    if {"make", "test_model"} & {*request.fixturenames}:
        monkeypatch.setattr(cheaper_widths, "MOST_LOST", 1e9)
        monkeypatch.setattr(cheaper_widths, "N_STEPS_TRIED", 4)
        monkeypatch.setattr(cheaper_widths, "MOST_OF_NATURAL", 1e9)


@pytest.fixture
def make(synth: SynthFactory) -> Iterator[MakeBackend]:
    """Return a factory of backends of 8 slots of 512 cells whose steps may be filled."""

    def make_backend(
        path: Path | None = None, stepper: Any = None, *, has_short_pool: bool = False, **given: Any
    ) -> LlamaBackend:
        options = EngineOptions(**{**SIZES, "n_threads": 1, **given})
        model = open_model(path or synth(type="q8_0"))
        tuning = Tuning(options, may_widen=True, has_short_pool=has_short_pool)
        return bound(LlamaBackend(model, tuning, stepper=stepper))

    with bound_backends() as bound:
        yield make_backend


def fill(backend: LlamaBackend, *lengths: int) -> None:
    """Compute a text of each length in the slots from the first on."""
    for slot, n in enumerate(lengths):
        if n:
            backend.run(StepPlan((chunk(slot, 0, [300 + (slot + i) % 90 for i in range(n)]),)))


def decode(backend: LlamaBackend, *slots: int, n_steps: int = 4) -> StepResult:
    rows = tuple(chunk(slot, backend.n_cells[slot], [7]) for slot in slots)
    return backend.run(StepPlan(rows, n_steps=n_steps))


def padded(backend: LlamaBackend) -> list[int]:
    return [c.slot for c in backend.last_chunks if not c.has_output]


def test_pads_leave_idle_slots_bit_for_bit(make: MakeBackend) -> None:
    backend = make()
    fill(backend, 20, 20, 20, 33)
    states = []
    for key in (1, 2):
        backend.run(StepPlan((), saves=((Slot(3), key),)))
        data = backend.export_state(key)
        assert data is not None
        states.append(data.tobytes())
        n_pads = [decode(backend, 0, 1, 2).n_pad_rows for _ in range(2)]
        assert n_pads == [0, 4]
        assert padded(backend) == [3]
        assert held(backend)[3:] == [33, 0, 0, 0, 0]
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("n_row", "n_idle", "n_steps", "has_room"),
    [
        (20, 0, 64, True),
        (20, 190, 64, True),
        (20, 200, 60, False),
        (20, 256, 4, False),
        (400, 256, 4, True),
        (400, 500, 16, False),  # the window
    ],
)
def test_pads_stand_where_attention_sees_no_more_cells(
    make: MakeBackend, n_row: int, n_idle: int, n_steps: int, has_room: bool
) -> None:
    backend = make()
    fill(backend, n_row, n_row, n_row, n_idle)
    for _ in range(2):
        decode(backend, 0, 1, 2, n_steps=n_steps)
    assert bool(padded(backend)) == has_room
    assert held(backend)[3] == n_idle


@pytest.mark.parametrize("failure", [(-3, 0), (2, 3), None], ids=str)
def test_failed_and_interrupted_runs_leave_no_cells_of_pads(
    make: MakeBackend, failure: tuple[int, int] | None
) -> None:
    failures: Any = []
    backend = make(stepper=partial(FailingStepper, failures=failures))
    fill(backend, 20, 20, 20, 9)
    decode(backend, 0, 1, 2)
    failures.append(failure)
    if failure is None:
        backend.interrupt()
    result = decode(backend, 0, 1, 2)
    assert result.code == (failure[0] if failure else 0)
    assert padded(backend) == [3]
    assert held(backend)[3] == 9


@pytest.fixture
def broken(synth: SynthFactory, tmp_path: Path) -> Callable[[int], Path]:
    """Return a factory of models that compute no numbers of a token."""

    def make_broken(token: int) -> Path:
        return without_numbers(synth(type="f16", tied=False), tmp_path / "broken.gguf", token)

    return make_broken


def test_pad_token_without_numbers_is_never_computed(
    broken: Callable[[int], Path], make: MakeBackend
) -> None:
    backend = make(broken(PAD_TOKEN))
    fill(backend, 20, 20, 20)
    for _ in range(2):
        assert decode(backend, 0, 1, 2).n_pad_rows == 0


def test_slot_whose_cells_may_be_no_numbers_has_no_pads(
    broken: Callable[[int], Path], make: MakeBackend
) -> None:
    backend = make(broken(5))
    fill(backend, 20, 20, 20, 20)
    assert backend.run(StepPlan((chunk(3, 20, [5]),))).tokens == [[BROKEN_ROW]]
    for _ in range(2):
        assert decode(backend, 0, 1, 2).n_pad_rows == 0
    backend.run(StepPlan((), clears=(Slot(3),)))
    decode(backend, 0, 1, 2)
    assert decode(backend, 0, 1, 2).n_pad_rows == 4


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("llama", {"kv": "unified"}),
        ("llama", {"exact": True}),
        ("llama", {"n_ubatch": 3}),
        ("mamba", {}),
        ("gemma3", {}),
    ],
    ids=["pool", "exact", "ubatch", "states", "windows"],
)
def test_other_memory_is_left_as_it_is(
    zoo: Callable[[str], Path], make: MakeBackend, name: str, given: dict[str, Any]
) -> None:
    backend = make(zoo(name), **given)
    for slot in range(3):
        backend.run(StepPlan((chunk(slot, 0, [7, 8, 9]),)))
    for _ in range(2):
        assert decode(backend, 0, 1, 2).n_pad_rows == 0


def test_cells_in_a_pool_for_short_sequences_have_no_pads(make: MakeBackend) -> None:
    backend = make(ctx_per_seq=1024, has_short_pool=True)
    assert backend.short_pool is not None
    fill(backend, 20, 20, 20)
    for _ in range(2):
        assert decode(backend, 0, 1, 2).n_pad_rows == 0
    assert backend.short_pool.is_used
    fill(backend, 0, 0, 0, 0, 1000)
    for _ in range(2):
        decode(backend, 0, 1, 2)
    assert (padded(backend), backend.short_pool.is_used) == ([3], False)


@pytest.mark.real
@pytest.mark.parametrize("is_plain", [True, False])
def test_engine_answers_as_without_pads_and_counts_them(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    prompts = [f"Tell me about the number {i}." for i in range(5)]
    options = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}
    found = []
    for may_widen in (False, is_plain):
        monkeypatch.setattr(find_tuning, "has_plain_weights", lambda _, is_on=may_widen: is_on)
        with closing(load(test_model, **SIZES)) as engine:
            found.append([r.token_ids for r in engine.run(prompts, options=options).results()])
            assert bool(engine.stats().n_pad_rows) == may_widen
    assert found[0] == found[1]
