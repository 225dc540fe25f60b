"""The memory of a context: its sequences are trimmed, copied, saved and loaded, and tried for what they can do."""

from __future__ import annotations

import ctypes
import os
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.layout import CELL_TYPES, read_layout
from cbatch.backend.llama.native import NativeStepper
from cbatch.backend.llama.positions import FlatPictures, n_positions
from cbatch.backend.llama.saved import SavedFormat, read_format
from cbatch.core.plan import Binding, KvCapabilities, Slot
from cbatch.core.span import Span
from cbatch.errors import IncompatibleLlamaError
from cbatch.options import GREEDY

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions

_N_KEPT = 3
"""Cells of the sequence that is trimmed, saved and loaded when a memory is tried."""

_N_ROTATED = 64
"""Heads of a multiple of this width are stored rotated. Source: src/llama-kv-cache.cpp, attn_rot_k."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """One sequence's cells in host memory, as llama.cpp writes them."""

    data: NDArray[np.uint8]
    """(n_bytes,) uint8."""
    n_cells: int
    """How many cells it has at least."""
    maybe_nonfinite: bool = False
    """Whether they may hold a NaN or an infinity: they came from elsewhere, or go on from what did."""
    flags: int = llama_cpp.LLAMA_STATE_SEQ_FLAGS_NONE
    """What of the sequence it is; by default all."""
    pictures: FlatPictures = ()
    """The pictures in it whose rows share positions."""


class LlamaCells:
    """The sequences of one context. Every slot must be in range: llama.cpp ends the process otherwise.

    Counts of cells are positions: there are fewer where the rows of pictures share them.
    """

    def __init__(self, ctx: Any) -> None:
        """Look at a `llama_context *`, which must outlive this."""
        self._ctx = ctx
        self._memory = llama_cpp.llama_get_memory(ctx)

    def count(self, slot: int) -> int:
        """Return a slot's cells: its last position + 1."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def trim(self, slot: int, n_cells: int) -> bool:
        """Remove all but the first `n_cells`; return whether that was possible. With 0 it always is."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, slot, n_cells or -1, -1))

    def copy(self, source: int, target: int, n_cells: int) -> None:
        """Copy the first `n_cells` of one slot to another, which must be empty.

        Between slots with memory of their own the bytes are copied at the next decode: until then nothing in the target
        may be saved, and nothing loaded into it. Source: src/llama-kv-cache.cpp, seq_cp and update.
        """
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self.trim(target, n_cells)

    def shift(self, slot: int, n_kept: int, n: int) -> None:
        """Remove the `n` cells after the first `n_kept`. The rest moves up at the next decode: save after that."""
        llama_cpp.llama_memory_seq_rm(self._memory, slot, n_kept, n_kept + n)
        llama_cpp.llama_memory_seq_add(self._memory, slot, n_kept + n, -1, -n)

    def save(
        self, slot: int, flags: int = llama_cpp.LLAMA_STATE_SEQ_FLAGS_NONE
    ) -> SavedState | None:
        """Return a copy of a slot's cells; None where that failed, also for lack of memory.

        With `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY` it is a recurrent state alone, where a sequence has one.
        """
        n_bytes = int(llama_cpp.llama_state_seq_get_size_ext(self._ctx, slot, flags))
        if not n_bytes:
            return None
        try:
            data = np.empty(n_bytes, np.uint8)
        except MemoryError:
            return None
        n_copied = llama_cpp.llama_state_seq_get_data_ext(
            self._ctx, _bytes_of(data), n_bytes, slot, flags
        )
        return SavedState(data, self.count(slot), flags=flags) if n_copied == n_bytes else None

    def wipe(self, slots: Collection[int], sample: SavedState) -> None:
        """Overwrite memory of empty slots with a sample of a sequence; they are empty again afterwards.

        A new state is an old one multiplied by zero, and cells of no sequence are computed and masked: a NaN stays a
        NaN in both. Source: llama.cpp, src/llama-graph.cpp, build_rs;
        src/llama-memory-recurrent.cpp, find_slot; ggml/src/ggml-cpu/ops.cpp, flash attention by tiles.
        """
        for slot in slots:
            self._read(slot, sample)
        for slot in slots:
            self.trim(slot, 0)

    def clear(self) -> None:
        """Empty every slot, and overwrite the whole memory with zeros."""
        llama_cpp.llama_memory_clear(self._memory, True)

    def n_bytes_together(self, slots: Collection[int], empty: int) -> int:
        """Return the bytes of a state with all cells of some slots in one pool, shared ones once.

        `empty` is a slot that has none. A cell may be given to it twice: llama.cpp keeps sets of cells.
        Source: src/llama-kv-cells.h, seq_pos_inc.
        """
        for slot in slots:
            llama_cpp.llama_memory_seq_cp(self._memory, slot, empty, -1, -1)
        n_bytes = llama_cpp.llama_state_seq_get_size_ext(
            self._ctx, empty, llama_cpp.LLAMA_STATE_SEQ_FLAGS_NONE
        )
        self.trim(empty, 0)
        return int(n_bytes)

    def load(self, slot: int, saved: SavedState) -> bool:
        """Put saved cells into a slot; return whether that worked. Otherwise the slot is empty."""
        if self._read(slot, saved) and self.count(slot) >= n_positions(
            saved.pictures, saved.n_cells
        ):
            return True
        self.trim(slot, 0)
        return False

    def _read(self, slot: int, saved: SavedState) -> bool:
        n_bytes = len(saved.data)
        n_read = llama_cpp.llama_state_seq_set_data_ext(
            self._ctx, _bytes_of(saved.data), n_bytes, slot, saved.flags
        )
        return bool(n_read == n_bytes)


