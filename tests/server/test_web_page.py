"""The page's files over HTTP: headers, tags, who may have them; and what stands in them."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch import Engine, RunOptions
from cbatch.backend.fake import FakeBackend
from cbatch.server.web_page import page_files
from cbatch.support.checks import MAX_TIME_S
from tests.server.clients import call, error_of, fake_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.applications import Starlette

FOLDER = Path(cbatch.__file__).parent / "server" / "page"
CHECKOUT = Path(__file__).parents[2] / "cbatch" / "server" / "page"
PATHS = [file.path for file in page_files()]
SCRIPTS = sorted(FOLDER.glob("*.js"))

MAX_SAFE_SEED = 2**53 - 1
"""Numbers of JavaScript are exact up to there."""


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


# ---- over HTTP ----


def test_installed_page_is_that_of_the_checkout() -> None:
    installed = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert installed == {path.name: path.read_bytes() for path in CHECKOUT.iterdir()}
    assert {"index.html", "page.css", "main.js"} <= installed.keys()


KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg"}
OWN_ALONE = {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"}


def test_files_of_the_page_have_their_headers(app: Starlette) -> None:
    for path in PATHS:
        answer = call(app, path)
        assert answer.status_code == 200
        name = path.rpartition("/")[2] or "index.html"
        assert answer.content == (FOLDER / name).read_bytes()
        assert answer.headers["content-type"].startswith(KINDS[name.rpartition(".")[2]])
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = answer.headers["content-security-policy"].split("; ")
        assert {*OWN_ALONE, "require-trusted-types-for 'script'"} <= {*policy}
        assert "unsafe" not in str(policy)
        assert "http" not in str(policy)


def test_file_that_a_browser_has_is_not_sent_again(app: Starlette) -> None:
    first = call(app, "/")
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"x", {tag}'):
        again = call(app, "/", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
        assert "content-security-policy" in again.headers
    for unknown in ('"x"', tag.strip('"'), "é"):
        headers = {"if-none-match": unknown.encode()}
        assert call(app, "/", headers=headers).content == first.content
    tags = {call(app, path).headers["etag"] for path in PATHS}
    assert len(tags) == len(PATHS)


def test_page_has_its_own_files_alone_and_is_not_written_to(app: Starlette) -> None:
    for path in ("/page", "/page/", "/page/app.py", "/page/../app.py", "/page/index.html"):
        assert error_of(call(app, path), 404)["code"] == "unknown_url"
    error_of(call(app, "/", {}), 405)
    assert call(app, "/", method="HEAD").status_code == 200


def test_page_needs_no_key_and_its_calls_do() -> None:
    with fake_app(api_keys=["secret-key"], model_name="secret-model") as app:
        for path in PATHS:
            answer = call(app, path)
            assert answer.status_code == 200
            assert b"secret-" not in answer.content
        for path in ("/props", "/slots", "/metrics", "/v1/models", "/page/none.js", "/pages"):
            assert error_of(call(app, path), 401)["code"] == "invalid_api_key"


def test_page_may_be_left_out() -> None:
    with fake_app(page=False) as app:
        for path in PATHS:
            error_of(call(app, path), 404)
    with fake_app(page=False, api_keys=["k"]) as app:
        for path in PATHS:
            error_of(call(app, path), 401)


def test_defaults_are_the_engines_else_the_models() -> None:
    backend = FakeBackend()
    backend.sampling_defaults = {"temperature": 0.3, "top_k": 7}
    with fake_app(engine=Engine(backend, options={"top_k": 9, "max_tokens": 5})) as app:
        params = call(app, "/props").json()["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"], params["min_p"]) == (0.3, 9, 0.05)
    assert params["max_tokens"] == 5
    assert "seed" not in params


# ---- in the files ----


class Reader(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def elements() -> list[tuple[str, dict[str, str | None]]]:
    reader = Reader()
    reader.feed(text_of("index.html"))
    return reader.elements


def test_page_names_files_that_are_there_and_none_elsewhere() -> None:
    named = [
        value for _, given in elements() for name in ("src", "href") if (value := given.get(name))
    ]
    local = [value for value in named if not value.startswith("#")]
    assert {f"/{value}" for value in local} <= {*PATHS}
    imported = {
        name for path in SCRIPTS for name in re.findall(r'from "(.*?)"', path.read_text("utf-8"))
    }
    assert imported
    assert {f"/page/{name.removeprefix('./')}" for name in imported} <= {*PATHS}
    for path in (file for file in FOLDER.iterdir() if file.suffix != ".LICENSE"):
        text = path.read_text(encoding="utf-8")
        for name in ("http://www.w3.org/2000/svg", "https://github.com/markedjs/marked"):
            text = text.replace(name, "")
        assert not re.search(r"https?://\w", text), path
        assert path.suffix != ".css" or "url(" not in text, path


def test_page_has_no_script_or_style_of_its_own_between_its_elements() -> None:
    for tag, given in elements():
        assert tag not in ("style", "iframe", "object", "base")
        assert tag != "script" or given.get("src")
        assert not [name for name in given if name.startswith("on") or name == "style"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_no_markup_of_strings(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    assert not re.search(banned, text)
    assert not re.search("indexedDB|cookie", text)
    assert "localStorage" not in text or path.name == "kept.js"  # chats alone outlive the tab


def test_every_field_of_the_page_has_a_label() -> None:
    labels = {given.get("for") for tag, given in elements() if tag == "label"}
    for tag, given in elements():
        if tag in ("input", "select", "textarea"):
            assert given["id"] in labels


def tables() -> Iterator[dict[str, Any]]:
    found = re.findall(r"_?PARAMETERS = (\[.*?\n\]);", text_of("parameters.js"), re.DOTALL)
    assert len(found) == 2
    for table in found:
        yield from json.loads(table)


def test_ranges_of_the_page_are_those_of_the_options() -> None:
    limits = {f.name: f.metadata["limits"] for f in fields(RunOptions) if "limits" in f.metadata}
    limits |= {"seed": (0, MAX_SAFE_SEED), "timeout_s": (0, MAX_TIME_S)}
    limits |= {"max_tokens": (1, limits["top_k"][1])}
    wholes = {f.name for f in fields(RunOptions) if str(f.type).startswith("int")}
    for row in tables():
        name = row["name"]
        assert (row["min"], row["max"]) == limits[name], name
        assert (row["step"] == 1) == (name in wholes), name
        RunOptions(**{name: row["min"]})
        RunOptions(**{name: row["max"]})


def schemes() -> Iterator[dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\}", text_of("page.css"), re.DOTALL)[:2]
    for text in (light, light + dark):
        yield dict(re.findall(r"--([\w-]+): (#\w{6});", text))


def luminance(color: str) -> float:
    """Source: WCAG 2.2, relative luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXTS = {
    "paper": ("ink", "soft", "accent", "prefill-text", "decode-text", "paused-text", "bad"),
    "card": ("ink", "soft", "accent", "bad"),
    "tint": ("ink", "accent"),
    "sunk": ("ink",),
    "bad-tint": ("bad", "ink"),
    "accent": ("on-accent",),
}
"""Backgrounds, and the colours of text on them."""


def test_texts_can_be_read_in_both_schemes() -> None:
    for colors in schemes():
        for under, texts in TEXTS.items():
            for text in texts:
                assert contrast(colors[under], colors[text]) >= 4.5, (under, text, colors)
        for part in ("decode", "prefill", "paused", "waiting", "edge"):
            assert contrast(colors["sunk" if part != "edge" else "card"], colors[part]) >= 3, part
