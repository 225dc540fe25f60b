"""Runs that are ended anywhere and gone on with: `python -m tests.files.kill_runs --kills 40 --exits 200`.

An exit is injected before, in or behind a step to the disk; a kill is SIGKILL to `cbatch run` itself at some moment. In
between, what is left may be copied or moved, the input replaced, the manifest lost. In the end every item has one
record, and it is the one that a run without all that writes. `--seed` repeats what was drawn.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import cbatch
from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file
from cbatch.files.output import durable as disk
from cbatch.files.output.manifest import Manifest
from tests.files.runs import make_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.process import BaseProcess

PLACES = os.pathsep.join(map(str, (Path(cbatch.__file__).parents[1], Path(__file__).parents[2])))
FORMATS = ("jsonl", "csv", "parquet")

Change = Literal[
    "nothing",
    "two copied",
    "all copied",
    "target renamed",
    "folder moved",
    "input replaced",
    "another input",
    "manifest lost",
]
CHANGES: tuple[Change, ...] = get_args(Change)
"""What happens between a kill and the same command: of copies, of output and manifest alone, or of the whole folder."""

STEPS = {
    disk: ("write_at", "truncate", "sync", "replace", "sync_folder", "create"),
    Manifest: ("commit", "fold"),
}
MOMENTS = ("before", "behind", "half")

EXITED, REFUSED = 77, 3

Row = tuple[str, str]
"""An id and what is asked."""

Found = dict[str, list[tuple[object, ...]]]
"""Records by the ids of their items, without what differs from run to run."""


# ---- inputs and outputs ----


def rows(n: int, version: int) -> list[Row]:
    """Return an input; the second version has rows that are changed, gone, new, and in another order."""
    if not version:
        return [(f"r{i}", f"question {i}") for i in range(n)]
    kept = [i for i in range(n) if i % 7 != 3]
    changed = [(f"r{i}", f"riddle {i}" if i % 3 == 0 else f"question {i}") for i in kept]
    return [
        *changed[n // 3 :],
        *((f"new{i}", f"question {i}") for i in range(3)),
        *changed[: n // 3],
    ]


def write_input(path: Path, given: Sequence[Row]) -> None:
    """Write an input in the format of its name."""
    if path.suffix == ".jsonl":
        lines = (json.dumps({"id": id, "prompt": text}) + "\n" for id, text in given)
        path.write_text("".join(lines))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("id", "prompt"), *given])
    else:
        import pyarrow
        from pyarrow import parquet

        ids, texts = (list(column) for column in zip(*given, strict=True))
        parquet.write_table(pyarrow.table({"id": ids, "prompt": texts}), path)


def read_output(path: Path) -> Found:
    """Read an output in the format of its name."""
    found: Found = {}
    for record in _records(path):
        for name in ("usage", "timings", "seed", "digest"):
            record.pop(name, None)
        found.setdefault(str(record["id"]), []).append(tuple(record.values()))
    return found


def _records(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    from pyarrow import parquet

    table: list[dict[str, Any]] = parquet.read_table(path, use_threads=False).to_pylist()
    return table


# ---- a run, its end, and what happens then ----


@dataclass(frozen=True)
class Case:
    """A run and what becomes of it.

    Args:
        folder: with the input `in`, the output `out` and, where that is a link, `data` with what it leads to.
        format: of both.
        is_link: whether the output is a link.
        change: what happens between two runs.
        input: the name of the input.
        is_isolated: whether the command computes in a worker process; of no meaning to the fake backend.
    """

    folder: Path
    format: str
    is_link: bool
    change: Change
    input: str = "in"
    is_isolated: bool = False

    @property
    def source(self) -> Path:
        """The input."""
        return self.folder / f"{self.input}.{self.format}"

    @property
    def output(self) -> Path:
        """The output, as the command has it."""
        return self.folder / f"out.{self.format}"

    @property
    def records(self) -> Path:
        """The file that grows."""
        output = Path(os.path.realpath(self.output))
        is_made = self.format == "parquet"
        return output.with_name(f"{output.name}.records") if is_made else output

    def begin(self, n_items: int) -> None:
        """Make what is there before the first run."""
        (self.folder / "data").mkdir(parents=True)
        write_input(self.source, rows(n_items, 0))
        if self.is_link:
            self.output.symlink_to(f"data/{self.output.name}")


def draw(chance: random.Random, folder: Path) -> Case:
    """Return a case that can be."""
    while True:
        case = Case(folder, chance.choice(FORMATS), chance.random() < 0.5, chance.choice(CHANGES))
        case = replace(case, is_isolated=chance.random() < 0.5)
        needs_link = case.change in ("target renamed", "folder moved")
        is_of_lines = case.change != "manifest lost" or case.format == "jsonl"
        if is_of_lines and (case.is_link or not needs_link):
            return case


def happen(case: Case, n_items: int) -> Case:
    """Let happen what happens between two runs; return the case as it is then."""
    change = case.change
    if change in ("two copied", "all copied"):
        return _copied(case, is_whole=change == "all copied")
    if change == "target renamed" and _has_records(case):
        _rename_target(case)
    elif change == "folder moved":
        (case.folder / "data").rename(case.folder / "moved")
        _point(case, "moved")
    elif change == "input replaced":
        write_input(case.source, rows(n_items, 1))
    elif change == "another input":
        case = replace(case, input="other")
        write_input(case.source, rows(n_items, 1))
    elif change == "manifest lost":
        for file in case.records.parent.glob("*.manifest*"):
            file.unlink()
    return case


def _copied(case: Case, *, is_whole: bool) -> Case:
    copy = replace(case, folder=case.folder.with_name(f"{case.folder.name}-copy"))
    if is_whole:
        shutil.copytree(case.folder, copy.folder, symlinks=True)
        return copy
    copy.folder.mkdir()
    shutil.copy(case.source, copy.source)
    beside = case.records.parent
    for name in (case.output.name, case.records.name, f"{case.records.name}.manifest"):
        if (beside / name).exists():
            shutil.copy(beside / name, copy.folder / name)
    return copy


def _has_records(case: Case) -> bool:
    """Whether anything is committed: a file without it may be anybody's, and is found under its name alone."""
    if (
        case.format == "parquet"
    ):  # its records stay where they are, and it is there when it is whole
        return case.output.exists()
    manifest = f"{case.records.name}.manifest"
    with tempfile.TemporaryDirectory() as name:
        for file in case.records.parent.glob(f"{manifest}*"):
            shutil.copy(file, name)
        with closing(sqlite3.connect(Path(name) / manifest)) as db:
            found = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'records'")
            return bool(
                found.fetchone()[0] and db.execute("SELECT count(*) FROM records").fetchone()[0]
            )


