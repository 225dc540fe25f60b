"""Computes rows of pictures: embeddings in place of tokens, which llama.cpp takes in batches of their own."""

from __future__ import annotations

import ctypes
import time
from contextlib import contextmanager
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.bindings import llama_cpp
from cbatch.core.plan import StepResult
from cbatch.core.span import Span
from cbatch.support.picture_tokens import FIRST_PICTURE, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cbatch.backend.llama.projector import Projector


class PictureRows:
    """Divides chunks where tokens and rows of pictures meet, and computes the latter. One thread only."""

    def __init__(
        self, projector: Projector, n_batch: int, position: Callable[[int, int], int]
    ) -> None:
        """Allocate what a batch of `n_batch` rows needs; `position` gives that of a slot's cell at an index."""
        self._projector, self._n_batch, self._position = projector, n_batch, position
        self._n_positions = 4 if projector.has_flat_pictures else 1
        self._positions = np.zeros(self._n_positions * n_batch, np.int32)
        self._slot = np.zeros(1, np.int32)
        self._n_slots = np.ones(n_batch, np.int32)
        self._slots = np.full(n_batch, self._slot.ctypes.data, np.uintp)
        self._has_logits = np.zeros(n_batch, np.int8)

    def groups(self, chunks: Sequence[Span]) -> list[list[Span]]:
        """Return the parts of chunks in the order in which they are computed; none where no chunk has a picture.

        Parts of tokens are computed together, each part of a picture alone. Of a chunk, they follow each other.
        """
        if all(max(c.inputs) < FIRST_PICTURE for c in chunks):
            return []
        found: list[list[Span]] = []
        for parts in zip_longest(*(_parts(c) for c in chunks)):
            given = [part for part in parts if part is not None]
            texts = [part for part in given if not part.begins_in_picture]
            found += [texts] if texts else []
            found += [[part] for part in given if part.begins_in_picture]
        return found

    def run(self, ctx: Any, chunk: Span) -> StepResult:
        """Compute a chunk of rows of one picture; nothing is sampled of it.

        After a failure the first rows may have cells, where the chunk is larger than a batch.
        """
        start = time.perf_counter()
        code = 0
        with _seeing_all(ctx, is_on=self._projector.attends_ahead(chunk.inputs[0])):
            for first in range(0, len(chunk.inputs), self._n_batch):
                tokens = chunk.inputs[first : first + self._n_batch]
                code = self._decode(ctx, chunk.slot, chunk.start + first, tokens)
                if code:
                    break
        llama_cpp.llama_synchronize(ctx)
        seconds = time.perf_counter() - start
        return StepResult([[]], int(not code), code, decode_s=seconds, first_s=seconds)

    def is_in_one_batch(self, chunk: Span) -> bool:
        """Whether a chunk of rows is computed as a whole or not at all."""
        return len(chunk.inputs) <= self._n_batch

    def _decode(self, ctx: Any, slot: int, start: int, tokens: Sequence[int]) -> int:
        n, rows = len(tokens), self._projector.rows(tokens)
        offsets = self._projector.offsets(tokens)
        first = self._position(slot, start)
        positions = self._positions[: self._n_positions * n].reshape(self._n_positions, n)
        positions[:] = first + (np.arange(n) if offsets is None else offsets)
        self._slot[0] = slot
        batch = llama_cpp.llama_batch(
            n_tokens=n,
            embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=_ints(self._positions),
            n_seq_id=_ints(self._n_slots),
            seq_id=self._slots.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._has_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        return int(llama_cpp.llama_decode(ctx, batch))


def _ints(values: Any) -> Any:
    return values.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


@contextmanager
def _seeing_all(ctx: Any, *, is_on: bool) -> Iterator[None]:
    """Have rows attend to all rows that are computed with them, if it is on."""
    if is_on:
        llama_cpp.llama_set_causal_attn(ctx, False)
    try:
        yield
    finally:
        if is_on:
            llama_cpp.llama_set_causal_attn(ctx, True)


def _parts(chunk: Span) -> Iterator[Span]:
    """Yield the parts of a chunk: tokens, or rows of one picture."""
    end = 0
    for _, group in groupby(enumerate(chunk.inputs), _run_of):
        first, end = end, end + len([*group])
        yield chunk.part(first, end)


def _run_of(placed: tuple[int, int]) -> tuple[int, int]:
    """Return what is the same of rows that follow each other in one picture; for all tokens it is the same, too."""
    i, token = placed
    if token < FIRST_PICTURE:
        return -1, 0
    number, row = place_of(token)
    return number, row - i  # a picture may follow itself
