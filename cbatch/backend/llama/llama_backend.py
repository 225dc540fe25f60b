"""Step plans on a llama.cpp context: the memory verbs, one native call a run, and the checks before each."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.attention_tiles import most_long_context_prefills
from cbatch.backend.llama.context import available_cores, make_context, slot_window
from cbatch.backend.llama.fingerprint import (
    answer_settings,
    fingerprint,
    model_parts,
    rope_factors,
)
from cbatch.backend.llama.grammar import GrammarMatchers, LlamaGrammars
from cbatch.backend.llama.library import handshake
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.memory import LlamaCells, SavedCells, find_memory, has_states
from cbatch.backend.llama.native import NativeStepper
from cbatch.backend.llama.saved import read_format
from cbatch.backend.threads import teams
from cbatch.core.plan import (
    BROKEN_ROW,
    Chunk,
    KvCapabilities,
    Slot,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from cbatch.engine_options import MAX_THREADS
from cbatch.errors import (
    ConfigError,
    EngineClosedError,
    IncompatibleLlamaError,
    ModelLoadError,
    PlanError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from cbatch.backend import Vocab
    from cbatch.backend.llama.adapters import Adapters
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.native import Masks
    from cbatch.backend.llama.saved import SavedFormat
    from cbatch.engine_options import EngineOptions
    from cbatch.options import AdapterSet

_CELLS_UNKNOWN = -3
"""Stands for a failure after which a slot's cells are not known. Source: include/llama.h, llama_decode."""


_UNCHANGED = (0, 1, -1)
"""Codes after which every cell is where the results say. Source: include/llama.h, llama_decode."""


