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
    """What one would write by hand: `llama_decode` alone, on a backend's own context.

    Flash attention is as an engine has it, so that nothing else differs.
    """

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        self._backend = LlamaBackend(
            model, Tuning(settle_attention(model, options)), owns_model=False
        )
        self.ctx: Any = self._backend.ctx
        """llama.cpp's context."""
        self.cells = LlamaCells(self.ctx)
        """What its memory holds."""

    def decode(self, n_steps: int) -> float:
        """Decode `n_steps` tokens a row, the same one each step, into empty cells; return the seconds it took.

        Raises:
            DecodeError: `llama_decode` failed.
        """
        slots = range(self._backend.n_slots)
        steps = [
            _batch([_TokenRow(1 + slot, i, slot, has_output=True) for slot in slots])
            for i in range(n_steps)
        ]
        self._clear()
        start = time.perf_counter()
        self._decode(steps)
        llama_cpp.llama_synchronize(self.ctx)
        return time.perf_counter() - start

    def run(self, common: Sequence[int], owns: Sequence[Sequence[int]], n_output: int) -> float:
        """Compute prompts with a common beginning, and answers, in empty cells; return the seconds it took.

        The beginning is computed once, in slot 0, and copied to all slots. Requests come in waves, one a slot: one
        batch with the rest of each prompt, then one fixed token a row a step; then every slot is trimmed.

        Args:
            common: tokens that all prompts begin with; may be empty.
            owns: what follows in each prompt, at least one token.
            n_output: tokens of each answer; the last is not computed, as nothing is sampled after it.

        Raises:
            ConfigError: the model's memory cannot be copied and cut back.
            DecodeError: `llama_decode` failed.
        """
        memory = self._backend.memory
        if not memory.can_trim or (self._backend.n_slots > 1 and not memory.can_copy):
            raise ConfigError(
                "this model's memory cannot copy cells to other slots, or cannot remove single ones"
            )
        self._clear()
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

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), True)

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
