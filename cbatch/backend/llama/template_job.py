"""Renders chats with a Jinja template in a separate process: a template is a program and may never end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

_N_TEXT_MAX = 2**26
"""Most characters of a rendered chat."""

_FUNCTIONS_TEXT = " functools["
"""In the source of a template whose variable `functions` is JSON text. Source: FireFunction v2's model card."""


class _GenerationTags(jinja2.ext.Extension):
    """Ignores the tag `generation`, which Hugging Face's templates put around answers."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja has it

    def parse(self, parser: Any) -> Any:
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def begin(settings: dict[str, str]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Return a function that renders chats; the first chat compiles the template.

    Args:
        settings: `source`, the template; `bos_token` and `eos_token`, which it may use.

    Returns:
        A function of `messages` (None: only compile), `variables` and `now_s`, the time in seconds since the epoch; and
        `within_s`, if given the most seconds of computing. Its answer has `text`, the chat; or `broken`, why the
        template does not compile; or `refused`, why the template rejects the chat; or `late`, if it takes longer.
    """
    source = settings["source"]
    has_functions_text = _FUNCTIONS_TEXT in source
    always: dict[str, Any] = {
        "bos_token": settings["bos_token"],
        "eos_token": settings["eos_token"],
        "add_generation_prompt": True,
        "raise_exception": _raise_exception,
        "functions": "" if has_functions_text else None,
        "function_call": None,
        "tools": None,
        "tool_choice": None,
    }
    compiled: list[jinja2.Template] = []

    def render(question: dict[str, Any]) -> dict[str, str]:
        if not compiled:
            try:
                compiled.append(_environment().from_string(source))
            except (
                Exception
            ) as error:  # not only syntax errors: also nesting too deep, or a number too large
                return {"broken": _words_of(error)}
        messages = question["messages"]
        if messages is None:
            return {"text": ""}
        now, given = datetime.fromtimestamp(question["now_s"]), question["variables"]
        found = {**always, **_dates(now), "messages": messages, **given}
        if has_functions_text and given.get("tools"):
            found["functions"] = _tojson([tool["function"] for tool in given["tools"]], indent=4)
        alarm = _Alarm(question.get("within_s", 0))
        try:
            with alarm:
                text = compiled[0].render(found)
        except _LateError:
            alarm.end()
            return {"late": ""}
        except Exception as error:  # a template may raise anything
            return {"refused": _words_of(error)}
        if len(text) > _N_TEXT_MAX:
            return {
                "refused": f"the chat has {len(text):,} characters, the limit is {_N_TEXT_MAX:,}"
            }
        return {"text": text}

    return render


class _LateError(BaseException):
    """The time is over. No template catches it."""


class _Alarm:
    """A block that raises a `_LateError` after some seconds of computing; 0: after any number. Not on Windows."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s if hasattr(signal, "setitimer") else 0

    def __enter__(self) -> None:
        if self._after_s:
            signal.signal(signal.SIGPROF, self._strike)
            # again and again: a first error may come where it is dropped, as in a `__del__`
            signal.setitimer(signal.ITIMER_PROF, self._after_s, self._after_s)

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Raise no more; where it has struck amid the end of the block, too."""
        if self._after_s:
            self._after_s = 0
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _strike(self, number: int, frame: object) -> None:
        if self._after_s:
            raise _LateError


def _environment() -> jinja2.Environment:
    """Return the same environment as Transformers. Source: transformers, utils/chat_template_utils.py."""
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


def _dates(now: datetime) -> dict[str, Any]:
    """Return the variables that tell the time. Source: llama.cpp, common/chat.cpp; Transformers has `strftime_now`."""
    return {
        "strftime_now": now.strftime,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
    }


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
