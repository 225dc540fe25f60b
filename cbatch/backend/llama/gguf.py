"""The header of a GGUF file: nothing read from the file is trusted.

Every length is compared with the file's size, and no header may be larger than any real one.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Scalar = bool | int | float | str

AGAIN = "copy or download it again"
"""The way out where a file is damaged."""
NO_DOWNLOAD = "nothing is downloaded, unless the name is hf:OWNER/REPO/FILE.gguf"
"""The hint where there is no file."""

_MAGIC = b"GGUF"
# Source: ggml/include/gguf.h, gguf_type.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}
"""How values of one number are written, by their types."""
FLOAT, STRING, ARRAY = 6, 8, 9
INTEGERS = {4: "I", 5: "i"}
"""The types of 32-bit integers, by how they are written."""
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_MAX_HEADER = 2**28  # bytes; real ones have 1 to 30 MB. Bounds time and memory on a damaged file
_MAX_DIMS = 4  # Source: ggml.h, GGML_MAX_DIMS


class DamagedError(Exception):
    """What is wrong with a file, and the way out, without its name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    type: int
    """Source: ggml/include/ggml.h, enum ggml_type."""
    sizes: tuple[int, ...]
    """Always four, the innermost first, as llama.cpp counts them."""
    offset: int
    """Bytes after the header."""


@dataclass(eq=False, slots=True)
class Header:
    """What a file says of itself; of arrays, only the tokens and those of 32-bit integers."""

    n_file: int
    values: dict[str, Scalar] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    """The type of each value. Source: ggml/include/gguf.h, gguf_type."""
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The bytes of each value in the file, behind its type: `[start, end)`."""
    lengths: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each array: its items' type, and their number."""
    tokens: list[bytes] = field(default_factory=list)
    integers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    n_header: int = 0

    @property
    def architecture(self) -> str:
        """Such as "llama"."""
        return str(self.values.get("general.architecture"))

    def count(self, key: str) -> int:
        """Return one of the architecture's own counts, 0 without it; the largest of an array."""
        own = f"{self.architecture}.{key}"
        if own in self.integers:
            return max(self.integers[own], default=0)
        value = self.values.get(own)
        return value if isinstance(value, int) else 0


def read_header(path: Path, way_out: str) -> Header | None:
    """Return what a file says of itself; None if its format is newer than this reader, for llama.cpp to decide.

    Args:
        way_out: what to do where it is not a GGUF file: the end of a sentence.

    Raises:
        DamagedError: it cannot be read, or is not a whole header of a GGUF file.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise DamagedError(f"is a folder; {way_out}")
        if not stat.S_ISREG(mode):
            raise DamagedError("is not a regular file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise DamagedError(f"is empty; {AGAIN}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_FileCursor(data), way_out)
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        hint = f"; {NO_DOWNLOAD}" if isinstance(error, FileNotFoundError) else ""
        raise DamagedError(f"cannot be read: {words}{hint}") from error


def _read(cursor: _FileCursor, way_out: str) -> Header | None:
    if cursor.data[:4] != _MAGIC:
        raise DamagedError(
            f"is not a GGUF file (it begins with {bytes(cursor.data[:4]).hex(' ')}, not with GGUF); {way_out}"
        )
    cursor.at = 4
    if not _is_readable_version(cursor.number(_U32)):
        return None
    header = Header(n_file=len(cursor.data))
    n_tensors, n_values = cursor.number(_U64), cursor.number(_U64)
    for _ in range(n_values):
        _read_value(cursor, header, _read_name(cursor, header.kinds))
    for _ in range(n_tensors):
        name = _read_name(cursor, header.tensors)
        header.tensors[name] = _read_tensor(cursor)
    header.n_header = cursor.at
    return header


def _is_readable_version(version: int) -> bool:
    """Whether this GGUF version is one of 64-bit lengths; raises where no llama.cpp reads it."""
    if version & 0xFFFF == 0:
        raise DamagedError(f"is written for big-endian machines, or damaged; {AGAIN}")
    if version == 1:
        raise DamagedError("is GGUF version 1, which llama.cpp no longer reads; convert it again")
    return version <= 3


@dataclass(eq=False, slots=True)
class _FileCursor:
    """Reads forward through a mapped file; everything it returns lies inside the file."""

    data: mmap.mmap
    at: int = 0

    def skip(self, n: int) -> int:
        """Move past `n` bytes; return where they began."""
        start = self.at
        if n > min(len(self.data), _MAX_HEADER) - start:
            raise DamagedError(f"is cut off or damaged: it ends inside its header; {AGAIN}")
        self.at = start + n
        return start

    def number(self, kind: struct.Struct) -> int:
        value: int = kind.unpack_from(self.data, self.skip(kind.size))[0]
        return value

    def string(self) -> bytes:
        n = self.number(_U64)
        start = self.skip(n)
        return self.data[start : start + n]


def _read_name(cursor: _FileCursor, taken: Mapping[str, object]) -> str:
    """Return a name up to its first NUL, where llama.cpp's comparisons end."""
    name = cursor.string().partition(b"\0")[0].decode(errors="replace")
    if name in taken:
        raise DamagedError(f"is damaged: {name} occurs twice; {AGAIN}")
    return name


def _read_value(cursor: _FileCursor, header: Header, key: str) -> None:
    kind = header.kinds[key] = cursor.number(_U32)
    start = cursor.at
    if kind == ARRAY:
        _read_array(cursor, header, key)
    elif kind == STRING:
        header.values[key] = cursor.string().decode(errors="replace")
    else:
        scalar = _scalar(kind)
        header.values[key] = scalar.unpack_from(cursor.data, cursor.skip(scalar.size))[0]
    header.spans[key] = (start, cursor.at)


def _read_array(cursor: _FileCursor, header: Header, key: str) -> None:
    kind, n = header.lengths[key] = cursor.number(_U32), cursor.number(_U64)
    if kind == STRING:
        _read_strings(cursor, n, header.tokens if key == "tokenizer.ggml.tokens" else None)
        return
    start = cursor.skip(n * _scalar(kind).size)
    if kind in INTEGERS:
        header.integers[key] = struct.unpack_from(f"<{n}{INTEGERS[kind]}", cursor.data, start)


def _read_strings(cursor: _FileCursor, n: int, into: list[bytes] | None) -> None:
    """Read past `n` strings in one loop: a vocabulary has hundreds of thousands."""
    data, at, end = cursor.data, cursor.at, min(len(cursor.data), _MAX_HEADER)
    to_int = int.from_bytes
    for _ in range(n):
        start = at + _U64.size
        at = start + to_int(data[at:start], "little")
        if at > end:
            break
        if into is not None:
            into.append(data[start:at].partition(b"\0")[0])  # llama.cpp reads C strings
    cursor.skip(at - cursor.at)


def _scalar(kind: int) -> struct.Struct:
    if kind not in SCALARS:
        raise DamagedError(f"is damaged: its metadata has a value of unknown type {kind}; {AGAIN}")
    return SCALARS[kind]


def _read_tensor(cursor: _FileCursor) -> StoredTensor:
    n_dims = cursor.number(_U32)
    if n_dims > _MAX_DIMS:
        raise DamagedError(f"is damaged: it has a tensor with {n_dims} dimensions; {AGAIN}")
    sizes = [cursor.number(_U64) for _ in range(n_dims)] + [1] * (_MAX_DIMS - n_dims)
    return StoredTensor(cursor.number(_U32), tuple(sizes), cursor.number(_U64))
