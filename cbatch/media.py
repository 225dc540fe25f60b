"""Pictures and sounds in messages: which parts of a message they are, and the text around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbatch.pictures import is_picture, picture_data, picture_part
from cbatch.sounds import is_sound, sound_data, sound_part


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture or a sound, not decoded yet."""

    data: bytes
    """The bytes of a file, or of a sound's bare samples."""
    is_sound: bool = False
    are_samples: bool = False
    """Whether the bytes are bare samples; see `cbatch.sounds.SAMPLES`."""


def is_medium(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is to be a picture or a sound."""
    return is_picture(part) or is_sound(part)


def medium_part(place: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a picture or a sound in the form of OpenAI's API; see `picture_part` and `sound_part`."""
    return sound_part(place, part) if is_sound(part) else picture_part(place, part)


def medium_of(part: Mapping[str, Any]) -> Medium:
    """Return the medium in a part that `medium_part` made. Raises a PromptError if its data is not base64."""
    if not is_sound(part):
        return Medium(picture_data(part))
    data, are_samples = sound_data(part)
    return Medium(data, is_sound=True, are_samples=are_samples)


def marked_messages(
    messages: Sequence[Mapping[str, Any]], mark: Callable[[int, Mapping[str, Any]], str]
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """Return messages of text alone, with `mark(i, part)` in place of picture or sound `i`; and the media.

    Texts are joined by line ends, but not beside a picture or sound. Source: llama.cpp common/chat.cpp,
    to_json_oaicompat.
    """
    marked: list[dict[str, Any]] = []
    media: list[Mapping[str, Any]] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, tuple):
            text, was_text = "", False
            for part in content:
                if is_medium(part):
                    text += mark(len(media), part)
                    media.append(part)
                else:
                    text += "\n" * was_text + part["text"]
                was_text = not is_medium(part)
            content = text
        marked.append({**message, "content": content})
    return marked, media


def shown_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of text alone, for readers: a picture is `<picture>`, a sound `<sound>`."""
    return marked_messages(messages, lambda _, part: "<sound>" if is_sound(part) else "<picture>")[
        0
    ]
