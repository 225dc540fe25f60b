"""Looks at the computing of a context's graphs between their nodes: `native/watch.cpp`."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.library import address, library
from cbatch.backend.llama.structs import NativeWatchParams

VECTORS = b"result_embd_pooled"
"""The name of the vectors in a graph. Source: llama.cpp's src/llama-graph.cpp, build_pooling."""

_Turn = ctypes.CFUNCTYPE(ctypes.c_double)


class GraphWatch:
    """Ends the graphs of one context behind a node, gives turns to other work between nodes, or breaks them off.

    The context must not compute after this object is gone: keep it as long.
    """

    def __init__(self, last: bytes | None = None, *, has_turns: bool = False) -> None:
        """Make one.

        Args:
            last: the name of the node behind which graphs end. A graph without it is computed whole.
            has_turns: whether `turns` will be used.
        """
        ggml, self._lib = llama_cpp.llama_cpp._lib, library()
        get_name, get_op = (getattr(ggml, f"ggml_{name}", None) for name in ("get_name", "op_desc"))
        self.is_alone = True
        """Whether nothing else waited when the last turn was taken."""
        self._take_turn: Callable[[], float] | None = None
        self._error: BaseException | None = None
        taken = weakref.WeakMethod(self.turn)  # the watch must not keep itself
        self._called = _Turn(lambda: -1.0 if (turn := taken()) is None else turn())
        turn = ctypes.cast(self._called, ctypes.c_void_p) if has_turns else None
        self._params = NativeWatchParams(address(get_name), address(get_op), last, turn)
        self._pointer: int | None = None
        if get_name is not None and get_op is not None:
            self._pointer = self._lib.cbatch_watch_init(ctypes.addressof(self._params))
        if self._pointer is not None:
            # at the interpreter's end a graph may still be computed
            weakref.finalize(self, self._lib.cbatch_watch_free, self._pointer).atexit = False

    def watch(self, params: Any) -> None:
        """Have contexts of these parameters watched, llama.cpp's or libmtmd's, if ggml's functions can be reached."""
        if self._pointer is not None:
            callback = llama_cpp.ggml_backend_sched_eval_callback
            params.cb_eval = ctypes.cast(self._lib.cbatch_watch_callback, callback)
            params.cb_eval_user_data = self._pointer

    def stop(self) -> None:
        """Break off the graph under way, and every later one behind its first nodes. From any thread."""
        if self._pointer is not None:
            self._lib.cbatch_watch_stop(self._pointer)

    def hurry(self) -> None:
        """Have a turn taken at the next pause. From any thread."""
        if self._pointer is not None:
            self._lib.cbatch_watch_hurry(self._pointer)

    @contextmanager
    def turns(self, take: Callable[[], float] | None) -> Iterator[None]:
        """Have `take` called at once, and between nodes of the graphs that the block computes.

        Args:
            take: does other work; returns the seconds for which to go on, infinity while nothing else waits. What it
                raises breaks the graph off, and `check` raises it.
        """
        self._take_turn = take
        try:
            if take is not None:
                self.turn()
                self.check()
                self.hurry()  # native code does not know for how long to go on
            yield
        finally:
            self._take_turn, self._error, self.is_alone = None, None, True

    def check(self) -> None:
        """Raise what has broken off the graph that was computed last, in a block of `turns`."""
        if self._error is not None:
            raise self._error

    def turn(self) -> float:
        """Take a turn, for native code; return the seconds for which to go on, less than 0 to break the graph off."""
        if self._take_turn is None:
            return math.inf
        try:
            self.check()
            seconds = self._take_turn()
        except BaseException as error:  # it must not go through llama.cpp
            self._error = error
            return -1.0
        self.is_alone = math.isinf(seconds)
        return max(0.0, seconds)
