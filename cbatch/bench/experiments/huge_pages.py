"""What huge pages of memory are worth: `python -m cbatch.bench.experiments.huge_pages MODEL`.

Engines on one model take turns. The system refused huge pages while every second one was loaded. A line has a workload,
the seconds of each engine, and the ratio of the means. Engines of the same kind differ, too, by where in memory their
pages happen to lie: so there are several.
"""

from __future__ import annotations

import ctypes
import random
import time
from contextlib import ExitStack
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING

from cbatch.bench.experiments.rounds import median, parser, take_turns
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.engine import Engine

_PR_SET_THP_DISABLE = 41
"""Source: Linux, include/uapi/linux/prctl.h."""

# (requests, tokens of each prompt, tokens of each answer)
WORKLOADS = {
    "decode 1": (1, 16, 60),
    "decode 8": (8, 16, 60),
    "decode 32": (32, 16, 48),
    "prompt": (1, 1500, 1),
    "long 4": (4, 1200, 40),
}


def job(engine: Engine, n: int, n_prompt: int, n_output: int) -> float:
    """Return the seconds of `n` requests with prompts that were never seen."""
    prompts = [
        BatchPrompt(tokens=[FIRST_TOKEN + random.randrange(200) for _ in range(n_prompt)])
        for _ in range(n)
    ]
    start = time.perf_counter()
    options = {"temperature": 0, "ignore_eos": True, "max_tokens": n_output}
    engine.run(prompts, options=options).results()
    return time.perf_counter() - start


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each workload."""
    asked = parser(__doc__, n_rounds=6)
    asked.add_argument("--pairs", type=int, default=2, help="engines of each kind")
    asked.add_argument("--share", type=float, default=1.0, help="of each answer's tokens")
    a = asked.parse_args(words)
    engines: list[Engine] = []
    with ExitStack() as stack:
        for i in range(2 * a.pairs):
            _refuse_huge_pages(is_refused=i % 2 == 0)
            engine = stack.enter_context(
                load(a.model, parallel=32, ctx_per_seq=2048, speculate="off")
            )
            for sizes in WORKLOADS.values():
                job(engine, *sizes[:2], 4)  # all of its memory is used once
            engines.append(engine)
        for name, (n, n_prompt, n_output) in WORKLOADS.items():
            sizes = n, n_prompt, max(1, round(n_output * a.share))
            rounds = take_turns(a.rounds, *[partial(job, e, *sizes) for e in engines])
            seconds = [median((r[i] for r in rounds), 4) for i in range(len(engines))]
            small, huge = seconds[::2], seconds[1::2]
            emit(workload=name, small=small, huge=huge, ratio=round(mean(small) / mean(huge), 3))


def _refuse_huge_pages(*, is_refused: bool) -> None:
    """Have the system give this process no huge pages from now on, or as it does by itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_THP_DISABLE, int(is_refused), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main()
