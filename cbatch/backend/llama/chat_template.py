"""Renders chat messages to text, by the template in the GGUF or the caller's own."""

from __future__ import annotations

import json
import threading
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING

from cbatch.backend.bindings import llama_chat_format
from cbatch.backend.llama import template_job
from cbatch.backend.llama.sandbox import Limits, NoAnswerError, Sandbox
from cbatch.errors import (
    ConfigError,
    EngineClosedError,
    ModelLoadError,
    PromptError,
    RequestFailedError,
)
from cbatch.support import moments
from cbatch.support.moments import TakesLongError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cbatch.backend import Message

NAMED_TEMPLATES: Mapping[str, str] = {"chatml": llama_chat_format.CHATML_CHAT_TEMPLATE}
"""Templates that `chat_template=` knows by name."""

_NO_TEMPLATE = (
    "this model has no chat template: load it with chat_template='chatml' (or a Jinja string), "
    "or give plain string prompts"
)

_LIMITS = Limits(cpu_s=5, wall_s=60.0, n_bytes=2**30)
"""Of one chat. Our choice: 40,000 messages, 1.4 MB, take 0.3 s."""

_N_BRIEF, _N_LONG, _N_IDLE = 2, 4, 2
"""Most chats that are rendered at the same time, briefly and to the end, and most processes that stay. Our choice: each
may have 1 GiB."""

_BRIEF_CPU_S, _BRIEF_WALL_S = 0.03, 0.5
"""What a chat gets that is not to hold up others. Our choice: ordinary ones take some milliseconds."""

_TOOL_NAME, _ARGUMENT = "tool_of_a_probe", "argument_of_a_probe"
_ASKED = {"role": "user", "content": "text_of_a_probe"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_CALL = {"name": _TOOL_NAME, "arguments": {"a": _ARGUMENT}}
_ID = "123456789"  # Mistral's templates refuse ids of another length
_CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": _ID, "type": "function", "function": _CALL}],
}
_ANSWERED = {"role": "tool", "tool_call_id": _ID, "name": _TOOL_NAME, "content": "{}"}