class LlamaBackend:
    """Implements `Backend` over one `llama_context`.

    It keeps its own count of each slot's cells, so that a plan which llama.cpp would answer with an abort of the
    process is refused before the call.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: EngineOptions,
        *,
        owns_model: bool = True,
        stepper: Any = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Make a context for `options.parallel` sequences.

        Args:
            model: a loaded model.
            options: sizes and settings; `exact` turns flash attention off.
            owns_model: close the model with the backend.
            stepper: what runs steps, called as `NativeStepper` is; None for that.
            adapters: what plans may compute with; closed with the backend.

        Raises:
            ModelLoadError: llama.cpp cannot make the context, for want of memory as a rule.
            ConfigError: more cells than llama.cpp can count.
            IncompatibleLlamaError: llama.cpp's memory does not behave as this version of cbatch expects.
        """
        handshake()
        if options.kv == "unified" and has_states(model):
            raise ConfigError(
                "kv='unified' is for cells, but this model keeps a state for each sequence: leave kv and admission out"
            )
        self._model, self._owns_model, self._options = model, owns_model, options
        self._make_stepper = stepper or NativeStepper
        self._adapters = adapters
        self.grammars = LlamaGrammars(model)
        self._is_on_device = llama_cpp.llama_supports_gpu_offload() and options.n_gpu_layers != 0
        self._busy = threading.Lock()
        self._is_closed = False
        self._ctx: Any = None
        self._stepper: Any = None
        self._saved: dict[int, SavedCells] = {}
        self.n_slots = options.n_slots
        self.n_threads = options.n_threads or min(available_cores(), MAX_THREADS)
        self._guides = GrammarMatchers(self.n_slots, self.n_threads)
        self.is_unified = options.kv == "unified"
        try:
            self._open()
            self._sample = self._try_memory()
            self.memory = self._find_memory()
            self._format = self._find_format()
            self.memory = replace(self.memory, can_check=self._format is not None)
        except BaseException:
            self._free()
            raise
        self.n_window = slot_window(
            options,
            self.memory.n_cells,
            model.n_ctx_train,
            is_pool=self.memory.kind == "unified",
        )
        self.chunk_alignment = _chunk_alignment(self.n_batch, options)
        self._parts = model_parts(model.name)
        self._rope_factors = rope_factors(model, int(llama_cpp.llama_n_ctx_seq(self._ctx)))
        model.contexts.add(self)
        llama_log().install()

    def _open(self) -> None:
        """Make the context and what works on it; every slot is empty and unbound."""
        self._ctx = make_context(self._model, self._options, self.n_threads)
        self._cells = LlamaCells(self._ctx)
        self.n_batch = int(llama_cpp.llama_n_batch(self._ctx))
        self.n_cells = [0] * self.n_slots
        self._uncopied: set[Slot] = set()
        self._unshifted: set[Slot] = set()
        self._doubtful: set[Slot] = set()
        self._last_chunks: Sequence[Chunk] = ()
        self._stepper = self._make_stepper(
            ctypes.cast(self._ctx, ctypes.c_void_p),
            n_slots=self.n_slots,
            n_batch=self.n_batch,
            n_vocab=self._model.vocab.n_vocab,
            n_threads=self.n_threads,
        )

    def _try_memory(self) -> SavedCells | None:
        """Decode one token and take it back: positions must be what llama.cpp's header promises. Return its cell."""
        token = self.vocab.end_tokens[0] if self.vocab.end_tokens else 0
        code = self._stepper.run([Chunk(Slot(0), 0, (token,), has_output=False)], 1).code
        before, sample = self._cells.count(0) - 1, self._cells.save(0)
        self._cells.trim(0, 0)
        after = self._cells.count(0) - 1
        if (code, before, after) != (0, 0, -1):
            raise IncompatibleLlamaError(
                f"one decoded token gave code {code} and last position {before}, {after} when removed; "
                f"expected 0, 0, -1 (llama-cpp-python {llama_cpp.__version__})"
            )
        return sample

    def _find_memory(self) -> KvCapabilities:
        memory = find_memory(
            self._ctx,
            self._model,
            n_slots=self.n_slots,
            is_unified=self.is_unified,
            cache_type_k=self._options.cache_type_k,
        )
        if memory.kind != "partitioned" or self._is_on_device:
            return memory
        return replace(
            memory,
            n_long_context_prefills=most_long_context_prefills(
                self._model, self._options, self.n_threads
            ),
        )

    def _find_format(self) -> SavedFormat | None:
        """Find out how the context writes cells, if that is a known way."""
        if self._sample is None:
            return None
        n_vocab, can_trim = self.vocab.n_vocab, self.memory.can_trim
        return read_format(self._sample.data, n_vocab=n_vocab, can_trim=can_trim)

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary and template."""
        return self._model.vocab

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What the model file says of sampling."""
        return self._model.sampling_defaults

    def run(self, plan: StepPlan) -> StepResult:
        """Do one plan; see `Backend.run`."""
        if not self._busy.acquire(blocking=False):
            self._model.check_open()
            raise PlanError("two threads run one context")
        try:
            return self._run(plan)
        finally:
            self._busy.release()

    def _run(self, plan: StepPlan) -> StepResult:
        if self._ctx is None:
            self._model.check_open()
            raise EngineClosedError("the backend is closed")
        self._check(plan)
        lost, is_loaded = self._move_cells(plan)
        move_s = self._copy(plan.copies) if plan.copies and is_loaded else 0.0
        for slot, n_kept, n in plan.shifts:
            if self.n_cells[slot] >= n_kept + n:  # else they were lost
                self._cells.shift(slot, n_kept, n)
                self.n_cells[slot] -= n
                self._unshifted.add(slot)
        for binding in plan.binds:
            self._stepper.bind(binding)
            self._guides.bind(binding)
        can_compute = plan.chunks and is_loaded
        if can_compute and self.n_threads > 1:
            teams().join()
        if can_compute and self._adapters is not None:
            self._adapters.use(self._ctx, plan.adapters)
        result = self._compute(plan) if can_compute else StepResult([[] for _ in plan.chunks], 0)
        llama_log().drain()
        return replace(result, lost=lost, move_s=move_s) if lost or move_s else result

    # ---- computing ----

    def _compute(self, plan: StepPlan) -> StepResult:
        result = (
            self._pieces(plan) if self.chunk_alignment else self._steps(plan.chunks, plan.n_steps)
        )
        if result.n_steps:
            self._doubt(plan.chunks, result.tokens)
            tokens, guided = self._guides.follow(plan.chunks, result.tokens)
            if guided:
                result = replace(result, tokens=tokens, guided=guided)
            self._uncopied.clear()
            self._unshifted.clear()
            for chunk in plan.chunks:
                self.n_cells[chunk.slot] += len(chunk.tokens) + result.n_steps - 1
        if result.code in _UNCHANGED:
            return result
        return replace(result, n_kept=tuple(self._keep(c, result.n_steps) for c in plan.chunks))

    def _steps(self, chunks: Sequence[Chunk], n_steps: int = 1) -> StepResult:
        self._last_chunks = chunks
        masks = self._guides.masks(chunks)
        result: StepResult
        if masks is None:
            result = self._stepper.run(chunks, n_steps)
        else:
            rows = [m for c, m in zip(chunks, masks, strict=True) if c.has_output]
            result = self._masked(chunks, n_steps, rows)
        return result

    def _masked(self, chunks: Sequence[Chunk], n_steps: int, masks: Masks) -> StepResult:
        """Run with masks: made while a device computes, but before it where that would take the cores from decoding."""
        result: StepResult
        if not self._is_on_device:
            self._guides.fill(chunks)
            result = self._stepper.run(chunks, n_steps, masks)
            return result
        await_masks = self._guides.fill_beside(chunks)
        try:
            result = self._stepper.run(chunks, n_steps, masks, await_masks)
        finally:
            await_masks()  # where decoding failed nobody did
        return result

    def _pieces(self, plan: StepPlan) -> StepResult:
        """Run a plan so that the shape of each computation does not depend on its company: prompts one by one."""
        rows = tuple(c for c in plan.chunks if len(c.tokens) == 1)
        if len(rows) == len(plan.chunks):
            return self._steps(plan.chunks, plan.n_steps)
        groups = [rows] if rows else []
        groups += [(c,) for c in plan.chunks if len(c.tokens) > 1]
        sampled: dict[Slot, list[int]] = {}
        reports: dict[Slot, Sequence[TokenLogprobs]] = {}
        scores: dict[Slot, Sequence[TokenLogprobs]] = {}
        decode_s = sample_s = 0.0
        for group in groups:
            result = self._steps(group)
            if result.code:
                return StepResult([], 0, self._undo(sampled, plan, result.code))
            sampled.update((c.slot, t) for c, t in zip(group, result.tokens, strict=True))
            if result.logprobs:
                reports.update((c.slot, p) for c, p in zip(group, result.logprobs, strict=True))
            scores.update(result.scores)
            decode_s += result.decode_s
            sample_s += result.sample_s
        tokens = [sampled[c.slot] for c in plan.chunks]
        logprobs = [reports.get(c.slot, []) for c in plan.chunks] if reports else ()
        seconds = decode_s + sample_s
        return StepResult(
            tokens, 1, 0, decode_s, sample_s, first_s=seconds, logprobs=logprobs, scores=scores
        )

    def _undo(self, done: Mapping[Slot, object], plan: StepPlan, code: int) -> int:
        """Take back the cells of the groups that were computed before one failed; return the code to report."""
        undone = [
            (self.memory.can_trim or not c.start) and self._cells.trim(c.slot, c.start)
            for c in plan.chunks
            if c.slot in done
        ]
        return code if all(undone) else _CELLS_UNKNOWN

    def _keep(self, chunk: Chunk, n_steps: int) -> int:
        """Keep what a failed step left of a chunk's slot, after `n_steps` that did not fail; return its cells."""
        n_most = chunk.start + len(chunk.tokens) + n_steps
        n_kept = min(n_most, self._cells.count(chunk.slot)) if self.memory.can_trim else 0
        self._cells.trim(chunk.slot, n_kept)
        self.n_cells[chunk.slot] = n_kept
        return n_kept

    # ---- moving cells ----

    def _move_cells(self, plan: StepPlan) -> tuple[tuple[int, ...], bool]:
        """Do what a plan orders before it computes; return the keys lost, and whether all loads were done."""
        for key in plan.forgets:
            self._saved.pop(key, None)
        wanted = [(slot, key) for slot, key in plan.saves if key not in plan.forgets]
        unsaved = [key for slot, key in wanted if not self._save(slot, key)]
        if plan.is_rebuild:
            self._rebuild()
        for slot in plan.clears:
            self._trim(slot, 0)
        for slot, n_cells in plan.trims:
            self._trim(slot, n_cells)
        self._wipe()
        unloaded = [key for slot, key, n in plan.loads if not self._load(slot, key, n)]
        return tuple(dict.fromkeys((*unsaved, *unloaded))), not unloaded

    def _trim(self, slot: Slot, n_cells: int) -> None:
        self._cells.trim(slot, n_cells)
        self.n_cells[slot] = n_cells

    def _wipe(self) -> None:
        """Overwrite what may be no numbers, or no more soon, in slots that are empty now."""
        # while bytes wait to be copied, what is loaded could be taken for them
        if not self._doubtful or self._uncopied:
            return
        empty = [slot for slot, n in enumerate(self.n_cells) if not n]
        left = self._doubtful.intersection(empty)
        self._doubtful -= left
        if left and self.memory.kind == "recurrent" and self._sample is not None:
            self._cells.wipe(empty, self._sample)
        elif left and self._format is not None and self._can_wipe:
            n_cells = self.memory.n_cells // self.n_slots
            with suppress(MemoryError):
                self._cells.wipe(left, SavedCells(self._format.zeros(n_cells), n_cells))

    @property
    def _can_wipe(self) -> bool:
        """Whether all that an emptied slot has left can be overwritten: not what slots share, nor windows."""
        return self.memory.kind == "partitioned" and self.memory.can_trim

    def _doubt(self, chunks: Sequence[Chunk], tokens: Sequence[Sequence[int]]) -> None:
        """Take in whose rows were broken, and whose were not: then their cells are sound, but a state may grow on."""
        for chunk, sampled in zip(chunks, tokens, strict=True):
            if sampled and sampled[-1] == BROKEN_ROW:  # a run ends with it
                self._doubtful.add(chunk.slot)
            elif sampled and self.memory.kind != "recurrent":
                self._doubtful.discard(chunk.slot)

    def _copy(self, copies: Sequence[tuple[Slot, Slot, int]]) -> float:
        """Copy beginnings from slot to slot; return the seconds it took.

        Between slots with memory of their own llama.cpp copies all that a slot can hold. What is in it alone goes
        faster through host memory, where the cells are there anyway: 700 cells of 12 layers took 1.5 ms, and 0.3 for
        each further slot, against 1.6 ms a slot in windows of 2,048 and 5.5 ms in windows of 8,192.
        """
        start = time.perf_counter()
        saved: dict[Slot, SavedCells | None] = {}
        for source, slot, n_cells in copies:
            if source not in saved:
                saved[source] = self._cells.save(source) if self._is_half_empty(source) else None
            cells = saved[source]
            # while bytes wait to be copied, what is loaded could be taken for them
            if cells is None or self._uncopied or not self._cells.load(slot, cells):
                self._cells.copy(source, slot, n_cells)
                self._uncopied.add(slot)
            else:
                self._cells.trim(slot, n_cells)
            self.n_cells[slot] = n_cells
            if source in self._doubtful:
                self._doubtful.add(slot)
        return time.perf_counter() - start

    def _is_half_empty(self, slot: Slot) -> bool:
        """Whether a slot's cells are better copied than all that it can hold."""
        is_settled = slot not in self._uncopied and slot not in self._unshifted
        is_apart = self.memory.kind == "partitioned" and not self._is_on_device
        return is_apart and is_settled and 2 * self.n_cells[slot] <= self.n_window

    def _save(self, slot: Slot, key: int) -> bool:
        if slot in self._uncopied or slot in self._unshifted:  # a step failed before that was done
            return False
        saved = self._cells.save(slot)
        if saved is None or saved.n_cells != self.n_cells[slot]:
            return False
        self._saved[key] = replace(saved, is_doubtful=slot in self._doubtful)
        return True

    def _load(self, slot: Slot, key: int, n_cells: int) -> bool:
        saved = self._saved.pop(key, None)
        # while bytes wait to be copied, what is loaded could be taken for them
        if saved is None or self._uncopied or not self._cells.load(slot, saved):
            return False
        if self._cells.count(slot) > n_cells:
            self._cells.trim(slot, n_cells)
        if self._cells.count(slot) != n_cells:
            self._cells.trim(slot, 0)
            return False
        self.n_cells[slot] = n_cells
        if saved.is_doubtful:
            self._doubtful.add(slot)
        return True

    def import_state(self, key: int, data: NDArray[np.uint8], n_cells: int) -> None:
        """Take cells that were saved; see `Backend.keep`."""
        self._saved[key] = SavedCells(data, n_cells, is_doubtful=True)

    def validate_state(
        self, data: NDArray[np.uint8], n_cells: int, n_wanted: int
    ) -> NDArray[np.uint8]:
        """Return cells from elsewhere as this memory would have them; see `Backend.fit`."""
        if self._format is None:
            raise ValueError("are of a memory whose layout this version does not know")
        return self._format.fit(data, n_cells, n_wanted)

    def export_state(self, key: int) -> NDArray[np.uint8] | None:
        """Hand out what was saved; see `Backend.take`."""
        saved = self._saved.pop(key, None)
        return None if saved is None else saved.data

    @property
    def adapters(self) -> Sequence[str]:
        """The names of LoRA adapters that a plan may ask for."""
        return () if self._adapters is None else self._adapters.names

    @property
    def answer_settings(self) -> Mapping[str, str]:
        """What answers depend on besides the model; see `Backend.answer_settings`."""
        said = answer_settings(self._options, self.chunk_alignment, self.n_window)
        return {**said, "rope factors": self._rope_factors}

    def fingerprint(self, adapters: AdapterSet) -> Mapping[str, str]:
        """Return what cells depend on; see `Backend.fingerprint`."""
        said = {
            "pieces": str(self.chunk_alignment),
            "rope factors": self._rope_factors,
        }
        if self._adapters is not None:
            digests = [f"{self._adapters.digest(name)} × {scale}" for name, scale in adapters]
            said["adapters"] = ", ".join(digests)
        return {**fingerprint(self._parts, self._options), **said}

    def _rebuild(self) -> None:
        self._free()
        try:
            self._open()
        except PlanError as error:  # sizes that it was made with before: the stepper's memory
            self._free()
            raise ModelLoadError(f"a context could not be made anew: {error}") from error

    def logits(self, slot: Slot) -> NDArray[np.float32]:
        """Return the logits after a slot's last token, which the last step computed and sampled.

        Returns:
            (n_vocab,) float32, a copy.
        """
        i_chunk = [c.slot for c in self._last_chunks].index(slot)
        row = llama_cpp.llama_get_logits_ith(self._ctx, output_row(self._last_chunks, i_chunk))
        return np.ctypeslib.as_array(row, shape=(self.vocab.n_vocab,)).copy()

    def interrupt(self) -> None:
        """End a run in flight after its current step. From any thread."""
        self._stepper.interrupt()

    def close(self) -> None:
        """Free the context and saved cells, and the model where it is owned. Twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._free()
        self._saved.clear()
        self._guides.close()
        self.grammars.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._owns_model:
            self._model.close()
        llama_log().remove()

    def give_up(self) -> None:
        """Free the context, for the model's owner frees the model; waits for the run in flight. From any thread."""
        self.interrupt()
        with self._busy:
            self._free()
            if self._adapters is not None:
                self._adapters.close()

    def _free(self) -> None:
        if self._stepper is not None:
            self._stepper.close()
        ctx, self._ctx = self._ctx, None
        if ctx is not None:
            llama_cpp.llama_free(ctx)

    # ---- checking ----

    def _check(self, plan: StepPlan) -> None:
        """Refuse what llama.cpp would answer with an abort, before anything is done."""
        moved = (*plan.clears, *(slot for slot, *_ in (*plan.trims, *plan.saves, *plan.loads)))
        moved += tuple(slot for slot, *_ in plan.shifts)
        moved += tuple(slot for source, target, _ in plan.copies for slot in (source, target))
        named = (*moved, *(b.slot for b in plan.binds))
        if named and not 0 <= min(named) <= max(named) < self.n_slots:
            raise PlanError(f"slots are 0 … {self.n_slots - 1}: {plan!r}")
        has_moves = moved or plan.forgets or plan.is_rebuild
        n_cells = self._cells_after_moves(plan) if has_moves else self.n_cells
        previous = -1
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens) + plan.n_steps - 1
            if (
                not previous < chunk.slot < self.n_slots
                or not chunk.tokens
                or chunk.start != n_cells[chunk.slot]
                or end > self.n_window
            ):
                self._refuse(plan, f"slot {chunk.slot} cannot compute its chunk")
            previous = chunk.slot

    def _cells_after_moves(self, plan: StepPlan) -> list[int]:
        """Return what each slot holds when computing begins, or refuse an order that cannot be done."""
        saved = self._saved_after_moves(plan)
        n_cells = [0] * self.n_slots if plan.is_rebuild else self.n_cells.copy()
        for slot in plan.clears:
            n_cells[slot] = 0
        for slot, n_kept in plan.trims:
            if not self.memory.can_trim or not 0 <= n_kept <= n_cells[slot]:
                self._refuse(plan, f"slot {slot} cannot be cut to {n_kept} cells")
            n_cells[slot] = n_kept
        for source, slot, n_copied in plan.copies:
            if not self.memory.can_copy or n_cells[slot] or not 0 < n_copied <= n_cells[source]:
                self._refuse(plan, f"{n_copied} cells of slot {source} cannot be copied to {slot}")
            n_cells[slot] = n_copied
        for slot, key, n in plan.loads:
            if n_cells[slot] or not 0 < n <= min(saved.pop(key, 0), self.n_window):
                self._refuse(plan, f"{n} cells saved under {key} cannot be put into slot {slot}")
            n_cells[slot] = n
        for slot, n_kept, n in plan.shifts:
            if not self.memory.can_shift or not 0 < n <= n_cells[slot] - n_kept or n_kept < 0:
                self._refuse(plan, f"{n} cells cannot be taken out of slot {slot}")
            n_cells[slot] -= n
        return n_cells

    def _saved_after_moves(self, plan: StepPlan) -> dict[int, int]:
        """Return how many cells there are under each key when loading begins, or refuse to save."""
        saved = {key: cells.n_cells for key, cells in self._saved.items()}
        for slot, key in plan.saves:
            if not self.memory.can_save or key in saved or not self.n_cells[slot]:
                self._refuse(plan, f"slot {slot} cannot be saved under {key}")
            saved[key] = self.n_cells[slot]
        for key in plan.forgets:
            saved.pop(key, None)
        return saved

    def _refuse(self, plan: StepPlan, why: str) -> NoReturn:
        raise PlanError(f"{why}: slots have {self.n_cells} cells of {self.n_window}: {plan!r}")


def output_row(chunks: Sequence[Chunk], i_chunk: int) -> int:
    """Return the batch index of a chunk's last token: all first tokens come first, then the remainders."""
    if len(chunks[i_chunk].tokens) == 1:
        return i_chunk
    return len(chunks) + sum(len(c.tokens) - 1 for c in chunks[: i_chunk + 1]) - 1


def _chunk_alignment(n_batch: int, options: EngineOptions) -> int:
    """Return the size of a prompt's pieces: one graph run, and room for one beside the rows of all others."""
    return min(options.n_ubatch, n_batch - options.n_slots + 1) if options.exact else 0
