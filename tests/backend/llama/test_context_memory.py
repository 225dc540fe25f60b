"""Cells that move on a real llama.cpp: out of the middle, from slot to slot, in from elsewhere."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest

from cbatch.backend.llama.context import make_context
from cbatch.backend.llama.memory import LlamaCells
from cbatch.core.plan import Slot, StepPlan, StepResult
from cbatch.errors import PlanError
from tests.backend.slots import (
    CELL_SETTINGS,
    KEYS_IN_BLOCKS,
    OTHER,
    PROMPT,
    WIDE,
    after,
    chunk,
    failing,
    go_on,
    held,
    is_refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.llama_backend import LlamaBackend
    from tests.backend.slots import MakeBackend

LONG = [300 + 11 * i % 700 for i in range(150)]  # more than half of a slot's 256 cells
N_KEPT, N_OUT = 4, 7
SHIFTS = ((Slot(1), N_KEPT, N_OUT),)
N_LEFT = len(PROMPT) - N_OUT

BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl")
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **CELL_SETTINGS,
    "flash attention": ("partitioned", {"flash_attn": "on"}),
}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return how cells came into slots, noted from now on: `copy` by llama.cpp, or `load` from host memory."""
    noted: list[str] = []

    def watch(name: str) -> None:
        plain = getattr(LlamaCells, name)

        def do(cells: LlamaCells, *args: Any) -> Any:
            noted.append(name)
            return plain(cells, *args)

        monkeypatch.setattr(LlamaCells, name, do)

    watch("copy")
    watch("load")
    return noted


class ByHand:
    """A second context of a backend's model and settings, without anything of ours around `llama_decode`."""

    def __init__(self, backend: LlamaBackend) -> None:
        self._pointer = make_context(backend.model, backend.options, 1)
        self._n_vocab = backend.vocab.n_vocab
        self.memory = llama_cpp.llama_get_memory(self._pointer)

    def next_token(self, slot: int, start: int, tokens: Sequence[int]) -> int:
        """Compute tokens; return the likeliest next one."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
            batch.logits[i] = i == len(tokens) - 1
        assert llama_cpp.llama_decode(self._pointer, batch) == 0
        llama_cpp.llama_batch_free(batch)
        row = llama_cpp.llama_get_logits_ith(self._pointer, len(tokens) - 1)
        return int(np.ctypeslib.as_array(row, (self._n_vocab,)).argmax())

    def go_on(self, slot: int, start: int, tokens: Sequence[int], n: int) -> list[int]:
        """Compute tokens and the next ones; return `n` of these."""
        output: list[int] = []
        while len(output) < n:
            output.append(self.next_token(slot, start, tokens))
            start, tokens = start + len(tokens), output[-1:]
        return output

    def shift(self, slot: int, n_kept: int, n: int) -> None:
        """Take cells out and have those behind move up."""
        assert llama_cpp.llama_memory_seq_rm(self.memory, slot, n_kept, n_kept + n)
        llama_cpp.llama_memory_seq_add(self.memory, slot, n_kept + n, -1, -n)

    def close(self) -> None:
        """Free the context."""
        llama_cpp.llama_free(self._pointer)


def fill(backend: LlamaBackend, *slots: int) -> None:
    """Compute something in each of three slots, or in these of them."""
    for slot in slots or range(3):
        backend.run(StepPlan((chunk(slot, 0, (OTHER, PROMPT, OTHER[::-1])[slot]),)))


def shifted_by_hand(backend: LlamaBackend, n: int, tokens: Sequence[int] = PROMPT) -> list[int]:
    """The next `n` tokens after token 7 behind what `SHIFTS` leaves of others, as llama.cpp alone gives them."""
    with closing(ByHand(backend)) as by_hand:
        by_hand.next_token(1, 0, tokens)
        by_hand.shift(1, N_KEPT, N_OUT)
        return by_hand.go_on(1, len(tokens) - N_OUT, [7], n)


def is_whole(backend: LlamaBackend, slot: int) -> bool:
    """Whether a slot's cells in llama.cpp begin at position 0 and are as many as the backend counts."""
    memory, n_cells = llama_cpp.llama_get_memory(backend.ctx), backend.n_cells[slot]
    begins = llama_cpp.llama_memory_seq_pos_min(memory, slot) == 0
    state = LlamaCells(backend.ctx).save(slot)
    n_bytes = backend.memory.n_saved_bytes(n_cells)
    return not n_cells or (begins and state is not None and len(state.data) == n_bytes)


