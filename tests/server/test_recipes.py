"""Recipes of docs/: snippets with an address run against a server, and commands have options that exist."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import typer

from cbatch.cli import app
from tests.test_docs import ROOT, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.clients import Running

PAGE = ROOT / "docs/operate/server.md"
RECIPES = [
    text
    for page in (PAGE, ROOT / "docs/use/integrations.md")
    for text in blocks(page, "py")
    if "http://127.0.0.1:8080" in text
]
EXAMPLES = ROOT / "docs/examples/serve"
URL = "http://127.0.0.1:8080"


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # those of clients
@pytest.mark.parametrize("snippet", RECIPES)
def test_snippet_runs(
    snippet: str, keeping_server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in re.findall(r"^(?:import|from) (\w+)", snippet, re.MULTILINE):
        pytest.importorskip(package)
    namespace: dict[str, Any] = {}
    exec(compile(snippet.replace(URL, keeping_server.url), PAGE.name, "exec"), namespace)
    if close := getattr(namespace.get("client"), "close", None):
        close()
    assert re.search(r"5|'Ada'", capsys.readouterr().out)


def commands() -> Iterator[list[str]]:
    """Yield the words behind `serve` of every such command in the page and its files."""
    files = [EXAMPLES / "cbatch.service", EXAMPLES / "Containerfile"]
    texts = [*blocks(PAGE, "sh"), *(file.read_text(encoding="utf-8") for file in files)]
    for text in texts:
        for command in re.findall(r"cbatch serve\b(.*)", text.replace("\\\n", " ")):
            yield shlex.split(command)


def test_commands_have_options_that_exist() -> None:
    found = [*commands()]
    assert len(found) >= 5
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for words in found:
        serve.make_context("serve", words)


def test_evaluation_of_the_recipe_has_its_data() -> None:
    n_answers = set()
    for file in sorted(EXAMPLES.glob("*.yaml")):
        (data,) = re.findall(r"test: (\S+)", file.read_text(encoding="utf-8"))
        n_answers.add(len((ROOT / data).read_text(encoding="utf-8").splitlines()))
    assert n_answers == {6}
