"""Continuous against static batches of equal prompts: `python -m cbatch.bench.experiments.static_batches MODEL`.

Both have the same engine and slots. First all requests wait from the beginning on, and the rates are compared. Then
both get the same arrivals by chance, at a share of the rate that static batches keep up with, and the times to the
first token are compared: with those of a static batch that shows its own first token, and with those of one that
answers at its end, as most do.
"""

from __future__ import annotations

import statistics
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cbatch.bench.harness import emit, median, parser, ratios
from cbatch.bench.measured import Figures
from cbatch.bench.model_text import model_text
from cbatch.bench.pacing import Pace
from cbatch.bench.sides import ProcessSide, SideError
from cbatch.bench.verdict import problems
from cbatch.bench.workloads import workload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.bench.exact_text import ExactText
    from cbatch.bench.measured import Chains

SIDES = ("engine", "static")


@dataclass(frozen=True, slots=True)
class BatchTurn:
    """What one side needed: tokens a second, and the mean milliseconds to the first token and to the end."""

    tps: float
    ttft_ms: float
    end_ms: float
    rps: float


def measure(side: ProcessSide, chains: Chains, pace: Pace, n_rows: int) -> BatchTurn:
    """Have a side answer all requests. Raises `SideError` where the answers are no answers."""
    answers, seconds = side.run(chains, pace, n_rows, is_streamed=True)
    requests = [request for chain in chains for request in chain]
    if found := problems(requests, answers):
        raise SideError(f"{side.name}: {found[0]}")
    figures = Figures.of(requests, answers, seconds)
    first_s = (a.first_s - a.sent_s for a in answers if a.first_s is not None)
    end_s = (a.end_s - a.sent_s for a in answers)
    return BatchTurn(
        figures.output_tps,
        1e3 * statistics.fmean(first_s),
        1e3 * statistics.fmean(end_s),
        figures.rps,
    )


def compare(
    sides: Sequence[ProcessSide], text: ExactText, sizes: BatchSizes, n_rows: int, n_rounds: int
) -> dict[str, float]:
    """Let both sides answer the same requests in turn; return medians, static over continuous for the first token."""
    workload = workload_of("decode", own=(sizes.prompt,) * 2, output=(sizes.output,) * 2)

    def turn(
        seed: str, pace: Callable[[int], Pace], *, is_backwards: bool
    ) -> tuple[BatchTurn, BatchTurn]:
        """Let both answer requests that no side has seen."""
        chains = workload.chains(text, sizes.requests * n_rows, f"{n_rows} {seed}")
        order = sides[::-1] if is_backwards else sides
        found = {side.name: measure(side, chains, pace(len(chains)), n_rows) for side in order}
        return found["engine"], found["static"]

    waiting: list[tuple[BatchTurn, BatchTurn]] = []
    coming: list[tuple[BatchTurn, BatchTurn]] = []
    turn("warm-up", lambda n: Pace(n_rows), is_backwards=False)
    for i in range(n_rounds):
        waiting.append(turn(f"{i} waiting", lambda n: Pace(n_rows), is_backwards=i % 2 == 1))
        pace = partial(Pace.poisson, sizes.load * waiting[-1][1].rps, seed=i)
        coming.append(turn(f"{i} coming", pace, is_backwards=i % 2 == 1))
    return {
        "engine_tps": median((ours.tps for ours, _ in waiting), 1),
        "static_tps": median((theirs.tps for _, theirs in waiting), 1),
        **ratios(((ours.tps, theirs.tps) for ours, theirs in waiting), "engine_over_static"),
        "engine_ttft_ms": median((ours.ttft_ms for ours, _ in coming), 1),
        "static_ttft_ms": median((theirs.ttft_ms for _, theirs in coming), 1),
        "static_end_ms": median((theirs.end_ms for _, theirs in coming), 1),
        "sooner_than_its_end": median((theirs.end_ms / ours.ttft_ms for ours, theirs in coming), 2),
        "times_sooner": median((theirs.ttft_ms / ours.ttft_ms for ours, theirs in coming), 2),
    }


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Tokens of each prompt and answer, requests for each row, and the share of static batches' rate that comes."""

    prompt: int
    output: int
    requests: int
    load: float


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of rows."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="of a batch")
    asked.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    asked.add_argument("--output", type=int, default=64, help="tokens of each answer")
    asked.add_argument("--requests", type=int, default=16, help="for each row")
    asked.add_argument("--load", type=float, default=0.7, help="share of the rate that comes")
    a = asked.parse_args(words)
    sizes = BatchSizes(a.prompt, a.output, a.requests, a.load)
    with model_text(a.model) as text:
        for n_rows in a.rows:
            settings = {"parallel": n_rows, "ctx_per_seq": a.prompt + a.output + 8}
            engine, static = (ProcessSide(kind, a.model, settings) for kind in SIDES)
            with closing(engine), closing(static):
                found = compare((engine, static), text.exact, sizes, n_rows, a.rounds)
            emit(rows=n_rows, prompt=a.prompt, output=a.output, rounds=a.rounds, **found)


if __name__ == "__main__":
    main()
