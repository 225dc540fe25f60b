"""Notes of what was found out: read where they hold, and nowhere else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.load import notes
from cbatch.support.processes import environment

if TYPE_CHECKING:
    from pathlib import Path

PARTS = ("a model", "parallel=4")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def note_of(home: Path) -> Path:
    (note,) = (home / "cbatch" / "notes").iterdir()
    return note


def test_note_is_read_again_and_written_over() -> None:
    assert notes.read("shape", *PARTS) is None
    for found in ("8 rows", "4 rows \udcff", ""):
        notes.write(found, "shape", *PARTS)
        assert notes.read("shape", *PARTS) == found


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("other", PARTS),
        ("shape", PARTS[:1]),
        ("shape", (*PARTS, "")),
        ("shape", PARTS[::-1]),
        ("shape", ("another model", "parallel=4")),
        ("shape", ("a modelparallel=4",)),
    ],
)
def test_note_for_other_settings_is_not_used(name: str, parts: tuple[str, ...]) -> None:
    notes.write("8 rows", "shape", *PARTS)
    assert notes.read(name, *parts) is None


@pytest.mark.parametrize("other", ["processor", "instructions", "variable"])
def test_note_for_another_machine_is_not_used(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    notes.write("8 rows", "shape", *PARTS)
    if other == "processor":
        monkeypatch.setattr(notes, "device_names", lambda: ["another processor"])
    elif other == "instructions":
        monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: b"AVX9 = 1")
    else:
        monkeypatch.setenv("GGML_CPU_TILED_MM", "0")
    assert notes.read("shape", *PARTS) is None


def test_note_holds_in_processes_that_are_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    notes.write("8 rows", "shape", *PARTS)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    assert notes.read("shape", *PARTS) == "8 rows"


def test_note_for_another_build_of_llama_cpp_is_not_used(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    build = home / "lib"
    build.mkdir()
    (build / "libggml.so").write_bytes(b"one")
    monkeypatch.setattr(notes, "LIBRARY", build / "libllama.so")
    notes.write("8 rows", "shape", *PARTS)
    assert notes.read("shape", *PARTS) == "8 rows"
    (build / "libggml.so").write_bytes(b"other")
    assert notes.read("shape", *PARTS) is None


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff", b"[]", b"{}", b"[" * 99_999, b'{"found": 1, "depends": []}']
)
def test_damaged_note_is_ignored_and_replaced(home: Path, damage: bytes) -> None:
    notes.write("8 rows", "shape", *PARTS)
    note_of(home).write_bytes(damage)
    assert notes.read("shape", *PARTS) is None
    notes.write("8 rows", "shape", *PARTS)
    assert notes.read("shape", *PARTS) == "8 rows"


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "large"])
def test_note_that_is_no_small_plain_file_is_ignored(home: Path, kind: str) -> None:
    notes.write("8 rows", "shape", *PARTS)
    note = note_of(home)
    if kind == "large":
        note.write_text(note.read_text() + 2**20 * " ")
    else:
        note.unlink()
    if kind == "pipe":
        os.mkfifo(note)
    elif kind == "endless":
        note.symlink_to("/dev/zero")
    elif kind == "folder":
        note.mkdir()
    assert notes.read("shape", *PARTS) is None


def test_note_that_tells_of_something_else_is_ignored(home: Path) -> None:
    notes.write("8 rows", "shape", *PARTS)
    note = note_of(home)
    note.write_text(note.read_text().replace("a model", "a mode"))
    assert notes.read("shape", *PARTS) is None
    note.write_text(note.read_text().replace("a mode", "a model").replace('"8 rows"', "8"))
    assert notes.read("shape", *PARTS) is None


def test_note_that_cannot_be_written_is_left_out(home: Path) -> None:
    (home / "cbatch").write_text("in the way")
    notes.write("8 rows", "shape", *PARTS)
    assert notes.read("shape", *PARTS) is None
