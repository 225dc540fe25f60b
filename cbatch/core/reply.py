"""What the reader of a sequence gets of its output: text as it comes, and the answer taken apart at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.chat.answers import N_TAIL
from cbatch.chat.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.chat.answers import Answer, AnswerReader
    from cbatch.core.request import Request


@dataclass(eq=False, slots=True)
class Reply:
    """The output of a request as text, and how much of it was given out."""

    request: Request
    text: TextStream
    reader: AnswerReader | None
    """Takes the ended answer apart, where it is more than text."""
    answer: Answer | None = None
    is_watched: bool = False
    """Whether somebody reads the output as it comes, or may: before the first delivery that is not known."""
    delivered: tuple[int, int] | None = None
    """Parts of the text and tokens that were given out; None before the first chunk."""

    @classmethod
    def of(
        cls, request: Request, piece: Callable[[int], bytes], reader: AnswerReader | None
    ) -> Reply:
        """Return an empty reply; `piece` gives the bytes of a token."""
        options = request.options
        stops = tuple(options.stop or ())
        text = TextStream(piece, stops, include_stop=bool(options.include_stop))
        return cls(request, text, reader)

    def feed(self, output: list[int]) -> None:
        """Feed the tokens of the output that are new since the last time to the text."""
        text = self.text
        if text.n_fed < len(output) and text.stop is None:
            has_stop = output[-1] in self.request.stop_tokens
            is_cut = has_stop and not self.request.options.include_stop
            text.feed(output[text.n_fed : -1 if is_cut else None])

    def read_answer(self, reader: AnswerReader, output: list[int], prompt: Sequence[int]) -> Answer:
        """Take the ended answer to a prompt apart, in time in proportion to its length."""
        options, text = self.request.options, self.text
        self.answer = reader.read(
            "".join(text.parts),
            output[: text.n_fed],
            prompt[-N_TAIL:],
            stops=() if text.stop is None else tuple(options.stop or ()),
            include_stop=bool(options.include_stop),
        )
        return self.answer
