from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch.errors import ConfigError
from cbatch.files.file_formats import output_format
from cbatch.files.input.item import duplicate
from cbatch.files.input.source import Source, open_source
from cbatch.files.output.target import encoder
from tests.files.samples import error_of, read, write

OPENAI = json.dumps(
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
)
CBATCH = '{"prompt": "x"}'
OBJECT = '{"text": "x"}'


def format_of(path: str, format: str = "auto") -> str:
    with open_source(path, format=format) as source:
        return source.format


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.jsonl", OPENAI, "openai"),
        ("a.jsonl", CBATCH, "cbatch"),
        ("a.ndjson", OBJECT, "jsonl"),
        ("a.json", CBATCH, "cbatch"),
        ("a.jsonl.gz", OPENAI, "openai"),
        ("a.csv.xz", "text\nx", "csv"),
        ("a", CBATCH, "cbatch"),
        ("a.jsonl", f"\n\nbroken\n{OPENAI}", "openai"),
        ("a.jsonl", "broken", "cbatch"),
        ("a.csv", "text\nx", "csv"),
        ("A.CSV", "text\nx", "csv"),
        ("a.csv.gz", "text\nx", "csv"),
        ("a.tsv", "text\nx", "tsv"),
        ("a.tab", "text\nx", "tsv"),
        ("a.txt", CBATCH, "text"),
    ],
)
def test_format_is_told_by_name_and_first_object(
    tmp_path: Path, name: str, content: str, format: str
) -> None:
    assert format_of(write(tmp_path / name, content)) == format


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.dat", "hello", "its name does not tell its format: give the format .openai, cbatch"),
        ("a.json", '[{"prompt": "x"}]', r"begins with \[, as a JSON array does: .*jq"),
        ("a.jsonl", "\n \n", "no requests found .empty_file"),
        ("a.jsonl", "", "no requests found .empty_file"),
        ("a.txt.gz", "", "no requests found .empty_file"),
        ("a.parquet", "", "no requests found .empty_file"),
        ("a.parquet.gz", "x", "is compressed: give Parquet and Arrow as files"),
    ],
)
def test_file_that_cannot_be_read_says_why(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read(write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", CBATCH), ("a", CBATCH), ("a.jsonl", OPENAI), ("a.csv", "text\nx"), ("a.txt", "x")],
)
def test_blank_lines_before_the_first_request_are_passed(
    tmp_path: Path, name: str, content: str
) -> None:
    assert len(read(write(tmp_path / name, "\n" * 1000 + content))) == 1


def test_blank_lines_without_end_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\n" * (2**20 + 10) + CBATCH)
    with pytest.raises(ConfigError, match=r"a.jsonl: begins with 1,048,577 bytes of blank lines"):
        read(path)


@pytest.mark.parametrize("content", [OPENAI, CBATCH])
def test_template_does_not_fit_requests(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "a.jsonl", content)
    with pytest.raises(
        ConfigError,
        match="which take no template, system message or column of pictures or sounds",
    ):
        read(path, system="x")
    with pytest.raises(ConfigError, match="there is no column 'x'"):
        read(path, template="{x}")


def test_several_files_are_numbered_through(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", f"{CBATCH}\n{CBATCH}\n")
    write(tmp_path / "c.jsonl", "")
    items = read(f"{tmp_path}/*.jsonl")
    assert [(i.number, i.place.removeprefix(f"{tmp_path}/")) for i in items] == [
        (1, "a.jsonl, line 1"),
        (2, "a.jsonl, line 2"),
        (3, "b.jsonl, line 1"),
        (4, "b.jsonl, line 2"),
    ]


def test_files_of_several_formats_are_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", OPENAI), write(tmp_path / "b.txt", "x")
    with pytest.raises(ConfigError, match=r"a.jsonl is openai and .*b.txt is text"):
        read(a, b)


def test_stdin_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(gzip.compress(b"\nid,text\n1,x\n"))

    monkeypatch.setattr("sys.stdin", Stdin)
    with open_source("-", format="csv", template="{text}") as source:
        [item] = source
    assert (item.place, item.extra) == ("<stdin>, line 3", {"id": "1", "text": "x"})
    assert source.n_bytes is None


def test_pipe_is_looked_at_no_further_than_needed() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\n")
    with open_source(f"/dev/fd/{reader}", format="text") as source:
        items = iter(source)
        assert next(items).extra == {"line": "one"}
        os.write(writer, b"two\n")
        assert next(items).extra == {"line": "two"}
    os.close(reader)
    os.close(writer)


def test_bytes_read_grow_to_those_of_all_files(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", f"{CBATCH}\n" * 3)
    b = write(tmp_path / "b.jsonl.gz", f"{CBATCH}\n" * 3)
    with open_source([a, b]) as source:
        seen = [source.n_bytes_read for _ in source]
        assert seen[:3] == [16, 32, 48]
        assert seen == sorted(seen)
        assert (
            source.n_bytes_read
            == source.n_bytes
            == sum(p.stat().st_size for p in tmp_path.iterdir())
        )


def test_items_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x\n" * 300_000)
    with open_source(path) as source:
        next(iter(source))
        assert source.n_bytes_read == 2


def test_output_is_in_the_format_of_the_input(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write(path, "text\nx")
    with open_source(path) as source:  # which may be given alone
        assert (output_format(source), output_format(source, "cbatch")) == ("csv", "cbatch")
        for asked, said in (("xml", "format must be one of"), ("text", "several lines")):
            with pytest.raises(ConfigError, match=said):
                output_format(source, asked)
        assert encoder("csv", source).header().startswith(b"text,response,")
    with pytest.raises(ConfigError, match=r"format must be one of auto, openai, .*, not 'xml'"):
        read(str(path), format="xml")
    with pytest.raises(ConfigError, match="empty_file"):
        read(write(tmp_path / "a.txt", "\n" * 1000))


def test_id_that_stands_twice_has_openais_code(tmp_path: Path) -> None:
    [item] = read(write(tmp_path / "a.jsonl", '{"id": "a", "prompt": "x"}'))
    error = error_of(duplicate(item, 1))
    assert error.code == "duplicate_custom_id"
    assert "'a' occurs twice, first in request 1" in error.message


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl", "in.txt"])
@pytest.mark.parametrize("share", [0, 0.5])
def test_file_that_is_cut_off_while_it_is_read_has_not_ended(
    tmp_path: Path, name: str, share: float
) -> None:
    line = json.dumps({"prompt": "x" * 90}) if name == "in.jsonl" else "x" * 100
    header = "prompt\n" if name == "in.csv" else ""
    path = write(tmp_path / name, header + f"{line}\n" * 20_000)
    with open_source(path) as source:
        items = iter(source)
        next(items)
        os.truncate(path, int(share * os.stat(path).st_size))
        with pytest.raises(
            ConfigError, match=r"was cut off or replaced while it was read: it had "
        ):
            list(items)


@contextmanager
def stdin_of(path: Path, start: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    with path.open() as stdin:
        os.lseek(stdin.fileno(), start, os.SEEK_SET)
        monkeypatch.setattr("sys.stdin", stdin)
        with open_source("-", format="text") as source:
            yield source


@pytest.mark.parametrize("n_before", [0, 50])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_file_that_stdin_comes_from_may_not_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_before: int, *, is_compressed: bool
) -> None:
    lines = os.urandom(600_000).hex("\n", 60).encode() + b"\n"
    stream = gzip.compress(lines) if is_compressed else lines
    path = tmp_path / "in"
    path.write_bytes(b"x" * n_before + 3 * stream)
    with stdin_of(path, n_before, monkeypatch) as source:
        items = iter(source)
        next(items)
        os.truncate(path, n_before + len(stream))
        with pytest.raises(ConfigError, match=f"it had {3 * len(stream):,} bytes and now has "):
            list(items)
    path.write_bytes(b"x" * n_before + 3 * stream)
    with stdin_of(path, n_before, monkeypatch) as source:
        assert len(list(source)) == 3 * lines.count(b"\n")


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_compressed_file_that_is_cut_off_between_its_streams_has_not_ended(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    streams = [compress(os.urandom(600_000).hex("\n", 60).encode() + b"\n") for _ in range(5)]
    path = tmp_path / f"in.txt{suffix}"
    path.write_bytes(b"".join(streams))
    with open_source(path) as source:
        items = iter(source)
        next(items)
        os.truncate(path, len(streams[0]) + len(streams[1]))
        with pytest.raises(
            ConfigError, match=r"was cut off or replaced while it was read: it had "
        ):
            list(items)


@pytest.mark.parametrize("n_lines", [20_000, 30_000])
def test_file_that_is_rewritten_while_it_is_read_has_not_ended(
    tmp_path: Path, n_lines: int
) -> None:
    path = write(tmp_path / "in.txt", "old line\n" * 20_000 + "end\n" * 50_000)
    with open_source(path) as source:
        items = iter(source)
        next(items)
        with open(path, "r+") as file:
            file.write("new line\n" * n_lines)
        with pytest.raises(ConfigError, match="was rewritten while it was read: run the same"):
            list(items)


@pytest.mark.parametrize("kind", ["file", "stream", "parquet"])
@pytest.mark.parametrize("change", ["cut off", "rewritten", "cut off before"])
def test_columnar_file_that_changes_while_it_is_read_has_not_ended(
    tmp_path: Path, kind: str, change: str
) -> None:
    def write_rows(word: str) -> int:
        table = pa.table({"prompt": [f"{word} {i:05}" for i in range(6000)]})
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=1500)
            return path.stat().st_size // 2
        with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(path, table.schema) as out:
            n_bytes = []
            for batch in table.to_batches(max_chunksize=1500):
                out.write_batch(batch)
                n_bytes.append(path.stat().st_size)
        return n_bytes[-1]

    path = tmp_path / ("in.parquet" if kind == "parquet" else "in.arrow")
    n_bytes_part = write_rows("old")
    with open_source(str(path)) as source:
        items = iter(source)
        if change != "cut off before":
            next(items)
        if change == "rewritten":
            write_rows("new")
        else:
            os.truncate(path, n_bytes_part)
        said = "had [0-9,]+ bytes" if change == "cut off before" else "was rewritten while|read as"
        with pytest.raises(ConfigError, match=said):
            list(items)


def test_file_that_grows_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", '{"prompt": "x"}\n' * 30_000)
    with open_source(path) as source:
        items = iter(source)
        next(items)
        with Path(path).open("a") as file:
            file.write('{"prompt": "y"}\n')
        assert len(list(items)) == 30_000
