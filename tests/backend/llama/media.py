"""Chats with pictures and sounds."""

from __future__ import annotations

from typing import Any


def chat_with(kind: str, *parts: object) -> list[dict[str, Any]]:
    """Return a message of texts, and of media of a kind: "image" or "audio"."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kind, kind: part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]
