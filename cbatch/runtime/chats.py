"""What a chat needs beside its prompt: who takes its answer apart, and what that must match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from cbatch.chat.answers import N_TAIL, AnswerFormat, AnswerReader, Pieces, answer_format
from cbatch.chat.tool_grammar import call_grammar, thinking_of
from cbatch.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend import Backend, Message
    from cbatch.chat.tool_grammar import Thinking
    from cbatch.core.request import Request
    from cbatch.messages import BatchPrompt
    from cbatch.options import Grammar, RunOptions

_N_DEMANDS = 64
"""Grammars of calls that are kept."""


class Chats:
    """What the model's chat template says of answers; from one thread at a time."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._demands: dict[tuple[str, bool, Thinking], Grammar] = {}

    def reader(self, request: Request, *, is_shown: bool) -> AnswerReader | None:
        """Return what takes a chat's answer apart; None where it is text and nothing else."""
        messages, options = request.prompt.messages, request.options
        if messages is None:
            return None
        tools, splits = options.offered_tools, options.reasoning_format != "none"
        if not tools and (self._format.is_plain or not splits):
            return None
        opened = _opened_text(messages)
        pieces = self._shown_pieces if is_shown else self._pieces
        n_calls_max = 1 if options.parallel_tool_calls is False else None
        return AnswerReader(self._format, pieces, tools, splits, opened, n_calls_max)

    def demand(self, item: BatchPrompt, options: RunOptions) -> Grammar | None:
        """Return what an answer must match that has to call tools; the last few are kept, for all of a batch ask alike.

        Raises:
            UnsupportedOptionError: this chat template's answers cannot be held to calls.
            ConfigError: a tool's arguments are not an object.
        """
        tools = options.demanded_tools
        if not tools:
            return None
        is_one = isinstance(options.tool_choice, Mapping) or options.parallel_tool_calls is False
        thinking = self._thinking(item, options)
        key = (json.dumps(tools), is_one, thinking)
        if key not in self._demands:
            if len(self._demands) >= _N_DEMANDS:
                self._demands.clear()
            vocab = self._backend.vocab
            self._demands[key] = call_grammar(
                self._format,
                vocab.template,
                tools,
                thinking=thinking,
                is_one=is_one,
                named=vocab.named_token,
            )
        return self._demands[key]

    def _thinking(self, item: BatchPrompt, options: RunOptions) -> Thinking:
        """Return whether an answer may think, which the prompt's end tells."""
        if self._format.thinking is None or item.messages is None:
            return "none"
        opened, vocab = _opened_text(item.messages), self._backend.vocab
        try:
            tail = (
                [] if opened else vocab.render(item.messages, options.template_variables)[-N_TAIL:]
            )
        except RequestFailedError:  # which the request ends with when it is its turn
            return "none"
        shown = b"".join(map(vocab.shown_piece, tail)).decode(errors="replace")
        return thinking_of(self._format, opened, shown)

    @cached_property
    def _format(self) -> AnswerFormat:
        return answer_format(self._backend.vocab.template)

    @cached_property
    def _pieces(self) -> Pieces:
        vocab = self._backend.vocab
        return Pieces(vocab.piece, vocab.shown_piece, vocab.control_tokens)

    @cached_property
    def _shown_pieces(self) -> Pieces:
        vocab = self._backend.vocab
        return Pieces(vocab.shown_piece, vocab.shown_piece)


def _opened_text(messages: Sequence[Message]) -> str:
    """Return the text of the last message, where it is the assistant's and the answer goes on from it."""
    last = messages[-1]
    return str(last["content"]) if last["role"] == "assistant" else ""
