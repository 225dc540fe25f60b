"""One client's time with a worker: the first lines of both, then commands until the client has no more."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import Struct

import cbatch
from cbatch.engine import open_local
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError, ConfigError, ModelLoadError
from cbatch.messages import LookAhead
from cbatch.support.checks import check_path, shown
from cbatch.support.thread_start import start
from cbatch.worker.framing import (
    ENDED_S,
    N_LINE_MAX,
    STALL_S,
    FrameSink,
    framed,
    read_lines,
    read_messages,
)
from cbatch.worker.host import Host, LogToOutbox, SessionEnd
from cbatch.worker.outbox import Outbox
from cbatch.worker.placement import place
from cbatch.worker.protocol_commands import Hello, LoadCommand, LookedAhead
from cbatch.worker.wire import (
    VERSION,
    Frames,
    Ready,
    WireItem,
    as_text,
    decode,
    encode,
    encode_call,
    heard_options,
    of_text,
    told_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from cbatch.options import RunOptions
    from cbatch.runtime.local import LocalRuntime


def hello_of(
    model: str | None,
    options: Mapping[str, Any],
    look_ahead: LookAhead | None,
    *,
    cores: list[int] | None = None,
    n_sharing: int = 1,
) -> Hello:
    """Return a client's first line for a worker that is to load a model."""
    prompts = None
    if look_ahead is not None:
        prompts, n_bytes = LookedAhead([]), 0
        for prompt, run_options in look_ahead.prompts:
            pair = WireItem.of(prompt), told_options(run_options)
            try:
                n_bytes += len(encode_call(pair, "lines"))
            except ConfigError:
                break
            if n_bytes > N_LINE_MAX // 2:  # the rest would make the line too long
                break
            prompts.prompts.append(pair)
        prompts.is_all = look_ahead.is_all and len(prompts.prompts) == len(look_ahead.prompts)
    load = LoadCommand(
        model=model,
        settings=dict(options),
        look_ahead=prompts,
        cores=cores,
        n_sharing=n_sharing,
    )
    try:
        encode_call((model, load.settings), "lines")  # prompts were tried above
    except ConfigError:
        load = LoadCommand(text=as_text(load))
    log_level = logging.getLogger("cbatch").getEffectiveLevel()
    return Hello(cbatch=VERSION, frames="msgpack", parts=True, log_level=log_level, load=load)


def load_and_serve(source: BinaryIO, sink: int, leave: Callable[[], object]) -> None:
    """Load what a client's first line says and serve it; end when the client has no more lines.

    Args:
        sink: descriptor for frames.
        leave: called at the end, where nobody hears what more there is to say.
    """
    first = read_first(source)
    try:
        hello = read_hello(first)
        said = _Kept()
        with _logs_to(said, hello.log_level):
            runtime = _load(hello.load)
            begin(runtime)
    except CBatchError as error:
        _refuse(first, sink, error)
        return
    try:
        if serve(runtime, hello, source, sink, said=said.records) is not SessionEnd.DONE:
            leave()
    except ConfigError:
        leave()
    finally:
        runtime.close()


def serve_client(
    runtime: LocalRuntime,
    source: BinaryIO,
    sink: int,
    *,
    options: RunOptions | None = None,
    hang_up: Callable[[], object] | None = None,
) -> SessionEnd:
    """Serve one client of a daemon that has its model, from its first line on; its requests are finished at the end.

    Args:
        runtime: nobody else gives it requests meanwhile; it stays open, without requests.
        sink: descriptor for frames.
        options: defaults for every request.
        hang_up: ends `source` where the reader has left, or takes nothing for a while at the end; None for a
            descriptor of the process itself, which ends then.

    Raises:
        ConfigError: the first line is refused, or see `serve`; the client was told.
    """
    first = read_first(source)
    try:
        hello = read_hello(first)
        if hello.load is not None:
            raise ConfigError("load: this process has loaded its model already; leave it out")
    except ConfigError as error:
        _refuse(first, sink, error)
        raise
    return serve(runtime, hello, source, sink, options=options, finishes=True, hang_up=hang_up)


