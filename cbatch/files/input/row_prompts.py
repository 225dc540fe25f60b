"""How a row of a table becomes a prompt: templates with columns' names in braces."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from cbatch.errors import ConfigError
from cbatch.files.input.item import InputLineError, ItemError
from cbatch.files.input.json_requests import decoded, without_nulls
from cbatch.files.units import listed
from cbatch.messages import BatchPrompt, Message
from cbatch.options import RunOptions, check_runs_through
from cbatch.pictures import url_part
from cbatch.sounds import data_part
from cbatch.support.checks import check_string, shown, why_unread

Row: TypeAlias = "Mapping[str, object]"


class Unread(str):
    """The text of a cell whose value Python cannot hold; `error` says why."""

    __slots__ = ("error",)
    error: ItemError

    def __new__(cls, text: str, error: ItemError) -> Unread:
        """Make one of what the cell looks like."""
        made = super().__new__(cls, text)
        made.error = error
        return made

    def __getnewargs__(self) -> tuple[str, ItemError]:  # type: ignore[override]
        return str(self), self.error


_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")

_DEFAULTS = ("prompt", "text", "messages")  # columns that hold prompts, without a template

MEDIA_COLUMNS = {"picture": "image_column", "sound": "audio_column"}
"""The settings that name a column of pictures, and of sounds."""


@dataclass(frozen=True, slots=True)
class Asking:
    """How rows become prompts; ConfigError for text that is not Unicode, or a system message for raw text."""

    template: str | None = None
    """The text of a prompt, columns' names in braces; None: a column named prompt, text or messages."""
    system: str | None = None
    """The text of a system message before it, with fields too."""
    is_raw: bool = False
    """Whether prompts are text to complete as it is, instead of chats."""
    options_column: str | None = None
    """The column with options of each row: JSON text, or a value with the options' names."""
    image_column: str | None = None
    """The column with a picture for each row: the bytes of a file, a data URL, or the name of a file."""
    audio_column: str | None = None
    """The column with a sound for each row, as `image_column`."""

    def __post_init__(self) -> None:
        check_string("template", self.template)
        check_string("system", self.system)
        check_string("options_column", self.options_column)
        for name in MEDIA_COLUMNS.values():
            check_string(name, getattr(self, name))
        for kind, column in self.media.items() if self.is_raw else ():
            raise ConfigError(
                f"{MEDIA_COLUMNS[kind]}={column!r} is for chats; raw prompts have no {kind}s: leave it or is_raw out"
            )
        if self.is_raw and self.system is not None:
            raise ConfigError(
                f"system={self.system!r} is for chats, raw prompts have no messages: put it into the template"
            )

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a template nor a system message, nor a column of pictures or sounds."""
        return self.template is None and self.system is None and not self.media

    @property
    def media(self) -> dict[str, str]:
        """The columns of pictures and sounds, by what they have: "picture", "sound"."""
        found = {kind: getattr(self, name) for kind, name in MEDIA_COLUMNS.items()}
        return {kind: column for kind, column in found.items() if column is not None}


class Template:
    """Text with fields: `{column}` is the row's value, `{{` and `}}` are braces.

    A field is exactly a column's name: nothing is looked up inside a value.
    """

    def __init__(self, text: str, columns: Collection[str], *, name: str = "template") -> None:
        """Parse a template, which errors call `name`; ConfigError for a brace without its pair, or no column."""
        self._pieces: list[str] = []  # text, field, text, field, …, text
        literal, end = "", 0
        for match in _PIECE.finditer(text):
            literal += text[end : match.start()]
            end = match.end()
            piece, field = match[0], match[1]
            if piece in ("{{", "}}"):
                literal += piece[0]
            elif field is None:
                raise ConfigError(
                    f"{name}: the {piece!r} at character {match.start() + 1} is unmatched: "
                    f"write {{column}} for a field, {piece * 2} for a brace"
                )
            elif field not in columns:
                hint = "" if piece == text else " (a brace is {{ or }})"
                raise ConfigError(
                    f"{name}: there is no column {field!r}; the columns are: {listed(columns)}{hint}"
                )
            else:
                self._pieces += [literal, field]
                literal = ""
        self._pieces.append(literal + text[end:])

    @property
    def fields(self) -> set[str]:
        """The columns that are read."""
        return {*self._pieces[1::2]}

    def fill(self, row: Mapping[str, object]) -> str:
        """Return the text with a row's values; KeyError where the row has no such column."""
        pieces = self._pieces.copy()
        for i in range(1, len(pieces), 2):
            pieces[i] = as_text(_value(row, pieces[i]))
        return "".join(pieces)


def _value(row: Row, column: str) -> object:
    """Return the value of a column; LineError where it could not be read, KeyError where there is none."""
    value = row[column]
    if isinstance(value, Unread):
        error = value.error
        raise InputLineError(error.code, f"column {column!r}: {error.message}", column)
    return value


