"""Processes that run a module of this same cbatch."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from time import monotonic

from cbatch.errors import ConfigError, words_of

_GLANCE_S = 0.2
_CRASHES = {
    -getattr(signal, name)
    for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP")
    if hasattr(signal, name)
}
_CODE = '"{name}"; import sys; sys.path[:] = {path}; from {module} import main; main()'
"""Begins with a name, which `ps` shows."""
_ENDS_WITH = b"\ncbatch process ends with "


def command_of(module: str, *words: str) -> list[str]:
    """Return the command that runs a module's `main` with arguments.

    Its modules are those of this process, whatever is in the folder that it starts in.

    Raises:
        ConfigError: the program that runs Python is not known.
    """
    if not sys.executable:
        raise ConfigError("no process can be started: Python does not know its own program")
    path = json.dumps(absolute_path())
    name = module.removesuffix(".__main__").replace(".", " ")
    return [sys.executable, "-c", _CODE.format(name=name, path=path, module=module), *words]


def absolute_path() -> list[str]:
    """Return the folders that modules come from, absolute; a relative one is left out where this process's is gone."""
    here = current_folder()
    folders = (p if here is None else os.path.join(here, p) for p in sys.path)
    return [os.path.normpath(p) for p in folders if os.path.isabs(p)]


def current_folder() -> str | None:
    """Return this process's folder; None where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def environment() -> dict[str, str]:
    """Return this process's environment, but ggml's abort starts no debugger, which takes seconds and holds pipes."""
    return {**os.environ, "GGML_NO_BACKTRACE": "1"}


def run_apart(
    module: str, *words: str, wall_s: float, is_stopped: Callable[[], bool] = bool
) -> subprocess.CompletedProcess[bytes] | None:
    """Run a module's `main` to its end in a separate process, and capture its output.

    Args:
        wall_s: seconds after which the process is killed.
        is_stopped: called now and then; once it is true, the process is killed.

    Returns:
        the exit code and output; None if the process was killed. In a program that ignores SIGCHLD, every signal that
        ends the process is taken for SIGABRT: the system tells 0 whatever the end was.

    Raises:
        ConfigError: no process can be started.
    """
    end_s, tells_end = monotonic() + wall_s, _may_forget_children()
    command = command_of(*((__name__,) if tells_end else ()), module, *words)
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment()
        )
    except OSError as error:
        raise ConfigError(f"no process can be started: {words_of(error)}") from error
    with process:
        try:
            while monotonic() < end_s and not is_stopped():
                try:
                    said, errors = process.communicate(timeout=_GLANCE_S)
                except subprocess.TimeoutExpired:
                    continue
                code = process.returncode
                if tells_end:
                    errors, told = _split_end(errors)
                    code = code or told
                return subprocess.CompletedProcess(command, code, said, errors)
        finally:
            process.kill()
    return None


def _split_end(errors: bytes) -> tuple[bytes, int]:
    """Return what a process wrote on stderr besides the code that `main` told, and that code; without, it was ended."""
    before, word, after = errors.rpartition(_ENDS_WITH)
    return (before + after[1:], int(after[:1])) if word else (errors, -signal.SIGABRT)


def main() -> None:
    """Run the `main` of the module that the first argument names; tell on stderr with which code the process ends."""
    module, code = sys.argv.pop(1), 1
    try:
        importlib.import_module(module).main()
        code = 0
    finally:
        sys.stderr.write(f"{_ENDS_WITH.decode()}{code}")


def _may_forget_children() -> bool:
    """Whether this program handles SIGCHLD, so that exit codes of processes may be lost. Source: man 2 wait, notes."""
    number = getattr(signal, "SIGCHLD", None)
    return number is not None and signal.getsignal(number) != signal.SIG_DFL


def has_crashed(code: int) -> bool:
    """Whether an exit code means that the process ended by a signal, as with llama.cpp's assertions."""
    return code in _CRASHES
