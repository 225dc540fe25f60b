"""Makes a lost manifest again of the records in the output.

A record of JSON lines has its item's id and digest: a later claim finds out whether the item is still the same. That a
whole line is as it was written is trusted.
"""

from __future__ import annotations

import os
import zlib
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, BinaryIO

from cbatch.errors import ConfigError
from cbatch.files.input.item import InputLineError
from cbatch.files.input.json_requests import load
from cbatch.files.output import durable as disk
from cbatch.files.output.durable import told
from cbatch.files.output.manifest import (
    GONE,
    INSERT,
    FileRow,
    Manifest,
    manifest_of,
    record_key,
    remove_manifest,
)
from cbatch.files.output.record_file import open_locked, part_of
from cbatch.files.places import real

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from cbatch.files.output.encoders import Known, TraceableEncoder


def adopt(files: Sequence[Path], settings: Mapping[str, str], encoder: TraceableEncoder) -> str:
    """Make the manifest of files again, of their whole lines; return a message.

    Args:
        files: the output and, if there is one, the file of errors. Their lines stay unchanged. They are locked
            meanwhile. A missing output is created.
        settings: of the run that will continue.

    Raises:
        ConfigError: a line is no record of cbatch, there is no record at all, or another run has a file open.
        OutputError: the disk is full.
    """
    rows = [FileRow(file, real(path), b"") for file, path in enumerate(files)]
    with ExitStack() as stack:
        for row in rows:
            if row is rows[0] or row.path.exists():
                stack.callback(os.close, open_locked(row.path))
        return _adopt(rows, settings, encoder)


def _adopt(rows: Sequence[FileRow], settings: Mapping[str, str], encoder: TraceableEncoder) -> str:
    output = rows[0].path
    home = manifest_of(output)
    part = part_of(home)
    remove_manifest(part)
    try:
        with closing(Manifest(part, output)) as manifest:
            with manifest.transaction():
                manifest.set_settings(settings)
            # the output last: its answers are newer than errors of the same items
            n_left = sum(_adopt_file(manifest, row, encoder) for row in reversed(rows))
            n_records = sum(manifest.count(row.file).n_records for row in rows)
        remove_manifest(home)  # its log must not be read as that of the new manifest
        with told(home):
            disk.replace(part, home)
    finally:
        remove_manifest(part)
    left = f"; {n_left:,} lines are removed, which are incomplete or never ran" if n_left else ""
    return f"{output}: {n_records:,} records are adopted{left}"


def _adopt_file(manifest: Manifest, row: FileRow, encoder: TraceableEncoder) -> int:
    """Insert the records of a file; return the number of lines that are not kept."""
    if not row.path.is_file():
        return 0
    n_left, record = 0, manifest.last_record()
    with row.path.open("rb") as file, manifest.transaction():
        for start, line, known in _records(file, row.path, encoder):
            if known is None:
                n_left += 1
                continue
            record += 1
            # the number is after all others until an item claims the record
            place = (GONE | record, row.file, start, len(line), zlib.crc32(line))
            key = record_key(known.key)
            manifest.execute(INSERT, record, key, known.digest, *place, known.is_error)
    manifest.save(row)
    return n_left


def _records(
    file: BinaryIO, path: Path, encoder: TraceableEncoder
) -> Iterator[tuple[int, bytes, Known | None]]:
    """Yield the start of each line, the line, and its item; None for a torn line or an item that never ran.

    Raises:
        ConfigError: a line of another program.
    """
    start = n_whole = n_lines = 0
    for n_lines, line in enumerate(file, 1):
        record = _whole(line)
        n_whole += record is not None
        place = f"{path}, line {n_lines}"
        yield start, line, None if record is None else _known(record, place, encoder)
        start += len(line)
    if n_lines and not n_whole:
        raise ConfigError(f"{path}: no line of it is a whole record, so nothing is adopted")


def _whole(line: bytes) -> Mapping[str, object] | None:
    """Return the object of a line; None for one that is torn."""
    try:
        return load(line if line.endswith(b"\n") else b"")
    except InputLineError:
        return None
    except RecursionError:  # which no record is, but a line of another program may be
        return {}


def _known(record: Mapping[str, object], place: str, encoder: TraceableEncoder) -> Known | None:
    try:
        return encoder.known(record)
    except InputLineError as error:
        raise ConfigError(f"{place}: {error.error.message}, so nothing is adopted") from None
