"""Renders chats by a Jinja template, in a process of its own: a template is a program, and may never end."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable

_N_TEXT_MAX = 2**26
"""Most characters of a rendered chat."""


class _GenerationTags(jinja2.ext.Extension):
    """Leaves out the tag that Hugging Face's templates put around answers."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja has it

    def parse(self, parser: Any) -> Any:
        """Return what is between the tags."""
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def begin(settings: dict[str, str]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Return what renders chats by a template, which is compiled for the first one.

    Args:
        settings: `source`, the template; `bos_token` and `eos_token`, which it may use.

    Returns:
        A function of `messages`, None to compile only, and `variables`. Its answer has the chat's `text`; or `broken`,
        why the template does not compile; or `refused`, the template's words.
    """
    source = settings["source"]
    always: dict[str, Any] = {
        "bos_token": settings["bos_token"],
        "eos_token": settings["eos_token"],
        "add_generation_prompt": True,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "functions": None,
        "function_call": None,
        "tools": None,
        "tool_choice": None,
    }
    compiled: list[jinja2.Template] = []

    def render(question: dict[str, Any]) -> dict[str, str]:
        if not compiled:
            try:
                compiled.append(_environment().from_string(source))
            except Exception as error:  # besides syntax: too deep, or a number too large
                return {"broken": _words_of(error)}
        messages = question["messages"]
        if messages is None:
            return {"text": ""}
        try:
            text = compiled[0].render({**always, "messages": messages, **question["variables"]})
        except Exception as error:  # it may raise anything
            return {"refused": _words_of(error)}
        if len(text) > _N_TEXT_MAX:
            return {"refused": f"it writes {len(text):,} characters, the most is {_N_TEXT_MAX:,}"}
        return {"text": text}

    return render


def _environment() -> jinja2.Environment:
    """Return an environment as Transformers has it. Source: transformers, utils/chat_template_utils.py."""
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.BaseLoader(),
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTags, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _words_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
