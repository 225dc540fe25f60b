"""Split the text of an answer at its marks, as it comes: what may become a mark is held back."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbatch.chat.call_parser import CallSearch, ParsedCall
from cbatch.chat.marks import Marks

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.chat.formats import AnswerFormat
    from cbatch.tools import Tools

CUT_THINKING = "the answer ended while it was thinking"
_N_AGAIN = 8
"""How often each character is read again at most, in the mean, while an answer comes."""
_N_AT_ONCE = 4096
"""Characters that are read again without that limit."""


@dataclass(slots=True)
class Parts:
    """What an answer was split into so far; `text` and `reasoning` only grow."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ParsedCall] = field(default_factory=list)
    thoughts: list[tuple[int, int]] = field(default_factory=list)
    """Where thinking that was split off begins and ends with its marks, in characters of what was written."""
    n_malformed: int = 0
    n_unfinished: int = 0
    """Calls that were cut off and left out."""
    is_cut: bool = False
    """Whether something else than the model ended the answer; set before its end."""
    warnings: list[str] = field(default_factory=list)


class Written:
    """The text of an answer with control tokens written out, from a little before the first that is not taken.

    It is read from `at` on, again and again until it is known what it is. So that the time stays in proportion to its
    length, what is new waits until the reading `is_worthwhile`.
    """

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self._n_left_out = 0
        """Characters before `text`."""
        self._new: list[str] = []
        self._n_all = self._n_spent = 0
        """Characters that were added, and that were read."""
        self._controls: deque[tuple[int, int]] = deque()
        """Spans of control tokens, counted from the beginning of the answer."""

    def add(self, text: str, *, is_control: bool = False) -> None:
        """Add text, or a control token."""
        self._new.append(text)
        start = self._n_all
        self._n_all += len(text)
        if is_control:
            self._controls.append((start, self._n_all))

    @property
    def is_worthwhile(self) -> bool:
        """Whether there is new text, and reading all that is not taken costs no more than was saved for it."""
        n_saved = _N_AT_ONCE + _N_AGAIN * self._n_all - self._n_spent
        return bool(self._new) and self._n_unread <= n_saved

    @property
    def n_taken(self) -> int:
        """Characters that were taken, control tokens included."""
        return self._n_left_out + self.at

    @property
    def _n_unread(self) -> int:
        return self._n_all - self._n_left_out - self.at

    def join(self) -> None:
        """Have the new text in `text`."""
        self._n_spent += self._n_unread
        n_done = max(0, self.at - 1)  # one character tells that this is not the beginning
        self._n_left_out += n_done
        self.text = "".join((self.text[n_done:], *self._new))
        self._new.clear()
        self.at -= n_done

    def take(self, end: int) -> str:
        """Return the text up to `end` without control tokens; it is read no more."""
        kept, at, n_left_out = list[str](), self.at, self._n_left_out
        while self._controls and self._controls[0][0] - n_left_out < end:
            first, last = self._controls[0]
            if last - n_left_out > end:
                kept.append(self.text[at : max(at, first - n_left_out)])
                at = end
                break
            self._controls.popleft()
            kept.append(self.text[at : max(at, first - n_left_out)])
            at = max(at, last - n_left_out)
        kept.append(self.text[at:end])
        self.at = end
        return "".join(kept)

    def rest(self) -> str:
        """Take all that is left."""
        self.join()
        return self.take(len(self.text))


