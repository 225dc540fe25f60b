"""What llama.cpp writes of one sequence: checked, cut and laid out for a context before that reads it.

llama.cpp believes what it reads. Two states of one sequence end the process, a position below 0 or the highest there
is stays in its slot for ever, and a number that is none or too large reaches neighbours: in a pool the scores of each
other's cells are computed and masked, where infinite less infinite is none; and an old state is multiplied by zero.
Where nothing can be overwritten, values must not become such a number when they are added up.

    magic, slot | one part behind the other
    part of cells:   number of slots | of each, its number of cells n, and where that is not 0:
                     n × (position, 1, some words) | form | keys of each layer | values of each layer
    part of a state: 1 | position, 0 | form | convolution of each layer | state of each layer

Source: llama.cpp, src/llama-context.cpp, state_seq_get_data; src/llama-kv-cache.cpp and src/llama-memory-recurrent.cpp,
state_write and state_read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cbatch.backend.llama.layout import CELL_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_N_SLOTS_MAX = 256
"""Source: llama.cpp, src/llama-cparams.h, LLAMA_MAX_SEQ."""

_N_LAYERS_MAX = 512
"""Source: llama.cpp, src/llama-hparams.h, LLAMA_MAX_LAYERS."""

_STATE_WORDS, _CELL_WORDS, _PLACED_CELL_WORDS = 2, 3, 6
"""Words of a cell's entry: position and number of sequences, its sequence, and place and token besides."""

_MOST = 65504.0
"""No number may be larger, whatever it is kept in: the largest that f16 holds, which keys and values are in as a rule.

What is computed from such numbers is finite. A state near the end of f32 becomes infinite with the next token.
"""

_N_SUMMED = 65504.0
"""To how much at most the values of many cells may add up: flash attention adds them up in f16 before it divides.
Source: llama.cpp, ggml/src/ggml-cpu/ops.cpp, ggml_compute_forward_flash_attn_ext_f16_one_chunk."""

_SCALES = {"q4_0": 8, "q4_1": 16, "q5_0": 16, "q5_1": 32, "q8_0": 128, "iq4_nl": 128}
"""By how much at most a block multiplies its scale. Source: llama.cpp, ggml/src/ggml-quants.c, dequantize_row."""

_N_SCALES = {"q4_1": 2, "q5_1": 2}
"""Numbers that a block begins with, where that is not one: source as above."""

_NAMES = {format.id: name for name, format in CELL_TYPES.items()}


