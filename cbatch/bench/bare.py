"""Hand-written loops of `llama_decode`, to measure against: no sampling, no scheduling, no text."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.memory import LlamaCells
from cbatch.backend.llama.model import LlamaModel
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load.attention import settle_attention
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, DecodeError


class BareLoop:
    """`n_rows` sequences in slots 0, 1, …, each fed one fixed token a step, by `llama_decode` alone.

    Works on a backend's own context, with flash attention as an engine has it, so that nothing else differs.
    """

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        self._backend = LlamaBackend(
            model, Tuning(settle_attention(model, options)), owns_model=False
        )
        self._ctx: Any = self._backend.ctx
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


class PrefixLoop:
    """Prompts with a common beginning, as one would write a loop for them by hand.

    The beginning is computed once, in slot 0, and copied to all slots. Requests come in waves, one a slot: one batch
    with the rest of each prompt, then one fixed token a row a step; then every slot is trimmed.
    Works on a backend's own context, with flash attention as an engine has it, so that nothing else differs.
    """

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        """Make a context of its own.

        Raises:
            ConfigError: the model's memory cannot be copied and cut back.
        """
        self._backend = LlamaBackend(
            model, Tuning(settle_attention(model, options)), owns_model=False
        )
        self.ctx: Any = self._backend.ctx
        """llama.cpp's context."""
        self.cells = LlamaCells(self.ctx)
        """What its memory holds."""
        memory = self._backend.memory
        if not memory.can_trim or (self._backend.n_slots > 1 and not memory.can_copy):
            self._backend.close()
            raise ConfigError("this model's memory cannot be copied between slots and trimmed")

    def run(self, common: Sequence[int], owns: Sequence[Sequence[int]], n_output: int) -> float:
        """Compute everything, the beginning too, in empty cells; return the seconds it took.

        Args:
            common: tokens that all prompts begin with; may be empty.
            owns: what follows in each prompt, at least one token.
            n_output: tokens of each answer; the last is not computed, as nothing is sampled after it.

        Raises:
            DecodeError: `llama_decode` failed.
        """
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), True)
        n_common, n_slots = len(common), self._backend.n_slots
        prefix = self._batches(_TokenRow(token, i, 0) for i, token in enumerate(common))
        waves = [
            self._wave(owns[i : i + n_slots], n_common, n_output)
            for i in range(0, len(owns), n_slots)
        ]
        slots = range(min(n_slots, len(owns)))
        start = time.perf_counter()
        self._decode(prefix)
        for slot in slots[1:] if common else ():
            self.cells.copy(0, slot, n_common)
        for wave in waves:
            self._decode(wave)
            for slot in slots:
                self.cells.trim(slot, n_common)
        llama_cpp.llama_synchronize(self.ctx)
        return time.perf_counter() - start

    def _wave(self, owns: Sequence[Sequence[int]], n_common: int, n_output: int) -> list[Any]:
        """Return the batches of one request a slot: what is their own, then a token a row."""
        batches = self._batches(suffix_rows(owns, n_common))
        for i in range(n_output - 1):
            rows = (
                _TokenRow(1 + slot, n_common + len(own) + i, slot, has_output=True)
                for slot, own in enumerate(owns)
            )
            batches += self._batches(rows)
        return batches

    def _batches(self, rows: Iterable[_TokenRow]) -> list[Any]:
        """Return the rows in batches as large as the context takes."""
        rows, n = list(rows), self._backend.n_batch
        return [_batch(rows[i : i + n]) for i in range(0, len(rows), n)]

    def _decode(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            if code := llama_cpp.llama_decode(self.ctx, batch):
                raise DecodeError(code)

    def close(self) -> None:
        """Free the context."""
        self._backend.close()


@dataclass(frozen=True, slots=True)
class _TokenRow:
    token: int
    position: int
    slot: int
    has_output: bool = False


def suffix_rows(owns: Sequence[Sequence[int]], n_common: int) -> list[_TokenRow]:
    """Return all tokens after the first `n_common`, an output after each last one: first tokens first, then the rest.

    So llama.cpp finds the first ones in adjacent slots, one token each, and cuts the batch into fewer graph runs.
    """
    ends = [n_common + len(own) - 1 for own in owns]
    rows = [
        _TokenRow(token, n_common + i, slot, n_common + i == ends[slot])
        for slot, own in enumerate(owns)
        for i, token in enumerate(own)
    ]
    return sorted(rows, key=lambda row: row.position > n_common)


def _batch(rows: Sequence[_TokenRow]) -> Any:
    """Return a `llama_batch` in memory that Python keeps as long as the batch."""
    n = len(rows)
    int32s = ctypes.c_int32 * n
    slots = [ctypes.pointer(ctypes.c_int32(row.slot)) for row in rows]
    return llama_cpp.llama_batch(
        n_tokens=n,
        token=int32s(*[row.token for row in rows]),
        pos=int32s(*[row.position for row in rows]),
        n_seq_id=int32s(*[1] * n),
        seq_id=(ctypes.POINTER(ctypes.c_int32) * n)(*slots),
        logits=(ctypes.c_int8 * n)(*[row.has_output for row in rows]),
    )
