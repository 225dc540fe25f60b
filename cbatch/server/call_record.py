"""What is kept of one HTTP request for the log and the metrics: never a prompt, a key or an answer."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span

OTHER = "other"
"""The route of a request for a path that is not there."""


@dataclass(eq=False, slots=True)
class CallRecord:
    """One HTTP request."""

    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")
    route: str = OTHER
    """The path that an endpoint answers, without `/v1` and with names for what varies."""
    owner: str = ""
    """A hash of the API key, which owns files, batches and cells on disk; "" without a key."""
    status: int | None = None
    """The status that was sent, or 499 where the client has left before."""
    span: Span | None = None
    """Its span, where OpenTelemetry records it."""
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def latency_ms(self) -> float:
        """Milliseconds since it came."""
        return round((time.perf_counter() - self.start_s) * 1e3, 3)
