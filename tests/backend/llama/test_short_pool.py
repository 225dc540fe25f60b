"""Short sequences in a pool of their own: the same answers as in the slots' memory, wherever they move."""

from __future__ import annotations

import random
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.llama import short_pool
from cbatch.backend.llama.adapters import Adapters
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.memory import LlamaCells
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.short_pool import N_CELLS
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import BROKEN_ROW, Slot, StepPlan
from cbatch.engine_options import EngineOptions
from cbatch.errors import EngineError, ModelLoadError
from tests.backend.damage import without_numbers
from tests.backend.lora import write_lora
from tests.backend.slots import PROMPT, FailingStepper, bind_all, chunk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cbatch.core.span import Span
    from tests.backend.slots import MakeBackend
    from tests.conftest import SynthFactory

pytestmark = pytest.mark.real

SIZES: dict[str, Any] = {"parallel": 4, "n_ctx": 4 * N_CELLS}
BROKEN = 5
"""A token whose embedding is no number in the model of `broken_model`."""


@pytest.fixture(scope="module")
def broken_model(synth: SynthFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that computes no numbers of token 5, nor of what attends to it."""
    path = tmp_path_factory.mktemp("broken") / "model.gguf"
    return without_numbers(synth(type="f16", tied=False), path, BROKEN)


def with_pool(make: MakeBackend, **given: Any) -> LlamaBackend:
    backend = make("partitioned", has_short_pool=True, **{**SIZES, **given})
    assert backend.short_pool is not None
    return backend


def is_short(backend: LlamaBackend) -> bool:
    assert backend.short_pool is not None
    return backend.short_pool.is_used


def check_cells(backend: LlamaBackend) -> None:
    """What slots hold is as the backend counts it, and the other memory is empty."""
    short = backend.short_pool
    assert short is not None
    own = LlamaCells(backend.ctx)
    used, other = (short.cells, own) if short.is_used else (own, short.cells)
    slots = range(backend.n_slots)
    assert [used.count(slot) for slot in slots] == backend.n_cells
    assert not any(other.count(slot) for slot in slots)


def rows_of(backend: LlamaBackend, chunks: Sequence[Span], **orders: Any) -> list[Any]:
    result = backend.run(StepPlan(tuple(chunks), **orders))
    assert (result.code, result.n_steps, result.lost) == (0, 1, ())
    return [backend.logits(c.slot) for c in chunks]


class Twins:
    """A backend with a pool and one without, which do the same by chance."""

    def __init__(self, plain: LlamaBackend, pooled: LlamaBackend, seed: int) -> None:
        self.both, self.dice = (plain, pooled), random.Random(seed)
        self.kept = list[int]()  # cells of each key, from 1 on
        self.places = set[bool]()

    def step(self) -> None:
        """Change what a slot holds, compute beside a newcomer, and compare the logits."""
        dice, held = self.dice, list(self.both[0].n_cells)
        orders = self.orders(held) if any(held) else {}
        newcomer, n_new = dice.randrange(len(held)), dice.choice([1, 2, 9, 40, 300])
        wanted = [n_new if slot == newcomer else int(n > 0) for slot, n in enumerate(held)]
        chunks = [
            chunk(slot, n, dice.choices(range(300, 900), k=n_tokens))
            for slot, (n, n_tokens) in enumerate(zip(held, wanted, strict=True))
            if n_tokens and n + n_tokens <= N_CELLS
        ]
        if not chunks or dice.random() < 0.03:
            for backend in self.both:
                backend.run(StepPlan((), clears=tuple(Slot(i) for i in range(len(held)))))
            return
        plain, pooled = (rows_of(backend, chunks, **orders) for backend in self.both)
        for a, b in zip(plain, pooled, strict=True):
            assert ((a - b) ** 2).mean() < 0.02 * a.var()
        check_cells(self.both[1])
        self.places.add(is_short(self.both[1]))

    def orders(self, held: list[int]) -> dict[str, Any]:
        """Return one order by chance, and count the cells that it leaves."""
        dice = self.dice
        source = Slot(dice.choice([i for i, n in enumerate(held) if n]))
        empty = [Slot(i) for i, n in enumerate(held) if not n]
        n, what = (
            held[source],
            dice.choice(["clear", "trim", "copy", "save", "load", "shift", "none"]),
        )
        if what == "clear":
            held[source] = 0
            return {"clears": (source,)}
        if what == "trim":
            held[source] = dice.randint(1, n)
            return {"trims": ((source, held[source]),)}
        if what == "copy" and empty:
            held[empty[0]] = dice.randint(1, n)
            return {"copies": ((source, empty[0], held[empty[0]]),)}
        if what == "save":
            self.kept.append(n)
            held[source] = 0
            return {"saves": ((source, len(self.kept)),), "clears": (source,)}
        if what == "load" and self.kept and empty:
            key = dice.randint(1, len(self.kept))
            held[empty[0]] = self.kept[key - 1]
            return {"loads": ((empty[0], key, held[empty[0]]),)}
        if what == "shift" and n > 2:
            held[source] = n - 1
            return {"shifts": ((source, 1, 1),)}
        return {}


@pytest.mark.parametrize(("seed", "flash_attn"), [(0, "on"), (1, "off"), (2, "on")])
def test_same_logits_wherever_sequences_are(make: MakeBackend, flash_attn: str, seed: int) -> None:
    given = {**SIZES, "flash_attn": flash_attn}
    twins = Twins(make("partitioned", **given), with_pool(make, **given), seed)
    for _ in range(80):
        twins.step()
    assert twins.places == {True, False}


def test_sequences_leave_a_full_pool_and_come_back_to_half_a_one(
    make: MakeBackend,
) -> None:
    backend = with_pool(make)
    n_long = N_CELLS // 2
    where = []
    for slot, n in ((0, n_long), (1, n_long - 2), (2, 3)):
        backend.run(StepPlan((chunk(slot, 0, [300 + i for i in range(n)]),)))
        where.append((is_short(backend), sum(backend.n_cells)))
        check_cells(backend)
    assert where == [(True, n_long), (True, N_CELLS - 2), (False, N_CELLS + 1)]
    backend.run(StepPlan((chunk(2, 3, [7]),), clears=(Slot(0),)))
    assert not is_short(backend)
    backend.run(StepPlan((chunk(2, 4, [7]),), trims=((Slot(1), n_long - 5),)))
    assert (is_short(backend), backend.n_cells) == (True, [0, n_long - 5, 5, 0])
    check_cells(backend)


def test_run_of_many_steps_ends_where_the_pool_is_full(make: MakeBackend) -> None:
    backend = with_pool(make)
    backend.run(StepPlan((chunk(0, 0, list(range(300, 800))),)))
    backend.run(StepPlan((chunk(1, 0, list(range(300, 800))),)))
    n_left = N_CELLS - sum(backend.n_cells)
    chunks = (chunk(0, 500, [7]), chunk(1, 500, [7]))
    result = backend.run(StepPlan(chunks, n_steps=64))
    assert (is_short(backend), result.n_steps) == (True, n_left // 2)
    again = tuple(chunk(s, backend.n_cells[s], result.tokens[s][-1:]) for s in (0, 1))
    assert backend.run(StepPlan(again, n_steps=64)).n_steps == 64
    assert not is_short(backend)


def test_prompt_that_is_cut_is_computed_in_the_slots_own_memory(make: MakeBackend) -> None:
    backend = with_pool(make)
    piece = chunk(0, 0, PROMPT)
    piece.has_output = False
    backend.run(StepPlan((piece,)))
    assert not is_short(backend)
    backend.run(StepPlan((chunk(0, len(PROMPT), [7]),)))
    assert is_short(backend)


def test_context_made_anew_has_an_empty_pool(make: MakeBackend) -> None:
    backend = with_pool(make)
    first = backend.run(StepPlan((chunk(0, 0, PROMPT),))).tokens
    backend.run(StepPlan((), is_rebuild=True))
    bind_all(backend)
    check_cells(backend)
    assert backend.run(StepPlan((chunk(0, 0, PROMPT),))).tokens == first
    assert is_short(backend)


def test_step_that_fails_in_the_pool_leaves_what_is_known(make: MakeBackend) -> None:
    failures: Any = [None, (-3, 0), None]

    def stepper(ctx: Any, **sizes: Any) -> FailingStepper:
        return FailingStepper(ctx, failures, **sizes)

    backend = with_pool(make, stepper=stepper)
    failures[:0] = [None]  # of the first bind
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    while True:
        result = backend.run(StepPlan((chunk(1, backend.n_cells[1], PROMPT),)))
        check_cells(backend)
        if result.code:
            break
    assert result.n_kept == (backend.n_cells[1],)


@pytest.mark.parametrize(("n_steps", "n_neighbour"), [(1, 100), (8, 1)])
def test_row_that_is_no_number_breaks_no_neighbour(
    broken_model: Path, n_steps: int, n_neighbour: int
) -> None:
    neighbour = [300 + 3 * i for i in range(n_neighbour)]
    options = EngineOptions(**SIZES, n_threads=1, kv="partitioned")
    tuning = Tuning(options, has_short_pool=True)
    found = []
    for company in ([], [BROKEN]):
        backend = LlamaBackend(open_model(broken_model), tuning)
        bind_all(backend)
        backend.run(StepPlan((chunk(0, 0, PROMPT),)))
        chunks = [chunk(0, len(PROMPT), [7]), chunk(1, 0, neighbour)]
        chunks += [chunk(2, 0, [300] * 70 + company)] if company else []
        result = backend.run(StepPlan(tuple(chunks), n_steps=n_steps))
        assert is_short(backend) == (not company)
        check_cells(backend)
        found.append([row[0] for row in result.tokens])
        if company:
            assert result.n_steps == 1
            clears = (Slot(2),)
            later = [
                chunk(i, backend.n_cells[i], row[-1:]) for i, row in enumerate(result.tokens[:2])
            ]
            rows = backend.run(StepPlan(tuple(later), clears=clears)).tokens
            assert [BROKEN_ROW] not in rows
            backend.run(StepPlan((), clears=(Slot(0), Slot(1))))
            backend.run(StepPlan((chunk(0, 0, PROMPT),)))
            assert is_short(backend)
        backend.close()
    assert found[1] == [*found[0], BROKEN_ROW]


def test_row_that_is_computed_anew_has_its_adapters(broken_model: Path, tmp_path: Path) -> None:
    file = write_lora(tmp_path / "a.gguf", broken_model, std=0.5)
    adapters = (("a", 1.0),)
    found = []
    for used, company in (((), []), (adapters, []), (adapters, [BROKEN])):
        model = open_model(broken_model)
        options = EngineOptions(**SIZES, n_threads=1, kv="partitioned")
        tuning = Tuning(options, has_short_pool=True)
        backend = LlamaBackend(model, tuning, adapters=Adapters(model, {"a": file}))
        bind_all(backend)
        backend.run(StepPlan((chunk(0, 0, PROMPT),), adapters=used))
        chunks = [chunk(0, len(PROMPT), [7]), chunk(1, 0, PROMPT[:3])]
        chunks += [chunk(2, 0, [300] * 70 + company)] if company else []
        tokens = backend.run(StepPlan(tuple(chunks), adapters=used)).tokens
        assert is_short(backend) == (not company)
        found.append([row[0] for row in tokens])
        backend.close()
    plain, alone, together = found
    assert together == [*alone, BROKEN_ROW]
    assert all(a != b for a, b in zip(plain, alone, strict=True))


def test_memory_that_cannot_move_is_told_or_stays_where_it_is(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, own = with_pool(make), with_pool(make)
    piece = chunk(0, 0, PROMPT)
    piece.has_output = False
    own.run(StepPlan((piece,)))
    monkeypatch.setattr(LlamaCells, "save", lambda *_: None)
    own.run(StepPlan((chunk(0, len(PROMPT), [7]),)))
    assert not is_short(own)
    check_cells(own)
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))  # nothing is there to move
    long = list(range(300, 810))
    backend.run(StepPlan((chunk(1, 0, long),)))
    with pytest.raises(EngineError, match="out of memory while moving short sequences"):
        backend.run(StepPlan((chunk(2, 0, long),)))


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a pool": ("unified", {}),
    "states": ("recurrent", {}),
    "one slot": ("partitioned", {"parallel": 1}),
    "exact": ("partitioned", {"exact": True}),
    "blocks": ("partitioned", {"cache_type_k": "q8_0"}),
    "few cells": ("partitioned", {"n_ctx": 2 * N_CELLS}),
}


@pytest.mark.parametrize("setting", OTHERS)
def test_other_memory_has_no_pool(make: MakeBackend, setting: str) -> None:
    kind, given = OTHERS[setting]
    backend = make(kind, has_short_pool=True, **{**SIZES, **given})
    assert backend.short_pool is None
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))


@pytest.mark.parametrize(("n_window", "has_pool"), [(1024, True), (1280, False)])
def test_pool_has_the_rope_factors_of_the_slots(
    longrope_model: Path, n_window: int, has_pool: bool
) -> None:
    found = []
    for has_short_pool in (False, True):
        options = EngineOptions(parallel=4, ctx_per_seq=n_window, kv="partitioned", n_threads=1)
        tuning = Tuning(options, has_short_pool=has_short_pool)
        with closing(LlamaBackend(open_model(longrope_model), tuning)) as backend:
            bind_all(backend)
            found += rows_of(backend, [chunk(0, 0, [5 + i for i in range(40)])])
            assert (backend.short_pool is not None) == (has_short_pool and has_pool)
    assert found[1] == pytest.approx(found[0], abs=0.01)


def test_context_that_cannot_be_made_costs_nothing(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ModelLoadError("no memory")

    monkeypatch.setattr(short_pool, "make_context", refuse)
    backend = make("partitioned", has_short_pool=True, **SIZES)
    assert backend.short_pool is None
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
