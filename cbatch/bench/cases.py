"""The benchmarks of one question each, by name: `cbatch bench --list` names them, `--case` runs one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

CASES = (
    *("static_batches", "staggered", "steps", "streaming", "shared_prefix", "prompts_first"),
    *("short_sequences", "narrow_steps", "exact_price", "prompt_lengths"),
    *(
        "stall",
        "samplers",
        "constraints",
        "prompt_scores",
        "continuations",
        "equal_rows",
        "replicas",
        "neighbours",
        "http_load",
        "http_faults",
    ),
    *("batch_files", "queues", "calls", "step_costs", "simulate", "simulate_nodes"),
)
"""Modules of `cbatch.bench`, each of which runs as `python -m cbatch.bench.NAME`, too."""


def told(name: str) -> str:
    """Return one line on a case: the first sentence of its module, without the command."""
    doc = importlib.import_module(f"cbatch.bench.{name}").__doc__ or ""
    return doc.partition("\n")[0].partition(": `python")[0].rstrip(".")


def run_case(name: str, words: Sequence[str]) -> None:
    """Run a case with the arguments of its command line; it prints what it finds, as JSON lines or a table.

    Raises:
        ConfigError: there is no such case.
    """
    if name not in CASES:
        raise ConfigError(f"unknown case {name!r}; known are {', '.join(CASES)}")
    importlib.import_module(f"cbatch.bench.{name}").main(list(words))
