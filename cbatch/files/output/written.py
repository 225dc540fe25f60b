"""Where the files of a run are: those that it writes are none that it reads, and each is one of its own."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.output.home import records_of
from cbatch.files.output.manifest import files_of_manifest, manifest_of
from cbatch.files.output.record_file import part_of
from cbatch.files.places import check_place, is_dash, is_stdout_at, real, status_of
from cbatch.files.report.page import is_report
from cbatch.files.report.trace import is_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from cbatch.files.settings import FileOptions


def files_of(output: Path) -> list[Path]:
    """Return every file that a run may write for an output; that one comes first."""
    names = dict.fromkeys((output, real(output)))
    records = [file for name in names for file in (name, records_of(name))]
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
        inputs: what it reads, the model's files too; `-` is stdin.

    Raises:
        ConfigError: see `check_place`; a file that is read, or is written for two purposes.
    """
    more = _more(options)
    if any(map(is_dash, more)):
        raise ConfigError("-: stdout is for answers alone: give a file")
    for path in (output, *more):
        check_place(path)
    read = [status for name in inputs if (status := status_of(name)) is not None]
    _check_not_read(output, written_by(output, options), read)
    _check_apart(files_of(output) if is_file_place(output) else [], filter(is_file_place, more))


def _more(options: FileOptions) -> list[Path]:
    return [path for path in (options.errors, options.report, options.trace) if path is not None]


def is_file_place(path: Path) -> bool:
    """Whether a file is here or can be; else it is stdout, a device or a named pipe."""
    return not is_dash(path) and (path.is_file() or path.is_dir() or not path.exists())


def _check_not_read(output: Path, written: Sequence[Path], read: Sequence[os.stat_result]) -> None:
    for path in written:
        if path.exists() and any(os.path.samestat(path.stat(), status) for status in read):
            raise ConfigError(f"{path}: is the input: give another file for the results")
    files = [status for status in read if stat.S_ISREG(status.st_mode)]
    if is_dash(output) and any(map(is_stdout_at, files)):
        raise ConfigError("-: stdout goes to the input: give another file for the results")


def check_replaceable(options: FileOptions) -> None:
    """Check that report and trace take the place of earlier ones alone.

    Raises:
        ConfigError: something else is there, and it is not to be replaced by force.
    """
    for path, what, is_ours in (
        (options.report, "report", is_report),
        (options.trace, "trace", is_trace),
    ):
        if options.force or path is None or not path.is_file():
            continue
        try:
            may_go = is_ours(path)
        except OSError:
            may_go = False
        if not may_go:
            raise ConfigError(
                f"{path}: exists and is no {what} of cbatch: give another file, or --force to replace it"
            )


def _check_apart(results: Sequence[Path], more: Iterable[Path]) -> None:
    taken = {real(path): results[0] for path in results}
    for path in more:
        if real(path) in taken:
            raise ConfigError(f"{path}: is written for {taken[real(path)]}: give another file")
        taken[real(path)] = path
