"""Logits processors of requests: their arguments, and checks of what they return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cbatch.errors import RequestFailedError, words_of
from cbatch.support.interrupts import is_for_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cbatch.core.plan import Binding, OwnProcessor, Slot
    from cbatch.core.span import Span


@dataclass(eq=False, slots=True)
class _Told:
    """The processor of one slot, and the token ids that it was given so far."""

    processor: OwnProcessor
    ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    n_ids: int = 0

    def token_ids(self) -> NDArray[np.int32]:
        """Return prompt and output: (n_tokens,) int32, read-only; later calls write only after its end."""
        prompt, output = self.processor.prompt, self.processor.output
        n = len(prompt) + len(output)
        if n > len(self.ids):
            self.ids = np.empty(2 * n, np.int32)
            self.ids[: len(prompt)] = prompt
            self.n_ids = len(prompt)
        self.ids[self.n_ids : n] = output[self.n_ids - len(prompt) :]
        self.n_ids = n
        found = self.ids[:n]
        found.flags.writeable = False
        return found


class LogitsProcessors:
    """The processors of all slots. Owner thread."""

    def __init__(self) -> None:
        self._told: dict[Slot, _Told] = {}

    def bind(self, binding: Binding) -> None:
        """Use the binding's processor for its slot from now on; without one, none."""
        self._told.pop(binding.slot, None)
        if binding.processor is not None:
            self._told[binding.slot] = _Told(binding.processor)

    def clear(self) -> None:
        """Drop all processors."""
        self._told.clear()

    def of(self, spans: Sequence[Span]) -> list[Slot]:
        """Return the slots of spans with an output that have a processor."""
        if not self._told:
            return []
        return [c.slot for c in spans if c.has_output and c.slot in self._told]

    def change(self, slot: Slot, row: NDArray[np.float32]) -> None:
        """Have a slot's processor change a row. It is not called for a broken row.

        Args:
            slot: one of `of`.
            row: (n_vocab,) float32, the model's logits; changed in place. The processor gets a copy, which it may keep.

        Raises:
            RequestFailedError: the processor raised an error, which is the cause, or returned no valid row.
            BaseException: as the processor raised it, if it is the program's: see `is_for_program`.
        """
        if not _is_sound(row):
            return
        told, given = self._told[slot], row.copy()
        try:
            found = told.processor.function(told.token_ids(), given)
            _take(given if found is None else found, row)
        except RequestFailedError:
            raise
        except BaseException as error:
            if is_for_program(error):
                raise
            raise RequestFailedError(f"logits_processor raised {_said(error)}") from error
        if not _is_sound(row):
            raise RequestFailedError(
                "logits_processor left NaN or +∞ in the logits: use −∞ to ban a token, and large numbers to force one"
            )


def _is_sound(row: NDArray[np.float32]) -> bool:
    return bool(row.max() < np.inf)


def _take(found: object, row: NDArray[np.float32]) -> None:
    if not isinstance(found, np.ndarray):
        what = type(found).__name__
    elif found.shape != row.shape or found.dtype.kind != "f":
        what = f"an array of shape {found.shape} and type {found.dtype}"
    else:
        with np.errstate(all="ignore"):  # a float64 beyond float32 is ±∞ or 0
            row[:] = found
        return
    raise RequestFailedError(
        f"logits_processor must return None or a numpy array of {len(row)} floats, not {what}"
    )


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {words_of(error)}"
    except Exception:  # its own code runs as it is shown
        return "an error that cannot be shown"
