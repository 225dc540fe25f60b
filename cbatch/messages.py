"""The prompts that callers give, checked completely before anything is queued.

A check raises `ConfigError`, which names the value and says what it may be.
"""

from __future__ import annotations

import os
from collections.abc import (
    AsyncIterable,
    Iterable,
    Iterator,
    Mapping,
    MappingView,
    Sequence,
    Set,
    Sized,
)
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from cbatch.errors import ConfigError, near
from cbatch.media import is_medium, medium_part
from cbatch.options import RunOptions
from cbatch.pictures import is_picture
from cbatch.sounds import is_sound
from cbatch.support.checks import check_depth, check_flag, given_only, reading, shown
from cbatch.support.plain import flag_of, int_of, is_table, list_of, plain, text_of, token_of
from cbatch.tools import check_calls

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[Message] | BatchPrompt"


@dataclass(frozen=True)
class BatchPrompt:
    """One request: a chat, a raw prompt, or tokens; optionally with an id and options of its own.

    Args:
        messages: a chat, each message with `role` and `content`; if the last message is from `assistant`, it is
            continued. A message from `assistant` may have `tool_calls` and no content; one from `tool` has the answer.
        prompt: text to complete as it stands, without the chat template.
        tokens: token ids to complete as they stand.
        id: a name for the result, unique among the requests in flight. Default: a number that this engine never uses
            again.
        options: `RunOptions`, or a mapping of their names; they override those of the run and of the engine.

    Raises:
        ConfigError: not exactly one of `messages`, `prompt` and `tokens`, an empty one, or a malformed value.
    """

    messages: Sequence[Message] | None = None
    prompt: str | None = None
    tokens: Sequence[int] | None = None
    id: str | None = None
    options: RunOptions | Mapping[str, Any] | None = None

    __repr__ = given_only

    def __post_init__(self) -> None:
        given = [n for n in ("messages", "prompt", "tokens") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ConfigError(f"give one of messages, prompt and tokens, not {given or 'none'}")
        if self.id is not None:
            object.__setattr__(self, "id", as_id(self.id))
            if "\0" in self.id:
                raise ConfigError(f"an id must not have a NUL character: {shown(self.id)}")
        object.__setattr__(self, "options", RunOptions.of(self.options))
        for name, settle in (("messages", _messages), ("prompt", _text), ("tokens", _tokens)):
            if (value := getattr(self, name)) is not None:
                with reading(name):
                    object.__setattr__(self, name, settle(value))

    @property
    def has_pictures(self) -> bool:
        """Whether a message has a picture."""
        return any(map(is_picture, self._parts()))

    @property
    def has_sounds(self) -> bool:
        """Whether a message has a sound."""
        return any(map(is_sound, self._parts()))

    @property
    def has_media(self) -> bool:
        """Whether a message has a picture or a sound."""
        return any(isinstance(message["content"], tuple) for message in self.messages or ())

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        for message in self.messages or ():
            if isinstance(message["content"], tuple):
                yield from message["content"]

    def named(self, id: str) -> BatchPrompt:
        """Return the prompt with another id, which must be valid; nothing is checked again."""
        found = copy(self)
        object.__setattr__(found, "id", id)
        return found


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Prompts that will come, so that the context can be sized for them.

    Args:
        prompts: some of them, each with its options.
        is_all: whether no other prompts will come.

    Raises:
        ConfigError: `prompts` are not pairs of a prompt and its options.
    """

    prompts: Sequence[tuple[BatchPrompt, RunOptions]]
    is_all: bool = False

    def __post_init__(self) -> None:
        pairs = list_of(self.prompts)
        if pairs is None:
            raise ConfigError(
                f"look_ahead must be a list of prompts with their options, not {type(self.prompts).__name__}"
            )
        check_flag("is_all", self.is_all)
        for pair in pairs:
            prompt, options = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None)
            if not (isinstance(prompt, BatchPrompt) and isinstance(options, RunOptions)):
                raise ConfigError(
                    f"look_ahead must be pairs of a BatchPrompt and its RunOptions, not {type(prompt).__name__} "
                    f"and {type(options).__name__}"
                )


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[BatchPrompt]:
    """Return the prompts given to `Engine.run` as a list: one string, chat or BatchPrompt is a batch of one."""
    with reading("prompts"):
        if isinstance(prompts, BatchPrompt) or text_of(prompts) is not None or _is_chat(prompts):
            return [as_prompt(prompts)]
        _check_batch(prompts)
        listed = list_of(prompts)
        items = [_at(i, item) for i, item in enumerate(prompts if listed is None else listed)]
    if not items:
        raise ConfigError("the batch is empty: give at least one prompt")
    return items


def is_source(prompts: object) -> bool:
    """Whether the prompts are to be read one by one: an iterable without a length, or an async one.

    An iterable that holds no prompts, such as a file or the rows of a table, is refused.
    """
    with reading("prompts"):
        if isinstance(prompts, AsyncIterable):
            if hint := _hint(prompts):
                raise ConfigError(
                    f"prompts must be a list of prompts, not {type(prompts).__name__}{hint}"
                )
            return True
        if isinstance(prompts, Sized | BatchPrompt) or not isinstance(prompts, Iterable):
            return False
        _check_batch(prompts)
        return True


def as_prompt(item: Any) -> BatchPrompt:
    """Return one item of a batch as a `BatchPrompt`."""
    if type(item) is BatchPrompt:
        return item
    with reading("the prompt"):
        if isinstance(item, BatchPrompt):
            return item
        text, listed = text_of(item), list_of(item)
        if text is not None:
            return BatchPrompt(prompt=text)
        if isinstance(item, Mapping):
            raise ConfigError(_NO_CHAT if "role" in map(text_of, item) else _NO_ROW)
        if any(_is_number(value) for value in ([item] if listed is None else listed)):
            raise ConfigError(
                "these are numbers: for a prompt of token ids give BatchPrompt(tokens=[…])"
            )
        if listed is None:
            raise ConfigError(
                f"a prompt must be a string, a list of messages or a BatchPrompt, not {_kind(item)}"
            )
        if any(isinstance(value, Mapping) and _is_item(value) for value in listed):
            raise ConfigError(_NO_MESSAGE)
        return BatchPrompt(messages=listed)  # type: ignore[arg-type]  # which looks at each


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's chats. A template may know others, so only a misspelt one of these is refused."""

_MEDIA_ROLES = ("user", "tool")

_NO_CHAT = "this is a single message: give a chat as a list of messages"
_NO_ROW = (
    "a mapping is not a prompt: for one with a prompt's fields give BatchPrompt(**it), for the rows of a table use "
    "run_table of cbatch.files"
)

_NO_MESSAGE = (
    "a mapping with messages, prompt or tokens is not a message: an item is a text, a list of messages or a "
    "BatchPrompt; give BatchPrompt(**item) for each"
)


def _is_item(value: Mapping[object, object]) -> bool:
    """Whether a mapping has the fields of a `BatchPrompt`, as a line of a batch file has."""
    names = {text_of(key) for key in value}
    return "role" not in names and not names.isdisjoint(("messages", "prompt", "tokens"))


def as_id(value: object) -> str:
    """Return the id of a request."""
    with reading("id"):
        text = text_of(value)
    if not text:
        raise ConfigError(f"an id must be a non-empty string, not {shown(value)}")
    return text


def _is_chat(value: object) -> bool:
    listed = list_of(value)
    return bool(listed) and all(isinstance(m, Mapping) for m in listed or ())


def _is_number(value: object) -> bool:
    return int_of(value) is not None or flag_of(value) is not None


def _check_batch(prompts: object) -> None:
    """Refuse an iterable that is not a collection of prompts."""
    if isinstance(prompts, Set) and not isinstance(prompts, MappingView):
        raise ConfigError(
            "prompts is a set, and results come in the order of the prompts: give a list"
        )
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable) or _hint(prompts):
        raise ConfigError(f"prompts must be a list of prompts, not {_kind(prompts)}")


