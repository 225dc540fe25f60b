"""One client's time with a worker: the first lines of both, then commands until the client has no more."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, cast

import cbatch
from cbatch.checks import MAX_INT, check_choice, check_int, check_path, shown
from cbatch.engine import open_local
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError, ConfigError
from cbatch.messages import LookAhead
from cbatch.options import RunOptions
from cbatch.worker.framing import frame_writer, read_lines
from cbatch.worker.host import Host, LogToOutbox
from cbatch.worker.outbox import Outbox
from cbatch.worker.placement import place
from cbatch.worker.wire import (
    VERSION,
    dumps,
    error_as_json,
    loads,
    options_as_json,
    options_of_json,
    prompt_as_json,
    prompt_of_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import BinaryIO

    from cbatch.runtime.interface import Runtime
    from cbatch.worker.framing import Frames


def hello_of(
    model: str | None, options: Mapping[str, Any], look_ahead: LookAhead | None, **more: object
) -> dict[str, Any]:
    """Return a client's first line for a worker that is to load a model."""
    prompts = None
    if look_ahead is not None:
        pairs = [
            (prompt_as_json(prompt, "-"), options_as_json(opts))
            for prompt, opts in look_ahead.prompts
        ]
        prompts = {"prompts": pairs, "is_all": look_ahead.is_all}
    load = {"model": model, "settings": dict(options), "look_ahead": prompts, **more}
    return {
        "cbatch": VERSION,
        "frames": "length",
        "log_level": logging.getLogger("cbatch").getEffectiveLevel(),
        "load": load,
    }


def load_and_serve(source: BinaryIO, sink: int, leave: Callable[[], object]) -> None:
    """Load what a client's first line says and serve it; end when the client has no more lines.

    Args:
        source: where lines come from.
        sink: descriptor for frames.
        leave: called when the client does not read any more.
    """
    lines = read_lines(source)
    write = frame_writer(sink, "length")
    try:
        hello = read_hello(next(lines, b"") or b"")
        write = frame_writer(sink, frames_of(hello))
        runtime = _load(hello.get("load"))
    except CBatchError as error:
        write(dumps({"cbatch": VERSION, "error": error_as_json(error)}))
        return
    try:
        serve(runtime, hello, lines, sink, leave)
    finally:
        runtime.close()


def serve(
    runtime: Runtime,
    hello: Mapping[str, Any],
    lines: Iterator[bytes | None],
    sink: int,
    leave: Callable[[], object],
    *,
    finishes: bool = False,
) -> None:
    """Serve a runtime to a client whose first line is known, and close it in time for its last results.

    Args:
        runtime: whose requests are this client's alone.
        hello: the client's first line.
        lines: the others.
        sink: descriptor for frames.
        leave: called when the client does not read any more.
        finishes: finish the requests in flight when the lines end; else they are cancelled.
    """
    credit = hello.get("credit")
    if credit is not None:
        credit = check_int("credit", credit, 1, MAX_INT)
    write = frame_writer(sink, frames_of(hello))
    try:
        write(dumps(_ready(runtime)))
    except OSError:  # it has left meanwhile
        leave()
        return
    outbox = Outbox(write, leave, credit)
    handler, logger = LogToOutbox(outbox), logging.getLogger("cbatch")
    logger.addHandler(handler)
    logger.setLevel(check_int("log_level", hello.get("log_level", logging.WARNING), 0, 100))
    host = Host(runtime, outbox, leave)
    try:
        is_closed = host.serve(lines)
        if finishes and not is_closed:
            host.finish()
        runtime.close()
    finally:
        logger.removeHandler(handler)
        outbox.close()


def read_hello(line: bytes) -> dict[str, Any]:
    """Return a client's first line.

    Raises:
        ConfigError: it is not one, or of another version.
    """
    hello = loads(line)
    if hello.get("cbatch") != VERSION:
        raise ConfigError(
            f'the first line must have "cbatch": {VERSION}, the version of the protocol, not '
            f"{shown(hello.get('cbatch'))}"
        )
    frames_of(hello)
    return hello


def frames_of(hello: Mapping[str, Any]) -> Frames:
    """Return how a client takes frames."""
    frames = check_choice("frames", hello.get("frames", "lines"), "lines", "length")
    return cast("Frames", frames)


def _ready(runtime: Runtime) -> dict[str, Any]:
    return {
        "cbatch": VERSION,
        "version": cbatch.__version__,
        "pid": os.getpid(),
        "parallel": runtime.n_slots,
        "n_window": runtime.n_window,
    }


def _load(said: object) -> Runtime:
    """Load the model that a client's first line names."""
    if not isinstance(said, dict):
        raise ConfigError(f"the first line must have load, a JSON object, not {shown(said)}")
    model = said.get("model")
    place(said.get("cores"))
    options = EngineOptions.of(said.get("settings") or {})
    return open_local(
        None if model is None else check_path("model", model),
        options,
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