class SavedFormat:
    """How one context writes a sequence."""

    def __init__(
        self, magic: bytes, parts: tuple[_Part, ...], *, n_vocab: int, can_trim: bool
    ) -> None:
        """Take what `read_format` found out and was told."""
        self._magic, self._parts = magic, parts
        self._n_vocab, self._can_trim = n_vocab, can_trim

    def fit(self, data: Bytes, n_cells: int, n_wanted: int) -> Bytes:
        """Return the first cells of a sequence that was written elsewhere, as this context would write them of slot 0.

        Args:
            data: (n_bytes,) uint8.
            n_cells: how many it is to hold, and may hold more where sequences can be cut short.
            n_wanted: how many to return, at most `n_cells`; all of them where sequences cannot be cut short.

        Returns:
            (n_bytes,) uint8; `data` itself where it is just that.

        Raises:
            ValueError: they are none of this context's; its text ends a sentence about them.
        """
        cursor = _Cursor(data)
        cursor.expect(self._magic)
        pieces = [data[:4], cursor.take(4)]  # which slot they were in, nobody asks
        for part in self._parts:
            pieces += self._fit_part(part, cursor, n_cells, n_wanted)
        if cursor.n_left:
            raise ValueError("have something behind them")
        return data if _are_in_place(pieces, data) else np.concatenate(pieces)

    def zeros(self, n_cells: int) -> Bytes:
        """Return so many cells of zeros, as this context would write them of slot 0.

        Args:
            n_cells: at most as many as a slot has.

        Returns:
            (n_bytes,) uint8.
        """
        pieces = [_bytes(self._magic), _words(0)]
        for part in self._parts:
            pieces += _zeros(part, n_cells)
        data = np.zeros(sum(map(len, pieces)), np.uint8)
        start = 0
        for piece in pieces:
            if piece.strides[0]:
                data[start : start + len(piece)] = piece
            start += len(piece)
        return data

    def _fit_part(
        self, part: _Part, cursor: _Cursor, n_cells: int, n_wanted: int
    ) -> Iterator[Bytes]:
        n, n_behind = cursor.count(is_of_slots=bool(part.n_slots))
        cells = cursor.words(n * part.n_words).reshape(n, part.n_words)
        self._check_cells(part, cells, n_cells)
        kept = cells[:, 0] < (n_wanted if part.n_slots else n_cells)
        if part.n_slots:
            yield _words(part.n_slots)
        yield _words(int(kept.sum()))
        yield _flat(cells[kept].view(np.uint8))
        cursor.expect(part.form)
        yield _bytes(part.form)
        for rows in part.rows:
            cursor.expect(rows.head)
            yield _bytes(rows.head)
            data = rows.checked(cursor.take(rows.n_rows * n * rows.n_bytes), kept)
            if rows.is_summed and not (self._can_trim and part.n_slots > 1):
                _check_sums(data.view("<f2").reshape(-1, rows.n_bytes // 2))
            yield data
        if cursor.words(n_behind).any():
            raise ValueError("are those of several sequences")
        yield _words(*[0] * (part.n_slots - 1))

    def _check_cells(self, part: _Part, cells: NDArray[np.int32], n_cells: int) -> None:
        """Check that there is one cell at each position up to the last, in windows and states at the last ones."""
        n_sequences = 1 if part.n_slots else 0  # a state does not say which is its own
        if (cells[:, 1] != n_sequences).any() or (len(cells) > 1 and not n_sequences):
            raise ValueError("are those of several sequences")
        positions, n = np.sort(cells[:, 0]), len(cells)
        n_end = int(positions[-1]) + 1
        is_as_long = n_end == n >= n_cells if self._can_trim else n_end == n_cells
        if not is_as_long or (positions != np.arange(n_end - n, n_end)).any() or positions[0] < 0:
            raise ValueError(f"do not stand at the positions of {n_cells:,} tokens")
        if part.n_words == _PLACED_CELL_WORDS and not _are_tokens(cells[:, 4], self._n_vocab):
            raise ValueError("stand for tokens that are none")


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a layer keeps: `n_rows` rows in which each cell has `n_bytes`, one, or where cells lie across, many."""

    head: bytes
    type: str
    n_rows: int
    n_bytes: int
    is_summed: bool = False
    """Whether attention adds these up over all cells, in f16."""

    def checked(self, data: Bytes, kept: NDArray[np.bool_]) -> Bytes:
        """Return what is kept of the cells."""
        if not kept.all():
            data = _flat(data.reshape(self.n_rows, len(kept), self.n_bytes)[:, kept])
        if not _are_numbers(data, self.type):
            raise ValueError("hold numbers that are none, or too large")
        return data


@dataclass(frozen=True, slots=True)
class _Part:
    """What one of a context's memories writes; `n_slots` is 0 for states, of which it tells no number of slots."""

    n_slots: int
    n_words: int
    form: bytes
    rows: tuple[_Rows, ...]


class _Cursor:
    """Reads data from its beginning, and never past its end."""

    def __init__(self, data: Bytes, start: int = 0) -> None:
        self._data, self._start = data, start

    @property
    def n_left(self) -> int:
        return len(self._data) - self._start

    def take(self, n_bytes: int) -> Bytes:
        """Return the next bytes where they stand."""
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
            raise ValueError("are laid out in another way than those of this model here")

    def count(self, *, is_of_slots: bool) -> tuple[int, int]:
        """Read how many cells the first slot has that has any; return that, and the slots that follow."""
        n_slots = self.word() if is_of_slots else 1
        if not 0 < n_slots <= _N_SLOTS_MAX:
            raise ValueError("are laid out in another way than those of this model here")
        for n_behind in reversed(range(n_slots)):
            if n := self.word():
                return n, n_behind
        raise ValueError("are none")

    def fork(self) -> _Cursor:
        return _Cursor(self._data, self._start)


def _are_in_place(pieces: list[Bytes], data: Bytes) -> bool:
    """Whether data is just these pieces, many of which are parts of it: then nothing has to be copied."""
    ends = np.cumsum([len(piece) for piece in pieces])
    if ends[-1] != len(data):
        return False
    there = [data[end - len(piece) : end] for end, piece in zip(ends, pieces, strict=True)]
    return all(
        a.ctypes.data == b.ctypes.data or np.array_equal(a, b)
        for a, b in zip(pieces, there, strict=True)
    )


# ---- numbers ----


def _are_tokens(words: NDArray[np.int32], n_vocab: int) -> bool:
    """Whether all are tokens, or -1 for none."""
    return bool(words.min() >= -1 and words.max() < n_vocab)


def _are_numbers(data: Bytes, type: str) -> bool:
    """Whether all numbers of whole rows, or all scales of their blocks, are numbers that are not too large."""
    n_times = _SCALES.get(type, 1)
    if type in _SCALES:
        blocks = data.reshape(-1, CELL_TYPES[type].n_bytes)
        data = _flat(blocks[:, : 2 * _N_SCALES.get(type, 1)])
    return _is_within(data, type, _MOST / n_times)


def _is_within(data: Bytes, type: str, most: float) -> bool:
    """Whether numbers lie between -most and most, which as words are the lower ones of each sign."""
    word, sign = ("<u4", 1 << 31) if type == "f32" else ("<u2", 1 << 15)
    words = data.view(word)
    bits = _bits(type, most)
    is_within = words.max(initial=0) <= (sign | bits)
    return bool(is_within and words.view(word.replace("u", "i")).max(initial=0) <= bits)


def _bits(type: str, number: float) -> int:
    """Return the word of a number above 0, in bf16 the one below it."""
    if type == "f32":
        return int(np.float32(number).view(np.uint32))
    if type == "bf16":
        return int(np.float32(number).view(np.uint32)) >> 16
    return int(np.float16(number).view(np.uint16))


def _check_sums(values: NDArray[np.float16]) -> None:
    """Check that (n_cells, n_values) numbers cannot add up to one that is none, which would reach neighbours."""
    bits = int((values.view("<u2") & 0x7FFF).max(initial=0))
    largest = float(np.uint16(bits).view(np.float16))
    if len(values) * largest > _N_SUMMED:  # else there is nothing to add up
        sums = np.abs(values).sum(axis=0, dtype=np.float32)
        if sums.max() > _N_SUMMED:
            raise ValueError("hold values that add up to numbers that are none")


def _zeros(part: _Part, n_cells: int) -> Iterator[Bytes]:
    """Yield what a part with so many cells consists of; long rows of zeros take no memory."""
    cells = np.zeros((n_cells, part.n_words), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(n_cells), 1
    yield _words(part.n_slots, n_cells)
    yield _flat(cells.view(np.uint8))
    yield _bytes(part.form)
    for rows in part.rows:
        yield _bytes(rows.head)
        yield np.broadcast_to(np.uint8(0), rows.n_rows * n_cells * rows.n_bytes)
    yield _words(*[0] * (part.n_slots - 1))


def _words(*numbers: int) -> Bytes:
    return np.array(numbers, "<i4").view(np.uint8)


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _flat(data: Bytes) -> Bytes:
    return np.ascontiguousarray(data).reshape(-1)


# ---- what a context writes ----


def read_format(sample: Bytes, *, n_vocab: int, can_trim: bool) -> SavedFormat | None:
    """Find out how a context writes sequences; None where it is in no way that is known here.

    Args:
        sample: (n_bytes,) uint8: what it wrote of its first slot, with one cell in it.
        n_vocab: how many tokens there are.
        can_trim: whether sequences can be cut short.
    """
    cursor = _Cursor(sample)
    magic = cursor.take(8).tobytes()[:4]
    parts = next(_parts(cursor), None)
    return SavedFormat(magic, parts, n_vocab=n_vocab, can_trim=can_trim) if parts else None


def _parts(cursor: _Cursor) -> Iterator[tuple[_Part, ...]]:
    """Yield every way to read the rest of a sample."""
    if not cursor.n_left:
        yield ()
        return
    for read in _READERS:
        behind = cursor.fork()
        try:
            part = read(behind)
        except ValueError:
            continue
        for others in _parts(behind):
            yield (part, *others)


def _cells(cursor: _Cursor, *, n_words: int, has_values: bool) -> _Part:
    """Read a part of cells; where keys hold the values too, there are none."""
    n_slots = cursor.word()
    if not 0 < n_slots <= _N_SLOTS_MAX or cursor.words(3).tolist() != [1, 0, 1]:
        raise ValueError("are none")
    cursor.words(n_words - 2)
    form, is_across, n_layers = _form(cursor)
    keys = [_rows(cursor) for _ in range(n_layers)]
    read = _rows_across if is_across else _rows
    values = [read(cursor) for _ in range(n_layers if has_values else 0)]
    if not is_across:
        values = [replace(rows, is_summed=rows.type == "f16") for rows in values]
    if cursor.words(n_slots - 1).any():
        raise ValueError("are those of several sequences")
    return _Part(n_slots, n_words, form, (*keys, *values))


def _state(cursor: _Cursor) -> _Part:
    """Read a state, which is the last part."""
    if cursor.words(3).tolist() != [1, 0, 0]:
        raise ValueError("are none")
    form, is_across, _ = _form(cursor)
    if is_across:
        raise ValueError("are laid out across")
    rows = list[_Rows]()
    while cursor.n_left:
        rows.append(_rows(cursor))
    return _Part(0, _STATE_WORDS, form, tuple(rows))


def _form(cursor: _Cursor) -> tuple[bytes, bool, int]:
    form = cursor.take(8)
    is_across, n_layers = form.view("<u4").tolist()
    if is_across > 1 or n_layers > _N_LAYERS_MAX:
        raise ValueError("are none")
    return form.tobytes(), bool(is_across), n_layers


def _rows(cursor: _Cursor) -> _Rows:
    head = cursor.take(12)
    type, n_bytes = _type(head), int(head[4:].view("<u8")[0])
    if n_bytes % CELL_TYPES[type].n_bytes:
        raise ValueError("are no whole blocks")
    cursor.take(n_bytes)
    return _Rows(head.tobytes(), type, 1, n_bytes)


def _rows_across(cursor: _Cursor) -> _Rows:
    head = cursor.take(12)
    type, (n_bytes, n_rows) = _type(head), head[4:].view("<u4").tolist()
    if (CELL_TYPES[type].n_bytes, CELL_TYPES[type].n_block) != (n_bytes, 1):
        raise ValueError("are no whole numbers")
    cursor.take(n_rows * n_bytes)
    return _Rows(head.tobytes(), type, n_rows, n_bytes)


_READERS: tuple[Callable[[_Cursor], _Part], ...] = (
    *(
        partial(_cells, n_words=n_words, has_values=has_values)
        for n_words in (_CELL_WORDS, _PLACED_CELL_WORDS)
        for has_values in (True, False)
    ),
    _state,
)


def _type(head: Bytes) -> str:
    type = _NAMES.get(int(head[:4].view("<i4")[0]))
    if type is None:
        raise ValueError("are of an unknown type")
    return type
