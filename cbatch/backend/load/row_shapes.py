"""The shape of steps under `exact`: the numbers of rows that give a sequence the same logits, whatever its company."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.pad_rows import (
    ANY_SHAPE,
    CHUNK_ALIGNMENT,
    LAST_CHUNKS,
    N_CUT_LEAST,
    PAD_TOKEN,
    RowShape,
    n_sequences,
    shapes,
)
from cbatch.backend.load.probe import (
    COULD_NOT_RUN,
    Probe,
    difference,
    probe,
    probed_options,
)
from cbatch.backend.load.weight_kernels import has_plain_weights, may_cut_anywhere, tiled_experts
from cbatch.core.plan import Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import BITWISE, EngineOptions
from cbatch.errors import CBatchError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.load.probe import Logits

N_ROWS_MAX = 32
"""Widest step that is tried: CPU kernels change at 16 rows at most. Source: docs/understand/exactness.md."""

_COUNTS = (1, 3, 4, 7, 8, 9, 16, 17, 31)
"""Rows of steps that are tried, besides the most: on both sides of 8 and 16, with 0 to 3 left over of fours."""

_N_REST = LAST_CHUNKS[0] + 2
_N_LONG = 4 * CHUNK_ALIGNMENT + _N_REST  # above 256: this neighbour has attention look at 512 cells
_N_TOKENS = 3  # that are tried after the texts: kernels that differ give many rows the same bits
_N_TRIES = 10  # of the widths of a shape together: each in one to three places


def find_exact(
    model: LlamaModel, options: EngineOptions, is_stopped: Callable[[], bool] = bool
) -> Tuning:
    """Return how a model is computed so that no logits depend on company, or why it cannot be.

    Works on contexts of its own. The rows of a step are padded as the model's kernels need it. If `flash_attn` is
    "auto", flash attention is turned off only if no shape is exact with it. The order is fixed and no time is measured,
    because all processes that load this model must find the same.
    """
    first = _find(model, options, is_stopped)
    can_go_without = not options.has_quantised_values and options.split_mode != "tensor"
    if first.exactness == BITWISE or options.flash_attn != "auto" or not can_go_without:
        return first
    second = _find(model, replace(options, flash_attn="off"), is_stopped)
    return second if second.exactness == BITWISE else first


def confirm(model: LlamaModel, tuning: Tuning, is_stopped: Callable[[], bool] = bool) -> str:
    """Return `bitwise`, or why a tuning that another process found is not exact in this one."""
    shape = tuning.shape
    found = _find(model, tuning.options, is_stopped, [shape])
    if found.exactness == BITWISE and found.shape != shape:
        return f"not guaranteed: this process cannot cut prompts as other processes do ({shape})"
    return found.exactness


def width_classes(
    model: LlamaModel, options: EngineOptions, is_stopped: Callable[[], bool] = bool
) -> list[list[int]]:
    """Return the numbers of rows up to `parallel` that give the same bits, in groups, that of the widest first."""
    n_probed = min(options.n_slots, N_ROWS_MAX)
    small = probed_options(model, options, n_sequences(n_probed), _N_LONG + 16)
    with model.in_use(), closing(LlamaBackend(model, Tuning(small), owns_model=False)) as backend:
        return _WidthTrial(backend, is_stopped).classes(n_probed)


def _find(
    model: LlamaModel,
    options: EngineOptions,
    is_stopped: Callable[[], bool],
    possible: Sequence[RowShape] = (),
) -> Tuning:
    """Try shapes, by default all, with as many rows as all engines that must give the same bits have together."""
    n_rows = options.n_exact_slots
    n_probed = min(n_rows, N_ROWS_MAX)
    small = probed_options(model, options, n_sequences(n_probed), _N_LONG + 16)
    possible = possible or shapes(n_rows, is_plain=has_plain_weights(model))
    if experts := tiled_experts(model, options):
        return Tuning(options, exactness=f"not guaranteed: {experts}")
    try:
        with (
            model.in_use(),
            closing(LlamaBackend(model, Tuning(small), owns_model=False)) as backend,
        ):
            tried = [s for s in possible if s.least <= backend.n_slots and backend.can_pad]
            found = _WidthTrial(backend, is_stopped).find(
                tried or [ANY_SHAPE], n_probed, is_free=may_cut_anywhere(model, options)
            )
            can_trim = backend.memory.can_trim
    except CBatchError as error:
        return Tuning(options, exactness=f"{COULD_NOT_RUN}: {error}")
    if isinstance(found, str):
        return Tuning(options, exactness=found)
    exactness = BITWISE if can_trim else probe(model, options, is_stopped, found)
    shape = found if exactness == BITWISE else ANY_SHAPE
    return Tuning(options, exactness=exactness, shape=shape)


_Computed: TypeAlias = "tuple[Logits, NDArray[np.uint8] | None]"
"""Logits after the last token, and all that a slot holds."""


def _are_alike(a: _Computed, b: _Computed) -> bool:
    (logits, cells), (others, other_cells) = a, b
    if cells is None or other_cells is None:
        return False
    return not difference(logits, others) and np.array_equal(cells, other_cells)


class _WidthTrial(Probe):
    """Decodes sequences, one a slot, in steps of many widths, and compares the logits of each with those of the widest.

    The first sequence is long, the others have one token.
    """

    def __init__(self, backend: LlamaBackend, is_stopped: Callable[[], bool]) -> None:
        n_most = min(backend.n_window, _N_LONG + 16) - 2
        super().__init__(backend, n_most + 2, is_stopped)
        dice, n_vocab = random.Random(2), backend.vocab.n_vocab
        sizes = [1] * backend.n_slots
        sizes[0] = n_long = min(_N_LONG, n_most)
        if n_long > CHUNK_ALIGNMENT + _N_REST:
            # without its last token: a multiple of cuts, and one more than the shortest last chunk that is tried
            sizes[0] -= (n_long - _N_REST) % CHUNK_ALIGNMENT
        self._texts = [dice.choices(range(n_vocab), k=n) for n in sizes]
        self._next = [dice.choices(range(n_vocab), k=_N_TOKENS) for _ in self._texts]
        self._last = Slot(backend.n_slots - 1)
        if self._last and backend.can_pad:
            self._texts[self._last] = [PAD_TOKEN]
        self._after_text = np.empty(0, np.float32)
        """Logits after the text of the last slot."""
        self._whole: _Computed | None = None
        """What the long text but its last token gave in as few chunks as it can have."""
        self._known: dict[tuple[int, int], Logits] = {}
        """Logits after each text and each of its next tokens, all slots in one step."""
        self._saved: dict[int, NDArray[np.uint8]] = {}
        """What each slot holds after its text, where its last tokens cannot be taken back."""
        self._found: dict[int, float] = {}
        """By how much logits of steps of each width that was tried differ from these at most."""

    def find(self, tried: Sequence[RowShape], n_rows: int, *, is_free: bool) -> RowShape | str:
        """Return the first shape in which no logits depend on the step, or why there is none.

        Where `is_free`, prompts may be cut at more places than they have to be.
        """
        self._fill()
        if any(shape.has_pads for shape in tried) and np.isnan(self._after_text).any():
            return f"not guaranteed: cells of token {PAD_TOKEN}, which pad rows compute, are NaN"
        for i_token in range(_N_TOKENS):
            self._most_difference(range(self._backend.n_slots), i_token)
        if self._saved and (by := self._most_difference(range(self._backend.n_slots), 0)):
            return f"not guaranteed: logits change when saved states are loaded (by up to {by:.2g})"
        refusal = ""
        for shape in tried:
            widths = {shape.width(n) for n in (*_COUNTS, n_rows) if n <= n_rows}
            refusal = self._refusal(sorted(widths))
            if not refusal:
                shape = replace(shape, n_last=self._n_last() if is_free else 0)
                return self._refusal_of_likes() or shape
        return refusal

    def classes(self, n_rows: int) -> list[list[int]]:
        """Return the widths of steps of up to `n_rows` rows, in groups that give each sequence the same bits."""
        self._fill()
        groups: list[list[int]] = []
        known: list[dict[tuple[int, int], bytes]] = []
        for width in range(n_rows, 0, -1):
            rows: dict[tuple[int, int], bytes] = {}
            for i_token in range(_N_TOKENS):
                self._known.clear()
                self._most_difference(range(width), i_token)
                rows.update(
                    (key, sha256(row.tobytes()).digest()) for key, row in self._known.items()
                )
            alike = (i for i, of_wider in enumerate(known) if rows.items() <= of_wider.items())
            i_group = next(alike, len(groups))
            if i_group == len(groups):
                groups.append([])
                known.append(rows)
            groups[i_group].insert(0, width)
        return groups

    def _fill(self) -> None:
        """Compute the texts, the last token of each in one step."""
        self.clear()
        if first := self._texts[0][:-1]:
            self._whole = self.prefill(Slot(0), first), self._state()
        chunks = [
            Span(Slot(slot), len(text) - 1, text[-1:], has_output=True)
            for slot, text in enumerate(self._texts)
        ]
        self._after_text = self.run(chunks, self._last)
        self._saved = {}
        if not self._backend.take_back(()) and self._backend.memory.can_save:
            self._save()

    # ---- cuts of prompts ----

    def _n_last(self) -> int:
        """Return the fewest tokens of a last chunk with which a prompt's cuts change no bits; 0 where they do.

        Prompts are computed whole and cut at multiples; logits and all cells are compared.
        """
        whole, end, n_most = self._whole, len(self._texts[0]) - 1, self._backend.cuts.most
        if whole is None or whole[1] is None or n_most < N_CUT_LEAST or end < 3 * CHUNK_ALIGNMENT:
            return 0
        if end > n_most:  # it was cut
            end -= CHUNK_ALIGNMENT
            whole = self._computed((0, end))
        # by flash attention few rows differ from many, even where rounding hides it from what is tried here
        is_off = self._backend.options.flash_attn == "off"
        for n_last in LAST_CHUNKS if is_off else LAST_CHUNKS[-1:]:
            last = (end - n_last) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
            places = last - CHUNK_ALIGNMENT, last, end
            if _are_alike(self._computed(places), whole):
                return n_last
        return 0

    def _computed(self, places: Sequence[int]) -> _Computed:
        """Return what the long text gives up to the last of these places, cut at all of them."""
        text, slot = self._texts[0], Slot(0)
        if self._backend.memory.can_trim and self._backend.n_cells[0] >= places[0] > 0:
            self._backend.run(StepPlan((), trims=((slot, places[0]),)))
        else:
            self.clear()
            places = sorted({0, *places})
        for start, end in pairwise(places):
            logits = self.run([Span(slot, start, text[start:end], has_output=end == places[-1])], 0)
        return logits, self._state()

    def _state(self) -> NDArray[np.uint8] | None:
        if not self._backend.memory.can_save:
            return None
        self._backend.run(StepPlan((), saves=((Slot(0), 0),)))
        return self._backend.export_state(0)

    # ---- back to the texts ----

    def _save(self) -> None:
        slots = [Slot(i) for i in range(self._backend.n_slots)]
        self._backend.run(StepPlan((), saves=tuple((slot, slot) for slot in slots)))
        for slot in slots:
            if (data := self._backend.export_state(slot)) is None:
                raise EngineError("states cannot be saved")
            self._saved[slot] = data

    def _take_back(self, chunks: Sequence[Span]) -> None:
        """Have slots hold their texts again and no more."""
        if self._backend.take_back(chunks):
            return
        if not self._saved:
            self._fill()
            return
        for chunk in chunks:
            self._backend.import_state(chunk.slot, self._saved[chunk.slot], chunk.start)
        loads = tuple((chunk.slot, int(chunk.slot), chunk.start) for chunk in chunks)
        slots = tuple(chunk.slot for chunk in chunks)
        self._backend.run(StepPlan((), clears=slots, loads=loads, forgets=slots))

    def _refusal(self, widths: Sequence[int]) -> str:
        """Return how logits differ among steps of these widths, which are tried in the order given."""
        n_places = max(1, min(3, _N_TRIES // len(widths)))
        for width in widths:
            if width not in self._found and width < self._backend.n_slots:
                self._found[width] = self._difference_of(width, len(self._found), n_places)
            if by := self._found.get(width):
                return (
                    "not guaranteed: logits change with the number of rows in a step "
                    f"({width} rows against {self._backend.n_slots}, by up to {by:.2g})"
                )
        return ""

    def _difference_of(self, width: int, i_width: int, n_places: int) -> float:
        """Return by how much logits of steps of this width differ: in the first slots, the last, in the middle."""
        n_free = self._backend.n_slots - width
        starts = (0, n_free, n_free // 2)
        return max(
            self._most_difference(range(start, start + width), (i_width + i) % _N_TOKENS)
            for i in range(n_places)
            for start in (starts[(i_width + i) % len(starts)],)
        )

    def _refusal_of_likes(self) -> str:
        """Return how logits of a sequence differ where all of a step are like it, and so choose the same experts."""
        if not self._last:
            return ""
        self.clear()
        text = self._texts[self._last]
        slots = [Slot(i) for i in range(self._backend.n_slots)]
        self.run([Span(slot, 0, text, has_output=True) for slot in slots], 0)
        if by := max(difference(self._backend.logits(slot), self._after_text) for slot in slots):
            return (
                f"not guaranteed: logits change with the other rows of a step (by up to {by:.2g})"
            )
        return ""

    def _most_difference(self, slots: range, i_token: int) -> float:
        """Decode a next token of each of these slots; return by how much logits differ from those that are known."""
        chunks = [
            Span(Slot(i), len(self._texts[i]), (self._next[i][i_token],), has_output=True)
            for i in slots
        ]
        self.run(chunks, 0)
        found = 0.0
        for i in slots:
            logits = self._backend.logits(Slot(i))
            found = max(found, difference(self._known.setdefault((i, i_token), logits), logits))
        self._take_back(chunks)
        return found
