"""Opens the outputs of a run in any state: new, left by a kill, edited, of another run, or not of cbatch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.input.json_requests import shown
from cbatch.files.output import durable as disk
from cbatch.files.output.durable import told
from cbatch.files.output.identity import ORIGIN_NAMES as ORIGIN_NAMES
from cbatch.files.output.manifest import (
    FileRow,
    LostError,
    Manifest,
    ManifestError,
    manifest_of,
    remove_manifest,
)
from cbatch.files.output.record_file import RecordFile, check_file
from cbatch.files.output.rewriting import finish, fits, rewrite
from cbatch.files.output.run_paths import bring_manifest, point_to
from cbatch.files.places import real

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from cbatch.files.output.identity import Origin

OUTPUT_FORMAT = "output format"
"""The setting that must be the same even by force: a file has one format."""

_NOTHING = "nothing"


class ChangedError(LostError):
    """An output was changed since it was written."""

    def __init__(self, path: Path, problem: str) -> None:
        """Keep the change, for people."""
        self.what = f"{path}: was changed since cbatch wrote it: {problem}"
        super().__init__(
            f"{self.what}. Put it back as it was, have its JSON lines adopted as they are (--adopt), give another "
            "output, or start again (--force); for the order of the input there is `cbatch sort`"
        )


@dataclass(slots=True)
class Opened:
    """A manifest and its outputs: the output, then the file of errors where there is one."""

    manifest: Manifest
    outputs: list[RecordFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of `Journal.open`."""

    output: Path
    errors: Path | None
    settings: Mapping[str, str]
    origin: Origin | None
    header: bytes
    force: bool

    def noted(self) -> dict[str, str]:
        """Return the settings for the manifest."""
        return {**self.settings, **(self.origin.noted() if self.origin else {})}

    def rows(self) -> list[FileRow]:
        """Return the files of the run, not begun."""
        paths = [self.output] if self.errors is None else [self.output, self.errors]
        return [FileRow(file, path, self.header) for file, path in enumerate(paths)]


def open_outputs(wanted: Wanted) -> Opened:
    """Return the outputs of a run, ready for more records; see `Journal.open`."""
    name, errors = wanted.output, wanted.errors
    for path in filter(None, (name, errors)):
        check_file(path)
    wanted = replace(wanted, output=real(name), errors=errors and real(errors))
    _check_errors(wanted)
    manifest = bring_manifest(name)
    try:
        found = _opened(wanted, manifest)
    except ManifestError as error:
        if not wanted.force:
            raise
        remove_manifest(manifest)
        found = _opened(wanted, manifest, f"{error.what}: starting again")
    point_to(name, manifest_of(name), manifest)
    return found


def _opened(wanted: Wanted, manifest: Path, *notes: str) -> Opened:
    found = Opened(Manifest(manifest, wanted.output), notes=list(notes))
    with _closing_on_error(found) as stack:
        _find_moved_errors(found.manifest, wanted)
        _resume(found, wanted) if _is_ours(found, wanted) else _begin(found, wanted)
        found.manifest.fold()
        stack.pop_all()
    return found


def reopened(output: Path) -> Opened:
    """Return the outputs of a run that has ended, with any settings.

    Raises:
        ConfigError: there is no manifest, another run has it open, or a file is gone or was changed.
        OutputError: the disk is full.
    """
    check_file(output)
    path, output = bring_manifest(output), real(output)
    if not (path.is_file() and output.is_file()):
        raise _no_manifest(output)
    found = Opened(Manifest(path, output))
    with _closing_on_error(found) as stack:
        files = found.manifest.files()
        if 0 not in files or files[0].size is None:
            raise _no_manifest(output)
        for row in files.values():
            if row.size is not None:
                place = row.path if row.file else output
                _check_there(place, found.manifest, row, output)
                found.outputs.append(RecordFile(finish(found.manifest, replace(row, path=place))))
        _check_and_repair(found)
        found.manifest.fold()
        stack.pop_all()
    return found


def _check_there(path: Path, manifest: Manifest, row: FileRow, output: Path) -> None:
    """Refuse an output whose file is gone: its records would be forgotten."""
    if not path.exists() and manifest.count(row.file).n_records:
        raise ConfigError(
            f"{path}: is not there, and has records of {output}: put it back, or give the command of its run again"
        )


