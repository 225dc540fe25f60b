"""Chats with pictures and sounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch import BatchResult

WITH_RIVALS = {"logprobs": True, "top_logprobs": 2}
"""Options of the answers that `clear_tokens` compares with."""

_NEAR = 0.2
"""Nats between two tokens that rounding may swap: chunks of a prompt, and so shapes, follow what steps take."""


def chat_with(kind: str, *parts: object) -> list[dict[str, Any]]:
    """Return a message of texts, and of media of a kind: "image" or "audio"."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kind, kind: part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def clear_tokens(
    found: Sequence[BatchResult], alone: Sequence[BatchResult], near: float = _NEAR
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the tokens of both up to where, in the answer alone, another token is hardly less likely."""
    clear = [_n_clear(result, near) for result in alone]
    assert sum(clear) >= len(alone)
    first, second = (
        [tuple(result.token_ids[:n]) for result, n in zip(results, clear, strict=True)]
        for results in (found, alone)
    )
    return first, second


def _n_clear(result: BatchResult, near: float) -> int:
    gaps = [step.top[0].logprob - step.top[1].logprob for step in result.logprobs or ()]
    return next((i for i, gap in enumerate(gaps) if gap < near), len(gaps))
