"""Rows of logits in a llama.cpp context, sampled by us and by llama.cpp's chain: for comparison on one machine."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.chain import LlamaChain
from cbatch.backend.llama.llama_api import LlamaApi
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.native import NativeStepper
from cbatch.core.plan import Binding, Chunk, Slot, StepPlan
from cbatch.options import GREEDY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions
    from cbatch.options import Sampling

_DECODE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, llama_cpp.llama_batch)


class LogitRows:
    """One row of logits in each slot of a context, as a decode left them. One thread only."""

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        """Make a context and decode one token in each slot."""
        self._backend = LlamaBackend(model, options, owns_model=False)
        self._ctx: Any = self._backend.ctx
        self._slots = [Slot(i) for i in range(self._backend.n_slots)]
        self.n_vocab = self._backend.vocab.n_vocab
        binds = tuple(Binding(slot, 0, GREEDY, ()) for slot in self._slots)
        self._backend.run(StepPlan(self._chunks(0), binds=binds))
        nothing = _DECODE(lambda ctx, batch: 0)
        self._resting = LlamaApi(nothing, llama_cpp.llama_get_logits_ith)

    def _chunks(self, start: int) -> tuple[Chunk, ...]:
        return tuple(Chunk(slot, start, (1 + slot,), has_output=True) for slot in self._slots)

    def ours_s(self, sampling: Sampling, history: Sequence[int], n_steps: int) -> float:
        """Return the seconds that we take for a row, on one thread."""
        return self._sample_s(self._resting, sampling, history, n_steps, n_threads=1)

    def theirs_s(self, sampling: Sampling, history: Sequence[int], n_steps: int) -> float:
        """Return the seconds that llama.cpp's chain takes for a row, a chain for each."""
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
        return seconds / (n_steps * len(chains))

    def after_decode_s(self, sampling: Sampling, n_steps: int, n_threads: int) -> float:
        """Return the seconds that we take for a row, on a team of threads, each time right after a decode."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), False)
        return self._sample_s(LlamaApi.of_llama_cpp(), sampling, (), n_steps, n_threads=n_threads)

    def _sample_s(
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
            slice_s=0.0,
            api=api,
        )
        for slot in self._slots:
            stepper.bind(Binding(slot, 0, sampling, (), tuple(history)))
        result = stepper.run(self._chunks(0), n_steps)
        stepper.close()
        return result.sample_s / (result.n_steps * len(self._slots))

    def close(self) -> None:
        """Free the context."""
        self._backend.close()
