"""The OpenMP runtime that ggml computes with.

GNU's keeps a team of threads for each thread that has computed, also while that one waits. With more threads in all
teams than the machine has cores, those that wait at a barrier sleep almost at once. So an engine that only waits, or a
thread that computes now and then, would slow down every other in the process: each ends its team when it rests.

Beside other programs just that is wanted: a thread that spins may take the core that the last one needs. So there is a
team more than cores while waits are to be short; it does nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from cbatch.backend.bindings import POLICIES, llama_cpp
from cbatch.backend.threads import teams
from cbatch.errors import NoThreadError
from cbatch.support.garbage import no_finalizers
from cbatch.support.interrupts import HeldBack
from cbatch.support.thread_start import started

_NAME = "cbatch-short-waits"

_SOFT = 1
"""Source: OpenMP 5.0, omp_pause_resource_t, omp_pause_soft."""


def end_team() -> None:
    """End the team of the calling thread, which must not be computing; its next computation has a new one."""
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


class ShortWaits:
    """Has threads that wait sleep almost at once, in all of the process, while anybody wants it. Any thread.

    GNU's OpenMP does so itself while there are more threads in all teams than cores. So a thread is started with a team
    of as many as are missing; all of them sleep. Source: libgomp/config/linux/wait.h, `do_spin`.
    """

    def __init__(self, gnu: Any) -> None:
        self._gnu = gnu
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin without a thread, as also the child of a fork does."""
        self._lock = threading.Lock()
        self._wanted_by: weakref.WeakSet[object] = weakref.WeakSet()
        self._end: threading.Event | None = None
        """Ends the thread; None where there is none."""

    def want(self, whose: object, n_threads: int, *, is_wanted: bool) -> None:
        """Have waits of a team of `n_threads` be short, or long unless somebody else wants them to be short."""
        is_as_wanted = is_wanted == (whose in self._wanted_by)
        if is_as_wanted and bool(self._wanted_by) == (self._end is not None):
            return
        with HeldBack(), no_finalizers(), self._lock:
            (self._wanted_by.add if is_wanted else self._wanted_by.discard)(whose)
            if self._wanted_by and self._end is None:
                self._start(n_threads)
            elif self._end is not None and not self._wanted_by:  # perhaps by one that is no more
                self._end.set()
                self._end = None

    def n_missing(self, n_threads: int) -> int:
        """Return how many threads are to be added to a team of `n_threads`."""
        return max(0, int(self._gnu.omp_get_num_procs()) - n_threads) + 1

    def _start(self, n_threads: int) -> None:
        is_there, end = threading.Event(), threading.Event()
        try:
            started(partial(self._sleep, self.n_missing(n_threads), is_there, end), _NAME)
        except NoThreadError:
            return
        self._end = end
        is_there.wait()

    def _sleep(self, n_missing: int, is_there: threading.Event, end: threading.Event) -> None:
        try:
            free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
            n_threads = teams().n_affordable(n_missing + 1)
            self._gnu.GOMP_parallel(free, None, n_threads, 0)  # free(NULL) does nothing
        finally:
            is_there.set()
        end.wait()  # the team ends with its thread


def short_waits(n_threads: int) -> ShortWaits | None:
    """Return the process's one for a team of `n_threads`.

    None with another runtime, where the user has said how threads wait, and where more threads would have to be added
    than compute, as in a container with few of many cores: GNU's runtime ends the process if it cannot start one.
    """
    waits = _short_waits()
    return waits if waits is not None and waits.n_missing(n_threads) <= n_threads else None


@cache
def _short_waits() -> ShortWaits | None:
    gnu = _gnu()
    return None if gnu is None or any(name in os.environ for name in POLICIES) else ShortWaits(gnu)


@cache
def _pause() -> Any:
    """Return GNU's function that ends the calling thread's team; LLVM's would stop the teams of all threads."""
    return getattr(_gnu(), "omp_pause_resource_all", None)


@cache
def _gnu() -> Any:
    for lib in _ggml_handles():
        if hasattr(lib, "GOMP_parallel") and not hasattr(lib, "__kmpc_fork_call"):
            return lib
    return None


def gomp_parallel() -> int | None:
    """Return the address of ggml's own `GOMP_parallel`: another runtime has other threads."""
    for lib in _ggml_handles():
        function = getattr(lib, "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _ggml_handles() -> Iterator[Any]:
    """Yield handles of libraries that ggml's OpenMP runtime is a dependency of.

    That is libllama, or the CPU backend where ggml loads its backends by itself.
    """
    yield llama_cpp.llama_cpp._lib
    with suppress(OSError):  # where there is no /proc
        maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines()
        paths = (line.split(maxsplit=5)[5] for line in maps if "/libggml-cpu" in line)
        for path in dict.fromkeys(paths):
            yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
