"""Sounds in messages, checked and converted to one form, which files, HTTP and workers can carry.

That form is OpenAI's part `input_audio` with base64, so a sound goes wherever text goes: into batch files, through
HTTP, and to workers.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import partial
from typing import Any

from cbatch.errors import ConfigError, PromptError, words_of
from cbatch.support.checks import shown
from cbatch.support.given_files import file_bytes
from cbatch.support.plain import text_of

N_BYTES_MAX = 2**26
"""Most bytes of a sound's file. Our choice: an hour of MP3 has some 60 millions."""

SAMPLES = "f32"
"""The format of bare samples, at the rate that the model wants: float32, the lowest byte first."""

NO_ENCODER = (
    "this model was loaded without a projector for sound: load it with mmproj, the GGUF file of a projector with an "
    "encoder of sound"
)

_KINDS = ("input_audio", "audio")
_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", SAMPLES)
"""Formats that a part may name; the first bytes of the file decide."""


def is_sound(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is meant as a sound."""
    return part.get("type") in _KINDS


def base64_part(data: str, format: str | None = None) -> dict[str, Any]:
    """Return base64 as the part of a message that OpenAI's API uses for sounds."""
    said = {} if format is None else {"format": format}
    return {"type": "input_audio", "input_audio": {"data": data, **said}}


def data_part(url: str) -> dict[str, Any]:
    """Return what a data URL has as the part of a message; what is not base64 is refused when it is read."""
    return base64_part(url.partition(",")[2])


def sound_part(place: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sound as a part of a message: `input_audio` with base64.

    Args:
        place: where the message is, for errors.
        part: OpenAI's `{"type": "input_audio", "input_audio": {"data": "…", "format": "wav"}}`, or in Python
            `{"type": "audio", "audio": …}` with a `pathlib.Path`, the bytes of a file, or an array of shape
            (n_samples,) of float32, at the rate that the model wants.

    Raises:
        ConfigError: the part has none of these forms, or its file cannot be read.
    """
    if part.get("type") == "audio":
        return _part_of(place, part.get("audio"))
    given = part.get("input_audio")
    data = text_of(given.get("data")) if isinstance(given, Mapping) else None
    if data is None:
        raise ConfigError(
            f"{place} has a sound without data: input_audio must be {{'data': base64, 'format': 'wav'}}"
        )
    said = given.get("format") if isinstance(given, Mapping) else None
    format = text_of(said)
    if said is not None and format not in _FORMATS:
        raise ConfigError(
            f"{place} has a sound of format {shown(said)}: it can be {', '.join(_FORMATS)}"
        )
    _check_size(place, len(data) * 3 // 4)
    return base64_part(data, format)


def sound_data(part: Mapping[str, Any]) -> tuple[bytes, bool]:
    """Return a sound's bytes, and whether they are bare samples. Raises a PromptError if its data is not base64."""
    given = part["input_audio"]
    try:
        data = base64.b64decode(str(given["data"]), validate=True)
    except ValueError as error:  # also of characters that are not ASCII
        raise PromptError(f"a sound's data is not base64: {words_of(error)}") from None
    return data, given.get("format") == SAMPLES


def _part_of(place: str, audio: object) -> dict[str, Any]:
    data = file_bytes(f"{place} has a sound", audio, partial(_check_size, place))
    if data is not None:
        return base64_part(base64.b64encode(data).decode())
    if not hasattr(audio, "__array_interface__"):
        raise ConfigError(
            f"{place} has a sound of type {type(audio).__name__}: give a pathlib.Path, the bytes of a file, or an "
            "array of shape (n_samples,) of float32"
        )
    import numpy as np  # slow to import

    samples = np.asarray(audio)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise ConfigError(
            f"{place} has an array of shape {samples.shape} of {samples.dtype}, which is not a sound: give one of "
            "shape (n_samples,) of float32"
        )
    data = samples.astype("<f4").tobytes()
    _check_size(place, len(data))
    return base64_part(base64.b64encode(data).decode(), SAMPLES)


def _check_size(place: str, n_bytes: int) -> None:
    if not n_bytes:
        raise ConfigError(f"{place} has an empty sound")
    if n_bytes > N_BYTES_MAX:
        raise ConfigError(
            f"{place} has a sound of {n_bytes:,} bytes; at most {N_BYTES_MAX:,} are allowed: make it smaller"
        )
