"""How large a prompt may be before anything is computed of it: a worker reads and answers it in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cbatch.media import shown_messages
from cbatch.server.http_errors import HttpProblemError, bad_request

if TYPE_CHECKING:
    from cbatch.messages import BatchPrompt

MIN_CHARACTERS = 2**20
"""Characters of a text that are always read. Our choice: about a second of tokenizing."""

CHARACTERS_PER_TOKEN = 16
"""Characters that are read for each token of a larger window; text has about 4."""

MIN_TOKENS = 2**18
"""Token ids that are always read. Our choice: as many as a text of MIN_CHARACTERS has."""

WINDOWS = 4
"""Token ids that are read for each token of a larger window: prompts may be cut to it."""


def check_prompts(prompts: Sequence[BatchPrompt], n_window: int, field: str) -> None:
    """Check each prompt. Raises a `HttpProblemError` that names the field."""
    for prompt in prompts:
        if prompt.tokens is not None:
            check_tokens(prompt.tokens, n_window, field)
        else:
            check_text(prompt.prompt or "", n_window, field)
            texts = shown_messages(prompt.messages or ())  # pictures have a limit of their own
            _check_characters(_n_characters(texts), n_window, field)


def check_text(text: str, n_window: int, field: str) -> None:
    """Check a text. Raises a `HttpProblemError` that names the field."""
    _check_characters(len(text), n_window, field)


def check_tokens(tokens: Sequence[int], n_window: int, field: str) -> None:
    """Check token ids. Raises a `HttpProblemError` that names the field."""
    n_limit = max(MIN_TOKENS, WINDOWS * n_window)
    if len(tokens) > n_limit:
        raise _too_large(f"{len(tokens):,} token ids; at most {n_limit:,}", n_window, field)


def _check_characters(n: int, n_window: int, field: str) -> None:
    n_limit = max(MIN_CHARACTERS, CHARACTERS_PER_TOKEN * n_window)
    if n > n_limit:
        raise _too_large(f"{n:,} characters; at most {n_limit:,}", n_window, field)


def _too_large(words: str, n_window: int, field: str) -> HttpProblemError:
    """Return the problem; clients search for its first words and for the code."""
    message = f"This model's maximum context length is {n_window} tokens. {field} has {words} are read: shorten it"
    return bad_request(message, field, "context_length_exceeded")


def _n_characters(value: Mapping[str, object] | Iterable[object]) -> int:
    """Return the characters of all texts in messages; an empty text counts as one."""
    n = 0
    left: list[object] = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            n += max(1, len(item))
        elif isinstance(item, Mapping):
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            left.extend(item)
    return n
