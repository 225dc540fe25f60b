"""Chats to rows of tokens, and rows to batches."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from cbatch.bench.synthetic_vocabulary import TURN_END, TURN_START

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.backend import Vocab
    from cbatch.models.recipe.tasks import Example

IGNORED = -100  # Source: torch.nn.functional.cross_entropy, ignore_index
_LONG_SHARE = 0.06  # of the chats, those that are joined to long ones
_N_LONG = (
    500,
    2500,
)  # characters of a long chat's contents, from and to; about half as many tokens


@dataclass(frozen=True, slots=True)
class ChatRow:
    """One chat: its tokens, and at each place the next token where it is to be learned, else `IGNORED`."""

    tokens: list[int]
    targets: list[int]


Batch = list[ChatRow]


class RowMaker:
    """Chats to rows, by the vocabulary and the chat template that run in llama.cpp."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._opening = [TURN_START, *vocab.tokenize("assistant\n")]

    def row(self, chat: Sequence[Example]) -> ChatRow:
        """Return one row of a chat that may be several, one after the other."""
        messages = [message for example in chat for message in example.messages]
        tokens = [*self._vocab.render(messages), TURN_END]
        return ChatRow(tokens, self._targets(tokens))

    def _targets(self, tokens: list[int]) -> list[int]:
        """Return every answer's tokens and its end, each one place earlier."""
        targets, n_opening = [IGNORED] * len(tokens), len(self._opening)
        is_answer = False
        for i, token in enumerate(tokens[:-1]):
            if token == TURN_END:
                is_answer = False
            if tokens[i + 1 - n_opening : i + 1] == self._opening:
                is_answer = True
            if is_answer:
                targets[i] = tokens[i + 1]
        return targets


def batches(
    chats: Iterator[Example], maker: RowMaker, n_batch: int, seed: int, *, n_pool: int = 4096
) -> Iterator[Batch]:
    """Yield batches of rows of about the same length, in random order, without end.

    Args:
        chats: read as needed.
        n_batch: most tokens of a batch, padding included.
        n_pool: chats that are sorted by length together.
    """
    rng = random.Random(seed)
    while True:
        pool = list(islice(chats, n_pool))
        rows = [maker.row(chat) for chat in _join_some(pool, rng)]
        rows.sort(key=lambda row: len(row.tokens), reverse=True)
        cut = list(_cut(rows, n_batch))
        rng.shuffle(cut)
        yield from cut


def _join_some(pool: Sequence[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Yield most chats alone, and some joined to long ones where each answer stands by itself."""
    n_mixed = int(len(pool) * _LONG_SHARE)
    joined: list[Example] = []
    n_left = 0
    for example in pool[:n_mixed]:
        if not _stands_alone(example):
            yield [example]
            continue
        if n_left <= 0 and joined:
            yield joined
            joined = []
        if not joined:
            n_left = rng.randint(*_N_LONG)
        joined.append(example)
        n_left -= sum(len(message["content"]) for message in example.messages)
    if joined:
        yield joined
    yield from ([example] for example in pool[n_mixed:])


def _stands_alone(example: Example) -> bool:
    """Return whether this is one question and its answer, without a system prompt."""
    return [message["role"] for message in example.messages] == ["user", "assistant"]


def _cut(rows: list[ChatRow], n_batch: int) -> Iterator[Batch]:
    """Yield batches that hold at most `n_batch` tokens with their padding; the longest rows come first."""
    while rows:
        n = max(1, n_batch // padded(len(rows[0].tokens)))
        yield rows[:n]
        rows = rows[n:]


def padded(n_tokens: int) -> int:
    """Return the next multiple of 16: for every new shape, code is generated first."""
    return -(-n_tokens // 16) * 16