def serve(
    runtime: LocalRuntime,
    hello: Hello,
    source: BinaryIO,
    sink: int,
    *,
    options: RunOptions | None = None,
    finishes: bool = False,
    hang_up: Callable[[], object] | None = None,
    said: Iterable[logging.LogRecord] = (),
) -> SessionEnd:
    """Serve a runtime to a client whose first line is known; see `serve_client`.

    Args:
        sink: descriptor for frames.
        finishes: finish the requests in flight when the input ends; else they are cancelled.
        said: lines of the log that the client gets first.

    Raises:
        ConfigError: what came is not a frame, and ended the input; the client was told.
        NoThreadError: the system has no more threads.
    """
    frames = FrameSink(sink, hello.frames)
    try:
        frames.write(encode(_ready(runtime, hello.frames), hello.frames))
    except OSError:
        return SessionEnd.LEFT
    outbox = Outbox(frames, lambda: host.leave(), hello.credit, takes_parts=hello.parts)
    host = Host(runtime, outbox, options, hello.frames)
    lines = read_messages(source, hello.frames)
    reader = threading.Thread(target=host.read, args=(lines,), name="cbatch-lines", daemon=True)
    log, patience_s = LogToOutbox(outbox), ENDED_S
    for record in said:
        log.handle(record)
    with _logs_to(log, hello.log_level):
        try:
            start(reader)
            if host.wait() is SessionEnd.LEFT:
                _leave(hang_up, reader)
            ending = host.finish(is_patient=finishes)
            patience_s = STALL_S
        finally:
            outbox.close(None if hang_up is None else patience_s)
            _leave(hang_up, reader)
    if host.problem is not None:
        raise host.problem
    return ending


def _leave(hang_up: Callable[[], object] | None, reader: threading.Thread) -> None:
    """Have no more lines come."""
    if hang_up is not None:
        with suppress(OSError):  # the other side is gone
            hang_up()
        if reader.is_alive():
            reader.join()


class _Kept(logging.Handler):
    """Keeps lines of the log until there is somebody to send them to."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
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


def read_first(source: BinaryIO) -> bytes:
    """Return a client's first line; nothing of one that is too long."""
    return next(read_lines(source), b"") or b""


def read_hello(line: bytes) -> Hello:
    """Return a client's first line.

    Raises:
        ConfigError: it is not one, or of another version.
    """
    said = decode(line, _Greeting, "lines")
    if type(said.cbatch) is not int or said.cbatch != VERSION:
        raise ConfigError(
            f'the first line must have "cbatch": {VERSION}, the version of the protocol, not {shown(said.cbatch)}'
        )
    return decode(line, Hello, "lines")


class _Greeting(Struct):
    """What is read of a first line of any version."""

    cbatch: Any = None
    frames: Any = "lines"


def refusal(first: bytes, error: CBatchError) -> bytes:
    """Return what a client is told that is not served, in frames as its first line wants them."""
    frames: Frames = "lines"
    with suppress(ConfigError):
        frames = "msgpack" if decode(first, _Greeting, "lines").frames == "msgpack" else "lines"
    return framed(encode(Ready(cbatch=VERSION, error=error), frames), frames)


def _refuse(first: bytes, sink: int, error: CBatchError) -> None:
    with suppress(OSError):  # the reader has left
        FrameSink(sink).write_bytes(refusal(first, error))


def _ready(runtime: LocalRuntime, frames: Frames) -> Ready:
    return Ready(
        cbatch=VERSION,
        version=cbatch.__version__,
        pid=os.getpid(),
        parallel=runtime.n_slots,
        n_window=runtime.n_window,
        has_limit=runtime.has_limit,
        facts=runtime.model_facts() if frames == "msgpack" else None,
        weights=_weights(runtime),
    )


def _weights(runtime: LocalRuntime) -> str:
    said = runtime.fingerprint()
    return f"{said['model']} {said['adapters']} {said.get('projector', '')}"


def _load(said: LoadCommand | None) -> LocalRuntime:
    """Load the model that a client's first line names."""
    if said is None:
        raise ConfigError("the first line must have load: this process has no model yet")
    if said.text is not None:
        said = of_text(LoadCommand, said.text)
    place(said.cores)
    return open_local(
        None if said.model is None else check_path("model", said.model),
        EngineOptions.of(said.settings),
        None if said.look_ahead is None else _look_ahead(said.look_ahead),
        bool,
        n_sharing=said.n_sharing,
    )


def begin(runtime: LocalRuntime) -> None:
    """Start what renders chats; refuse a model that cannot be compared with those of other workers.

    A worker that cannot fails its load, and gets no requests that it would fail, or answer with another model.
    """
    try:
        if _weights(runtime).startswith("unknown"):
            raise ModelLoadError(
                "the file of the model or of an adapter was replaced while a worker loaded it (model: "
                f"{runtime.model_facts().path}): load the engine again"
            )
        runtime.start_chats()
    except CBatchError:
        runtime.close()
        raise


def _look_ahead(said: LookedAhead) -> LookAhead:
    pairs = [(item.made(), heard_options(options)) for item, options in said.prompts]
    return LookAhead(pairs, is_all=said.is_all)
