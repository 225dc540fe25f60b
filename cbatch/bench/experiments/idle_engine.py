"""What an engine loses beside one that waits: `python -m cbatch.bench.experiments.idle_engine MODEL`.

A line has tokens a second of decoding in one engine: alone, once another is loaded in the same process, once that one
has answered, and once it is closed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cbatch.bench.experiments.rounds import CHAIN, median, parser
from cbatch.bench.harness import emit
from cbatch.engine import Engine
from cbatch.loading import load
from cbatch.messages import BatchPrompt

_WAIT_S = 0.2
"""Longer than an engine waits before its backend rests."""


def rate(engine: Engine, n_rows: int, n_tokens: int) -> float:
    """Return the tokens a second of so many requests of so many tokens, prompts included."""
    prompts = [BatchPrompt(prompt=f"Notes, number {i}:") for i in range(n_rows)]
    start = time.perf_counter()
    engine.run(prompts, options={**CHAIN, "max_tokens": n_tokens, "seed": 1}).results()
    return n_rows * n_tokens / (time.perf_counter() - start)


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line."""
    asked = parser(__doc__, model="the shipped one", n_rounds=5)
    asked.add_argument("--rows", type=int, default=8)
    asked.add_argument("--tokens", type=int, default=96, help="of each answer")
    asked.add_argument("--threads", type=int, help="of each engine")
    a = asked.parse_args(words)
    settings: dict[str, Any] = {"parallel": a.rows, "ctx_per_seq": a.tokens + 64}

    def middle() -> float:
        time.sleep(_WAIT_S)
        return median((rate(engine, a.rows, a.tokens) for _ in range(a.rounds)), 0)

    with load(a.model, n_threads=a.threads, **settings) as engine:
        rate(engine, a.rows, a.tokens)
        found = {"alone": middle()}
        with load(a.model, n_threads=a.threads, **settings) as other:
            found["loaded"] = middle()
            rate(other, a.rows, a.tokens)
            found["waits"] = middle()
        found["closed"] = middle()
    emit(rows=a.rows, **found)


if __name__ == "__main__":
    main()
