"""How close the engine comes to the bare decode loop: `python -m cbatch.bench.experiments.steps MODEL`.

Both run in turn with the same settings. The engine samples with top-k 40, top-p 0.95 at temperature 0.8; the loop does
not sample at all.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cbatch.bench.experiments.rounds import CHAIN, in_model, median, parser, ratios, take_turns
from cbatch.bench.harness import emit
from cbatch.engine_options import EngineOptions
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel


@dataclass(frozen=True, slots=True)
class StepTurn:
    """One turn: tokens per second, and where the engine's milliseconds a step went."""

    tps: float
    ms_step: float = 0.0
    ms_decode: float = 0.0
    ms_sample: float = 0.0

    @property
    def ms_outside(self) -> float:
        """Milliseconds a step outside llama.cpp and sampling."""
        return self.ms_step - self.ms_decode - self.ms_sample


def run_engine(path: str, n_rows: int, n_steps: int) -> StepTurn:
    """Decode `n_steps` tokens of each row with an engine."""
    prompts = [BatchPrompt(tokens=[1 + i]) for i in range(n_rows)]
    with load(path, parallel=n_rows, ctx_per_seq=n_steps + 8) as engine:
        results = engine.run(prompts, options={**CHAIN, "max_tokens": n_steps}).results()
        stats = engine.stats()
    engine_s = max(r.timings.total_s for r in results)
    ms = 1e3 / stats.n_steps
    return StepTurn(
        stats.n_output_tokens / engine_s, ms * engine_s, ms * stats.decode_s, ms * stats.sample_s
    )


def run_bare(path: str, n_rows: int, n_steps: int) -> StepTurn:
    """Decode `n_steps` tokens of each row with the bare loop."""
    from cbatch.bench.bare import BareLoop  # llama_cpp is slow to import

    options = EngineOptions(parallel=n_rows, ctx_per_seq=n_steps + 8)

    def run(model: LlamaModel) -> float:
        with closing(BareLoop(model, options)) as loop:
            return loop.decode(n_steps)

    return StepTurn(n_rows * n_steps / in_model(path, run))


def compare(path: str, n_rows: int, n_steps: int, n_rounds: int) -> dict[str, float]:
    """Return medians of turns of both."""
    ways = (partial(run, path, n_rows, n_steps) for run in (run_bare, run_engine))
    rounds = [(bare, engine) for bare, engine in take_turns(n_rounds, *ways)]
    engines = [engine for _, engine in rounds]
    return {
        "bare_tps": median((bare.tps for bare, _ in rounds), 1),
        "engine_tps": median((e.tps for e in engines), 1),
        **ratios(((engine.tps, bare.tps) for bare, engine in rounds), "engine_over_bare"),
        "ms_step": median(e.ms_step for e in engines),
        "ms_decode": median(e.ms_decode for e in engines),
        "ms_sample": median(e.ms_sample for e in engines),
        "ms_outside": median(e.ms_outside for e in engines),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of rows."""
    asked = parser(__doc__, n_rounds=5)
    asked.add_argument("--rows", type=int, nargs="+", default=[16], help="widths to try")
    asked.add_argument("--steps", type=int, default=128, help="tokens a row")
    a = asked.parse_args(words)
    for n_rows in a.rows:
        emit(rows=n_rows, **compare(a.model, n_rows, a.steps, a.rounds))


if __name__ == "__main__":
    main()
