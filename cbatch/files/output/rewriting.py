"""Rewrites an output without superseded records, or in another order.

A kill may come at any moment, and only the output and its manifest may be copied afterwards. The new version is whole
on disk, as a part beside the output, before the manifest notes that it replaces the output; until that is done, the
manifest has the old and the new start of each record. The next opening of the manifest finishes the replacement, or
keeps the old output if the part is gone.
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
    from cbatch.files.output.record_file import RecordFile

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


def rewrite(manifest: Manifest, output: RecordFile, order: Order = "start") -> None:
    """Rewrite an output, its records in their order or in that of their items."""
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
    """Finish a `rewrite` whose part is whole; else remove the part."""
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
    """Whether a file is the output of a manifest, as far as a sample of records shows."""
    row = replace(row, path=path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        is_as_before = changed(file.fileno(), row, manifest) is None
    return is_as_before or (row.is_replaced and _is_as_moved(manifest, row))


def _is_as_moved(manifest: Manifest, row: FileRow) -> bool:
    """Whether an output is the new version: a copy without the part is the old version."""
    if not row.path.exists():
        return False
    with row.path.open("rb") as file:
        return all(is_whole(file.fileno(), *place) for place in manifest.rows(_MOVED, row.file))


def in_order(
    manifest: Manifest, output: RecordFile, order: Order
) -> Generator[tuple[int, int, int]]:
    """Yield record, start and size of every record of an output; SQLite sorts them, on disk where they are many."""
    yield from manifest.rows(
        f"SELECT record, start, size FROM records WHERE file = ? ORDER BY {order}, record",
        output.row.file,
    )


def copied(output: RecordFile, records: Iterator[tuple[int, int, int]]) -> Iterator[bytes]:
    """Yield the bytes of records, adjacent records in one piece."""
    begin = end = 0
    for _, start, size in records:
        if start != end or end - begin > _BUFFER:
            yield from output.pieces(begin, end - begin)
            begin = start
        end = start + size
    yield from output.pieces(begin, end - begin)


def write_all(fd: int, pieces: Iterator[bytes]) -> None:
    """Write pieces to an empty file, and sync it."""
    n_bytes = 0
    for block in _blocks(pieces):
        disk.write_at(fd, block, n_bytes)
        n_bytes += len(block)
    disk.sync(fd)


def _write_part(manifest: Manifest, output: RecordFile, order: Order) -> None:
    """Write the part, and a table of the start of each record in it."""
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


def _places(manifest: Manifest, output: RecordFile, order: Order) -> Iterator[tuple[int, int]]:
    start = len(output.row.header)
    for record, _, size in in_order(manifest, output, order):
        yield record, start
        start += size


def _with_header(output: RecordFile, records: Iterator[tuple[int, int, int]]) -> Iterator[bytes]:
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