def _put_calls(message: Message, *, has_text_arguments: bool, has_text_content: bool) -> Message:
    """Return a message as a template takes calls: arguments as JSON text or mapping, no content as "" or None."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    if has_text_arguments:
        calls = [{**call, "function": _with_text(call["function"])} for call in calls]
    content = message.get("content")
    if content is None and has_text_content:
        content = ""
    return {**message, "content": content, "tool_calls": calls}


# "" before None: a template that prints its value would print "None"
_SHAPES = tuple(
    partial(_put_calls, has_text_arguments=is_text, has_text_content=has_content)
    for is_text in (False, True)
    for has_content in (True, False)
)


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_text(function: Mapping[str, object]) -> Mapping[str, object]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


class _Renderer:
    """Renders chats in other processes, or in this one if none can be started. From any thread."""

    def __init__(
        self,
        source: str,
        bos_text: str = "",
        eos_text: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._settings = {"source": source, "bos_token": bos_text, "eos_token": eos_text}
        self._changed = threading.Condition()
        """Guards the processes."""
        self._free: list[Sandbox] = []
        self._asked: set[Sandbox] = set()
        """Processes that are being asked."""
        self._brief_turns = threading.BoundedSemaphore(_N_BRIEF)
        self._long_turns = threading.BoundedSemaphore(_N_LONG)
        self._is_stopped = False

    def ask(
        self, messages: Sequence[Message] | None, variables: Mapping[str, object] | None = None
    ) -> dict[str, str]:
        """Return the answer of `template_job`: `text`, `broken` or `refused`; or under `unasked` why there is none.

        Raises an `EngineClosedError` once it is stopped, and a `TakesLongError` where a brief one takes long.
        """
        now_s, is_brief = self._clock(), moments.is_brief()
        question = {"messages": messages, "variables": dict(variables or {}), "now_s": now_s}
        with self._brief_turns if is_brief else self._long_turns:
            sandbox = self._take()
            if not sandbox.is_possible:
                return template_job.begin(self._settings)(question)
            if sandbox.problem:
                return {"unasked": f"no process for the template: {sandbox.problem}"}
            try:
                self._check_open()
                found: dict[str, str] = (
                    sandbox.ask({**question, "within_s": _BRIEF_CPU_S}, _BRIEF_WALL_S)
                    if is_brief
                    else sandbox.ask(question)
                )
            except NoAnswerError as error:
                self._check_open()
                if sandbox.problem:
                    return {"unasked": f"no process for the template: {sandbox.problem}"}
                if is_brief:
                    raise TakesLongError from error
                kind = "refused" if error.is_lasting else "unasked"
                return {
                    kind: f"rendering exceeds {_LIMITS.cpu_s} s of CPU time or "
                    f"{_LIMITS.n_bytes >> 20} MiB of memory: simplify the template or shorten the chat"
                }
            except UnicodeEncodeError as error:  # half a surrogate pair
                return {"refused": f"messages and variables must be valid Unicode: {error}"}
            except (TypeError, ValueError) as error:  # such as bytes
                return {"refused": f"messages and variables must be JSON: {error}"}
            finally:
                self._give_back(sandbox)
            if "late" in found:
                raise TakesLongError
            return found

    def _take(self) -> Sandbox:
        """Return a process that runs; where none can be started, wait for one that runs. `problem` if none does."""
        with self._changed:
            while True:
                sandbox = self._free.pop() if self._free else self._new()
                sandbox.start()
                if not sandbox.problem:
                    self._asked.add(sandbox)
                    return sandbox
                if not self._asked:
                    return sandbox
                self._changed.wait()

    def _new(self) -> Sandbox:
        return Sandbox(template_job.__file__, self._settings, _LIMITS)

    def _give_back(self, sandbox: Sandbox) -> None:
        with self._changed:
            self._asked.discard(sandbox)
            if self._is_stopped or sandbox.problem or len(self._free) == _N_IDLE:
                sandbox.close()
            else:
                self._free.append(sandbox)
            self._changed.notify_all()

    def start(self) -> None:
        """Start the first process, which gets ready while the caller goes on. Raises a ModelLoadError if it fails."""
        sandbox = self._take()
        if not sandbox.problem:
            self._give_back(sandbox)
        elif sandbox.is_possible:
            raise ModelLoadError(
                f"no process can be started for the chat template: {sandbox.problem}"
            )

    def _check_open(self) -> None:
        if self._is_stopped:
            raise EngineClosedError("the engine is closed")

    def stop(self) -> None:
        """End all chats that are being rendered, and render no more. From any thread."""
        with self._changed:
            self._is_stopped = True
            for sandbox in self._asked:
                sandbox.stop()

    def close(self) -> None:
        with self._changed:
            while self._free:
                self._free.pop().close()


class ChatTemplate:
    """A Jinja template. It is a program that may never end, so it runs in a process that can be killed."""

    def __init__(
        self,
        source: str | None,
        *,
        bos_text: str = "",
        eos_text: str = "",
        name: str = "the chat template",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep the template's source, None where the model has none; it is compiled at first use.

        Error messages call the template `name`; the texts are the values of `bos_token` and `eos_token` in it; `clock`
        gives the seconds since the epoch, which the template may show as a date of the local time zone.
        """
        self._source, self._name = source, name
        self._renderer = None if source is None else _Renderer(source, bos_text, eos_text, clock)

    def start(self) -> None:
        """Start the process of the first chat. Raises a ModelLoadError if none can be started."""
        if self._renderer is not None:
            self._renderer.start()

    def stop(self) -> None:
        """End all chats that are being rendered, and render no more. From any thread."""
        if self._renderer is not None:
            self._renderer.stop()

    def close(self) -> None:
        """End the idle processes; later chats start new ones."""
        if self._renderer is not None:
            self._renderer.close()

    @cached_property
    def tool_refusal(self) -> str:
        """Why chats cannot have tools; empty where the template shows them to the model."""
        if self._source is None:
            return _NO_TEMPLATE
        try:
            shown = self._render([_ASKED], {"tools": [_TOOL]})
        except RequestFailedError as error:
            _check_template(error)
            return f"{self._name} fails with tools: {error}"
        if _TOOL_NAME in shown:
            return ""
        return (
            f"{self._name} does not show tools to the model: load it with a chat_template that does, "
            "or describe them in a message"
        )

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, object] | None = None
    ) -> str:
        """Return the text of the prompt, which the model continues.

        Args:
            messages: the chat; a last one from `assistant` is left open, its content verbatim. The arguments of
                `tool_calls` are mappings.
            variables: further variables of the template, such as `tools`.

        Raises:
            RequestFailedError: there is no template, it does not compile, or it refuses.
        """
        if any(message.get("tool_calls") for message in messages):
            if (put := self._shape) is None:
                raise PromptError(
                    f"{self._name} does not show the tool_calls of earlier messages: "
                    "write them into the message's content"
                )
            messages = [put(message) for message in messages]
        if self._wants_parts:
            messages = [_in_parts(message) for message in messages]
        if messages and messages[-1].get("role") == "assistant":
            opened = _text_of(messages[-1].get("content"))
            return self._render(messages[:-1], variables) + opened
        return self._render(messages, variables)

    def _render(
        self, messages: Sequence[Message] | None, variables: Mapping[str, object] | None = None
    ) -> str:
        """Return the text of messages; with None, only compile the template."""
        if self._renderer is None:
            raise PromptError(_NO_TEMPLATE)
        found = self._renderer.ask(messages, variables)
        if (words := found.get("broken")) is not None:
            raise RequestFailedError(
                f"the model's chat template does not compile ({words}): load it with "
                "chat_template='chatml' (or a Jinja string), or give plain string prompts"
            )
        if (words := found.get("refused")) is not None:
            raise PromptError(f"the chat template refuses these messages: {words}")
        if (words := found.get("unasked")) is not None:
            raise RequestFailedError(f"the messages could not be rendered: {words}") from OSError(
                words
            )
        return found["text"]

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether texts are shown only where they are in lists of parts, as templates of models that see have it.

        Source: llama.cpp, common/chat.cpp, caps.requires_typed_content.
        """
        if "type" not in (self._source or ""):
            return False
        return not self._shows(_ASKED["content"]) and self._shows(_in_parts(_ASKED)["content"])

    def _shows(self, content: object) -> bool:
        try:
            return _ASKED["content"] in self._render([{**_ASKED, "content": content}])
        except RequestFailedError as error:
            _check_template(error)
            return False

    @cached_property
    def _shape(self) -> Callable[[Message], Message] | None:
        """The first shape in which this template shows the calls of earlier messages; None if none works."""
        for put in _SHAPES:
            chat = [_ASKED, put(_CALLED), _ANSWERED]
            try:
                shown = self._render(chat, {"tools": [_TOOL]})
            except RequestFailedError as error:
                _check_template(error)
                continue
            # neither as Python writes a mapping, nor as JSON text within JSON text
            wrong = (f"'{_ARGUMENT}'", f'\\"{_ARGUMENT}')
            if _ARGUMENT in shown and not any(text in shown for text in wrong):
                return put
        return None


def _check_template(error: RequestFailedError) -> None:
    """Raise an error that says nothing of the template: the system ended its process, or started none."""
    if isinstance(error.__cause__, OSError):
        raise error


def parse_override(chat_template: str) -> str:
    """Return the Jinja source of the caller's `chat_template`.

    Args:
        chat_template: a name in `NAMED_TEMPLATES`, or Jinja.

    Raises:
        ConfigError: neither a known name nor Jinja that compiles.
    """
    if chat_template in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[chat_template]
    if "{{" not in chat_template and "{%" not in chat_template:
        raise ConfigError(
            f"chat_template={chat_template[:80]!r} is neither Jinja nor a known name: "
            f"known names are {', '.join(NAMED_TEMPLATES)}"
        )
    renderer = _Renderer(chat_template)
    found = renderer.ask(None)
    renderer.close()
    if "text" not in found:
        raise ConfigError(f"chat_template does not compile: {', '.join(found.values())}")
    return chat_template


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    raise PromptError(
        "the last message is the assistant's, so the answer would continue it: it must be text alone"
    )


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
