"""`cbatch serve`: a model behind HTTP."""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import cbatch
from cbatch.cli.completion import among
from cbatch.cli.main import ALWAYS_SHOWN, LogLevel, LogLines, show_log
from cbatch.cli.option_table import (
    ANSWERS,
    ENGINE,
    Given,
    Option,
    in_panel,
    in_reach,
    name_of,
    names_in,
    number_or_word,
    or_none,
    takes,
)
from cbatch.cli.terminal import say, tell
from cbatch.daemon.listening import remove_socket, socket_at
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.loading import best_replicas, check_replicas
from cbatch.server.server_settings import ServerSettings
from cbatch.support.checks import check_text, reading
from cbatch.support.hub import local_model
from cbatch.support.logs import FIELDS

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from cbatch.server.ending import Ending

KEY_VARIABLE = "CBATCH_API_KEY"
"""The environment variable of a key: on a command line, others would see it."""

_NOT_HERE = ("max_queue", "when_full", "slot")

HTTP = "Server"

_N_PATH = 200
"""Most characters of a path in a short log line. Our choice."""

_WORKERS_S = 60.0
"""Most seconds for workers to end. Our choice."""


class LogFormat(str, Enum):
    """How HTTP requests are logged."""

    NONE = "none"
    SHORT = "short"
    TEXT = "text"
    JSON = "json"


_http = in_panel(HTTP)
_setting = partial(Option, HTTP, owner=ServerSettings)
_SETTINGS = (
    _setting("model_name", "Name of the model in answers.", "its file's name"),
    _setting("max_queue", "Most waiting requests; others get status 429.", "any number"),
    _setting(
        "max_queue_tokens",
        "Most waiting prompt tokens; requests beyond that get status 429.",
        "any number",
    ),
    _setting(
        "max_answers_mib",
        "Most MiB of answers in memory; above it, large or slowly read ones end with status 503.",
    ),
    _setting(
        "max_bodies_mib",
        "Most MiB of all large bodies together; further ones get status 429.",
        "an eighth of the free memory",
    ),
    _setting("max_body_mib", "Most MiB of a request's body, or of a whole message batch."),
    _setting(
        "cors_origin",
        "Origin whose web pages may use the server: a URL, localhost (any port), or * for all; may be repeated.",
        "none",
        setting="cors_origins",
        read=or_none,
        type=list[str],
    ),
    _setting(
        "allowed_host",
        "Without keys: accept this host name besides IP addresses and localhost (* for all); may be repeated.",
        "none",
        setting="allowed_hosts",
        read=or_none,
        type=list[str],
    ),
    _setting(
        "allow_cache_keys",
        "Let clients save KV caches on disk (cache_key); each API key has caches of its own.",
    ),
    _setting("strict_fields", "Refuse unknown fields instead of ignoring them."),
    _setting("max_file_mib", "Most MiB of an uploaded file."),
    _setting("max_stored_mib", "Most MiB of all stored files together."),
    _setting("no_page", "Do not serve the page for trying the model.", setting="page", read=not_),
    _setting("model_required", "Refuse requests that name no model."),
)
"""Fields of `ServerSettings` as options."""


