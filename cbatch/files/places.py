"""Paths of inputs and outputs, checked before a run; `-` is stdin or stdout."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cbatch.errors import ConfigError
from cbatch.support.checks import check_path, reading

STDOUT = Path("-")

_NO_FILE = (OSError, ValueError, AttributeError)  # errors of a stream without a file descriptor
_N_BESIDE = 40  # most characters that names of files beside an output are longer than its own


def is_dash(path: str | Path) -> bool:
    """Whether the path is `-`: stdin or stdout."""
    return str(path) == "-"


def file_of(name: str, value: object) -> Path:
    """Return the path of a file, or `-`, with the home for `~`; ConfigError where the value is not a path."""
    with reading(name):
        path = Path(check_path(name, value))
    _check_name(path)
    return path


def stdin() -> BinaryIO:
    """Return stdin; ConfigError where the program was started with it closed."""
    if sys.stdin is None:
        raise ConfigError("stdin is closed: there is nothing to read")
    return sys.stdin.buffer


def stdout() -> BinaryIO:
    """Return stdout; ConfigError where the program was started with it closed."""
    if sys.stdout is None:
        raise ConfigError("stdout is closed: there is nowhere to write to")
    return sys.stdout.buffer


def status_of(name: str | Path) -> os.stat_result | None:
    """Return the status of a file, `-` being stdin; None where the system has none."""
    try:
        if not is_dash(name):
            return os.stat(name)
        return None if sys.stdin is None else os.fstat(sys.stdin.fileno())
    except _NO_FILE:
        return None


def is_stdout_at(status: os.stat_result) -> bool:
    """Whether stdout goes to this file."""
    try:
        return sys.stdout is not None and os.path.samestat(os.fstat(sys.stdout.fileno()), status)
    except _NO_FILE:
        return False


def real(path: Path) -> Path:
    """Return a path without links: all names of a file lead to one manifest."""
    return Path(os.path.realpath(path))


def check_place(path: Path) -> None:
    """Raise ConfigError where no file can be written: a directory, a missing folder, no permission."""
    if is_dash(path):
        return
    _check_name(path)
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory: give a file")
    folder = real(path).parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise ConfigError(f"{path}: the folder {folder} does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{path}: no permission to write there")


def _check_name(path: Path) -> None:
    """Refuse a name that the system refuses, such as one that is too long for the files beside an output."""
    if is_dash(path) or not path.name:
        return
    try:
        path.with_name(path.name + "x" * _N_BESIDE).stat()
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise ConfigError(f"{path}: cannot be the name of a file: {error.strerror}") from error


def check_apart(path: Path, inputs: Iterable[str | Path]) -> None:
    """Raise ConfigError where an output is one of the inputs, under any name."""
    if path.is_file() and any(os.path.exists(i) and path.samefile(i) for i in inputs):
        raise ConfigError(f"{path}: is the input: give another file for the results")


def check_new(path: Path, *, force: bool) -> None:
    """Raise ConfigError where no file can be written, and for an existing file without `force`."""
    check_place(path)
    if path.is_file() and not force:
        raise ConfigError(f"{path}: exists already: give another file, or --force to replace it")


@contextmanager
def opened(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open a new file of results, or stdout for `-`, for the length of the block.

    ConfigError where it cannot be opened, or exists and `force` is False. An OSError of writing names the file.
    """
    if is_dash(path):
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
