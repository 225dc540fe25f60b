"""Stdin, stdout, and files of results that are written once."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from cbatch.errors import ConfigError
from cbatch.files.lines import dump, result_as_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.response import BatchResult

STDOUT = Path("-")


def is_pipe(path: Path) -> bool:
    """Whether the path is `-`: stdin or stdout."""
    return str(path) == "-"


def stdin() -> BinaryIO:
    """Return stdin.

    Raises:
        ConfigError: the command was started with it closed.
    """
    if sys.stdin is None:
        raise ConfigError("stdin is closed: there is nothing to read")
    return sys.stdin.buffer


def stdout() -> BinaryIO:
    """Return stdout.

    Raises:
        ConfigError: the command was started with it closed.
    """
    if sys.stdout is None:
        raise ConfigError("stdout is closed: there is nowhere to write to")
    return sys.stdout.buffer


def check_target(path: Path, *inputs: Path, force: bool) -> None:
    """Check that results can be written, long before the first one is there.

    Raises:
        ConfigError: a missing folder, one of the inputs, no permission, or see `check_new`.
    """
    if is_pipe(path):
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist")
    if path.is_file() and any(i.exists() and path.samefile(i) for i in inputs):
        raise ConfigError(f"{path}: is the input: give another file for the results")
    check_new(path, force=force)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: no permission to write there")


def check_new(path: Path, *, force: bool) -> None:
    """Check that no work of another run would be lost.

    Raises:
        ConfigError: a directory, or an existing file without `force`.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory: give a file")
    if path.is_file() and not force:
        raise ConfigError(f"{path}: exists already: give another file, or --force to replace it")


@contextmanager
def open_target(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open the file for results, or stdout for `-`.

    Raises:
        ConfigError: it cannot be opened, or a file came there since `check_target` and there is no `force`.
    """
    if is_pipe(path):
        yield stdout()
        return
    try:
        is_device = path.exists() and not path.is_file()
        file = path.open("wb" if force or is_device else "xb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_result(file: BinaryIO, result: BatchResult) -> None:
    """Write one result as a whole line that the system has when this returns."""
    file.write(dump(result_as_json(result)))
    file.flush()