def _rename_target(case: Case) -> None:
    target = Path(os.path.realpath(case.output))
    target.rename(target.with_name(f"renamed-{target.name}"))
    _point(case, f"data/renamed-{target.name}")


def _point(case: Case, place: str) -> None:
    name = case.output.name
    case.output.unlink()
    case.output.symlink_to(place if place.endswith(name) else f"{place}/{name}")


# ---- exits ----


@dataclass(frozen=True)
class Exit:
    """Where a run ends: at the so many-th step, before it, behind it, or in the midst of a write."""

    i_step: int
    moment: str


def _watch(steps: list[str], exit: Exit | None) -> None:
    def watched(name: str, do: Callable[..., object]) -> Callable[..., object]:
        def step(*args: Any, **more: Any) -> object:
            steps.append(name)
            if exit is None or len(steps) != exit.i_step:
                return do(*args, **more)
            if exit.moment == "half" and name == "write_at":
                fd, data, start = args
                do(fd, data[: len(data) // 2], start)
            elif exit.moment != "before":
                do(*args, **more)
            os._exit(EXITED)

        return step

    for place, names in STEPS.items():
        for name in names:
            setattr(place, name, watched(name, getattr(place, name)))


def _child(case: Case, exit: Exit | None, told: Path) -> None:
    """Do a run in a process of its own, which goes on nowhere else."""
    steps: list[str] = []
    _watch(steps, exit)
    code = 0
    try:
        with make_engine(3) as engine:
            adopt = case.change == "manifest lost"
            run_file(case.source, case.output, engine=engine, window=6, adopt=adopt)
    except ConfigError as error:
        told.write_text(str(error))
        code = REFUSED
    if code == 0:
        told.write_text(str(len(steps)))
    os._exit(code)


def start(child: BaseProcess) -> None:
    """Start a process; the helper process of multiprocessing may have died with the children of another test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "resource_tracker: process died")
        child.start()


def run_fake(case: Case, exit: Exit | None, told: Path) -> int:
    """Run on the fake backend, up to an exit or to the end; return the exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "cbatch.files.input.columnar", "pyarrow.parquet"])
    child = context.Process(target=_child, args=(case, exit, told))
    start(child)
    child.join()
    assert child.exitcode is not None
    return child.exitcode


