"""A process for work that may never end or may take all memory: only that process is killed.

`Sandbox` starts this file as a script, which imports nothing of cbatch but the file of its job. Starting takes about
0.1 s, so the process stays for the next question.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

_N_BYTES_KEPT = 2**28
"""A process larger than this ends after its answer, so that the next question has enough memory."""
_READY = b"ready\n"
_LAST = b"last "
"""Prefix of an answer after which the process ends."""
_N_PART = 2**16
_LAST_S = 0.2
"""Seconds until a process whose pipe has ended is known to be dead."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one question."""

    cpu_s: int
    wall_s: float
    n_bytes: int
    """Memory of the process."""


class NoAnswerError(Exception):
    """The process ended, or was ended, without an answer."""

    def __init__(self, *, is_lasting: bool) -> None:
        """Keep whether the question itself ended the process, so that asking again is of no use."""
        self.is_lasting = is_lasting
        super().__init__()


class Sandbox:
    """Puts questions to a process of its own. One thread at a time."""

    def __init__(self, job: str, settings: object, limits: Limits) -> None:
        """Make one; `start` or the first question starts the process.

        Args:
            job: path of a file that imports nothing of cbatch and has `begin(settings)`, which returns the function
                that answers questions.
            settings: for `begin`; as JSON, like questions and answers.
            limits: what one question may take.
        """
        self._job, self._settings, self._limits = job, settings, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._pid, self._is_ready = 0, False
        self._is_amid = False
        """Whether a question has no answer yet: where `ask` was interrupted, the answer may still come."""
        self._is_stopped = False
        self.problem = ""
        """Why the process could not be started the last time; empty where it runs, or none was needed yet."""

    @property
    def is_possible(self) -> bool:
        """Whether there is an interpreter to start."""
        return not getattr(sys, "frozen", False) and bool(sys.executable)

    def start(self) -> None:
        """Start the process unless one runs that owes no answer; it gets ready while the caller goes on."""
        is_ours = self._pid == os.getpid()  # after a fork it is the parent's
        is_free = is_ours and not self._is_amid
        if self._process is not None and is_free and self._process.poll() is None:
            return
        self.close()
        self.problem = "" if self.is_possible else "there is no Python interpreter to start"
        if self.problem:
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,  # Ctrl-C in a terminal is not meant for the process
            )
        except OSError as error:
            self.problem = str(error)
            return
        self._pid, self._is_ready, self._is_amid = os.getpid(), False, False
        self._end = weakref.finalize(self, _end, self._process, self._pid)

    def ask(self, question: object, within_s: float | None = None) -> Any:
        """Return the answer; wait `within_s` seconds for it where given, instead of the wall time of the limits.

        Raises:
            NoAnswerError: there is none: it took more than the limits, or no process can be started (`problem`).
            TypeError, ValueError: the question has what JSON has not.
        """
        line = _line(question)
        wall_s = self._limits.wall_s if within_s is None else within_s
        for _ in range(2):
            self.start()
            process = self._process
            if process is not None and self._is_stopped:
                process.kill()
            self._is_amid = True
            answer = b"" if process is None else self._answer(process, line, wall_s)
            self._is_amid = False
            ended_by = None if process is None else process.returncode
            if not answer or answer.startswith(_LAST):
                self.close()
            if answer:
                return json.loads(answer.removeprefix(_LAST))
            # where another program has killed it, another process may answer
            if ended_by != -signal.SIGKILL or self._is_stopped:
                break
        is_lasting = ended_by not in (None, -signal.SIGKILL) and not self.problem
        raise NoAnswerError(is_lasting=is_lasting)

    def _answer(self, process: subprocess.Popen[bytes], line: bytes, wall_s: float) -> bytes:
        """Return the line that comes for a line; nothing where the process ended, or the time is over."""
        if not self._is_ready:
            until_s = time.monotonic() + self._limits.wall_s
            first = _line([self._settings, asdict(self._limits)])
            said = _exchange(process, first, until_s)
            self._is_ready = said == _READY
            if not self._is_ready:
                words = f"the process for {os.path.basename(self._job)} does not start"
                self.problem = ": ".join(filter(None, (words, said.decode().strip())))
        until_s = time.monotonic() + wall_s
        answer = _exchange(process, line, until_s) if self._is_ready else b""
        if not answer and time.monotonic() < until_s:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_S)
        return answer

    def stop(self) -> None:
        """End the question under way, without an answer; so end later ones. From any thread."""
        self._is_stopped = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process. Twice is harmless; from any thread it ends a question under way."""
        end, self._process, self._end = self._end, None, None
        if end is not None:
            end()


def _line(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _exchange(process: subprocess.Popen[bytes], line: bytes, until_s: float) -> bytes:
    """Write a line and return the answer; b"" if the process ended or the time is over."""
    if process.stdin is None or process.stdout is None:
        return b""
    out, back = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(out, False)
    poll, found, n_sent = select.poll(), bytearray(), 0
    poll.register(back, select.POLLIN)
    if line:
        poll.register(out, select.POLLOUT)
    with suppress(OSError):
        while (left_s := until_s - time.monotonic()) > 0:
            for file, _ in poll.poll(math.ceil(left_s * 1000)):
                if file == back:
                    if not (part := os.read(back, _N_PART)):
                        return b""
                    found += part
                    if part.endswith(b"\n"):
                        return bytes(found)
                else:
                    n_sent += os.write(out, line[n_sent : n_sent + _N_PART])
                    if n_sent == len(line):
                        poll.unregister(out)
    return b""


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    if os.getpid() != pid:  # a fork has it too; it is the parent's
        return
    process.kill()
    with suppress(OSError):  # the pipe is broken: unwritten bytes are lost
        process.communicate()


# ---- the process itself ----


def _limit_memory(n_bytes: int) -> None:
    # Windows has no such limits; wall time is limited all the same
    with suppress(ImportError):
        import resource

        n_bytes = _within(resource.getrlimit(resource.RLIMIT_AS)[1], n_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _within(hard: int, n: int) -> int:
    """Return `n`, or a hard limit that is smaller: no process may raise its own. Below 0 there is none."""
    return n if hard < 0 else min(n, hard)


def _limit_time(cpu_s: int) -> None:
    """Allow the process so many more seconds of computing."""
    with suppress(ImportError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (_within(hard, soft), hard))


def _has_grown() -> bool:
    """Whether this process has had much memory. Linux's `ru_maxrss` counts that of the process that started it, too."""
    with suppress(OSError), open("/proc/self/status", "rb") as file:
        peak = next((line.split()[1] for line in file if line.startswith(b"VmHWM:")), b"0")
        return int(peak) * 1024 > _N_BYTES_KEPT
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > _N_BYTES_KEPT
    return False


def _answerer(job: str, settings: object) -> Callable[[Any], object]:
    spec = importlib.util.spec_from_file_location("job", job)
    if spec is None or spec.loader is None:
        raise ImportError(job)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Any], object] = module.begin(settings)
    return found


def main() -> None:
    """Answer questions from stdin, one a line, by lines on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job, (settings, limits) = sys.argv[1], json.loads(sys.stdin.buffer.readline())
    out = sys.stdout.buffer
    try:
        _limit_memory(limits["n_bytes"])
    except (OSError, ValueError, OverflowError) as error:
        out.write(
            f"its memory cannot be limited to {limits['n_bytes']:,} bytes: {error}\n".encode()
        )
        return
    answer = _answerer(job, settings)
    out.write(_READY)
    out.flush()
    for line in sys.stdin.buffer:
        _limit_time(limits["cpu_s"])
        said = json.dumps(answer(json.loads(line))).encode()
        is_last = _has_grown()
        out.write((_LAST if is_last else b"") + said + b"\n")
        out.flush()
        if is_last:
            break


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # keep `import` from finding modules of this folder
    sys.path[:] = [p for p in sys.path if p != here]
    main()
