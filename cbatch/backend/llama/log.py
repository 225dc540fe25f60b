"""llama.cpp's log, passed to `logging` without calling Python from llama.cpp's threads."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.library import library
from cbatch.backend.threads import once
from cbatch.support.interrupts import note
from cbatch.support.logs import Log

_CONTINUATION = 5
# Source: ggml.h, enum ggml_log_level (llama_cpp._logger has the table of an older one). What has no
# level is plain output.
_LEVELS = {0: logging.INFO, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


_POOLED_HERE = b"model default pooling_type is"
"""Of a warning about contexts whose vectors are pooled by cbatch, as all are."""


class LlamaLog:
    """llama.cpp's log lines, kept natively until `drain`.

    So no thread of llama.cpp waits for the interpreter. llama.cpp has one log callback for the
    whole process: use the one object of `llama_log()`.
    """

    def __init__(self, n_bytes: int = 1 << 18) -> None:
        """Make the ring of `n_bytes`. It is never freed: llama.cpp may still hold it at exit."""
        self._lib = library()
        self.ring: int | None = self._lib.cbatch_log_init(n_bytes)
        """Address of the ring, the user data of `cbatch_log_callback`."""
        if self.ring is None:
            raise MemoryError("no memory for llama.cpp's log")
        os.register_at_fork(after_in_child=self._renew)
        self._buffer, self._n_dropped = ctypes.create_string_buffer(n_bytes), ctypes.c_int64()
        self._sizes = len(self._buffer), ctypes.byref(self._n_dropped)
        self._lock = (
            threading.RLock()
        )  # a finalizer may free an engine while this thread has the lock
        self._n_users = 0
        self._level, self._partial = logging.INFO, b""
        self._recent: list[str] = []  # warnings and errors that were drained
        self._log = Log("cbatch.llama")

    def _renew(self) -> None:
        """Take new locks in the child of a fork: threads that are not there may have the old ones for ever."""
        self._lock = threading.RLock()
        self.ring = self._lib.cbatch_log_init(len(self._buffer)) or self.ring
        if self._n_users:
            llama_cpp.llama_log_set(self.callback, ctypes.c_void_p(self.ring))

    @property
    def callback(self) -> Any:
        """What keeps lines, for llama.cpp's own libraries; `ring` is its user data."""
        return ctypes.cast(self._lib.cbatch_log_callback, llama_cpp.llama_log_callback)

    def install(self) -> None:
        """Capture llama.cpp's log; each call needs a `remove` of its own.

        Debug lines are kept only if the logger `cbatch.llama` has level DEBUG now.
        """
        note(self._lock)
        with self._lock:
            self._lib.cbatch_log_set_debug(self.ring, self._log.has_debug)
            self._n_users += 1
            if self._n_users == 1:
                llama_cpp.llama_log_set(self.callback, ctypes.c_void_p(self.ring))

    def remove(self) -> None:
        """Return the log to llama-cpp-python after the last user; drain what is left."""
        note(self._lock)
        with self._lock:
            self._n_users -= 1
            if self._n_users == 0:
                callback = llama_cpp._logger.llama_log_callback
                llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
        self.drain()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Capture llama.cpp's log for the block."""
        self.install()
        try:
            yield
        finally:
            self.remove()

    def drain(self) -> list[str]:
        """Pass new lines to the logger `cbatch.llama`; return those that are warnings or errors."""
        note(self._lock)
        with self._lock:
            n = self._lib.cbatch_log_drain(self.ring, self._buffer, *self._sizes)
            if not n:  # as after nearly every step
                return []
            data = ctypes.string_at(self._buffer, n)  # copied first: the buffer may be filled again
            lines = list(self._lines(data))
            found = [line for level, line in lines if level >= logging.WARNING]
            self._recent = [*self._recent, *found][-20:]
        for level, line in lines:
            self._log.write(level, "%s", line)
        return found

    def reason(self) -> str:
        """Return the last warnings and errors, in which llama.cpp says why it refused something just now."""
        self.drain()
        return "; ".join(self._recent[-2:]) or "llama.cpp gave no reason"

    def _lines(self, data: bytes) -> Iterator[tuple[int, str]]:
        if self._n_dropped.value:
            dropped = f"{self._n_dropped.value} older lines of llama.cpp's log were dropped"
            yield logging.WARNING, dropped
        for level, text in _records(data):
            yield from self._join(level, text)

    def _join(self, level: int, text: bytes) -> Iterator[tuple[int, str]]:
        """Add a piece to the line begun; yield the lines that are complete."""
        if level != _CONTINUATION:
            if self._partial:
                yield self._level, self._partial.decode(errors="replace")
            self._level, self._partial = _LEVELS.get(level, logging.INFO), b""
        *complete, self._partial = (self._partial + text).split(b"\n")
        for line in complete:
            if line.strip():
                level = logging.DEBUG if _POOLED_HERE in line else self._level
                yield level, line.decode(errors="replace")


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (level, text) of each record that `cbatch_log_drain` wrote."""
    i = 0
    while i < len(data):
        level, n = memoryview(data)[i : i + 8].cast("i")
        yield level, data[i + 8 : i + 8 + n]
        i += 8 + n


@once
def llama_log() -> LlamaLog:
    """Return the process's one log."""
    return LlamaLog()
