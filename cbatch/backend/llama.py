"""Step plans on a llama.cpp context: the memory verbs, one native call a run, and the checks before each."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from cbatch.backend.log import llama_log
from cbatch.backend.native import NativeStepper, handshake
from cbatch.core.plan import Chunk, Slot, StepPlan, StepResult
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
    from cbatch.backend.model import LlamaModel
    from cbatch.options import EngineOptions

DEFAULT_WINDOW = 2048
"""One slot's window where nothing was said and the model allows it: room for a long prompt and answer."""

_N_PAD = 256
"""llama.cpp rounds a context's cells up to a multiple of this. Source: src/llama-context.cpp."""

_N_CTX_MAX = 2**31 - 1
"""Positions are int32. Source: include/llama.h, llama_pos."""

_N_THREADS_MAX = 512
"""More end the process where they cannot be started. Source: ggml/include/ggml.h, GGML_MAX_N_THREADS."""

_CELLS_UNKNOWN = -3
"""Stands for a failure after which a slot's cells are not known. Source: include/llama.h, llama_decode."""

# Source: include/llama.h, enum llama_flash_attn_type.
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


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
    ) -> None:
        """Make a context for `options.parallel` sequences.

        Args:
            model: a loaded model.
            options: sizes and settings; `exact` turns flash attention off.
            owns_model: close the model with the backend.
            stepper: what runs steps, called as `NativeStepper` is; None for that.

        Raises:
            ModelLoadError: llama.cpp cannot make the context, for want of memory as a rule.
            ConfigError: more cells than llama.cpp can count, or more threads.
            IncompatibleLlamaError: llama.cpp's memory does not behave as this version of cbatch expects.
        """
        handshake()
        if (options.n_threads or 0) > _N_THREADS_MAX:
            raise ConfigError(f"n_threads must be 1 … {_N_THREADS_MAX}, not {options.n_threads}")
        self._model, self._owns_model = model, owns_model
        self._busy = threading.Lock()
        self._stepper: Any = None
        self.n_slots = options.parallel
        self.n_threads = options.n_threads or available_cores()
        self.is_unified = options.kv == "unified"
        self._ctx: Any = _make_context(model, options, self.n_threads)
        try:
            self._memory = llama_cpp.llama_get_memory(self._ctx)
            self.n_batch = int(llama_cpp.llama_n_batch(self._ctx))
            n_ctx = int(llama_cpp.llama_n_ctx(self._ctx))
            self.n_window = n_ctx // self.n_slots
            self.n_cells = [0] * self.n_slots
            self.n_piece = _n_piece(self.n_batch, options)
            self._last_chunks: Sequence[Chunk] = ()
            self._stepper = (stepper or NativeStepper)(
                ctypes.cast(self._ctx, ctypes.c_void_p),
                n_slots=self.n_slots,
                n_batch=self.n_batch,
                n_vocab=model.vocab.n_vocab,
                n_threads=self.n_threads,
            )
            self._check_memory()
        except BaseException:
            self._free()
            raise
        llama_log().install()

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
            raise PlanError("two threads run one context")
        try:
            return self._run(plan)
        finally:
            self._busy.release()

    def _run(self, plan: StepPlan) -> StepResult:
        if self._ctx is None:
            raise EngineClosedError("the backend is closed")
        self._check(plan)
        for slot in plan.clears:
            llama_cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)
            self.n_cells[slot] = 0
        for binding in plan.binds:
            self._stepper.bind(binding)
        if not plan.chunks:
            return StepResult([], 0)
        result = self._steps(plan) if not self.n_piece else self._pieces(plan)
        if result.n_steps:
            for chunk in plan.chunks:
                self.n_cells[chunk.slot] += len(chunk.tokens) + result.n_steps - 1
        llama_log().drain()
        return result

    def _steps(self, plan: StepPlan) -> StepResult:
        self._last_chunks = plan.chunks
        result: StepResult = self._stepper.run(plan.chunks, plan.n_steps)
        return result

    def _pieces(self, plan: StepPlan) -> StepResult:
        """Run a plan so that the shape of each computation does not depend on its company: prompts one by one."""
        rows = tuple(c for c in plan.chunks if len(c.tokens) == 1)
        if len(rows) == len(plan.chunks):
            return self._steps(plan)
        groups = [rows] if rows else []
        groups += [(c,) for c in plan.chunks if len(c.tokens) > 1]
        sampled: dict[Slot, list[int]] = {}
        decode_s = sample_s = 0.0
        for group in groups:
            result = self._steps(StepPlan(group))
            if result.code:
                return StepResult([], 0, self._undo(sampled, plan, result.code))
            sampled.update((c.slot, t) for c, t in zip(group, result.tokens, strict=True))
            decode_s += result.decode_s
            sample_s += result.sample_s
        return StepResult([sampled[c.slot] for c in plan.chunks], 1, 0, decode_s, sample_s)

    def _undo(self, done: Mapping[Slot, object], plan: StepPlan, code: int) -> int:
        """Take back the cells of the groups that were computed before one failed; return the code to report."""
        undone = [
            llama_cpp.llama_memory_seq_rm(self._memory, c.slot, c.start, -1)
            for c in plan.chunks
            if c.slot in done
        ]
        return code if all(undone) else _CELLS_UNKNOWN

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
        """Free the context, and the model where it is owned. Twice is harmless."""
        if self._ctx is None:
            return
        self._free()
        if self._owns_model:
            self._model.close()
        llama_log().remove()

    def _free(self) -> None:
        if self._stepper is not None:
            self._stepper.close()
        ctx, self._ctx = self._ctx, None
        llama_cpp.llama_free(ctx)

    def _check(self, plan: StepPlan) -> None:
        """Refuse what llama.cpp would answer with an abort, before anything is done."""
        named = (*plan.clears, *(b.slot for b in plan.binds))
        if named and not 0 <= min(named) <= max(named) < self.n_slots:
            raise PlanError(f"slots are 0 … {self.n_slots - 1}: {plan!r}")
        previous = -1
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens) + plan.n_steps - 1
            if (
                not previous < chunk.slot < self.n_slots
                or not chunk.tokens
                or chunk.start != (self.n_cells[chunk.slot] if chunk.slot not in plan.clears else 0)
                or end > self.n_window
            ):
                raise PlanError(
                    f"slot {chunk.slot} has {self.n_cells} cells of {self.n_window}: {plan!r}"
                )
            previous = chunk.slot

    def _check_memory(self) -> None:
        """Decode one token and take it back: positions must be what llama.cpp's header promises."""
        token = self.vocab.end_tokens[0] if self.vocab.end_tokens else 0
        code = self._stepper.run([Chunk(Slot(0), 0, (token,), has_output=False)], 1).code
        before = int(llama_cpp.llama_memory_seq_pos_max(self._memory, 0))
        llama_cpp.llama_memory_seq_rm(self._memory, 0, -1, -1)
        after = int(llama_cpp.llama_memory_seq_pos_max(self._memory, 0))
        if (code, before, after) != (0, 0, -1):
            raise IncompatibleLlamaError(
                f"one decoded token gave code {code} and last position {before}, {after} when removed; "
                f"expected 0, 0, -1 (llama-cpp-python {llama_cpp.__version__})"
            )


