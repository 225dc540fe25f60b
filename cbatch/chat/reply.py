"""What the reader of a request gets: its output as text, and the parts of the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from cbatch.chat.answers import N_TAIL, AnswerParts, AnswerReader
from cbatch.chat.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from cbatch.response import TokenLogprob


class OutputReader(Protocol):
    """Where output goes."""

    @property
    def is_streamed(self) -> bool:
        """Whether it is read as it comes."""


@dataclass(eq=False, slots=True)
class Echo:
    """What stands before an answer that echoes its prompt, made when it is first asked for; choices share one."""

    text: str | None = None
    unscored: list[TokenLogprob] = field(default_factory=list)
    """A log-probability for each token where none was computed: NaN."""


@dataclass(eq=False, slots=True)
class ReplyText:
    """The text of an output that grows, and what was given out of it."""

    text: TextStream
    parts: AnswerParts | None
    """The answer taken apart, where it is more than text."""
    silent: Container[int]
    """Tokens that end the output and add nothing to the text."""
    is_watched: bool = False
    """Whether somebody reads the output as it comes, or may: before the first delivery that is not known."""
    reader: OutputReader | None = None
    """Where the output goes."""
    delivered: tuple[int, int] | None = None
    """Parts of the text and tokens that were given out; None before the first chunk."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those of the output so far, where they are asked for, made once for chunks and result."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those of the prompt's scored tokens so far."""
    echo: Echo = field(default_factory=Echo)

    @classmethod
    def of(
        cls,
        piece: Callable[[int], bytes],
        stops: Sequence[str],
        stop_tokens: Container[int],
        reader: AnswerReader | None,
        *,
        include_stop: bool,
    ) -> ReplyText:
        """Return an empty reply; `piece` gives the bytes of a token."""
        text = TextStream(piece, stops, include_stop=include_stop)
        parts = None if reader is None else AnswerParts(reader, text)
        return cls(text, parts, () if include_stop else stop_tokens)

    @property
    def is_read(self) -> bool:
        """Whether somebody reads the output as it comes, as far as is known now."""
        return self.is_watched if self.reader is None else self.reader.is_streamed

    def begin(self, prompt: Sequence[int]) -> None:
        """Take the prompt, whose end may open what the answer continues."""
        if self.parts is not None:
            self.parts.tail = prompt[-N_TAIL:]

    def feed(self, output: Sequence[int]) -> None:
        """Feed the tokens of the output that are new since the last time to the text."""
        text = self.text
        if text.n_fed < len(output) and text.stop is None:
            end = -1 if output[-1] in self.silent else None
            (self.parts or text).feed(output[text.n_fed : end])

    def end(self, output: Sequence[int], *, is_cut: bool) -> bool:
        """Give out all of an output that has ended; return whether the answer calls tools.

        Args:
            is_cut: whether it ended neither by a token nor by a stop string.
        """
        self.feed(output)
        self.text.flush()
        is_cut = is_cut or self.text.stop is not None
        return self.parts is not None and bool(self.parts.end(is_cut=is_cut).calls)
