"""What an engine finds that its steps cost, after a short job that shows it steps of many shapes."""

from __future__ import annotations

from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from cbatch.backend.host_limits import available_cores
from cbatch.bench.harness import FIRST_TOKEN
from cbatch.errors import ConfigError
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from cbatch.engine import Engine
    from cbatch.stats import EngineStats

N_DECODED = 16
"""Tokens of each answer while a width is measured, of which the engine keeps the newest few. Our choice."""

CHUNKS = (16, 64, 256, 32, 128, 512)
"""Tokens of prompts that join decoding rows. Our choice: few and many in turn."""

N_PASSES = 3
"""How often prompts of each size join. Our choice: up to half of a size's steps may be slow for other reasons."""

_GREEDY = {"temperature": 0, "ignore_eos": True}


def fitted_costs(
    model: str | os.PathLike[str] | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Load a model, show its engine steps of many shapes, and return what they cost, as JSON values; see `told`.

    `cpu_share` is CPU time over wall time and threads: less than about 0.7 if other programs computed, too.

    Raises:
        ModelLoadError, IncompatibleLlamaError, ConfigError: see `cbatch.load`.
    """
    n_cores = available_cores()
    n_threads = min(settings.get("n_threads") or n_cores, n_cores)
    plain = {name: value for name, value in settings.items() if name != "draft"}
    plain |= {"threaded": False, "share_prefixes": False, "speculate": "off"}
    with load(model, **plain) as engine:
        start_s, start_cpu_s = perf_counter(), process_time()
        show_steps(engine)
        wall_s, cpu_s = perf_counter() - start_s, process_time() - start_cpu_s
        return {**told(engine.stats()), "cpu_share": round(cpu_s / wall_s / n_threads, 3)}


def show_steps(engine: Engine) -> None:
    """Have an engine decode in steps of 1, 2, 4 … rows, and compute prompts of many sizes beside half of its slots.

    Args:
        engine: loaded with `threaded=False`; prompts are not shared.

    Raises:
        ConfigError: a slot is too small for it.
    """
    n_most = engine.n_window - N_DECODED - 2
    if n_most < CHUNKS[0]:
        raise ConfigError(
            f"a slot of {engine.n_window} tokens is too small to measure costs: raise --ctx-per-seq"
        )
    n_slots = engine.parallel
    widths = sorted({min(2**i, n_slots) for i in range(n_slots.bit_length() + 1)})
    for n_rows in widths:
        rows = [BatchPrompt(tokens=[FIRST_TOKEN + i]) for i in range(n_rows)]
        engine.run(rows, options={**_GREEDY, "max_tokens": N_DECODED}).results()
    n_beside = n_slots // 2
    for n in CHUNKS * N_PASSES:
        lengths = [1] * n_beside + [min(n, n_most)]
        prompts = [BatchPrompt(tokens=[FIRST_TOKEN] * length) for length in lengths]
        _join(engine, prompts)


def _join(engine: Engine, prompts: list[BatchPrompt]) -> None:
    """Have the last prompt join the others once these decode."""
    *rows, newcomer = prompts
    if rows:
        engine.run(rows, options={**_GREEDY, "max_tokens": engine.n_window - 1})
        engine.step()
    engine.submit(newcomer, options={**_GREEDY, "max_tokens": 1}).results()
    engine.cancel_all()
    while engine.step():
        pass


def told(stats: EngineStats) -> dict[str, Any]:
    """Return costs in seconds and what follows from them, as JSON values.

    `rows_s` is a step that only decodes, by its rows; `prompt_s` what a step with prompts takes more, however many
    tokens they have, `token_s` each of their tokens, and `cell_s` each token and cell before it; `budget_tokens` how
    many of them join decoding rows that are read as they come, by the rows; `width` the rows with which most tokens are
    decoded in a second.
    """
    rows_s = stats.cost_rows_s
    return {
        "rows_s": rows_s,
        "prompt_s": stats.cost_prompt_s,
        "token_s": stats.cost_token_s,
        "cell_s": stats.cost_cell_s,
        "budget_tokens": stats.cost_budget_tokens,
        "width": max(map(int, rows_s), key=lambda n: n / rows_s[str(n)], default=None),
    }
