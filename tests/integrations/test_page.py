"""docs/use/integrations.md: its snippets run where their hosts are installed; each adapter is in it and is an extra."""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import cbatch.integrations
from tests.test_docs import PRINTED, ROOT, blocks, text_of

PAGE = ROOT / "docs/use/integrations.md"
FOLDER = Path(cbatch.integrations.__file__).parent
MODULES = sorted(p.stem for p in FOLDER.glob("[a-z]*.py") if not p.stem.startswith("ray"))
"""All but those of Ray, which have docs/operate/scaling.md."""
N_LINES_MAX = 200
SNIPPETS = [text for text in blocks(PAGE, "py") if "http://" not in text]
"""Those with an address are recipes: tests/server/test_recipes.py."""


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # those of hosts
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s.split("\n\n")[0][-40:])
def test_snippet_runs_and_prints_what_it_promises(
    snippet: str,
    tmp_path: Path,
    test_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in hosts(ast.parse(snippet)):
        pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "model.gguf").symlink_to(test_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    if "import llm" in snippet:
        register_llm_plugin()
    if "inspect_ai" in snippet:
        import_module("cbatch.integrations.inspect")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(snippet, PAGE.name, "exec"), namespace)
    printed = capsys.readouterr().out
    for promise in PRINTED.findall(snippet):
        assert promise.strip('"') in printed, promise


def register_llm_plugin() -> None:
    """Register the plugin, as the entry point of an installed package does."""
    from llm.plugins import load_plugins, pm

    from cbatch.integrations import llm

    load_plugins()
    if not pm.has_plugin("cbatch"):
        pm.register(llm, name="cbatch")


def hosts(tree: ast.Module) -> set[str]:
    """Return the packages of others that a snippet needs: what it imports, and what its adapters do."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    adapters = {n.rpartition(".")[2] for n in found if n.startswith("cbatch.integrations.")}
    inner = [hosts(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))) for name in adapters]
    tops = {name.partition(".")[0] for name in found}
    return set().union(tops, *inner) - {"cbatch", "__future__"} - sys.stdlib_module_names


@pytest.mark.parametrize("module", MODULES)
def test_adapter_is_small_documented_and_an_extra(module: str) -> None:
    assert len((FOLDER / f"{module}.py").read_text("utf-8").splitlines()) <= N_LINES_MAX
    assert f"| [`{module}`](#" in PAGE.read_text("utf-8")
    extras = re.findall(r"^(\w+) = \[", text_of("pyproject.toml"), re.MULTILINE)
    assert module in extras


def test_entry_points_lead_to_adapters() -> None:
    sections = text_of("pyproject.toml").split("[project.entry-points.")[1:]
    named = [n for s in sections for n in re.findall(r'"(cbatch\.[\w.]+)"', s.split("\n\n")[0])]
    assert {name.rpartition(".")[2] for name in named} <= set(MODULES)
