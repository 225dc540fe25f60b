"""The root of the commands: options that all share, the log, Ctrl-C, and exit codes."""

import logging
import os
import re
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum, IntEnum
from functools import partial
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import cbatch
from cbatch.backend.named_library import bindings_version
from cbatch.cli.option_table import option
from cbatch.cli.signals import put_off
from cbatch.cli.terminal import (
    discard,
    event_line,
    never_wait_for_stderr,
    say,
    settle_stderr,
    tell,
)
from cbatch.errors import ELSEWHERE, ConfigError
from cbatch.files.places import stdout
from cbatch.options import RunOptions
from cbatch.support.logs import FIELDS
from cbatch.support.processes import current_folder

_YES = ("1", "true", "t", "yes", "y", "on")
"""Values of an environment variable that set a flag. Source: click's `BoolParamType`."""

_BOXES_WIDTH = 64
"""Columns below which boxes in the help would cut option names."""


_LONG_NAME = 10
"""Longest option name, in columns, with its text beside it in a narrow window; else texts go below. Our choice."""

_INDENT = 4


class ExitCode(IntEnum):
    """What a command returns to the shell."""

    DONE = 0
    SOME_FAILED = 1
    STOPPED = 2
    """The command could not start or go on."""
    INTERRUPTED = 130


class LogLevel(str, Enum):
    """The lowest severity of the library's log lines that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogLines(logging.Handler):
    """Prints log records on stderr, beside a live display: as lines, or as events with `--json`."""

    def __init__(
        self,
        interrupts: "Interrupts",
        layout: str = "%(levelname)s %(name)s: %(message)s",
        *,
        has_time: bool = False,
    ) -> None:
        super().__init__()
        self._command, self._has_time = interrupts, has_time
        when = "%(asctime)s " if has_time else ""
        self.setFormatter(logging.Formatter(f"{when}{layout}"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            say(self._event(record) if self._command.says_events else self.format(record))
        except Exception:
            self.handleError(record)

    def _event(self, record: logging.LogRecord) -> str:
        when = {"time": round(record.created, 3)} if self._has_time else {}
        source = {**when, "level": record.levelname.lower(), "logger": record.name}
        return event_line("log", **source, text=record.getMessage(), **getattr(record, FIELDS, {}))


class Interrupts:
    """Makes the first Ctrl-C a KeyboardInterrupt and ignores further ones while the model is closed.

    After `PATIENCE_S` another Ctrl-C ends the process. Every command can reach this object, so it also knows whether
    the output is for a program.
    """

    PATIENCE_S = 3.0

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.says_events = False
        """Whether errors and the log are JSON lines (`--json`)."""
        self.on_exit: Callable[[int], object] = bool
        """Called with the exit code when nothing is left to do but to end the process."""
        self._clock = clock
        self._first_s: float | None = None
        self._before: Any = None
        """The handler that this one replaces; None if it replaces none."""
        self._later: threading.Timer | None = None
        """A Ctrl-C that was put off."""

    def __enter__(self) -> None:
        """Handle Ctrl-C until the end of the block; once pressed, until the process ends."""
        before = signal.getsignal(signal.SIGINT)
        is_ours = threading.current_thread() is threading.main_thread()
        if is_ours and before is not signal.SIG_IGN:
            self._before = before
            signal.signal(signal.SIGINT, self.press)

    def __exit__(self, *error: object) -> None:
        if self._later is not None and self._first_s is None:
            self._later.cancel()
            if error[0] is None:
                self.press()
        if self._before is not None and self._first_s is None:
            signal.signal(signal.SIGINT, self._before)

    def press(self, number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        """Handle one Ctrl-C."""
        if self._first_s is None:
            self._later = put_off(number, frame)
            if self._later is not None:
                return
            self._first_s = self._clock()
            raise KeyboardInterrupt
        if self._clock() - self._first_s > self.PATIENCE_S:
            os._exit(ExitCode.INTERRUPTED)

    def forget(self) -> None:
        """Treat the next Ctrl-C as the first one again."""
        self._first_s = None

    def never_wait_for_stderr(self) -> None:
        """Leave lines on stderr out where nobody reads them: for a command that serves others."""
        never_wait_for_stderr(self._left_out)

    def _left_out(self, n: int) -> str:
        words = f"{n:,} lines are missing here, because nobody read stderr"
        return event_line("note", text=words) if self.says_events else f"cbatch: {words}"


class _Help:
    """Writes the help of a command or of the root, in boxes if the terminal is wide enough."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        command: Any = self
        for flag in (p for p in command.get_params(ctx) if getattr(p, "is_flag", False)):
            flag.metavar = ""  # which takes no value; typer would write <bool>
        n_columns = shutil.get_terminal_size().columns
        if n_columns < _BOXES_WIDTH:
            formatter.width = n_columns - 2
            formatter.write_dl = partial(_write_narrow, formatter.write_dl)
            command.format_usage(ctx, formatter)
            command.format_help_text(ctx, formatter)
            command.format_options(ctx, formatter)
            return
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        except SystemExit:  # the reader has left. Source: rich's `Console.on_broken_pipe`
            raise typer.Exit(ExitCode.DONE) from None


