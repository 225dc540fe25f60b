"""An engine beside programs that come and go: `python -m cbatch.bench.experiments.random_load MODEL`.

The same requests are answered again and again while a random number of programs, each of which keeps one thread busy,
begin and end at random times. Printed are the longest step, the rate, and how many answers differ from the first.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cbatch.bench.experiments.rounds import beside, median, parser
from cbatch.bench.harness import FIRST_TOKEN, emit, percentile
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from cbatch.engine import Engine
    from cbatch.runtime.step_record import StepRecord

N_LOOPS = 4
"""Most programs at once."""

LONGEST_S = 3.0
"""Most seconds between two changes of their number."""


@contextmanager
def random_loops(drawn: random.Random) -> Iterator[list[int]]:
    """Run 0 … `N_LOOPS` programs during the block, another number every few seconds; yield the numbers so far."""
    counts: list[int] = []

    def change(is_over: threading.Event) -> None:
        loops: list[subprocess.Popen[bytes]] = []
        while not is_over.is_set():
            counts.append(drawn.randrange(N_LOOPS + 1))
            while len(loops) < counts[-1]:
                loops.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            _end(loops[counts[-1] :])
            del loops[counts[-1] :]
            is_over.wait(drawn.uniform(0.1, LONGEST_S))
        _end(loops)

    with beside(change):
        yield counts


def _end(loops: Sequence[subprocess.Popen[bytes]]) -> None:
    for loop in loops:
        loop.kill()
        loop.wait()


def prompts(n: int, drawn: random.Random) -> list[BatchPrompt]:
    """Return prompts of 8 to 400 tokens with answers of 8 to 128."""
    return [
        BatchPrompt(
            tokens=[FIRST_TOKEN + drawn.randrange(200) for _ in range(drawn.randrange(8, 400))],
            options={"max_tokens": drawn.randrange(8, 128), "temperature": 0, "ignore_eos": True},
        )
        for _ in range(n)
    ]


def answers(engine: Engine, asked: Sequence[BatchPrompt]) -> list[Sequence[int]]:
    """Return the tokens of all answers, in order."""
    return [result.token_ids for result in engine.run(asked, streamed=True).results()]


def step_times(record: StepRecord) -> list[float]:
    """Return the seconds of a run's first step, and the mean of its others."""
    later_s = record.decode_s + record.sample_s - record.first_s
    return [record.first_s, *([later_s / (record.n_steps - 1)] if record.n_steps > 1 else [])]


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line."""
    asked = parser(__doc__)
    asked.add_argument("--seconds", type=float, default=240.0)
    asked.add_argument("--requests", type=int, default=48, help="that are repeated")
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--exact", action="store_true", help="load with exact=True")
    a = asked.parse_args(words)
    drawn = random.Random(a.seed)
    job = prompts(a.requests, drawn)
    records: list[StepRecord] = []
    settings: dict[str, Any] = {"exact": True} if a.exact else {}
    with load(a.model, parallel=16, ctx_per_seq=768, **settings) as engine:
        first = answers(engine, job)
        engine.record_steps(records.append)
        engine.reset_stats()
        n_rounds = n_differ = 0
        threads: set[int] = set()
        start_s = time.perf_counter()
        with random_loops(drawn) as counts:
            while time.perf_counter() - start_s < a.seconds:
                found = answers(engine, job)
                n_rounds += 1
                n_differ += sum(one != other for one, other in zip(found, first, strict=True))
                threads.add(engine.stats().n_threads)
        seconds = time.perf_counter() - start_s
        steps_s = [s for record in records for s in step_times(record)]
        emit(
            rounds=n_rounds,
            answers=n_rounds * len(job),
            differ=n_differ,
            changes_of_load=len(counts),
            threads=sorted(threads),
            steps=sum(record.n_steps for record in records),
            longest_step_s=round(max(steps_s), 3),
            p99_step_s=round(percentile(steps_s, 0.99), 4),
            median_step_s=median(steps_s, 4),
            tps=round(engine.stats().n_output_tokens / seconds, 1),
        )


if __name__ == "__main__":
    main()
