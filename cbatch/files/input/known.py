"""What records of JSON lines tell of themselves: which item they answer and, by a digest, what was asked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping


class Known(NamedTuple):
    """What a record tells of itself: its item's id, the digest of what was asked, and whether it is an error."""

    id: str
    digest: bytes
    is_error: bool


@runtime_checkable
class Traceable(Protocol):
    """An encoder of JSON lines whose records tell what they answer."""

    def known(self, record: Mapping[str, object]) -> Known | None:
        """Return what a record tells of itself; None: it is the error of an item that was never asked.

        Raises:
            LineError: it is none of this encoder's.
        """


def digest_in(text: object) -> bytes | None:
    """Return a digest that stands in a record; None where there is none."""
    is_digest = isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text)
    return bytes.fromhex(str(text)) if is_digest else None
