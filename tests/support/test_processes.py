"""Processes of the same cbatch, wherever they start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import cbatch
from cbatch.errors import ConfigError
from cbatch.support.processes import command_of, environment, has_crashed, run_apart

if TYPE_CHECKING:
    from pathlib import Path

PROBE = """
import json, os, sys
def main():
    import cbatch
    print(json.dumps([cbatch.__file__, sys.argv[1:], os.environ["GGML_NO_BACKTRACE"]]))
"""


@pytest.mark.real
def test_process_has_the_modules_of_this_one_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder has a module of the same name, and a folder of this path is relative."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "probe.py").write_text(PROBE, encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cbatch.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "own"])
    done = subprocess.run(
        command_of("probe", "a b", "{c}"),
        cwd=tmp_path / "other",
        env=environment(),
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == [cbatch.__file__, ["a b", "{c}"], "1"]


@pytest.mark.real
@pytest.mark.skipif(sys.platform == "win32", reason="folders in use stay")
def test_process_is_started_from_a_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "probe.py").write_text("def main(): print(5)", encoding="utf-8")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path / "own"), "other"])
    done = run_apart("probe", wall_s=60)
    assert done is not None
    assert done.stdout.split() == [b"5"]


def test_unknown_program_of_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(ConfigError, match="no process can be started: Python does not know its"):
        command_of("probe")


def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes that are started wait for their end."""
    code = "import threading; threading.Event().wait()"
    monkeypatch.setattr(
        "cbatch.support.processes.command_of", lambda *_: [sys.executable, "-c", code]
    )


@pytest.mark.real
def test_process_is_killed_once_it_took_too_long_or_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asleep(monkeypatch)
    assert run_apart("probe", wall_s=0) is None
    assert run_apart("probe", wall_s=600, is_stopped=iter((False, True)).__next__) is None


@pytest.mark.real
@pytest.mark.parametrize(
    ("code", "is_crash"),
    [
        ("import os; os.abort()", True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", False),
        ("raise SystemExit(1)", False),
        ("", False),
    ],
)
def test_process_that_ends_itself_has_crashed(
    monkeypatch: pytest.MonkeyPatch, code: str, is_crash: bool
) -> None:
    monkeypatch.setattr(
        "cbatch.support.processes.command_of", lambda *_: [sys.executable, "-c", code]
    )
    done = run_apart("probe", wall_s=600)
    assert done is not None
    assert has_crashed(done.returncode) is is_crash


@pytest.mark.real
def test_program_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.support.processes.command_of", lambda *_: ["/there/is/none"])
    with pytest.raises(ConfigError, match="no process can be started"):
        run_apart("probe", wall_s=600)


@pytest.mark.real
@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="POSIX alone has it")
@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGABRT),
        ("raise SystemExit(1)", 1),
        ("raise OSError", 1),
        ("pass", 0),
    ],
)
def test_end_of_a_process_is_known_where_sigchld_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, code: int
) -> None:
    source = f"import os, signal, sys\ndef main():\n    print(sys.argv[1:])\n    {does}\n"
    (tmp_path / "probe.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        done = run_apart("probe", "a", "b", wall_s=600)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert done is not None
    assert done.returncode == code
    assert has_crashed(code) is (code < 0)
    assert code < 0 or done.stdout == b"['a', 'b']\n"
    assert b"cbatch process ends" not in done.stderr
