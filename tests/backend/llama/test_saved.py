"""The state that llama.cpp wrote of a sequence, read elsewhere: cut, laid out anew, refused if it is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.llama.layout import CELL_TYPES
from cbatch.backend.llama.memory import LlamaCells
from cbatch.backend.llama.saved import read_format
from cbatch.core.plan import BROKEN_ROW, Slot, StepPlan
from cbatch.core.span import Span
from tests.backend.slots import (
    CELL_SETTINGS,
    KEYS_IN_BLOCKS,
    KINDS,
    OTHER,
    PROMPT,
    WIDE,
    after,
    chunk,
    go_on,
    held,
    is_refused,
    saved,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.llama_backend import LlamaBackend
    from tests.backend.slots import MakeBackend

LONG = [300 + 11 * i % 700 for i in range(300)]  # more than a slot's 256 cells

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **CELL_SETTINGS,
    "values across": ("partitioned", {"flash_attn": "off"}),
    "values across in a pool": ("unified", {"flash_attn": "off"}),
}


def put(backend: LlamaBackend, slot: int, data: NDArray[np.uint8], n_cells: int) -> None:
    """Load the first of twenty cells."""
    backend.import_state(4, backend.validate_state(data, n_cells), n_cells)
    plan = StepPlan((), loads=((Slot(slot), 4, n_cells),), forgets=(4,))
    assert backend.run(plan).lost == ()


# ---- cut, and put in elsewhere ----


@pytest.mark.parametrize("setting", SETTINGS)
def test_first_of_saved_cells_are_those_of_a_slot_with_these_alone(
    make: MakeBackend, setting: str
) -> None:
    kind, given = SETTINGS[setting]
    for n in (1, 12, 20):
        backend = make(kind, **given)
        expected = after(backend, 2, PROMPT[:n], 5)
        data = saved(backend, PROMPT)
        put(backend, 1, data, n)
        assert go_on(backend, 1, [7], 5) == expected
        assert held(backend) == [0, n + 5, n + 5]
        assert backend.saved_keys == ()
        backend.run(StepPlan((chunk(0, 0, PROMPT),)))
        backend.run(StepPlan((), trims=((Slot(0), n),)))
        backend.run(StepPlan((), saves=((Slot(0), 1),)))
        alone = backend.export_state(1)
        assert alone is not None
        assert np.array_equal(backend.validate_state(data, n), alone)


def test_cells_in_the_order_of_a_pool_with_gaps_are_cut_by_their_positions(
    make: MakeBackend,
) -> None:
    backend = make("unified", n_ctx=256)
    backend.run(StepPlan((chunk(0, 0, PROMPT[:9]), chunk(1, 0, OTHER))))
    backend.run(StepPlan((chunk(0, 9, PROMPT[9:15]),)))
    backend.run(StepPlan((chunk(2, 0, LONG[:208]),), clears=(Slot(1),)))
    backend.run(StepPlan((), clears=(Slot(2),)))
    [token] = after(make("unified"), 0, PROMPT[:12], 1)
    backend.run(StepPlan((), saves=((Slot(0), 1),), clears=(Slot(0),)))
    data = backend.export_state(1)
    assert data is not None
    positions = data[16:][: 15 * 12].view("<i4")[::3]
    shuffled = shuffle(data, 15)
    assert positions.tolist() == [*range(15)]
    for cells in (data, shuffled):
        backend.import_state(4, backend.validate_state(cells, 12), 12)
        orders: dict[str, Any] = {"clears": (Slot(0),), "loads": ((Slot(0), 4, 12),)}
        assert go_on(backend, 0, [7], 1, start=12, **orders) == [token]


def shuffle(data: NDArray[np.uint8], n: int) -> NDArray[np.uint8]:
    """Put the cells of a pool, with keys and values of one head in f16 each, in the opposite order."""
    shuffled, start = data.copy(), 16

    def turn(n_bytes: int) -> None:
        nonlocal start
        rows = shuffled[start : start + n * n_bytes].reshape(n, n_bytes)
        rows[:] = rows[::-1].copy()
        start += n * n_bytes

    turn(12)
    start += 8
    while start < len(data):
        n_bytes = int(data[start + 4 : start + 12].view("<u8")[0])
        start += 12
        turn(n_bytes)
    return shuffled


WINDOW = {"n_window": 16}
PLACED: dict[str, dict[str, Any]] = {
    "rows": {"flash_attn": "on"},
    "values across": {"flash_attn": "off"},
    "blocks": {"flash_attn": "on", **KEYS_IN_BLOCKS, "shape": {**WIDE, **WINDOW}},
}


@pytest.mark.parametrize("setting", PLACED)
def test_cells_of_a_window_come_back_behind_zeros_for_those_that_left_it(
    make: MakeBackend, setting: str
) -> None:
    backend = make("partitioned", **{"shape": WINDOW, "exact": True, **PLACED[setting]})
    format = read_format(saved(backend, LONG[:1]))
    assert format is not None
    data = saved(backend, LONG[:100])
    placed = format.placed(data)
    assert len(data) < len(placed) == len(format.zeros(100))
    assert format.placed(placed) is placed
    put(backend, 0, data, 100)
    assert held(backend) == [100, 0, 0]
    backend.run(StepPlan((), saves=((Slot(0), 5),)))
    again = backend.export_state(5)
    assert again is not None
    assert np.array_equal(again, data)


@pytest.mark.parametrize("n_more", [-4, 4])
def test_cells_of_a_window_that_are_cut_off_or_too_many_are_lost(
    make: MakeBackend, n_more: int
) -> None:
    backend = make("partitioned", shape=WINDOW, exact=True)
    data = saved(backend, LONG[:100])
    backend.import_state(4, np.resize(data, len(data) + n_more), 100)
    assert backend.run(StepPlan((), loads=((Slot(1), 4, 100),))).lost == (4,)
    assert held(backend) == [0, 0, 0]


def test_cells_in_another_order_than_their_tokens_are_not_placed() -> None:
    found = read_format(np.frombuffer(b"ggsq\0\0\0\0" + cells_part(3), np.uint8))
    assert found is not None
    data = found.zeros(2)
    data[16:40].view("<i4")[[0, 3]] = 1, 0
    with pytest.raises(ValueError, match="order"):
        found.placed(data)


@pytest.mark.parametrize("kind", KINDS)
def test_cells_are_handed_out_once(make: MakeBackend, kind: str) -> None:
    backend = make(kind)
    assert backend.export_state(9) is None
    data = saved(backend, PROMPT)
    assert data.size == backend.memory.n_saved_bytes(20)
    assert backend.export_state(9) is None


@pytest.mark.parametrize(
    ("kind", "parallel", "n_ctx"),
    [
        *(("partitioned", 3, 1536), ("partitioned", 1, 256), ("unified", 2, 512)),
        *(("unified", 5, 1280), ("recurrent", 5, 1280)),
    ],
)
def test_cells_of_one_backend_go_on_in_another(
    make: MakeBackend, kind: str, parallel: int, n_ctx: int
) -> None:
    expected = after(make(kind), 0, PROMPT, 5)
    first, second = make(kind), make(kind, parallel=parallel, n_ctx=n_ctx)
    go_on(first, 1, OTHER, 2)
    slot = parallel - 1
    put(second, slot, saved(first, PROMPT, slot=2), 20)
    assert go_on(second, slot, [7], 5) == expected
    assert held(second) == [*[0] * slot, 25]


@pytest.mark.parametrize(
    ("given", "kinds", "said", "other"),
    [
        ({}, ("partitioned", "unified"), "on", "off"),
        ({}, ("unified", "partitioned"), "off", "on"),
        ({"cache_type_v": "f32"}, ("partitioned", "unified"), "off", "on"),
        ({"cache_type_k": "f32"}, ("unified", "partitioned"), "on", "off"),
    ],
    ids=str,
)
def test_values_that_lie_across_are_turned(
    make: MakeBackend, given: dict[str, Any], kinds: tuple[str, str], said: str, other: str
) -> None:
    first = make(kinds[0], flash_attn=said, **given)
    second = make(kinds[1], flash_attn=other, **given)
    data = saved(first, PROMPT)
    for n in (1, 12, 20):
        turned = second.validate_state(data, n)
        cut = first.validate_state(data, n)
        assert turned.size != cut.size, "the sizes of rows differ in length"
        assert np.array_equal(first.validate_state(turned, n)[8:], cut[8:])
        assert np.array_equal(second.validate_state(turned, n), turned)
    with pytest.raises(ValueError, match="are cut off"):
        second.validate_state(data[:-1].copy(), 12)
    expected = after(second, 0, PROMPT[:12], 3)
    put(second, 1, data, 12)
    found = go_on(second, 1, [7], 3)
    assert found == expected or not given, "in f16 flash attention rounds otherwise"


@pytest.mark.parametrize(
    ("given", "before", "behind"),
    [
        ({}, "partitioned", "unified"),
        ({"flash_attn": "off"}, "unified", "partitioned"),
        (KEYS_IN_BLOCKS, "partitioned", "unified"),
    ],
)
def test_cells_go_from_a_pool_into_a_slot_of_its_own_and_back(
    make: MakeBackend, given: dict[str, Any], before: str, behind: str
) -> None:
    first, second = make(before, **given), make(behind, **given)
    expected = after(second, 0, PROMPT, 5)
    put(second, 1, saved(first, PROMPT, slot=2), 20)
    assert go_on(second, 1, [7], 5) == expected
    assert first.fingerprint(()) == second.fingerprint(())


def test_more_cells_than_a_slot_has_are_cut_refused_or_lost(make: MakeBackend) -> None:
    backend, larger = make("partitioned"), make("partitioned", n_ctx=1536)
    data = saved(larger, LONG)
    backend.import_state(8, backend.validate_state(data, 200), 200)
    output = go_on(backend, 1, [7], 3, start=200, loads=((Slot(1), 8, 200),))
    assert output == after(larger, 0, LONG[:200], 3)
    backend.import_state(9, backend.validate_state(data, 300), 300)
    assert is_refused(backend, StepPlan((), loads=((Slot(2), 9, 300),)))
    assert backend.run(StepPlan((), loads=((Slot(2), 9, 200),))).lost == (9,)
    assert held(backend) == [0, 203, 0]


# ---- layouts ----


def cells_part(n_words: int, n_layers: int = 2, *, n_values: int = 2, n_slots: int = 3) -> bytes:
    """What a context writes of one cell in its first slot, rows of 64 bytes in f16."""
    entry = np.array([1, 0, 1, *[0] * (n_words - 2)], "<i4").tobytes()
    row = np.array([1, 64, 0], "<i4").tobytes() + bytes(range(64))
    form = np.array([0, n_layers], "<i4").tobytes()
    behind = bytes(4 * (n_slots - 1))
    return n_slots.to_bytes(4, "little") + entry + form + row * (n_layers + n_values) + behind


STATE_PART = np.array([1, 0, 0, 0, 2, *[0, 8, 0, 5, 6] * 4], "<i4").tobytes()
LAYOUTS: dict[str, tuple[bytes, ...]] = {
    "cells": (cells_part(3),),
    "cells of layers without values": (cells_part(3, n_values=0),),
    "cells with places": (cells_part(6),),
    "windows beside whole sequences": (cells_part(3, 1, n_values=1), cells_part(3)),
    "windows alone": (cells_part(3, 0, n_values=0), cells_part(3)),
    "two sets of keys": (cells_part(3, n_values=0), cells_part(3, n_values=0)),
    "states": (STATE_PART,),
    "states beside cells": (cells_part(3), STATE_PART),
    "states beside windows": (cells_part(3), cells_part(6, n_slots=1), STATE_PART),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_found_out_and_its_cells_come_back_as_they_were(name: str) -> None:
    data = np.frombuffer(b"ggsq\0\0\0\0" + b"".join(LAYOUTS[name]), np.uint8)
    found = read_format(data)
    assert found is not None
    assert len(found._parts) == len(LAYOUTS[name])
    assert found.cut(data, 1) is data
    for n_bytes in (1, 4, 100):
        assert read_format(np.append(data, np.ones(n_bytes, np.uint8))) is None


def test_memory_of_an_unknown_layout_cannot_check_and_refuses_cells(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make("partitioned").memory.can_check
    monkeypatch.setattr("cbatch.backend.llama.memory.read_format", lambda _: None)
    backend = make("partitioned")
    assert not backend.memory.can_check
    assert "does not know" in why_refused(backend, saved(backend, PROMPT))


# ---- refused ----


def why_refused(backend: LlamaBackend, data: NDArray[np.uint8], n_cells: int = 20) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        backend.validate_state(data, n_cells)
    return str(caught.value)


OTHER_CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "another shape of model": ("recurrent", {}),
    "keys of another type": ("partitioned", KEYS_IN_BLOCKS),
    "keys and values of another type": (
        "partitioned",
        {"cache_type_k": "f32", "cache_type_v": "f32"},
    ),
    "values of another type, which lie across here": (
        "partitioned",
        {"cache_type_v": "f32", "flash_attn": "on"},
    ),
    "values in blocks, which lie across here": (
        "partitioned",
        {"cache_type_v": "q8_0", "flash_attn": "on"},
    ),
}


@pytest.mark.parametrize("case", OTHER_CELLS)
def test_cells_of_other_settings_are_refused(make: MakeBackend, case: str) -> None:
    kind, given = OTHER_CELLS[case]
    backend, other = make("partitioned", flash_attn="off"), make(kind, **given)
    words = why_refused(backend, saved(other, PROMPT))
    assert kind == "recurrent" or "have another layout" in words
    assert kind != "recurrent" or why_refused(other, saved(backend, PROMPT))


@pytest.mark.parametrize("kind", KINDS)
def test_state_with_fewer_cells_than_said_is_lost(make: MakeBackend, kind: str) -> None:
    backend = make(kind)
    backend.import_state(4, backend.validate_state(saved(backend, PROMPT), 21), 21)
    assert backend.run(StepPlan((), loads=((Slot(1), 4, 21),))).lost == (4,)
    assert held(backend) == [0, 0, 0]


FIRST_POSITION = {"partitioned": 4, "unified": 4, "recurrent": 3}
"""Which word of a saved state it is."""


@pytest.mark.parametrize("kind", KINDS)
def test_more_or_fewer_bytes_and_a_wrong_count_are_refused(make: MakeBackend, kind: str) -> None:
    backend = make(kind)
    data = saved(backend, PROMPT)
    for n_bytes in (0, 1, 3, 4, 8, 12, 15, 17, 100, 255, -1, -4):
        assert why_refused(backend, data[:n_bytes].copy()) == "are cut off"
    assert why_refused(backend, np.append(data, data[:40]))
    for n in (-1, 0, 2, 2**31 - 1, 2**29):
        wrong = data.copy()
        wrong.view(np.int32)[FIRST_POSITION[kind] - 1] = n
        assert why_refused(backend, wrong)


# ---- numbers ----


def first_number(kind: str) -> int:
    """Return the byte at which the numbers of a backend's first layer begin."""
    n_cells = 1 if kind == "recurrent" else len(PROMPT)
    n_words = 2 if kind == "recurrent" else 3
    n_before = FIRST_POSITION[kind] + n_words * n_cells + 2 + 3
    return 4 * n_before