# ---- out of the middle ----


@pytest.mark.parametrize("setting", SETTINGS)
def test_shifted_cells_go_on_as_when_moved_by_hand(make: MakeBackend, setting: str) -> None:
    kind, given = SETTINGS[setting]
    backend = make(kind, **given)
    assert backend.memory.can_shift
    expected = shifted_by_hand(backend, 9)
    fill(backend)
    assert go_on(backend, 1, [7], 9, shifts=SHIFTS, start=N_LEFT) == expected
    assert held(backend) == [len(OTHER), N_LEFT + 9, len(OTHER)]
    assert all(is_whole(backend, slot) for slot in range(3))


@pytest.mark.parametrize("given", [{}, KEYS_IN_BLOCKS], ids=["plain", "keys in blocks"])
def test_shift_leaves_neighbours_as_they_are_to_the_bit(
    make: MakeBackend, given: dict[str, Any]
) -> None:
    backends = [make("partitioned", exact=True, **given) for _ in range(2)]
    logits = []
    for backend, shifts in zip(backends, ((), SHIFTS), strict=True):
        fill(backend)
        start = N_LEFT if shifts else len(PROMPT)
        chunks = (chunk(0, len(OTHER), [7]), chunk(1, start, [7]), chunk(2, len(OTHER), [7]))
        backend.run(StepPlan(chunks, shifts=shifts))
        logits.append([backend.logits(Slot(slot)).tobytes() for slot in range(3)])
    is_same = [undisturbed == beside for undisturbed, beside in zip(*logits, strict=True)]
    assert is_same == [True, False, True]


@pytest.mark.parametrize("kind", ["partitioned", "unified"])
def test_shift_at_either_end_is_counted(make: MakeBackend, kind: str) -> None:
    backend = make(kind)
    fill(backend)
    for n_kept, n in ((0, 1), (0, 19), (19, 1), (5, 15), (0, 20)):
        backend.run(StepPlan((), shifts=((Slot(1), n_kept, n),)))
        assert held(backend) == [len(OTHER), 20 - n, len(OTHER)]
        assert all(is_whole(backend, slot) for slot in range(3))
        assert backend.run(StepPlan((chunk(1, 20 - n, [7]),))).code == 0
        backend.run(StepPlan((chunk(1, 0, PROMPT),), clears=(Slot(1),)))


@pytest.mark.parametrize(
    ("n_prompt", "shifts"),
    [(20, ((Slot(1), 2, 3), (Slot(1), 6, 5))), (15, SHIFTS), (20, ((Slot(1), 5, 15),))],
    ids=["two", "after a trim", "to the end"],
)
def test_shifts_of_what_is_left_are_those_by_hand(
    make: MakeBackend, n_prompt: int, shifts: tuple[tuple[Slot, int, int], ...]
) -> None:
    backend, n_left = make("partitioned"), n_prompt
    with closing(ByHand(backend)) as by_hand:
        by_hand.next_token(1, 0, PROMPT[:n_prompt])
        for _, n_kept, n in shifts:
            by_hand.shift(1, n_kept, n)
            n_left -= n
        expected = by_hand.go_on(1, n_left, [7], 6)
    fill(backend)
    orders: dict[str, Any] = {"trims": ((Slot(1), n_prompt),), "shifts": shifts}
    assert go_on(backend, 1, [7], 6, start=n_left, **orders) == expected
    assert is_whole(backend, 1)


