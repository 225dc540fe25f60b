"""Estimates how much memory chunks and results take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.response import BatchOutputChunk, BatchResult, TokenLogprob

_N_RESULT_BYTES = 1500
_N_CHUNK_BYTES = 300
_N_TOKEN_BYTES = 36
_N_LOGPROB_BYTES = 170
"""Bytes of a result, a chunk, a token and a log-probability, with the objects in them. Measured, CPython 3.11."""


def size_of_chunk(chunk: BatchOutputChunk) -> int:
    """Return about the bytes of a chunk."""
    own = _N_CHUNK_BYTES + len(chunk.text) + _N_TOKEN_BYTES * len(chunk.token_ids)
    return own + _size_of_scores(chunk.logprobs)


def size_of_result(result: BatchResult, *, is_streamed: bool) -> int:
    """Return about the bytes of a result; one that is streamed shares log-probabilities with its chunks."""
    answers = result.choices or (result,)
    scores = {id(answer.prompt_logprobs): answer.prompt_logprobs for answer in answers}
    if not is_streamed:
        scores |= {id(answer.logprobs): answer.logprobs for answer in answers}
    own = sum(
        _N_RESULT_BYTES
        + len(answer.text)
        + len(answer.reasoning)
        + _N_TOKEN_BYTES * len(answer.token_ids)
        + len(answer.embedding or b"")
        for answer in answers
    )
    return own + sum(map(_size_of_scores, scores.values()))


def n_logprobs(found: Sequence[TokenLogprob | None] | None) -> int:
    """Return how many log-probabilities there are, alternatives counted."""
    return sum(1 + len(token.top) for token in found or () if token)


def _size_of_scores(found: Sequence[TokenLogprob | None] | None) -> int:
    return _N_LOGPROB_BYTES * n_logprobs(found)