NUMBERS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "f16": ((0x7E00, 0xFFFF, 0x7C00, 0xFC00), (0x7BFF, 0xFBFF)),
    "bf16": ((0x7FC0, 0xFF80), (0x7F7F, 0xFF7F)),
    "f32": ((0x7FC00000, 0x7F800000, 0xFF800000), (0x7F7FFFFF, 0xFF7FFFFF)),
    "q8_0": ((0x7E01,), (0x7BFF,)),
    "q4_0": ((0x7C00,), (0xFBFF,)),
    "iq4_nl": ((0xFFFF,), ()),
    "q4_1": ((0x7E01,), ()),
    "q5_1": ((0xFC00,), ()),
}
"""By type: NaN and infinity, above and below 0; and the largest and the smallest number."""


@pytest.mark.parametrize("type", NUMBERS)
def test_number_that_is_not_finite_is_refused(make: MakeBackend, type: str) -> None:
    backend = make("partitioned", cache_type_k=type, shape=WIDE)
    data = saved(backend, PROMPT).copy()
    start, n_bytes = first_number("partitioned"), 4 if type == "f32" else 2
    for words, is_good in zip(NUMBERS[type], (False, True), strict=True):
        for word in words:
            number = np.frombuffer(word.to_bytes(n_bytes, "little"), np.uint8)
            data[start : start + n_bytes] = number
            if is_good:
                assert np.array_equal(backend.validate_state(data, 20), data)
            else:
                assert "numbers" in why_refused(backend, data)
    if type in ("q4_1", "q5_1"):  # both scales of a block are looked at
        data = saved(backend, PROMPT).copy()
        second = start + CELL_TYPES[type].n_bytes + 2
        data[second : second + 2] = 0xFF
        assert "numbers" in why_refused(backend, data)


