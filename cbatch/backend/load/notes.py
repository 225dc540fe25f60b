"""What was found out on this machine, kept in the user's cache folder, so that another load need not find it again.

A note holds for this cbatch, one build of llama.cpp, these devices and the variables that ggml reads. All of it, and
what the caller adds, is in the note and compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import platformdirs

from cbatch.backend.bindings import LIBRARY, llama_cpp
from cbatch.backend.devices import device_names
from cbatch.support.folders import part_beside
from cbatch.support.typed import known

T = TypeVar("T")
_N_NAME = 16

_N_MOST = 2**20
"""Most bytes of a note: our choice; they have a few hundred, and what ggml's variables have."""

_HARMLESS = ("GGML_NO_BACKTRACE",)
"""Environment variables that change no finding. Worker processes have this one; see `cbatch.support.processes`."""


def read(name: str, *parts: str) -> str | None:
    """Return what was found out; None where nothing was, somewhere else, or the note is damaged or no plain file.

    Args:
        name: what was found out, as a part of a file's name: a new one wherever its finding changes.
        parts: what it depends on beside the machine: the model's digest, settings.
    """
    depends = _depends(parts)
    try:
        note = json.loads(_content(_path(name, depends)))
        found = note["found"] if note["depends"] == depends else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def read_as(kind: type[T], name: str, *parts: str) -> T | None:
    """Return what was found out as a value of a type, of which the note has the JSON; else as `read`."""
    with suppress(msgspec.MsgspecError, RecursionError):
        return msgspec.json.decode(read(name, *parts) or "", type=known(kind))
    return None


def write(found: str, name: str, *parts: str) -> None:
    """Keep what was found out; without a folder to write to it is found out again."""
    depends = _depends(parts)
    path = _path(name, depends)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with part_beside(path) as part:
            part.write_text(json.dumps({"found": found, "depends": depends}, indent=1))
            part.replace(path)


def can_write() -> bool:
    """Whether notes can be written."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(_folder(), os.W_OK | os.X_OK)


def _folder() -> Path:
    return platformdirs.user_cache_path("cbatch", appauthor=False) / "notes"


def _path(name: str, depends: Sequence[str]) -> Path:
    digest = hashlib.sha256(repr((name, depends)).encode()).hexdigest()
    return _folder() / f"{name}-{digest[:_N_NAME]}.json"


def _content(path: Path) -> bytes:
    """Return what a plain file holds; nothing of another, or of one that is too large, for reading it may never end."""
    with open(path, "rb", opener=_opened) as file:
        is_plain = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        data = file.read(_N_MOST + 1) if is_plain else b""
    return data if len(data) <= _N_MOST else b""


def _opened(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _depends(parts: Sequence[str]) -> list[str]:
    system = llama_cpp.llama_print_system_info().decode("utf-8", "backslashreplace")
    names = sorted(name for name in os.environ if name[:5] == "GGML_" and name not in _HARMLESS)
    variables = [f"{name}={os.environ[name]}" for name in names]
    said = [*_code(), system, *device_names(), *variables, *parts]
    return [text.encode("utf-8", "backslashreplace").decode() for text in said]


def _code() -> Sequence[str]:
    """Return what tells the code that finds things out, and llama.cpp's, from other versions."""
    folder = LIBRARY.parent if LIBRARY else Path(llama_cpp.__file__).with_name("lib")
    ours, theirs = Path(__file__).parents[1].rglob("*.py"), folder.glob("*")
    return str(folder), _digest(ours), _digest(theirs)


def _digest(files: Iterable[Path]) -> str:
    seen = sorted((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file())
    return hashlib.sha256(repr(seen).encode()).hexdigest()
