"""What `dedupe=True` saves: `python -m cbatch.bench.experiments.equal_rows MODEL`.

The same prompts, of which a share equals others, with `dedupe` and without, in turn on one engine.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING

from cbatch.bench.harness import emit, median, parser, ratios, take_turns
from cbatch.loading import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.engine import Engine


def prompts_of(n: int, share: float, seed: int = 1) -> list[str]:
    """Return `n` prompts in any order, of which `share` equal one of the others."""
    n_apart = max(1, round(n * (1 - share)))
    texts = [f"Tell me about the number {i % n_apart}." for i in range(n)]
    random.Random(seed).shuffle(texts)
    return texts


def _seconds(engine: Engine, prompts: Sequence[str], n_tokens: int, *, dedupe: bool) -> float:
    options = {"temperature": 0, "max_tokens": n_tokens, "ignore_eos": True}
    start = time.perf_counter()
    engine.run(prompts, options=options, dedupe=dedupe).results()
    return time.perf_counter() - start


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("--rows", type=int, default=400)
    asked.add_argument("--share", type=float, default=0.5, help="of the rows, equal to others")
    asked.add_argument("--tokens", type=int, default=32, help="of each answer")
    asked.add_argument("--slots", type=int, default=16, help="requests at once")
    a = asked.parse_args(words)
    prompts = prompts_of(a.rows, a.share)
    with load(a.model, parallel=a.slots, ctx_per_seq=512) as engine:
        ways = [
            partial(_seconds, engine, prompts, a.tokens, dedupe=dedupe) for dedupe in (True, False)
        ]
        rounds = take_turns(a.rounds, *ways)
    emit(
        rows=a.rows,
        share=a.share,
        dedupe_s=median(once for once, _ in rounds),
        all_s=median(each for _, each in rounds),
        **ratios((once, each) for once, each in rounds),
    )


if __name__ == "__main__":
    main()
