"""Where cbatch's native library is. `CBATCH_LIBRARY` names another file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

_NAME = {"darwin": "libcbatch.dylib", "win32": "libcbatch.dll"}.get(sys.platform, "libcbatch.so")


def native_file() -> Path:
    """Return the library's file, which may be missing."""
    chosen = os.environ.get("CBATCH_LIBRARY")
    return Path(chosen) if chosen else _PACKAGE / _NAME
