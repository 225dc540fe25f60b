"""An output written anew: without the bytes of records that were superseded, or in another order.

It may be killed anywhere. The part beside the output is whole on the disk before the manifest says, in the transaction
that moves the records, that it takes the output's place; who opens the manifest then finishes that.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from cbatch.files import disk
from cbatch.files.disk import told
from cbatch.files.output import part_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from cbatch.files.manifest import FileRow, Manifest
    from cbatch.files.output import Output

_BUFFER = 2**20

Order = Literal["start", "number"]


def rewrite(manifest: Manifest, output: Output, order: Order = "start") -> None:
    """Write an output anew, record by record, in the order of their places in it or of their items."""
    with told(output.part):
        try:
            n_bytes = _write_part(manifest, output, order)
        except OSError:
            output.part.unlink(missing_ok=True)
            raise
    row = replace(output.row, size=n_bytes, synced=n_bytes, is_replaced=True)
    with manifest.transaction(is_durable=True):
        manifest.execute(
            "UPDATE records SET start = (SELECT start FROM temp.moved WHERE moved.record = records.record) "
            "WHERE file = ?",
            row.file,
        )
        manifest.execute("DROP TABLE temp.moved")
        manifest.put_file(row)
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
    row = replace(row, is_replaced=False)
    with manifest.transaction():
        manifest.put_file(row)
    return row


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


def write_all(fd: int, pieces: Iterator[bytes]) -> int:
    """Write an empty file, on the disk when this returns; return its bytes."""
    n_bytes = 0
    for block in _blocks(pieces):
        disk.write_at(fd, block, n_bytes)
        n_bytes += len(block)
    disk.sync(fd)
    return n_bytes


def _write_part(manifest: Manifest, output: Output, order: Order) -> int:
    """Write the part, and a table of where each record starts in it."""
    with manifest.transaction():
        manifest.execute("DROP TABLE IF EXISTS temp.moved")
        manifest.execute(
            "CREATE TEMP TABLE moved (record INTEGER PRIMARY KEY, start INTEGER NOT NULL)"
        )
        places = _places(manifest, output, order)
        manifest.execute_many("INSERT INTO temp.moved VALUES (?, ?)", places)
    fd = disk.create(output.part)
    try:
        disk.take_access(fd, output.path)
        return write_all(fd, _with_header(output, in_order(manifest, output, order)))
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
