"""Calls logits processors on the rows of one step, between decoding and sampling."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.core.plan import BROKEN_ROW, Slot, StepResult
from cbatch.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.logits_processors import LogitsProcessors
    from cbatch.core.span import Span

_FloatPointer = ctypes.POINTER(ctypes.c_float)


class RowChanges:
    """Passes copies of rows to their slots' processors. The copies are sampled; the model's rows stay unchanged."""

    def __init__(
        self, processors: LogitsProcessors, slots: Collection[Slot], chunks: Sequence[Span]
    ) -> None:
        self._processors, self._slots = processors, slots
        self._outputs = [c.slot for c in chunks if c.has_output]
        self._rows: list[NDArray[np.float32]] = []
        self.addresses: Any = (ctypes.c_void_p * len(self._outputs))()
        """`float *` of each output: the model's row once the step is decoded, then the row to sample."""
        self._failures: dict[Slot, RequestFailedError] = {}
        self._stopped: BaseException | None = None

    def make(self, n_vocab: int) -> None:
        """Change the rows at `addresses`, `n_vocab` floats each. Does not raise: `told` does."""
        for i, slot in enumerate(self._outputs):
            address = self.addresses[i]
            if slot not in self._slots or address is None:
                continue
            logits = ctypes.cast(address, _FloatPointer)
            row = np.ctypeslib.as_array(logits, (n_vocab,)).copy()
            try:
                self._processors.change(slot, row)
            except RequestFailedError as error:
                self._failures[slot] = error
                continue
            except BaseException as error:  # must not reach native code, which called this
                self._stopped = error
                return
            self._rows.append(row)
            self.addresses[i] = row.ctypes.data

    def told(self, result: StepResult) -> StepResult:
        """Return a step's result with the failures. Raise what a processor raised, if it is the program's."""
        if self._stopped is not None:
            raise self._stopped
        return replace(result, failures=self._failures) if self._failures else result


def without_failed(chunks: Sequence[Span], result: StepResult) -> StepResult:
    """Return the result with broken rows in place of tokens whose processor failed."""
    if not result.failures:
        return result
    tokens = [
        [BROKEN_ROW] if c.slot in result.failures else sampled
        for c, sampled in zip(chunks, result.tokens, strict=True)
    ]
    return replace(result, tokens=tokens)
