"""`cbatch daemon`: an engine that other programs drive by lines, over pipes or a socket."""

import os
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from io import BufferedReader
from pathlib import Path
from socket import SHUT_RDWR
from typing import Annotated

import typer

import cbatch
from cbatch.cli.option_table import ENGINE, Given, names_in, option, takes
from cbatch.cli.signals import ended_softly
from cbatch.cli.terminal import say
from cbatch.daemon.line_session import LineSession
from cbatch.daemon.listening import Listener, hang_up
from cbatch.daemon.streams import StreamWriter, busy_frames, lines_of, without_mark
from cbatch.engine import open_local
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, EngineClosedError, EngineError, NoThreadError, words_of
from cbatch.files.places import stdin, stdout
from cbatch.runtime.local import LocalRuntime
from cbatch.support.interrupts import Postponed
from cbatch.worker.host import SessionEnd
from cbatch.worker.service import refusal, serve_client

_ANSWERS = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "timeout_s")
_ALSO = {
    "--cache-slots": "--parallel",
    "--target-cache-slots": "--parallel",
    "--max-ctx": "--ctx-per-seq",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "--tagged-stream": "--stream-tagged",
}
"""Names that options have in the daemon whose lines these are."""

_STDERR = 2


@takes(*names_in(*ENGINE), *_ANSWERS, also=_ALSO)
def daemon(
    ctx: typer.Context,
    *,
    stream_tagged: Annotated[
        bool,
        option(
            "--stream-tagged",
            help="Write each frame with the id of its request; needed to run several requests at once.",
        ),
    ] = False,
    stream_fd: Annotated[
        int | None,
        option("--stream-fd", help="File descriptor to write frames to.", default="stdout"),
    ] = None,
    socket: Annotated[
        Path | None,
        option(
            "--socket",
            help="Serve clients at a Unix socket of this path, one at a time.",
            default="stdin",
        ),
    ] = None,
    port: Annotated[
        int | None,
        option(
            "--port",
            help="Serve clients of this machine at this TCP port, one at a time; 0 takes a free port.",
            min=0,
            max=65535,
        ),
    ] = None,
    given: Given,
) -> None:
    """Control an engine with text commands on stdin or a socket.

    Tokens go to stdout as four-byte numbers, text to stderr. At the end of the
    input, the daemon ends once all requests have ended. If the first line is
    JSON, all lines and frames are JSON.

    Example: cbatch daemon -m model.gguf --cache-slots 4 --stream-tagged
    """
    ctx.obj.never_wait_for_stderr()
    options, settings = given.run_options(), given.engine_settings()
    _check_call(stream_fd, socket, port)
    serve = partial(_serve, options=options, is_tagged=stream_tagged)
    place = socket if port is None else port
    fd = None if place is not None else _stream(stream_fd)
    text = StreamWriter(_STDERR, lambda: None)
    try:
        with _opened(given["model"], settings) as runtime:
            if fd is not None:
                ending = serve(runtime, _input(), fd, text)
            elif place is not None:
                busy = partial(_busy, is_tagged=stream_tagged)
                with closing(Listener(place, busy)) as listener, ended_softly():
                    ending = _serve_clients(
                        partial(serve, runtime), listener, text, is_tagged=stream_tagged
                    )
            if ending is SessionEnd.FAILED:
                _check(runtime)
    finally:
        text.close()
    if ending is SessionEnd.LEFT:
        say("cbatch: the reader of the stream has left, so the daemon ends here")


def _check(runtime: LocalRuntime) -> None:
    try:
        runtime.check_open()
    except EngineClosedError as error:
        cause = error.__cause__ or error
        raise EngineClosedError(f"the engine stopped: {words_of(cause)}") from error