def _kind(value: object) -> str:
    """Return how an error names a wrong value: its type, and a hint."""
    return shown(value) if isinstance(value, Enum) else f"{type(value).__name__}{_hint(value)}"


def _hint(value: object) -> str:
    """Return a hint for a value that is often taken for prompts; otherwise nothing."""
    if isinstance(value, bytes | bytearray | memoryview):
        return ": decode them to a string"
    if is_table(value):
        return ": for the rows of a table use run_table of cbatch.files"
    if isinstance(value, os.PathLike) or hasattr(value, "readline"):
        return ": for a file of prompts use run_file or stream_file of cbatch.files"
    return ""


def _at(i: int, item: Any) -> BatchPrompt:
    try:
        return as_prompt(item)
    except ConfigError as error:
        raise ConfigError(f"prompts[{i}]: {error}") from None


def _text(value: object) -> str:
    text = text_of(value)
    if text is None:
        raise ConfigError(f"prompt must be a string, not {_kind(value)}")
    if not text:
        raise ConfigError("the prompt is empty")
    return text


def _tokens(value: object) -> tuple[int, ...]:
    items = list_of(value)
    if items is None:
        raise ConfigError(f"tokens must be a list of token ids, not {_kind(value)}")
    if not items:
        raise ConfigError("the prompt is empty: tokens has no token")
    tokens = tuple(t for t in map(token_of, items) if t is not None)
    if len(tokens) != len(items):
        wrong = next(item for item in items if token_of(item) is None)
        raise ConfigError(f"tokens must be token ids (0 and above), not {shown(wrong)}")
    return tokens


