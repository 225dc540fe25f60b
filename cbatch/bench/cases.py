"""The benchmarks of one question each, by name: `cbatch bench --list` names them, `--case` runs one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from cbatch.errors import ConfigError

_EXPERIMENTS = (
    *("staggered", "steps", "streaming", "shared_prefix", "prompts_first"),
    *("short_sequences", "narrow_steps", "repack", "huge_pages", "exact_price", "prompt_lengths"),
    *(
        "stall",
        "samplers",
        "constraints",
        "prompt_scores",
        "continuations",
        "first_tokens",
        "speculation",
        "replicas",
        "neighbours",
        "beside_loops",
        "row_threads",
        "idle_engine",
        "random_load",
        "side_job",
        "http_load",
        "http_faults",
    ),
    *("batch_files", "queues", "calls", "ray_bench"),
)
_FOLDER = "cbatch.bench.experiments"
_TOOLS = ("step_costs", "simulate", "simulate_nodes")

CASES = (*_EXPERIMENTS, *_TOOLS)
"""Modules, each of which runs as `python -m cbatch.bench.experiments.NAME`, too; tools as `cbatch.bench.NAME`."""


def present() -> tuple[str, ...]:
    """Return the cases that can run: without a checkout or a source distribution, the tools alone."""
    return _TOOLS if find_spec(_FOLDER) is None else CASES


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
    if name not in CASES:
        raise ConfigError(f"unknown case {name!r}; known are {', '.join(CASES)}")
    if name not in present():
        raise ConfigError(
            f"case {name} is only in a checkout of cbatch, not in the installed package; how to set one up: "
            "docs/understand/contributing.md"
        )
    _module(name).main(list(words))
