"""Actors of Ray against worker processes: `python -m cbatch.integrations.ray_bench --model MODEL --rows 2000`.

The same rows are answered by `cbatch run --replicas N` and by N actors with as many threads each, in turn. Ray
is started here. Rates count from the first answers on: processes have started and models are loaded by then.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from cbatch.backend.host_limits import available_cores
from cbatch.files.file_run import run_file
from cbatch.files.input.columnar import import_pyarrow
from cbatch.integrations.ray import answer
from cbatch.integrations.ray_cluster import import_ray

if TYPE_CHECKING:
    from collections.abc import Sequence


class Arrivals:
    """When answers came, and how many at a time."""

    def __init__(self) -> None:
        self._came: list[tuple[float, int]] = []

    def add(self, n: int) -> None:
        """Note that `n` answers came now."""
        self._came.append((time.perf_counter(), n))

    @property
    def per_second(self) -> float:
        """Answers after the first ones, a second."""
        (first_s, _), *later = self._came
        return sum(n for _, n in later) / (later[-1][0] - first_s)


def by_replicas(path: Path, folder: Path, n: int, parallel: int, **settings: Any) -> float:
    """Return the rows per second of a run over files in `n` worker processes."""
    arrivals = Arrivals()
    run_file(
        str(path),
        folder / f"{time.time_ns()}.parquet",
        replicas=n,
        parallel=n * parallel,
        on_result=lambda item, result: arrivals.add(1),
        **settings,
    )
    return arrivals.per_second


def by_actors(path: Path, n: int, n_threads: int, **settings: Any) -> float:
    """Return the rows per second of `n` actors."""
    arrivals = Arrivals()
    dataset = import_ray().data.read_parquet(str(path))
    answers = answer(dataset, n_actors=n, n_cpus=n_threads, **settings)
    for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
        arrivals.add(batch.num_rows)
    return arrivals.per_second


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each round, and the median ratio at the end."""
    asked = ArgumentParser(description=__doc__)
    asked.add_argument("--model", help="a GGUF file; default: the one that ships inside")
    asked.add_argument("--rows", type=int, default=2000)
    asked.add_argument("--processes", type=int, default=2, help="workers, and actors")
    asked.add_argument("--parallel", type=int, default=16, help="slots of each")
    asked.add_argument("--tokens", type=int, default=32, help="of each answer")
    asked.add_argument("--rounds", type=int, default=3)
    a = asked.parse_args(words)
    ray, pyarrow = import_ray(), import_pyarrow()
    n_threads = max(1, available_cores() // a.processes)
    ray.init(num_cpus=a.processes * n_threads + 1, include_dashboard=False, logging_level="warning")
    ray.data.DataContext.get_current().enable_progress_bars = False
    options = {"max_tokens": a.tokens, "ignore_eos": True, "temperature": 0}
    settings = {"model": a.model, "options": options, "parallel": a.parallel, "ctx_per_seq": 512}
    ratios = []
    with TemporaryDirectory() as name:
        path = Path(name) / "in.parquet"
        prompts = [f"Tell me about the number {i}." for i in range(a.rows)]
        pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts}), path)
        for _ in range(a.rounds):
            replicas = by_replicas(path, Path(name), a.processes, **settings)
            actors = by_actors(path, a.processes, n_threads, **settings)
            ratios.append(actors / replicas)
            _emit(replicas=round(replicas, 1), actors=round(actors, 1), ratio=round(ratios[-1], 3))
    _emit(median=round(sorted(ratios)[len(ratios) // 2], 3), rows=a.rows, processes=a.processes)


def _emit(**found: Any) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
