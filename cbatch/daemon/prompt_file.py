"""Prompts in binary files: token ids, each a little-endian int32."""

from __future__ import annotations

import os
import stat
import sys
from array import array

from cbatch.errors import PromptError
from cbatch.support.checks import readable

_N_BYTES = 4


def read_prompt(path: str, n_vocab: int, n_most: int) -> tuple[int, ...]:
    """Return the tokens of a file; at most `n_most`. A pipe or device is refused, for reading one may never end.

    Raises:
        PromptError: no such file, nothing to read as tokens, or a token outside of the vocabulary.
    """
    try:
        tokens = array("i", _content(path, n_most * _N_BYTES))
        if sys.byteorder == "big":
            tokens.byteswap()
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= n_vocab:
            wrong = low if low < 0 else high
            raise ValueError(f"token {wrong} is not in the vocabulary of {n_vocab:,}")
        return tuple(tokens)
    except OSError as error:
        raise PromptError(f"{readable(path)}: {error.strerror}") from error
    except ValueError as error:
        raise PromptError(f"{readable(path)}: {error}") from None


def _content(path: str, n_most: int) -> bytes:
    """Return the bytes of a regular file that holds whole tokens. Raises a ValueError for another."""
    # opening a named pipe would wait for its writer otherwise
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a file of token ids")
        with os.fdopen(file, "rb", closefd=False) as opened:
            data = opened.read(n_most + 1)
    finally:
        os.close(file)
    if not data:
        raise ValueError("the file is empty")
    if len(data) > n_most:
        n_tokens = max(status.st_size, len(data)) // _N_BYTES
        raise ValueError(f"{n_tokens:,} tokens, but at most {n_most // _N_BYTES:,} fit")
    if len(data) % _N_BYTES:
        raise ValueError(f"{len(data):,} bytes are not whole tokens of {_N_BYTES} bytes")
    return data
