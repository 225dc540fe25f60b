"""The journal of a run: what is claimed, written, counted, gone on with and refused."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.errors import ConfigError, OutputError
from cbatch.files.file_status import status_of
from cbatch.files.output import durable as disk
from cbatch.files.output.journal import Journal, duplicate_key
from cbatch.files.output.manifest import Manifest, record_key
from cbatch.files.output.sorting import sort_in_place
from tests.files.journals import (
    HEADER,
    SETTINGS,
    asked,
    journal_of,
    open_journal,
    records,
    run_pass,
)
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Callable

DIGEST = b"0123456789abcdef"
OTHER = b"fedcba9876543210"


def write(journal: Journal, *ids: str, start: int = 1, is_error: bool = False) -> None:
    """Claim and add items that are new."""
    for number, id in enumerate(ids, start):
        assert journal.claim(id, DIGEST, number) == "new"
        journal.add(number, f"{id}\n".encode(), is_error=is_error)


def fill(folder: Path, *ids: str, **more: Any) -> None:
    """Do a run of items that are new, and end it."""
    with open_journal(folder, **more) as journal:
        write(journal, *ids)


def lines(path: Path) -> list[str]:
    """Return the records of a file."""
    [header, *rest] = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert header.encode() == HEADER
    return [line.rstrip("\n") for line in rest]


# ---- claiming ----


@pytest.mark.parametrize("when", ["claimed", "added", "committed", "done before"])
def test_second_claim_of_an_id_is_a_duplicate(tmp_path: Path, when: str) -> None:
    if when == "done before":
        fill(tmp_path, "a")
    with open_journal(tmp_path) as journal:
        first = journal.claim("a", DIGEST, 1)
        if when in ("added", "committed"):
            journal.add(1, b"a\n", is_error=False)
        if when == "committed":
            journal.commit()
        assert first == ("done" if when == "done before" else "new")
        assert journal.claim("a", DIGEST, 5) == "duplicate"
        assert journal.claim("a", OTHER, 6) == "duplicate"


def test_item_that_changed_keeps_its_record_until_there_is_another(tmp_path: Path) -> None:
    fill(tmp_path, "a")
    with open_journal(tmp_path) as journal:
        assert journal.claim("a", OTHER, 1) == "new"
    with open_journal(tmp_path) as journal:
        assert journal.claim("a", OTHER, 1) == "new"
        assert lines(tmp_path / "out") == ["a"]


def test_errors_without_a_file_of_their_own_are_in_the_output(tmp_path: Path) -> None:
    with open_journal(tmp_path, has_errors=False) as journal:
        write(journal, "a")
        write(journal, "b", start=2, is_error=True)
    assert lines(tmp_path / "out") == ["a", "b"]
    with open_journal(tmp_path, has_errors=False, retry_errors=True) as journal:
        assert journal.claim("b", DIGEST, 2) == "new"
        journal.add(2, b"better\n", is_error=False)
    assert lines(tmp_path / "out") == ["a", "better"]


def test_unclaimed_records_without_an_id_are_removed(tmp_path: Path) -> None:
    fill(tmp_path, "\0001", "a", "\0003", "\0:b", "")
    with open_journal(tmp_path) as journal:
        assert journal.claim("a", DIGEST, 1) == "done"
        assert journal.settle_unclaimed() == (2, 2)
        assert (journal.n_done, journal.n_failed) == (3, 0)
    assert lines(tmp_path / "out") == ["a", "\0:b", ""]


IDS = ["", "a\0b", "a", "\0", "ä" * 12, "ä" * 13, "\ud800", "x" * 10**6, "x" * 10**6 + "y", "\n"]


def test_ids_may_be_any_text(tmp_path: Path) -> None:
    for expected in ("new", "done"):
        with open_journal(tmp_path) as journal:
            for number, id in enumerate(IDS):
                assert journal.claim(id, DIGEST, number) == expected
                if expected == "new":
                    journal.add(number, b"%d\n" % number, is_error=False)


@given(st.lists(st.text(st.characters(), max_size=40), unique=True), st.integers(1, 10**9))
@settings(max_examples=examples(50))
def test_keys_of_different_ids_differ(ids: list[str], number: int) -> None:
    keys = [record_key(id) for id in ids]
    assert len({*keys, *(duplicate_key(key, number) for key in keys)}) == 2 * len(ids)
    assert max(map(len, keys), default=0) <= 24


# ---- writing ----


def test_records_are_in_the_file_when_commit_returns(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, "a", "b")
        assert lines(tmp_path / "out") == []
        assert journal.n_done == 0
        journal.commit()
        assert lines(tmp_path / "out") == ["a", "b"]
        assert journal.n_done == 2


def test_disk_is_waited_for_at_intervals_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, n_syncs = 0.0, 0
    with open_journal(tmp_path, clock=lambda: now_s, sync_s=5) as journal:

        def sync(fd: int) -> None:
            nonlocal n_syncs
            n_syncs += 1

        monkeypatch.setattr(disk, "sync", sync)
        for i, expected in enumerate([0, 0, 1, 1, 2]):
            write(journal, str(i), start=i)
            journal.commit()
            assert n_syncs == expected
            now_s += 2.5 if i else 2.6
        write(journal, "last", start=9)
    assert n_syncs == 3


def test_journal_closed_twice_leaves_one_manifest(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    write(journal, "a")
    journal.close()
    journal.close()
    assert sorted(os.listdir(tmp_path)) == ["errors", "out", "out.manifest"]


# ---- the log of the manifest ----


def in_any_order(n_items: int) -> list[str]:
    return [f"request-{i * 7919 % n_items}" for i in range(n_items)]


def log_of(folder: Path) -> int:
    path = folder / "out.manifest-wal"
    return path.stat().st_size if path.exists() else 0


@pytest.mark.slow
def test_log_of_the_manifest_stays_small(tmp_path: Path) -> None:
    most = 0
    with open_journal(tmp_path, sync_s=1e9) as journal:
        for number, id in enumerate(in_any_order(10_000)):
            assert journal.claim(id, DIGEST, number) == "new"
            journal.add(number, b"x" * 50, is_error=False)
            if number % 16 == 0:
                journal.commit()
                most = max(most, log_of(tmp_path))
    assert 2**19 < most < 1.25 * 2**20


def test_output_and_manifest_copied_after_a_kill_go_on(tmp_path: Path) -> None:
    now_s = 0.0
    copy = tmp_path / "copy"
    copy.mkdir()
    with open_journal(tmp_path, clock=lambda: now_s, sync_s=5) as journal:
        write(journal, *map(str, range(90)), start=0)
        journal.commit()
        now_s = 6.0
        write(journal, *map(str, range(90, 100)), start=90)
        journal.commit()  # which waits for the disk
        write(journal, "101", start=101)
        journal.commit()
        for name in ("out", "out.manifest"):
            shutil.copy(tmp_path / name, copy / name)
    with open_journal(copy) as journal:
        assert [journal.claim(str(n), DIGEST, n) for n in range(100)] == ["done"] * 100
        write(journal, "101", start=101)
    assert lines(copy / "out") == lines(tmp_path / "out")


def test_log_that_a_killed_run_left_is_folded_as_the_next_one_starts(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with open_journal(tmp_path, sync_s=1e9) as journal:
        write(journal, *map(str, range(1000)))
        journal.commit()
        shutil.copytree(tmp_path, killed)
    assert log_of(killed) > 2**15
    with open_journal(killed) as journal:
        assert (journal.n_done, log_of(killed)) == (1000, 0)


# ---- a full disk ----


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_write_that_fails_names_the_file_and_leaves_nothing_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    really_write = disk.write_at

    def write_half(fd: int, data: bytes, start: int) -> None:
        really_write(fd, data[: len(data) // 2], start)
        raise OSError(code, os.strerror(code))

    journal = open_journal(tmp_path)
    write(journal, "a")
    journal.commit()
    write(journal, "b", "c", start=2)
    monkeypatch.setattr(disk, "write_at", write_half)
    with pytest.raises(OutputError, match=rf"^{tmp_path}/out: "):
        journal.commit()
    with pytest.raises(OutputError):
        journal.close()
    monkeypatch.undo()
    with open_journal(tmp_path) as journal:
        assert lines(tmp_path / "out") == ["a"]
        assert journal.claim("a", DIGEST, 1) == "done"
        write(journal, "b", "c", start=2)


def test_commit_after_one_that_failed_writes_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_none(*args: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with open_journal(tmp_path) as journal:
        write(journal, "a", "b")
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write_at", write_none)
            with pytest.raises(OutputError, match=r"the disk is full: free some space, then run"):
                journal.commit()
        assert journal.claim("a", DIGEST, 7) == "duplicate"
        write(journal, "c", start=8)
        journal.commit()
        assert lines(tmp_path / "out") == ["a", "b", "c"]


def test_commit_that_is_interrupted_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_commit = Manifest.commit

    def interrupted(self: Manifest) -> None:
        really_commit(self)
        raise KeyboardInterrupt

    with open_journal(tmp_path) as journal:
        write(journal, "a", "b")
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                journal.commit()
        write(journal, "c", start=3)
        journal.commit()
        assert journal.n_done == 3
    assert lines(tmp_path / "out") == ["a", "b", "c"]


def test_manifest_that_cannot_be_written_leaves_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Manifest) -> None:
        raise self._failed(sqlite3.OperationalError("database or disk is full"))

    journal = open_journal(tmp_path)
    write(journal, "a")
    journal.commit()
    write(journal, *map(str, range(10_000)), start=2)
    monkeypatch.setattr(Manifest, "commit", fail)
    with pytest.raises(OutputError, match=r"out\.manifest: cannot be written: .* disk is full"):
        journal.close()
    monkeypatch.undo()
    assert log_of(tmp_path) < 2**15
    with open_journal(tmp_path) as journal:
        assert lines(tmp_path / "out") == ["a"]
        write(journal, "b", start=2)


LIMITED = """
import resource, sys
from pathlib import Path
from cbatch.errors import OutputError
from tests.files.journals import run_pass
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    run_pass(Path(sys.argv[1]), 0, 200)
except OutputError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.real
def test_run_over_a_limit_of_the_system_goes_on_afterwards(tmp_path: Path) -> None:
    done = run_python(LIMITED, tmp_path, 30_003)
    assert done.returncode == 2, done.stderr
    assert re.search(
        r"/out.* larger than is allowed here \(ulimit -f\): raise the limit, then run the same",
        done.stdout,
    )
    run_pass(tmp_path, 0, 200)
    assert sum(map(len, records(tmp_path).values())) == 200


