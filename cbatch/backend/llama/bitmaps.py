"""Pictures' files become pixels: by Pillow, within limits that are checked before anything is decoded."""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.errors import ConfigError, PromptError, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

N_PIXELS_MAX = 2**26
"""Most pixels of a picture. Our choice: large photographs have 50 millions; their pixels take 3 bytes each."""

_N_SIDE_MAX = 2**15

_N_READS_MAX = 2**18
"""Most reads of a picture's file, which Pillow reads part by part. A GIF of 20 MiB needs 165,000. Our choice."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_PHOTO_WITH_OTHERS = "MPO"
"""What Pillow calls a JPEG with more pictures behind the photograph, as cameras write them."""

_PNG_TEXTS, _PNG_MARKS = (b"tEXt", b"zTXt", b"iTXt"), (b"exif", b"xmp")
"""Chunks of PNG files, and bytes of which one is in each such chunk that says how the camera was held."""

_ORIENTATION, _ON_ITS_SIDE = 0x0112, range(5, 9)
"""The tag of a file that says how the camera was held, and the values for one held on its side. Source: Exif."""


def size_of(data: bytes) -> tuple[int, int]:
    """Return the width and the height of a picture's file, as it is to be looked at; decodes nothing.

    Raises:
        PromptError: the file is none of the formats, damaged, animated or too large.
    """
    with _opened(data) as image:
        width, height = image.size
        # Pillow decodes a whole PNG to find what may stand behind its pixels
        may_be_turned = image.format != "PNG" or _is_said_in_png(data)
        orientation = image.getexif().get(_ORIENTATION, 1) if may_be_turned else 1
        return (height, width) if orientation in _ON_ITS_SIDE else (width, height)


def _is_said_in_png(data: bytes) -> bool:
    """Whether a PNG file may say how the camera was held, before its pixels or behind them. Source: W3C, PNG, 11.3."""
    at = 8
    while at + 8 <= len(data):
        n, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind == b"eXIf":
            return True
        if kind in _PNG_TEXTS and any(mark in data[at + 8 : at + 8 + n] for mark in _PNG_MARKS):
            return True
        at += n + 12
    return False


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    """Return the pixels of a picture's file, as it is to be looked at.

    Returns:
        (height, width, 3) uint8: red, green, blue; transparency is left out.

    Raises:
        PromptError: the file is none of the formats, damaged, animated or too large.
    """
    pil = pillow()
    with _opened(data) as image:
        upright = pil.ImageOps.exif_transpose(image)
        # gray of 16 bits, which `convert` would cut off at 255
        if upright.mode.startswith("I"):
            upright = pil.Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        return np.asarray(upright.convert("RGB"), dtype=np.uint8)


class _CountedReads(io.BytesIO):
    """A file with at most `_N_READS_MAX` reads: millions of empty parts would take a decoder a minute."""

    n_left = _N_READS_MAX

    def read(self, n_bytes: int | None = -1, /) -> bytes:
        """Return the next bytes. Raises a `PromptError` for a file of too many parts."""
        self.n_left -= 1
        if self.n_left < 0:
            raise PromptError(
                f"a picture's file has too many parts: it needs more than {_N_READS_MAX:,} reads: save the picture anew"
            )
        return super().read(n_bytes)


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Have a picture's file open for the block; what goes wrong in it is a PromptError."""
    pil = pillow()
    try:
        with pil.Image.open(_CountedReads(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > N_PIXELS_MAX or max(image.size) > _N_SIDE_MAX:
                raise PromptError(
                    f"a picture has {width:,} × {height:,} pixels; at most {N_PIXELS_MAX:,} are allowed, and "
                    f"{_N_SIDE_MAX:,} a side: make it smaller"
                )
            if getattr(image, "is_animated", False) and image.format != _PHOTO_WITH_OTHERS:
                raise PromptError("a picture is animated: give one of its frames")
            yield image
    except PromptError:
        raise
    except pil.Image.DecompressionBombError:  # Pillow's own limit, which it looks at first
        raise PromptError(
            f"a picture has more than {N_PIXELS_MAX:,} pixels: make it smaller"
        ) from None
    except pil.UnidentifiedImageError:
        raise PromptError(
            f"a picture is none of {', '.join(_FORMATS)}, or its file is damaged"
        ) from None
    except Exception as error:  # a decoder may raise anything for a damaged file
        raise PromptError(f"a picture cannot be decoded: {words_of(error)}") from None


def pillow() -> Any:
    """Return Pillow. Raises a ConfigError where it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ConfigError("pictures need Pillow: pip install pillow") from error
    return PIL
