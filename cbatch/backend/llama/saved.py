"""The state that llama.cpp writes of one sequence: cut to its first cells, and laid out for another context.

llama.cpp trusts the state that it reads, and a cache file whose digest holds is one that cbatch wrote with the same
model. Another layout is refused, since settings that are not part of a fingerprint may change it. So are NaN and
infinite numbers, which a model may compute by itself: in a pool they would reach the scores of neighbours, where
attention adds up the products of masked cells too.

Values lie across, a row for each number of all cells, where there is no flash attention: these are turned.

    magic, slot | one part after the other
    part of cells:   number of slots | of each, its number of cells n, and where that is not 0:
                     n × (position, 1, some words) | form | keys of each layer | values of each layer
    part of a state: 1 | position, 0 | form | convolution of each layer | state of each layer

Source: llama.cpp, src/llama-context.cpp, state_seq_get_data; src/llama-kv-cache.cpp and src/llama-memory-recurrent.cpp,
state_write and state_read.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cbatch.backend.llama.layout import CELL_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MANY = 2**31 - 1
"""More cells than any state has."""

_N_SLOTS_MAX = 256
"""Source: llama.cpp, src/llama-cparams.h, LLAMA_MAX_SEQ."""

_N_LAYERS_MAX = 512
"""Source: llama.cpp, src/llama-hparams.h, LLAMA_MAX_LAYERS."""

_STATE_WORDS, _CELL_WORDS, _PLACED_CELL_WORDS = 2, 3, 6
"""Words of a cell's entry: position and number of sequences; its sequence; its place and token."""

_EXPONENTS = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}
"""The word of infinity: a number with this exponent is infinite or NaN."""

_N_SCALES = {"q4_1": 2, "q5_1": 2}
"""Numbers in f16 that a block begins with, where that is not one. Source: llama.cpp, ggml/src/ggml-common.h."""

_NAMES = {format.id: name for name, format in CELL_TYPES.items()}

_REPEATED = (0,)
"""Strides of an array that is one number over and over."""

_OTHER_LAYOUT = "have another layout than the cells of this model"


class SavedFormat:
    """How one context writes the state of a sequence."""

    def __init__(self, magic: bytes, parts: tuple[_MemoryPart, ...]) -> None:
        self._magic, self._parts = magic, parts

    def in_pool(self) -> SavedFormat | None:
        """Return how a context with one pool and flash attention writes them; None where values cannot be turned."""
        parts = [part.in_pool() for part in self._parts]
        return SavedFormat(self._magic, tuple(p for p in parts if p)) if all(parts) else None

    def cut(self, data: Bytes, n_wanted: int = MANY, *, is_checked: bool = True) -> Bytes:
        """Return the first cells of a state, as this context would write them.

        Args:
            data: (n_bytes,) uint8: a state that a context of the same model wrote.
            n_wanted: how many cells to return; all of them where sequences cannot be cut short.
            is_checked: refuse numbers that are not finite.

        Returns:
            (n_bytes,) uint8; `data` itself where nothing changes.

        Raises:
            ValueError: the layout is another, or numbers are not finite; the text ends a sentence about the cells.
        """
        cursor = _StateCursor(data)
        cursor.expect(self._magic)
        pieces, is_same = [data[:4], cursor.take(4)], True  # which slot it was does not matter
        for part in self._parts:
            n_slots, n, n_behind = cursor.counts(has_slots=bool(part.n_slots))
            cells = cursor.words(n * part.n_words).reshape(n, part.n_words)
            kept = cells[:, 0] < n_wanted
            is_same = is_same and n_slots == part.n_slots and bool(kept.all())
            is_turned = part.is_turned(cursor)
            is_same = is_same and not is_turned
            read = part.read(cursor, kept, is_turned=is_turned, is_checked=is_checked)
            pieces += part.pieces(cells[kept], read)
            cursor.words(n_behind)
        if cursor.n_left:
            raise ValueError("are followed by extra data")
        return data if is_same else np.concatenate(pieces)

    def placed(self, data: Bytes) -> Bytes:
        """Return a state with zeros for the first cells of sequences, where it lacks them.

        Layers with a sliding window save no cells that have left it. Behind zeros the others are loaded into the places
        that they had, and in these attention adds up products in the same order. Zeros are masked.

        Args:
            data: (n_bytes,) uint8, as this context wrote it.

        Returns:
            (n_bytes,) uint8; `data` itself where no cells lack.

        Raises:
            ValueError: the layout is another, or cells lack elsewhere.
        """
        cursor = _StateCursor(data)
        cursor.expect(self._magic)
        pieces, is_same = [data[:4], cursor.take(4)], True
        for part in self._parts:
            _, n, n_behind = cursor.counts(has_slots=bool(part.n_slots))
            cells = cursor.words(n * part.n_words).reshape(n, part.n_words)
            n_past = int(cells[0, 0]) if part.n_slots else 0
            if part.n_slots and (cells[:, 0] != np.arange(n_past, n_past + n)).any():
                raise ValueError("are not in the order of tokens")
            cursor.expect(part.form)
            read = [rows.read_behind(cursor, n_past, n) for rows in part.rows]
            cursor.words(n_behind)
            pieces += part.pieces(np.concatenate([_first_cells(n_past, part.n_words), cells]), read)
            is_same = is_same and not n_past
        if cursor.n_left:
            raise ValueError("are followed by extra data")
        return data if is_same else np.concatenate(pieces)

    def zeros(self, n_cells: int) -> Bytes:
        """Return a state of zeros, (n_bytes,) uint8, as this context would write it of slot 0.

        The operating system gives no memory of its own to zeros that are only read.
        """
        pieces = [_bytes(self._magic), _words(0)]
        for part in self._parts:
            pieces += part.zeros(n_cells)
        data = np.zeros(sum(map(len, pieces)), np.uint8)
        start = 0
        for piece in pieces:
            if piece.strides != _REPEATED:
                data[start : start + len(piece)] = piece
            start += len(piece)
        return data

    @property
    def has_cells(self) -> bool:
        """Whether a sequence has cells, not a state alone."""
        return any(part.n_slots for part in self._parts)

    def n_cells(self, n_bytes: int) -> int:
        """Return the cells of a state of so many bytes, where sequences have cells in one memory alone."""
        n_first, n_second = len(self.zeros(1)), len(self.zeros(2))
        return 1 + (n_bytes - n_first) // (n_second - n_first)


