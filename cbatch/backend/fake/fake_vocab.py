"""Tokens of a backend without a model: bytes, and a made-up alphabet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

END_TOKEN = 256


class FakeVocab:
    """Bytes are tokens 0 … 255, `END_TOKEN` ends a generation; higher ids are letters of a made-up alphabet."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self.end_tokens: tuple[int, ...] = (END_TOKEN,)
        self.suppressed_tokens: tuple[int, ...] = ()
        self.template = ""
        self.tool_refusal = ""
        self.controls: dict[int, bytes] = {END_TOKEN: b"<end>"}
        """Control tokens with their text."""

    @property
    def control_tokens(self) -> frozenset[int]:
        """The end, and what else a test made one."""
        return frozenset(self.controls)

    def piece(self, token: int) -> bytes:
        """Return a byte for itself, nothing for a control token, else two bytes of UTF-8."""
        if token in self.controls:
            return b""
        return bytes([token]) if token < END_TOKEN else chr(0x100 + token % 0x400).encode()

    def shown_piece(self, token: int) -> bytes:
        """Return as `piece`, but control tokens written out."""
        return self.controls.get(token) or self.piece(token)

    def named_token(self, mark: str) -> int | None:
        """Return the control token with this text."""
        return next((t for t, text in self.controls.items() if text == mark.encode()), None)

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode("utf-8", "replace"))

    def breakers(self, strings: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the bytes of each string."""
        return tuple(tuple(self.tokenize(text)) for text in strings)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the variables, if there are any, and `role:content` lines, the last left open."""
        lines = [json.dumps(variables)] if variables else []
        lines += [f"{m['role']}:{m['content']}" for m in messages]
        return self.tokenize("\n".join(lines))
