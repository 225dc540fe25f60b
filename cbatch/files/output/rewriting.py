"""An output written anew: without the bytes of records that were superseded, or in another order.

It may be killed anywhere, and what it leaves may be copied with or without what is not the output and its manifest. The
part beside the output is whole on the disk before the manifest says that it takes the output's place; where each record
is then stands beside where it was, until that is done. Who opens the manifest finishes it, or goes on with the output
as it was where the part is gone.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from cbatch.files.output import durable as disk
from cbatch.files.output.durable import told
from cbatch.files.output.record_file import changed, is_whole, part_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from cbatch.files.output.manifest import FileRow, Manifest
    from cbatch.files.output.record_file import Output

_BUFFER = 2**20

_MOVED = (
    "SELECT moved.start, records.size, records.crc FROM moved JOIN records USING (record) "
    "WHERE records.file = ? AND moved.start != records.start"
)
_MOVE = (
    "UPDATE records SET start = (SELECT start FROM moved WHERE moved.record = records.record) "
    "WHERE file = ?"
)

Order = Literal["start", "number"]


def rewrite(manifest: Manifest, output: Output, order: Order = "start") -> None:
    """Write an output anew, record by record, in the order of their places in it or of their items."""
    with told(output.part):
        try:
            _write_part(manifest, output, order)
        except OSError:
            output.part.unlink(missing_ok=True)
            raise
    row = replace(output.row, is_replaced=True)
    with manifest.transaction(is_durable=True):
        manifest.put_file(row)
    manifest.fold()
    row = finish(manifest, row)
    output.reopen()
    output.committed(row)


def finish(manifest: Manifest, row: FileRow) -> FileRow:
    """Put the part in the place of its output, where a `rewrite` came so far; else remove what it has left."""
    part = part_of(row.path)
    with told(row.path):
        if not row.is_replaced:
            part.unlink(missing_ok=True)
            return row
        if part.exists():
            disk.replace(part, row.path)
        is_done = _is_as_moved(manifest, row)
    row = replace(row, is_replaced=False)
    if is_done:
        size = len(row.header) + manifest.count(row.file).n_bytes
        row = replace(row, size=size, synced=size)
    with manifest.transaction(is_durable=True):
        if is_done:
            manifest.execute(_MOVE, row.file)
        manifest.execute("DROP TABLE moved")
        manifest.put_file(row)
    manifest.fold()
    return row


def fits(manifest: Manifest, row: FileRow, path: Path) -> bool:
    """Whether what a manifest knows of an output is true of the file at this place, as far as some records show."""
    row = replace(row, path=path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        is_as_before = changed(file.fileno(), row, manifest) is None
    return is_as_before or (row.is_replaced and _is_as_moved(manifest, row))


def _is_as_moved(manifest: Manifest, row: FileRow) -> bool:
    """Whether an output is the one that was written anew: who has copied it without its part has the one before."""
    if not row.path.exists():
        return False
    with row.path.open("rb") as file:
        return all(is_whole(file.fileno(), *place) for place in manifest.rows(_MOVED, row.file))


def in_order(manifest: Manifest, output: Output, order: Order) -> Generator[tuple[int, int, int]]:
    """Yield record, start and size of every record of an output; SQLite sorts them, on the disk where they are many."""
    yield from manifest.rows(
        f"SELECT record, start, size FROM records WHERE file = ? ORDER BY {order}, record",
        output.row.file,
    )


def copied(output: Output, records: Iterator[tuple[int, int, int]]) -> Iterator[bytes]:
    """Yield the bytes of these records, those that stand side by side in one go."""
    begin = end = 0
    for _, start, size in records:
        if start != end or end - begin > _BUFFER:
            yield from output.pieces(begin, end - begin)
            begin = start
        end = start + size
    yield from output.pieces(begin, end - begin)


def write_all(fd: int, pieces: Iterator[bytes]) -> None:
    """Write an empty file, on the disk when this returns."""
    n_bytes = 0
    for block in _blocks(pieces):
        disk.write_at(fd, block, n_bytes)
        n_bytes += len(block)
    disk.sync(fd)


def _write_part(manifest: Manifest, output: Output, order: Order) -> None:
    """Write the part, and a table of where each record starts in it."""
    with manifest.transaction():
        manifest.execute("DROP TABLE IF EXISTS moved")
        manifest.execute("CREATE TABLE moved (record INTEGER PRIMARY KEY, start INTEGER NOT NULL)")
        places = _places(manifest, output, order)
        manifest.execute_many("INSERT INTO moved VALUES (?, ?)", places)
    fd = disk.create(output.part)
    try:
        disk.take_access(fd, output.path)
        write_all(fd, _with_header(output, in_order(manifest, output, order)))
    finally:
        os.close(fd)


def _places(manifest: Manifest, output: Output, order: Order) -> Iterator[tuple[int, int]]:
    start = len(output.row.header)
    for record, _, size in in_order(manifest, output, order):
        yield record, start
        start += size


def _with_header(output: Output, records: Iterator[tuple[int, int, int]]) -> Iterator[bytes]:
    yield output.row.header
    yield from copied(output, records)


def _blocks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in fewer pieces."""
    block, n_bytes = list[bytes](), 0
    for piece in pieces:
        block.append(piece)
        n_bytes += len(piece)
        if n_bytes >= _BUFFER:
            yield b"".join(block)
            block, n_bytes = [], 0
    yield b"".join(block)
