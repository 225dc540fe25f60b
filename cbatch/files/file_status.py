"""The status of an output: answers, errors, and items left. It needs no model and changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cbatch.errors import ConfigError
from cbatch.files import places
from cbatch.files.file_formats import is_columnar
from cbatch.files.input.item import Item, Seen, item_key
from cbatch.files.input.row_prompts import MEDIA_COLUMNS
from cbatch.files.input.source import open_source
from cbatch.files.output.durable import is_locked
from cbatch.files.output.identity import inputs_of
from cbatch.files.output.journal import duplicate_key
from cbatch.files.output.manifest import GONE, Manifest, files_of_manifest, record_key
from cbatch.files.output.record_file import CUT_OFF
from cbatch.files.output.run_paths import manifest_at, records_of
from cbatch.files.places import file_of, real
from cbatch.support.checks import readable

_N_TRIES = 10
"""Most tries to copy a manifest: a run changes more than the end of its log every few seconds."""

_COUNT = "SELECT count(*), sum(is_error), sum(number >= ?) FROM records"
_HAS = "SELECT 1 FROM records WHERE key = ?"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of an output.

    Args:
        n_done: answers.
        n_failed: records that are errors.
        n_gone: of both, records of items that are not in the input any more.
        n_items: of the input; None where it is unknown.
        n_left: of these, items without a record.
        is_running: whether a run has the output open.
        problem: why `n_left` is unknown.
        n_lost: records that are not in their file any more; counted nowhere else.
    """

    n_done: int
    n_failed: int
    n_gone: int = 0
    n_items: int | None = None
    n_left: int | None = None
    is_running: bool = False
    problem: str = ""
    n_lost: int = 0

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        left = f"not known: {self.problem}"
        if self.n_left is not None:
            left = f"{self.n_left:,} of {self.n_items:,}"
        lines = [f"done    {self.n_done:,}", f"failed  {self.n_failed:,}", f"left    {left}"]
        if self.n_gone:
            lines.append(f"gone    {self.n_gone:,}, not in the input any more")
        if self.n_lost:
            lines.append(f"lost    {self.n_lost:,}, not in the file any more")
        if self.is_running:
            lines.append("a run is writing to it now")
        return lines


def status_of(output: str | Path, inputs: Sequence[str | Path] = ()) -> RunStatus:
    """Return the status of an output, also during a run in another process.

    An item with a record counts as done, whatever was changed in its line since.

    Args:
        output: of a run.
        inputs: its input; none: the files in the manifest, if they are still there.

    Raises:
        ConfigError: there is no manifest, or the input cannot be read.
    """
    path = file_of("output", output)
    if path.is_dir():
        raise ConfigError(f"{readable(path)}: is a directory: give a file")
    place = records_of(path) if is_columnar(path) else path
    home = manifest_at(place)
    if not home.is_file():
        raise ConfigError(f"{path}: there is no manifest beside it: no run has written to it")
    is_running = is_locked(real(place))
    with _copied(home, place) as manifest:
        n_lost = 0 if is_running else _forget_lost(manifest, real(place))
        n, n_failed, n_gone = (count or 0 for count in manifest.execute(_COUNT, GONE).fetchone())
        left = _left(manifest, place, inputs)
    return RunStatus(n - n_failed, n_failed, n_gone, is_running=is_running, n_lost=n_lost, **left)


def _forget_lost(manifest: Manifest, output: Path) -> int:
    """Remove the records after the end of their file, which a run would compute again; return their number."""
    n_lost = 0
    for row in manifest.files().values():
        status = places.status_of(row.path if row.file else output)
        n_lost += manifest.execute(CUT_OFF, row.file, status.st_size if status else 0).rowcount
    return n_lost


def _left(manifest: Manifest, place: Path, inputs: Sequence[str | Path]) -> dict[str, Any]:
    """Return the number of items and that of items without a record, or why these are unknown."""
    settings = manifest.settings()
    paths = inputs or inputs_of(settings, real(place).parent)
    if not paths:
        return {"problem": "the input was a pipe"}
    format, said = settings.get("input format", "auto"), settings.get("template", "none")
    template = None if said == "none" else said
    columns: dict[str, Any] = {
        name: settings.get(name.replace("_", " ")) for name in MEDIA_COLUMNS.values()
    }
    n_items = n_left = 0
    try:
        with (
            closing(Seen()) as seen,
            open_source(paths, format=format, template=template, **columns) as source,
        ):
            for item in source:
                n_items += 1
                n_left += not _is_done(item, manifest, seen)
    except ConfigError as error:
        if inputs:
            raise
        return {"problem": str(error)}
    return {"n_items": n_items, "n_left": n_left}


def _is_done(item: Item, manifest: Manifest, seen: Seen) -> bool:
    """Whether an item has a record: its own as a duplicate, or the one of its id, which counts for one item."""
    key = record_key(item_key(item))
    if manifest.execute(_HAS, duplicate_key(key, item.number)).fetchone() is not None:
        return True
    if manifest.execute(_HAS, key).fetchone() is None:
        return False
    return seen.add(item_key(item), item.number) is None


@contextmanager
def _copied(home: Path, output: Path) -> Iterator[Manifest]:
    """Lend a copy of a manifest: a run locks its manifest."""
    with TemporaryDirectory(prefix="cbatch-") as folder:
        copy = Path(folder) / "copy"
        for _ in range(_N_TRIES):
            before = _stamp(home)
            for file, place in zip(_main_and_log(home), _main_and_log(copy), strict=True):
                place.unlink(missing_ok=True)
                with suppress(FileNotFoundError):
                    shutil.copyfile(file, place)
            if _stamp(home) == before:
                break
        else:
            raise ConfigError(f"{readable(home)}: changes too often to be read: try again")
        with closing(Manifest(copy, output, home=home)) as manifest:
            yield manifest


def _main_and_log(manifest: Path) -> list[Path]:
    return files_of_manifest(manifest)[:2]


def _stamp(home: Path) -> object:
    """Return a value that changes if more than the end of the log changes."""
    main, log = _main_and_log(home)
    status, head = main.stat(), b""
    with suppress(FileNotFoundError), log.open("rb") as file:
        head = file.read(32)
    return status.st_size, status.st_mtime_ns, head