@dataclass(frozen=True, slots=True)
class _LayerRows:
    """What a layer keeps: `n_rows` rows in which each cell has `n_bytes`; many rows where values lie across."""

    head: bytes
    type: str
    n_rows: int
    n_bytes: int

    def read(self, cursor: _StateCursor, kept: NDArray[np.bool_], *, is_checked: bool) -> Bytes:
        cursor.expect(self.head)
        data = cursor.take(self.n_rows * len(kept) * self.n_bytes)
        if not kept.all():
            data = _flat(data.reshape(self.n_rows, len(kept), self.n_bytes)[:, kept])
        if is_checked and not _are_finite(data, self.type):
            raise ValueError("hold NaN or infinite numbers")
        return data

    def read_behind(self, cursor: _StateCursor, n_zeros: int, n: int) -> Bytes:
        """Return the data of `n` cells after so many cells of zeros."""
        cursor.expect(self.head)
        data = cursor.take(self.n_rows * n * self.n_bytes).reshape(self.n_rows, n, self.n_bytes)
        return _flat(np.pad(data, ((0, 0), (n_zeros, 0), (0, 0)))) if n_zeros else _flat(data)

    @property
    def is_across(self) -> bool:
        return self.n_rows > 1

    def turned(self) -> _LayerRows | None:
        """Return what the layer keeps where values lie across and these do not, or the other way; None for blocks."""
        block = CELL_TYPES[self.type]
        if block.n_block > 1:
            return None
        n_bytes = block.n_bytes
        n_numbers = self.n_rows * self.n_bytes // n_bytes
        sizes = _words(n_numbers * n_bytes, 0) if self.is_across else _words(n_bytes, n_numbers)
        turned = (1, n_numbers * n_bytes) if self.is_across else (n_numbers, n_bytes)
        return _LayerRows(self.head[:4] + sizes.tobytes(), self.type, *turned)

    def read_turned(
        self, cursor: _StateCursor, kept: NDArray[np.bool_], *, is_checked: bool
    ) -> Bytes:
        """Return the data of the kept cells, which lie across where these do not, and the other way round."""
        turned = self.turned()
        if turned is None:
            raise ValueError(_OTHER_LAYOUT)
        data = turned.read(cursor, kept, is_checked=is_checked)
        n, n_bytes = int(kept.sum()), CELL_TYPES[self.type].n_bytes
        shape = (n, self.n_rows) if self.is_across else (turned.n_rows, n)
        return _flat(data.reshape(*shape, n_bytes).transpose(1, 0, 2))


