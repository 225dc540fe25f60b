"""Files that callers give by a path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbatch.errors import ConfigError
from cbatch.support.given_files import file_bytes


def test_file_is_read_and_what_has_no_end_is_refused(tmp_path: Path) -> None:
    plain, pipe = tmp_path / "plain", tmp_path / "pipe"
    plain.write_bytes(b"abc")
    os.mkfifo(pipe)
    sizes: list[int] = []
    assert file_bytes("it has a picture", plain, sizes.append) == b"abc"
    assert sizes == [3]
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(
            ConfigError, match=f"it has a picture that cannot be read: {path} is no"
        ):
            file_bytes("it has a picture", path, sizes.append)
