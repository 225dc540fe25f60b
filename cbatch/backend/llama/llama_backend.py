"""`Backend` over one llama.cpp context: its life, and a plan from the check to the result."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.devices import computes_on_cpu
from cbatch.backend.host_limits import available_cores
from cbatch.backend.llama.cheaper_widths import CheaperWidths
from cbatch.backend.llama.context import (
    make_context,
    n_pad_cells,
    sequences_of,
    slot_window,
)
from cbatch.backend.llama.context_memory import ContextMemory
from cbatch.backend.llama.elastic_threads import ElasticThreads
from cbatch.backend.llama.embedder import LlamaEmbedder, check_pooling
from cbatch.backend.llama.fingerprint import (
    answer_settings,
    depends_on_threads,
    fingerprint,
    rope_factors,
)
from cbatch.backend.llama.grammar import LlamaGrammars
from cbatch.backend.llama.grammar_matchers import GrammarMatchers
from cbatch.backend.llama.library import handshake
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.memory import FoundMemory, SavedState, find_memory
from cbatch.backend.llama.model import LlamaModel, facts_of
from cbatch.backend.llama.native import NativeStepper
from cbatch.backend.llama.openmp import end_team, short_waits
from cbatch.backend.llama.pad_rows import PadRows
from cbatch.backend.llama.picture_rows import PictureRows
from cbatch.backend.llama.projector import Projector
from cbatch.backend.llama.short_pool import ShortPool, may_have_short_pool
from cbatch.backend.llama.step_runner import StepRunner
from cbatch.backend.threads import teams
from cbatch.core.plan import BROKEN_ROW, N_STEPS_MAX, UNCHANGED, Binding, Slot, StepPlan, StepResult
from cbatch.core.span import ANYWHERE, Span
from cbatch.engine_options import MAX_THREADS
from cbatch.errors import EngineClosedError, EngineError, ModelLoadError, PlanError
from cbatch.support.logs import Log
from cbatch.support.taken_cores import TakenCores, my_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from cbatch.backend import Embedder, Vocab
    from cbatch.backend.llama.adapters import Adapters
    from cbatch.backend.llama.draft_model import DraftModel
    from cbatch.backend.llama.model_tuning import Tuning
    from cbatch.embedding import Pooling
    from cbatch.options import AdapterSet
    from cbatch.support.model_facts import ModelFacts

_log = Log("cbatch")


class LlamaBackend:
    """Implements `Backend` over one `llama_context`."""

    def __init__(
        self,
        model: LlamaModel,
        tuning: Tuning,
        *,
        owns_model: bool = True,
        stepper: Any = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Make a context for `tuning.options.parallel` sequences.

        Args:
            tuning: sizes and settings, and what was found out about the model.
            stepper: what runs steps, called as `NativeStepper` is; None for that.
            adapters: what plans may compute with; closed with the backend.

        Raises:
            ModelLoadError: llama.cpp cannot make the context, for want of memory as a rule.
            ConfigError: more cells than llama.cpp can count.
            IncompatibleLlamaError: llama.cpp's memory does not behave as this version of cbatch expects.
        """
        handshake()
        options = tuning.options
        self.model, self.tuning, self.options, self.owns_model = model, tuning, options, owns_model
        self._stepper_class: Callable[..., NativeStepper] = stepper or NativeStepper
        self._adapters = adapters
        self._draft: DraftModel | None = None
        self.projector: Projector | None = None
        """What encodes pictures; None without one."""
        self.adapters: Sequence[str] = () if adapters is None else adapters.names
        self.grammars = LlamaGrammars(model)
        self.vocab: Vocab = model.vocab
        self.sampling_defaults = model.sampling_defaults
        self._busy = threading.Lock()
        self._is_closed = False
        self.n_slots = options.n_slots
        self.n_threads = options.n_threads or min(available_cores(), MAX_THREADS)
        self._n_threads_now = self.n_threads
        self.ctx: Any = make_context(model, options, self.n_threads)
        """`llama_context *`; None once it is freed. Another one after a plan with `is_rebuild`."""
        try:
            self._set_up()
            self._rope_factors = rope_factors(model, int(llama_cpp.llama_n_ctx_seq(self.ctx)))
        except BaseException:
            llama_cpp.llama_free(self.ctx)
            raise
        self.short_pool = self._make_short_pool() if tuning.has_short_pool else None
        """Where slots' cells are while all sequences are short; None without one."""
        model.contexts.add(self)
        llama_log().install()

    def _make_short_pool(self) -> ShortPool | None:
        if self._format is None or not may_have_short_pool(self.model, self.options):
            return None
        try:
            return ShortPool(self.model, self.options, self.n_threads, self._format)
        except (ModelLoadError, ValueError) as error:
            _log.write(logging.INFO, "no second cache for short sequences: %s", error)
            return None

    def _make_elastic(self) -> ElasticThreads | None:
        """Return what varies waits and threads; `n_threads` fixes their number, and so does `exact` if bits change."""
        options = self.options
        self._needs_threads = options.exact and depends_on_threads(
            options, self.tuning.shape, self.cuts, self.n_window
        )
        is_fixed = options.n_threads is not None or self._needs_threads
        waits = short_waits(self.n_threads)
        if not self.tuning.may_vary_threads or self.n_threads == 1 or (is_fixed and not waits):
            return None
        return ElasticThreads(
            self.n_threads,
            want_waits=waits.want if waits else None,
            n_taken=TakenCores(my_cores()).n_since,
            is_fixed=is_fixed,
        )

    def _set_threads(self, n_threads: int) -> None:
        short = self.short_pool.ctx if self.short_pool else None
        for ctx in filter(None, (self.ctx, short)):
            llama_cpp.llama_set_n_threads(ctx, n_threads, n_threads)
        if self._draft is not None:
            self._draft.set_threads(n_threads)
        self._runner.set_threads(n_threads)
        self._n_threads_now = n_threads

    def draft_with(self, draft: DraftModel) -> None:
        """Draft tokens with a smaller model, too; it is closed with the backend. Slots are empty.

        Raises:
            ModelLoadError: its context cannot be made.
        """
        if self._draft is None and self.memory.can_draft:
            draft.make_context(self.options, self.n_threads)
            self._draft = draft
            self._runner.free()
            self._runner.renew()
        else:
            _log.warn(
                "the draft model has no effect: rejected draft tokens cannot be removed from this model's memory"
            )
            draft.close()

    # ---- the context's life ----

    def _set_up(self) -> None:
        options = self.options
        self._is_on_device = is_on_device = not computes_on_cpu(options)
        found = find_memory(self.ctx, self.model, options)
        self._settle_memory(found)
        self.n_batch = int(llama_cpp.llama_n_batch(self.ctx))
        # exact: a chunk is one run of the graph, with room for one row of every other slot
        n_alone = min(options.n_ubatch, max(1, self.n_batch - options.n_exact_slots + 1))
        self.cuts = self.tuning.shape.cuts(n_alone) if options.exact else ANYWHERE
        self.has_prompts_apart = self.memory.kind != "unified" and not is_on_device
        """Whether llama.cpp computes prompts of several lengths in several runs of the graph."""
        self._format = found.format
        self._cells = ContextMemory(
            self.ctx,
            found,
            n_slots=self.n_slots,
            n_window=self.n_window,
            is_on_device=is_on_device,
            n_pad_cells=n_pad_cells(options),
            keeps_places=options.exact and self.model.has_window,
        )
        self._matchers = GrammarMatchers(self.n_slots, self.n_threads)
        self._elastic = self._make_elastic()
        self._runner = StepRunner(
            self._make_stepper,
            self._matchers,
            PadRows(self.tuning.shape, self._cells, sequences_of(options)),
            is_on_device=is_on_device,
            cheaper_widths=self._make_cheaper_widths(found),
        )

    def _settle_memory(self, found: FoundMemory) -> None:
        model, options = self.model, self.options
        self.memory = found.capabilities
        self.n_window = slot_window(
            options, self.memory.n_cells, model.n_ctx_train, is_pool=self.memory.kind == "unified"
        )
        if options.exact and model.has_learned_positions:
            # pad rows stand after a slot's cells, and llama.cpp ends the process at positions that were not learned
            self.n_window = max(1, min(self.n_window, model.n_ctx_train - N_STEPS_MAX))
        # with windows, cells are loaded into the places that they had only where their layout is known
        can_save = self.memory.can_save and not (model.has_window and found.format is None)
        self.can_pad = found.can_cut or can_save
        """Whether pad rows leave what slots hold as it is."""
        if options.exact:  # without what is for pad rows
            n_cells = self.n_slots * self.n_window
            self.memory = replace(self.memory, n_cells=n_cells, can_save=can_save)

    def _make_cheaper_widths(self, found: FoundMemory) -> CheaperWidths | None:
        """Return what tries steps with pad rows; None where these are not known to be harmless."""
        is_apart = self.memory.kind == "partitioned" and not self.model.has_window
        is_harmless = is_apart and found.can_cut and found.is_pad_finite
        if not (self.tuning.may_widen and is_harmless) or self.options.exact or self._is_on_device:
            return None
        n_most = int(llama_cpp.llama_n_ubatch(self.ctx))
        return CheaperWidths(self._cells, n_slots=self.n_slots, n_most=n_most)

    def _make_stepper(self) -> tuple[NativeStepper, Any]:
        stepper = self._stepper_class(
            ctypes.cast(self.ctx, ctypes.c_void_p),
            n_slots=sequences_of(self.options),
            n_batch=self.n_batch,
            n_vocab=self.model.vocab.n_vocab,
            n_threads=self.n_threads,
            has_silent_rows=self.options.exact,
        )
        stepper.has_all_drafts = isinstance(self.options.speculate, int)
        if self.projector is not None and self.projector.has_flat_pictures:
            stepper.position = self._cells.position
        if self._draft is not None:
            self._draft.serve(stepper)
        return stepper, self.ctx

    def see_with(self, path: str) -> None:
        """Take pictures in chats from now on, by a projector's file; it is freed with the backend.

        Raises:
            ModelLoadError: the file is not a projector of this model, or of a kind that is not supported.
            ConfigError: Pillow is not installed.
        """
        self.projector = projector = Projector(
            self.model,
            path,
            self.n_threads,
            n_ubatch=int(llama_cpp.llama_n_ubatch(self.ctx)),
            is_on_device=self._is_on_device,
        )
        self.model.vocab.projector = projector
        self.memory = replace(self.memory, has_whole_pictures=projector.has_whole_pictures)
        self._runner.pictures = PictureRows(projector, self.n_batch, self._cells.position)
        if projector.has_flat_pictures:
            self._runner.free()
            self._runner.renew()

    def _rebuild(self) -> None:
        """Make the context anew; every slot is empty and unbound then, saved states stay."""
        self._free()
        try:
            self.ctx = make_context(self.model, self.options, self.n_threads)
            self._runner.renew()
        except PlanError as error:  # sizes that it was made with before: the stepper's memory
            self._free()
            raise ModelLoadError(f"the context could not be rebuilt: {error}") from error
        self._cells.renew(self.ctx)
        if self.short_pool is not None:
            self.short_pool.clear()
        self._set_threads(self.n_threads)

    def close(self) -> None:
        """Free the context and saved states, and the model where it is owned. Twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._free()
        self._free_short()
        self._cells.saved.clear()
        self._matchers.close()
        self.grammars.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._draft is not None:
            self._draft.close()
        self._close_projector()
        self.rest()
        if self.owns_model:
            self.model.close()
        llama_log().remove()

    def give_up(self) -> None:
        """Free the context, for the model's owner frees the model; waits for the run in flight. From any thread."""
        self.interrupt()
        with self._busy:
            self._free()
            self._free_short()
            if self._adapters is not None:
                self._adapters.close()
            self._close_projector()

    def _close_projector(self) -> None:
        if self.projector is not None:
            self.projector.close()

    def _free(self) -> None:
        self._runner.free()
        ctx, self.ctx = self.ctx, None
        if ctx is not None:
            llama_cpp.llama_free(ctx)

    def _free_short(self) -> None:
        if self.short_pool is not None:
            self.short_pool.free()

    # ---- plans ----

    def run(self, plan: StepPlan) -> StepResult:
        """Do one plan; see `Backend.run`."""
        if not self._busy.acquire(blocking=False):
            self.model.check_open()
            raise PlanError("internal error: two threads use one context")
        try:
            if self.ctx is None:
                self.model.check_open()
                raise EngineClosedError("the backend is closed")
            return self._run(plan)
        finally:
            self._busy.release()

    def _run(self, plan: StepPlan) -> StepResult:
        cells = self._cells
        cells.check(plan)
        short = self.short_pool
        if short and short.is_used and (plan.saves or plan.loads or plan.shifts):
            self._leave_short(short)
        lost = cells.save(plan) if plan.saves or plan.forgets else []
        if plan.is_rebuild:
            self._rebuild()
        unloaded = cells.trim_and_load(plan)
        if short and plan.spans:
            plan = self._placed(plan, short)
        move_s = cells.copy(plan.copies) if plan.copies and not unloaded else 0.0
        if plan.shifts:
            cells.shift(plan.shifts)
            self._runner.shift(plan.shifts)
        if plan.binds:
            self._runner.bind([self._at_positions(b) for b in plan.binds])
        is_computed = plan.spans and not unloaded
        result = self._compute(plan) if is_computed else StepResult([[] for _ in plan.spans], 0)
        llama_log().drain()
        if not (plan.saves or lost or unloaded or move_s):
            return result
        keys = [key for _, key in plan.saves if key in cells.saved]
        saved_bytes = {key: len(cells.saved[key].data) for key in keys}
        lost = [*dict.fromkeys((*lost, *unloaded))]
        return replace(result, lost=tuple(lost), move_s=move_s, saved_bytes=saved_bytes)

    def _at_positions(self, binding: Binding) -> Binding:
        """Return a binding whose output begins at a position: behind pictures it is below the output's index."""
        if self.projector is None:
            return binding
        n_less = sum(p.n_rows - p.n_positions for p in self.projector.flat(binding.history))
        origin = binding.output_origin - n_less
        return replace(binding, output_origin=origin) if n_less else binding

    def _placed(self, plan: StepPlan, short: ShortPool) -> StepPlan:
        """Have what slots hold where the plan is computed; return the plan with the steps that there is room for."""
        cells = self._cells
        is_for = short.is_for(plan, cells.n_cells)
        if short.is_used and not is_for:
            self._leave_short(short)
        elif is_for and not short.is_used and cells.can_move:
            short.is_used = cells.move(short.cells, short.together, is_checked=True)
            if short.is_used:
                self._runner.use(short.ctx)
        return short.within(plan, cells.n_cells) if short.is_used else plan

    def _leave_short(self, short: ShortPool) -> None:
        if not self._cells.move(None, short.apart, is_checked=False):
            raise EngineError("out of memory while moving short sequences out of their pool")
        self._runner.use(self.ctx)
        short.clear()

    def _compute(self, plan: StepPlan) -> StepResult:
        if self.n_threads > 1:
            teams().join()
        seen = [] if self.projector is None else self._expect_pictures(self.projector, plan)
        result = (
            self._run_steps(plan)
            if self._elastic is None
            else self._elastic.run(plan, self._run_with)
        )
        if result.n_steps:
            self._cells.add(plan.spans, result.tokens, result.scores)
            if self.short_pool and self.short_pool.is_used and not self._cells.can_move:
                result = self._repeated(plan, result, self.short_pool)
            result = self._runner.follow(plan.spans, result)
        if result.code not in UNCHANGED:
            n_kept = tuple(
                self._cells.keep(c, len(result.tokens[i]) if result.n_steps else 0)
                for i, c in enumerate(plan.spans)
            )
            result = replace(result, n_kept=n_kept)
        for slot in seen if not result.n_steps else ():
            self._cells.forget_expected(slot)
        return result

    def _expect_pictures(self, projector: Projector, plan: StepPlan) -> Sequence[Slot]:
        """Note the pictures of a plan whose rows share positions; return their slots."""
        seen: list[Slot] = []
        for chunk in plan.spans:
            if found := projector.flat(chunk.inputs, chunk.start):
                self._cells.expect(chunk.slot, found)
                seen.append(chunk.slot)
        return seen

    def _run_with(self, plan: StepPlan, n_threads: int) -> StepResult:
        if not self._needs_threads:
            n_threads = teams().n_affordable(n_threads)
        if n_threads != self._n_threads_now:
            self._set_threads(n_threads)
        return self._run_steps(plan)

    def _run_steps(self, plan: StepPlan) -> StepResult:
        if self._adapters is not None:
            self._adapters.use(self._current, plan.adapters)
        is_pooled = self.short_pool is not None and self.short_pool.is_used
        begun_s = time.thread_time()
        result = self._runner.run(
            plan,
            self._cells.undo,
            cuts=self.cuts,
            is_apart=self.has_prompts_apart and not is_pooled,
            are_apart=self.memory.kind != "unified" and not is_pooled,
        )
        busy_s = time.thread_time() - begun_s
        if self._is_on_device:
            return result
        return replace(result, waited_s=max(0.0, result.decode_s + result.sample_s - busy_s))

    def _repeated(self, plan: StepPlan, result: StepResult, short: ShortPool) -> StepResult:
        """Compute anew, in memory of their own, the last tokens of broken rows: in a pool one breaks others."""
        broken = [i for i, t in enumerate(result.tokens) if t and t[-1] == BROKEN_ROW]
        again = tuple(_last_part(plan.spans[i], result.tokens[i]) for i in broken)
        self._cells.take_back(again)
        self._leave_short(short)
        found = self._run_steps(StepPlan(again, adapters=plan.adapters))
        if not found.n_steps:
            return result
        self._cells.add(again, found.tokens, found.scores)
        return _mended(result, broken, found)

    @property
    def _current(self) -> Any:
        """The `llama_context *` that computes."""
        return self.short_pool.ctx if self.short_pool and self.short_pool.is_used else self.ctx

    def rest(self) -> None:
        """End the threads that compute with the calling one; see `Backend.rest`."""
        if self._elastic is not None:
            self._elastic.rest()
        end_team()
        teams().leave()

    def interrupt(self) -> None:
        """End a run in flight after its current step. From any thread."""
        self._runner.interrupt()

    @property
    def last_chunks(self) -> Sequence[Span]:
        """What the last native call computed: in exact mode a part of a plan's chunks."""
        return self._runner.last_chunks

    def take_back(self, chunks: Sequence[Span]) -> bool:
        """Remove the cells of chunks that the last run computed; return whether that is possible in this memory."""
        return self._cells.take_back(chunks)

    def logits(self, slot: Slot) -> NDArray[np.float32]:
        """Return the logits after a slot's last token, which the last step computed and sampled.

        Returns:
            (n_vocab,) float32, a copy.
        """
        chunks = self.last_chunks
        i_chunk = [c.slot for c in chunks].index(slot)
        row = llama_cpp.llama_get_logits_ith(self._current, output_row(chunks, i_chunk))
        return np.ctypeslib.as_array(row, shape=(self.vocab.n_vocab,)).copy()

    # ---- saved states ----

    @property
    def n_cells(self) -> Sequence[int]:
        """How many cells each slot has."""
        return self._cells.n_cells

    @property
    def saved_keys(self) -> Sequence[int]:
        """Keys of the saved states that are in host memory."""
        return tuple(self._cells.saved)

    def import_state(self, key: int, data: NDArray[np.uint8], n_cells: int) -> None:
        """Take a state that was saved; see `Backend.import_state`."""
        self._cells.saved[key] = SavedState(data, n_cells, maybe_nonfinite=True)

    def import_zeros(self, key: int, n_cells: int) -> None:
        """Store zeros as saved cells: a free history for timing steps.

        Raises:
            EngineError: the layout of saved cells is unknown.
        """
        if self._format is None:
            raise EngineError("llama.cpp saves cells in a layout that this cbatch does not know")
        self._cells.saved[key] = SavedState(self._format.zeros(n_cells), n_cells)

    def validate_state(self, data: NDArray[np.uint8], n_wanted: int) -> NDArray[np.uint8]:
        """Return the first cells of a state as this memory has them; see `Backend.validate_state`."""
        if self._format is None:
            raise ValueError("have a memory layout that this version of cbatch does not know")
        return self._format.cut(data, n_wanted)

    def export_state(self, key: int, *, is_kept: bool = False) -> NDArray[np.uint8] | None:
        """Hand out what was saved; see `Backend.export_state`."""
        saved = self._cells.saved
        state = saved.get(key) if is_kept else saved.pop(key, None)
        return None if state is None else state.data

    # ---- what the model and the settings say ----

    @property
    def answer_settings(self) -> Mapping[str, str]:
        """Settings that answers depend on; see `Backend.answer_settings`."""
        said = answer_settings(
            replace(self.options, n_threads=self.n_threads),
            self.tuning.shape,
            self.cuts,
            self.n_window,
        )
        if self.projector is not None:
            said["projector"] = self.projector.digest
        return {**said, "rope factors": self._rope_factors}

    @property
    def model_facts(self) -> ModelFacts:
        """What the model is; see `Backend.model_facts`."""
        return facts_of(self.model, adapters=self.adapters, company=self.tuning.company)

    def make_embedder(self, pooling: Pooling) -> Embedder:
        """Return what computes vectors with the same weights; see `Backend.make_embedder`."""
        check_pooling(self.model, pooling)
        return LlamaEmbedder(self.model, self.options, self.n_threads, pooling)

    def fingerprint(self, adapters: AdapterSet) -> Mapping[str, str]:
        """Return what cells depend on; see `Backend.fingerprint`."""
        said = {"pieces": str(self.cuts), "rope factors": self._rope_factors}
        if self.cuts.multiple == 1:  # else only chunks of prompts are reused, which are not rows
            said["rows"] = str(self.tuning.shape)
        if self.model.kernels:
            said["kernels"] = self.model.kernels
        if self._adapters is not None:
            digests = [f"{self._adapters.digest(name)} × {scale}" for name, scale in adapters]
            said["adapters"] = ", ".join(digests)
        return {**fingerprint(self.model.digest, self.options), **said}