@pytest.mark.parametrize("ids", [[], ["a", "b"]])
def test_bytes_behind_the_records_of_a_killed_run_are_kept(tmp_path: Path, ids: list[str]) -> None:
    killed = tmp_path / "killed"
    with open_journal(tmp_path) as journal:
        write(journal, *ids)
        journal.commit()
        shutil.copytree(tmp_path, killed)
    added = [b"mine\n" * 1000, b"more"]
    for more in added:
        with (killed / "out").open("ab") as file:
            file.write(more)
        with open_journal(killed) as journal:
            [note] = journal.notes
            assert f"{killed / 'out'} had bytes after its last record" in note
            assert lines(killed / "out") == ids
            shutil.copytree(killed, tmp_path / "again")
        shutil.rmtree(killed)
        (tmp_path / "again").rename(killed)
    names = ["out.cut-off", "out.cut-off1"]
    assert [(killed / name).read_bytes() for name in names] == added


def test_part_of_the_header_is_not_kept(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with open_journal(tmp_path):
        shutil.copytree(tmp_path, killed)
    os.truncate(killed / "out", 3)
    with open_journal(killed) as journal:
        assert journal.notes == ()
    assert not [*killed.glob("*.cut-off")]


def run_python(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )


# ---- two runs ----


def test_second_journal_in_one_process_is_refused(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        with pytest.raises(
            ConfigError, match=r"out: another run is writing to it: wait for its end"
        ):
            open_journal(tmp_path)
        write(journal, "a")
        journal.commit()
        with pytest.raises(ConfigError, match="another run"):
            open_journal(tmp_path, force=True)
    assert lines(tmp_path / "out") == ["a"]


def test_who_looks_at_an_output_for_a_moment_holds_up_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, "a")
        journal.commit()
    looking = (tmp_path / "out").open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `is_locked` does
    monkeypatch.setattr("cbatch.support.folders.time.sleep", lambda _: looking.close())
    with open_journal(tmp_path) as journal:
        assert journal.n_done == 1


OPEN = """
import sys
from pathlib import Path
from tests.files.journals import open_journal
try:
    open_journal(Path(sys.argv[1]), force=True)
except ValueError as error:
    print(error)
"""


@pytest.mark.real
@pytest.mark.parametrize("is_manifest_read", [False, True])
def test_second_journal_in_another_process_is_refused(
    tmp_path: Path, *, is_manifest_read: bool
) -> None:
    ids = [f"{i}" for i in range(400)]
    with open_journal(tmp_path) as journal:
        for i, id in enumerate(ids):
            write(journal, id, start=i + 1)
            journal.commit()
            if i % 100 == 50:
                if (
                    is_manifest_read
                ):  # the locks of a process on a file end where it closes the file
                    assert status_of(tmp_path / "out").n_done == i + 1
                assert "another run is writing to it" in run_python(OPEN, tmp_path).stdout
    assert run_python(OPEN, tmp_path).stdout == ""
    assert lines(tmp_path / "out") == ids


def test_second_journal_by_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("out")
    with open_journal(tmp_path):
        os.link(tmp_path / "out", tmp_path / "hard")
        for name in ("link", "hard"):
            with pytest.raises(ConfigError, match=r"another run is writing to it|no manifest"):
                journal_of(tmp_path / name, header=HEADER)
        with pytest.raises(ConfigError, match="another run is writing to it"):
            journal_of(tmp_path / "hard", header=HEADER, force=True)
        with pytest.raises(ConfigError, match=r"errors: another run is writing to it"):
            journal_of(tmp_path / "new", errors=tmp_path / "errors", header=HEADER)


def test_refused_journal_holds_no_lock_and_leaves_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text("mine", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(ConfigError, match="errors: exists"):
            open_journal(tmp_path)
    assert os.listdir(tmp_path) == ["errors"]
    (tmp_path / "errors").unlink()
    errors = tmp_path / "errors"
    with (
        journal_of(tmp_path / "other", errors=errors, header=HEADER),
        pytest.raises(ConfigError, match="errors: another run"),
    ):
        open_journal(tmp_path, force=True)
    fill(tmp_path, "a", has_errors=False)


# ---- other settings ----


def test_other_settings_are_refused_with_both_values_and_go_on_if_forced(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b")
    other = {"model": "small", "temperature": "0.5", "output format": "lines"}
    with pytest.raises(ConfigError) as caught:
        open_journal(tmp_path, settings=other)
    said = str(caught.value)
    assert "model was tiny, is now small; temperature was nothing, is now 0.5" in said
    assert "output format" not in said
    assert "--force" in said
    with open_journal(tmp_path, settings=other, force=True) as journal:
        assert journal.claim("a", DIGEST, 1) == "done"
        assert journal.claim("b", OTHER, 2) == "new"
        journal.add(2, b"new b\n", is_error=False)
    with open_journal(tmp_path, settings=other):
        assert lines(tmp_path / "out") == ["a", "new b"]


def test_settings_do_not_matter_before_the_first_record(tmp_path: Path) -> None:
    fill(tmp_path)
    fill(tmp_path, "a", settings={"model": "small"}, header=HEADER)
    with pytest.raises(ConfigError, match="model was small, is now tiny"):
        open_journal(tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        {"header": b"other,columns\n"},
        {"settings": {**SETTINGS, "output format": "openai"}},
    ],
)
def test_other_format_begins_anew_where_that_is_forced(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    fill(tmp_path, "a")
    with pytest.raises(
        ConfigError, match=r"first line was 'header', is now|format was lines, is now open"
    ):
        open_journal(tmp_path, **other)
    with open_journal(tmp_path, **other, force=True) as journal:
        assert journal.claim("a", DIGEST, 1) == "new"
    assert (tmp_path / "out").read_bytes() == other.get("header", HEADER)


def test_errors_to_another_file_are_refused(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, "a", is_error=True)
    with pytest.raises(ConfigError, match=r"errors went to .*/errors, now go to the output"):
        open_journal(tmp_path, has_errors=False)
    with open_journal(tmp_path, has_errors=False, force=True) as journal:
        [note] = journal.notes
        assert "errors stays as it is; its 1 items run again" in note
        write(journal, "a")
    assert (lines(tmp_path / "out"), lines(tmp_path / "errors")) == (["a"], ["a"])


def test_errors_may_get_a_file_later(tmp_path: Path) -> None:
    with open_journal(tmp_path, has_errors=False) as journal:
        write(journal, "a", "b", is_error=True)
    with open_journal(tmp_path, retry_errors=True) as journal:
        assert journal.claim("a", DIGEST, 1) == "new"
        journal.add(1, b"again\n", is_error=True)
    assert (lines(tmp_path / "out"), lines(tmp_path / "errors")) == (["b"], ["again"])


def test_outputs_and_manifest_may_be_moved_together(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    run_pass(old, 0)
    old.rename(new)
    before = records(new)
    run_pass(new, 0)
    assert records(new) == before
    (new / "out").rename(new / "other")
    (new / "out.manifest").rename(new / "other.manifest")
    with journal_of(new / "other", errors=new / "errors", header=HEADER) as journal:
        assert {journal.claim(item.id, item.digest, item.number) for item in asked(0, 40)} == {
            "done",
            "failed",
        }


# ---- files that are not as they were ----


def test_output_that_is_gone_begins_anew(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b")
    (tmp_path / "out").unlink()
    with open_journal(tmp_path, settings={"model": "small"}) as journal:
        [note] = journal.notes
        assert note == f"{tmp_path}/out is gone: all items run again, also the 2 that were done"
        assert journal.n_done == 0
        write(journal, "b")
    assert lines(tmp_path / "out") == ["b"]


def test_errors_that_are_gone_run_again(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, "a", is_error=True)
        write(journal, "b", start=2)
    (tmp_path / "errors").unlink()
    with open_journal(tmp_path) as journal:
        assert "1 of its items run again" in journal.notes[0]
        assert journal.claim("b", DIGEST, 2) == "done"
        assert journal.claim("a", DIGEST, 1) == "new"


@pytest.mark.parametrize("names", [("out", "errors"), ("out.manifest",)])
def test_empty_file_is_begun(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).touch()
    fill(tmp_path, "a")
    assert lines(tmp_path / "out") == ["a"]


def test_errors_of_somebody_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text("mine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"errors: exists, and no manifest"):
        open_journal(tmp_path)
    fill(tmp_path, "a", has_errors=False)
    with pytest.raises(ConfigError, match=r"errors: exists, and no manifest"):
        open_journal(tmp_path)
    assert (tmp_path / "errors").read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize("n_left", [0, 7, 9, 101])
def test_shorter_output_loses_what_is_not_whole(tmp_path: Path, n_left: int) -> None:
    ids = [str(i) for i in range(1, 100)]
    fill(tmp_path, *ids)
    data = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(data[:n_left])
    n_whole = max(data[:n_left].count(b"\n") - 1, 0)
    with open_journal(tmp_path) as journal:
        assert f"{99 - n_whole} of its items run again" in journal.notes[0]
        assert journal.n_done == n_whole
        found = [journal.claim(id, DIGEST, int(id)) for id in ids]
        assert found == ["done"] * n_whole + ["new"] * (99 - n_whole)
        for id in ids[n_whole:]:
            journal.add(int(id), f"{id}\n".encode(), is_error=False)
    assert (tmp_path / "out").read_bytes() == data


EDITS: dict[str, Callable[[str], str]] = {
    "sorted": lambda text: "".join(sorted(text.splitlines(keepends=True))),
    "a line twice": lambda text: text.replace("50\n", "50\n50\n"),
    "a line more": lambda text: text + "mine\n",
    "other ends of lines": lambda text: text.replace("\n", "\r\n"),
    "another first line": lambda text: text.replace("header", "HEADER"),
    "a shorter file": lambda text: "mine\n",
    "a shorter file with the header": lambda text: "header\n\n",
    "reversed": lambda text: "header\n" + "".join(text.splitlines(keepends=True)[:0:-1]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_output_is_refused_or_begun_anew(tmp_path: Path, edit: str) -> None:
    ids = [str(i) for i in range(1, 101)]
    fill(tmp_path, *ids)
    path = tmp_path / "out"
    path.write_bytes(EDITS[edit](path.read_bytes().decode()).encode())
    edited = path.read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"out: was changed since .* \(--force\)"):
            open_journal(tmp_path)
        assert path.read_bytes() == edited
    with open_journal(tmp_path, force=True) as journal:
        assert "starting again" in journal.notes[0]
        write(journal, *ids[::-1])
    assert lines(path) == ids[::-1]


def test_lines_added_before_the_first_record_are_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    with (tmp_path / "out").open("a", encoding="utf-8") as file:
        file.write("mine\n")
    with pytest.raises(ConfigError, match=r"out: exists, and no manifest|was changed"):
        open_journal(tmp_path)
    assert lines(tmp_path / "out") == ["mine"]


# ---- places that cannot be ----


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "is a directory: give a file"),
        ("no/more/out", "the folder .*/no/more does not exist"),
        ("/dev/null", "is not a regular file, so no later run"),
        ("pipe", "is not a regular file, so no later run"),
    ],
)
def test_output_that_cannot_be_a_file_is_refused(tmp_path: Path, name: str, words: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=words):
        journal_of(tmp_path / name)


def test_link_is_followed_to_one_manifest(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/out")
    with journal_of(tmp_path / "link", header=HEADER) as journal:
        write(journal, "a", "b")
    with open_journal(tmp_path / "real", has_errors=False) as journal:
        assert journal.claim("a", DIGEST, 1) == "done"
        assert journal.claim("b", OTHER, 2) == "new"
        journal.add(2, b"c\n", is_error=False)
    assert (tmp_path / "link").is_symlink()
    assert lines(tmp_path / "link") == ["a", "c"]
    assert sorted(os.listdir(tmp_path / "real")) == ["out", "out.manifest"]


def test_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=rf"{tmp_path}: no permission to write there"):
        open_journal(tmp_path)


# ---- manifests that are none ----


def change_manifest(folder: Path, *statements: str) -> None:
    db = sqlite3.connect(folder / "out.manifest", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


def test_database_of_another_program_is_never_touched(tmp_path: Path) -> None:
    change_manifest(tmp_path, "CREATE TABLE mine (x)", "INSERT INTO mine VALUES (1)")
    before = (tmp_path / "out.manifest").read_bytes()
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"is an SQLite file of another program"):
            open_journal(tmp_path, force=force)
    assert (tmp_path / "out.manifest").read_bytes() == before


@pytest.mark.parametrize("damage", [b"\xff" * 1024, b"mine" * 256], ids=["255", "text"])
def test_manifest_damaged_in_any_page_is_refused_or_replaced(tmp_path: Path, damage: bytes) -> None:
    fill(tmp_path, *map(str, range(200)))
    path = tmp_path / "out.manifest"
    whole, answers = path.read_bytes(), (tmp_path / "out").read_bytes()
    cut = (b"mine\n" * 300, whole[:2000], whole[:1024] + bytes(len(whole) - 1024))
    pages = range(1024, len(whole), 1024)
    for damaged in (*cut, *(whole[:at] + damage + whole[at + 1024 :] for at in pages)):
        path.write_bytes(damaged)
        with pytest.raises(
            ConfigError, match=r"out\.manifest: is damaged, or is not a .* \(--force\)"
        ):
            open_journal(tmp_path)
        assert (tmp_path / "out").read_bytes() == answers
        with open_journal(tmp_path, force=True) as journal:
            assert journal.claim("7", DIGEST, 1) == "new"
            assert "is damaged" in journal.notes[0]
        (tmp_path / "out").write_bytes(answers)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"out\.manifest: the manifest cannot be opened"):
        open_journal(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", r"out: exists, and no manifest .* \(--force\)"),
        ("PRAGMA user_version = 9", "has version 9, but this cbatch knows 1: update"),
        ("DROP TABLE files", r"is damaged, or is not a manifest .* \(--force\)"),
        ("DROP INDEX records_by_key", r"is damaged, or is not a manifest .* \(--force\)"),
        ("ALTER TABLE records DROP COLUMN crc", r"is damaged, or is not a manifest .* \(--force\)"),
        ("ALTER TABLE settings RENAME TO mine", r"is damaged, or is not a manifest .* \(--force\)"),
    ],
)
def test_manifest_that_is_gone_or_not_as_written_is_refused_or_replaced(
    tmp_path: Path, change: str, words: str
) -> None:
    fill(tmp_path, "a")
    if change:
        change_manifest(tmp_path, change)
    else:
        (tmp_path / "out.manifest").unlink()
    with pytest.raises(ConfigError, match=words):
        open_journal(tmp_path)
    with open_journal(tmp_path, force=True) as journal:
        write(journal, "b")
    assert lines(tmp_path / "out") == ["b"]


# ---- in bulk ----

MEASURED = """
import os, sys
from pathlib import Path
from tests.files.journals import open_journal
n_items = int(sys.argv[2])
with open_journal(Path(sys.argv[1])) as journal:
    for number in range(n_items):
        id = f"request-{number}"
        journal.claim(id, bytes(16), number)
        journal.add(number, b"x" * 50, is_error=False)
        if number % 64 == 0:
            journal.commit()
    n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    print(n_pages * os.sysconf("SC_PAGE_SIZE") // 1024)
"""


@pytest.mark.real
def test_memory_does_not_grow_with_the_items(tmp_path: Path) -> None:
    kib = []
    for n_items in (10_000, 100_000):
        (tmp_path / str(n_items)).mkdir()
        done = run_python(MEASURED, tmp_path / str(n_items), n_items)
        assert done.returncode == 0, done.stderr
        kib.append(int(done.stdout))
    assert kib[1] - kib[0] < 6 * 1024  # SQLite's cache, 4 MiB, and a bit for each record


ITEM = st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans())
PASS = st.lists(ITEM, max_size=10).flatmap(lambda items: st.permutations(list(enumerate(items))))


@given(st.lists(PASS, max_size=4), st.integers(1, 4))
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example has a folder in it
)
def test_any_runs_in_any_order_leave_each_item_once(
    tmp_path: Path,
    passes: list[list[tuple[int, tuple[int, int, bool]]]],
    slice: int,
) -> None:
    folder = Path(mkdtemp(dir=tmp_path))
    for i_pass, items in enumerate(passes):
        expected, seen = dict[int, bytes](), set[int]()
        with open_journal(folder, retry_errors=bool(i_pass % 2)) as journal:
            for i, (number, (id, version, is_error)) in enumerate(items):
                is_double = id in seen
                seen.add(id)
                claim = journal.claim(f"\0{id}", b"%016d" % version, number)
                assert claim in (
                    ("duplicate", "failed") if is_double else ("new", "done", "failed")
                )
                assert not (claim == "failed" and i_pass % 2)
                is_error = is_error or is_double
                record = b"%d %d %d %d\n" % (id, version, is_double, is_error)
                if claim in ("new", "duplicate"):
                    journal.add(number, record, is_error=is_error)
                else:
                    record = b"%d %d %d %d\n" % (id, version, is_double, claim == "failed")
                expected[number] = record
                if i % slice == 0:
                    journal.commit()
            assert journal.settle_unclaimed()[1] == 0
            assert journal.n_done + journal.n_failed == len(items)
        sort_in_place(folder / "out")
        found = records(folder)
        assert sorted(found["out"] + found["errors"]) == sorted(expected.values())
        for name in ("out", "errors"):
            text = (folder / name).read_bytes().removeprefix(HEADER)
            is_errors = name == "errors"
            assert text == b"".join(
                r for _, r in sorted(expected.items()) if r.endswith(b"1\n") == is_errors
            )