def as_text(value: object) -> str:
    """Return a value as text of a prompt: None as no text, a nested value as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


class RowPrompts:
    """Makes prompts of a table's rows."""

    def __init__(self, asking: Asking, columns: Collection[str], name: str) -> None:
        """Check the templates against a table's columns; ConfigError where no column holds prompts."""
        self._is_raw = asking.is_raw
        column = None if asking.template is not None else _default_column(columns, name)
        self._has_chats = column == "messages"
        names = ("system", *MEDIA_COLUMNS.values(), "is_raw")
        if self._has_chats and (given := next((n for n in names if getattr(asking, n)), None)):
            raise ConfigError(
                f"{name}: its column messages holds whole chats: leave out {given}, or give a template"
            )
        text = asking.template if column is None else "{" + column + "}"
        is_column = _PIECE.fullmatch(text or "") is not None
        self._user = Template(text or "", columns, name=name if is_column else f"{name}: template")
        system = asking.system
        self._system = system and Template(system, columns, name=f"{name}: system")
        self._options = asking.options_column
        self._media, self._folder = asking.media, Path()
        own = {kind + "s": column for kind, column in self._media.items()}
        if self._options is not None:
            own["options"] = self._options
        for what, column_of in own.items():
            if column_of not in columns:
                raise ConfigError(
                    f"{name}: there is no column {column_of!r} with {what}; the columns are: {listed(columns)}"
                )

    @property
    def columns(self) -> set[str]:
        """The columns that are read."""
        own = {*self._media.values(), *filter(None, [self._options])}
        if self._has_chats:
            return own | {"messages"}
        return own | self._user.fields | (self._system.fields if self._system else set())

    def in_folder(self, folder: Path) -> RowPrompts:
        """Return the same for rows that name files in `folder`."""
        found = copy(self)
        found._folder = folder
        return found

    def __call__(self, row: Row) -> BatchPrompt:
        """Return a row's prompt; LineError or ConfigError where a column is missing, or the prompt is none."""
        try:
            prompt = self._prompt(row)
            return (
                prompt
                if self._options is None
                else _with_options(prompt, _value(row, self._options))
            )
        except KeyError as error:
            message = f"there is no key {error.args[0]!r}; the keys are: {listed(row)}"
            raise InputLineError("missing_field", message, error.args[0]) from None

    def _prompt(self, row: Row) -> BatchPrompt:
        if self._has_chats:
            return BatchPrompt(messages=_chat(_value(row, "messages")))
        text = self._user.fill(row)
        if not text.strip():
            raise InputLineError("invalid_request", "the prompt is empty")
        if self._is_raw:
            return BatchPrompt(prompt=text)
        user: dict[str, object] = {"role": "user", "content": text}
        if self._media:
            parts = [self._medium(kind, _value(row, name)) for kind, name in self._media.items()]
            user["content"] = [*parts, {"type": "text", "text": text}]
        if not self._system:
            return BatchPrompt(messages=[user])
        system = {"role": "system", "content": self._system.fill(row)}
        return BatchPrompt(messages=[system, user])

    def _medium(self, kind: str, value: object) -> dict[str, Any]:
        """Return the picture or sound in a cell as a part; a mapping is as Hugging Face's datasets have one."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str) and value[:5].lower() == "data:":
            return url_part(value) if kind == "picture" else data_part(value)
        if isinstance(value, str) and value:
            value = self._folder / value
        if not isinstance(value, bytes | Path):
            column = self._media[kind]
            message = f"column {column!r} has no {kind}: {shown(value)}"
            raise InputLineError("invalid_request", message, column)
        name = "image" if kind == "picture" else "audio"
        return {"type": name, name: value}


def _default_column(columns: Collection[str], name: str) -> str:
    found = [column for column in _DEFAULTS if column in columns]
    if len(found) == 1:
        return found[0]
    why = f"columns {' and '.join(found)}" if found else "no column prompt, text or messages"
    raise ConfigError(
        f"{name}: has {why}: give a template such as 'Classify: {{{next(iter(columns), 'column')}}}'; "
        f"its columns are: {listed(columns)}"
    )


def _with_options(prompt: BatchPrompt, value: object) -> BatchPrompt:
    """Return a prompt with the options in a cell: JSON text, or a mapping, in which null counts as not given."""
    value = _from_json("options", value)
    if value is None:
        return prompt
    if not isinstance(value, dict):
        raise InputLineError("invalid_request", "options must be a mapping of options", "options")
    options = check_runs_through(RunOptions.of(without_nulls(value)))
    return replace(prompt, options=options)


def _chat(value: object) -> Sequence[Message]:
    """Return the chat in a cell: JSON text, or a list, whose messages may have nulls."""
    value = _from_json("messages", value)
    if not isinstance(value, list):
        raise InputLineError("invalid_request", "messages must be a list of messages", "messages")
    return [without_nulls(message) for message in value]


def _from_json(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return decoded(value)
    except ValueError as error:
        message = f"{name}: {why_unread(error, value)}"
        raise InputLineError("invalid_request", message, name) from None
