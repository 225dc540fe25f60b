"""The benchmarks of one question each, by name: `cbatch bench --list` names them, `--case` runs one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

from cbatch.errors import ConfigError

_FOLDER = "cbatch.bench.experiments"
_NO_CASES = ("fake_server", "rounds", "sampler_bench", "traffic")
"""Modules of the folder that have no `main`."""


def present() -> tuple[str, ...]:
    """Return the cases that can run: none without a checkout or a source distribution.

    A case is a module that runs as `python -m cbatch.bench.experiments.NAME`, too.
    """
    if find_spec(_FOLDER) is None:
        return ()
    modules = iter_modules(import_module(_FOLDER).__path__)
    return tuple(module.name for module in modules if module.name not in _NO_CASES)


def told(name: str) -> str:
    """Return one line on a case: the first sentence of its module, without the command."""
    doc = import_module(f"{_FOLDER}.{name}").__doc__ or ""
    return doc.partition("\n")[0].partition(": `python")[0].rstrip(".")


def run_case(name: str, words: Sequence[str]) -> None:
    """Run a case with the arguments of its command line; it prints what it finds, as JSON lines or a table.

    Raises:
        ConfigError: there is no such case, or only a checkout has it.
    """
    if name not in (known := present()):
        raise ConfigError(
            f"unknown case {name!r}; known are {', '.join(known)}"
            if known
            else f"case {name!r} is not in the installed package: cases are in a checkout of cbatch, see "
            "docs/understand/contributing.md"
        )
    import_module(f"{_FOLDER}.{name}").main(list(words))