@pytest.mark.parametrize(("kind", "code"), [("partitioned", 1), ("unified", 2)])
def test_cells_that_wait_to_move_are_not_saved(make: MakeBackend, kind: str, code: int) -> None:
    backend, failures = failing(make, kind)
    expected = shifted_by_hand(backend, 9)
    fill(backend)
    failures.append((code, 0))
    result = backend.run(StepPlan((chunk(1, N_LEFT, [7]),), shifts=SHIFTS))
    assert (result.code, held(backend)[1]) == (code, N_LEFT)
    result = backend.run(StepPlan((), saves=((Slot(1), 5), (Slot(0), 6))))
    assert result.lost == (5,)
    assert go_on(backend, 1, [7], 4) == expected[:4]
    plan = StepPlan((), saves=((Slot(1), 7),), clears=(Slot(0), Slot(1)))
    assert backend.run(plan).lost == ()
    n_cells = N_LEFT + 4
    loads = ((Slot(0), 7, n_cells),)
    assert go_on(backend, 0, expected[3:4], 5, loads=loads, start=n_cells) == expected[4:]


@pytest.mark.parametrize("kind", ["partitioned", "unified"])
def test_shift_beside_a_copy_and_a_load_of_others(make: MakeBackend, kind: str) -> None:
    # with flash attention it makes a difference where in a pool the cells are
    backend = make(kind, parallel=5, n_ctx=1280, flash_attn="off")
    shifted = shifted_by_hand(backend, 5)
    loaded = after(backend, 4, OTHER, 5)
    copied = after(backend, 3, OTHER[::-1], 5)
    backend.run(StepPlan((), clears=(Slot(3), Slot(4))))
    fill(backend)
    backend.run(StepPlan((), saves=((Slot(0), 1),), clears=(Slot(0),)))
    n = len(OTHER)
    orders: dict[str, Any] = {"copies": ((Slot(2), Slot(3), n),), "loads": ((Slot(4), 1, n),)}
    assert go_on(backend, 1, [7], 5, start=N_LEFT, shifts=SHIFTS, **orders) == shifted
    assert go_on(backend, 3, [7], 5) == copied
    assert go_on(backend, 4, [7], 5) == loaded
    assert held(backend)[0] == 0
    assert all(is_whole(backend, slot) for slot in range(5))


def test_slot_is_copied_before_it_is_shifted(make: MakeBackend) -> None:
    backend = make("partitioned")
    shifted = shifted_by_hand(backend, 5)
    copied = after(backend, 2, PROMPT, 5)
    fill(backend, 0, 1)
    orders: dict[str, Any] = {"clears": (Slot(2),), "copies": ((Slot(1), Slot(2), 20),)}
    assert go_on(backend, 1, [7], 5, start=N_LEFT, shifts=SHIFTS, **orders) == shifted
    assert go_on(backend, 2, [7], 5) == copied


@pytest.mark.parametrize("tokens", [PROMPT, LONG], ids=["part", "most"])
@pytest.mark.parametrize("way", ["copied", "loaded"])
def test_cells_that_come_in_are_shifted_after_that(
    make: MakeBackend, tokens: Sequence[int], way: str
) -> None:
    backend = make("partitioned")
    expected = shifted_by_hand(backend, 5, tokens)
    backend.run(StepPlan((chunk(0, 0, tokens),)))
    backend.run(StepPlan((), saves=((Slot(0), 1),)))
    n = len(tokens)
    loads, copies = ((Slot(1), 1, n),), ((Slot(0), Slot(1), n),)
    orders: dict[str, Any] = {"loads": loads} if way == "loaded" else {"copies": copies}
    assert go_on(backend, 1, [7], 5, start=n - N_OUT, shifts=SHIFTS, **orders) == expected
    assert is_whole(backend, 1)
    assert go_on(backend, 0, [7], 5) == after(backend, 2, tokens, 5)