def _messages(value: object) -> tuple[Message, ...]:
    if text_of(value) is not None:
        raise ConfigError(
            'messages must be a list of messages such as {"role": "user", "content": "…"}, not a string'
        )
    messages = list_of(value)
    if messages is None:
        raise ConfigError(f"messages must be a list of messages, not {_kind(value)}")
    if not messages:
        raise ConfigError("the prompt is empty: messages has no message")
    check_depth("messages", messages)
    checked = tuple(_message(f"messages[{i}]", m) for i, m in enumerate(messages))
    if "tool_calls" in checked[-1]:
        raise ConfigError(
            f"messages[{len(checked) - 1}] calls tools and is the last: add the results as messages with role 'tool'"
        )
    return checked


def _message(place: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{place} must be a mapping with role and content, not {_kind(message)}")
    given = {plain(key): value for key, value in message.items()}
    role = text_of(given.get("role"))
    if not role:
        raise ConfigError(
            f"{place} has no role: it needs a non-empty string, not {shown(given.get('role'))}"
        )
    if role not in _ROLES and (others := near(role.strip(), _ROLES)):
        raise ConfigError(f"{place} has the role {shown(role)}, which is unknown; {others}")
    rest: dict[Any, Any] = {key: plain(value) for key, value in given.items() if key != "content"}
    calls = check_calls(place, role, rest.pop("tool_calls", None))
    rest |= {name: _name(place, name, given) for name in ("tool_call_id", "name") if name in given}
    content = given.get("content")
    if content is None and not calls:
        raise ConfigError(f"{place} has no content")
    rest |= {"role": role, "content": None if content is None else _content(place, role, content)}
    return {**rest, "tool_calls": calls} if calls else rest


def _name(place: str, key: str, message: Mapping[object, object]) -> str:
    text = text_of(message[key])
    if not text:
        raise ConfigError(f"{place} {key} must be a non-empty string, not {shown(message[key])}")
    return text


def _content(place: str, role: str, content: object) -> str | tuple[dict[str, Any], ...]:
    """Return the text of a message; OpenAI's list of text parts is joined, a line for each.

    With pictures or sounds it is a tuple of parts instead; see `medium_part`.
    Source: llama.cpp common/chat.cpp, common_chat_msg::to_json_oaicompat.
    """
    text, parts = text_of(content), list_of(content)
    if text is not None:
        return text
    mappings = [part for part in parts or () if isinstance(part, Mapping)]
    if parts is None or len(mappings) < len(parts):
        raise ConfigError(f"{place} content must be a string, not {_kind(content)}")
    if not any(map(is_medium, mappings)):
        return "\n".join(_part(place, plain(part))["text"] for part in mappings)
    if role not in _MEDIA_ROLES:
        raise ConfigError(
            f"{place} of role {role!r} has a {'picture' if any(map(is_picture, mappings)) else 'sound'}: only those of "
            "role user and tool may have one"
        )
    return tuple(
        medium_part(place, part) if is_medium(part) else _part(place, plain(part))
        for part in mappings
    )


def _part(place: str, part: Any) -> dict[str, Any]:
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ConfigError(
            f"{place} has a part of type {shown(part.get('type'))}: only text, image_url and input_audio are supported"
        )
    return {"type": "text", "text": str(part["text"])}