@pytest.mark.parametrize("setting", ["partitioned", "values across", "values across in a pool"])
def test_every_value_is_looked_at_that_is_loaded(make: MakeBackend, setting: str) -> None:
    kind, given = SETTINGS[setting]
    backend = make(kind, **given)
    data = saved(backend, PROMPT).copy()
    behind = 8 if kind == "partitioned" else 0
    data[len(data) - behind - 2 : len(data) - behind] = 0xFF
    assert "numbers" in why_refused(backend, data)
    backend.validate_state(data, 19)  # the last cell alone has it


def test_first_and_last_number_of_a_state_must_be_finite(make: MakeBackend) -> None:
    backend = make("recurrent")
    data = saved(backend, PROMPT)
    for there, number in ((first_number("recurrent"), np.nan), (len(data) - 4, -np.inf)):
        damaged = data.copy()
        damaged[there : there + 4] = np.array([number], "<f4").view(np.uint8)
        assert "numbers" in why_refused(backend, damaged)


@pytest.mark.parametrize("is_moved", [False, True])
def test_state_that_nothing_can_be_computed_from_is_gone_with_its_slot(
    make: MakeBackend, is_moved: bool
) -> None:
    backend = make("recurrent")
    expected = go_on(backend, 1, PROMPT, 5)
    data = saved(backend, PROMPT).copy()
    start = first_number("recurrent")
    data[start : start + 1024].view("<f4")[:] = 6e4
    backend.import_state(4, backend.validate_state(data, 20), 20)
    chunks = (chunk(0, 20, [7]), chunk(1, 24, [expected[-1]]))
    broken, fine = backend.run(StepPlan(chunks, loads=((Slot(0), 4, 20),))).tokens
    assert (broken, fine != [BROKEN_ROW]) == ([BROKEN_ROW], True)
    if is_moved:
        backend.run(StepPlan((), saves=((Slot(0), 1),), clears=(Slot(0),)))
        backend.run(StepPlan((), loads=((Slot(2), 1, 21),)))
    backend.run(StepPlan((), clears=(Slot(0), Slot(1), Slot(2))))
    for slot in (0, 1, 2):
        assert go_on(backend, slot, PROMPT, 5) == expected


