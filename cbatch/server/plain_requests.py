"""Requests read by httptools as HTTP/1.1 alone: what asks for another protocol is answered as if it did not ask."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httptools


class TunnelError(httptools.HttpParserError):
    """A request for a tunnel: what follows it is not HTTP."""

    error_status_hint = HTTPStatus.METHOD_NOT_ALLOWED


class PlainRequestParser(httptools.HttpRequestParser):
    """Parses requests, those that ask for an upgrade too. Source: RFC 9110, 7.8, by which a server may ignore that.

    httptools takes an upgrade as made: it leaves out the body, and would parse that as the next request. So the head of
    such a request is parsed again without its `upgrade`.
    """

    def __init__(self, protocol: Any) -> None:
        """Make one for a protocol of uvicorn, which ignores heads and ends of messages while `should_upgrade()`."""
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        """Wait for a first request, which also forgets an earlier one's `connection: close`."""
        super().__init__(self._protocol)
        if hasattr(self, "set_dangerous_leniencies"):  # as uvicorn has it
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        """Parse on.

        Raises:
            HttpParserError: no HTTP, or a request for a tunnel.
        """
        left = memoryview(data)
        while left:
            left = left[self._feed(left) :]

    def _feed(self, data: memoryview) -> int:
        """Parse on, up to the end of the next head that asks for an upgrade; return how many bytes that were."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            (n_read,) = upgrade.args
            head = self._plain_head()
            self._begin()
            super().feed_data(head)
            return int(n_read)
        return len(data)

    def _plain_head(self) -> bytes:
        """Return the head that was parsed last, without `upgrade`."""
        method = self.get_method()
        if method == b"CONNECT":
            raise TunnelError
        version = self.get_http_version().encode()
        lines = [method + b" " + self._protocol.url + b" HTTP/" + version]
        headers = self._protocol.headers
        lines += [name + b": " + value for name, value in headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
