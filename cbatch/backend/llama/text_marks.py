"""Where a text can be divided so that its parts have the tokens of the whole.

- At marks, which llama.cpp finds first. It takes special tokens out of a text one after the other, the longest first,
  each from left to right, and then tokenizes what is left between them. The time grows with the square of the marks in
  a text. Source: src/llama-vocab.cpp, tokenizer_st_partition.
- With a SentencePiece vocabulary, before characters that are in no token, which become tokens of their bytes. The time
  grows with the square of their number, too. Source: llm_tokenizer_spm_session::resegment.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class TextMark(NamedTuple):
    """The text of a special token, and whether llama.cpp removes the white space before it and behind it."""

    text: bytes
    strips_left: bool = False
    strips_right: bool = False


class TextMarks:
    """All marks of a vocabulary."""

    def __init__(self, marks: Sequence[TextMark]) -> None:
        self._marks = {mark.text: mark for mark in marks}
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first)))
        begins: dict[bytes, int] = {}
        """By each beginning of a mark, the length of the longest such mark."""
        for text in longest_first:
            for i in range(1, len(text)):
                begins.setdefault(text[:i], len(text))
        self._may_be_overlapped = {
            text
            for text in longest_first
            if any(begins.get(text[i:], 0) >= len(text) for i in range(1, len(text)))
        }
        self._may_be_stripped = set[bytes]()
        """Marks that begin or end with white space, which those beside them may remove."""
        if any(mark.strips_left or mark.strips_right for mark in marks):
            self._may_be_stripped = {text for text in longest_first if text != text.strip()}

    def parts(self, data: bytes, n_least: int) -> Sequence[bytes]:
        """Divide a text; each part but the last has at least `n_least` bytes, and few more where marks are dense."""
        cuts, at, reach = [0], 0, 0  # [reach, …) is overlapped by no mark that begins before `at`
        while self._marks and (found := self._pattern.search(data, at)):
            start, end = found.span()
            if start < reach or not self._is_token(data, found[0], start):
                reach, at = max(reach, end), start + 1
                continue
            at = reach = end
            cut = start if not self._marks[found[0]].strips_left else end
            if cut - cuts[-1] >= n_least and not (
                cut == end and self._marks[found[0]].strips_right
            ):
                cuts.append(cut)
        return [data[a:b] for a, b in pairwise([*cuts, len(data)])]

    def _is_token(self, data: bytes, text: bytes, start: int) -> bool:
        """Whether the longest mark at a place, into which no other reaches, is a token there for sure."""
        if text in self._may_be_stripped:
            return False
        if text not in self._may_be_overlapped:
            return True
        others = (self._pattern.match(data, i) for i in range(start + 1, start + len(text)))
        return all(o is None or len(o[0]) < len(text) or o[0] == text for o in others)


_WHITE_SPACE = " \t\n\v\f\r"
"""What llama.cpp removes beside marks."""

_PRIVATE = range(0xE000, 0xF900)
"""Characters for private use, hardly one of which is in a vocabulary."""


class UnknownCharacters:
    """The characters that are in no token of a vocabulary: none of them is merged with those beside it."""

    def __init__(self, texts: Iterable[str], marks: Sequence[TextMark]) -> None:
        """Find them; `texts` are those of all tokens."""
        known = {" ", "\u2581"}.union(*texts)
        self.example = next((c for c in map(chr, _PRIVATE) if c not in known), "")
        """One of them; "" where it is not easily found."""
        self._pattern = re.compile(f"[^{re.escape(''.join(sorted(known)))}]")
        read = [(mark, mark.text.decode(errors="replace")) for mark in marks]
        self._marks = tuple(text for _, text in read if text)
        self._strips_left = tuple(t.lstrip(_WHITE_SPACE) for mark, t in read if mark.strips_left)
        self._strips_right = tuple(t.rstrip(_WHITE_SPACE) for mark, t in read if mark.strips_right)

    def parts(self, text: str, n_least: int) -> Sequence[str]:
        """Divide a text before such characters; each part but the last has at least `n_least` characters."""
        cuts, at = [0], n_least
        kept = 0  # no mark removes the white space before this place
        while found := self._pattern.search(text, at):
            at = found.start()
            if text.endswith(self._marks, 0, at):  # behind a mark, llama.cpp may add a space
                at += 1
                continue
            if at >= kept:
                start, end = _space_around(text, at)
                if text.endswith(self._strips_right, 0, start) or text.startswith(
                    self._strips_left, end
                ):
                    at = max(end, at + 1)
                    continue
                kept = end
            cuts.append(at)
            at += n_least
        return [text[a:b] for a, b in pairwise([*cuts, len(text)])]


def _space_around(text: str, at: int) -> tuple[int, int]:
    """Return the start of the white space before a place, and its end: the place itself where it has none."""
    start = end = at
    while start > 0 and text[start - 1] in _WHITE_SPACE:
        start -= 1
    while end < len(text) and text[end] in _WHITE_SPACE:
        end += 1
    return start, end
