"""Workers in threads of the test's own process, on any backend; and engines over them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.runtime.local import LocalRuntime
from cbatch.worker.client import Workers
from cbatch.worker.framing import read_frames, read_lines
from cbatch.worker.service import read_hello, serve
from cbatch.worker.wire import VERSION, dumps

if TYPE_CHECKING:
    from cbatch.backend import Backend

MakeRuntime = Callable[[], LocalRuntime]


class ThreadLink:
    """A worker in a thread, spoken to by pipes."""

    def __init__(self, make: MakeRuntime, **hello: Any) -> None:
        in_read, self._in_write = os.pipe()
        out_read, self._out_write = os.pipe()
        self._source, self._output = open(in_read, "rb"), open(out_read, "rb")  # noqa: SIM115
        self._is_closed = False
        self._closing = threading.Lock()
        self.runtime = make()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        level = logging.getLogger("cbatch").getEffectiveLevel()
        said = {"cbatch": VERSION, "frames": "length", "log_level": level, **hello}
        self._thread.start()
        self.send(dumps(said))

    def _serve(self) -> None:
        lines = read_lines(self._source)
        first = next(lines, None)
        if first:
            serve(self.runtime, read_hello(first), lines, self._out_write, self._leave)
        self.runtime.close()
        self._leave()

    def _leave(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._out_write)

    def send(self, line: bytes) -> None:
        data = memoryview(line + b"\n")
        while data:
            data = data[os.write(self._in_write, data) :]

    def frames(self) -> Iterator[bytes]:
        return read_frames(self._output)

    def kill(self) -> None:
        self._leave()

    def end(self) -> str:
        with suppress(OSError):
            os.close(self._in_write)
        self._thread.join()
        self._source.close()
        self._output.close()
        return ""


def workers_over(*make: MakeRuntime, can_replace: bool = False) -> Workers:
    """A client of workers in threads, one for each factory of a runtime."""
    return Workers([partial(ThreadLink, m) for m in make], can_replace=can_replace)


def engine_over(*backends: Backend, schedule: ScheduleOptions | None = None, **more: Any) -> Engine:
    """An engine whose workers compute on these backends, one each."""

    made = [partial(LocalRuntime, backend, schedule or ScheduleOptions()) for backend in backends]

    return Engine(opener=lambda _: workers_over(*made), **more)
