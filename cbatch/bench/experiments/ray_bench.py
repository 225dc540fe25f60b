"""What Ray itself takes for answers: `python -m cbatch.bench.experiments.ray_bench --rows 20000`.

Actors answer at once, without an engine: the work of Ray and of its driver for each batch of rows is left. Ray is
started here. Rates count from the first answers on: processes have started by then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from cbatch.backend.host_limits import available_cores
from cbatch.bench.experiments.rounds import parser
from cbatch.bench.harness import emit
from cbatch.files.input.columnar import import_pyarrow
from cbatch.integrations import ray as integration
from cbatch.integrations.ray_cluster import import_ray


class AnswerTimes:
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


class Idle:
    """Answers at once, without an engine: what is left is Ray's own work."""

    def __init__(self, spec: Any, **rows: Any) -> None:
        """Load nothing."""

    def __call__(self, table: Any) -> Any:
        """Return the columns of answers of 128 characters."""
        n = table.num_rows
        numbers = import_pyarrow().array([64] * n)
        answers = {"response": ["x" * 128] * n, "finish_reason": ["stop"] * n, "error": [""] * n}
        for name, values in answers.items():
            table = table.append_column(name, [values])
        for name in ("prompt_tokens", "completion_tokens"):
            table = table.append_column(name, numbers)
        return table


def of_driver(path: Path, n: int, n_threads: int) -> dict[str, float]:
    """Return what `n` actors that do not compute leave: the driver's and Ray's own work for each batch of rows."""
    dataset = import_ray().data.read_parquet(str(path))
    with patch.object(integration, "Answers", Idle):
        answers = integration.answer(dataset, n_actors=n, n_cpus=n_threads)
    arrivals, n_bytes, n_rows, n_batches, first_cpu_s = AnswerTimes(), 0, 0, 0, 0.0
    for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
        arrivals.add(batch.num_rows)
        first_cpu_s = first_cpu_s or time.process_time()
        n_bytes, n_rows, n_batches = n_bytes + batch.nbytes, n_rows + batch.num_rows, n_batches + 1
    cpu_s = time.process_time() - first_cpu_s
    return {
        "batches": n_batches,
        "rows_per_s": round(arrivals.per_second, 1),
        "driver_cpu_ms_per_batch": round(1000 * cpu_s / n_batches, 2),
        "bytes_per_row": round(n_bytes / n_rows, 1),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each round."""
    asked = parser(__doc__, model=None, n_rounds=3)
    asked.add_argument("--rows", type=int, default=2000)
    asked.add_argument("--processes", type=int, default=2, help="actors")
    a = asked.parse_args(words)
    ray, pyarrow = import_ray(), import_pyarrow()
    n_threads = max(1, available_cores() // a.processes)
    ray.init(num_cpus=a.processes * n_threads + 1, include_dashboard=False, logging_level="warning")
    ray.data.DataContext.get_current().enable_progress_bars = False
    with TemporaryDirectory() as name:
        path = Path(name) / "in.parquet"
        prompts = [f"Tell me about the number {i}." for i in range(a.rows)]
        pyarrow.parquet.write_table(pyarrow.table({"n": range(a.rows), "prompt": prompts}), path)
        for _ in range(a.rounds):
            emit(**of_driver(path, a.processes, n_threads))


if __name__ == "__main__":
    main()