# ---- kills ----


def run_real(case: Case, moment: float | None, told: Path) -> int:
    """Run the command with the model that ships inside, and kill it when so much of its share of records is there."""
    options = ("--exact", "--temperature", 0, "--max-tokens", 12, "--threads", 1, "--parallel", 4)
    adopt = ("--adopt",) if case.change == "manifest lost" else ()
    template = ("--template", "{prompt}") if case.format != "jsonl" else ()
    place = "--isolate" if case.is_isolated else "--no-isolate"
    command = ("run", case.source, "-o", case.output, *options, *template, *adopt, place, "--quiet")
    before, started = _size(case.records), time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "cbatch.cli", *map(str, command)],
        env={**os.environ, "PYTHONPATH": PLACES},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while moment is not None and process.poll() is None:
            has_share = _size(case.records) > before + 3000 * moment
            if has_share or (moment < 0.15 and time.monotonic() - started > 10 * moment):
                time.sleep(random.random() * 0.02)
                process.send_signal(signal.SIGKILL)
            time.sleep(0.001)
        said = process.communicate()[1]
    told.write_text(said)
    return REFUSED if process.returncode == 2 else process.returncode


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        parent: Any = None
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
        if parent == pid:
            found.append(int(name))
    return found


def lives(pid: int) -> bool:
    """Whether a process is there; one that has ended but was not waited for is not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# ---- many of them ----


@dataclass
class Tally:
    """What was done, and what was wrong in the end."""

    n_kills: int = 0
    n_exits: int = 0
    n_runs: int = 0
    n_refused: int = 0
    n_lost: int = 0
    n_doubled: int = 0
    n_mispaired: int = 0
    n_records: int = 0
    cases: Counter[str] = field(default_factory=Counter)

    def compare(self, case: Case, found: Found, expected: Found, before: Found) -> None:
        """Count what is not as it should be; lines keep the records of items that are not in the input any more."""
        gone = before.keys() - expected.keys() if case.format == "jsonl" else set()
        self.n_runs += 1
        self.n_records += sum(map(len, found.values()))
        for id in {*found, *expected}:
            wanted, there = expected.get(id), found.get(id, [])
            if wanted is None and id in gone:
                wanted = before[id]
            self.n_lost += not there
            self.n_doubled += len(there) > 1 or wanted is None
            self.n_mispaired += bool(there) and wanted is not None and there[0] != wanted[0]
        self.cases[f"{case.format}, {'a link' if case.is_link else 'a file'}, {case.change}"] += 1

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, doubled or mispaired."""
        return not (self.n_lost or self.n_doubled or self.n_mispaired)

    def lines(self) -> Iterable[str]:
        """Yield what to tell."""
        yield (
            f"{self.n_kills} kills and {self.n_exits} exits in {self.n_runs} runs, {self.n_records} records in the "
            f"end: {self.n_lost} lost, {self.n_doubled} doubled, {self.n_mispaired} mispaired; {self.n_refused} times "
            "another input was refused"
        )
        yield from (f"  {n:4} x {case}" for case, n in sorted(self.cases.items()))


