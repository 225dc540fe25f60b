"""Tags of HTML and SVG; every text and attribute is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_EMPTY = ("meta", "br", "hr")


class Markup(str):
    """Text that is markup already: it is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element; `class_` is written `class`, `stroke_width` `stroke-width`; what is None is left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Return pieces one behind the other; what is no markup is escaped."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c, quote=False) for c in children))


def _text(value: object) -> str:
    """Return an attribute's value; a tenth of a pixel is as fine as a picture needs to be."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
