"""Marks in a text that grows: what matches already, and what may become a match with the text to come."""

from __future__ import annotations

import re

_GROUP = re.compile(r"\((?:\?:|\?=|\?P<\w+>)?")
_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])+\]|[^()|]", re.DOTALL)
_NAME = re.compile(r"\(\?P<\w+>")


class Marks:
    r"""A pattern to find in a text that grows.

    The pattern is made of characters, classes and groups; `*` and `+` stand after a character or a class, `?` after
    anything, `\A` and `(?=…)` may be used.
    """

    __slots__ = ("_beginning", "pattern")

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern
        opening, _ = _alternatives(pattern.pattern, 0)
        self._beginning = re.compile(opening)

    def open_at(self, text: str, at: int) -> int:
        """Return the first place from `at` from which all of the text may be the beginning of a match.

        A match that begins before that place is final, whatever follows the text.
        """
        found = self._beginning.search(text, at)
        return found.start() if found else len(text)

    def may_match(self, text: str, at: int) -> bool:
        """Whether `text[at:]` may be the beginning of a match, or of a longer one."""
        return self._beginning.match(text, at) is not None


# ---- from a pattern to one of what its matches begin with, up to the end of the text ----


def _alternatives(pattern: str, at: int) -> tuple[str, int]:
    """Return the beginnings of alternatives, and where these end."""
    found, items = list[str](), list[tuple[str, str]]()
    while at < len(pattern) and pattern[at] != ")":
        if pattern[at] == "|":
            found.append(_sequence(items))
            items, at = [], at + 1
        else:
            item, at = _item(pattern, at)
            items.append(item)
    found.append(_sequence(items))
    return f"(?:{'|'.join(found)})", at


def _item(pattern: str, at: int) -> tuple[tuple[str, str], int]:
    """Return one part of a sequence, as it is and as what it may begin with; and where it ends."""
    start, atom = at, ""
    if pattern[at] == "(":
        head = _GROUP.match(pattern, at)
        assert head
        opening, at = _alternatives(pattern, head.end())
        at += 1
    else:
        found = _ATOM.match(pattern, at)
        assert found
        atom, at = found[0], found.end()
        opening = "(?!)" if atom == r"\A" else r"\Z"
    if pattern[at : at + 1] in ("*", "+", "?"):
        opening = opening if pattern[at] == "?" else rf"{atom}*\Z"
        at += 1
    return (_NAME.sub("(?:", pattern[start:at]), opening), at


def _sequence(items: list[tuple[str, str]]) -> str:
    """Return what a sequence may begin with; characters in a row are one part, so that groups are not deep."""
    opening, run = "(?!)", list[str]()
    for whole, part in (*reversed(items), ("", "")):
        if part == r"\Z" and not whole.endswith("?"):
            run.insert(0, whole)
            continue
        if run:
            begun = "|".join("".join(run[:n]) for n in range(len(run) - 1, -1, -1))
            opening = rf"(?:(?:{begun})\Z|{''.join(run)}{opening})"
            run = []
        if whole:
            opening = f"(?:{part}|{whole}{opening})"
    return opening
