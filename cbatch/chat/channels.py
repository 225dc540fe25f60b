"""Split an answer in channels, as gpt-oss writes it: analysis is thinking, commentary to a function is a call.

An answer is messages: each has a head, with channel and recipient, and a body.
Source: gpt-oss's template, and OpenAI's description of the harmony format.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cbatch.chat.call_parser import read_call
from cbatch.chat.marks import Marks
from cbatch.chat.split_text import CUT_THINKING, Parts, Trimmed, Written

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.tools import Tools

_MARKS = Marks(re.compile(r"<\|(?P<name>start|channel|message|end|call|return)\|>"))
_RECIPIENT = Marks(re.compile(r"to=functions\.(?P<name>[\w.:/-]+)"))
_ADDRESSED = Marks(re.compile(r"\s*to=functions\.[\w.:/-]+"))
"""How an answer begins where the recipient stands before the channel."""


class ChannelSplitter:
    """Splits an answer in channels."""

    def __init__(self, parts: Parts, tools: Tools, *, splits_reasoning: bool) -> None:
        self._parts, self._tools, self._splits = parts, tools, splits_reasoning
        self._recipient: str | None = None
        """The function that the message calls."""
        self._thought = Trimmed(parts.reasoning, strips_begin=True, strips_end=True)
        self._is_thought = False
        self._i_begin = 0
        """Where the message begins, in characters of what was written."""
        self._i_thought: int | None = None
        """The same of a message that is thinking."""
        self._n_thoughts = self._n_said = 0
        self._stage: Callable[[Written, bool], bool] = self._begin

    def advance(self, written: Written, *, is_end: bool) -> None:
        """Take from `written` what is decided on; all of it at the end."""
        while self._stage(written, is_end):
            pass
        if is_end and self._n_thoughts and not self._n_said and not self._parts.calls:
            self._parts.warnings.append(CUT_THINKING)

    def hand_over(self) -> None:
        """Give out what was taken and held back."""
        self._thought.end(is_stripped=False)

    # ---- the stages of an answer; each returns whether the next one begins ----

    def _begin(self, written: Written, is_end: bool) -> bool:
        """Read what is before the first mark: text, unless it is the recipient of the first message."""
        text, at = written.text, written.at
        mark, end, is_open = _MARKS.pattern.search(text, at), len(text), False
        if mark is not None:
            end = mark.start()
        elif not is_end or (self._parts.is_cut and self._tools):
            is_open = True
            end = _MARKS.open_at(text, at)
        if self._n_said == 0:
            if is_open and end == len(text) and _ADDRESSED.may_match(text, at):
                return False  # at the end of an answer that was cut off it is left out
            if _ADDRESSED.pattern.match(text, at) or not text[at:end].strip():
                # of the head, whose channel comes; whitespace alone is nothing
                self._stage = self._head if mark else self._stage
                return mark is not None
        self._n_said = 1
        self._parts.text.append(written.take(end))
        self._stage = self._head if mark else self._stage
        return mark is not None

    def _head(self, written: Written, is_end: bool) -> bool:
        """Find the end of a message's head, which is kept until then."""
        marks = _MARKS.pattern.finditer(written.text, written.at)
        mark = next((m for m in marks if m["name"] == "message"), None)
        if mark is None:
            return False
        self._i_begin = written.n_taken
        head = written.text[written.at : mark.start()]
        written.take(mark.end())
        recipient = _RECIPIENT.pattern.search(head) if self._tools else None
        self._recipient = recipient["name"] if recipient else None
        self._is_thought = self._splits and "<|channel|>analysis" in head
        if recipient is None:
            self._begin_body()
        self._stage = self._body
        return True

    def _begin_body(self) -> None:
        if not self._is_thought:
            self._n_said += 1
            return
        if self._n_thoughts:
            self._parts.reasoning.append("\n")
        self._n_thoughts += 1
        self._i_thought = self._i_begin
        self._thought = Trimmed(self._parts.reasoning, strips_begin=True, strips_end=True)

    def _body(self, written: Written, is_end: bool) -> bool:
        text, at = written.text, written.at
        marks = _MARKS.pattern.finditer(text, at)
        mark = next((m for m in marks if m["name"] != "message"), None)
        has_ended = mark is not None or is_end
        is_known = is_end and not (self._parts.is_cut and self._recipient is not None)
        end = mark.start() if mark else len(text) if is_known else _MARKS.open_at(text, at)
        if self._recipient is not None:
            if not has_ended:
                return False
            call = read_call(self._recipient, text[at:end])
            if call is not None:
                self._parts.calls.append(call)
                written.take(end)
            elif mark is None and self._parts.is_cut:
                self._parts.n_unfinished += 1
                written.take(end)
            else:
                self._parts.n_malformed += 1
                self._begin_body()
        body = written.take(end)
        if self._is_thought:
            self._thought.add(body)
        else:
            self._parts.text.append(body)
        if has_ended:
            if self._i_thought is not None:
                self._parts.thoughts.append((self._i_thought, written.n_taken))
                self._i_thought = None
            self._thought.end(is_stripped=True)
            self._stage = self._head
        return mark is not None
