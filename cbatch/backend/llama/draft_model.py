"""A smaller model with the same tokens, which drafts: checked against the model, and its context."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.context import context_cells, make_context
from cbatch.backend.llama.memory import find_memory
from cbatch.errors import ModelLoadError
from cbatch.support.checks import readable
from cbatch.support.logs import Log

if TYPE_CHECKING:
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.native import NativeStepper
    from cbatch.engine_options import EngineOptions

N_PADDED_MAX = 128
"""Tokens that one vocabulary may have more than the other, for files pad them differently.
Source: llama.cpp, common/speculative.cpp, SPEC_VOCAB_MAX_SIZE_DIFFERENCE."""

_log = Log("cbatch")


class DraftModel:
    """A draft model; it is freed with the backend that it drafts for."""

    def __init__(self, model: LlamaModel, target: LlamaModel) -> None:
        """Take a loaded model.

        Raises:
            ModelLoadError: its tokens are not those of `target`.
        """
        _check_tokens(model, target)
        if model.n_bytes > target.n_bytes:
            _log.warn(
                "the draft model %s has %d bytes, the model it drafts for only %d: it will hardly make answers faster",
                readable(model.name),
                model.n_bytes,
                target.n_bytes,
            )
        self.model = model
        self._ctx: Any = None
        self._n_window = 0

    def make_context(self, options: EngineOptions, n_threads: int) -> None:
        """Make its context: each slot of `options` has cells of its own.

        Raises:
            ModelLoadError: llama.cpp cannot make it, or its memory cannot be cut.
        """
        own = context_options(self.model, options)
        self._ctx = make_context(self.model, own, n_threads)
        if not find_memory(self._ctx, self.model, own).capabilities.can_trim:
            raise ModelLoadError(
                f"{self.model.name} cannot draft: tokens cannot be removed from the memory of a "
                f"{self.model.architecture} model; use a model with plain attention, or leave draft out"
            )
        self._n_window = int(llama_cpp.llama_n_ctx_seq(self._ctx))

    def serve(self, stepper: NativeStepper) -> None:
        """Have a stepper draft with it; its context is emptied."""
        stepper.draft_with(
            self._ctx,
            n_batch=int(llama_cpp.llama_n_batch(self._ctx)),
            n_window=self._n_window,
            n_vocab=self.model.vocab.n_vocab,
        )

    def set_threads(self, n_threads: int) -> None:
        """Compute with so many threads from now on."""
        llama_cpp.llama_set_n_threads(self._ctx, n_threads, n_threads)

    def close(self) -> None:
        """Free its context and the model. Twice is harmless."""
        ctx, self._ctx = self._ctx, None
        if ctx is not None:
            llama_cpp.llama_free(ctx)
        self.model.close()


def context_options(model: LlamaModel, options: EngineOptions) -> EngineOptions:
    """Return the options of a draft model's context: the slots of `options`, each with cells of its own."""
    n_window = context_cells(model, options) // options.n_slots
    return replace(
        options,
        parallel=options.n_slots,
        n_ctx=None,
        ctx_per_seq=max(1, min(n_window, model.n_ctx_train or n_window)),
        kv="partitioned",
        admission=None,
        n_batch=max(min(options.n_batch, options.n_ubatch), options.n_slots),
        prefill_chunk=None,
        prefill_budget=None,
        cache_type_k="f16",
        cache_type_v="f16",
        flash_attn="auto",
        adapters=None,
        draft=None,
        speculate="off",
    )


def _check_tokens(model: LlamaModel, target: LlamaModel) -> None:
    own, others = model.vocab, target.vocab
    n_common = min(own.n_vocab, others.n_vocab)
    if max(own.n_vocab, others.n_vocab) - n_common > N_PADDED_MAX:
        raise ModelLoadError(
            f"{model.name} has {own.n_vocab:,} tokens and {target.name} has {others.n_vocab:,}: a draft model must "
            "have the same vocabulary; use a smaller model of the same family"
        )
    different = next((i for i in range(n_common) if own.piece(i) != others.piece(i)), None)
    if different is not None:
        raise ModelLoadError(
            f"token {different} is {own.piece(different)!r} in {model.name} and {others.piece(different)!r} in "
            f"{target.name}: a draft model must have the same vocabulary; use a smaller model of the same family"
        )