class Trial:
    """Cases with what they should come to, by one way to run them."""

    def __init__(self, folder: Path, seed: int, n_items: int, run: Callable[..., int]) -> None:
        """Make one whose cases have folders of their own in `folder`."""
        self.folder, self.chance, self.n_items = folder, random.Random(seed), n_items
        self.run = run
        self.tally, self.told = Tally(), folder / "told"
        self._expected: dict[tuple[str, int], Found] = {}
        self._n_cases = 0

    def expected(self, format: str, version: int) -> Found:
        """Return what a run without any kill writes."""
        key = format, version
        if key not in self._expected:
            case = Case(self.folder / f"whole-{format}-{version}", format, False, "nothing")
            case.begin(self.n_items)
            write_input(case.source, rows(self.n_items, version))
            assert self.run(case, None) == 0, _text(self.told)
            self._expected[key] = read_output(case.output)
            assert {id: len(there) for id, there in self._expected[key].items()} == {
                id: 1 for id, _ in rows(self.n_items, version)
            }
        return self._expected[key]

    def do(self, ends: Callable[[], object]) -> None:
        """Begin a run, end it a few times, let happen what happens in between, and go on to the end."""
        self._n_cases += 1
        case = draw(self.chance, self.folder / f"case-{self._n_cases}")
        before, after = (self.expected(case.format, version) for version in (0, 1))
        expected = after if case.change in ("input replaced", "another input") else before
        case.begin(self.n_items)
        for _ in range(self.chance.randint(1, 2)):
            self._end_somewhere(replace(case, change="nothing"), ends)
        case = happen(case, self.n_items)
        for _ in range(self.chance.randint(0, 2)):
            self._end_somewhere(case, ends)
        code = self.run(case, None)
        if case.change == "another input" and code == REFUSED:
            assert "has the answers of another input" in _text(self.told), _text(self.told)
            self.tally.n_refused += 1
            case, expected = replace(case, input="in"), before
            code = self.run(case, None)
        assert code == 0, (case, _text(self.told))
        self.tally.compare(case, read_output(case.output), expected, before)
        assert self.tally.is_clean, (case, list(self.tally.lines()))
        for left in self.folder.glob(f"case-{self._n_cases}*"):
            shutil.rmtree(left)

    def _end_somewhere(self, case: Case, ends: Callable[[], object]) -> None:
        code = self.run(case, ends())
        may_refuse = case.change == "another input"
        allowed = {0, EXITED, -signal.SIGKILL, *([REFUSED] if may_refuse else [])}
        assert code in allowed, (case, _text(self.told))
        self.tally.n_exits += code == EXITED
        self.tally.n_kills += code == -signal.SIGKILL


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def exits(folder: Path, n: int, seed: int, n_items: int = 24) -> Tally:
    """Have runs on the fake backend exit so many times at steps to the disk.

    Raises:
        AssertionError: something was lost, doubled or mispaired, or a run could not go on.
    """
    trial = Trial(folder, seed, n_items, partial(run_fake, told=folder / "told"))
    n_steps = dict[str, int]()
    for format in FORMATS:
        trial.expected(format, 0)
        n_steps[format] = int(_text(trial.told))
    most = max(n_steps.values())

    def somewhere() -> Exit:
        return Exit(trial.chance.randint(1, most), trial.chance.choice(MOMENTS))

    while trial.tally.n_exits < n:
        trial.do(somewhere)
    return trial.tally


def kills(folder: Path, n: int, seed: int, n_items: int = 40) -> Tally:
    """Kill the command itself so many times, with the model that ships inside.

    Raises:
        AssertionError: something was lost, doubled or mispaired, or a run could not go on.
    """
    trial = Trial(folder, seed, n_items, partial(run_real, told=folder / "told"))
    while trial.tally.n_kills < n:
        trial.do(trial.chance.random)
    return trial.tally


def main() -> None:
    """Do what was asked for, and tell what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--exits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args()
    sys.stdout.write(f"seed {asked.seed}\n")
    for way, n in ((exits, asked.exits), (kills, asked.kills)):
        if n == 0:
            continue
        with tempfile.TemporaryDirectory(prefix="cbatch-") as folder:
            tally = way(Path(folder), n, asked.seed)
        sys.stdout.write("\n".join(tally.lines()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
