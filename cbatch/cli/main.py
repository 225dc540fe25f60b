"""The root of the commands: what every one of them shares, and how each of them may end."""

import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import cbatch


class ExitCode(IntEnum):
    """What a command returns to the shell."""

    DONE = 0
    SOME_FAILED = 1
    STOPPED = 2
    """It could not start, or could not go on."""
    INTERRUPTED = 130


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
                raise
            _end(ctx, error, _words(error), ExitCode.STOPPED)


def make_app(*commands: Callable[..., None]) -> typer.Typer:
    """Return the application of these commands, each named as its function."""
    app = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
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


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Continuous batching for GGUF models.

    Exit codes: 0 all fine, 1 some items failed, 2 could not start or go on, 130 interrupted.
    """


def _is_typers_own(error: Exception) -> bool:
    """Whether typer shows it and ends by itself: usage errors, exits, and a reader of stdout who has left."""
    return isinstance(error, typer.Abort | BrokenPipeError) or hasattr(error, "exit_code")


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
