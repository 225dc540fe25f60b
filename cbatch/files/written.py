"""Where the files of a run are: those that it writes are none that it reads, and each is one of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.manifest import files_of_manifest, manifest_of
from cbatch.files.opening import real
from cbatch.files.output import part_of
from cbatch.files.places import check_place, is_dash

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cbatch.files.settings import FileOptions


def records_of(output: Path) -> Path:
    """Return where the records are of an output that is made of them at the end."""
    return output.with_name(f"{output.name}.records")


def files_of(output: Path) -> list[Path]:
    """Return every file that a run may write for an output; that one comes first."""
    records = (output, records_of(output))
    manifests = [file for path in records for file in files_of_manifest(manifest_of(path))]
    return [*records, *manifests, *map(part_of, records)]


def written_by(output: Path, options: FileOptions) -> list[Path]:
    """Return every file that a run may write; the first are those of its output."""
    results = files_of(output) if is_file_place(output) else []
    return [*results, *filter(is_file_place, _more(options))]


def check_places(output: Path, options: FileOptions, inputs: Sequence[str]) -> None:
    """Check, long before the first record is there, that a run may write its files.

    Args:
        output: of the run; `-` is stdout.
        options: say which other files it writes.
        inputs: what it reads, the model too.

    Raises:
        ConfigError: see `check_place`; a file that is read, or is written for two purposes.
    """
    more = _more(options)
    if any(map(is_dash, more)):
        raise ConfigError("-: stdout is for answers alone: give a file")
    for path in (output, *more):
        check_place(path)
    written = written_by(output, options)
    _check_not_read(written, [Path(name) for name in inputs if os.path.exists(name)])
    _check_apart(files_of(output) if is_file_place(output) else [], filter(is_file_place, more))


def _more(options: FileOptions) -> list[Path]:
    return [path for path in (options.errors, options.report, options.trace) if path is not None]


def is_file_place(path: Path) -> bool:
    """Whether a file is here or can be; else it is stdout, a device or a named pipe."""
    return not is_dash(path) and (path.is_file() or path.is_dir() or not path.exists())


def _check_not_read(written: Sequence[Path], read: Sequence[Path]) -> None:
    for path in written:
        if path.exists() and any(path.samefile(other) for other in read):
            raise ConfigError(f"{path}: is the input: give another file for the results")


def _check_apart(results: Sequence[Path], more: Iterable[Path]) -> None:
    taken = {real(path): results[0] for path in results}
    for path in more:
        if real(path) in taken:
            raise ConfigError(f"{path}: is written for {taken[real(path)]}: give another file")
        taken[real(path)] = path
