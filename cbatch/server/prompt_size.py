"""How large a prompt may be before anything is computed of it: a worker reads and answers it in one piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cbatch.media import shown_messages
from cbatch.server.http_errors import HttpProblemError, bad_request
from cbatch.support.checks import N_VALUE

if TYPE_CHECKING:
    from cbatch.chat.vector_calls import VectorCall
    from cbatch.messages import BatchPrompt
    from cbatch.server.call import Call
    from cbatch.support.model_facts import ModelFacts

MIN_CHARACTERS = 2**20
"""Characters of a text that are always read. Our choice: about a second of tokenizing."""

CHARACTERS_PER_TOKEN = 16
"""Characters that are read for each token of a larger window; text has about 4."""

MIN_TOKENS = 2**18
"""Token ids that are always read. Our choice: as many as a text of MIN_CHARACTERS has."""

WINDOWS = 4
"""Token ids that are read for each token of a larger window: prompts may be cut to it."""


_TOO_LONG = "context_length_exceeded"

MAX_REPEATED = 2**24
"""Characters of instructions and queries that are read again with each text. Our choice: half of what a body has."""


def check_call(call: Call, n_window: int) -> None:
    """Check prompts, tools and texts that have a bias. Raises a `HttpProblemError` that names the field."""
    check_prompts(call.prompts, n_window, call.prompt_field)
    asked = call.asked
    for name in ("tools", "chat_template_kwargs"):
        value = getattr(asked.options, name) or ()
        _check_characters(_n_characters(value), n_window, asked.fields.get(name, name))
    n_biased = sum(len(text) for text, _ in asked.biased_texts)
    _check_characters(n_biased, n_window, asked.fields.get("logit_bias", "logit_bias"))


def check_vectors(call: VectorCall, facts: ModelFacts, n_window: int) -> None:
    """Check the texts of a call, and what is repeated with each. Raises a `HttpProblemError` that names the field."""
    n_most = n_window if needs_slots(call, facts) else facts.n_embed_max or n_window
    for i, text in enumerate(call.texts):
        check = check_text if isinstance(text, str) else check_tokens
        check(text, n_most, call.place(i), call.prompt_field)
    for name, texts in call.beginnings.items():
        check_text(max(texts, key=len), n_most, name)
        once = {id(text): len(text) for text in texts}
        n_again = sum(map(len, texts)) - sum(once.values())
        if n_again > MAX_REPEATED:
            words = f"repeating {name} for each text adds {n_again:,} characters; at most {MAX_REPEATED:,} are allowed"
            raise bad_request(f"{words}: shorten it, or send fewer texts", name, _TOO_LONG)


def needs_slots(call: VectorCall, facts: ModelFacts) -> bool:
    """Return whether documents are judged by a model for chats, each by a request that needs a slot."""
    return facts.can_rerank and facts.pooling != "rank" and call.reranks


def check_prompts(prompts: Sequence[BatchPrompt], n_window: int, field: str) -> None:
    """Check each prompt. Raises a `HttpProblemError` that names the field."""
    for prompt in prompts:
        if prompt.tokens is not None:
            check_tokens(prompt.tokens, n_window, field)
        else:
            check_text(prompt.prompt or "", n_window, field)
            texts = shown_messages(prompt.messages or ())  # pictures have a limit of their own
            n = sum(_n_characters([*message.values()]) for message in texts)
            _check_characters(n, n_window, field)


def check_text(text: str, n_window: int, field: str, param: str | None = None) -> None:
    """Check a text. Raises a `HttpProblemError` that names the field, or the place in it with `param` as the field."""
    _check_characters(len(text), n_window, field, param)


def check_tokens(
    tokens: Sequence[int], n_window: int, field: str, param: str | None = None
) -> None:
    """Check token ids. Raises as `check_text`."""
    n_limit = max(MIN_TOKENS, WINDOWS * n_window)
    if len(tokens) > n_limit:
        words = f"{field} has {len(tokens):,} token ids; at most {n_limit:,}"
        raise _too_large(words, n_window, param or field)


def _check_characters(n: int, n_window: int, field: str, param: str | None = None) -> None:
    n_limit = max(MIN_CHARACTERS, CHARACTERS_PER_TOKEN * n_window)
    if n > n_limit:
        words = f"{field} has {n:,} characters; at most {n_limit:,}"
        raise _too_large(words, n_window, param or field)


def _too_large(words: str, n_window: int, param: str) -> HttpProblemError:
    """Return the problem; clients search for its first words and for the code."""
    message = (
        f"This model's maximum context length is {n_window} tokens. {words} are read: shorten it"
    )
    return bad_request(message, param, _TOO_LONG)


def _n_characters(value: object) -> int:
    """Return the characters of all texts in a value, names included; other values count N_VALUE, an empty text 1."""
    n = 0
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            n += max(1, len(item))
            continue
        n += N_VALUE
        if isinstance(item, Mapping):
            left.extend(item)
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            left.extend(item)
    return n
