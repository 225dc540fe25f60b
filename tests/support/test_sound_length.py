"""How many samples files of sound say they have."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import soundfile

from cbatch.support.sound_length import told_samples


def file_of(n: int, n_channels: int, kind: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.1, (n, n_channels)).astype(np.float32)
    soundfile.write(file, noise, 48_000, format=kind, subtype=subtype)
    return file.getvalue()


def told(data: bytes) -> int | None:
    found = told_samples(base64.b64encode(data).decode())
    assert found == told_samples(data)
    return found


def tagged(data: bytes, n: int) -> bytes:
    """With a tag of `n` bytes before it, as MP3 files have it."""
    return b"ID3\x04\0\0" + bytes(n >> shift & 127 for shift in (21, 14, 7, 0)) + bytes(n) + data


@pytest.mark.parametrize("n_channels", [1, 2, 8])
@pytest.mark.parametrize(("kind", "subtype"), [("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS")])
def test_samples_are_those_of_the_file(kind: str, subtype: str | None, n_channels: int) -> None:
    data = file_of(120_001, n_channels, kind, subtype)
    found = told(data)
    assert found is not None
    assert 120_001 <= found / n_channels < 121_000  # Opus has some before the first
    if kind == "FLAC":
        assert [told(tagged(data, n)) for n in (0, 1, 2, 3, 5000)] == [found] * 5


@pytest.mark.parametrize("kind", ["WAV", "MP3"])
def test_formats_whose_size_is_bounded_by_their_bytes_say_nothing(kind: str) -> None:
    assert told(file_of(5000, 2, kind)) == 0


def test_length_that_is_not_there_is_unknown() -> None:
    flac = file_of(5000, 2, "FLAC")
    unsaid = flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]
    assert told(unsaid) is None
    assert told(flac[:4] + b"\x04" + flac[5:]) is None
    assert told(b"OggS" + bytes(60)) is None
    assert told(tagged(tagged(flac, 9), 9)) is None


@pytest.mark.parametrize("data", ["", "?", "AAA", "\xe9", "ZkxhQw==", "T2dnUw=="])
def test_what_is_no_file_raises_nothing(data: str) -> None:
    assert told_samples(data) in (0, None)