@dataclass(frozen=True, slots=True)
class _MemoryPart:
    """What one memory of a context writes; `n_slots` is 0 for states, which say no number of slots."""

    n_slots: int
    n_words: int
    form: bytes
    rows: tuple[_LayerRows, ...]
    n_keys: int = 0
    """How many of the rows are not values."""

    def is_turned(self, cursor: _StateCursor) -> bool:
        """Read the form of a memory; return whether its values lie across where these do not, or the other way."""
        form = cursor.take(len(self.form)).tobytes()
        if form == self.form:
            return False
        if not self.n_slots or form[4:] != self.form[4:] or form[0] > 1 or any(form[1:4]):
            raise ValueError(_OTHER_LAYOUT)
        return True

    def in_pool(self) -> _MemoryPart | None:
        """Return what a pool with flash attention writes; None for states, and where values cannot be turned."""
        keys, values = self.rows[: self.n_keys], self.rows[self.n_keys :]
        upright = [rows.turned() if rows.is_across else rows for rows in values]
        if not self.n_slots or None in upright:
            return None
        form = bytes(4) + self.form[4:]
        rows = (*keys, *(r for r in upright if r))
        return replace(self, n_slots=1, form=form, rows=rows)

    def read(
        self, cursor: _StateCursor, kept: NDArray[np.bool_], *, is_turned: bool, is_checked: bool
    ) -> Sequence[Bytes]:
        """Return the data of the kept cells, a layer after the other, as this memory has them."""
        n_upright = self.n_keys if is_turned else len(self.rows)
        return [
            (rows.read if i < n_upright else rows.read_turned)(cursor, kept, is_checked=is_checked)
            for i, rows in enumerate(self.rows)
        ]

    def zeros(self, n_cells: int) -> Iterator[Bytes]:
        """Yield what the memory writes of a sequence of zeros; a state is that after the last cell."""
        cells = _first_cells(n_cells, self.n_words)
        if not self.n_slots:
            cells = np.array([[n_cells - 1, 0]], "<i4")
        sizes = [rows.n_rows * len(cells) * rows.n_bytes for rows in self.rows]
        return self.pieces(cells, [np.broadcast_to(np.uint8(0), n_bytes) for n_bytes in sizes])

    def pieces(self, cells: NDArray[np.int32], data: Sequence[Bytes]) -> Iterator[Bytes]:
        """Yield what the memory writes of cells in the first slot, each layer's `data` among it."""
        counts = (self.n_slots, len(cells)) if self.n_slots else (len(cells),)
        yield from (_words(*counts), _flat(cells.view(np.uint8)), _bytes(self.form))
        for rows, rows_data in zip(self.rows, data, strict=True):
            yield from (_bytes(rows.head), rows_data)
        yield _words(*[0] * (self.n_slots - 1))


