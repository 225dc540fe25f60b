"""The page at `/`: files that are sent as they are, and headers that let nothing else act in it.

The page holds no secret and needs no key; what it asks of the server does. Source of the headers: W3C, Content Security
Policy level 3, and Trusted Types: a browser runs the scripts of this server alone, and makes no markup of strings.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch.server.desk import Desk
    from cbatch.server.exchange import Exchange

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again by its tag: a new version is seen at once
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page."""

    name: str
    media_type: str
    content: bytes

    @property
    def path(self) -> str:
        """Where it is asked for."""
        return "/" if self.name == "index.html" else f"/page/{self.name}"

    @cached_property
    def tag(self) -> str:
        """Changes with the content."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    async def answer(self, desk: Desk, exchange: Exchange) -> None:
        """Send the file, or say that the client's copy is the same."""
        headers = {**_HEADERS, "etag": self.tag}
        known = exchange.headers.get(b"if-none-match", b"").decode("latin-1")
        if self.tag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
            await exchange.begin(304, headers, media_type=self.media_type)
            await exchange.finish()
            return
        await exchange.respond(200, self.content, headers, media_type=self.media_type)


@cache
def page_files() -> tuple[PageFile, ...]:
    """Return the files of the page, read once."""
    folder = files("cbatch.server") / "page"
    found = {file.name: file for file in folder.iterdir()}
    # what is of no known kind, such as an editor's copy, is not of the page
    return tuple(
        PageFile(name, kind, found[name].read_bytes())
        for name in sorted(found)
        if (kind := _MEDIA_TYPES.get(name.rpartition(".")[2]))
    )
