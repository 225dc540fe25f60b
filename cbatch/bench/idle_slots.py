"""What pad rows bring where some slots are idle: `python -m cbatch.bench.idle_slots MODEL`.

So many requests decode in 16 slots, where a step may be filled with rows of the idle ones, and in turn in as many slots
as there are requests, where none is idle. Both run in processes of their own.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from cbatch.bench.harness import emit, median, parser, ratios, take_turns
from cbatch.bench.model_text import model_text
from cbatch.bench.pacing import Pace
from cbatch.bench.sides import ProcessSide, SideError
from cbatch.bench.verdict import problems
from cbatch.bench.workloads import workload_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.bench.measured import Chains


def _tps(side: ProcessSide, chains: Chains) -> float:
    answers, _ = side.run(chains, Pace(len(chains)), 1, is_streamed=False)
    if found := problems([request for chain in chains for request in chain], answers):
        raise SideError(f"{side.name}: {found[0]}")
    seconds = max(a.end_s for a in answers) - min(a.sent_s for a in answers)
    return sum(a.n_output for a in answers) / seconds


def main(words: Sequence[str] | None = None) -> None:
    """Print a JSON line for each number of requests."""
    asked = parser(__doc__, n_rounds=5)
    asked.add_argument("--rows", type=int, nargs="+", default=[5, 6, 7, 9, 13, 14, 15])
    asked.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    asked.add_argument("--output", type=int, default=96, help="tokens of each answer")
    asked.add_argument("--parallel", type=int, default=16, help="slots")
    a = asked.parse_args(words)
    workload = workload_of("decode", own=(a.prompt,) * 2, output=(a.output,) * 2)
    settings = {"parallel": a.parallel, "ctx_per_seq": a.prompt + a.output + 8}
    with model_text(a.model) as text, closing(ProcessSide("engine", a.model, settings)) as many:
        for n_rows in a.rows:
            own = {**settings, "parallel": n_rows}
            chains = workload.chains(text.exact, n_rows, str(n_rows))
            with closing(ProcessSide("engine", a.model, own)) as full:
                ways = (partial(_tps, side, chains) for side in (many, full))
                rounds = [(idle, none) for idle, none in take_turns(a.rounds, *ways)]
            emit(
                rows=n_rows,
                tps=median((idle for idle, _ in rounds), 1),
                tps_without_idle_slots=median((none for _, none in rounds), 1),
                **ratios(rounds),
            )


if __name__ == "__main__":
    main()