class _StateCursor:
    """Reads data from its beginning, and never past its end."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._start = data, 0

    @property
    def n_left(self) -> int:
        return len(self._data) - self._start

    def take(self, n_bytes: int) -> Bytes:
        if not 0 <= n_bytes <= self.n_left:
            raise ValueError("are cut off")
        self._start += n_bytes
        return self._data[self._start - n_bytes : self._start]

    def words(self, n: int) -> NDArray[np.int32]:
        return self.take(4 * n).view("<i4")

    def word(self) -> int:
        return int(self.words(1)[0])

    def expect(self, said: bytes) -> None:
        if self.take(len(said)).tobytes() != said:
            raise ValueError(_OTHER_LAYOUT)

    def counts(self, *, has_slots: bool) -> tuple[int, int, int]:
        """Read how many slots a part has, how many cells the first that has any, and how many slots are after it."""
        n_slots = self.word() if has_slots else 0
        if not has_slots <= n_slots <= _N_SLOTS_MAX:
            raise ValueError(_OTHER_LAYOUT)
        for n_behind in reversed(range(n_slots or 1)):
            if n := self.word():
                return n_slots, n, n_behind
        raise ValueError("are none")


def _are_finite(data: Bytes, type: str) -> bool:
    """Whether all numbers of whole rows, or all scales of their blocks, are finite."""
    if type not in _EXPONENTS:
        blocks = data.reshape(-1, CELL_TYPES[type].n_bytes)
        data, type = _flat(blocks[:, : 2 * _N_SCALES.get(type, 1)]), "f16"
    infinity, bits = _EXPONENTS[type], 32 if type == "f32" else 16
    words = data.view(f"<u{bits // 8}")
    # as words, the numbers below zero are the higher ones
    is_finite_below_zero = words.max(initial=0) < (1 << (bits - 1) | infinity)
    return bool(is_finite_below_zero and words.view(f"<i{bits // 8}").max(initial=0) < infinity)


def _first_cells(n: int, n_words: int) -> NDArray[np.int32]:
    cells = np.zeros((n, n_words), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(n), 1
    return cells


def _words(*numbers: int) -> Bytes:
    return np.array(numbers, "<i4").view(np.uint8)


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _flat(data: Bytes) -> Bytes:
    return np.ascontiguousarray(data).reshape(-1)


# ---- what a context writes ----


def read_format(sample: Bytes) -> SavedFormat | None:
    """Find out how a context writes states, from that of its first slot with one cell; None for an unknown layout."""
    cursor = _StateCursor(sample)
    magic = cursor.take(8).tobytes()[:4]
    parts = _parts(cursor)
    return SavedFormat(magic, parts) if parts else None


def _parts(cursor: _StateCursor) -> tuple[_MemoryPart, ...] | None:
    """Return the first way to read the rest of a sample; None where there is no way."""
    if not cursor.n_left:
        return ()
    for read in _READERS:
        behind = copy.copy(cursor)
        with suppress(ValueError):
            part = read(behind)
            if (others := _parts(behind)) is not None:
                return (part, *others)
    return None


def _cells(cursor: _StateCursor, *, n_words: int, has_values: bool) -> _MemoryPart:
    """Read a part of cells; where keys hold the values too, there are none."""
    n_slots = cursor.word()
    if not 0 < n_slots <= _N_SLOTS_MAX or cursor.words(3).tolist() != [1, 0, 1]:
        raise ValueError("are none")
    cursor.words(n_words - 2)
    form, is_across, n_layers = _form(cursor)
    keys = [_rows(cursor) for _ in range(n_layers)]
    n_values = n_layers if has_values else 0
    values = [_rows(cursor, is_across=is_across) for _ in range(n_values)]
    if cursor.words(n_slots - 1).any():
        raise ValueError("belong to several sequences")
    return _MemoryPart(n_slots, n_words, form, (*keys, *values), n_layers)


def _state(cursor: _StateCursor) -> _MemoryPart:
    """Read a state, which is the last part."""
    if cursor.words(3).tolist() != [1, 0, 0]:
        raise ValueError("are none")
    form, is_across, _ = _form(cursor)
    if is_across:
        raise ValueError("have an unsupported, transposed layout")
    rows = list[_LayerRows]()
    while cursor.n_left:
        rows.append(_rows(cursor))
    return _MemoryPart(0, _STATE_WORDS, form, tuple(rows))


def _form(cursor: _StateCursor) -> tuple[bytes, bool, int]:
    form = cursor.take(8)
    is_across, n_layers = form.view("<u4").tolist()
    if is_across > 1 or n_layers > _N_LAYERS_MAX:
        raise ValueError("are none")
    return form.tobytes(), bool(is_across), n_layers


def _rows(cursor: _StateCursor, *, is_across: bool = False) -> _LayerRows:
    """Read a layer's type and the sizes of its rows, and go past its data."""
    head = cursor.take(12)
    type = _NAMES.get(int(head[:4].view("<i4")[0]), "")
    n_bytes, n_rows = int(head[4:].view("<u8")[0]), 1
    if is_across:
        n_bytes, n_rows = head[4:].view("<u4").tolist()
    block = CELL_TYPES.get(type)
    if block is None or n_bytes % block.n_bytes:
        raise ValueError("are not whole blocks of a known type")
    if is_across and (n_bytes, 1) != (block.n_bytes, block.n_block):
        raise ValueError("are not whole numbers")
    cursor.take(n_rows * n_bytes)
    return _LayerRows(head.tobytes(), type, n_rows, n_bytes)


_READERS: tuple[Callable[[_StateCursor], _MemoryPart], ...] = (
    *(
        partial(_cells, n_words=n_words, has_values=has_values)
        for n_words in (_CELL_WORDS, _PLACED_CELL_WORDS)
        for has_values in (True, False)
    ),
    _state,
)