def _write_narrow(write_list: Callable[..., None], rows: Any) -> None:
    """Write names with their texts beside them, or below if the longest name leaves too little room."""
    n_most = max(len(name) for name, _ in rows)
    write_list(rows, col_max=n_most if n_most <= _LONG_NAME else _INDENT)


class CliCommand(_Help, TyperCommand):
    """A command whose errors name the environment variable that a wrong value came from."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **more: Any) -> Any:
        """Read the options, `--json` first: it decides how errors in the others are reported."""
        interrupts = None if parent is None else parent.find_root().obj
        if interrupts is not None and any(p.name == "json" for p in self.params):
            variable = f"{parent.auto_envvar_prefix}_{str(info_name).upper()}_JSON"
            is_set = os.environ.get(variable, "").lower() in _YES
            interrupts.says_events = "--json" in args or is_set
        return super().make_context(info_name, self._renamed(args), parent, **more)

    def parse_args(self, ctx: Any, args: Any) -> Any:
        """Read the options; a model that is given without its option is named."""
        given = tuple(args)
        model = next((arg for arg in given if arg.endswith(".gguf")), None)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            said = getattr(error, "message", "")
            if model and f"extra argument(s) ({model})" in said.replace(
                "argument (", "argument(s) ("
            ):
                error.message = f"{said}: give the model as -m {model}"  # type: ignore[attr-defined]
            flag = _whole_flag(getattr(error, "option_name", None) or "", given)
            if hint := self._of_other_tools(flag):
                error.message = f"No such option: {flag}: use {hint}"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise

    def _of_other_tools(self, flag: str) -> str:
        """Return what a flag of another tool is here; empty if this command has no such option."""
        flags = {name for p in self.params for name in p.opts}
        name = flag.lstrip("-").replace("-", "_")
        ours = _FLAGS_ELSEWHERE.get(name) or ELSEWHERE.get(name, "").replace("_", "-")
        if f"--{ours}" in flags:
            return f"--{ours}"
        is_set = "--set" in flags and name in RunOptions.__dataclass_fields__
        return f"--set {name}=…" if is_set else ""

    def _renamed(self, args: Any) -> list[str]:
        """Return arguments with the names that the help tells for options that have others too."""
        also = getattr(self.callback, "also", {})
        parts = [(arg, *arg.partition("=")) for arg in args]
        return [also[n] + eq + value if n in also else arg for arg, n, eq, value in parts]

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except cbatch.CBatchError as error:
            for variable in _variables_in(str(error), ctx):
                error.args = (f"{error} (from {variable})",)
            raise


def _whole_flag(flag: str, args: Sequence[str]) -> str:
    """Return a flag as it was given: of -ngl, typer names only -n."""
    if flag.startswith("--") or not flag:
        return flag
    given = next((arg for arg in args if arg.startswith(flag)), flag)
    return re.match(r"-[a-z]*", given)[0]  # type: ignore[index]  # which begins with a dash


_FLAGS_ELSEWHERE = {
    "c": "ctx-per-seq",
    "n": "max-tokens",
    "predict": "max-tokens",
    "np": "parallel",
    "t": "threads",
    "n_threads": "threads",
    "ngl": "gpu-layers",
    "n_gpu_layers": "gpu-layers",
    "fa": "flash-attn",
    "lora": "adapter",
}
"""Flags of other tools whose names are not those of options in Python, and ours."""


class Subgroup(_Help, TyperGroup):
    """Commands of one subject."""


class Group(_Help, TyperGroup):
    """Turns a command's exception into one line on stderr and an exit code."""

    _interrupts: Interrupts | None = None

    def main(self, *args: Any, **more: Any) -> Any:
        """Run the command that the arguments name, and end the process."""
        try:
            return super().main(*args, **more)
        except SystemExit as end:
            if self._interrupts is not None and isinstance(end.code, int):
                self._interrupts.on_exit(end.code)
            raise

    def get_params(self, ctx: Any) -> Any:
        """Return the root's options; no environment variable may install completion."""
        params: list[Any] = list(super().get_params(ctx))
        for parameter in params:
            if "completion" in (parameter.name or ""):
                parameter.allow_from_autoenv = False
        return params

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Read the options before the command; exceptions end the command as in `invoke`."""
        try:
            return super().make_context(*args, **more)
        except Exception as error:
            self._end(error, is_debugged=False)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; only typer's own exceptions leave this method."""
        ctx.obj = self._interrupts = Interrupts()
        try:
            with ctx.obj:
                return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            self._end(error, is_debugged=ctx.params["debug"], says_events=ctx.obj.says_events)
        finally:
            settle_stderr()

    @staticmethod
    def _end(error: BaseException, *, is_debugged: bool, says_events: bool = False) -> NoReturn:
        if isinstance(error, BrokenPipeError) and not error.filename:
            leave_stdout()
            raise typer.Exit(ExitCode.DONE) from None
        if _is_typers_own(error) and not (says_events and hasattr(error, "format_message")):
            _name_variable(error)
            raise error
        code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.STOPPED
        words = "interrupted" if isinstance(error, KeyboardInterrupt) else _words(error)
        if says_events:
            trace = {"traceback": "".join(traceback.format_exception(error))} if is_debugged else {}
            tell("error", text=words, exit_code=code.value, **trace)
        else:
            if is_debugged:
                traceback.print_exception(error)
            say(f"cbatch: {words}")
        is_lost = isinstance(error, FileNotFoundError)  # which no writing raises
        if isinstance(error, OSError) and not error.filename and not is_lost:
            with suppress(ConfigError):
                leave_stdout()
        raise typer.Exit(code) from None


