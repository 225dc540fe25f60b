"""Chat messages to text, by the template in the GGUF or the caller's own."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from llama_cpp import llama_chat_format

from cbatch.errors import ConfigError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.backend import Message

NAMED_TEMPLATES: Mapping[str, str] = {"chatml": llama_chat_format.CHATML_CHAT_TEMPLATE}
"""Templates that `chat_template=` knows by name."""

_NO_TEMPLATE = (
    "this model has no chat template: load it with chat_template='chatml' (or a Jinja string), "
    "or give plain string prompts"
)


class ChatTemplate:
    """A Jinja template, run by llama-cpp-python's formatter in an immutable sandbox."""

    def __init__(self, source: str | None, *, bos_text: str = "", eos_text: str = "") -> None:
        """Keep the template's source; it is compiled at first use.

        Args:
            source: Jinja; `None` where the model has none.
            bos_text: what `{{ bos_token }}` stands for.
            eos_text: what `{{ eos_token }}` stands for.
        """
        self._source = source
        self._bos_text, self._eos_text = bos_text, eos_text

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt's text up to where the model goes on.

        Args:
            messages: the chat; a last one from `assistant` is left open, its content verbatim.

        Raises:
            RequestFailedError: there is no template, it does not compile, or it refuses.
        """
        if messages and messages[-1].get("role") == "assistant":
            opened = _text_of(messages[-1].get("content"))
            return self._render(messages[:-1]) + opened
        return self._render(messages)

    def _render(self, messages: Sequence[Message]) -> str:
        formatter = self._formatter
        try:
            return str(formatter(messages=[dict(message) for message in messages]).prompt)
        except Exception as error:  # the template is a program: it may raise whatever it likes
            raise RequestFailedError(
                f"the chat template refuses these messages: {_words(error)}"
            ) from error

    @cached_property
    def _formatter(self) -> Any:
        if self._source is None:
            raise RequestFailedError(_NO_TEMPLATE)
        try:
            return _compile(self._source, self._bos_text, self._eos_text)
        except Exception as error:
            raise RequestFailedError(
                f"the model's chat template does not compile ({_words(error)}): load it with "
                "chat_template='chatml' (or a Jinja string), or give plain string prompts"
            ) from error


def parse_override(chat_template: str) -> str:
    """Return the Jinja source that the caller's `chat_template` stands for.

    Args:
        chat_template: a name in `NAMED_TEMPLATES`, or Jinja.

    Raises:
        ConfigError: neither a known name nor Jinja that compiles.
    """
    if chat_template in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[chat_template]
    if "{{" not in chat_template and "{%" not in chat_template:
        raise ConfigError(
            f"chat_template={chat_template!r} is neither Jinja nor a known name; "
            f"there is: {', '.join(NAMED_TEMPLATES)}"
        )
    try:
        _compile(chat_template, "", "")
    except Exception as error:  # besides syntax: too deep, or a number too large
        raise ConfigError(f"chat_template does not compile: {_words(error)}") from error
    return chat_template


def _compile(source: str, bos_text: str, eos_text: str) -> Any:
    return llama_chat_format.Jinja2ChatFormatter(
        template=source, bos_token=bos_text, eos_token=eos_text, add_generation_prompt=True
    )


def _text_of(content: object) -> str:
    """Return a message's text: a string, or OpenAI's list of text parts joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    raise RequestFailedError("the last message is from assistant: to go on from it, it needs text")


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