@dataclass(slots=True)
class Trimmed:
    """Text on its way to a part; whitespace is held back where the end of the part may strip it.

    Args:
        strips_begin: whether whitespace at the beginning is left out.
        strips_end: whether whitespace at the end may be left out.
    """

    out: list[str]
    strips_begin: bool
    strips_end: bool
    has_begun: bool = False
    _held: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Add text."""
        if not self.has_begun and self.strips_begin:
            text = text.lstrip()
        if not text:
            return
        if not self.strips_end:
            self.has_begun = True
            self.out.append(text)
        elif body := text.rstrip():
            self.has_begun = True
            self.out += (*self._held, body)
            self._held = [text[len(body) :]]
        else:
            self._held.append(text)

    def strip_begin(self) -> None:
        """Leave out whitespace at the beginning from now on, if nothing else has come."""
        self.strips_begin = True
        if not self.has_begun:
            self._held.clear()

    def end(self, *, is_stripped: bool) -> None:
        """End the part, with the whitespace at its end or without."""
        if not is_stripped:
            self.out += self._held
        self._held = []


class MarkSplitter:
    """Splits an answer that may begin with thinking, and have calls after it."""

    def __init__(
        self,
        format: AnswerFormat,
        parts: Parts,
        tools: Tools,
        *,
        is_opened: bool,
        splits_reasoning: bool,
    ) -> None:
        """Make one; `is_opened` tells that the prompt ends within thinking."""
        self._thinking = format.thinking
        self._parts, self._is_opened, self._splits = parts, is_opened, splits_reasoning
        self._search = CallSearch(format.calls, tools, format.response)
        parts.calls = self._search.calls
        self._text = Trimmed(parts.text, strips_begin=False, strips_end=bool(tools))
        self._thought = self._text
        if splits_reasoning:
            self._thought = Trimmed(parts.reasoning, strips_begin=True, strips_end=True)
        self._stage: Callable[[Written, bool], bool] = self._begin if self._thinking else self._say

    def advance(self, written: Written, *, is_end: bool) -> None:
        """Take from `written` what is decided on; all of it at the end."""
        parts, search = self._parts, self._search
        search.is_cut = parts.is_cut
        while self._stage(written, is_end):
            pass
        if is_end:
            parts.n_malformed, parts.n_unfinished = search.n_malformed, search.n_unfinished
            self._text.end(is_stripped=bool(parts.calls or parts.n_unfinished))

    def hand_over(self) -> None:
        """Give out what was taken and held back."""
        self._thought.end(is_stripped=False)
        self._text.end(is_stripped=False)

    # ---- the stages of an answer; each returns whether the next one begins ----

    def _begin(self, written: Written, is_end: bool) -> bool:
        """Find out whether there is thinking."""
        assert self._thinking is not None
        begin, end = self._thinking
        first = len(written.text) - len(written.text.lstrip())
        begun = written.text[first : first + len(begin)]
        if begun != begin and begin.startswith(begun) and not is_end:
            return False
        self._stage = self._say
        if begun == begin or self._is_opened:
            self._stage, self._end = self._think, Marks(re.compile(re.escape(end)))
            if begun == begin:
                self._leave_out(written, first + len(begin))
        return True

    def _think(self, written: Written, is_end: bool) -> bool:
        end = self._end.pattern.search(written.text, written.at)
        if end is None:
            last = len(written.text) if is_end else self._end.open_at(written.text, written.at)
            self._thought.add(written.take(last))
            if is_end and self._parts.reasoning:
                self._parts.thoughts.append((0, written.n_taken))
                self._parts.warnings.append(CUT_THINKING)
            return False
        self._thought.add(written.take(end.start()))
        self._leave_out(written, end.end())
        if self._splits:
            if self._parts.reasoning:
                self._parts.thoughts.append((0, written.n_taken))
            self._thought.end(is_stripped=True)
            self._text.strip_begin()
        self._stage = self._say
        return True

    def _say(self, written: Written, is_end: bool) -> bool:
        found, end = self._search.advance(written.text, written.at, is_end=is_end)
        for markup in found:
            self._text.add(written.take(markup.start))
            written.take(markup.end)
            if markup.is_call:
                self._text.strip_begin()
        self._text.add(written.take(end))
        return False

    def _leave_out(self, written: Written, end: int) -> None:
        """Pass a mark of thinking, which is text where thinking is not split off."""
        mark = written.take(end)
        if not self._splits:
            self._text.add(mark)
