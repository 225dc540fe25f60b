"""Why a run over a file ended."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Ending: TypeAlias = Literal["done", "limit", "time", "asked", "now"]
"""All was read and has its record; `limit`, `max_time_s`; a signal, once or twice."""

ENDINGS: Mapping[Ending, str] = MappingProxyType(
    {
        "done": "not every item has its record",
        "limit": "stopped at the limit",
        "time": "stopped for want of time",
        "asked": "interrupted, what ran was finished",
        "now": "interrupted",
    }
)
"""What is said of each where something is left."""
