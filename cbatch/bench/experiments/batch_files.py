"""Items a second over a batch file, and memory: parse, validate and write alone, and through the fake backend.

Run: python -m cbatch.bench.experiments.batch_files --lines 1000000
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cbatch.backend.fake import FakeBackend
from cbatch.bench.harness import show
from cbatch.core.plan import StepPlan, StepResult
from cbatch.engine import Engine
from cbatch.files.file_run import run_file
from cbatch.files.input.item import item_key
from cbatch.files.input.source import open_source
from cbatch.files.output.identity import Digests
from cbatch.files.output.journal import Journal
from cbatch.files.output.opening import OutputSpec
from cbatch.files.output.target import encoder
from cbatch.files.work import N_COMMIT
from cbatch.options import RunOptions
from cbatch.response import BatchResult, Timings, Usage
from cbatch.support.processes import absolute_path

_ANSWER = BatchResult(
    "0", "An answer.", (1,), "length", None, Usage(8, 1), Timings(0, 0, 0, None, None), seed=0
)


class ForgetfulBackend(FakeBackend):
    """The fake backend without its record of plans, which grows."""

    def run(self, plan: StepPlan) -> StepResult:
        """Do one plan; see `FakeBackend.run`."""
        self.plans.clear()
        return super().run(plan)


def write_requests(path: Path, n: int) -> None:
    """Write `n` short requests as OpenAI has them."""
    with path.open("w") as file:
        for i in range(n):
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": f"q {i}"}],
                "max_tokens": 1,
                "temperature": 0,
            }
            request = {
                "custom_id": f"request-{i}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(request) + "\n")


def copy_alone(source: Path, output: Path) -> None:
    """Parse, validate, claim and answer every item without an engine."""
    with closing(open_source(source)) as items, Journal(OutputSpec(output, {})) as journal:
        write, digest_of = encoder("openai", items), Digests(RunOptions(), "none")
        for i, item in enumerate(items, 1):
            digest = digest_of(item)
            if journal.claim(item_key(item), digest, item.number) == "new":
                record = write.result(item, _ANSWER, digest=digest, created=0, model="m")
                journal.add(item.number, record, is_error=False)
            if not i % N_COMMIT:
                journal.commit()


def run_fake(source: Path, output: Path, n_slots: int = 32) -> None:
    """Run every item on the fake backend, whose tokens are ready."""
    with Engine(ForgetfulBackend(n_slots, 256, 2048), threaded=False) as engine:
        run_file(source, output, engine=engine)


WAYS = {"alone": copy_alone, "fake": run_fake}


def measure(way: str, n: int, folder: Path) -> tuple[float, float]:
    """Return items a second and the most memory in MiB, measured in a process of its own."""
    source = folder / f"{n}.jsonl"
    if not source.exists():
        write_requests(source, n)
    output = folder / f"{n}.{way}.jsonl"
    # by its file: where the package is installed, this module is not in it
    code = f"import runpy, sys; sys.path[:] = {absolute_path()}; runpy.run_path({__file__!r})['child'](*sys.argv[1:])"
    command = [sys.executable, "-c", code, way, str(source), str(output)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, n_kib = map(float, printed.split())
    return n / seconds, n_kib / 1024


def child(way: str, source: str, output: str) -> None:
    """Print the seconds that a way takes, and the most memory in KiB."""
    start_s = time.perf_counter()
    WAYS[way](Path(source), Path(output))
    seconds = time.perf_counter() - start_s
    show(f"{seconds} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}")


def main(words: Sequence[str] | None = None) -> None:
    """Print a table: both ways, few lines and many."""
    # the child has no such module where the package is installed
    from cbatch.bench.experiments.rounds import parser

    asked = parser(__doc__, model=None)
    asked.add_argument("--lines", type=int, default=1_000_000, help="of the long file")
    asked.add_argument("--few", type=int, default=1_000, help="lines of the short file")
    a = asked.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="cbatch-") as name:
        for way in WAYS:
            for n in (a.few, a.lines):
                rate, n_mib = measure(way, n, Path(name))
                show(f"{way:6}{n:>10,} lines{rate:>10,.0f} items/s{n_mib:>8.1f} MiB")


if __name__ == "__main__":
    main()
