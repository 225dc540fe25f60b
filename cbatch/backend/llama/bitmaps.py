"""Pictures' files become pixels: by Pillow, within limits that are checked before anything is decoded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.errors import ConfigError, PromptError, words_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

N_PIXELS_MAX = 2**26
"""Most pixels of a picture. Our choice: large photographs have 50 millions; their pixels take 3 bytes each."""

_N_SIDE_MAX = 2**15
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_PHOTO_WITH_OTHERS = "MPO"
"""What Pillow calls a JPEG with more pictures behind the photograph, as cameras write them."""


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    """Return the pixels of a picture's file, as it is to be looked at.

    Returns:
        (height, width, 3) uint8: red, green, blue; transparency is left out.

    Raises:
        PromptError: the file is none of the formats, damaged, animated or too large.
    """
    pil = pillow()
    try:
        with pil.Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > N_PIXELS_MAX or max(image.size) > _N_SIDE_MAX:
                raise PromptError(
                    f"a picture has {width:,} × {height:,} pixels; at most {N_PIXELS_MAX:,} are allowed, and "
                    f"{_N_SIDE_MAX:,} a side: make it smaller"
                )
            if getattr(image, "is_animated", False) and image.format != _PHOTO_WITH_OTHERS:
                raise PromptError("a picture is animated: give one of its frames")
            upright = pil.ImageOps.exif_transpose(image)
            # gray of 16 bits, which `convert` would cut off at 255
            if upright.mode.startswith("I"):
                upright = pil.Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return np.asarray(upright.convert("RGB"), dtype=np.uint8)
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
