"""Where a body in chunks ends."""

from __future__ import annotations

import pytest

from cbatch.server.connections import Chunks

BODIES = [
    b"0\r\n\r\n",
    b"5\r\n\r\n\r\n{\r\n1;a=b\r\n}\r\n000;x\r\nx-a: b\r\nx-b: c\r\n\r\n",
    b"A\r\n0\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("body", BODIES)
def test_end_is_found_however_a_body_is_cut(body: bytes) -> None:
    data = body + b"GET / HTTP/1.1\r\n\r\n"
    for cut in range(len(body)):
        chunks = Chunks()
        assert chunks.end(bytearray(data[:cut])) == cut
        assert not chunks.has_ended
        assert chunks.end(bytearray(data[cut:])) == len(body) - cut
        assert chunks.has_ended


@pytest.mark.parametrize("broken", [b"x\r\n0\r\n\r\n", b"-5\r\n0\r\n\r\n", b"\r\n\r\n"])
def test_broken_body_is_left_to_the_parser(broken: bytes) -> None:
    chunks = Chunks()
    assert chunks.end(bytearray(broken)) == len(broken)
    assert not chunks.has_ended


def test_blank_lines_in_a_body_end_nothing() -> None:
    text = b"\n\n " * 10_000
    chunks = Chunks()
    data = bytearray(b"%x\r\n%b\r\n" % (len(text), text))
    assert chunks.end(data) == len(data)
    assert chunks.end(bytearray(b"0\r\n\r\nGET")) == 5
