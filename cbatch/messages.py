"""What a caller may hand over as prompts, checked whole before anything is queued."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias

from cbatch.errors import ConfigError
from cbatch.options import RunOptions
from cbatch.tools import check_calls

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[Message] | BatchPrompt"


@dataclass(frozen=True)
class BatchPrompt:
    """One request: a chat, a raw prompt, or tokens; with an id and options of its own if it wants.

    Args:
        messages: a chat, each message with `role` and `content`; a last one from `assistant` is continued. One from
            `assistant` may have `tool_calls`, and then no content; one from `tool` has its answer.
        prompt: text to complete as it stands, without the chat template.
        tokens: token ids to complete as they stand.
        id: a name for the result, unique among the requests in flight; without one it gets a number, which no request
            of this engine gets again.
        options: `RunOptions` or a mapping of the same names, before those of the run and of the engine.

    Raises:
        ConfigError: not exactly one of the three kinds, an empty one, or a malformed value.
    """

    messages: Sequence[Message] | None = None
    prompt: str | None = None
    tokens: Sequence[int] | None = None
    id: str | None = None
    options: RunOptions | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check everything that can be checked without the model."""
        given = [n for n in ("messages", "prompt", "tokens") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ConfigError(f"give one of messages, prompt and tokens, not {given or 'none'}")
        if self.id is not None and (not isinstance(self.id, str) or not self.id):
            raise ConfigError(f"an id must be a non-empty string, not {self.id!r}")
        if self.id is not None and "\0" in self.id:
            raise ConfigError(f"an id must not have a NUL character: {self.id!r}")
        object.__setattr__(self, "options", RunOptions.of(self.options))
        self._check_content()

    def _check_content(self) -> None:
        if self.messages is not None:
            object.__setattr__(self, "messages", _messages(self.messages))
        elif self.prompt is not None:
            _check_text(self.prompt)
        elif self.tokens is not None:
            object.__setattr__(self, "tokens", _tokens(self.tokens))


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Prompts that will come, for a context to be made to their measure.

    Args:
        prompts: some of them, each with the options that hold for it.
        is_all: whether no others will come.

    Raises:
        ConfigError: not pairs of a prompt and its options.
    """

    prompts: Sequence[tuple[BatchPrompt, RunOptions]]
    is_all: bool = False

    def __post_init__(self) -> None:
        """Check the pairs."""
        for pair in self.prompts:
            prompt, options = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None)
            if not (isinstance(prompt, BatchPrompt) and isinstance(options, RunOptions)):
                raise ConfigError(
                    f"look_ahead is pairs of a BatchPrompt and its RunOptions, not {type(prompt).__name__} "
                    f"and {type(options).__name__}"
                )


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[BatchPrompt]:
    """Return what `Engine.run` was given as a list: one string, chat or BatchPrompt is a batch of one.

    Raises:
        ConfigError: an empty batch, or an item that is none of these; the message names its place.
    """
    if isinstance(prompts, str | BatchPrompt) or _is_chat(prompts):
        return [as_prompt(prompts)]
    if isinstance(prompts, AsyncIterable):
        raise ConfigError("prompts is an async iterable: give a list, or a generator for `for`")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
    items = [_at(i, item) for i, item in enumerate(prompts)]
    if not items:
        raise ConfigError("the batch is empty: give at least one prompt")
    return items


def is_source(prompts: object) -> bool:
    """Whether these are prompts to be read one by one: an iterable that does not know its length."""
    return isinstance(prompts, Iterable) and not isinstance(prompts, Sized | BatchPrompt)


def as_prompt(item: Any) -> BatchPrompt:
    """Return one item of a batch as what it stands for.

    Raises:
        ConfigError: it is no prompt.
    """
    if isinstance(item, BatchPrompt):
        return item
    if isinstance(item, str):
        return BatchPrompt(prompt=item)
    if isinstance(item, Mapping):
        raise ConfigError("a message stands alone here: a chat is a list of messages")
    if isinstance(item, int) or (
        isinstance(item, Sequence) and any(isinstance(t, int) for t in item)
    ):
        raise ConfigError(
            "these are numbers: for a prompt of token ids give BatchPrompt(tokens=[…])"
        )
    if isinstance(item, Sequence):
        return BatchPrompt(messages=item)
    raise ConfigError(
        f"a prompt is a string, a list of messages or a BatchPrompt, not {type(item).__name__}"
    )


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, Sequence) and bool(value) and all(isinstance(m, Mapping) for m in value)
    )


def _at(i: int, item: Any) -> BatchPrompt:
    try:
        return as_prompt(item)
    except ConfigError as error:
        raise ConfigError(f"prompts[{i}]: {error}") from None


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"prompt must be a string, not {type(text).__name__}")
    if not text:
        raise ConfigError("the prompt is empty")


def _tokens(tokens: object) -> tuple[int, ...]:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
        raise ConfigError(f"tokens must be a list of token ids, not {type(tokens).__name__}")
    if not tokens:
        raise ConfigError("the prompt is empty: tokens has no token")
    for t in tokens:
        if not isinstance(t, int) or isinstance(t, bool) or t < 0:
            raise ConfigError(f"tokens must be token ids (0 and above), not {t!r}")
    return tuple(tokens)


def _messages(messages: object) -> tuple[Message, ...]:
    if isinstance(messages, str):
        raise ConfigError("messages must be a list of messages; for plain text give prompt=")
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ConfigError("the prompt is empty: messages has no message")
    checked = tuple(_message(i, m) for i, m in enumerate(messages))
    if "tool_calls" in checked[-1]:
        raise ConfigError(
            f"messages[{len(checked) - 1}] calls tools and is the last: add what they answer, by role 'tool'"
        )
    return checked


def _message(i: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(
            f"messages[{i}] must be a mapping with role and content, not {type(message).__name__}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"messages[{i}] has no role: it needs a non-empty string")
    calls = check_calls(f"messages[{i}]", role, message.get("tool_calls"))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    for name in ("tool_call_id", "name"):
        if not isinstance(rest.get(name, "-"), str) or not rest.get(name, "-"):
            raise ConfigError(f"messages[{i}] {name} must be a non-empty string")
    if calls and message.get("content") is None:
        return {**rest, "content": None, "tool_calls": calls}
    if message.get("content") is None:
        raise ConfigError(f"messages[{i}] has no content")
    checked = {**rest, "content": _content(i, message["content"])}
    return {**checked, "tool_calls": calls} if calls else checked


def _content(i: int, content: object) -> str:
    """Return the text of a message; OpenAI's list of text parts is joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(p, Mapping) for p in content):
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ConfigError(
                    f"messages[{i}] has a part of type {part.get('type')!r}: only text is supported"
                )
        return "".join(part["text"] for part in content)
    raise ConfigError(f"messages[{i}] content must be a string, not {type(content).__name__}")
