"""The vocabulary: pieces learned from the generated text.

A word is cut the same way wherever it stands: a space joins a word only when the word is one piece already, and after
punctuation it goes with the punctuation. So copying an unknown word is copying its pieces. Digits stay single.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

from cbatch.bench.synthetic_vocabulary import CONTROL_TOKENS

SPACE = "▁"  # SentencePiece writes a space as U+2581
N_VOCAB = 1536
_SPACED_SHARE = 0.33  # of the learned pieces, at most those that are a whole word with its space
_RARE = 1e-5  # of the words after a space: those below this share get no piece with it

_GROUPS = re.compile(r"[A-Z]?[a-z]+|[^\w\s]+ ?")  # what may become one piece
_SPACED = re.compile(r"(?<=\w) ([A-Z]?[a-z]+)")
_LETTERS = [SPACE, *(chr(c) for c in range(ord("!"), ord("~") + 1))]

Word = tuple[str, ...]
Pair = tuple[str, str]
Key = TypeVar("Key", str, Pair)


def learn_pieces(texts: Iterable[str], n_vocab: int = N_VOCAB) -> list[str]:
    """Return `n_vocab` pieces by id: control, 256 bytes, letters, joined pieces in the order of joining.

    Args:
        n_vocab: how many, at least the 356 that are always there.
    """
    groups, spaced = _count(texts)
    pieces = [*CONTROL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *_LETTERS]
    n_spaced = int((n_vocab - len(pieces)) * _SPACED_SHARE)
    pieces += _join(groups, n_vocab - len(pieces) - n_spaced)
    known, n_least = set(pieces), spaced.total() * _RARE
    common = [word for word, n in _ranked(spaced) if word in known and n >= n_least]
    pieces += [SPACE + word for word in common[:n_spaced]]
    return pieces + [f"<unused {i}>" for i in range(n_vocab - len(pieces))]


def _count(texts: Iterable[str]) -> tuple[Counter[str], Counter[str]]:
    """Count the groups of letters or punctuation, and the words after a space."""
    groups, spaced = Counter[str](), Counter[str]()
    for text in texts:
        groups.update(_GROUPS.findall(text))
        spaced.update(_SPACED.findall(text))
    return groups, spaced


def _join(groups: Mapping[str, int], n_pieces: int) -> list[str]:
    """Return joined pieces: again and again the most frequent pair of neighbours (byte-pair encoding)."""
    words = {tuple(g.replace(" ", SPACE)): n for g, n in groups.items() if n > 1 and g.isascii()}
    joined: dict[str, None] = {}
    while len(joined) < n_pieces:
        pairs = _pairs(words)
        if not pairs:
            break
        best = _ranked(pairs)[0][0]
        joined["".join(best)] = None
        words = {_merge(word, best): n for word, n in words.items()}
    return list(joined)


def _pairs(words: Mapping[Word, int]) -> Counter[Pair]:
    pairs = Counter[Pair]()
    for word, n in words.items():
        for pair in pairwise(word):
            pairs[pair] += n
    return pairs


def _merge(word: Word, pair: Pair) -> Word:
    if pair[0] not in word:
        return word
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def _ranked(counts: Counter[Key]) -> list[tuple[Key, int]]:
    """Return the most frequent first; equals in the order of their letters."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
