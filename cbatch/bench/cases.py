"""The benchmarks of one question each, by name: `cbatch bench --list` names them, `--case` runs one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType

from cbatch.errors import ConfigError

_FOLDER = "cbatch.bench.experiments"
_TOOLS = ("step_costs", "simulate", "simulate_nodes")
_NO_CASE = "sampler_bench"
"""A module of the folder that has no `main`: `samplers` is its case."""


def present() -> tuple[str, ...]:
    """Return the cases that can run: without a checkout or a source distribution, the tools alone.

    A case is a module that runs as `python -m cbatch.bench.experiments.NAME`, too; a tool as `cbatch.bench.NAME`.
    """
    if find_spec(_FOLDER) is None:
        return _TOOLS
    modules = iter_modules(import_module(_FOLDER).__path__)
    return (*(module.name for module in modules if module.name != _NO_CASE), *_TOOLS)


def _module(name: str) -> ModuleType:
    return import_module(f"{'cbatch.bench' if name in _TOOLS else _FOLDER}.{name}")


def told(name: str) -> str:
    """Return one line on a case: the first sentence of its module, without the command."""
    doc = _module(name).__doc__ or ""
    return doc.partition("\n")[0].partition(": `python")[0].rstrip(".")


def run_case(name: str, words: Sequence[str]) -> None:
    """Run a case with the arguments of its command line; it prints what it finds, as JSON lines or a table.

    Raises:
        ConfigError: there is no such case, or only a checkout has it.
    """
    if name not in (known := present()):
        raise ConfigError(
            f"unknown case {name!r}; known are {', '.join(known)}"
            if len(known) > len(_TOOLS)
            else f"case {name!r} is not in the installed package, which has {', '.join(known)}; others are in a "
            "checkout of cbatch, see docs/understand/contributing.md"
        )
    _module(name).main(list(words))
