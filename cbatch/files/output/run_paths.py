"""The places of a run's files: its manifest, by every name of the output, and checks that no file is used twice.

A manifest is beside the file itself. Beside a link that a run was given there is a link to the manifest: where the file
was moved or renamed, and its link with it, the manifest is found there, and the next run brings it along.
"""

from __future__ import annotations

import os
import stat
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.output.durable import told
from cbatch.files.output.manifest import (
    LostError,
    Manifest,
    files_of_manifest,
    manifest_of,
    remove_manifest,
)
from cbatch.files.output.record_file import check_unlocked, fits, part_of
from cbatch.files.places import check_place, is_dash, is_stdout_at, real, status_of
from cbatch.files.report.page import is_report
from cbatch.files.report.trace import is_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from cbatch.files.settings import FileOptions


def manifest_at(name: Path) -> Path:
    """Return the place of an output's manifest, also where there is no manifest yet."""
    home = manifest_of(real(name))
    for place in (home, manifest_of(name)):
        if place.is_file():
            return real(place)
    return home


def records_of(output: Path) -> Path:
    """Return the usual place of the records of a columnar output."""
    return output.with_name(f"{output.name}.records")


def records_at(name: Path) -> Path:
    """Return the place of the records of a columnar output; they stay there if the output alone is moved."""
    output = real(name)
    home, left = records_of(output), real(records_of(name))
    if home.exists() or not (output.is_file() and left.is_file()):
        return home
    made = left.with_name(left.name.removesuffix(".records"))
    return home if made.exists() and real(made) != output else left


def bring_manifest(name: Path) -> Path:
    """Return the place of an output's manifest beside the file; bring it from elsewhere, if it is there and fits.

    Raises:
        ConfigError: another run is writing to it.
        OutputError: the disk is full.
    """
    output = real(name)
    # before SQLite opens the manifest: its lock is lost if this process reads the file otherwise, as `status_of` does
    check_unlocked(output)
    home, left = manifest_of(output), manifest_at(name)
    if left != home:
        is_ours = False
        with suppress(LostError):
            is_ours = _brought(left, output, home)
        if not is_ours and home.is_symlink():  # it leads to the manifest of another output
            home.unlink()
    return home


def _brought(left: Path, output: Path, home: Path) -> bool:
    """Return whether a manifest fits an output; copy it to `home` then, and keep it for another copy of the output."""
    with closing(Manifest(left, output)) as manifest:
        row = manifest.files().get(0)
        if row is None or not fits(manifest, row, output):
            return False
        with told(home):
            manifest.copy(home)
    if not row.path.exists() or real(row.path) == output:
        remove_manifest(left)
    return True


def point_to(name: Path, companion: Path, place: Path) -> None:
    """Make a link beside an output that is a link, so that the file's companion is found by that name too.

    Args:
        name: of the output, as the user gave it.
        companion: the place of the new link.
        place: of the companion, such as the manifest.
    """
    if not name.is_symlink() or (companion.exists() and not companion.is_symlink()):
        return
    is_absolute = os.path.isabs(os.readlink(name))
    target = place if is_absolute else os.path.relpath(place, real(companion.parent))
    with suppress(OSError):  # the run works without the link
        companion.unlink(missing_ok=True)
        companion.symlink_to(target)


# ---- no file is used twice ----


def files_of(output: Path) -> list[Path]:
    """Return every file that a run may write for an output, the output first."""
    names = dict.fromkeys((output, real(output)))
    records = [file for name in names for file in (name, records_of(name))]
    manifests = [file for path in records for file in files_of_manifest(manifest_of(path))]
    return [*records, *manifests, *map(part_of, records)]


def written_by(output: Path, options: FileOptions) -> list[Path]:
    """Return every file that a run may write, those of the output first."""
    results = files_of(output) if is_file_place(output) else []
    return [*results, *filter(is_file_place, _more(options))]


def check_places(output: Path, options: FileOptions, inputs: Sequence[str]) -> None:
    """Check, long before the first record, that a run may write its files.

    Args:
        output: of the run; `-` is stdout.
        options: with the places of the other files.
        inputs: files that the run reads, the model's files too; `-` is stdin.

    Raises:
        ConfigError: see `check_place`; a file that is an input too, or is written for two purposes.
    """
    more = _more(options)
    if any(map(is_dash, more)):
        raise ConfigError("-: stdout is only for answers: give a file")
    for path in (output, *more):
        check_place(path)
    read = [status for name in inputs if (status := status_of(name)) is not None]
    for path in written_by(output, options):
        if path.exists() and any(os.path.samestat(path.stat(), status) for status in read):
            raise ConfigError(f"{path}: is the input: give another file for the results")
    if is_dash(output) and any(stat.S_ISREG(s.st_mode) and is_stdout_at(s) for s in read):
        raise ConfigError("-: stdout is redirected to the input: give another file for the results")
    _check_apart(files_of(output) if is_file_place(output) else [], filter(is_file_place, more))


def _more(options: FileOptions) -> list[Path]:
    return [path for path in (options.errors, options.report, options.trace) if path is not None]


def is_file_place(path: Path) -> bool:
    """Whether a path is a file or can become one; else it is stdout, a device or a named pipe."""
    return not is_dash(path) and (path.is_file() or path.is_dir() or not path.exists())


def check_replaceable(options: FileOptions) -> None:
    """Check that report and trace replace only earlier reports and traces.

    Raises:
        ConfigError: another file is there, without `force`.
    """
    for path, what, is_ours in (
        (options.report, "report", is_report),
        (options.trace, "trace", is_trace),
    ):
        if path is None or options.force or not path.is_file():
            continue
        with suppress(OSError):
            if is_ours(path):
                continue
        raise ConfigError(
            f"{path}: exists and is not a {what} of cbatch: give another file, or --force to replace it"
        )


def _check_apart(results: Sequence[Path], more: Iterable[Path]) -> None:
    taken = {real(path): results[0] for path in results}
    for path in more:
        for place, use in taken.items():
            if place == real(path) or (place.exists() and path.exists() and place.samefile(path)):
                raise ConfigError(f"{path}: is needed for {use} already: give another file")
        taken[real(path)] = path
