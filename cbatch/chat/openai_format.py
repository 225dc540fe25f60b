"""Parts of answers as OpenAI's API writes them: log-probabilities and finish reasons.

Source: OpenAI's API reference, chat completions and completions.
"""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from typing import TYPE_CHECKING, Any

from cbatch.support.lazy_json import LazyList

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cbatch.response import BatchResult, TokenLogprob

_LEAST_LOGPROB = -9999.0
"""Source: OpenAI's API reference, chat completions, `logprobs`."""

NEAREST_FINISH = {"window": "length", "timeout": "length", "cancelled": "length"}
"""Finish reasons that OpenAI lacks, and the nearest one."""


def finish_of(result: BatchResult) -> str:
    """Return why an answer ended, in OpenAI's words."""
    return NEAREST_FINISH.get(result.finish_reason, result.finish_reason)


def tokens_as_json(tokens: Iterable[TokenLogprob | None]) -> list[dict[str, object] | None]:
    """Return log-probabilities as they are in cbatch's lines; null for a token without one."""
    return [*map(token_as_json, tokens)]


def token_as_json(token: TokenLogprob | None) -> dict[str, object] | None:
    """Return one of the log-probabilities of `tokens_as_json`."""
    if token is None:
        return None
    said = {"token_id": token.token_id, "text": token_text(token), "logprob": logprob_of(token)}
    return {**said, "top": tokens_as_json(token.top)} if token.top else said


def token_text(token: TokenLogprob) -> str:
    """Return a token's text, or its bytes where they are not whole characters, as OpenAI's API writes them."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def logprob_of(token: TokenLogprob) -> float | None:
    """Return a token's log-probability as OpenAI's API writes it.

    A probability of 0 is -9999; the first token of an echoed prompt has null.
    """
    return None if math.isnan(token.logprob) else max(token.logprob, _LEAST_LOGPROB)


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities as a chat completion has them, with llama-server's ids of tokens."""
    return {"content": [*chat_tokens(tokens)], "refusal": None}


def chat_tokens(tokens: Sequence[TokenLogprob]) -> LazyList:
    """Return the content of `chat_logprobs`, made as it is written."""
    return LazyList(_chat_token, tokens)


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return _token(token) | {"top_logprobs": [*map(_token, token.top)]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "id": token.token_id,
        "token": token_text(token),
        "logprob": logprob_of(token),
        "bytes": list(token.data),
    }


def completion_logprobs(
    tokens: Sequence[TokenLogprob], *, has_tops: bool | None = None, place: TextPlace | None = None
) -> dict[str, Any]:
    """Return log-probabilities as a completion has them, with ids of tokens: lists of equal length.

    Args:
        has_tops: whether the likeliest were asked for. Default: whether there are any.
        place: where the tokens begin in the text, which moves past them. Default: at its beginning.
    """
    if has_tops is None:
        has_tops = any(token.top for token in tokens)
    place = place or TextPlace()
    return {
        "tokens": LazyList(token_text, tokens),
        "token_ids": [token.token_id for token in tokens],
        "token_logprobs": LazyList(lambda token: logprob_of(_alternative(token)), tokens),
        "top_logprobs": LazyList(_tops, tokens) if has_tops else None,
        "text_offset": [place.pass_by(token) for token in tokens],
    }


class TextPlace:
    """A place in a text, in characters, that moves token by token."""

    def __init__(self) -> None:
        self._decoder, self._n = getincrementaldecoder("utf-8")("replace"), 0

    def pass_by(self, token: TokenLogprob) -> int:
        """Go past a token, and return where its text begins."""
        begin, self._n = self._n, self._n + len(self._decoder.decode(token.data))
        return begin


def _alternative(token: TokenLogprob) -> TokenLogprob:
    """Return the same token from the likeliest, where it is one of them, for exactly the same number."""
    return next((top for top in token.top if top.token_id == token.token_id), token)


def _tops(token: TokenLogprob) -> dict[str, float | None] | None:
    """Return the likeliest tokens and the sampled one, by their text; None for a token without a log-probability.

    Of several with the same text the likelier is kept.
    """
    if math.isnan(token.logprob):
        return None
    found: dict[str, float | None] = {}
    for each in (*token.top, token):
        found.setdefault(token_text(each), logprob_of(each))
    return found


def chat_message(result: BatchResult) -> dict[str, Any]:
    """Return an answer as the message of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": result.text}
    if result.reasoning:
        message["reasoning_content"] = result.reasoning
    if result.tool_calls:
        message["content"] = result.text or None
        message["tool_calls"] = [call.as_dict() for call in result.tool_calls]
    return message
