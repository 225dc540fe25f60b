"""`cbatch cache`: list, verify and remove the cells on disk."""

import json as encoding
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len, set_cell_size

from cbatch.cli.main import CliCommand, ExitCode, Subgroup, write
from cbatch.cli.option_table import option
from cbatch.cli.terminal import printable, say
from cbatch.errors import ConfigError
from cbatch.files.places import stdin, stdout

if TYPE_CHECKING:
    from cbatch.cache.store import CacheFile, CacheStore

_MIB = 2**20
_GAP = "  "
_HEADINGS = ("key", "tokens", "size", "last used", "model")
_LEAST_MODEL = 16
"""Columns of a model that a long key leaves on a terminal: enough to tell digests apart."""


app = typer.Typer(cls=Subgroup, no_args_is_help=True, rich_markup_mode="markdown")

CacheDir = Annotated[
    Path | None,
    option(
        "--cache-dir",
        metavar="DIR",
        envvar="CBATCH_CACHE_DIR",
        help="Folder of the saved KV caches.",
        default="cbatch/cells in the user's cache folder",
    ),
]


@app.callback()
def cache() -> None:
    """Manage the KV caches that requests have saved under cache keys.

    All commands use the folder --cache-dir, or CBATCH_CACHE_DIR.

    Example: cbatch cache ls
    """


@app.command(cls=CliCommand)
def ls(
    *,
    cache_dir: CacheDir = None,
    json: Annotated[
        bool, option("--json", help="Print one JSON object a line instead of a table.")
    ] = False,
) -> None:
    """List the files, the most recently used first.

    Example: cbatch cache ls --json
    """
    folder, store = _open(cache_dir)
    files = store.files()
    width = shutil.get_terminal_size().columns if stdout().isatty() else None
    for line in map(_as_json, files) if json else table(files, width):
        write(f"{line}\n")
    if not json:
        say(f"{_counted(files)} in {folder}")


@app.command(cls=CliCommand)
def rm(
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY", help="Keys to remove.")] = None,
    *,
    all: Annotated[
        bool, option("--all", help="Remove all files, after asking for confirmation.")
    ] = False,
    yes: Annotated[bool, option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove the files of these keys, for all models.

    Example: cbatch cache rm system-prompt
    """
    if all == bool(keys):
        raise ConfigError("give the keys of the files to remove, or --all, but not both")
    folder, store = _open(cache_dir)
    if all:
        _remove_all(folder, store, is_sure=yes)
        return
    unknown = [key for key in dict.fromkeys(keys or ()) if not store.remove(key)]
    _say_unknown(unknown, folder)


@app.command(cls=CliCommand)
def verify(
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="Keys to check. Default: all."),
    ] = None,
    *,
    cache_dir: CacheDir = None,
) -> None:
    """Read whole files and name the damaged ones.

    Example: cbatch cache verify
    """
    folder, store = _open(cache_dir)
    asked: list[str | None] = [*keys] if keys else [None]
    found = {key: store.files(key) for key in asked}
    files = [(key, file) for key, of_key in found.items() for file in of_key]
    n_bad = 0
    for key, file in files:
        problem = store.verify(file)
        if problem is not None:
            write(f"{printable(file.key or key or 'unknown key')}: {file.path} {problem}\n")
            n_bad += 1
    say(f"{_counted([file for _, file in files])} in {folder}, {n_bad} bad")
    _say_unknown([key for key, of_key in found.items() if key is not None and not of_key], folder)
    if n_bad:
        raise typer.Exit(ExitCode.SOME_FAILED)


def table(files: "list[CacheFile]", width: int | None = None) -> Iterator[str]:
    """Yield aligned lines, none without files; keys and models are cut so that a line fits `width` columns if given."""
    if not files:
        return
    rows = [_HEADINGS, *map(_row, files)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        n_left = width - sum(widths[1:4]) - 4 * len(_GAP)
        widths[0] = max(len(_HEADINGS[0]), min(widths[0], n_left - min(widths[4], _LEAST_MODEL)))
        widths[4] = max(len(_HEADINGS[4]), min(widths[4], n_left - widths[0]))
    for key, tokens, size, used, model in rows:
        cells = (
            _cut(key, widths[0]),
            tokens.rjust(widths[1]),
            size.rjust(widths[2]),
            used.ljust(widths[3]),
            _cut(model, widths[4]),
        )
        yield _GAP.join(cells).rstrip()


def _open(cache_dir: Path | None) -> "tuple[Path, CacheStore]":
    from cbatch.cache.store import CacheStore, cells_folder  # numpy is slow to import

    folder = cells_folder(cache_dir)
    return folder, CacheStore(folder, n_bytes_max=0)


def _row(file: "CacheFile") -> tuple[str, ...]:
    used = _time(file.used_at)
    size = _mib(file.n_bytes)
    if file.problem is not None:
        return "?", "?", size, used, f"{file.path.name} {file.problem}"
    model = printable(file.fingerprint.get("model", ""))
    return printable(file.key) or "''", f"{file.n_tokens:,}", size, used, model


def _as_json(file: "CacheFile") -> str:
    """Return one line in ASCII, without control characters."""
    return encoding.dumps({**asdict(file), "path": str(file.path)})


def _cut(text: str, n_columns: int) -> str:
    """Return a text of just so many columns, filled with spaces or cut."""
    if cell_len(text) <= n_columns:
        return set_cell_size(text, n_columns)
    return f"{set_cell_size(text, n_columns - 1)}…"


def _time(used_at: float) -> str:
    try:
        return datetime.fromtimestamp(used_at).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # beyond the calendar
        return "?"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**10:,.1f} KiB" if 0 < n_bytes < _MIB else f"{n_bytes / _MIB:,.1f} MiB"


def _counted(files: "list[CacheFile]") -> str:
    plural = "s" * (len(files) != 1)
    return f"{len(files)} file{plural}, {_mib(sum(file.n_bytes for file in files))}"


def _remove_all(folder: Path, store: "CacheStore", *, is_sure: bool) -> None:
    if not is_sure and not _agrees(f"remove {_counted(store.files())} in {folder}?"):
        say("cbatch: nothing removed")
        raise typer.Exit(ExitCode.SOME_FAILED)
    store.remove_all()


def _agrees(question: str) -> bool:
    answers = stdin()
    typer.echo(f"{question} [y/N] ", err=True, nl=False)
    return answers.readline().strip().lower() in (b"y", b"yes")


def _say_unknown(keys: list[str], folder: Path) -> None:
    if keys:
        say(f"cbatch: no file in {folder} has the key {' or '.join(map(repr, keys))}")
        raise typer.Exit(ExitCode.SOME_FAILED)
