"""Processes of the same cbatch, wherever they start."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import cbatch
from cbatch.errors import ConfigError
from cbatch.processes import command_of, environment

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


def test_unknown_program_of_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(ConfigError, match="no process can be started: Python does not know its"):
        command_of("probe")
