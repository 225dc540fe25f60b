"""A server of cbatch in a process of its own, for the length of a block."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    words: deque[str]
    """The last lines of its stderr."""

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self.process.pid

    @property
    def workers(self) -> list[int]:
        """The ids of its worker processes."""
        children: list[int] = []
        for file in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended
                children += map(int, file.read_text().split())
        return [pid for pid in children if _is_worker(pid)]


def _is_worker(pid: int) -> bool:
    try:
        return b"cbatch.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def n_open_files(pid: int) -> int:
    """Return how many files a process has open."""
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def rss_mib(pid: int) -> float:
    """Return the memory that a process has of its own, in MiB: without files that it has mapped, such as weights."""
    said = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", said)
    return round(int(found[1]) / 1024, 1) if found else 0.0


def cpu_s_of(pid: int) -> float:
    """Return the seconds that the cores have computed for a process; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(model: str | None, *arguments: str) -> Iterator[Server]:
    """Run `cbatch serve` for the block, with the model that ships inside for None."""
    own = [] if model is None else ["-m", model]
    with serving(*own, "--port", "0", *arguments) as (process, place):
        last: deque[str] = deque(maxlen=100)
        threading.Thread(target=last.extend, args=(process.stderr,), daemon=True).start()
        yield Server(process, int(place.rpartition(":")[2]), last)


@contextmanager
def serving(
    *arguments: str, has_folder: bool = True, program: Sequence[str] = ("-m", "cbatch.cli")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `cbatch serve` for the block; gives the place that the server names.

    Files are in a folder of its own, or else where the server has them by default. `program` is what Python runs.

    Raises:
        ChildProcessError: the server has ended before it served.
    """
    command = [sys.executable, *program, "serve", *arguments]
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, *(["--files-dir", folder] if has_folder else [])],
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        try:
            said, found = list[str](), None
            for line in process.stderr:  # warnings about the model may come first
                said.append(line)
                if found := re.search(r"serving .* at (\S+), ", line):
                    break
            if found is None:
                raise ChildProcessError(f"the server did not start: {''.join(said)}")
            yield process, found[1]
        finally:
            process.terminate()
            process.wait()
