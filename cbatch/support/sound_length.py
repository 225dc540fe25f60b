"""How long a file of sound says it is, by its first and last bytes: for formats in which few bytes may be hours."""

from __future__ import annotations

import base64

_N_HEAD = 2**10
_N_END = 2**17
"""Bytes at the beginning and the end that are looked at; a page of OGG has at most 65,307."""


def told_samples(file: str | bytes) -> int | None:
    """Return how many samples, of all channels, a FLAC or OGG file says it has; None where it does not say.

    0 for other formats: the samples of these are at most some dozen for each byte.

    Args:
        file: its bytes, or base64 of them.
    """
    try:
        head = _part(file, 0, _N_HEAD)
        if head.startswith(b"ID3"):  # a tag, behind which any format may follow
            n_tag = 10 + sum(
                (b & 127) << shift for b, shift in zip(head[6:10], (21, 14, 7, 0), strict=True)
            )
            head = _part(file, n_tag, _N_HEAD)
            if head.startswith(b"ID3"):
                return None
        if head.startswith(b"fLaC"):
            return _of_flac(head)
        if head.startswith(b"OggS"):
            n_bytes = len(file) // 4 * 3 if isinstance(file, str) else len(file)
            return _of_ogg(head, _part(file, max(0, n_bytes - _N_END), _N_END))
    except ValueError:  # no base64: the request will be refused
        pass
    return 0


def _part(file: str | bytes, start: int, n_bytes: int) -> bytes:
    if isinstance(file, bytes):
        return file[start : start + n_bytes]
    quartets = slice(start // 3 * 4, (start + n_bytes + 2) // 3 * 4)
    return base64.b64decode(file[quartets])[start % 3 :][:n_bytes]


def _of_flac(head: bytes) -> int | None:
    """Source: RFC 9639, 8.2: 20 bits of rate, 3 of channels less one, 5 of bits a sample, 36 of samples a channel."""
    is_stream_info = head[4:5] in (b"\x00", b"\x80")
    told = int.from_bytes(head[18:26], "big")
    n_channels, n_each = (told >> 41 & 7) + 1, told & (2**36 - 1)
    return n_channels * n_each if is_stream_info and n_each else None


def _of_ogg(head: bytes, end: bytes) -> int | None:
    """Source: RFC 3533, 6: a page has at byte 6 how many samples of each channel end with it."""
    last = end.rfind(b"OggS")
    n_each = int.from_bytes(end[last + 6 : last + 14], "little", signed=True)
    if last < 0 or n_each <= 0:
        return None
    for mark, i_channels in ((b"OpusHead", 9), (b"\x01vorbis", 11)):
        if (at := head.find(mark)) >= 0:
            n_channels = int.from_bytes(head[at + i_channels : at + i_channels + 1], "little")
            return n_each * max(1, n_channels)
    return None
