"""Opens the outputs of a run in any state: new, left by a kill, edited, of another run, or not of cbatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from cbatch.errors import ConfigError
from cbatch.files.input.json_requests import shown
from cbatch.files.output import durable as disk
from cbatch.files.output.durable import told
from cbatch.files.output.identity import (
    ERRORS,
    MADE,
    ORIGIN_NAMES,
    InputIdentity,
    mark_of,
)
from cbatch.files.output.manifest import (
    FileRow,
    LostError,
    Manifest,
    manifest_of,
    remove_manifest,
)
from cbatch.files.output.record_file import RecordFile, check_file, finish, fits
from cbatch.files.output.run_paths import bring_manifest, point_to
from cbatch.files.places import real

OUTPUT_FORMAT = "output format"
"""The setting that must be the same even by force: a file has one format."""

_NOTHING = "nothing"

_NO_SETTINGS = (*ORIGIN_NAMES, ERRORS, MADE)
"""Names in a manifest's settings that may differ in the next run."""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The outputs that a run asks for.

    Args:
        output: for records.
        errors: for records of errors; None: the output.
        settings: must be the same as those of the earlier run, for people. With another "output format" no run can
            continue, even by force.
        origin: the input; None: not compared.
        header: the first bytes of both files.
        force: continue although settings differ; begin anew where that is impossible.
        made: the columnar output, which is written from the records; None if there is none.
    """

    output: Path
    settings: Mapping[str, str]
    errors: Path | None = None
    origin: InputIdentity | None = None
    header: bytes = b""
    force: bool = False
    made: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """The places of the files, by their numbers in the manifest."""
        return [self.output] if self.errors is None else [self.output, self.errors]

    def noted(self) -> dict[str, str]:
        """Return the settings for the manifest."""
        return {**self.settings, **(self.origin.noted() if self.origin else {})}


@dataclass(eq=False, slots=True)
class Outputs:
    """The manifest and the outputs of a run, open and locked: the output, then the file of errors, if any."""

    manifest: Manifest
    files: list[RecordFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def open_files(self, rows: Iterable[FileRow], mode: int = disk.ANYBODY) -> None:
        """Open the files of a manifest, and bring both in accord.

        Raises:
            LostError: another program has changed a file; the manifest is unchanged.
        """
        for row in rows:
            finish(self.manifest, row)
            self.files.append(RecordFile(self.manifest, row, mode))
        with self.manifest.transaction(is_durable=True):
            for file in self.files:
                if n_torn := file.check():
                    self.notes.append(
                        f"{file.path} is shorter than it was: {n_torn:,} of its items run again"
                    )
        for file in self.files:
            if (aside := file.repair()) is not None:
                self.notes.append(
                    f"{file.path} had bytes after its last record, from a killed run or another program: they "
                    f"were moved to {aside.name}"
                )
            with told(file.path):
                disk.sync_folder(file.path.parent)

    def put_away(self) -> None:
        """Note that no bytes follow the committed ones, and sync that."""
        for file in self.files:
            file.row.is_open = False
        self.manifest.save(*(file.row for file in self.files))

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()
        self.manifest.close()


def open_outputs(spec: OutputSpec) -> Outputs:
    """Return the outputs of a run, ready for more records.

    Raises:
        ConfigError: another run has them open; other settings or another input; a file was changed, or is not of
            cbatch; it cannot be written.
        OutputError: the disk is full.
    """
    name = spec.output
    for path in spec.paths:
        check_file(path)
    spec = replace(spec, output=real(name), errors=spec.errors and real(spec.errors))
    manifest = bring_manifest(name)
    try:
        outputs = _opened(spec, manifest)
    except LostError as error:
        if not spec.force:
            raise
        remove_manifest(manifest)
        outputs = _opened(spec, manifest, f"{error.what}: starting again")
    point_to(name, manifest_of(name), manifest)
    return outputs


def _opened(spec: OutputSpec, manifest: Path, *notes: str) -> Outputs:
    outputs = Outputs(Manifest(manifest, spec.output), notes=list(notes))
    with _closed_on_error(outputs):
        before = outputs.manifest.settings()
        made = before.get(MADE, "")
        if spec.made is not None:
            if spec.force and spec.made.is_file():
                made = mark_of(spec.made)
            check_made(spec.made, made, "give another output, or replace it (--force)")
        outputs.open_files(_rows(outputs, spec), disk.mode_of(spec.output))
        with outputs.manifest.transaction():
            kept = {ERRORS: before.get(ERRORS, "{}"), MADE: made}
            outputs.manifest.set_settings({**spec.noted(), **kept})
        outputs.manifest.fold()
    return outputs


def check_made(made: Path, marks: str, way_out: str) -> None:
    """Raise ConfigError if a columnar output is there that cbatch did not write so, by its marks (`MADE`)."""
    if made.is_file() and made.stat().st_size and mark_of(made) not in marks.split(", "):
        raise ConfigError(
            f"{made}: another program has put it there, or changed it: move it, {way_out}"
        )


@contextmanager
def reopened(output: Path) -> Iterator[Outputs]:
    """Lend the outputs of a run that has ended, with any settings.

    Raises:
        ConfigError: there is no manifest, another run has it open, or a file is gone or was changed.
        OutputError: the disk is full.
    """
    check_file(output)
    path, output = bring_manifest(output), real(output)
    if not (path.exists() or output.exists()):
        raise ConfigError(f"{output}: cannot be read: No such file or directory")
    no_manifest = ConfigError(f"{output}: there is no manifest beside it that lists its records")
    if not (path.is_file() and output.is_file()):
        raise no_manifest
    outputs = Outputs(Manifest(path, output))
    with _closed_on_error(outputs):
        rows = outputs.manifest.files()
        if 0 not in rows:
            raise no_manifest
        rows[0].path = output
        for row in rows.values():
            if not row.path.exists() and outputs.manifest.count(row.file).n_records:
                raise ConfigError(
                    f"{row.path}: is missing, but holds records of {output}: put it back, or run the same "
                    "command again"
                )
        outputs.open_files(rows.values())
    with closing(outputs):
        yield outputs
        outputs.put_away()


@contextmanager
def _closed_on_error(outputs: Outputs) -> Iterator[None]:
    """After an error, close all files, and remove a manifest that is new."""
    try:
        yield
    except BaseException:
        with closing(outputs):
            if outputs.manifest.is_new:
                remove_manifest(outputs.manifest.path)
        raise


# ---- which records continue ----


def _rows(outputs: Outputs, spec: OutputSpec) -> list[FileRow]:
    """Return the files of the run; forget the records that cannot be kept.

    A file that an earlier run began stays in the manifest, which tells that its content is ours.
    """
    manifest = outputs.manifest
    known = manifest.files()
    if 1 in known and spec.errors and fits(manifest, known[1], spec.errors):
        known[1].path = spec.errors  # where it was moved to
    keeps = _keeps_records(outputs, known, spec)
    if 1 in known and known[1].path != spec.errors:
        left, n_left = known.pop(1), manifest.count(1).n_records
        if keeps and n_left:
            outputs.notes.append(f"{left.path} stays as it is; its {n_left:,} items run again")
    if 0 in known and known[0].path != spec.output and not keeps:
        del known[0]
    new = [_new_row(file, path, spec) for file, path in enumerate(spec.paths) if file not in known]
    with manifest.transaction():
        for file in manifest.files():
            if not keeps or file not in known:
                manifest.forget(file)
        for file, row in known.items():
            row.path = spec.paths[file]
            if not keeps:
                row.header, row.is_replaced = spec.header, False
            manifest.put_file(row)
    return sorted([*known.values(), *new], key=lambda row: row.file)


def _new_row(file: int, path: Path, spec: OutputSpec) -> FileRow:
    """Return the row of a new file; refuse content of another program. A killed run leaves a part of the header."""
    found = b""
    try:
        with suppress(FileNotFoundError), path.open("rb") as opened:
            found = opened.read(len(spec.header) + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not spec.header.startswith(found.rstrip(b"\0")) and not spec.force:  # a disk may leave zeros
        raise LostError(
            f"{path}: exists, and no manifest of cbatch lists its records",
            "give another file, or replace it (--force); for JSON lines, the manifest can be rebuilt (--adopt)",
        )
    return FileRow(file, path, spec.header)


def _keeps_records(outputs: Outputs, known: Mapping[int, FileRow], spec: OutputSpec) -> bool:
    """Whether there are records to continue with; refuse other settings and other inputs, unless forced."""
    manifest = outputs.manifest
    n_records = sum(manifest.count(file).n_records for file in known)
    if not n_records:
        return False
    if not spec.output.exists():
        outputs.notes.append(
            f"{spec.output} is gone: all items run again, also the {n_records:,} that were done"
        )
        return False
    differences = dict(_differences(manifest, known, spec))
    if differences and not spec.force:
        said = "; ".join(differences.values())
        raise ConfigError(
            f"{spec.output}: was written with other settings: {said}. Use the same ones, or another output; "
            "--force runs the affected items again"
        )
    if not spec.force and spec.origin and (other := spec.origin.difference(manifest)):
        raise ConfigError(
            f"{spec.output}: has the answers of another input: {other}. Use that input, or another output; "
            "--force replaces the old answers with new ones"
        )
    return OUTPUT_FORMAT not in differences


def _differences(
    manifest: Manifest, known: Mapping[int, FileRow], spec: OutputSpec
) -> Iterator[tuple[str, str]]:
    before = {n: v for n, v in manifest.settings().items() if n not in _NO_SETTINGS}
    for name in sorted({*before, *spec.settings}):
        was, is_now = before.get(name, _NOTHING), spec.settings.get(name, _NOTHING)
        if was != is_now:
            yield name, f"{name} was {was}, is now {is_now}"
    if known[0].header != spec.header:
        was, is_now = (shown(h.decode(errors="replace")) for h in (known[0].header, spec.header))
        yield OUTPUT_FORMAT, f"the first line was {was!r}, is now {is_now!r}"
    if 1 in known and known[1].path != spec.errors and manifest.count(1).n_records:
        yield "errors", f"errors went to {known[1].path}, now go to {spec.errors or 'the output'}"
