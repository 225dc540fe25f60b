"""Computes rows of pictures: embeddings in place of tokens, which llama.cpp takes in batches of their own."""

from __future__ import annotations

import ctypes
import time
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.core.plan import Chunk, StepResult
from cbatch.support.picture_tokens import FIRST_PICTURE, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.backend.llama.projector import Projector


class PictureRows:
    """Divides chunks where tokens and rows of pictures meet, and computes the latter. One thread only."""

    def __init__(self, projector: Projector, n_batch: int, n_embd: int) -> None:
        """Allocate a batch of `n_batch` rows of `n_embd` floats."""
        self._projector, self._n_batch, self._n_embd = projector, n_batch, n_embd
        self._batch = llama_cpp.llama_batch_init(n_batch, n_embd, 1)

    def groups(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Return the parts of chunks in the order in which they are computed; none where no chunk has a picture.

        Parts of tokens are computed together, each part of a picture alone. Of a chunk, they follow each other.
        """
        if all(max(c.tokens) < FIRST_PICTURE for c in chunks):
            return []
        found: list[list[Chunk]] = []
        for parts in zip_longest(*(_parts(c) for c in chunks)):
            given = [part for part in parts if part is not None]
            texts = [part for part in given if not is_rows(part)]
            found += [texts] if texts else []
            found += [[part] for part in given if is_rows(part)]
        return found

    def run(self, ctx: Any, chunk: Chunk) -> StepResult:
        """Compute a chunk of rows of one picture; nothing is sampled of it."""
        start = time.perf_counter()
        code = 0
        for first in range(0, len(chunk.tokens), self._n_batch):
            tokens = chunk.tokens[first : first + self._n_batch]
            code = self._decode(ctx, chunk.slot, chunk.start + first, tokens)
            if code:
                break
        llama_cpp.llama_synchronize(ctx)
        seconds = time.perf_counter() - start
        return StepResult([[]], int(not code), code, decode_s=seconds, first_s=seconds)

    def _decode(self, ctx: Any, slot: int, start: int, tokens: Sequence[int]) -> int:
        rows, batch = self._projector.rows(tokens), self._batch
        ctypes.memmove(batch.embd, rows.ctypes.data, rows.nbytes)
        batch.n_tokens = len(tokens)
        for i in range(len(tokens)):
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = slot
            batch.logits[i] = 0
        return int(llama_cpp.llama_decode(ctx, batch))

    def close(self) -> None:
        """Free the batch. Twice is harmless."""
        batch, self._batch = self._batch, None
        if batch is not None:
            llama_cpp.llama_batch_free(batch)


def is_rows(chunk: Chunk) -> bool:
    """Whether a part of a chunk is rows of a picture."""
    return chunk.tokens[0] >= FIRST_PICTURE


def _parts(chunk: Chunk) -> Iterator[Chunk]:
    """Yield the parts of a chunk: tokens, or rows of one picture; the last one has the output."""
    start, left = chunk.start, len(chunk.tokens)
    for _, group in groupby(enumerate(chunk.tokens), _run_of):
        tokens = [token for _, token in group]
        left -= len(tokens)
        yield Chunk(chunk.slot, start, tokens, has_output=chunk.has_output and not left)
        start += len(tokens)


def _run_of(placed: tuple[int, int]) -> tuple[int, int]:
    """Return what is the same of rows that follow each other in one picture; for all tokens it is the same, too."""
    i, token = placed
    if token < FIRST_PICTURE:
        return -1, 0
    number, row = place_of(token)
    return number, row - i  # a picture may follow itself
