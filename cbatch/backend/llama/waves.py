"""Files of sound become samples: by soundfile and soxr, within limits that are checked before all is decoded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.errors import ConfigError, PromptError, words_of
from cbatch.support import moments
from cbatch.support.sound_length import told_samples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

N_SECONDS_MAX = 3600
"""Longest sound, in seconds. Our choice: its rows fill the windows of few models."""

NO_LIBRARIES = "sound needs soundfile and soxr: pip install soundfile soxr"

N_SAMPLES_MAX = N_SECONDS_MAX * 48_000 * 2
"""Most samples of all channels: an hour in stereo. They are decoded in some seconds."""

_N_CHANNELS_MAX = 8
_RATES = (1_000, 768_000)
_N_BLOCK = 2**16
"""Samples that are decoded at a time."""

_SHORTEST_S = 0.5
"""Shorter sounds end with silence: some of libmtmd's encoders abort the process where there is no whole frame."""

_LOUDEST = 64.0
"""Largest sample: above it, samples are integers that were not divided."""

_BEGINNINGS = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3")
_N_STREAMED = 0xFFFFFF00
"""A size in a WAV file's header from which it stands for an unknown one, as programs write it that cannot go back."""


def samples_of(data: bytes, rate: int, *, are_samples: bool = False) -> NDArray[np.float32]:
    """Return the samples of a sound, all channels in one.

    Args:
        data: a file's bytes, or samples at `rate`: float32, the lowest byte first.
        rate: samples per second of the result.
        are_samples: whether these are bare samples.

    Returns:
        (n_samples,) float32, at least half a second.

    Raises:
        PromptError: the file is none of the formats, damaged, cut off, empty or too long.
    """
    samples = _bare(data, rate) if are_samples else _decoded(data, rate)
    if not np.isfinite(samples).all():
        raise PromptError("a sound has samples that are not finite numbers")
    if (loudest := float(max(samples.max(), -samples.min()))) > _LOUDEST:
        raise PromptError(f"a sound has samples up to {loudest:,.0f}: they must be from -1 to 1")
    n_missing = int(_SHORTEST_S * rate) - len(samples)
    return np.pad(samples, (0, max(0, n_missing)))


def _bare(data: bytes, rate: int) -> NDArray[np.float32]:
    if not data or len(data) % 4:
        raise PromptError(
            f"a sound has {len(data):,} bytes, which are not a whole number of float32 samples"
        )
    samples = np.frombuffer(data, "<f4").astype(np.float32)
    _check_length(len(samples) / rate)
    return samples


def _decoded(data: bytes, rate: int) -> NDArray[np.float32]:
    soundfile, soxr = sound_libraries()
    if not data.startswith(_BEGINNINGS) and not (data[:1] == b"\xff" and data[1:2] >= b"\xe0"):
        raise PromptError("a sound is none of WAV, MP3, FLAC and OGG, or its file is damaged")
    _check_whole(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_header(file, told_samples(data))
            if file.samplerate == rate:
                parts = [*_blocks(file)]
            else:
                stream = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
                parts = [stream.resample_chunk(block) for block in _blocks(file)]
                parts.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    except PromptError:
        raise
    except Exception as error:  # a decoder may raise anything for a damaged file
        why = str(getattr(error, "error_string", "")).removeprefix("Error : ") or words_of(error)
        raise PromptError(f"a sound cannot be decoded: {why}") from None
    samples = np.concatenate([np.zeros(0, np.float32), *parts])
    if not len(samples):
        raise PromptError("a sound is empty: its file has no samples")
    return samples


def _blocks(file: Any) -> Iterator[NDArray[np.float32]]:
    """Yield the samples of a file, all channels in one; refuse one that goes on, or ends before its header says."""
    n_read, n_told = 0, file.frames
    while len(block := file.read(_N_BLOCK, dtype="float32", always_2d=True)):
        moments.pause()
        n_read += len(block)
        if n_read > n_told:  # libsndfile repeats a part of OGG whose pages are counted wrongly
            raise PromptError(
                f"a sound is damaged: its header says {n_told:,} samples, but it has more"
            )
        yield block.mean(axis=1)
    if file.format == "FLAC" and n_read < n_told:
        raise PromptError(f"a sound is cut off: it has {n_read:,} of {n_told:,} samples")


def _check_header(file: Any, n_last: int | None) -> None:
    """Refuse a file by what its header says, and by the samples of its last page, by which it was given a lane."""
    if not _RATES[0] <= file.samplerate <= _RATES[1]:
        low, high = _RATES
        raise PromptError(
            f"a sound has {file.samplerate:,} samples per second, not {low:,} … {high:,}"
        )
    if file.channels > _N_CHANNELS_MAX:
        raise PromptError(
            f"a sound has {file.channels} channels; at most {_N_CHANNELS_MAX} are allowed"
        )
    if n_last and file.frames > n_last // file.channels + file.samplerate:  # some begin before 0
        raise PromptError(
            f"a sound is damaged, or is several sounds joined: the last page of its OGG file ends at sample "
            f"{n_last // file.channels:,}, but the first sound has more: save it again as one"
        )
    _check_length(file.frames / file.samplerate)
    _check_samples(file.frames, file)


def _check_length(seconds: float) -> None:
    if seconds > N_SECONDS_MAX:
        raise PromptError(
            f"a sound is longer than {N_SECONDS_MAX:,} seconds, the most that is allowed: divide it"
        )


def _check_samples(n_each: int, file: Any) -> None:
    if n_each * file.channels > N_SAMPLES_MAX:
        raise PromptError(
            f"a sound has {n_each * file.channels:,} samples or more: {file.channels} channels at "
            f"{file.samplerate:,} Hz; at most {N_SAMPLES_MAX:,} are allowed: divide it, or lower its rate"
        )


def _check_whole(data: bytes) -> None:
    """Refuse a WAV file that is shorter than its header says."""
    n_told = int.from_bytes(data[4:8], "little") + 8 if data[:4] == b"RIFF" else 0
    if len(data) < n_told < _N_STREAMED:
        raise PromptError(f"a sound is cut off: its file has {len(data):,} of {n_told:,} bytes")


def sound_libraries() -> tuple[Any, Any]:
    """Return soundfile and soxr. Raises a ConfigError where one is not installed."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # the second: the library that soundfile loads
        raise ConfigError(NO_LIBRARIES) from error
    return soundfile, soxr
