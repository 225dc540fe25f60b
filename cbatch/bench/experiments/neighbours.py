"""What other programs on the same cores cost: `python -m cbatch.bench.experiments.neighbours MODEL`.

OpenMP's threads wait for each other thousands of times a step. How long they spin before they sleep decides the rate
while another program has a core. Each setting runs in a process of its own, because the runtime reads it once, at the
same time as a number of endless loops. The settings take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbatch.backend.bindings import POLICIES
from cbatch.bench.harness import CHAIN, command_again, emit, median, parser, show
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "runtime's own": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "100": {"GOMP_SPINCOUNT": "100"},
    "1000": {"GOMP_SPINCOUNT": "1000"},
    "30000": {"GOMP_SPINCOUNT": "30000"},
    "cbatch": {},
}
"""Settings by name, with their environment; 300,000 is libgomp's own default, and cbatch changes how it waits."""


def rate(model: str, n_slots: int, n_steps: int, n_threads: int | None) -> float:
    """Return tokens per second of decoding `n_slots` rows, after a warm-up."""
    prompts = [BatchPrompt(tokens=[1 + i]) for i in range(n_slots)]
    with load(model, parallel=n_slots, ctx_per_seq=n_steps + 8, n_threads=n_threads) as engine:
        engine.run(prompts, options={**CHAIN, "max_tokens": 8}).results()
        engine.reset_stats()
        results = engine.run(prompts, options={**CHAIN, "max_tokens": n_steps}).results()
        return engine.stats().n_output_tokens / max(r.timings.total_s for r in results)


@contextmanager
def busy_loops(n_loops: int) -> Iterator[None]:
    """Run this number of programs during the block, each of which keeps one thread busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def rate_beside(arguments: argparse.Namespace, setting: str, n_loops: int) -> float:
    """Return the rate in a process of its own with one setting, while `n_loops` programs run."""
    environment = {k: v for k, v in os.environ.items() if k not in POLICIES}
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("slots", "steps")]
    if arguments.threads is not None:
        sizes.append(f"--threads={arguments.threads}")
    with busy_loops(n_loops):
        done = subprocess.run(
            command_again(__file__, arguments.model, "--alone", *sizes),
            env={**environment, **SETTINGS[setting]},
            stdout=subprocess.PIPE,
            check=True,
        )
    return float(json.loads(done.stdout))


def compare(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield, for each number of other programs, all rates of all settings and their medians."""
    for n_loops in arguments.loops:
        rates: dict[str, list[float]] = {name: [] for name in arguments.settings}
        for _ in range(arguments.rounds):
            for name in rates:
                rates[name].append(round(rate_beside(arguments, name, n_loops), 1))
        medians = {name: round(median(found)) for name, found in rates.items()}
        yield {"beside": n_loops, "median_tps": medians, "tps": rates}


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of other programs."""
    asked = parser(__doc__)
    asked.add_argument("--slots", type=int, default=16, help="rows of a step")
    asked.add_argument("--steps", type=int, default=128, help="tokens a row")
    asked.add_argument("--threads", type=int, help="threads of the engine; its default without")
    asked.add_argument("--loops", type=int, nargs="+", default=[0, 1, 2], help="other programs")
    asked.add_argument("--rounds", type=int, default=3, help="turns of each setting")
    asked.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="which to compare"
    )
    asked.add_argument("--alone", action="store_true", help="print one rate as it is here")
    arguments = asked.parse_args(words)
    if arguments.alone:
        found = rate(arguments.model, arguments.slots, arguments.steps, arguments.threads)
        show(json.dumps(found))
        return
    for row in compare(arguments):
        emit(**row)


if __name__ == "__main__":
    main()
