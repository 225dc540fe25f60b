"""The vocabulary of random models: control tokens, bytes, letters, English words, and pieces that are made up."""

from __future__ import annotations

import random
from collections.abc import Iterator

CONTROL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
UNK, BOS, EOS, TURN_START, TURN_END = range(len(CONTROL_TOKENS))

_SPACE = "▁"  # SentencePiece writes a space as U+2581
_LETTERS = [_SPACE, *(chr(c) for c in range(ord("!"), ord("~") + 1))]
MIN_VOCAB = len(CONTROL_TOKENS) + 256 + len(_LETTERS)
"""Pieces that any text needs to have tokens."""

_MAX_PIECE = 12

_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had
by word but not what all were we when your can said there use an each which she do how their if
will up other about out many then them these so some her would make like him into time has look two
more write go see number no way could people my than first water been call who oil its now find
long down day did get come made may part over new sound take only little work know place year live
me back give most very after thing our just name good sentence man think say great where help
through much before line right too mean old any same tell boy follow came want show also around
form three small set put end does another well large must big even such because turn here why ask
went men read need land different home us move try kind hand picture again change off play spell
air away animal house point page letter mother answer found study still learn should world red blue
green yellow count list story question
"""


def words() -> list[str]:
    """Return the common English words that every made-up vocabulary has as tokens."""
    return _WORDS.split()


def vocabulary(n_vocab: int, *, seed: int = 0) -> list[str]:
    """Return a vocabulary's pieces: control, 256 bytes, letters, English words, made-up ones.

    Every piece of several letters is two earlier pieces joined, so that merging can reach it.

    Args:
        n_vocab: how many pieces, at least enough for control tokens, bytes and printable ASCII.
        seed: of the made-up pieces.
    """
    pieces = [*CONTROL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    taken = dict.fromkeys([*_LETTERS, *_word_prefixes()])
    n_free = n_vocab - len(pieces)
    return pieces + _extend(list(taken)[:n_free], n_free, random.Random(seed))


def _word_prefixes() -> Iterator[str]:
    """Yield each common word as `▁w`, `▁wo`, … up to the whole."""
    for word in words():
        for n_letters in range(1, len(word) + 1):
            yield _SPACE + word[:n_letters]


def _extend(pieces: list[str], n_pieces: int, rng: random.Random) -> list[str]:
    """Append joined pieces in lower-case letters until there are `n_pieces`. Mutates `pieces`.

    Every pair of earlier pieces that is short enough together is as likely as any other.
    """
    taken = set(pieces)
    lengths = range(1, _MAX_PIECE)
    heads: dict[int, list[str]] = {n: [] for n in lengths}  # by their length
    tails: dict[int, list[str]] = {n: [] for n in lengths}  # by that of the longest head they fit

    def add(piece: str) -> None:
        n = len(piece)
        if n in heads:
            heads[n].append(piece)
            if not piece.startswith(_SPACE):
                for n_before in range(1, _MAX_PIECE - n + 1):
                    tails[n_before].append(piece)

    for piece in pieces:
        if piece.lstrip(_SPACE).isalpha() and piece.islower():
            add(piece)
    while len(pieces) < n_pieces:
        n_pairs = [len(heads[n]) * len(tails[n]) for n in lengths]
        (n,) = rng.choices(lengths, n_pairs)
        joined = rng.choice(heads[n]) + rng.choice(tails[n])
        if joined not in taken:
            taken.add(joined)
            pieces.append(joined)
            add(joined)
    return pieces
