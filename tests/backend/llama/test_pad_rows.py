"""Pad rows: the shapes of steps, and which slots fill a step up to its shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.backend.llama.pad_rows import ANY_SHAPE, PadRows, RowShape, n_sequences, shapes
from cbatch.core.plan import Slot
from cbatch.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOT_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33)


@dataclass(eq=False, slots=True)
class HeldCells:
    """What `PadRows` asks a memory; notes which slots are cut back."""

    n_cells: Sequence[int]
    can_cut: bool = True
    cut: list[int] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)

    def n_held(self, slot: Slot) -> int:
        return self.n_cells[slot] if slot < len(self.n_cells) else 0

    def is_in_the_way(self, slot: Slot) -> bool:
        return self.n_held(slot) > 0 and not self.can_cut

    def place_pad(self, slot: Slot) -> int:
        self.placed.append(slot)
        return self.n_held(slot) if self.can_cut else 0

    def remove_pad(self, slot: Slot) -> None:
        self.cut.append(slot)


def pad_rows(
    shape: RowShape, n_cells: Sequence[int], *, can_cut: bool = True
) -> tuple[PadRows, HeldCells]:
    """Return pad rows over slots that hold so many cells."""
    memory = HeldCells(n_cells, can_cut)
    return PadRows(shape, cast("Any", memory), n_sequences(len(n_cells))), memory


def row(slot: int, start: int = 0) -> Span:
    return Span(Slot(slot), start, [7], has_output=True)


def pads_beside(shape: RowShape, n_slots: int, *slots: int) -> list[int]:
    """Return the slots of the pad rows beside rows in these slots."""
    pads, _ = pad_rows(shape, [0] * n_slots)
    return [c.slot for c in pads.beside([row(slot) for slot in slots])]


# ---- shapes ----


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        (ANY_SHAPE, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (RowShape(2, 1), [2, 2, 3, 4, 5, 6, 7, 8, 9]),
        (RowShape(4, 4), [4, 4, 4, 4, 8, 8, 8, 8, 12]),
        (RowShape(8, 4), [8, 8, 8, 8, 8, 8, 8, 8, 12]),
        (RowShape(20, 20), [20] * 9),
    ],
    ids=str,
)
def test_width_is_the_next_one_that_a_shape_has(shape: RowShape, widths: list[int]) -> None:
    assert str(shape).startswith(
        "any number of rows" if shape == ANY_SHAPE else f"{widths[0]} rows"
    )
    assert [shape.width(n) for n in range(1, 10)] == widths


def test_sequences_are_the_slots_and_at_most_three_more() -> None:
    found = {n: n_sequences(n) for n in (1, 2, 3, 4, 5, 8, 9, 253, 256)}
    assert found == {1: 1, 2: 4, 3: 4, 4: 4, 5: 8, 8: 8, 9: 12, 253: 256, 256: 256}


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("n_slots", SLOT_COUNTS)
def test_shapes_that_fit_are_tried_from_the_fewest_pad_rows_on(
    n_slots: int, is_plain: bool
) -> None:
    tried, n_most = shapes(n_slots, is_plain=is_plain), n_sequences(n_slots)
    widths = [[shape.width(n) for n in range(1, n_slots + 1)] for shape in tried]
    assert all(a <= b for fewer, more in pairwise(widths) for a, b in zip(fewer, more, strict=True))
    assert all(n <= width <= n_most for of_one in widths for n, width in enumerate(of_one, 1))
    assert {*widths[-1]} == {n_most}, "the last one has one width alone"
    # weights of several kernels are never computed in narrow steps
    least = 1 if n_slots == 1 else 2 if is_plain else min(8, n_most)
    assert min(shape.least for shape in tried) == least


# ---- which slots are padded ----


@pytest.mark.parametrize(
    ("shape", "slots", "padded"),
    [
        (RowShape(4, 4), [0], [1, 2, 3]),
        (RowShape(4, 4), [3], [4, 5, 6]),
        (RowShape(4, 4), [1, 4], [2, 3]),
        (RowShape(4, 4), [1, 5], [2, 3, 4, 6, 7, 8]),
        (RowShape(4, 4), [4], [5, 6, 7]),
        (RowShape(8, 4), [8], [4, 5, 6, 7, 9, 10, 11]),
        (RowShape(12, 12), [6], [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]),
        (RowShape(2, 1), [8], [9]),
        (RowShape(2, 1), [0, 2], [1]),
        (RowShape(2, 1), [3, 4], []),
        (RowShape(8, 4), [1, 2, 3, 4, 5, 6, 7, 8], []),
        (ANY_SHAPE, [0, 5, 8], []),
    ],
    ids=str,
)
def test_pads_fill_gaps_then_above_then_below(
    shape: RowShape, slots: list[int], padded: list[int]
) -> None:
    assert pads_beside(shape, 9, *slots) == padded


@st.composite
def padded_steps(draw: st.DrawFn) -> tuple[RowShape, list[int], list[int]]:
    """A shape that may be tried, the cells of all slots, and the slots that have rows."""
    n_slots = draw(st.integers(1, 40))
    shape = draw(st.sampled_from(shapes(n_slots, is_plain=draw(st.booleans()))))
    n_cells = draw(st.lists(st.integers(0, 99), min_size=n_slots, max_size=n_slots))
    slots = draw(st.sets(st.integers(0, n_slots - 1), min_size=1))
    return shape, n_cells, sorted(slots)


@given(padded_steps())
def test_rows_and_pads_are_consecutive_and_have_the_shape(
    step: tuple[RowShape, list[int], list[int]],
) -> None:
    shape, n_cells, slots = step
    pads, _ = pad_rows(shape, n_cells)
    found = pads.beside([row(slot, n_cells[slot]) for slot in slots])
    padded = [c.slot for c in found]
    assert padded == sorted(set(padded) - set(slots))
    if shape == ANY_SHAPE:
        assert padded == []
        return
    together = sorted([*padded, *slots])
    assert together == list(range(together[0], together[-1] + 1))
    assert 0 <= together[0] <= together[-1] < n_sequences(len(n_cells))
    assert len(together) == shape.width(len(together)) == shape.width(slots[-1] - slots[0] + 1)
    for pad in found:
        assert pad.start == (n_cells[pad.slot] if pad.slot < len(n_cells) else 0)
        assert (len(pad.inputs), pad.has_output, pad.targets) == (1, False, ())


@given(padded_steps())
def test_where_nothing_can_be_cut_the_fewest_slots_are_put_aside(
    step: tuple[RowShape, list[int], list[int]],
) -> None:
    shape, n_cells, slots = step
    pads, memory = pad_rows(shape, n_cells, can_cut=False)
    found = pads.beside([row(slot, n_cells[slot]) for slot in slots])
    assert memory.placed == [c.slot for c in found]
    assert {c.start for c in found} <= {0}
    together = sorted([*memory.placed, *slots])
    if not found:
        return
    assert together == list(range(together[0], together[-1] + 1))
    width, held = len(together), [i for i, n in enumerate(n_cells) if n]
    assert width == shape.width(slots[-1] - slots[0] + 1)
    starts = range(max(0, slots[-1] + 1 - width), slots[0] + 1)
    n_sequences_ = n_sequences(len(n_cells))
    fewest = min(
        sum(i in held and i not in slots for i in range(start, start + width))
        for start in starts
        if start + width <= n_sequences_
    )
    assert sum(slot in held for slot in memory.placed) == fewest


def test_removed_pads_are_cut_back_in_their_slots_alone() -> None:
    pads, memory = pad_rows(RowShape(4, 4), [5, 0, 3])
    found = pads.beside([row(0, 5), row(2, 3)])
    assert memory.cut == []
    pads.remove(found)
    assert memory.cut == [1, 3]
