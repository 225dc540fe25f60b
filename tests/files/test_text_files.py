from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import ConfigError
from cbatch.files.input.text_files import InputFile, LongLine, find_files
from tests.files.samples import write

if TYPE_CHECKING:
    from pathlib import Path

zstd = pytest.importorskip("backports.zstd")

TEXT = b"one\ntwo\r\n\nthree"
LINES = [b"one\n", b"two\r\n", b"\n", b"three"]


OpenFile = Callable[..., InputFile]


@pytest.fixture
def opened() -> Iterator[OpenFile]:
    """Return a maker of files that are closed when the test ends."""
    with ExitStack() as stack:

        def make(*args: Any) -> InputFile:
            file = InputFile(*args)
            stack.callback(file.close)
            return file

        yield make


class Stdin:
    """A stdin of these bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def names(folder: Path, *files: str) -> list[str]:
    return [write(folder / file, "x") for file in files]


def test_find_files_are_in_order_of_names_and_no_folders(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    b, a, c, odd, deep = names(tmp_path, "b.jsonl", "a.jsonl", "c.txt", "d[1].x", "inner/e.jsonl")
    assert find_files([c, f"{tmp_path}/*.jsonl"]) == [c, a, b]
    assert find_files([odd]) == [odd]  # a name that is there is no pattern
    assert find_files([f"{tmp_path}/**"]) == [a, b, c, odd, deep]


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([], "no input"),
        (["{0}/none.jsonl"], "No such file"),
        (["{0}/*.none"], "no file matches this pattern"),
        (["{0}"], "is a directory: give files, or a pattern"),
        (["{0}/a.jsonl", "{0}/*.jsonl"], "is named twice"),
        (["{0}/a.jsonl", "{0}/./a.jsonl"], "is named twice .as"),
        (["-", "-"], "is named twice"),
    ],
)
def test_find_files_that_cannot_be_read_once_says_why(
    tmp_path: Path, paths: list[str], said: str
) -> None:
    names(tmp_path, "a.jsonl")
    with pytest.raises(ConfigError, match=said):
        find_files([path.format(tmp_path) for path in paths])


def pzstd(text: bytes) -> bytes:
    return b"\x50*M\x18\x04\0\0\0size" + bytes(zstd.compress(text))


PACKERS = [gzip.compress, zstd.compress, pzstd, bz2.compress, lzma.compress]


@pytest.mark.parametrize("pack", [bytes, *PACKERS])
def test_lines_come_with_their_endings_whatever_the_file_is_packed_in(
    tmp_path: Path, pack: Callable[[bytes], bytes], opened: OpenFile
) -> None:
    file = opened(write(tmp_path / "file", pack(TEXT)))
    assert list(file.lines()) == LINES
    assert file.n_bytes == file.n_bytes_read == len(pack(TEXT))


@pytest.mark.parametrize("pack", PACKERS)
def test_lines_of_several_packed_parts_are_read_through(
    tmp_path: Path, pack: Callable[[bytes], bytes], opened: OpenFile
) -> None:
    parts = map(pack, (b"", b"a\n", b"", b"b\n"))
    file = opened(write(tmp_path / "file", b"".join(parts)))
    assert list(file.lines()) == [b"a\n", b"b\n"]


@pytest.mark.parametrize("pack", PACKERS)
def test_what_is_behind_a_packed_part_and_is_none_is_an_error(
    tmp_path: Path, pack: Callable[[bytes], bytes], opened: OpenFile
) -> None:
    damaged = b"a" + pack(b"two\n")[1:]
    with pytest.raises(ConfigError, match="its compressed data is damaged") as caught:
        list(opened(write(tmp_path / "file", pack(b"one\n") + damaged)).lines())
    assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_zeros_between_packed_parts_and_behind_them_end_nothing(
    tmp_path: Path, pack: Callable[[bytes], bytes], opened: OpenFile
) -> None:
    packed = pack(b"one\n") + bytes(200_000) + pack(b"two\n") + bytes(8)
    assert list(opened(write(tmp_path / "file", packed)).lines()) == [b"one\n", b"two\n"]


def test_text_that_begins_as_bzip2_does_is_text(tmp_path: Path, opened: OpenFile) -> None:
    file = opened(write(tmp_path / "file", b"BZh91 is a name\n"))
    assert list(file.lines()) == [b"BZh91 is a name\n"]


@pytest.mark.parametrize(
    ("name", "start", "said"),
    [
        ("a.jsonl", b"PK\x03\x04", "is a zip archive"),
        ("a.jsonl", b"7z\xbc\xaf\x27\x1c", "is a 7z archive"),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18", "is compressed by lz4"),
        ("a", b"LZIP\1", "is compressed by lzip"),
        ("a", b"\x1f\x9d\x90", "is compressed by compress"),
        ("a.jsonl.br", b"anything", "is packed"),
    ],
)
def test_file_packed_in_another_way_is_refused_by_name(
    tmp_path: Path, name: str, start: bytes, said: str, opened: OpenFile
) -> None:
    file = opened(write(tmp_path / name, start + bytes(99)))
    with pytest.raises(ConfigError, match=rf"{said}, which is not supported: unpack it"):
        list(file.lines())


@pytest.mark.parametrize(
    ("modules", "pack", "words"),
    [
        (["bz2"], bz2.compress, "without bz2: unpack it"),
        (["lzma"], lzma.compress, "without lzma: unpack it"),
        (["compression.zstd", "backports.zstd"], zstd.compress, r"pip install backports\.zstd"),
    ],
)
def test_python_without_a_module_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: OpenFile,
    modules: list[str],
    pack: Callable[[bytes], bytes],
    words: str,
) -> None:
    path = write(tmp_path / "file", pack(TEXT))
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=words):
        list(opened(path).lines())


def test_lines_begin_behind_a_bom_and_utf16_is_refused(tmp_path: Path, opened: OpenFile) -> None:
    assert list(opened(write(tmp_path / "a", b"\xef\xbb\xbf" + TEXT)).lines()) == LINES
    with pytest.raises(ConfigError, match="UTF-16: save it as UTF-8"):
        list(opened(write(tmp_path / "b", "one\n".encode("utf-16"))).lines())


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs a device without an end")
def test_line_without_an_end_is_read_no_further_than_a_limit(
    opened: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.files.input.text_files.N_PAST_BYTES", 2**24)
    file = opened("/dev/zero", 2**16)
    with pytest.raises(ConfigError, match=r"^/dev/zero: line 1 has more than 16,.* at most 65,536"):
        list(file.lines())
    assert file.n_bytes_read < 2**25


def test_line_over_the_limit_takes_no_memory(tmp_path: Path, opened: OpenFile) -> None:
    file = opened(write(tmp_path / "file.gz", b"x" * 2**25), 2**16)
    tracemalloc.start()
    assert list(file.lines()) == [LongLine(2**25, 0, 2**16)]
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.mark.parametrize("end", [b"\n", b""])
def test_line_over_the_limit_is_passed_over(tmp_path: Path, end: bytes, opened: OpenFile) -> None:
    file = opened(write(tmp_path / "file", b"1234\n" + b'"' * 300_000 + end), 4)
    assert list(file.lines()) == [b"1234\n", LongLine(300_000 + len(end), 300_000, 4)]


def test_lines_ahead_of_stdin_come_again(monkeypatch: pytest.MonkeyPatch, opened: OpenFile) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(TEXT))
    file = opened("-")
    for _ in range(2):
        assert [line for _, line in zip(range(2), file.ahead(), strict=False)] == LINES[:2]
        file.rewind()
    assert list(file.lines()) == LINES
    assert (file.name, file.n_bytes, file.n_bytes_read) == ("<stdin>", None, len(TEXT))


def test_pipe_has_no_size(tmp_path: Path, opened: OpenFile) -> None:
    reader, writer = os.pipe()
    os.write(writer, TEXT)
    os.close(writer)
    file = opened(f"/dev/fd/{reader}")
    assert list(file.ahead()) == LINES
    file.rewind()
    assert (list(file.lines()), file.n_bytes) == (LINES, None)
    file.close()
    os.close(reader)


@pytest.mark.parametrize("compress", PACKERS)
def test_torn_file_says_how_far_it_was_read(
    tmp_path: Path, compress: Callable[[bytes], bytes], opened: OpenFile
) -> None:
    data = compress(b"".join(b"line %d\n" % i for i in range(1000)))
    file = opened(write(tmp_path / "file", data[:-9]))
    with pytest.raises(ConfigError, match=r"ends in the middle .* \d+ lines .*were read before"):
        list(file.lines())


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_damaged_file_says_so(
    tmp_path: Path, compress: Callable[[bytes], bytes], opened: OpenFile
) -> None:
    data = bytearray(
        compress(random.Random(1).randbytes(1000))
    )  # of others the end may be lost too
    data[500] ^= 255
    file = opened(write(tmp_path / "file", bytes(data)))
    with pytest.raises(ConfigError, match="compressed data is damaged"):
        list(file.lines())


def test_packed_file_that_asks_for_much_memory_is_refused(tmp_path: Path, opened: OpenFile) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**28}]
    file = opened(write(tmp_path / "file", lzma.compress(b"one\n", filters=filters)))
    words = r"unpacking it needs too much memory; 0 lines .*: unpack it with its own tool"
    with pytest.raises(ConfigError, match=words):
        list(file.lines())
    for preset in range(10):
        file = opened(write(tmp_path / str(preset), lzma.compress(b"one\n", preset=preset)))
        assert list(file.lines()) == [b"one\n"]
