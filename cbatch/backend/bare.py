"""The limit: a hand-written decode loop with nothing around it. No sampling, no scheduling, no text."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import llama_cpp

from cbatch.backend.llama import LlamaBackend
from cbatch.errors import DecodeError

if TYPE_CHECKING:
    from cbatch.backend.model import LlamaModel
    from cbatch.options import EngineOptions


class BareLoop:
    """`n_rows` sequences in slots 0, 1, …, each fed one fixed token a step, by `llama_decode` alone.

    Works on a backend's own context, so that what is compared differs in nothing else.
    """

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        self._backend = LlamaBackend(model, options, owns_model=False)
        self._ctx: Any = self._backend._ctx
        n_rows = self._backend.n_slots
        self._batch = llama_cpp.llama_batch_init(n_rows, 0, 1)
        self._batch.n_tokens = n_rows
        # What llama_batch_init allocated: `run` puts its own there. A cast, for the bare field would change with it.
        self._own_pos = ctypes.cast(self._batch.pos, ctypes.POINTER(ctypes.c_int32))
        for i in range(n_rows):
            self._batch.token[i] = 1 + i
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = i
            self._batch.logits[i] = 1

    def run(self, n_steps: int) -> float:
        """Decode `n_steps` tokens a row into empty cells; return the seconds it took.

        Raises:
            DecodeError: `llama_decode` failed.
        """
        memory = llama_cpp.llama_get_memory(self._ctx)
        llama_cpp.llama_memory_clear(memory, True)
        batch, ctx, n_rows = self._batch, self._ctx, self._batch.n_tokens
        positions = [(ctypes.c_int32 * n_rows)(*[i] * n_rows) for i in range(n_steps)]
        start = time.perf_counter()
        for position in positions:
            batch.pos = position
            if code := llama_cpp.llama_decode(ctx, batch):
                raise DecodeError(code)
        llama_cpp.llama_synchronize(ctx)
        return time.perf_counter() - start

    def close(self) -> None:
        """Free the batch and the context."""
        self._batch.pos = self._own_pos
        llama_cpp.llama_batch_free(self._batch)
        self._backend.close()