def make_app(*commands: Callable[..., None]) -> typer.Typer:
    """Return the application of these commands, each named after its function."""
    app = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "CBATCH"},
    )
    app.callback()(_root)
    for command in commands:
        app.command(cls=CliCommand)(command)
    return app


def write(text: str) -> None:
    """Write to stdout at once; end the command if the reader has left."""
    file = stdout()
    try:
        file.write(text.encode(errors="replace"))
        file.flush()
    except BrokenPipeError:
        leave_stdout()
        raise typer.Exit(ExitCode.DONE) from None


def leave_stdout() -> None:
    """Discard further output: the reader has left, or the disk is full."""
    discard(stdout().fileno())


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"cbatch {cbatch.__version__}")
        for line in _llama_versions():
            typer.echo(line)
        raise typer.Exit


def _llama_versions() -> Iterator[str]:
    yield f"llama-cpp-python {bindings_version() or 'is not installed'}"
    try:
        from cbatch.backend.bindings import (  # llama_cpp is slow to import
            library_file,
            library_version,
        )
    except cbatch.CBatchError as error:
        yield f"llama.cpp cannot be used: {error}"
    else:
        yield f"llama.cpp {library_version()}, {library_file()}"


def show_log(ctx: typer.Context, level: LogLevel, *, has_time: bool = False) -> None:
    """Show the library's log from this level on until the command ends, instead of as it was shown before."""
    _hide_log()
    logger = logging.getLogger("cbatch")
    lines = LogLines(ctx.obj, has_time=has_time)
    lines.setLevel(level.name)  # a child logger may have a lower level
    logger.addHandler(lines)
    ctx.call_on_close(_hide_log)
    ctx.call_on_close(lambda before=logger.level: logger.setLevel(before))
    logger.setLevel(level.name)