def _no_manifest(output: Path) -> ConfigError:
    return ConfigError(f"{output}: there is no manifest beside it that lists its records")


def _closing_on_error(found: Opened) -> ExitStack:
    """Return a stack that closes all files, and removes a manifest that is new."""

    def undo() -> None:
        for output in found.outputs:
            output.close()
        if found.manifest.is_new:
            remove_manifest(found.manifest.path)
        found.manifest.close()

    stack = ExitStack()
    stack.callback(undo)
    return stack


def _check_errors(wanted: Wanted) -> None:
    """Refuse one file for answers and errors."""
    if wanted.errors is None:
        return
    if wanted.errors in (wanted.output, manifest_of(wanted.output)) or (
        wanted.errors.exists() and wanted.output.exists() and wanted.errors.samefile(wanted.output)
    ):
        raise ConfigError(
            f"{wanted.errors}: is the output or its manifest: give another file for errors, or none to have them in "
            "the output"
        )


def _find_moved_errors(manifest: Manifest, wanted: Wanted) -> None:
    """Note a new place of the file of errors, if the file there has its records."""
    row = manifest.files().get(1)
    if row is None or wanted.errors in (None, row.path) or not manifest.count(1).n_records:
        return
    assert wanted.errors is not None  # checked above
    if fits(manifest, row, wanted.errors):
        with manifest.transaction():
            manifest.put_file(replace(row, path=wanted.errors))


# ---- whether the run continues ----


def _is_ours(found: Opened, wanted: Wanted) -> bool:
    """Whether there are records to continue with; refuse other settings and other inputs."""
    row = found.manifest.files().get(0)
    if row is None or row.size is None:
        return False
    n_records = _n_records(found.manifest)
    if not n_records:
        return False
    if not wanted.output.exists():
        found.notes.append(
            f"{wanted.output} is gone: starting again, also with the {n_records:,} items that were done"
        )
        return False
    return _fits(found.manifest, wanted)


def _n_records(manifest: Manifest) -> int:
    return sum(manifest.count(file).n_records for file in (0, 1))


def _fits(manifest: Manifest, wanted: Wanted) -> bool:
    """Whether the records can be kept; refuse other settings and other inputs, unless forced."""
    differences = dict(_differences(manifest, wanted))
    if differences and not wanted.force:
        said = "; ".join(differences.values())
        raise ConfigError(
            f"{wanted.output}: was written with other settings: {said}. Give those, or another output, or force it "
            "(--force): items that the difference concerns run again"
        )
    if not wanted.force and wanted.origin and (other := wanted.origin.difference(manifest)):
        raise ConfigError(
            f"{wanted.output}: has the answers of another input: {other}. Give that input, or another output, or force "
            "it (--force): new answers then replace those that are there"
        )
    return OUTPUT_FORMAT not in differences


def _differences(manifest: Manifest, wanted: Wanted) -> Iterator[tuple[str, str]]:
    """Yield the name and a description of each difference."""
    before = {n: value for n, value in manifest.settings().items() if n not in ORIGIN_NAMES}
    for name in sorted({*before, *wanted.settings}):
        was, is_now = before.get(name, _NOTHING), wanted.settings.get(name, _NOTHING)
        if was != is_now:
            yield name, f"{name} was {was}, is {is_now}"
    files = manifest.files()
    if files[0].header != wanted.header:
        was, is_now = _shown(files[0].header), _shown(wanted.header)
        yield OUTPUT_FORMAT, f"the first line was {was}, is {is_now}"
    if 1 in files and files[1].path != wanted.errors and manifest.count(1).n_records:
        yield "errors", f"errors went to {files[1].path}, go to {wanted.errors or 'the output'}"


def _shown(header: bytes) -> str:
    return repr(shown(header.decode(errors="replace")))


# ---- beginning ----


def _begin(found: Opened, wanted: Wanted) -> None:
    """Make empty files; replace files of an earlier run, and by force others."""
    manifest = found.manifest
    known = {row.path for row in manifest.files().values() if _is_as_left(row)}
    rows = wanted.rows()
    with manifest.transaction():
        for file in manifest.files():
            manifest.forget(file)
        manifest.set_settings(wanted.noted())
        for row in rows:
            if row.path in known:
                # until the file is cut off, the manifest tells that its content is ours
                manifest.put_file(replace(row, size=0))
            else:
                _check_unused(row, force=wanted.force)
                manifest.put_file(row)
    mode = disk.mode_of(wanted.output)
    for row in rows:
        found.outputs.append(RecordFile(row, mode))
    _make_empty(manifest, found.outputs)