def _serve(
    runtime: LocalRuntime,
    source: BufferedReader,
    fd: int,
    text: StreamWriter,
    *,
    options: cbatch.RunOptions,
    is_tagged: bool,
    is_apart: bool = True,
    hang_up: Callable[[], object] | None = None,
) -> SessionEnd:
    """Serve one client: `source` has its lines, `fd` gets its frames, and its text where `text` is not for it.

    Raises:
        ConfigError: the first line, of JSON, was refused, or what came later is not a frame; the client was told.
    """
    head = without_mark(source) if _peek(source) == BOM_UTF8[:1] else b""
    if not head and _peek(source) == b"{":
        return serve_client(runtime, source, fd, options=options, hang_up=hang_up)
    own = options.over(cbatch.RunOptions(temperature=0.0))
    lines = lines_of(source, head)
    shown = text if is_apart else None
    session = LineSession(runtime, fd, shown, own, is_tagged=is_tagged, hang_up=hang_up)
    return session.serve(lines)


def _serve_clients(
    serve: Callable[..., SessionEnd], listener: Listener, text: StreamWriter, *, is_tagged: bool
) -> SessionEnd:
    """Serve one client after the other until the engine stops."""
    text.write(f"cbatch: listening on {listener.name}\n".encode(errors="backslashreplace"))
    for client in listener.clients():
        source = client.makefile("rb")
        try:
            ending = serve(
                source,
                client.fileno(),
                text,
                is_apart=not is_tagged,
                hang_up=partial(client.shutdown, SHUT_RDWR),
            )
        except ConfigError:  # of its input, as it was told
            continue
        except NoThreadError as error:
            text.write(f"cbatch: a client was hung up on: {error}\n".encode())
            continue
        finally:
            hang_up(client)  # first: a thread may still read there
            source.close()
        if ending is SessionEnd.FAILED:
            return ending
    return SessionEnd.DONE


def _peek(source: BufferedReader) -> bytes:
    """Return the next byte of a client's input, which is `{` where the client speaks JSON; waits for the byte."""
    try:
        return source.peek(1)[:1]
    except OSError:  # the client has left
        return b""


def _busy(first: bytes, *, is_tagged: bool) -> bytes:
    """Return what a client is told that comes while another is served, by what it has sent."""
    first = first.removeprefix(BOM_UTF8)
    if first.startswith(b"{"):
        return refusal(
            first.partition(b"\n")[0], EngineError("another client is connected: try again later")
        )
    return busy_frames(is_tagged=is_tagged)


def _opened(model: Path | None, settings: Mapping[str, object]) -> "closing[LocalRuntime]":
    """Load a model; Ctrl-C ends the load."""
    with Postponed() as signals:
        options = EngineOptions.of(settings)
        runtime = open_local(model, options, None, lambda: signals.has_struck)
        if signals.has_struck:
            runtime.close()
    return closing(runtime)


def _check_call(stream_fd: int | None, socket: Path | None, port: int | None) -> None:
    if socket is not None and port is not None:
        raise cbatch.ConfigError("give --socket or --port, not both")
    if stream_fd is not None and (socket is not None or port is not None):
        name = "--socket" if port is None else "--port"
        raise cbatch.ConfigError(
            f"with {name}, the stream goes to the client: leave out --stream-fd"
        )


def _stream(fd: int | None) -> int:
    """Return the descriptor that frames go to; what others print to stdout goes to stderr from now on."""
    if fd is None:
        own = os.dup(stdout().fileno())
        os.dup2(_STDERR, stdout().fileno())
        return own
    if fd in (0, _STDERR):
        what = "commands come from" if fd == 0 else "text goes to"
        raise cbatch.ConfigError(f"--stream-fd {fd} is where {what}: give another descriptor")
    try:
        os.write(fd, b"")
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "too large"
        raise cbatch.ConfigError(f"--stream-fd {fd} cannot be written to: {reason}") from None
    return fd


def _input() -> BufferedReader:
    # not Python's own file, which a thread that waits would keep locked at the end of the process
    return open(os.dup(stdin().fileno()), "rb")
