"""A program of somebody else that drives a worker in a thread by lines of JSON."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cbatch.engine_options import ScheduleOptions
from cbatch.errors import ConfigError
from cbatch.runtime.local import LocalRuntime
from cbatch.worker.service import serve_client
from cbatch.worker.wire import VERSION

if TYPE_CHECKING:
    from types import TracebackType

    from cbatch.backend import Backend
    from cbatch.options import RunOptions
    from cbatch.worker.host import SessionEnd


class Program:
    """Writes lines to a worker over a backend and reads its frames, in one thread, the test's."""

    def __init__(
        self,
        backend: Backend,
        *,
        schedule: ScheduleOptions | None = None,
        options: RunOptions | None = None,
        first: bytes | None = None,
        **hello: Any,
    ) -> None:
        self.runtime = LocalRuntime(backend, schedule or ScheduleOptions())
        self._options = options
        in_read, in_write = os.pipe()
        out_read, self._out_write = os.pipe()
        self._source = open(in_read, "rb")  # noqa: SIM115
        self.input = open(in_write, "wb", buffering=0)  # noqa: SIM115
        self.output = open(out_read, "rb")  # noqa: SIM115
        self.ending: SessionEnd | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.raw(first or json.dumps({"cbatch": VERSION, **hello}).encode())

    def _serve(self) -> None:
        try:
            with suppress(ConfigError):  # of the first line, as the program is told
                self.ending = serve_client(
                    self.runtime, self._source, self._out_write, options=self._options
                )
        finally:
            os.close(self._out_write)

    def raw(self, line: bytes) -> None:
        """Send a line as it stands."""
        data = memoryview(line + b"\n")
        while data:
            data = data[self.input.write(data) :]

    def send(self, op: str, **fields: Any) -> None:
        """Send a command."""
        self.raw(json.dumps({"op": op, **fields}).encode())

    def read(self) -> dict[str, Any]:
        """Return the next frame."""
        frame = self.output.readline()
        assert frame.endswith(b"\n"), frame
        return strict(frame)

    def read_until(self, kind: str) -> dict[str, list[Any]]:
        """Return what came, by kind, up to the first frame that has this kind."""
        found: dict[str, list[Any]] = {}
        while kind not in found:
            add(found, self.read())
        return found

    def call(self, op: str, **fields: Any) -> Any:
        """Send a command and return its reply; output before it is dropped."""
        self.send(op, n=op, **fields)
        [[number, value, *error]] = self.read_until("replies")["replies"]
        assert (number, error) == (op, []), error
        return value

    def rest(self) -> dict[str, list[Any]]:
        """End the lines; return all that comes, by kind."""
        self.input.close()
        found: dict[str, list[Any]] = {}
        for frame in self.output:
            add(found, strict(frame))
        self._thread.join()
        return found

    def close(self) -> None:
        """Leave, and wait until the worker has noticed."""
        self.input.close()
        self.output.close()
        self._thread.join()
        self._source.close()
        self.runtime.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def add(found: dict[str, list[Any]], frame: dict[str, Any]) -> None:
    """Add a frame's values by kind."""
    for kind, values in frame.items():
        if isinstance(values, list):
            found.setdefault(kind, []).extend(values)


def strict(frame: bytes) -> dict[str, Any]:
    """Read a frame as a strict reader of JSON does."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    said = json.loads(frame.decode(), parse_constant=refuse)
    assert isinstance(said, dict)
    return said
