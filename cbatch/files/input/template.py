"""Prompt templates for tables: text with columns' names in braces."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class Template:
    """Text with fields: `{column}` is the row's value, `{{` and `}}` are braces.

    What stands between braces is a column's name as it is: nothing is looked up inside a value.
    """

    def __init__(self, text: str, columns: Collection[str], *, name: str = "template") -> None:
        """Check it.

        Args:
            text: the template.
            columns: the names that a field may have.
            name: what errors call it.

        Raises:
            ConfigError: a brace without its other, or a field that is no column.
        """
        self._pieces: list[str] = []  # text, field, text, field, …, text
        self._parse(text, columns, name)

    def fill(self, row: Mapping[str, object]) -> str:
        """Return the text with a row's values.

        Raises:
            KeyError: the row has no such column.
        """
        pieces = self._pieces.copy()
        for i in range(1, len(pieces), 2):
            pieces[i] = as_text(row[pieces[i]])
        return "".join(pieces)

    def _parse(self, text: str, columns: Collection[str], name: str) -> None:
        literal, end = "", 0
        for match in _PIECE.finditer(text):
            literal += text[end : match.start()]
            end = match.end()
            piece, field = match[0], match[1]
            if piece in ("{{", "}}"):
                literal += piece[0]
            elif field is None:
                raise ConfigError(
                    f"{name}: the {piece!r} at character {match.start() + 1} has no other: "
                    f"a field is {{column}}, a brace is {piece * 2}"
                )
            else:
                _check_column(name, field, columns)
                self._pieces += [literal, field]
                literal = ""
        self._pieces.append(literal + text[end:])


def _check_column(name: str, field: str, columns: Collection[str]) -> None:
    if field not in columns:
        raise ConfigError(
            f"{name}: there is no column {field!r}; there is: {', '.join(columns)} (a brace is {{{{ or }}}})"
        )


def as_text(value: object) -> str:
    """Return a value as it stands in a prompt: text as it is, nothing as no text, what is nested as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