def _is_as_left(row: FileRow) -> bool:
    """Whether a file is as the last run left it: begun, and without bytes of another program."""
    if row.size is None:
        return False
    return row.is_open or not row.path.exists() or row.path.stat().st_size <= row.size


def _make_empty(manifest: Manifest, outputs: list[RecordFile]) -> None:
    for output in outputs:
        output.begin()
        with told(output.path):
            disk.sync_folder(output.path.parent)
    with manifest.transaction(is_durable=True):
        for output in outputs:
            manifest.put_file(output.row)


def _check_unused(row: FileRow, *, force: bool) -> None:
    """Refuse a file with content of another program; a killed run leaves a part of the header, or zeros."""
    try:
        with row.path.open("rb") as file:
            found = file.read(len(row.header) + 1)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{row.path}: cannot be read: {error.strerror}") from error
    if not row.header.startswith(found.rstrip(b"\0")) and not force:
        raise LostError(
            f"{row.path}: exists, and no manifest of cbatch lists its records: give another file, have the manifest "
            "made again of JSON lines (--adopt), or replace it (--force)"
        )


# ---- continuing ----


def _resume(found: Opened, wanted: Wanted) -> None:
    """Continue the files, or by force begin anew where they were changed."""
    try:
        _open_known(found, wanted)
        _check_and_repair(found)
    except ChangedError as error:
        if not wanted.force:
            raise
        found.notes.append(f"{error.what}: starting again")
        for output in found.outputs:
            output.close()
        found.outputs.clear()
        _begin(found, wanted)


def _open_known(found: Opened, wanted: Wanted) -> None:
    manifest, files = found.manifest, found.manifest.files()
    if 1 in files and files[1].path != wanted.errors:
        _leave(found, files.pop(1))
    mode = disk.mode_of(wanted.output)
    for row in wanted.rows():
        if row.file in files:
            row = finish(manifest, replace(files[row.file], path=row.path))
        else:
            _check_unused(row, force=wanted.force)
        found.outputs.append(RecordFile(row, mode))
    if new := [output for output in found.outputs if output.row.size is None]:
        _make_empty(manifest, new)
    with manifest.transaction():
        manifest.set_settings(wanted.noted())


def _leave(found: Opened, row: FileRow) -> None:
    """Forget the file of errors."""
    n_records = found.manifest.count(1).n_records
    if n_records:
        found.notes.append(f"{row.path} is left as it is; its {n_records:,} items run again")
    with found.manifest.transaction():
        found.manifest.forget(1)


def _check_and_repair(found: Opened) -> None:
    """Forget records that are not whole, cut off bytes that are not committed, remove superseded records.

    Raises:
        ChangedError: another program has changed a file; the manifest is unchanged.
    """
    manifest = found.manifest
    with manifest.transaction(is_durable=True):
        for output in found.outputs:
            n_torn = _checked(output, manifest)
            if n_torn:
                found.notes.append(
                    f"{output.path} is shorter than it was: {n_torn:,} of its items run again"
                )
            manifest.put_file(output.row)
    for output in found.outputs:
        output.cut()
        count = manifest.count(output.row.file)
        if len(output.row.header) + count.n_bytes != output.size:
            rewrite(manifest, output)


def _checked(output: RecordFile, manifest: Manifest) -> int:
    """Return the number of records of a file that were not whole; unsynced records are read again."""
    problem = output.grown()
    n_torn = 0 if problem else output.drop_torn(manifest)
    if problem := problem or output.changed(manifest):
        raise ChangedError(output.path, problem)
    return n_torn


def put_away(found: Opened) -> None:
    """Note that no bytes follow the committed ones, and sync that."""
    with found.manifest.transaction(is_durable=True):
        for output in found.outputs:
            found.manifest.put_file(replace(output.row, is_open=False))


def closing_all(found: Opened) -> ExitStack:
    """Return a stack that closes the manifest and the outputs."""
    stack = ExitStack()
    stack.callback(found.manifest.close)
    for output in found.outputs:
        stack.callback(output.close)
    return stack
