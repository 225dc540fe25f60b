"""Requests read by h11, used where httptools is not installed. CONNECT is refused."""

from __future__ import annotations

from http import HTTPStatus

import h11


class PlainConnection(h11.Connection):
    """A connection of a server that opens no tunnels."""

    def __init__(self, n_header_bytes: int) -> None:
        """Make one whose clients send headers of at most so many bytes."""
        super().__init__(h11.SERVER, n_header_bytes)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return what comes next.

        Raises:
            h11.RemoteProtocolError: not HTTP, or CONNECT: what follows it is not HTTP.
        """
        event = super().next_event()
        if isinstance(event, h11.Request) and event.method == b"CONNECT":
            raise h11.RemoteProtocolError(
                "CONNECT is not supported", HTTPStatus.METHOD_NOT_ALLOWED.value
            )
        return event
