"""Shell completion of option values."""

import glob
import os
from collections.abc import Callable, Iterable
from itertools import chain

_HUB = "hf:"


def among(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completer of these words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def among_several(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completer of a comma-separated list of these words."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + word for word in among(words)(last)]

    return complete


def gguf_files(incomplete: str) -> list[str]:
    """Return GGUF files whose paths begin so, also one folder deeper; if none do, the shell offers all files.

    Paths with blanks are left to the shell, which quotes them.
    """
    if incomplete.startswith(_HUB):
        return []
    start = glob.escape(os.path.expanduser(incomplete))
    found = chain(glob.iglob(f"{start}*.gguf"), glob.iglob(f"{start}*/*.gguf"))
    typed = len(os.path.expanduser(incomplete))
    paths = (incomplete + path[typed:] for path in found)
    return sorted({path for path in paths if not any(map(str.isspace, path))})
