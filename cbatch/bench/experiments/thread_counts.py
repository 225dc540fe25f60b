"""How many threads decode fastest, by rows: `python -m cbatch.bench.experiments.thread_counts MODEL`.

A line has tokens a second of decoding with one thread, with all of them, and with as many as the engine finds best: in
its first second, and after that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from cbatch.backend.host_limits import available_cores
from cbatch.bench.experiments.rounds import CHAIN, median, parser
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.engine import Engine
from cbatch.loading import load
from cbatch.messages import BatchPrompt


def rate(engine: Engine, n_rows: int, n_tokens: int, seconds: float) -> float:
    """Return the tokens a second of jobs that take so many seconds."""
    prompts = [BatchPrompt(tokens=[FIRST_TOKEN + i]) for i in range(4 * n_rows)]
    start, n_before = time.perf_counter(), engine.stats().n_output_tokens
    while time.perf_counter() - start < seconds:
        engine.run(prompts, options={**CHAIN, "max_tokens": n_tokens, "seed": 1}).results()
    return (engine.stats().n_output_tokens - n_before) / (time.perf_counter() - start)


def main(words: Sequence[str] | None = None) -> None:
    """Print a JSON line for each number of rows."""
    asked = parser(__doc__, model="the shipped one", n_rounds=2)
    asked.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of a step")
    asked.add_argument("--tokens", type=int, default=128, help="of each answer")
    asked.add_argument("--seconds", type=float, default=1.0, help="of each of four measurements")
    a = asked.parse_args(words)
    for n_rows in a.rows:
        found: dict[str, list[float]] = {}
        for _ in range(a.rounds):
            for name, n_threads in (("one", 1), ("all", available_cores()), ("chosen", None)):
                sizes = {"parallel": n_rows, "ctx_per_seq": a.tokens + 64}
                with load(a.model, n_threads=n_threads, speculate="off", **sizes) as engine:
                    first, *later = (rate(engine, n_rows, a.tokens, a.seconds) for _ in range(4))
                found.setdefault(name, []).append(median(later, 0))
                if n_threads is None:
                    found.setdefault("at first", []).append(first)
        emit(rows=n_rows, **{name: [round(tps) for tps in rates] for name, rates in found.items()})


if __name__ == "__main__":
    main()
