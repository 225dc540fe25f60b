"""Pictures in messages, checked and converted to one form, which files, HTTP and workers can carry.

That form is OpenAI's part `image_url` with a data URL, so a picture goes wherever text goes: into batch files, through
HTTP, and to workers. No URL is fetched.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from cbatch.errors import ConfigError, PromptError, words_of
from cbatch.support.checks import shown
from cbatch.support.given_files import file_bytes
from cbatch.support.plain import text_of

N_BYTES_MAX = 2**26
"""Most bytes of a picture's file. Our choice: a photograph has some millions."""

_DATA = re.compile(
    r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE
)
_N_HEAD = 128
"""Characters in which a data URL says what it has."""

NO_PROJECTOR = "this model was loaded without a projector for pictures: load it with mmproj, the projector's GGUF file"

_KINDS = ("image_url", "image")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def is_picture(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is meant as a picture."""
    return part.get("type") in _KINDS


def url_part(url: str) -> dict[str, Any]:
    """Return a URL as the part of a message that OpenAI's API uses for pictures."""
    return {"type": "image_url", "image_url": {"url": url}}


def picture_part(place: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a picture as a part of a message: `image_url` with a data URL.

    Args:
        place: where the message is, for errors.
        part: OpenAI's `{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}`, or in Python
            `{"type": "image", "image": …}` with a `pathlib.Path`, the bytes of a file, a PIL image, or an array of
            shape (height, width, 3) of uint8.

    Raises:
        ConfigError: the part has none of these forms, or its file cannot be read.
    """
    if part.get("type") == "image":
        return url_part(_url_of(place, part.get("image")))
    url = part.get("image_url")
    url = text_of(url.get("url") if isinstance(url, Mapping) else url)
    if url is None:
        raise ConfigError(f"{place} has a picture without url: image_url must be {{'url': …}}")
    if not _DATA.match(url[:_N_HEAD]):
        raise ConfigError(
            f"{place} has a picture at {shown(url[:_N_HEAD])}: URLs are not fetched; give its data as "
            "data:image/png;base64,…"
        )
    _check_size(place, len(url) * 3 // 4)
    return url_part(url)


def picture_data(part: Mapping[str, Any]) -> bytes:
    """Return the bytes of a picture's file. Raises a PromptError if its data is not base64."""
    url = str(part["image_url"]["url"])
    try:
        return base64.b64decode(url[url.index(",") + 1 :], validate=True)
    except ValueError as error:  # also of characters that are not ASCII
        raise PromptError(f"a picture's data URL is not base64: {words_of(error)}") from None


def _url_of(place: str, image: object) -> str:
    data = _file_of(place, image)
    _check_size(place, len(data))
    return f"data:image/any;base64,{base64.b64encode(data).decode()}"


def _file_of(place: str, image: object) -> bytes:
    """Return the bytes of a picture's file; of an image in memory, those of a PNG file."""
    data = file_bytes(f"{place} has a picture", image, partial(_check_size, place))
    if data is not None:
        return data
    if hasattr(image, "__array_interface__") and not hasattr(image, "save"):
        from PIL import Image

        try:
            image = Image.fromarray(image)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"{place} has an array that is not a picture: {error}") from None
    if not hasattr(image, "save"):
        raise ConfigError(
            f"{place} has an image of type {type(image).__name__}: give a pathlib.Path, the bytes of a file, a PIL "
            "image, or an array of shape (height, width, 3) of uint8"
        )
    file = io.BytesIO()
    try:
        if getattr(image, "mode", "") not in _PNG_MODES:
            image = image.convert("RGB")  # type: ignore[attr-defined]
        image.save(file, "PNG", compress_level=1)  # half the time for a seventh more bytes
    except Exception as error:  # such as of a file that Pillow reads only now
        raise ConfigError(f"{place} has an image that cannot be read: {words_of(error)}") from None
    return file.getvalue()


def _check_size(place: str, n_bytes: int) -> None:
    if not n_bytes:
        raise ConfigError(f"{place} has an empty picture")
    if n_bytes > N_BYTES_MAX:
        raise ConfigError(
            f"{place} has a picture of {n_bytes:,} bytes; at most {N_BYTES_MAX:,} are allowed: make it smaller"
        )
