"""Rows of logits in a llama.cpp context, sampled natively and by llama.cpp's own chain, to compare their times."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.library import LlamaApi
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model import LlamaModel
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.native import NativeStepper
from cbatch.core.plan import Binding, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.options import GREEDY, Sampling

_DECODE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, llama_cpp.llama_batch)


class LogitRows:
    """One row of logits in each slot of a context, as a decode left them. One thread only."""

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        """Make a context and decode one token in each slot."""
        self._backend = LlamaBackend(model, Tuning(options), owns_model=False)
        self._ctx: Any = self._backend.ctx
        self._slots = [Slot(i) for i in range(self._backend.n_slots)]
        self.n_vocab = self._backend.vocab.n_vocab
        binds = tuple(Binding(slot, 0, GREEDY, ()) for slot in self._slots)
        self._chunks = tuple(Span(slot, 0, (1 + slot,), has_output=True) for slot in self._slots)
        self._backend.run(StepPlan(self._chunks, binds=binds))
        nothing = _DECODE(lambda ctx, batch: 0)
        self._resting = LlamaApi(nothing, llama_cpp.llama_get_logits_ith)

    def ours_us(self, sampling: Sampling, history: Sequence[int], n_steps: int) -> float:
        """Return the microseconds that native sampling takes for a row, on one thread."""
        return self._sample_us(self._resting, sampling, history, n_steps, n_threads=1)

    def theirs_us(self, sampling: Sampling, history: Sequence[int], n_steps: int) -> float:
        """Return the microseconds that llama.cpp's chain takes for a row, a chain for each."""
        chains = [LlamaChain(sampling, self.n_vocab) for _ in self._slots]
        for chain in chains:
            chain.accept(history)
        start = time.perf_counter()
        for _ in range(n_steps):
            for i, chain in enumerate(chains):
                chain.sample(self._ctx, i)
        seconds = time.perf_counter() - start
        for chain in chains:
            chain.close()
        return 1e6 * seconds / (n_steps * len(chains))

    def after_decode_us(self, sampling: Sampling, n_steps: int, n_threads: int) -> float:
        """Return the microseconds of native sampling for a row, on a team of threads, right after each decode."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), False)
        return self._sample_us(LlamaApi.of_llama_cpp(), sampling, (), n_steps, n_threads=n_threads)

    def _sample_us(
        self,
        api: LlamaApi,
        sampling: Sampling,
        history: Sequence[int],
        n_steps: int,
        *,
        n_threads: int,
    ) -> float:
        stepper = NativeStepper(
            self._ctx,
            n_slots=len(self._slots),
            n_batch=len(self._slots),
            n_vocab=self.n_vocab,
            n_threads=n_threads,
            api=api,
        )
        for slot in self._slots:
            stepper.bind(Binding(slot, 0, sampling, (), tuple(history)))
        result = stepper.run(self._chunks, n_steps)
        stepper.close()
        return 1e6 * result.sample_s / (result.n_steps * len(self._slots))

    def close(self) -> None:
        """Free the context."""
        self._backend.close()


class LlamaChain:
    """llama.cpp's sampler chain of a `Sampling`, in its default order, without samplers that change nothing.

    Source: common/sampling.cpp, common_sampler_init, and common/common.h, common_params_sampling.samplers.
    """

    def __init__(
        self, sampling: Sampling, n_vocab: int, *, vocab: Any = None, breakers: Sequence[str] = ()
    ) -> None:
        """Make the chain.

        Args:
            sampling: how to choose; `dry_breakers` is not looked at.
            vocab: `llama_vocab *`, where there are breakers.
            breakers: DRY's strings.
        """
        params = llama_cpp.llama_sampler_chain_default_params()
        self.pointer: Any = llama_cpp.llama_sampler_chain_init(params)
        """`llama_sampler *`; None once it is closed."""
        for sampler in (
            *_edits(sampling, n_vocab, vocab, breakers),
            *(_greedy() if sampling.temperature == 0 else _filters(sampling)),
        ):
            llama_cpp.llama_sampler_chain_add(self.pointer, sampler)

    def accept(self, tokens: Sequence[int]) -> None:
        """Add tokens to those that penalties and DRY see."""
        for token in tokens:
            llama_cpp.llama_sampler_accept(self.pointer, token)

    def sample(self, ctx: Any, i_token: int) -> int:
        """Return what llama.cpp chooses from a row of a context; it joins what penalties and DRY see."""
        return int(llama_cpp.llama_sampler_sample(self.pointer, ctx, i_token))

    def close(self) -> None:
        """Free the samplers; twice is harmless."""
        chain, self.pointer = self.pointer, None
        if chain is not None:
            llama_cpp.llama_sampler_free(chain)


def _edits(s: Sampling, n_vocab: int, vocab: Any, breakers: Sequence[str]) -> Iterator[Any]:
    if s.logit_bias:
        biases = (llama_cpp.llama_logit_bias * len(s.logit_bias))(*s.logit_bias)
        yield llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(biases), biases)
    if (s.repeat_penalty, s.frequency_penalty, s.presence_penalty) != (1, 0, 0):
        yield llama_cpp.llama_sampler_init_penalties(
            n_vocab, s.repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
        )
    if s.has_dry:
        strings = (ctypes.c_char_p * len(breakers))(*(b.encode() for b in breakers))
        yield llama_cpp.llama_sampler_init_dry(
            vocab,
            s.dry_multiplier,
            s.dry_base,
            s.dry_allowed_length,
            s.dry_penalty_last_n,
            strings,
            len(breakers),
        )


def _greedy() -> Iterator[Any]:
    yield llama_cpp.llama_sampler_init_greedy()


def _filters(s: Sampling) -> Iterator[Any]:
    if s.top_n_sigma > 0:
        yield llama_cpp.llama_sampler_init_top_n_sigma(s.top_n_sigma)
    if s.top_k > 0:
        yield llama_cpp.llama_sampler_init_top_k(s.top_k)
    if s.typical_p < 1:
        yield llama_cpp.llama_sampler_init_typical(s.typical_p, 0)
    if s.top_p < 1:
        yield llama_cpp.llama_sampler_init_top_p(s.top_p, 0)
    if s.min_p > 0:
        yield llama_cpp.llama_sampler_init_min_p(s.min_p, 0)
    if s.xtc_probability > 0:
        yield llama_cpp.llama_sampler_init_xtc(
            s.xtc_probability, s.xtc_threshold, 0, s.seed % 2**32
        )
    yield llama_cpp.llama_sampler_init_temp(s.temperature)
    yield llama_cpp.llama_sampler_init_dist(s.seed % 2**32)
