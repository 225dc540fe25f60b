"""Files as callers give them: their bytes, or a path."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from cbatch.errors import ConfigError


def file_bytes(what: str, value: object, check_size: Callable[[int], object]) -> bytes | None:
    """Return bytes as they are, and those of the file at a `Path`; None for any other value.

    Text is not a path: it could come from a file of prompts, or from the network.

    Args:
        what: names the value in errors, such as "messages[0] has a picture".
        value: what the caller gave.
        check_size: raises where a file has too many bytes; called before the file is read.

    Raises:
        ConfigError: the file cannot be read.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        check_size(memoryview(value).nbytes)
        return bytes(value)
    if not isinstance(value, os.PathLike):
        return None
    try:
        path = Path(os.fspath(value))
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device may never end
            raise ConfigError(f"{what} that cannot be read: {path} is not a regular file")
        check_size(found.st_size)
        return path.read_bytes()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} that cannot be read: {error}") from None
