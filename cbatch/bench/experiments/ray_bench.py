"""Actors of Ray against worker processes: `python -m cbatch.bench.experiments.ray_bench --model MODEL --rows 2000`.

The same rows are answered by `cbatch run --replicas N` and by N actors with as many threads each, in turn. Ray
is started here. Rates count from the first answers on: processes have started and models are loaded by then.

`--driver` has actors that answer at once: the work of Ray and of its driver for each batch is left.

`--check` computes with `exact=True`, and compares answers and their log-probabilities with those of an engine in this
process. `--kill-every-s` kills an actor now and then. Either way each row must be there once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from cbatch.backend.host_limits import available_cores
from cbatch.files.file_run import run_file
from cbatch.files.frames import run_table
from cbatch.files.input.columnar import import_pyarrow
from cbatch.integrations import ray as integration
from cbatch.integrations.ray_cluster import import_ray
from cbatch.loading import load

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def by_replicas(path: Path, folder: Path, n: int, parallel: int, **settings: Any) -> float:
    """Return the rows per second of a run over files in `n` worker processes."""
    arrivals = AnswerTimes()
    run_file(
        str(path),
        folder / f"{time.time_ns()}.parquet",
        replicas=n,
        parallel=n * parallel,
        on_result=lambda item, result: arrivals.add(1),
        **settings,
    )
    return arrivals.per_second


class Counted(integration.Answers):
    """Answers with columns that say how much of the actor's slots was used so far."""

    def __call__(self, table: Any) -> Any:
        """Return the answers, with the counts of the actor's engine beside each."""
        answers, stats = super().__call__(table), self._engine.stats()
        counts = {
            "pid": os.getpid(),
            "n_steps": stats.n_steps,
            "n_slot_steps": stats.n_steps * self._engine.parallel,
            "n_active": stats.n_active_steps,
        }
        for name, value in counts.items():
            answers = answers.append_column(name, [[value] * answers.num_rows])
        return answers


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


class Killer:
    """Kills an actor every so many seconds, in turn."""

    def __init__(self, every_s: float | None) -> None:
        """Begin at once, unless `every_s` is None."""
        self.n_killed = 0
        self._every_s, self._is_over = every_s, threading.Event()
        if every_s is not None:
            threading.Thread(target=self._kill, daemon=True).start()

    def end(self) -> None:
        """Kill no more."""
        self._is_over.set()

    def _kill(self) -> None:
        while not self._is_over.wait(self._every_s):
            if found := actors():
                os.kill(found[self.n_killed % len(found)], signal.SIGKILL)
                self.n_killed += 1


def actors() -> list[int]:
    """Return the processes of the actors that answer."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            command = (folder / "cmdline").read_bytes()
            if command.startswith(b"ray::MapWorker(MapBatches("):
                found.append(int(folder.name))
    return sorted(found)


@dataclass(frozen=True)
class AnswersFound:
    """What a run of actors gave."""

    per_second: float
    busy: float
    """Share of the slots that computed in a step, until each actor's last but one batch."""
    table: Any
    n_killed: int


def by_actors(
    path: Path, n: int, n_threads: int, kill_every_s: float | None = None, **settings: Any
) -> AnswersFound:
    """Return what `n` actors answer, and how fast."""
    arrivals, parts = AnswerTimes(), []
    dataset = import_ray().data.read_parquet(str(path))
    with patch.object(integration, "Answers", Counted):
        answers = integration.answer(dataset, n_actors=n, n_cpus=n_threads, **settings)
    killer = Killer(kill_every_s)
    for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
        arrivals.add(batch.num_rows)
        parts.append(batch)
    killer.end()
    table = import_pyarrow().concat_tables(parts).sort_by("n")
    return AnswersFound(arrivals.per_second, _busy(table), table, killer.n_killed)


def of_driver(path: Path, n: int, n_threads: int, **settings: Any) -> dict[str, float]:
    """Return what `n` actors that do not compute leave: the driver's and Ray's own work for each batch of rows."""
    dataset = import_ray().data.read_parquet(str(path))
    with patch.object(integration, "Answers", Idle):
        answers = integration.answer(dataset, n_actors=n, n_cpus=n_threads, **settings)
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