def test_shift_of_cells_that_were_lost_is_left_out(make: MakeBackend) -> None:
    backend = make("partitioned")
    shifted = shifted_by_hand(backend, 5)
    backend.run(StepPlan((chunk(1, 0, PROMPT),)))
    backend.import_state(1, np.zeros(64, np.uint8), 20)
    plan = StepPlan((), loads=((Slot(2), 1, 20),), shifts=((Slot(2), 4, 7), *SHIFTS))
    assert backend.run(plan).lost == (1,)
    assert held(backend) == [0, N_LEFT, 0]
    assert go_on(backend, 1, [7], 5) == shifted


@pytest.mark.parametrize(
    ("given", "can_shift"),
    [
        ({"cache_type_k": "f32"}, True),
        ({"cache_type_k": "bf16"}, False),
        ({"cache_type_k": "q8_0"}, False),
        ({"cache_type_k": "q8_0", "shape": {"n_embd": 192, "n_head": 2}}, False),
        *(({"cache_type_k": name, "shape": WIDE}, True) for name in BLOCKS),
    ],
)
def test_keys_that_llama_cpp_cannot_turn_are_not_shifted(
    make: MakeBackend, given: dict[str, Any], *, can_shift: bool
) -> None:
    backend = make("partitioned", **given)
    assert backend.memory.can_shift == can_shift
    backend.run(StepPlan((chunk(1, 0, PROMPT),)))
    shift = StepPlan((chunk(1, N_LEFT, [7]),), shifts=SHIFTS)
    assert is_refused(backend, shift) == (not can_shift)


