"""Large bodies of requests in memory, from their first bytes until they are answered: bounded in sum."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbatch.backend.host_limits import host_most
from cbatch.server.http_errors import bodies_full
from cbatch.server.server_settings import MIB, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHARE = 8
"""Part of the free memory for bodies. Our choice: a call takes some four times its body, and answers need room, too."""


class HeldBody:
    """What is held of the body of one request, in an event loop."""

    def __init__(self, of_all: HeldBodies) -> None:
        self._of_all = of_all
        self.n_bytes = 0

    def expect(self, n_bytes: int) -> None:
        """Raise a `HttpProblemError` where a body of so many bytes has no room now."""
        self._of_all.check(n_bytes - self.n_bytes)

    def grow(self, n_bytes: int) -> None:
        """Hold so many bytes in all. Raises a `HttpProblemError` where there is no room: nobody waits for another."""
        self.expect(n_bytes)
        self._of_all.n_bytes += n_bytes - self.n_bytes
        self.n_bytes = n_bytes

    def release(self) -> int:
        """Hold nothing more; return what was held."""
        n_bytes, self.n_bytes = self.n_bytes, 0
        self._of_all.n_bytes -= n_bytes
        return n_bytes


class HeldBodies:
    """The large bodies of all requests. One that is being read has what has come: none can reserve room, and wait."""

    def __init__(self, settings: ServerSettings) -> None:
        n_mib = settings.max_bodies_mib
        if n_mib is None:
            n_free = (host_most() or 0) // _SHARE // MIB
            n_mib = max(n_free, 2 * settings.max_body_mib)
        self._n_mib = n_mib
        self.n_bytes = 0

    def check(self, n_bytes: int) -> None:
        """Raise a `HttpProblemError` where so many bytes more have no room."""
        if self.n_bytes + n_bytes > self._n_mib * MIB:
            raise bodies_full(self._n_mib)

    @contextmanager
    def held(self) -> Iterator[HeldBody]:
        """Hold a body for the block, at most."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            body.release()