def _last_part(chunk: Span, tokens: Sequence[int]) -> Span:
    if len(tokens) == 1:
        return chunk
    start = chunk.start + len(chunk.inputs) + len(tokens) - 2
    return Span(chunk.slot, start, tokens[-2:-1], has_output=True)


def _mended(result: StepResult, rows: Sequence[int], found: StepResult) -> StepResult:
    """Return the result of a run with what was found anew of some rows' last step."""
    tokens, logprobs = [list(t) for t in result.tokens], [list(p) for p in result.logprobs]
    for i, row in enumerate(rows):
        tokens[row][-1:] = found.tokens[i]
        if logprobs and found.logprobs:
            logprobs[row][-1:] = found.logprobs[i]
    return replace(
        result,
        tokens=tokens,
        logprobs=logprobs,
        scores={**result.scores, **found.scores},
        failures={**result.failures, **found.failures},
        decode_s=result.decode_s + found.decode_s,
        sample_s=result.sample_s + found.sample_s,
    )


def output_row(chunks: Sequence[Span], i_chunk: int) -> int:
    """Return the batch index of a chunk's last token: all first tokens come first, then the remainders."""
    if len(chunks[i_chunk].inputs) == 1:
        return i_chunk
    return len(chunks) + sum(len(c.inputs) - 1 for c in chunks[: i_chunk + 1]) - 1
