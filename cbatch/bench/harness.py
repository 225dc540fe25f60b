"""What measurements share: the first token of random prompts, percentiles, and the lines that they print."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_TOKEN = 3
"""The first token id that random prompts use: those below are control tokens as a rule."""


def percentile(times: Iterable[float], share: float) -> float:
    """Return the least time that `share` of all are not above."""
    ordered = sorted(times)
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)]


def emit(**values: Any) -> None:
    """Print one JSON line."""
    show(json.dumps(values))


def show(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
