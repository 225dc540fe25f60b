"""One client's time with a worker: the first lines of both, then commands until the client has no more."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import cbatch
from cbatch.checks import MAX_INT, check_choice, check_int, check_keys, check_path, shown
from cbatch.engine import open_local
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError, ConfigError
from cbatch.messages import LookAhead
from cbatch.options import RunOptions
from cbatch.worker.framing import N_LINE_MAX, FrameSink, framed, read_lines, write_some
from cbatch.worker.host import Host, LogToOutbox, SessionEnd
from cbatch.worker.outbox import Outbox
from cbatch.worker.placement import place
from cbatch.worker.wire import (
    VERSION,
    dumps,
    error_as_json,
    loads,
    options_as_json,
    options_of_json,
    plain_json,
    prompt_as_json,
    prompt_of_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import BinaryIO

    from cbatch.runtime.local import LocalRuntime
    from cbatch.worker.framing import Frames

STALL_S = 30.0
"""A client of a socket that takes nothing of its last output for so long is left, for others wait. Our choice."""


def hello_of(
    model: str | None, options: Mapping[str, Any], look_ahead: LookAhead | None, **more: object
) -> dict[str, Any]:
    """Return a client's first line for a worker that is to load a model."""
    prompts = None
    if look_ahead is not None:
        pairs, n_bytes = list[tuple[object, object]](), 0
        for prompt, run_options in look_ahead.prompts:
            pair = prompt_as_json(prompt, "-"), options_as_json(run_options)
            n_bytes += len(dumps(pair))
            if n_bytes > N_LINE_MAX // 2:  # the rest would make the line too long
                break
            pairs.append(pair)
        is_all = look_ahead.is_all and len(pairs) == len(look_ahead.prompts)
        prompts = {"prompts": pairs, "is_all": is_all}
    load = {"model": model, "settings": dict(options), "look_ahead": prompts, **more}
    return {
        "cbatch": VERSION,
        "frames": "length",
        "log_level": logging.getLogger("cbatch").getEffectiveLevel(),
        "load": load,
    }


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's first line, checked."""

    frames: Frames = "lines"
    credit: int | None = None
    """Bytes that the client takes before it grants more; None for any number."""
    log_level: int = logging.WARNING
    load: dict[str, Any] | None = None
    """The model, where this process has none yet."""


def load_and_serve(source: BinaryIO, sink: int, leave: Callable[[], object]) -> None:
    """Load what a client's first line says and serve it; end when the client has no more lines.

    Args:
        source: where lines come from.
        sink: descriptor for frames.
        leave: called at the end, where nobody hears what more there is to say.
    """
    lines = read_lines(source)
    first = next(lines, b"") or b""
    try:
        hello = read_hello(first)
        said = _Kept()
        with _logs_to(said, hello.log_level):
            runtime = _load(hello.load)
    except CBatchError as error:
        _refuse(first, sink, error)
        return
    try:
        if serve(runtime, hello, lines, sink, said=said.records) is not SessionEnd.DONE:
            leave()
    finally:
        runtime.close()


def serve_client(
    runtime: LocalRuntime,
    first: bytes | None,
    lines: Iterable[bytes | None],
    sink: int,
    *,
    options: RunOptions | None = None,
    hang_up: Callable[[], object] | None = None,
) -> SessionEnd:
    """Serve one client of a daemon that has its model, from its first line on; its requests are finished at the end.

    Args:
        runtime: nobody else gives it requests meanwhile; it stays open, without requests.
        first: the client's first line; None for one that is too long.
        lines: the others, as `read_lines` gives them.
        sink: descriptor for frames.
        options: defaults for every request.
        hang_up: ends `lines` where the reader has left, or takes nothing for a while at the end; None for a
            descriptor of the process itself, which ends then.
    """
    try:
        hello = read_hello(first or b"")
        if hello.load is not None:
            raise ConfigError("load: this process has its model; leave it out")
    except CBatchError as error:
        return _refuse(first or b"", sink, error)
    return serve(runtime, hello, lines, sink, options=options, finishes=True, hang_up=hang_up)