def _busy(table: Any) -> float:
    most: dict[int, set[tuple[int, int]]] = {}
    for pid, n_slots, n_active in zip(
        *(table[name].to_pylist() for name in ("pid", "n_slot_steps", "n_active")), strict=True
    ):
        most.setdefault(pid, set()).add((n_slots, n_active))
    ends = [sorted(counts)[-2:][0] for counts in most.values()]
    return sum(n for _, n in ends) / max(1, sum(n for n, _ in ends))


def differing(path: Path, found: Any, n_threads: int, **settings: Any) -> list[int]:
    """Return the rows whose answers are others in this process, or that are not there once."""
    table = import_pyarrow().parquet.read_table(path)
    options, model = settings.pop("options"), settings.pop("model")
    with load(model, n_threads=n_threads, **settings) as engine:
        here = run_table(table, engine=engine, options=options).to_pylist()
    there: dict[int, list[dict[str, Any]]] = {}
    for row in found.select([*here[0]]).to_pylist():
        there.setdefault(row["n"], []).append(row)
    return [row["n"] for row in here if there.pop(row["n"], None) != [row]] + [*there]


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each round, and the median ratio at the end."""
    asked = ArgumentParser(description=__doc__)
    asked.add_argument("--model", help="a GGUF file; default: the one that ships inside")
    asked.add_argument("--rows", type=int, default=2000)
    asked.add_argument("--processes", type=int, default=2, help="workers, and actors")
    asked.add_argument("--parallel", type=int, default=16, help="slots of each")
    asked.add_argument("--tokens", type=int, default=32, help="of each answer")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--check", action="store_true", help="compare with answers in process")
    asked.add_argument("--kill-every-s", type=float, help="seconds between deaths of actors")
    asked.add_argument("--driver", action="store_true", help="Ray's own work, without an engine")
    a = asked.parse_args(words)
    # Ray starts its processes with low priority: on cores that others use, workers of `cbatch run` would win
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray, pyarrow = import_ray(), import_pyarrow()
    n_threads = max(1, available_cores() // a.processes)
    ray.init(num_cpus=a.processes * n_threads + 1, include_dashboard=False, logging_level="warning")
    ray.data.DataContext.get_current().enable_progress_bars = False
    options = {"max_tokens": a.tokens, "ignore_eos": True, "temperature": 0, "logprobs": a.check}
    settings = {"model": a.model, "options": options, "parallel": a.parallel, "ctx_per_seq": 512}
    settings["exact"] = a.check
    ratios = []
    with TemporaryDirectory() as name:
        path = Path(name) / "in.parquet"
        prompts = [f"Tell me about the number {i}." for i in range(a.rows)]
        pyarrow.parquet.write_table(pyarrow.table({"n": range(a.rows), "prompt": prompts}), path)
        for _ in range(a.rounds * a.driver):
            _emit(**of_driver(path, a.processes, n_threads, **settings))
        for _ in range(a.rounds * (not a.driver)):
            actors = by_actors(path, a.processes, n_threads, a.kill_every_s, **settings)
            said: dict[str, Any] = {
                "actors": round(actors.per_second, 1),
                "busy": round(actors.busy, 3),
            }
            said["rows_once"] = actors.table["n"].to_pylist() == [*range(a.rows)]
            if a.kill_every_s is None:
                replicas = by_replicas(path, Path(name), a.processes, **settings)
                ratios.append(actors.per_second / replicas)
                said |= {"replicas": round(replicas, 1), "ratio": round(ratios[-1], 3)}
            else:
                said["n_killed"] = actors.n_killed
            _emit(**said)
            if a.check:
                wrong = differing(path, actors.table, n_threads, **settings)
                _emit(n_other_answers=len(wrong), first=wrong[:3])
    if ratios:
        _emit(median=round(sorted(ratios)[len(ratios) // 2], 3), rows=a.rows, processes=a.processes)


def _emit(**found: Any) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
