"""The input of a run: looked into, counted, copied where it has to be."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest

from cbatch.errors import OutputError
from cbatch.files.file_run import run_file, stream_file
from cbatch.files.input import item as item_module
from cbatch.files.input import item_stream as reading_module
from cbatch.files.input.item import Seen
from cbatch.files.input.item_stream import ItemStream
from cbatch.files.settings import FileOptions
from cbatch.options import RunOptions
from tests.files.runs import make_engine, write_requests

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_number_of_items_is_about_right_before_all_were_read(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 20_000)
    with closing(ItemStream(str(source), FileOptions())) as reading:
        assert reading.about() is None
        for _ in islice(reading, 10_000):
            pass
        assert abs((reading.about() or 0) - 20_000) < 2_000


def test_short_files_are_counted_before_all_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_requests(tmp_path / f"{name}.jsonl", 1500)
    for most, n_items in (("N_COUNTED", 3000), ("N_COUNTED", None), ("N_COUNTED_BYTES", None)):
        with closing(ItemStream(str(tmp_path / "*.jsonl"), FileOptions())) as reading:
            next(reading)
            assert reading.n_items == n_items
            assert len([*reading]) == 2999
        monkeypatch.setattr(reading_module, most, 2999)


def test_what_is_looked_at_ahead_comes_again(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 10)
    with closing(ItemStream(str(source), FileOptions())) as reading:
        ahead = reading.look_ahead(RunOptions(max_tokens=7), 4)
        assert ahead is not None
        assert [options.max_tokens for _, options in ahead.prompts] == [7] * 4
        assert not ahead.is_all
        assert [item.number for item in reading] == list(range(1, 11))


def test_shuffled_input_is_counted_and_has_every_item_once(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 50)
    with closing(ItemStream(str(source), FileOptions(shuffle=True))) as reading:
        numbers = [item.number for item in reading]
        assert (reading.n_items, reading.is_piped) == (50, False)
    assert numbers != sorted(numbers)
    assert sorted(numbers) == list(range(1, 51))


def test_long_items_that_were_looked_at_are_not_taken_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "MAX_HELD", 20)
    source = write_requests(tmp_path / "in.jsonl", 10)
    with closing(ItemStream(str(source), FileOptions())) as reading:
        ahead = reading.look_ahead(RunOptions())
        assert ahead is not None
        assert (len(ahead.prompts), ahead.is_all) == (3, False)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[BinaryIO]:
    """Return what writes to stdin."""
    from_fd, to_fd = os.pipe()
    with os.fdopen(from_fd) as stdin, os.fdopen(to_fd, "wb", buffering=0) as file:
        monkeypatch.setattr("sys.stdin", stdin)
        yield file


def test_pipe_is_answered_before_it_ends(pipe: BinaryIO) -> None:
    with make_engine(threaded=True) as engine:
        pipe.write(b'{"id": "0", "prompt": "a"}\n')
        pairs = iter(stream_file("-", engine))
        for number in range(1, 5):
            assert next(pairs)[0].id == str(number - 1)
            pipe.write(b'{"id": "%d", "prompt": "a"}\n' % number)
        pipe.close()
        assert [item.id for item, _ in pairs] == ["4"]


def test_closing_ends_the_thread_that_waits_for_stdin(pipe: BinaryIO) -> None:
    pipe.write(b'{"id": "a", "prompt": "a"}\n')
    with closing(ItemStream("-", FileOptions())) as reading:
        assert next(reading).id == "a"
    assert "cbatch-pipe" not in {thread.name for thread in threading.enumerate()}
    pipe.write(b"what comes now is for others\n")
    assert sys.stdin.buffer.readline() == b"what comes now is for others\n"


def test_run_that_fails_does_not_wait_for_a_silent_pipe(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "in.jsonl")
    with make_engine(threaded=True) as engine, fifo.open("r+b", buffering=0) as file:
        file.write(b'{"id": "a", "prompt": "a"}\n')
        with pytest.raises(OSError, match="No space left"):
            run_file(fifo, "/dev/full", engine=engine)


@pytest.mark.parametrize("n_chars", [1, 99_999])
def test_shuffle_without_room_names_the_folder_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_chars: int
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": n_chars * "x"}) + "\n")
    full = Path("/dev/full").open("w+b")  # noqa: SIM115  # the reading closes it
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/full")
    words = "^/full: the disk is full: free some space, or name another folder in TMPDIR$"
    with pytest.raises(OutputError, match=words):
        ItemStream(tmp_path / "in.jsonl", FileOptions(shuffle=True))


def test_what_was_read_of_stdin_before_is_not_read_again(pipe: BinaryIO) -> None:
    pipe.write(b'a header\n{"id": "a", "prompt": "a"}\n')
    pipe.close()
    assert sys.stdin.buffer.readline() == b"a header\n"
    with closing(ItemStream("-", FileOptions())) as reading:
        ahead = reading.look_ahead(RunOptions())
        assert ahead is not None
        assert not reading.is_dry()
        assert [item.id for item in reading] == ["a"]


def test_few_items_with_large_pictures_are_looked_at_ahead(tmp_path: Path) -> None:
    url = "data:image/png;base64," + "A" * 2**22
    content = [{"type": "image_url", "image_url": {"url": url}}]
    line = json.dumps({"messages": [{"role": "user", "content": content}]})
    (tmp_path / "in.jsonl").write_text(f"{line}\n" * 20)
    with closing(ItemStream(str(tmp_path / "in.jsonl"), FileOptions())) as reading:
        ahead = reading.look_ahead(RunOptions())
        assert ahead is not None
        assert (len(ahead.prompts), ahead.is_all) == (16, False)


def test_ids_without_room_name_the_folder_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_many(seen: Seen) -> None:
        for i in range(1000):
            seen.add(str(i), i)

    made = item_module.scratch
    limit = "PRAGMA max_page_count = 4"
    monkeypatch.setattr(item_module, "scratch", lambda *tables: made(*tables, limit))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/full")
    words = "^/full: database or disk is full: free some space, or name another folder in TMPDIR$"
    with closing(Seen()) as seen, pytest.raises(OutputError, match=words):
        add_many(seen)