@pytest.mark.parametrize("kind", ["recurrent", "partitioned", "keys not rotated"])
def test_memory_that_cannot_shift_says_so_and_refuses(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    given: dict[str, Any] = {}
    if kind == "partitioned":
        monkeypatch.setattr(llama_cpp, "llama_memory_can_shift", lambda memory: False)
    elif kind != "recurrent":
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
        kind, given = "partitioned", KEYS_IN_BLOCKS
    backend = make(kind, **given)
    assert not backend.memory.can_shift
    [token] = go_on(backend, 1, PROMPT, 1)
    assert is_refused(backend, StepPlan((), shifts=SHIFTS))
    assert held(backend) == [0, len(PROMPT), 0]
    assert go_on(backend, 0, [*PROMPT, token], 3) == go_on(backend, 1, [token], 3)


# ---- from slot to slot ----

COPIES: dict[str, tuple[str, dict[str, Any], Sequence[int], str, int]] = {
    "part of a slot": ("partitioned", {}, PROMPT, "load", 11),
    "half of a slot": ("partitioned", {}, LONG[:128], "load", 0),
    "a cell more than half": ("partitioned", {}, LONG[:129], "copy", 0),
    "most of a slot": ("partitioned", {}, LONG, "copy", 11),
    "part of a pool": ("unified", {}, PROMPT, "copy", 1),
    "part of a slot, exact": ("partitioned", {"exact": True}, PROMPT, "load", 1),
    "most of a slot, exact": ("partitioned", {"exact": True}, LONG, "copy", 1),
    "part of a slot, in blocks": ("partitioned", KEYS_IN_BLOCKS, PROMPT, "load", 1),
}


@pytest.mark.parametrize("case", COPIES)
def test_copied_beginning_goes_on_as_if_computed(
    make: MakeBackend, ways: list[str], case: str
) -> None:
    kind, given, tokens, way, n_less = COPIES[case]
    backend = make(kind, **given)
    n = len(tokens) - n_less
    expected = after(backend, 1, tokens[:n], 6)
    backend.run(StepPlan((chunk(0, 0, tokens),), clears=(Slot(1),)))
    ways.clear()
    copies = ((Slot(0), Slot(1), n), (Slot(0), Slot(2), n))
    assert backend.run(StepPlan((), copies=copies)).move_s > 0
    assert backend.run(StepPlan((), trims=((Slot(0), len(tokens)),))).move_s == 0
    assert ways == [way] * 2
    assert held(backend) == [len(tokens), n, n]
    assert go_on(backend, 1, [7], 6) == expected
    assert go_on(backend, 2, [7], 6) == expected
    assert is_whole(backend, 1)


@pytest.mark.parametrize("tokens", [PROMPT, LONG], ids=["part", "most"])
def test_copies_give_the_bits_that_computing_gives_under_exact(
    make: MakeBackend, tokens: Sequence[int]
) -> None:
    alone, backend = make("partitioned", exact=True), make("partitioned", exact=True)
    go_on(alone, 2, tokens, 1)
    go_on(alone, 2, [7], 1)
    expected = alone.logits(Slot(2)).tobytes()
    go_on(backend, 0, tokens, 1)
    n = len(tokens)
    chunks = tuple(chunk(slot, n, [7]) for slot in range(3))
    backend.run(StepPlan(chunks, copies=((Slot(0), Slot(1), n), (Slot(0), Slot(2), n))))
    assert [backend.logits(Slot(slot)).tobytes() == expected for slot in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("partitioned", PROMPT), ("partitioned", LONG), ("unified", PROMPT)],
    ids=["part", "most", "pool"],
)
def test_copy_of_a_copy_in_one_plan(make: MakeBackend, kind: str, tokens: Sequence[int]) -> None:
    backend = make(kind)
    backend.run(StepPlan((chunk(2, 0, tokens),)))
    expected = go_on(backend, 2, [7], 5, start=9, trims=((Slot(2), 9),))
    backend.run(StepPlan((chunk(0, 0, tokens),), clears=(Slot(2),)))
    copies = ((Slot(0), Slot(1), 15), (Slot(1), Slot(2), 9))
    assert go_on(backend, 2, [7], 5, start=9, copies=copies) == expected
    assert held(backend) == [len(tokens), 15, 14]
    assert all(is_whole(backend, slot) for slot in range(3))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_copies_of_two_sources_do_not_mix(make: MakeBackend, order: tuple[int, ...]) -> None:
    backend = make("partitioned", parallel=5, n_ctx=1280)
    short = after(backend, 2, PROMPT, 4)
    long = after(backend, 3, LONG, 4)
    orders: dict[str, Any] = {"clears": (Slot(2), Slot(3))}
    backend.run(StepPlan((chunk(0, 0, PROMPT), chunk(1, 0, LONG)), **orders))
    all_copies = (
        (Slot(0), Slot(2), len(PROMPT)),
        (Slot(1), Slot(3), len(LONG)),
        (Slot(0), Slot(4), len(PROMPT)),
    )
    backend.run(StepPlan((), copies=tuple(all_copies[i] for i in order)))
    assert held(backend) == [20, 150, 20, 150, 20]
    outputs = [go_on(backend, slot, [7], 4) for slot in (2, 3, 4)]
    assert outputs == [short, long, short]


def waiting(make: MakeBackend) -> LlamaBackend:
    """A backend whose slot 1 waits for the bytes of `LONG` in slot 0, for the step failed; `PROMPT` is in slot 2."""
    backend, failures = failing(make, "partitioned")
    backend.run(StepPlan((chunk(0, 0, LONG), chunk(2, 0, PROMPT))))
    backend.run(StepPlan((), saves=((Slot(2), 3),)))
    failures.append((1, 0))
    plan = StepPlan((chunk(1, len(LONG), [7]),), copies=((Slot(0), Slot(1), len(LONG)),))
    assert backend.run(plan).code == 1
    assert held(backend) == [len(LONG), len(LONG), len(PROMPT)]
    return backend