@takes(*names_in(*ENGINE, ANSWERS, without=_NOT_HERE), own=_SETTINGS)
def serve(
    ctx: typer.Context,
    *,
    host: Annotated[str, _http("The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, _http("The port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8080,
    uds: Annotated[
        Path | None,
        _http("Listen on a Unix socket at this path instead, for this user only.", "none"),
    ] = None,
    replicas: Annotated[
        str,
        _http(
            "Worker processes with the model, which share the cores: a number, or auto.",
            metavar="N",
            autocompletion=among(["auto"]),
        ),
    ] = "auto",
    api_key_file: Annotated[
        Path | None,
        _http(
            "File of API keys, one a line; clients must send one.",
            "the one in CBATCH_API_KEY, else none",
        ),
    ] = None,
    max_connections: Annotated[
        int | None,
        _http(
            "Most connections; others get status 503.",
            "4096, or what the limit of open files allows",
            min=1,
        ),
    ] = None,
    no_auth: Annotated[
        bool,
        _http(
            "Without API keys, allow an address that other machines can reach.", None, "--no-auth"
        ),
    ] = False,
    grace_s: Annotated[
        float,
        _http("Seconds for calls in flight to end at shutdown.", min=0, callback=in_reach),
    ] = 30.0,
    tls_cert: Annotated[Path | None, _http("A certificate file, for https.", "none")] = None,
    tls_key: Annotated[Path | None, _http("The certificate's key file.", "in --tls-cert")] = None,
    files_dir: Annotated[
        Path | None,
        _http(
            "Folder of uploaded files and batches.",
            "one for each address, in the user's state folder",
        ),
    ] = None,
    log_format: Annotated[
        LogFormat | None,
        _http(
            "Log of HTTP requests on stderr: short (one line each), text or json (all figures), or none.",
            "short; none with --log-level",
            metavar="FORMAT",
            case_sensitive=False,
        ),
    ] = None,
    given: Given,
) -> None:
    """Serve a model over HTTP, in the formats of OpenAI's and Anthropic's APIs.

    On Ctrl-C or SIGTERM, new calls are refused, and calls in flight have
    --grace-s seconds to end; a second signal ends them at once. SIGHUP does the
    same in a terminal; without a terminal it reloads the model.

    Example: cbatch serve -m model.gguf --parallel 16 --port 8080
    """
    ctx.obj.never_wait_for_stderr()
    _check_installed()
    from cbatch.server import create_app  # needs the extra
    from cbatch.server.batch_store import default_folder
    from cbatch.server.ending import Ending
    from cbatch.server.front import Front, Renewal, on_hangup
    from cbatch.server.serving import limits_for, tls_of
    from cbatch.server.serving import serve as serve_app

    _show_requests(ctx, log_format)
    options, engine_settings = given.run_options(), given.engine_settings()
    settings = {"api_keys": _keys(api_key_file, no_auth=no_auth), **given.settings(HTTP)}
    ServerSettings(**settings)  # checked before the model is loaded
    is_guarded = _is_guarded(settings["api_keys"], no_auth=no_auth)
    n_replicas = _n_replicas(replicas, given["model"], engine_settings)
    load = partial(cbatch.load, options=options, replicas=n_replicas, **engine_settings)
    tls, limits = tls_of(_text(tls_cert), _text(tls_key)), limits_for(max_connections)
    ending = Ending(grace_s)
    ctx.obj.on_exit = ending.leave_threads
    with (
        ending.on_signals(),
        ExitStack() as stack,
        _opened(uds, partial(_bound, host, port, is_guarded=is_guarded)) as address,
        _loaded(load, given["model"], ending) as engine,
    ):
        app, why_no_files = _with_files(
            partial(create_app, engine, **settings), files_dir, default_folder(port, uds)
        )
        again = partial(create_app, **settings)
        renewal = Renewal(partial(local_model, given["model"]), load, again)
        front = Front(app, renewal, grace_s)
        stack.enter_context(on_hangup(front.ask_again))
        where = str(uds) if uds else _url(host, address, is_secure=tls is not None)
        slots = f"{engine.parallel} slots of {engine.n_window} tokens"
        serve_app(
            front,
            address,
            ending=ending,
            tls=tls,
            limits=limits,
            on_ready=lambda: _say_ready(
                ctx,
                f"serving {app.state.desk.model_name} at {where}, {slots}",
                why_no_files,
                *_notes(app),
            ),
        )


@contextmanager
def _opened(path: Path | None, bound: Callable[[], socket.socket]) -> Iterator[socket.socket]:
    """Open the socket of a path, or else of an address, for the block."""
    if path is None:
        with bound() as opened:
            yield opened
        return
    with socket_at(path) as opened:
        name = path.lstat()
        try:
            yield opened
        finally:
            remove_socket(path, name)


def _bound(host: str, port: int, *, is_guarded: bool) -> socket.socket:
    """Return the socket of an address. `is_guarded`: other machines may reach it."""
    from cbatch.server.serving import bound_socket  # needs the extra

    opened = bound_socket(host, port)
    number = ip_address(opened.getsockname()[0].partition("%")[0])
    if not is_guarded and not number.is_loopback:
        opened.close()
        raise ConfigError(
            f"--host {host}: other machines can reach this address, but no API key is set: give --api-key-file (or "
            f"{KEY_VARIABLE}), or --no-auth to serve everybody"
        )
    return opened


@contextmanager
def _loaded(
    load: Callable[[Path | None], cbatch.Engine], model: Path | None, ending: "Ending"
) -> Iterator[cbatch.Engine]:
    """Load a model for the block, and say so on a terminal. At its end, workers have the rest of the grace period."""
    if sys.stderr is not None and sys.stderr.isatty():
        say(f"cbatch: loading {name_of(model)}")
    with load(model) as engine:
        yield engine
        if ending.has_begun:
            engine.close(within_s=ending.left_s(_WORKERS_S))


def _n_replicas(asked: str, model: object, engine_settings: dict[str, Any]) -> int:
    """Return the number of worker processes: at least one, so that a model that ends its process leaves the server."""
    n = check_replicas("--replicas", number_or_word(asked))
    return best_replicas(model, EngineOptions.of(engine_settings)) if n == "auto" else n


def _with_files(
    create: "Callable[..., Starlette]", folder: Path | None, usual: Path
) -> "tuple[Starlette, str]":
    """Return the application, and why it keeps no files: the folder that nobody named cannot be used."""
    try:
        return create(files_dir=folder or usual), ""
    except ConfigError as error:
        if folder is not None:
            raise
        return create(), f"no files and batches here: {error}: name another folder with --files-dir"


def _notes(app: "Starlette") -> Sequence[str]:
    """Return what was wrong with the folder of files; nothing if the log shows it."""
    handlers = logging.getLogger("cbatch").handlers
    is_logged = any(isinstance(handler, LogLines | ShortLines) for handler in handlers)
    batches = app.state.desk.batches
    return () if is_logged or batches is None else batches.store.notes


class ShortLines(logging.Handler):
    """Prints a line for each HTTP request, and warnings and errors that are not shown anyway."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line for an HTTP request or a warning; ignore other records."""
        try:
            values = getattr(record, FIELDS, {})
            if "latency_ms" in values:
                say(_request_line(record.created, values))
            elif record.levelno >= logging.WARNING and record.name not in ALWAYS_SHOWN:
                say(f"cbatch: {self.format(record)}")
        except Exception:
            self.handleError(record)


def _request_line(time_s: float, values: dict[str, Any]) -> str:
    """Return the short line of a request: ASCII, and its path one word, so that no path looks like another line."""
    path = ascii(values["path"][:_N_PATH])[1:-1].replace(" ", "%20")
    when = time.strftime("%H:%M:%S", time.localtime(time_s))
    return f"{when} {values['method']} {path} {values['status']} {values['latency_ms']:,.0f} ms"


def _show_requests(ctx: typer.Context, asked: LogFormat | None) -> None:
    """Show a line for each HTTP request, or the log with times: at --log-level, else at info."""
    level: LogLevel | None = ctx.find_root().params.get("log_level")
    log_format = asked or (LogFormat.SHORT if level is None else LogFormat.NONE)
    if log_format is LogFormat.SHORT:
        _show_short(ctx)
    elif log_format is not LogFormat.NONE:
        ctx.obj.says_events = log_format is LogFormat.JSON
        show_log(ctx, level or LogLevel.INFO, has_time=True)
        if level is None:
            _set_level(ctx, logging.getLogger("cbatch.llama"), logging.WARNING)


def _show_short(ctx: typer.Context) -> None:
    logger, lines = logging.getLogger("cbatch"), ShortLines()
    logger.addHandler(lines)
    ctx.call_on_close(lambda: logger.removeHandler(lines))
    _set_level(ctx, logging.getLogger("cbatch.server"), logging.INFO)


def _set_level(ctx: typer.Context, logger: logging.Logger, level: int) -> None:
    """Set a logger's level until the command ends."""
    ctx.call_on_close(lambda before=logger.level: logger.setLevel(before))
    logger.setLevel(level)


def _say_ready(ctx: typer.Context, *texts: str) -> None:
    for text in filter(None, texts):
        if ctx.obj.says_events:
            tell("note", text=text)
        else:
            say(f"cbatch: {text}")


def _check_installed() -> None:
    for name in ("starlette", "uvicorn", "httptools", "prometheus_client", "python_multipart"):
        if find_spec(name) is None:
            raise ConfigError(
                f'serve needs packages that are not installed ({name}): pip install ".[server]" in a clone of cbatch'
            )


def _keys(file: Path | None, *, no_auth: bool) -> list[str]:
    """Return the keys of a file, one a line, or the one in the environment."""
    if file is None:
        key = os.environ.get(KEY_VARIABLE)
        if key is not None and not key.strip() and not no_auth:
            raise ConfigError(
                f"{KEY_VARIABLE} is blank: set it to a key, unset it, or give --no-auth"
            )
        return [key] if key and key.strip() else []
    with reading(f"--api-key-file {file}"):
        text = file.read_text(encoding="utf-8-sig")
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key]
    if not keys:
        raise ConfigError(f"{file} has no key: write one on each line")
    for key in keys:
        check_text("a key", key, 4096)
    return keys


def _is_guarded(keys: Sequence[str], *, no_auth: bool) -> bool:
    """Whether other machines may reach the server: it has keys, or `--no-auth` allows it."""
    if no_auth and keys:
        raise ConfigError(
            "--no-auth is for a server without keys: leave out --no-auth, or the keys (--api-key-file, "
            f"{KEY_VARIABLE})"
        )
    return no_auth or bool(keys)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _url(host: str, address: socket.socket, *, is_secure: bool) -> str:
    scheme, name = "https" if is_secure else "http", f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{address.getsockname()[1]}"
