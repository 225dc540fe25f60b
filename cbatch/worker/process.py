"""A worker process: how it is started, spoken to, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import BinaryIO, cast

from cbatch.errors import ConfigError, NoThreadError, words_of
from cbatch.support.processes import command_of, environment
from cbatch.support.thread_start import started
from cbatch.worker.framing import read_frames
from cbatch.worker.line_sender import LineSender
from cbatch.worker.protocol_commands import Hello, first_line

N_LAST_WORDS = 20
"""Lines of a worker's stderr that are kept, to say why it died. Our choice."""

N_WORD_MAX = 500
"""Bytes of such a line; the rest counts as another. Our choice."""

_LAST_S = 2.0


class ProcessLink:
    """A process that this one started, with its stdin, stdout and stderr. See `Link`."""

    def __init__(self, hello: Hello, folder: str | None) -> None:
        """Start a worker in a folder, from which relative paths are taken, and send its first line.

        Where the folder was removed, the worker has this process's.

        Raises:
            ConfigError: the program that runs Python is not known, or cannot be started.
            NoThreadError: the system has no more threads.
        """
        try:
            self._process = subprocess.Popen(
                command_of("cbatch.worker.__main__"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder if folder and os.path.isdir(folder) else None,
                env=environment(),
                start_new_session=True,  # Ctrl-C in a terminal is for this process alone
            )
        except OSError as error:
            raise ConfigError(f"no worker can be started: {words_of(error)}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        fd = self._process.stdin.fileno()
        os.set_blocking(fd, False)
        self._output = cast("BinaryIO", self._process.stdout)
        self._words: deque[str] = deque(maxlen=N_LAST_WORDS)
        self._why = ""
        """Why it was killed from here."""
        self._n_ticks = 0
        """The worker's time on cores, in ticks of the system's clock."""
        try:
            self._listener = started(self._listen, "cbatch-worker-stderr")
            self._lines = LineSender(fd, partial(os.write, fd))
        except NoThreadError:
            self._process.kill()
            with self._process:  # closes its pipes and waits
                raise
        with suppress(OSError):  # the process is gone already; its reader notices
            self.send(first_line(hello))

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Send a message; where the worker does not read, behind the caller's back."""
        self._lines.send(message)

    def frames(self) -> Iterator[bytes]:
        """Yield the worker's frames as they come, until it is gone."""
        return read_frames(self._output)

    def kill(self, why: str = "killed by the process that started it") -> None:
        """End the worker now; `end` says why."""
        self._why = self._why or why
        self._process.kill()

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the worker, which has computed nothing since the last call.

        False where there is no /proc. Source: Linux's manual, proc_pid_stat(5).
        """
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                state, *found = file.read().rpartition(b")")[2].split()
        except OSError:
            return False
        before, self._n_ticks = self._n_ticks, int(found[10]) + int(found[11])
        return state == b"T" and before == self._n_ticks

    def end(self) -> str:
        """Wait until the worker is gone and return why, with the last lines of its stderr; "" where it ended well."""
        code = self._process.wait()
        self._lines.end()
        self._listener.join(_LAST_S)  # another process may hold the pipe
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        if not code:
            return ""
        words = " | ".join([*self._words])
        how = self._why if self._why and code == -signal.SIGKILL else _how(code)
        return f"{how}{': ' if words else ''}{words}"

    def _listen(self) -> None:
        assert self._process.stderr is not None
        while line := self._process.stderr.readline(N_WORD_MAX):
            if text := line.decode("utf-8", "replace").strip():
                self._words.append(text)


def _how(code: int) -> str:
    """Return how a process ended, by its return code."""
    if code > 0:
        return f"exit code {code}"
    if code == -signal.SIGKILL:
        return "ended by SIGKILL, which the system sends when memory runs out"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