def serve(
    runtime: LocalRuntime,
    hello: Hello,
    lines: Iterable[bytes | None],
    sink: int,
    *,
    options: RunOptions | None = None,
    finishes: bool = False,
    hang_up: Callable[[], object] | None = None,
    said: Iterable[logging.LogRecord] = (),
) -> SessionEnd:
    """Serve a runtime to a client whose first line is known; see `serve_client`.

    Args:
        runtime: as there.
        hello: the client's first line.
        lines: the others.
        sink: descriptor for frames.
        options: as there.
        finishes: finish the requests in flight when the lines end; else they are cancelled.
        hang_up: as there.
        said: lines of the log that the client gets first.
    """
    frames = FrameSink(sink, hello.frames)
    try:
        frames.write(dumps(_ready(runtime)))
    except OSError:
        return SessionEnd.LEFT
    outbox = Outbox(frames, lambda: host.leave(), hello.credit)
    host = Host(runtime, outbox, options)
    reader = threading.Thread(target=host.read, args=(lines,), name="cbatch-lines", daemon=True)
    log = LogToOutbox(outbox)
    for record in said:
        log.handle(record)
    with _logs_to(log, hello.log_level):
        reader.start()
        try:
            if host.wait() is SessionEnd.LEFT:
                _leave(hang_up, reader)
            return host.finish(is_patient=finishes)
        finally:
            outbox.close(None if hang_up is None else STALL_S)
            _leave(hang_up, reader)


def _leave(hang_up: Callable[[], object] | None, reader: threading.Thread) -> None:
    """Have no more lines come."""
    if hang_up is not None:
        with suppress(OSError):  # the other side is gone
            hang_up()
        reader.join()


class _Kept(logging.Handler):
    """Keeps lines of the log until there is somebody to send them to."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.records.append(record)


@contextmanager
def _logs_to(handler: logging.Handler, level: int) -> Iterator[None]:
    """Have a handler take the log's lines of at least this level."""
    logger = logging.getLogger("cbatch")
    handler.setLevel(level)
    before, is_lower = logger.level, level < logger.getEffectiveLevel()
    logger.addHandler(handler)
    if is_lower:
        logger.setLevel(max(1, level))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        if is_lower:
            logger.setLevel(before)


def read_hello(line: bytes) -> Hello:
    """Return a client's first line.

    Raises:
        ConfigError: it is not one, or of another version.
    """
    said = loads(line)
    version = said.pop("cbatch", None)
    if type(version) is not int or version != VERSION:
        raise ConfigError(
            f'the first line must have "cbatch": {VERSION}, the version of the protocol, not {shown(version)}'
        )
    check_keys("the first line", said, ("cbatch", *(f.name for f in fields(Hello))))
    credit, load = said.get("credit"), said.get("load")
    if not isinstance(load, dict | None):
        raise ConfigError(f"load is a JSON object, not {shown(load)}")
    return Hello(
        frames=_frames_of(said),
        credit=None if credit is None else check_int("credit", credit, 1, MAX_INT),
        log_level=check_int("log_level", said.get("log_level", logging.WARNING), 0, 100),
        load=load,
    )


def _frames_of(said: Mapping[str, Any]) -> Frames:
    frames = check_choice("frames", said.get("frames", "lines"), "lines", "length")
    return cast("Frames", frames)


def refusal(first: bytes, error: CBatchError) -> bytes:
    """Return what a client is told that is not served, in frames as its first line wants them."""
    frames: Frames = "lines"
    with suppress(ConfigError):
        frames = _frames_of(loads(first))
    said = {"cbatch": VERSION, "error": error_as_json(error)}
    return framed(dumps(plain_json(said)), frames)


def _refuse(first: bytes, sink: int, error: CBatchError) -> SessionEnd:
    data = memoryview(refusal(first, error))
    try:
        while data:
            data = data[write_some(sink, data) :]
    except OSError:
        return SessionEnd.LEFT
    return SessionEnd.DONE


def _ready(runtime: LocalRuntime) -> dict[str, Any]:
    return {
        "cbatch": VERSION,
        "version": cbatch.__version__,
        "pid": os.getpid(),
        "parallel": runtime.n_slots,
        "n_window": runtime.n_window,
        "has_limit": runtime.has_limit,
    }


def _load(said: dict[str, Any] | None) -> LocalRuntime:
    """Load the model that a client's first line names."""
    if said is None:
        raise ConfigError("the first line must have load: this process has no model yet")
    check_keys("load", said, ("model", "settings", "look_ahead", "cores", "n_sharing"))
    model, settings = said.get("model"), said.get("settings") or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"settings are a JSON object, not {shown(settings)}")
    place(said.get("cores"))
    return open_local(
        None if model is None else check_path("model", model),
        EngineOptions.of(settings),
        _look_ahead(said.get("look_ahead")),
        bool,
        n_sharing=check_int("n_sharing", said.get("n_sharing", 1), 1, MAX_INT),
    )


def _look_ahead(said: Any) -> LookAhead | None:
    if said is None:
        return None
    try:
        pairs = [
            (prompt_of_json(prompt), RunOptions.of(options_of_json(options)))
            for prompt, options in said["prompts"]
        ]
        return LookAhead(pairs, is_all=said["is_all"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"look_ahead: {error}") from None
