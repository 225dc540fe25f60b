"""A manifest made again of the records themselves, where it is lost or does not fit what is there.

A record of JSON lines tells which item it answers and, by a digest, what was asked: whoever claims it then finds out
whether that is asked still. That its text is what was answered is taken as it stands.
"""

from __future__ import annotations

import zlib
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from cbatch.errors import ConfigError
from cbatch.files.input.item import LineError, key_of_id
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
from cbatch.files.output.record_file import Output, part_of
from cbatch.files.places import real

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from cbatch.files.output.encoders import Known, TraceableEncoder

_N_SLICE = 4096
"""Records that are put into the manifest together: our choice."""


@dataclass(frozen=True, slots=True)
class Adopter:
    """How records are known again.

    Args:
        encoder: has written them.
        has_rows: whether an item's id is the number of its row.
    """

    encoder: TraceableEncoder
    has_rows: bool


def adopt(files: Sequence[Path], settings: Mapping[str, str], adopter: Adopter) -> str:
    """Make the manifest of these files again, of the lines in them that are whole; return what it came to, in words.

    Args:
        files: the output and, where there is one, the file of errors. They stay as they are.
        settings: of the run that is to go on.
        adopter: knows records again.

    Raises:
        ConfigError: a line is no record of cbatch, there is no record at all, or another run writes there.
        OutputError: the disk is full.
    """
    rows = [FileRow(file, real(path), b"") for file, path in enumerate(files)]
    output = rows[0].path
    home = manifest_of(output)
    part = part_of(home)
    remove_manifest(part)
    try:
        with closing(Manifest(part, output)) as manifest:
            with manifest.transaction():
                manifest.set_settings(settings)
            # an answer in the output is newer than an error of the same item in a file of errors
            n_left = sum(_adopt_file(manifest, row, adopter) for row in reversed(rows))
            n_records = sum(manifest.count(row.file).n_records for row in rows)
        remove_manifest(home)  # its log must not be taken for that of the new one
        with told(home):
            disk.replace(part, home)
    finally:
        remove_manifest(part)
    left = f"; {n_left:,} lines that are torn or were never asked go" if n_left else ""
    return f"{output}: {n_records:,} records are adopted{left}"


def _adopt_file(manifest: Manifest, row: FileRow, adopter: Adopter) -> int:
    """Take in the records of a file; return how many lines are none to keep."""
    if not row.path.is_file():
        return 0
    n_left = end = 0
    found = list[tuple[object, ...]]()
    with (
        closing(Output(row)),
        row.path.open("rb") as file,
    ):  # the first keeps other runs from writing there
        for start, line, known in _records(file, row.path, adopter):
            if known is None:
                n_left += 1
                continue
            end = start + len(line)
            record = manifest.last_record() + len(found) + 1
            key = record_key(key_of_id(known.id, has_rows=adopter.has_rows))
            # the number is behind all others until somebody claims the record
            place = (GONE | record, row.file, start, len(line), zlib.crc32(line))
            found.append((record, key, known.digest, *place, known.is_error))
            if len(found) >= _N_SLICE:
                _put(manifest, found)
        _put(manifest, found)
    with manifest.transaction(is_durable=True):
        manifest.put_file(replace(row, size=end))
    return n_left


def _put(manifest: Manifest, found: list[tuple[object, ...]]) -> None:
    with manifest.transaction():
        manifest.execute_many(INSERT, found)
    found.clear()


def _records(
    file: BinaryIO, path: Path, adopter: Adopter
) -> Iterator[tuple[int, bytes, Known | None]]:
    """Yield the start of each line, the line, and what it tells of itself, if it was asked and is whole.

    Raises:
        ConfigError: it is somebody else's.
    """
    start = n_ours = n_lines = 0
    for n_lines, line in enumerate(file, 1):
        known = None
        with suppress(LineError):
            record = load(line if line.endswith(b"\n") else b"")
            n_ours += 1
            known = _known(record, f"{path}, line {n_lines}", adopter)
        yield start, line, known
        start += len(line)
    if n_lines and not n_ours:
        raise ConfigError(f"{path}: no line of it is a whole record, so nothing is adopted")


def _known(record: Mapping[str, object], place: str, adopter: Adopter) -> Known | None:
    try:
        return adopter.encoder.known(record)
    except LineError as error:
        said = error.error.message
        raise ConfigError(f"{place}: {said}, so nothing is adopted") from None
