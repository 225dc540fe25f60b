"""How close the engine comes to the bare decode loop: `python -m cbatch.bench.steps MODEL`.

Both run in turn on one model with the same settings, so their ratio holds on a noisy machine. The engine samples with
top-k 40, top-p 0.95 at temperature 0.8; the loop does not sample at all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cbatch.backend.llama.bare import BareLoop
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.log import llama_log
from cbatch.backend.load.open_model import open_model
from cbatch.backend.threads import run_aside
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel


_CHAIN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of both: tokens per second, and where the engine's milliseconds a step went."""

    bare_tps: float
    engine_tps: float
    ms_step: float
    ms_decode: float
    ms_sample: float

    @property
    def ms_outside(self) -> float:
        """Milliseconds a step outside llama.cpp and sampling."""
        return self.ms_step - self.ms_decode - self.ms_sample


def compare(model: LlamaModel, options: EngineOptions, n_steps: int, n_rounds: int) -> list[Round]:
    """Run the bare loop and the engine in turn, `n_steps` tokens a row each time; the first turn warms up.

    Each has a thread of its own while it runs, and is alone in the process then.
    """
    return [_round(model, options, n_steps) for _ in range(n_rounds + 1)][1:]


def _round(model: LlamaModel, options: EngineOptions, n_steps: int) -> Round:
    bare_s = run_aside(partial(_bare, model, options, n_steps))
    backend = run_aside(partial(LlamaBackend, model, options, owns_model=False))
    with Engine(backend) as engine:
        results = engine.run(
            _rows(options.n_slots), options={**_CHAIN, "max_tokens": n_steps}
        ).results()
        stats = engine.stats()
    engine_s = max(r.timings.total_s for r in results)
    return Round(
        options.n_slots * n_steps / bare_s,
        stats.n_output_tokens / engine_s,
        1e3 * engine_s / stats.n_steps,
        1e3 * stats.decode_s / stats.n_steps,
        1e3 * stats.sample_s / stats.n_steps,
    )


def _bare(model: LlamaModel, options: EngineOptions, n_steps: int) -> float:
    loop = BareLoop(model, options)
    try:
        return loop.run(n_steps)
    finally:
        loop.close()


def _rows(n_rows: int) -> list[BatchPrompt]:
    return [BatchPrompt(tokens=[1 + i]) for i in range(n_rows)]


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Return medians; the ratio is the median of each round's own ratio."""
    middle = statistics.median
    return {
        "bare_tps": round(middle(r.bare_tps for r in rounds), 1),
        "engine_tps": round(middle(r.engine_tps for r in rounds), 1),
        "engine_over_bare": round(middle(r.engine_tps / r.bare_tps for r in rounds), 4),
        "ms_step": round(middle(r.ms_step for r in rounds), 3),
        "ms_decode": round(middle(r.ms_decode for r in rounds), 3),
        "ms_sample": round(middle(r.ms_sample for r in rounds), 3),
        "ms_outside": round(middle(r.ms_outside for r in rounds), 3),
    }


def main() -> None:
    """Print one JSON line for each number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--rows", type=int, nargs="+", default=[16], help="widths to try")
    parser.add_argument("--steps", type=int, default=128, help="tokens a row")
    parser.add_argument("--rounds", type=int, default=5, help="turns after the warm-up")
    arguments = parser.parse_args()
    llama_log().install()
    model = open_model(arguments.model)
    for n_rows in arguments.rows:
        options = EngineOptions(parallel=n_rows, ctx_per_seq=arguments.steps + 8)
        found = summary(compare(model, options, arguments.steps, arguments.rounds))
        sys.stdout.write(json.dumps({"rows": n_rows, **found}) + "\n")
        sys.stdout.flush()
    model.close()
    llama_log().remove()


if __name__ == "__main__":
    main()