def available_cores() -> int:
    """Return how many cores this process may use: its affinity and its cgroup's quota, not the machine's count."""
    try:
        n_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no affinity to ask for
        n_cores = os.cpu_count() or 1
    return max(1, min(n_cores, _cgroup_cores() or n_cores))


def _cgroup_cores() -> int | None:
    # Source: Linux Documentation/admin-guide/cgroup-v2.rst, cpu.max: "$MAX $PERIOD", MAX may be "max".
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period)) if quota != "max" else None
    except (OSError, ValueError):
        return None


def output_row(chunks: Sequence[Chunk], i_chunk: int) -> int:
    """Return the batch index of a chunk's last token: all first tokens come first, then the remainders."""
    if len(chunks[i_chunk].tokens) == 1:
        return i_chunk
    return len(chunks) + sum(len(c.tokens) - 1 for c in chunks[: i_chunk + 1]) - 1


def _n_piece(n_batch: int, options: EngineOptions) -> int:
    """Return the size of a prompt's pieces: one graph run, and room for one beside the rows of all others."""
    return min(options.n_ubatch, n_batch - options.parallel + 1) if options.exact else 0


def _make_context(model: LlamaModel, options: EngineOptions, n_threads: int) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = options.parallel
    params.n_ctx = context_cells(model, options)
    params.n_batch = options.n_batch
    params.n_outputs_max = options.parallel
    params.n_ubatch = min(options.n_ubatch, options.n_batch)
    params.n_threads = params.n_threads_batch = n_threads
    params.kv_unified = options.kv == "unified"
    params.flash_attn_type = 0 if options.exact else _FLASH_ATTN[options.flash_attn]
    ctx = llama_cpp.llama_init_from_model(model.pointer, params)
    if not ctx:
        llama_log().drain()
        said = "; ".join(llama_log().recent[-2:])
        raise ModelLoadError(
            f"llama.cpp cannot make a context of {params.n_ctx} cells for {options.parallel} "
            f"sequences: {said or 'it gave no reason'}. "
            "Fewer slots (parallel) or a smaller window (ctx_per_seq) need less memory"
        )
    return ctx


def context_cells(model: LlamaModel, options: EngineOptions) -> int:
    """Return the cells in total: every slot's window rounded up as llama.cpp does it."""
    asked = options.n_ctx // options.parallel if options.n_ctx else options.ctx_per_seq
    window = asked or min(model.n_ctx_train or DEFAULT_WINDOW, DEFAULT_WINDOW)
    n_ctx = options.parallel * -(-window // _N_PAD) * _N_PAD
    if n_ctx > _N_CTX_MAX:
        raise ConfigError(
            f"{options.parallel} slots of {window} cells need {n_ctx}, llama.cpp counts up to {_N_CTX_MAX}: "
            "use fewer slots (parallel) or a smaller window (ctx_per_seq)"
        )
    return n_ctx
