"""DRY's breakers: the tokens that hold a string or begin it, packed as the native library takes them.

Packed are int32s: the number of heads; for each head, ascending, its token and its group; then the groups, each the
number of its tails, each of these its length and its tokens. A head and a tail of its group are a breaker.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

    Tail = tuple[int, ...]

_N_TAIL_MAX = 20
"""Most tokens of a sequence after its first. Source: llama_sampler_init_dry, MAX_SEQ_LEN."""


def find_breakers(
    strings: Iterable[str], words: Sequence[bytes], tokenize: Callable[[bytes], Sequence[int]]
) -> bytes:
    """Return tokens that hold a string, and tokens that end with a part of it, followed by the rest's tokens; packed.

    The time grows with the number of tokens, and hardly with that of breakers: heads with the same tails share them.

    Args:
        words: each token's text.

    Source: llama.cpp src/llama-sampler.cpp, get_overlapping_token_sequences and llama_sampler_init_dry.
    """
    texts = {text.encode() for text in strings if text}
    rests: dict[bytes, dict[bytes, Tail]] = {}
    for text in texts:
        for i in range(1, len(text)):
            rests.setdefault(text[:i], {})[text] = tuple(tokenize(text[i:])[:_N_TAIL_MAX])
    n_longest = max(map(len, rests), default=0)
    lengths = sorted(set(map(len, texts)))
    known: dict[tuple[bytes, frozenset[bytes]], frozenset[Tail]] = {}
    heads: dict[int, frozenset[Tail]] = {}
    for token, word in enumerate(words):
        longest = b""
        for n in range(min(len(word), n_longest), 0, -1):
            if word[-n:] in rests:
                longest = word[-n:]
                break
        held = frozenset(_held(word, texts, lengths))
        if held or longest:
            key = longest, held
            heads[token] = known.get(key) or known.setdefault(key, _tails(longest, held, rests))
    return _packed(heads)


def _held(word: bytes, texts: Set[bytes], lengths: Sequence[int]) -> Iterator[bytes]:
    """Yield the texts that a word holds."""
    for n in lengths:
        if n > len(word):
            return
        for i in range(len(word) - n + 1):
            if word[i : i + n] in texts:
                yield word[i : i + n]


def _tails(
    longest: bytes, held: Set[bytes], rests: Mapping[bytes, Mapping[bytes, Tail]]
) -> frozenset[Tail]:
    """Return what may follow a word that holds texts, and whose longest end that begins a text is given."""
    ends = (longest[i:] for i in range(len(longest)))
    parts = {tail for end in ends for text, tail in rests.get(end, {}).items() if text not in held}
    return frozenset(parts | {()} if held else parts)


def _packed(heads: Mapping[int, frozenset[Tail]]) -> bytes:
    if not heads:
        return b""
    groups: dict[frozenset[Tail], int] = {}
    numbers = array("i", [len(heads)])
    for head, tails in heads.items():
        numbers.extend((head, groups.setdefault(tails, len(groups))))
    for tails in groups:
        numbers.append(len(tails))
        for tail in sorted(tails):
            numbers.append(len(tail))
            numbers.extend(tail)
    return numbers.tobytes()