def test_copy_over_one_that_waits_takes_no_stale_bytes(make: MakeBackend) -> None:
    backend = waiting(make)
    orders: dict[str, Any] = {"clears": (Slot(1),), "copies": ((Slot(2), Slot(1), 20),)}
    expected = after(make("partitioned"), 0, PROMPT, 5)
    assert go_on(backend, 1, [7], 5, start=20, **orders) == expected
    assert go_on(backend, 2, [7], 5) == expected


def test_copy_of_one_that_waits_has_its_bytes(make: MakeBackend) -> None:
    backend = waiting(make)
    copies = ((Slot(1), Slot(2), 30),)
    output = go_on(backend, 2, [7], 5, start=30, clears=(Slot(2),), copies=copies)
    assert output == after(make("partitioned"), 0, LONG[:30], 5)
    assert held(backend) == [len(LONG), len(LONG), 35]


def test_copy_that_waits_is_done_though_its_source_is_emptied(make: MakeBackend) -> None:
    backend = waiting(make)
    chunks = (chunk(0, 0, OTHER), chunk(1, len(LONG), [7]))
    result = backend.run(StepPlan(chunks, clears=(Slot(0),)))
    clean = make("partitioned")
    assert result.tokens[1] == after(clean, 0, LONG, 1)
    assert result.tokens[0] == go_on(clean, 1, OTHER, 1)


def test_nothing_is_saved_from_a_copy_that_waits_nor_loaded_beside_it(make: MakeBackend) -> None:
    backend = waiting(make)
    assert backend.run(StepPlan((), saves=((Slot(1), 5), (Slot(0), 6)))).lost == (5,)
    result = backend.run(StepPlan((), clears=(Slot(2),), loads=((Slot(2), 3, 20),)))
    assert (result.lost, held(backend)[2]) == ((3,), 0)
    assert backend.run(StepPlan((chunk(1, len(LONG), [7]),))).code == 0
    assert backend.run(StepPlan((), saves=((Slot(1), 7),))).lost == ()
    loads = ((Slot(2), 6, len(LONG)),)
    output = go_on(backend, 2, [7], 3, start=len(LONG), loads=loads)
    assert output == after(make("partitioned"), 0, LONG, 3)


@pytest.mark.parametrize(
    "failing_call", ["llama_state_seq_get_data_ext", "llama_state_seq_set_data_ext"]
)
def test_copy_without_host_memory_is_done_by_llama_cpp(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch, ways: list[str], failing_call: str
) -> None:
    backend = make("partitioned")
    expected = after(backend, 1, PROMPT, 5)
    backend.run(StepPlan((chunk(0, 0, PROMPT),), clears=(Slot(1),)))
    monkeypatch.setattr(llama_cpp, failing_call, lambda *args: 0)
    ways.clear()
    copies = ((Slot(0), Slot(1), 20), (Slot(0), Slot(2), 20))
    assert go_on(backend, 1, [7], 5, start=20, copies=copies) == expected
    assert go_on(backend, 2, [7], 5) == expected
    assert ways[-1] == "copy"


def test_nothing_is_copied_where_a_load_failed(make: MakeBackend) -> None:
    backend = make("partitioned")
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    backend.import_state(1, np.zeros(64, np.uint8), 20)
    orders: dict[str, Any] = {"copies": ((Slot(0), Slot(2), 9),), "loads": ((Slot(1), 1, 20),)}
    assert backend.run(StepPlan((chunk(2, 9, [7]),), **orders)) == StepResult([[]], 0, lost=(1,))
    assert held(backend) == [20, 0, 0]


@pytest.mark.parametrize("kind", ["recurrent", "partitioned"])
def test_memory_that_cannot_copy_refuses(make: MakeBackend, kind: str) -> None:
    backend = make(kind, **({} if kind == "recurrent" else {"parallel": 1}))
    assert not backend.memory.can_copy
    backend.run(StepPlan((chunk(0, 0, PROMPT),)))
    with pytest.raises(PlanError, match=r"cannot be copied|slot of the plan is not"):
        backend.run(StepPlan((), copies=((Slot(0), Slot(1), 20),)))
