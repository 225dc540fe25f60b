"""Places for results: what would be lost, or could not be written, is refused with its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cbatch.errors import ConfigError
from cbatch.files.places import STDOUT, check_apart, check_new, check_place, is_dash, opened

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_read_is_never_written_under_any_name(tmp_path: Path) -> None:
    source, link, out = (tmp_path / name for name in ("in", "link", "out"))
    source.write_text("x")
    link.symlink_to(source)
    with pytest.raises(ConfigError, match=f"^{link}: is the input"):
        check_apart(link, ["-", str(out), source])
    check_apart(out, ["-", str(out), source])


def test_place_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    for place, words in ((tmp_path, "is a directory"), (tmp_path / "a" / "b", "does not exist")):
        with pytest.raises(ConfigError, match=f"^{place}: .*{words}"):
            check_place(place)
    check_place(tmp_path / "b")
    check_place(STDOUT)


def test_existing_file_is_replaced_by_force_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        check_new(out, force=False)
    with (
        pytest.raises(ConfigError, match="cannot be written: File exists"),
        opened(out, force=False),
    ):
        pass
    assert out.read_text() == "precious"
    check_new(out, force=True)
    with opened(out, force=True) as file:
        file.write(b"new")
    assert out.read_text() == "new"


def test_dash_alone_is_a_pipe() -> None:
    assert (is_dash("-"), is_dash(STDOUT), is_dash("./-")) == (True, True, False)
