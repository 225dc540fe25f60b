"""What is left of the rate beside other programs: `python -m cbatch.bench.experiments.beside_loops MODEL`.

First the same job is done with threads that follow what other programs leave, and with a fixed number, in turn and
alone. Then programs that each keep one core busy begin and end beside a running job. Last, workloads of `cbatch bench`
are computed alone and beside such programs, with llama-server too where its program is given.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.backend.host_limits import available_cores
from cbatch.bench.experiments.rounds import CHAIN, busy_loops, parser, ratios, take_turns
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.loading import load
from cbatch.messages import BatchPrompt
from cbatch.support.processes import command_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from cbatch.engine import Engine

SAMPLE_S = 0.1
"""Seconds between two looks at a running job."""

N_OUTPUT = 200
"""Tokens of an answer of a running job: sequences do not grow as it goes on, and so no slower."""

RECOVERED = 0.9
"""Share of the rate alone from which on a job counts as recovered."""


def rate(model: str, n_slots: int, n_steps: int, n_threads: int | None) -> float:
    """Return tokens per second of decoding; `n_threads` None for as many as other programs leave."""
    with load(model, parallel=n_slots, ctx_per_seq=n_steps + 64, n_threads=n_threads) as engine:
        _decode(engine, n_slots, 32).results()
        engine.reset_stats()
        start_s = time.perf_counter()
        _decode(engine, n_slots, n_steps).results()
        return engine.stats().n_output_tokens / (time.perf_counter() - start_s)


def followed(
    model: str, n_slots: int, n_answers: int, n_loops: int, seconds: float
) -> dict[str, Any]:
    """Return rates of a job alone, beside loops and after them, each for so long; and when it had recovered.

    `n_answers` of each slot bound the job: it is cancelled at the end.
    """
    with load(model, parallel=n_slots, ctx_per_seq=N_OUTPUT + 64) as engine:
        response = _decode(engine, n_slots * n_answers, N_OUTPUT)
        _watched(engine, 0.5)
        alone = _watched(engine, seconds)
        with busy_loops(n_loops):
            beside = _watched(engine, seconds)
        after = _watched(engine, seconds)
        response.cancel()
        response.results(return_errors=True)
    usual = _mean(alone)
    back = [i for i, (tps, _) in enumerate(after) if tps >= RECOVERED * usual]
    return {
        "alone": round(usual),
        "beside": round(_mean(beside)),
        "share": round(_mean(beside) / usual, 3) if usual else None,
        "threads": sorted({n for _, n in beside}),
        "recovered_s": round((back[0] + 1) * SAMPLE_S, 1) if back else None,
        "threads_after": after[-1][1],
    }


def _decode(engine: Engine, n_answers: int, n_tokens: int) -> Any:
    prompts = [BatchPrompt(tokens=[FIRST_TOKEN + i % 200]) for i in range(n_answers)]
    return engine.run(prompts, options={**CHAIN, "seed": 1, "max_tokens": n_tokens})


def _watched(engine: Engine, seconds: float) -> list[tuple[float, int]]:
    """Return the rate of each tenth of a second, and the threads in its end."""
    seen: list[tuple[float, int]] = []
    end_s = time.perf_counter() + seconds
    last_s, n_last = time.perf_counter(), engine.stats().n_output_tokens
    while last_s < end_s:
        time.sleep(SAMPLE_S)
        stats, now = engine.stats(), time.perf_counter()
        seen.append(((stats.n_output_tokens - n_last) / (now - last_s), stats.n_threads))
        last_s, n_last = now, stats.n_output_tokens
    return seen


def _mean(seen: Sequence[tuple[float, int]]) -> float:
    return sum(tps for tps, _ in seen) / len(seen)


def benched(arguments: argparse.Namespace, n_loops: int) -> dict[str, dict[str, float]]:
    """Return the tokens per second of each side, by workload, beside so many loops."""
    with tempfile.TemporaryDirectory() as folder, busy_loops(n_loops):
        into = Path(folder, "figures.json")
        sizes = {"at-once": arguments.slots, "count": arguments.count, "rounds": arguments.rounds}
        words = [f"--{name}={value}" for name, value in sizes.items()]
        words += ["--sides=engine", f"--workload={arguments.workloads}", "--no-stream"]
        if arguments.llama_server:
            words.append(f"--llama-server={arguments.llama_server}")
        command = command_of("cbatch.__main__", "bench", arguments.model, *words, f"--json={into}")
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        rows = json.loads(into.read_text())["rows"]
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["workload"], {})[row["side"]] = row["output_tps"]["median"]
    return found


def shares(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield rates of workloads alone and beside loops, and what is left of them."""
    alone = benched(arguments, 0)
    for n_loops in arguments.loops:
        for workload, sides in (alone if n_loops == 0 else benched(arguments, n_loops)).items():
            left = {side: round(tps / alone[workload][side], 3) for side, tps in sides.items()}
            rounded = {side: round(tps, 1) for side, tps in sides.items()}
            yield {"workload": workload, "beside": n_loops, "tps": rounded, "of_alone": left}


def main(words: Sequence[str] | None = None) -> None:
    """Print JSON lines: the price alone, what is left and how soon it is back, and workloads."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("--slots", type=int, default=16, help="rows of a step")
    asked.add_argument("--steps", type=int, default=400, help="tokens a row, of the price alone")
    asked.add_argument("--seconds", type=float, default=3.0, help="of each part of a running job")
    asked.add_argument("--answers", type=int, default=200, help="of each slot, in a running job")
    asked.add_argument("--loops", type=int, nargs="+", default=[0, 1, 2], help="other programs")
    asked.add_argument("--workloads", default="decode,mixed", help="of `cbatch bench`; empty: none")
    asked.add_argument("--count", type=int, default=64, help="requests of a workload")
    asked.add_argument("--llama-server", metavar="PATH", help="compared in the same rounds")
    arguments = asked.parse_args(words)
    one = partial(rate, arguments.model, arguments.slots, arguments.steps)
    if arguments.rounds:
        rounds = take_turns(arguments.rounds, partial(one, None), partial(one, available_cores()))
        emit(price="alone, following over fixed", **ratios((a, b) for a, b in rounds))
    for n_loops in filter(None, arguments.loops):
        found = followed(
            arguments.model, arguments.slots, arguments.answers, n_loops, arguments.seconds
        )
        emit(loops=n_loops, **found)
    if arguments.workloads:
        for row in shares(arguments):
            emit(**row)


if __name__ == "__main__":
    main()
