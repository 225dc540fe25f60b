"""A process that tries grammars first: some make the compiler overflow its stack, or never end.

`GrammarSandbox` starts this very file as a script, which imports nothing of cbatch. The process stays for the next
grammar: starting the process takes about 0.1 s, trying a grammar a few milliseconds.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_CPU_S = 3
_WALL_S = 30.0
_N_BYTES = 2 * 2**30
_N_BYTES_KEPT = 2**28
"""A process that has grown beyond this ends after its grammar, so that the next one has memory too."""
_STACK_BYTES = 4 * 2**20
"""Half of the usual stack of a thread, so that a grammar that passes here passes there too."""
_N_STEPS = 30
_READY = b"ready\n"


class GrammarSandbox:
    """Finds out whether a grammar can be compiled and followed without ending the process. One thread at a time."""

    def __init__(self, limits: dict[str, Any]) -> None:
        """Take values of llguidance's `LLParserLimits`; `start` or the first grammar starts the process."""
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] | None = None
        self._n_tried, self._is_ready = 0, False
        self.problem = ""
        """Why no process can be started here; empty where one runs, or none was needed yet."""

    def start(self) -> None:
        """Start the process unless it runs; it gets ready while the caller goes on."""
        if self._process is not None or self.problem:
            return
        if getattr(sys, "frozen", False) or not sys.executable:
            self.problem = "there is no Python interpreter to start"
            return
        try:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(self._limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,  # Ctrl-C in a terminal is not meant for the process
            )
        except OSError as error:
            self.problem = str(error)
            return
        self._end = weakref.finalize(self, _end, self._process)
        self._n_tried, self._is_ready = 0, False

    def find_problem(self, source: str) -> str:
        """Return what is wrong with a grammar; empty where some steps under it worked, or no process can be started."""
        has_tried_others = self._n_tried > 0
        answer = self._try(source)
        if answer is None and has_tried_others:  # other grammars may have used up its memory
            answer = self._try(source)
        if answer is None and not self.problem:
            return "it takes more time, memory or depth to compile than a grammar may have"
        return answer or ""

    def close(self) -> None:
        """End the process. Twice is harmless."""
        end, self._process, self._end, self._n_tried = self._end, None, None, 0
        if end is not None:
            end()

    def _try(self, source: str) -> str | None:
        """Return what the process answers; None where it ended without an answer, or cannot be started."""
        self.start()
        process = self._process
        if process is None:
            return None
        self._is_ready = self._is_ready or _read(process) == _READY
        answer = _ask(process, source) if self._is_ready else b""
        self._n_tried += 1
        if answer.endswith(b"\n"):
            return str(json.loads(answer))
        self.close()
        if not self._is_ready:
            self.problem = "the process that tries grammars cannot import llguidance"
        return None


def _ask(process: subprocess.Popen[bytes], source: str) -> bytes:
    """Return what the process answers about a grammar, a line; empty where it ended after the grammar before."""
    if process.stdin is None:
        return b""
    try:
        process.stdin.write(json.dumps(source).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        return b""
    return _read(process)


def _read(process: subprocess.Popen[bytes]) -> bytes:
    """Return a line; without a newline at its end where the process ended, or was ended after too long."""
    watch = threading.Timer(_WALL_S, process.kill)
    watch.daemon = True
    watch.start()
    try:
        return process.stdout.readline() if process.stdout else b""
    finally:
        watch.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError):  # bytes that were not written any more
        process.communicate()


# ---- the process itself ----


def _limit_memory() -> None:
    # Windows has no such limits: the time by the clock holds all the same
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_N_BYTES, _N_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    """Give the process `_CPU_S` seconds more."""
    with suppress(ImportError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = math.ceil(used.ru_utime + used.ru_stime) + _CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _has_grown() -> bool:
    with suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > _N_BYTES_KEPT
    return False


def _walk(tokenizer: Any, source: str, limits: Any) -> str:
    """Compile and take some steps, each with the lowest byte that is allowed; return what is wrong."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    for _ in range(_N_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        lowest = (mask & -mask).bit_length() - 1
        if lowest < 0 or matcher.is_stopped() or not matcher.consume_token(lowest):
            break
    return str(matcher.get_error())


def main() -> None:
    """Read grammars from stdin, one a line, and write what is wrong with each to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")
    limits = llguidance.LLParserLimits(**json.loads(sys.argv[1]))
    threading.stack_size(_STACK_BYTES)
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        _limit_time()
        with ThreadPoolExecutor(1) as thread:
            walked = thread.submit(_walk, tokenizer, json.loads(line), limits)
        error = walked.exception()  # a panic of the compiler is no Exception
        problem = f"it could not be compiled: {error}" if error else walked.result()
        sys.stdout.buffer.write(json.dumps(problem).encode() + b"\n")
        sys.stdout.buffer.flush()
        if _has_grown():
            break


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # modules of this folder are not meant for `import`
    sys.path[:] = [p for p in sys.path if p != here]
    main()
