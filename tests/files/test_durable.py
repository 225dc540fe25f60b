"""Files that are replaced: whole or not at all, and never what is no file."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from cbatch.files.output.durable import whole

if TYPE_CHECKING:
    from pathlib import Path


def test_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")
    for text, found in (("ne\ud800", "old"), ("new", "new")):
        with suppress(UnicodeEncodeError), whole(out) as part:
            part.write_text(text, encoding="utf-8")
        assert (os.listdir(tmp_path), out.read_text()) == (["out"], found)


def test_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".out.01234567.part").touch()
    with whole(tmp_path / "out") as part:
        part.write_text("new")
    assert os.listdir(tmp_path) == ["out"]


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    os.mkfifo(out)
    reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
    with whole(out) as place:
        place.write_bytes(b"page")
    assert (os.read(reader, 9), out.is_fifo()) == (b"page", True)
    os.close(reader)