def with_large_values(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return twenty cells, of two layers, whose values add up to more than f16 holds, in which llama.cpp adds them."""
    changed = data.copy()
    at = 24 + 12 * len(PROMPT)
    n_bytes = len(PROMPT) * int(changed[at + 4 : at + 12].view("<u8")[0])
    at += 2 * (12 + n_bytes) + 12
    changed[at : at + n_bytes].view("<f2")[:] = 6e4
    return changed


@pytest.mark.parametrize("way", ["directly", "moved", "copied", "trimmed"])
def test_cells_that_nothing_can_be_computed_from_are_gone_with_their_slot(
    make: MakeBackend, way: str
) -> None:
    backend = make("partitioned", shape=WIDE, repack="llama")
    prompt = LONG[:100]
    expected = go_on(backend, 1, prompt, 5)
    put(backend, 0, with_large_values(saved(backend, PROMPT)), 20)
    unseen = Span(Slot(0), 20, OTHER, has_output=False)
    backend.run(StepPlan((unseen,)))
    if way == "moved":
        backend.run(StepPlan((), saves=((Slot(0), 1),), clears=(Slot(0),)))
        backend.run(StepPlan((), loads=((Slot(2), 1, 53),)))
    elif way == "copied":
        backend.run(StepPlan((chunk(1, 104, [7]),), copies=((Slot(0), Slot(2), 53),)))
    elif way == "trimmed":
        backend.run(StepPlan((), trims=((Slot(0), 30),)))
    assert backend.run(StepPlan((chunk(1, backend.n_cells[1], [8]),))).tokens != [[BROKEN_ROW]]
    for slot in (0, 1, 2):
        backend.run(StepPlan((), clears=(Slot(slot),)))
        assert go_on(backend, slot, prompt, 5) == expected


def test_slot_of_a_broken_row_is_overwritten_that_of_a_sound_one_is_not(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, wiped = make("partitioned", shape=WIDE, repack="llama"), list[set[int]]()
    monkeypatch.setattr(LlamaCells, "wipe", lambda _, slots, __: wiped.append(set(slots)))
    data = saved(backend, PROMPT)
    put(backend, 0, data, 20)
    put(backend, 1, with_large_values(data), 20)
    result = backend.run(StepPlan((chunk(0, 20, [7]), chunk(1, 20, [7]))))
    assert result.tokens[1] == [BROKEN_ROW] != result.tokens[0]
    backend.run(StepPlan((), clears=(Slot(0), Slot(1))))
    assert wiped == [{1}]
