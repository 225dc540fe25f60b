"""How the chats of one model are answered: by its chat template and its vocabulary."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from cbatch.chat.answers import AnswerReader
from cbatch.chat.formats import AnswerFormat, Thinking, answer_format
from cbatch.chat.tool_grammar import budget_grammar, call_grammar
from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.support.checks import MAX_GRAMMAR_LENGTH
from cbatch.tools import Tools, read_choice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.messages import BatchPrompt, Message
    from cbatch.options import Grammar, RunOptions

_N_GRAMMARS_MAX = 64

_N_TAIL_TEXT = 256
"""Characters at the end of a prompt that show whether thinking has begun."""


class _ChatVocab(Protocol):
    """What chats need of `cbatch.backend.Vocab`."""

    @property
    def template(self) -> str: ...
    @property
    def control_tokens(self) -> frozenset[int]: ...
    def piece(self, token: int) -> bytes: ...
    def shown_piece(self, token: int) -> bytes: ...
    def named_token(self, mark: str) -> int | None: ...
    def render_text(
        self, messages: Sequence[Message], variables: Mapping[str, object] | None = None
    ) -> str: ...


class ChatFormat:
    """How a model's chats are answered. From any thread."""

    def __init__(self, vocab: _ChatVocab) -> None:
        self._vocab = vocab
        self._grammars: dict[tuple[str, bool, Thinking, int | None], Grammar] = {}

    def reader(self, prompt: BatchPrompt, options: RunOptions) -> AnswerReader | None:
        """Return the reader of the answer to a prompt; None where the answer is text and nothing else."""
        if prompt.messages is None:
            return None
        tools, splits = options.offered_tools, options.reasoning_format != "none"
        if not tools and (self._format.is_plain or not splits):
            return None
        vocab, opened = self._vocab, _opened_text(prompt.messages)
        controls = frozenset[int]()  # shown ones are text as all others
        if options.skip_special_tokens is not False:
            controls = vocab.control_tokens
        n_calls_max = 1 if options.parallel_tool_calls is False else None
        shown = vocab.shown_piece
        return AnswerReader(self._format, shown, controls, tools, splits, opened, n_calls_max)

    def is_grammar_open(self, prompt: BatchPrompt, options: RunOptions) -> bool:
        """Whether `grammar` needs the prompt's text: it tells whether the answer begins within thinking."""
        is_bound = options.demanded_tools or options.thinking_budget is not None
        if not is_bound or self._format.thinking is None or prompt.messages is None:
            return False
        return not _opened_text(prompt.messages)

    def render(self, prompt: BatchPrompt, options: RunOptions) -> str:
        """Return the text of a chat. Raises a `RequestFailedError` if the template refuses it."""
        return self._vocab.render_text(prompt.messages or (), options.template_variables)

    def grammar(self, prompt: BatchPrompt, options: RunOptions, text: str = "") -> Grammar | None:
        """Return the grammar of an answer that has to call tools, or whose thinking is limited; None for any other.

        `text` is the prompt's; without it, an answer for which that `is_grammar_open` may begin with thinking. The last
        few grammars are kept, since the requests of a batch are alike.

        Raises:
            UnsupportedOptionError: the answers of this chat template cannot be held to calls, or to a limit.
            ConfigError: the arguments of a tool are not an object, or the tools are too long for a grammar.
        """
        tools, n_thought = options.demanded_tools, options.thinking_budget
        if not tools and n_thought is None:
            return None
        if n_thought is not None and self._format.has_channels and prompt.messages is not None:
            words = (
                "this chat template has thinking in channels (gpt-oss), which cannot be limited yet"
            )
            raise UnsupportedOptionError("thinking_budget", reason=words)
        is_one = read_choice(options.tool_choice).is_one or options.parallel_tool_calls is False
        thinking = self._thinking(prompt, text)
        if not tools and thinking == "none":
            return None
        key = (_text_of(tools), is_one, thinking, n_thought)
        found = self._grammars.get(key)
        if found is None:
            found = self._made(tools, thinking, n_thought, is_one=is_one)
            if len(self._grammars) >= _N_GRAMMARS_MAX:
                self._grammars.clear()
            self._grammars[key] = found
        return found

    def _made(
        self, tools: Tools, thinking: Thinking, n_thought: int | None, *, is_one: bool
    ) -> Grammar:
        format, named_token = self._format, self._vocab.named_token
        if tools:
            return call_grammar(
                format,
                tools,
                thinking=thinking,
                is_one=is_one,
                named_token=named_token,
                n_thought=n_thought,
            )
        if format.thinking is None or n_thought is None:
            raise ValueError(
                "internal error: the model does not think, or the request has no thinking_budget"
            )
        return budget_grammar(
            format.thinking, n_thought, thinking=thinking, named_token=named_token
        )

    @property
    def limits_thinking(self) -> bool:
        """Whether thinking can be limited, where there is any."""
        marks, named_token = self._format.thinking, self._vocab.named_token
        is_marked = marks is None or None not in map(named_token, marks)
        return is_marked and not self._format.has_channels

    def _thinking(self, prompt: BatchPrompt, text: str) -> Thinking:
        """Return whether the answer has thinking, which the end of the prompt's text tells."""
        if self._format.thinking is None or prompt.messages is None:
            return "none"
        return self._format.thinking_after(_opened_text(prompt.messages), text[-_N_TAIL_TEXT:])

    @cached_property
    def _format(self) -> AnswerFormat:
        return answer_format(self._vocab.template)


def _text_of(tools: Tools) -> str:
    """Return tools that must be called as text. Raises a `ConfigError` where it is too long for a grammar."""
    text = json.dumps(tools)
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise ConfigError(
            f"tools have {len(text):,} characters; at most {MAX_GRAMMAR_LENGTH:,} are allowed where a call is required"
        )
    return text


def _opened_text(messages: Sequence[Message]) -> str:
    """Return the text of the last message where it is the assistant's and the answer continues it; otherwise ""."""
    last = messages[-1]
    return str(last["content"]) if last["role"] == "assistant" else ""
