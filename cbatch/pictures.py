"""Pictures in messages, as callers give them: checked, and put in the one form that every door can carry.

That form is OpenAI's part `image_url` with a data URL, so a picture goes where text goes: into batch files, through
HTTP, and to workers. No URL is fetched.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cbatch.errors import ConfigError, PromptError, words_of
from cbatch.support.checks import shown
from cbatch.support.plain import text_of

N_BYTES_MAX = 2**26
"""Most bytes of a picture's file. Our choice: a photograph has some millions."""

_DATA = re.compile(
    r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE
)
_N_HEAD = 128
"""Characters in which a data URL says what it has."""

NO_PROJECTOR = "this model is loaded without what encodes pictures: load it with mmproj, its projector's GGUF file"

_KINDS = ("image_url", "image")
_SHOWN = "<picture>"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def is_picture(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is to be a picture."""
    return part.get("type") in _KINDS


def url_part(url: str) -> dict[str, Any]:
    """Return a URL as the part of a message that OpenAI's API has for pictures."""
    return {"type": "image_url", "image_url": {"url": url}}


def picture_part(place: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a picture as a part of a message: `image_url` with a data URL.

    Args:
        place: of the message, for errors.
        part: OpenAI's `{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}`, or in Python
            `{"type": "image", "image": …}` with a `pathlib.Path`, the bytes of a file, a PIL image, or an array of
            shape (height, width, 3) of uint8.

    Raises:
        ConfigError: it is none of these, or its file cannot be read.
    """
    if part.get("type") == "image":
        return url_part(_url_of(place, part.get("image")))
    url = part.get("image_url")
    url = text_of(url.get("url") if isinstance(url, Mapping) else url)
    if url is None:
        raise ConfigError(f"{place} has a picture without url: image_url must be {{'url': …}}")
    if not _DATA.match(url[:_N_HEAD]):
        raise ConfigError(
            f"{place} has a picture at {shown(url[:_N_HEAD])}, and none is fetched: give its data as "
            "data:image/png;base64,…"
        )
    _check_size(place, len(url) * 3 // 4)
    return url_part(url)


def marked_messages(
    messages: Sequence[Mapping[str, Any]], mark: Callable[[int], str]
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """Return messages of text alone, with `mark(i)` in the place of picture `i`; and the pictures.

    Source: llama.cpp common/chat.cpp, to_json_oaicompat: texts are joined by line ends, but not beside a picture.
    """
    marked: list[dict[str, Any]] = []
    pictures: list[Mapping[str, Any]] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, tuple):
            text, was_text = "", False
            for part in content:
                if is_picture(part):
                    text += mark(len(pictures))
                    pictures.append(part)
                else:
                    text += "\n" * was_text + part["text"]
                was_text = not is_picture(part)
            content = text
        marked.append({**message, "content": content})
    return marked, pictures


def shown_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of text alone, for readers: a picture is `<picture>`."""
    return marked_messages(messages, lambda i: _SHOWN)[0]


def picture_data(part: Mapping[str, Any]) -> bytes:
    """Return the bytes of a picture's file. Raises a PromptError where they are not base64."""
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
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    # no text: it could come from a file of prompts, or from the network
    if isinstance(image, os.PathLike):
        try:
            path = Path(os.fspath(image))
            _check_size(place, path.stat().st_size)
            return path.read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{place} has a picture that cannot be read: {error}") from None
    if hasattr(image, "__array_interface__") and not hasattr(image, "save"):
        from PIL import Image

        try:
            image = Image.fromarray(image)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"{place} has an array that is no picture: {error}") from None
    if not hasattr(image, "save"):
        raise ConfigError(
            f"{place} has an image of type {type(image).__name__}: give a pathlib.Path, the bytes of a file, a PIL "
            "image, or an array of shape (height, width, 3) of uint8"
        )
    file = io.BytesIO()
    try:
        if getattr(image, "mode", "") not in _PNG_MODES:
            image = image.convert("RGB")  # type: ignore[attr-defined]
        image.save(file, "PNG")
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
