"""Sorts records into the order of the input: by the manifest, or without one by the ids of the input."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cbatch.errors import ConfigError
from cbatch.files.file_formats import check_name, is_columnar
from cbatch.files.input.item import bytes_of, scratch, scratch_told
from cbatch.files.input.source import names_of, open_source
from cbatch.files.output.durable import mode_of, told, whole
from cbatch.files.output.opening import OUTPUT_FORMAT, reopened
from cbatch.files.output.record_file import RecordFile, check_file, write_all
from cbatch.files.output.run_paths import manifest_at, records_at
from cbatch.files.places import check_apart, check_new, file_of, real
from cbatch.support.checks import check_flag

_NOTHING_TO_SORT = (
    "a run writes Parquet and Arrow in the order of the requests, so there is nothing to sort"
)


@dataclass(frozen=True, slots=True)
class Sorted:
    """The sorted records, in numbers.

    Args:
        n_records: of the output.
        n_gone: of these, records of items that are not in the input any more; they come last.
        notes: what was put right in the output, such as bytes that belong to no record.
    """

    n_records: int
    n_gone: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Records:
    """The records of an output in the order of the input.

    Args:
        counts: of the records.
        pieces: their bytes, the header first.
    """

    counts: Sorted
    pieces: Iterator[bytes]
    format: str = "jsonl"


def sort_in_place(output: Path) -> dict[Path, Sorted]:
    """Sort an output and its file of errors into the order of the input; return the counts of each.

    A kill may come at any moment, and a run may continue the files afterwards. Parquet and Arrow are in order already.

    Raises:
        ConfigError: there is no manifest, a run has it open, or a file was changed.
        OutputError: the disk is full.
    """
    output = file_of("output", output)
    if is_columnar(output):
        return {output: _in_columns(output)}
    with reopened(output) as outputs:
        for file in outputs.files:
            if not file.is_sorted():
                file.rewrite("number")
        counts = {file.path: _counts(file) for file in outputs.files}
        first = outputs.files[0].path
        return {**counts, first: replace(counts[first], notes=(*outputs.notes,))}


def _counts(file: RecordFile) -> Sorted:
    count = file.count()
    return Sorted(count.n_records, count.n_gone)


def _in_columns(output: Path) -> Sorted:
    """Return the counts of a Parquet or Arrow file, which its run has written in order."""
    if not output.is_file():
        raise ConfigError(
            f"{output}: does not exist: a run writes it at its end, in the order of the requests"
        )
    if not manifest_at(records_at(output)).is_file():
        raise ConfigError(f"{output}: {_NOTHING_TO_SORT}")
    with reopened(records_at(output)) as outputs:
        return _counts(outputs.files[0])


def sort_to(output: Path, target: Path, *, by: Sequence[Path] = (), force: bool = False) -> Sorted:
    """Write the records of an output in the order of the input to another file; return the counts.

    Args:
        target: appears whole or not at all, with the mode of the output.
        by: the input, for an output without its manifest.
        force: replace a file.

    Raises:
        ConfigError: see `sorted_records`, or the target is the input, exists or cannot be written.
        OutputError: the disk is full.
    """
    output, target = file_of("output", output), file_of("target", target)
    check_flag("force", force)
    check_file(target)
    target = real(target)
    if target in (real(output), manifest_at(output)):
        raise ConfigError(
            f"{target}: is the output itself: to sort it in place, give no other file"
        )
    check_apart(target, names_of("by", by))
    check_new(target, force=force)
    with sorted_records(output, by=by) as records:
        check_name(target, records.format, is_asked=target.suffix == output.suffix)
        with told(target), whole(target, mode=mode_of(output)) as part, part.open("r+b") as file:
            write_all(file.fileno(), records.pieces)
    return records.counts


@contextmanager
def sorted_records(output: Path, *, by: Sequence[Path] = ()) -> Iterator[Records]:
    """Lend the records of an output in the order of the input, in constant memory.

    Raises:
        ConfigError: there is neither manifest nor `by`, or both; a run has the output open; a file was changed; a line
            of an output without a manifest has no id.
    """
    output, by = file_of("output", output), [Path(name) for name in names_of("by", by)]
    if is_columnar(output):
        raise ConfigError(f"{output}: {_NOTHING_TO_SORT}; to have a second file, copy it")
    has_manifest = manifest_at(output).exists()
    if has_manifest == bool(by):
        raise ConfigError(
            f"{output}: has a manifest, which knows the order: leave out the input (--by)"
            if has_manifest
            else f"{output}: there is no manifest beside it that knows the order: give the input (--by INPUT)"
        )
    if by:
        with _by_ids(output, by) as records:
            yield records
        return
    with reopened(output) as outputs:
        file, format = outputs.files[0], outputs.manifest.settings().get(OUTPUT_FORMAT, "")
        with closing(file.pieces("number")) as pieces:
            yield Records(_counts(file), pieces, format)


# ---- without a manifest ----


_LINES = (
    "CREATE TABLE lines (line INTEGER PRIMARY KEY, id BLOB, start INTEGER, size INTEGER, number INTEGER)",
    "CREATE INDEX lines_by_id ON lines (id)",
)
_ADD = "INSERT INTO lines (id, start, size) VALUES (?, ?, ?)"
_NUMBER = "UPDATE lines SET number = ? WHERE id = ? AND number IS NULL"
_COUNT = "SELECT count(*), coalesce(sum(number IS NULL), 0) FROM lines"
_IN_ORDER = "SELECT start, size FROM lines ORDER BY number IS NULL, number, line"
"""The lines of unknown ids come last."""


@contextmanager
def _by_ids(output: Path, by: Sequence[Path]) -> Iterator[Records]:
    with ExitStack() as stack:
        lines = stack.enter_context(closing(scratch(*_LINES)))
        stack.enter_context(scratch_told())
        try:
            file = stack.enter_context(output.open("rb"))
        except OSError as error:
            raise ConfigError(f"{output}: cannot be read: {error.strerror}") from error
        start = 0
        for i_line, line in enumerate(file, 1):
            if line.strip():
                id = _id_of(line, f"{output}, line {i_line}")
                lines.execute(_ADD, (bytes_of(id), start, len(line)))
            start += len(line)
        for item in stack.enter_context(open_source([str(path) for path in by])):
            lines.execute(_NUMBER, (item.number, bytes_of(item.id)))
        counts = Sorted(*lines.execute(_COUNT).fetchone())
        yield Records(counts, _lines(file.fileno(), lines.execute(_IN_ORDER)))


def _id_of(line: bytes, place: str) -> str:
    """Return the id of a record in a format of lines with ids."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{place}: is not JSON, and only JSON lines can be sorted by their ids: {error}"
        ) from error
    for key in ("custom_id", "id"):
        if isinstance(record, dict) and isinstance(record.get(key), str):
            return str(record[key])
    raise ConfigError(f"{place}: has neither custom_id nor id: it is not a record of cbatch")


def _lines(fd: int, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    for start, size in places:
        line = os.pread(fd, size, start)
        yield line if line.endswith(b"\n") else line + b"\n"
