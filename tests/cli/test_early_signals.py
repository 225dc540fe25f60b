"""Signals at a command that still imports, or whose model loads: a line and an exit code, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cbatch

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(str(cbatch.__file__)).parent.parent

STUCK = """
import os, signal, sys
told, tell = os.pipe()
os.set_blocking(tell, False)
before = signal.set_wakeup_fd(tell)
os.close(os.open({mark!r}, os.O_WRONLY))
os.read(told, 1)
signal.set_wakeup_fd(before)
sys.path[:] = [place for place in sys.path if place != {folder!r}]
del sys.modules[__name__]
__import__(__name__)
"""
"""A module whose import tells that it has begun, and goes on after a signal."""

ENTRIES = {
    "python -m": ("-m", "cbatch"),
    "console script": ("-c", "import sys; from cbatch.__main__ import main; sys.exit(main())"),
}

COMMANDS = {
    "run": ("run", "in.jsonl", "-o", "out.jsonl"),
    "ask": ("ask", "Hi"),
    "serve": ("serve", "--port", "0", "--replicas", "1"),
    "daemon": ("daemon",),
}

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(sys.platform == "win32", reason="needs signals"),
]


def struck(
    folder: Path, module: str, arguments: Sequence[str], number: signal.Signals
) -> tuple[int, str]:
    """Exit code and stderr of a program that gets a signal while it imports a module."""
    mark = folder / "mark"
    os.mkfifo(mark)
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
    (folder / f"{module}.py").write_text(STUCK.format(mark=str(mark), folder=str(folder)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(HERE)])}
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=env,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        with mark.open("rb"):  # waits until the module is there
            process.send_signal(number)
        _, said = process.communicate()
    return process.returncode, said


@pytest.mark.parametrize(
    ("entry", "module", "number", "code", "words"),
    [
        ("python -m", "numpy", signal.SIGINT, 130, "interrupted"),
        ("console script", "typer", signal.SIGINT, 130, "interrupted"),
        ("python -m", "typer", signal.SIGTERM, 143, "ended by SIGTERM"),
        ("console script", "numpy", signal.SIGHUP, 129, "ended by SIGHUP"),
    ],
)
def test_signal_while_python_imports_ends_with_a_line(
    tmp_path: Path, entry: str, module: str, number: signal.Signals, code: int, words: str
) -> None:
    arguments = (*ENTRIES[entry], "info")
    assert struck(tmp_path, module, arguments, number) == (code, f"cbatch: {words}\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_server_that_is_stopped_while_python_imports_has_its_usual_code(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    assert struck(tmp_path, "typer", ("-m", "cbatch", "serve"), number)[0] == code


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("run", signal.SIGINT),
        ("run", signal.SIGTERM),
        ("ask", signal.SIGTERM),
        ("serve", signal.SIGINT),
        ("serve", signal.SIGTERM),
        ("daemon", signal.SIGINT),
    ],
)
def test_signal_while_a_model_loads_ends_with_a_line(
    tmp_path: Path, command: str, number: signal.Signals
) -> None:
    code, said = struck(tmp_path, "llama_cpp", ("-m", "cbatch", *COMMANDS[command]), number)
    usual = {signal.SIGINT: 130, signal.SIGTERM: 0 if command == "serve" else 143}
    assert code == usual[number], said
    assert "Traceback" not in said
    assert said.startswith("loading the model") or command != "run"
    assert len(said.splitlines()) <= 1 + (command == "run")
