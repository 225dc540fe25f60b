"""The root of the commands: what every one of them shares, and how each of them may end."""

import logging
import traceback
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import cbatch
from cbatch.cli.options import option


class ExitCode(IntEnum):
    """What a command returns to the shell."""

    DONE = 0
    SOME_FAILED = 1
    STOPPED = 2
    """It could not start, or could not go on."""
    INTERRUPTED = 130


class LogLevel(str, Enum):
    """From which severity on the library's log lines are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogLines(logging.Handler):
    """Prints log records as lines on stderr, past a live display."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        try:
            say(self.format(record))
        except Exception:
            self.handleError(record)


class Group(TyperGroup):
    """Turns what a command raises into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; only typer's own exceptions and a closed pipe get out."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _end(ctx, error, "interrupted", ExitCode.INTERRUPTED)
        except Exception as error:
            if _is_typers_own(error):
                _name_variable(error)
                raise
            _end(ctx, error, _words(error), ExitCode.STOPPED)


def make_app(*commands: Callable[..., None]) -> typer.Typer:
    """Return the application of these commands, each named as its function."""
    app = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "auto_envvar_prefix": "CBATCH",
        },
    )
    app.callback()(_root)
    for command in commands:
        app.command()(command)
    return app


def say(line: str) -> None:
    """Print a line for the person at the terminal; stdout is for answers."""
    typer.echo(line, err=True)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"cbatch {cbatch.__version__}")
        raise typer.Exit


def _show_log(ctx: typer.Context, level: LogLevel) -> None:
    """Show the library's log from this level on, until the command has ended."""
    logger, lines = logging.getLogger("cbatch"), LogLines()
    lines.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(lines)
    ctx.call_on_close(lambda: logger.removeHandler(lines))
    ctx.call_on_close(lambda before=logger.level: logger.setLevel(before))
    logger.setLevel(level.name)


def _root(
    ctx: typer.Context,
    *,
    version: Annotated[
        bool,
        option(
            "--version",
            callback=_show_version,
            is_eager=True,
            allow_from_autoenv=False,  # CBATCH_VERSION is what a build script would call its own
            help="Print the version and exit.",
        ),
    ] = False,
    log_level: Annotated[
        LogLevel | None,
        option("--log-level", case_sensitive=False, default="no log", help="Log to stderr."),
    ] = None,
    debug: Annotated[bool, option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Continuous batching for GGUF models.

    Every option is also read from the environment: --ctx-per-seq of run from
    CBATCH_RUN_CTX_PER_SEQ, --log-level from CBATCH_LOG_LEVEL.

    Exit codes: 0 all fine, 1 some items failed, 2 could not start or go on, 130 interrupted.

    Example: cbatch --log-level info run chats.jsonl -m model.gguf -o answers.jsonl
    """
    if log_level is not None:
        _show_log(ctx, log_level)


def _is_typers_own(error: Exception) -> bool:
    """Whether typer shows it and ends by itself: usage errors, exits, and a reader of stdout who has left."""
    return isinstance(error, typer.Abort | BrokenPipeError) or hasattr(error, "exit_code")


def _name_variable(error: Any) -> None:
    """Add to typer's words on a wrong value which variable of the environment it came from."""
    ctx, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if ctx is None or parameter is None:
        return
    source = ctx.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        error.message += f" (from {ctx.auto_envvar_prefix}_{parameter.name.upper()})"


def _words(error: Exception) -> str:
    if isinstance(error, cbatch.CBatchError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error} (not expected: --debug shows where)"


def _end(ctx: Any, error: BaseException, words: str, code: ExitCode) -> NoReturn:
    if ctx.params.get("debug"):
        traceback.print_exception(error)
    say(f"cbatch: {words}")
    raise typer.Exit(code) from None