ALWAYS_SHOWN = ("cbatch.worker", "cbatch.reload")
"""Loggers of deaths and starts of workers, and of reloads of a model."""


def _show_deaths(ctx: typer.Context) -> None:
    """Show deaths and starts of workers, and reloads, on stderr until the command ends or shows the whole log."""
    _hide_log()
    for name in ALWAYS_SHOWN:
        logging.getLogger(name).addHandler(LogLines(ctx.obj, "cbatch: %(message)s"))
    ctx.call_on_close(_hide_log)


def _hide_log() -> None:
    for logger in map(logging.getLogger, ("cbatch", *ALWAYS_SHOWN)):
        for lines in [handler for handler in logger.handlers if isinstance(handler, LogLines)]:
            logger.removeHandler(lines)


def _root(
    ctx: typer.Context,
    *,
    version: Annotated[
        bool,
        option(
            "--version",
            callback=_show_version,
            is_eager=True,
            allow_from_autoenv=False,  # a build script may have a CBATCH_VERSION of its own
            help="Print the versions of cbatch, llama-cpp-python and llama.cpp, and exit.",
        ),
    ] = False,
    log_level: Annotated[
        LogLevel | None,
        option(
            "--log-level",
            metavar="LEVEL",
            case_sensitive=False,
            default="only deaths and starts of workers",
            help="Log to stderr from this level on: debug, info, warning or error.",
        ),
    ] = None,
    debug: Annotated[bool, option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Continuous batching for GGUF models.

    Every option is also read from the environment: --ctx-per-seq of run from
    CBATCH_RUN_CTX_PER_SEQ, --log-level from CBATCH_LOG_LEVEL.

    Exit codes: 0 all fine, 1 some items failed, 2 could not start or continue, 130 interrupted.

    Example: cbatch --log-level info run chats.jsonl -m model.gguf -o answers.jsonl
    """
    if log_level is None:
        _show_deaths(ctx)
    else:
        show_log(ctx, log_level)


def _is_typers_own(error: BaseException) -> bool:
    """Whether typer reports the error and exits by itself: usage errors and exits."""
    return isinstance(error, typer.Abort) or hasattr(error, "exit_code")


def _name_variable(error: Any) -> None:
    """Add to typer's message the environment variable that a wrong value came from."""
    ctx, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if ctx is not None and parameter is not None and _is_from_environment(ctx, parameter):
        error.message += f" (from {_variable(ctx, parameter)})"


def _variables_in(words: str, ctx: Any) -> Iterator[str]:
    """Yield the environment variables whose values an error of the library is about."""
    for parameter in filter(partial(_is_from_environment, ctx), ctx.command.params):
        value = re.escape(str(ctx.params[parameter.name]))
        if re.match(rf"(n_)?{parameter.name}\b|{value}: ", words):
            yield _variable(ctx, parameter)


def _is_from_environment(ctx: Any, parameter: Any) -> bool:
    source = ctx.get_parameter_source(parameter.name)
    return source is not None and source.name == "ENVIRONMENT"


def _variable(ctx: Any, parameter: Any) -> str:
    return f"{ctx.auto_envvar_prefix}_{parameter.name.upper()}"


def _words(error: BaseException) -> str:
    if hasattr(error, "format_message"):
        _name_variable(error)
        return str(error.format_message())
    if isinstance(error, cbatch.CBatchError):
        return str(error)
    if isinstance(error, FileNotFoundError) and current_folder() is None:
        return "the current folder was removed: change to another one"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error} (unexpected: --debug shows the traceback)"
