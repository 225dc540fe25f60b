"""Parts beside a file: those that killed processes have left are removed, and nothing else is. Errors of the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cbatch
from cbatch.errors import OutputError
from cbatch.files.output import durable
from cbatch.support.folders import part_beside, told

KILLED = """
import os, signal, sys
from pathlib import Path
from cbatch.support.folders import part_beside
with part_beside(Path("out")) as part, part_beside(Path("out"), suffix=".f16.part") as floats:
    part.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_a_writer(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(str(cbatch.__file__)).parent.parent)}
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=folder, env=env)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(folder)) == 2


@pytest.mark.real
def test_parts_of_a_killed_process_are_removed_by_the_next_writer(tmp_path: Path) -> None:
    kill_a_writer(tmp_path)
    with part_beside(tmp_path / "another"):
        assert len(os.listdir(tmp_path)) == 3
    with part_beside(tmp_path / "out") as part:
        assert os.listdir(tmp_path) == [part.name]
    assert os.listdir(tmp_path) == []


def test_part_of_a_writer_that_lives_stays(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with part_beside(path) as first:
        first.write_bytes(b"half")
        with part_beside(path) as second:
            assert first != second
            assert (first.read_bytes(), second.read_bytes()) == (b"half", b"")
        first.replace(path)
    assert os.listdir(tmp_path) == ["out"]
    assert path.read_bytes() == b"half"


def test_part_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_lock, made = fcntl.flock, list[str]()

    def lock(fd: int, kind: int) -> None:
        made.extend(os.listdir(tmp_path))
        if len(made) == 1:  # another writer takes it for one that was left
            (tmp_path / made[0]).unlink()
        really_lock(fd, kind)

    monkeypatch.setattr("cbatch.support.folders.fcntl.flock", lock)
    with part_beside(tmp_path / "out") as part:
        assert os.listdir(tmp_path) == [part.name]
    assert len(made) == 2


def test_nothing_but_unlocked_parts_of_the_file_is_removed(tmp_path: Path) -> None:
    others = [
        "out", "out.part", ".out.part", ".out.0123.part", ".out.01234567", ".out.01234567.txt",
        ".out2.01234567.part", ".aout.01234567.part",
    ]  # fmt: skip
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "x.out").touch()
    (tmp_path / ".out.00000000.part").symlink_to(tmp_path / "out")
    (tmp_path / ".out.00000001.part").mkdir()
    (tmp_path / ".out.00000002.part").touch()
    before = set(os.listdir(tmp_path))
    with part_beside(tmp_path / "out"):
        pass
    assert set(os.listdir(tmp_path)) == before - {".out.00000002.part"}


def test_file_system_without_locks_keeps_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, kind: int) -> None:
        raise OSError

    left = tmp_path / ".out.01234567.part"
    left.touch()
    monkeypatch.setattr("cbatch.support.folders.fcntl.flock", refuse)
    with part_beside(tmp_path / "out") as part:
        assert {*tmp_path.iterdir()} == {left, part}
    assert os.listdir(tmp_path) == [left.name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_error_of_the_disk_names_the_file_and_the_way_out(tmp_path: Path, number: int) -> None:
    """What a run has finished is kept, and nothing else."""
    words = []
    for telling in (told, durable.told):
        with pytest.raises(OutputError) as error, telling(tmp_path / "out"):
            raise OSError(number, os.strerror(number))
        words.append(str(error.value))
    if number == errno.EIO:
        assert words == [f"{tmp_path}/out: cannot be written: Input/output error"] * 2
    else:
        assert words[1] == f"{words[0]}, then run the same command again: finished items are kept"
