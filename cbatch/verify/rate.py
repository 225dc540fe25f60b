"""How fast an engine answers."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.engine import Engine


def output_rate(engine: Engine, prompts: Sequence[Sequence[int]], n_output: int) -> float:
    """Return the output tokens a second of these prompts together, with `n_output` tokens each."""
    said = {"temperature": 0, "max_tokens": n_output, "ignore_eos": True}
    start_s = perf_counter()
    results = engine.run([BatchPrompt(tokens=t) for t in prompts], options=said).results()
    return sum(len(r.token_ids) for r in results) / (perf_counter() - start_s)
