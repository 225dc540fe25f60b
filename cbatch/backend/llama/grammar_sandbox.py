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
from contextlib import suppress
from typing import IO, Any

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
        self._child: _Child | None = None
        self.problem = ""
        """Why no process can be started here; empty where one runs, or none was needed yet."""

    def start(self) -> None:
        """Start the process unless it runs; it gets ready while the caller goes on."""
        if self._child is not None or self.problem:
            return
        if getattr(sys, "frozen", False) or not sys.executable:
            self.problem = "there is no Python interpreter to start"
            return
        try:
            self._child = _Child(self._limits)
        except OSError as error:
            self.problem = str(error)

    def find_problem(self, source: str) -> str:
        """Return what is wrong with a grammar; empty where some steps under it worked, or no process can be started.

        Args:
            source: as llguidance reads it.
        """
        has_tried_others = self._child is not None and self._child.n_tried > 0
        answer = self._try(source)
        if answer is None and has_tried_others:  # other grammars may have used up its memory
            answer = self._try(source)
        if answer is None and not self.problem:
            return "it takes more time, memory or depth to compile than a grammar may have"
        return answer or ""

    def close(self) -> None:
        """End the process. Twice is harmless."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _try(self, source: str) -> str | None:
        """Return what the process answers; None where it ended without an answer, or cannot be started."""
        self.start()
        child = self._child
        if child is None:
            return None
        answer = child.ask(source) if child.is_ready() else None
        if answer is None:
            self.close()
            if not child.was_ready:
                self.problem = "the process that tries grammars cannot import llguidance"
        return answer


class _Child:
    """The process, seen from its parent."""

    def __init__(self, limits: dict[str, Any]) -> None:
        paths = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C in a terminal is not meant for it
        )
        self.close = weakref.finalize(self, _end, self._process)
        self.n_tried = 0
        self.was_ready = False

    def is_ready(self) -> bool:
        """Wait until it reads grammars; False where it ended before."""
        self.was_ready = self.was_ready or self._read() == _READY
        return self.was_ready

    def ask(self, source: str) -> str | None:
        """Return its answer about a grammar; None where it ended first."""
        try:
            _pipe(self._process.stdin).write(json.dumps(source).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except OSError:  # it ended after the grammar before
            return None
        self.n_tried += 1
        line = self._read()
        return str(json.loads(line)) if line.endswith(b"\n") else None

    def _read(self) -> bytes:
        """Return a line; one without a newline at its end means that the process ended or was ended after too long."""
        watch = threading.Timer(_WALL_S, self._process.kill)
        watch.daemon = True
        watch.start()
        try:
            return _pipe(self._process.stdout).readline()
        finally:
            watch.cancel()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("a process without pipes")
    return pipe


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # bytes that were not written any more
            _pipe(pipe).close()


# ---- the process itself ----


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not there on Windows: the time by the clock holds all the same
        return
    resource.setrlimit(resource.RLIMIT_AS, (_N_BYTES, _N_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    """Give the process `_CPU_S` seconds more."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _has_grown() -> bool:
    try:
        import resource
    except ImportError:
        return False
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > _N_BYTES_KEPT


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
    found: list[str] = []

    def walk(source: str) -> None:
        try:
            found.append(_walk(tokenizer, source, limits))
        except BaseException as error:  # a panic of the compiler is no Exception
            found.append(f"it could not be compiled: {error}")

    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        _limit_time()
        thread = threading.Thread(target=walk, args=(json.loads(line),))
        thread.start()
        thread.join()
        sys.stdout.buffer.write(json.dumps(found.pop()).encode() + b"\n")
        sys.stdout.buffer.flush()
        if _has_grown():
            break


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [
        p for p in sys.path if p != here
    ]  # modules of this folder are not meant for `import`
    main()