def _bytes_of(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


@dataclass(frozen=True, slots=True)
class FoundMemory:
    """What was found out of a context's memory."""

    capabilities: KvCapabilities
    state: SavedState | None
    """The recurrent state of a sequence of one token; None where there is none, or it could not be saved."""
    format: SavedFormat | None
    """How the context writes a state; None where the layout is not known."""
    can_cut: bool
    """Whether the last tokens of a sequence can be taken back, as long as it only grows: with sliding windows too."""
    is_pad_finite: bool = False
    """Whether the cell of token 0, which pad rows compute, is known to hold no NaN and no infinity."""


def find_memory(ctx: Any, model: LlamaModel, options: EngineOptions) -> FoundMemory:
    """Find out what the memory of an empty context can do, by some one-token decodes. It is empty again afterwards.

    Raises:
        IncompatibleLlamaError: a token cannot be decoded, or the memory counts positions otherwise than llama.cpp's
            header says.
    """
    with closing(_MemoryTrial(ctx, model, options.n_slots)) as trial:
        trial.run()
    kind: Literal["partitioned", "unified", "recurrent"]
    kind = "recurrent" if model.has_states or not trial.is_cut else "partitioned"
    if options.kv == "unified":
        kind = "unified"
    n_bytes, n_per_cell = 0, 0
    if trial.can_save and trial.sample and trial.saved:
        n_first = len(trial.sample.data)
        n_per_cell = -(-(len(trial.saved.data) - n_first) // (_N_KEPT - 1))
        n_bytes = n_first - n_per_cell
    format = read_format(trial.sample.data) if trial.sample else None
    capabilities = KvCapabilities(
        kind=kind,
        n_cells=int(llama_cpp.llama_n_ctx(ctx)),
        can_trim=trial.can_trim,
        can_draft=trial.can_trim,
        can_save=trial.can_save,
        can_check=format is not None,
        can_copy=trial.can_copy,
        can_shift=trial.can_trim and _can_shift(ctx, model, options.cache_type_k),
        saved_bytes=n_bytes,
        saved_bytes_per_cell=n_per_cell,
    )
    # `swa_full`, llama.cpp's default, has cells outside of a window stay while a sequence grows at its end alone
    can_cut = trial.is_cut and not model.has_states
    is_pad_finite = bool(format and trial.sample and _is_finite(format, trial.sample))
    return FoundMemory(capabilities, trial.state, format, can_cut, is_pad_finite)


def _is_finite(format: SavedFormat, state: SavedState) -> bool:
    try:
        format.cut(state.data)
    except ValueError:
        return False
    return True


class _MemoryTrial:
    """Tries the memory of an empty context by one-token decodes, with the first slot and the last."""

    def __init__(self, ctx: Any, model: LlamaModel, n_slots: int) -> None:
        self._cells, self._model, self._last = LlamaCells(ctx), model, n_slots - 1
        self._stepper = NativeStepper(
            ctypes.cast(ctx, ctypes.c_void_p),
            n_slots=n_slots,
            n_batch=1,
            n_vocab=model.vocab.n_vocab,
            n_threads=1,
        )
        for slot in (0, self._last):
            self._stepper.bind(Binding(Slot(slot), 0, GREEDY, ()))
        self.close = self._stepper.close

    def run(self) -> None:
        """Find out what the memory can do; every slot is empty again afterwards.

        Where layers have a sliding window, llama.cpp reuses cells that left it and does not save them, so a trimmed
        sequence may lack cells: such a memory counts as one that cannot trim.
        Source: src/llama-kv-cache.cpp, find_slot and state_write.
        """
        cells, last = self._cells, self._last
        self._decode(0, 0)
        n_first, self.sample = cells.count(0), cells.save(0)
        part = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        self.state = cells.save(0, part) if self._model.has_states else None
        self._decode(0, 1)
        self._decode(0, 2)
        self.saved, undisturbed = cells.save(0), self._decode(0, _N_KEPT)
        self.is_cut = cells.trim(0, _N_KEPT) and cells.count(0) == _N_KEPT
        self.can_trim = self.is_cut and self._model.has_plain_cells
        self.can_copy = self.can_trim and last > 0 and self._copies(undisturbed)
        cells.trim(0, 0)
        if (n_first, cells.count(0)) != (1, 0):
            raise IncompatibleLlamaError(
                f"one decoded token took {n_first} positions, and {cells.count(0)} after its removal; expected 1 and 0 "
                f"(llama-cpp-python {llama_cpp.__version__})"
            )
        is_loaded = self.saved is not None and cells.load(last, self.saved)
        self.can_save = is_loaded and self._decode(last, _N_KEPT) == undisturbed
        cells.trim(last, 0)

    def _copies(self, undisturbed: int | None) -> bool:
        """Whether the beginning of a longer sequence, copied to another slot, is continued as it is alone."""
        cells, last, n_copied = self._cells, self._last, _N_KEPT - 1
        cells.copy(0, last, n_copied)
        is_alike = cells.count(last) == n_copied
        for position in range(n_copied, _N_KEPT + 1):
            is_alike = self._decode(last, position) in (None, undisturbed) and is_alike
        cells.trim(last, 0)
        return is_alike

    def _decode(self, slot: int, position: int) -> int | None:
        """Compute one token, whose id is its position; return the likeliest next token after the last position."""
        has_output = position == _N_KEPT
        result = self._stepper.run([Span(Slot(slot), position, (position,), has_output)])
        if result.code:
            raise IncompatibleLlamaError(
                f"llama_decode returned {result.code} for token {position} of a sequence "
                f"(llama-cpp-python {llama_cpp.__version__})"
            )
        return result.tokens[0][0] if has_output else None


def _can_shift(ctx: Any, model: LlamaModel, cache_type_k: str) -> bool:
    """Whether keys can be rotated to other positions. Not tried: llama.cpp ends the process where it cannot.

    It cannot with bf16. With blocks it can in heads of one width that 64 divides, unless its variable forbids it.
    Source: src/llama-kv-cache.cpp, attn_rot_k and build_rope_shift (ggml-org/llama.cpp#25636); ggml-cpu/ops.cpp, rope.
    """
    if not llama_cpp.llama_memory_can_shift(llama_cpp.llama_get_memory(ctx)):
        return False
    if CELL_TYPES[cache_type_k].n_block == 1:
        return cache_type_k != "bf16"
    widths = read_layout(model).key_widths
    is_rotated = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0") == "0"
    return is_rotated and len(widths) == 1 and not max(widths) % _N_ROTATED
