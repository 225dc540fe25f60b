"""The commands, in this process or in one of their own."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import cbatch
from cbatch.cli import app

if TYPE_CHECKING:
    from collections.abc import Callable

Lines = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the options of whoever runs the tests out, but not where a checkout has its native part."""
    for name in os.environ.keys() - {"CBATCH_LIBRARY"}:
        if name.startswith("CBATCH_"):
            monkeypatch.delenv(name)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


def invoke(*args: object) -> Done:
    """Run a command in this process; an exception that is not an exit is a failure."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def start(*args: object, stdin: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own, on the cbatch that this one has imported."""
    package = Path(str(cbatch.__file__)).parent
    return subprocess.Popen(
        [sys.executable, "-m", "cbatch.cli", *map(str, args)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=package.parent,
    )


def parse(lines: str | bytes) -> Lines:
    """Return JSON lines as objects; a line cut in the middle fails."""
    return [json.loads(line) for line in lines.splitlines()]


def forbid_opening(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody open this file, not even root, whom no permission stops."""

    def refusing(really_open: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(file: Any, *args: Any, **more: Any) -> Any:
            if isinstance(file, str | Path) and Path(file) == path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            return really_open(file, *args, **more)

        return refuse

    for owner, name in ((Path, "open"), (builtins, "open"), (io, "FileIO"), (os, "open")):
        monkeypatch.setattr(owner, name, refusing(getattr(owner, name)))


@pytest.fixture
def write_input(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of a batch file: objects become JSON, strings are lines as they are."""

    def write(*requests: object) -> Path:
        path = tmp_path / "in.jsonl"
        lines = [r if isinstance(r, str) else json.dumps(r) for r in requests]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


class Raw(io.RawIOBase):
    """A file that remembers what reached it, write by write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written.append(bytes(data))
        return len(data)
