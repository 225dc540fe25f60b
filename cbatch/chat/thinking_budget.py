"""The grammar of an answer whose thinking has a limit: any tokens, but so many between the marks at most.

It is written in llguidance's Lark, of tokens alone: where no other may follow, the closing mark is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.errors import UnsupportedOptionError
from cbatch.options import Grammar

if TYPE_CHECKING:
    from cbatch.chat.formats import Thinking
    from cbatch.chat.tool_grammar import NamedToken

_N_BEFORE = 2
"""Most tokens before the opening mark: models may begin with line ends. Our choice."""

_ANY = "<[*]>*"


def budget_grammar(
    marks: tuple[str, str], n_tokens: int, *, thinking: Thinking, named_token: NamedToken
) -> Grammar:
    """Return the grammar of any answer whose thinking has at most `n_tokens` tokens between its marks.

    Raises:
        UnsupportedOptionError: a mark is no token.
    """
    begin, _ = tokens = mark_tokens(marks, named_token)
    thought = limited(tokens, n_tokens)
    if thinking == "must end":
        return Grammar("thinking_budget", f"start: {thought} {_ANY}")
    other = f"<[^{begin}]>"
    starts = (
        f"{other}{{0,{_N_BEFORE}}} (<[{begin}]> {thought} {_ANY})?",
        f"{other}{{{_N_BEFORE + 1}}} {_ANY}",
    )
    return Grammar("thinking_budget", f"start: {' | '.join(starts)}")


def limited(marks: tuple[int, int], n_tokens: int) -> str:
    """Return the rest of a thinking with at most `n_tokens` tokens, its closing mark included."""
    _, end = marks
    inner = f"<[^{end}]>{{0,{n_tokens}}} " if n_tokens else ""
    return f"{inner}<[{end}]>"


def mark_tokens(marks: tuple[str, str], named_token: NamedToken) -> tuple[int, int]:
    """Return the tokens of the marks. Raises an `UnsupportedOptionError` where one is no token."""
    begin, end = map(named_token, marks)
    if begin is None or end is None:
        words = f"{' and '.join(marks)}, the marks of thinking in this chat template, are not one token each"
        raise UnsupportedOptionError("thinking_budget", reason=words)
    return begin, end
