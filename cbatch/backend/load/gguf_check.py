"""Look at a GGUF file before llama.cpp does: clear errors, and no abort for what it only asserts.

llama.cpp returns an error for most damage. A few values it merely asserts, which ends the process;
those are checked here. Nothing read from the file is trusted: every length is compared with the
file's size, and no header may be larger than any real one.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbatch.backend.bindings import llama_cpp
from cbatch.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Scalar = bool | int | float | str

MAGIC = b"GGUF"
AGAIN = "copy or download it again"

# Source: ggml/include/gguf.h, gguf_type.
_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in _FORMATS.items()}
STRING, _ARRAY = 8, 9
_INTEGERS = {4: "I", 5: "i"}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")

_MAX_HEADER = 2**28  # bytes; real ones have 1 to 30 MB. Bounds time and memory on a damaged file
MAX_DIMS = 4  # Source: ggml.h, GGML_MAX_DIMS
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # Source: llama-hparams.h; larger ones end the process
_MAP_ALIGNMENT = 32  # Source: ggml-impl.h, TENSOR_ALIGNMENT
_BYTE_TOKEN = 6  # Source: llama.h, LLAMA_TOKEN_TYPE_BYTE


def check_file(path: Path) -> None:
    """Check that a file is a whole GGUF that llama.cpp can read without ending the process.

    Args:
        path: the file; of a split model, the first one.

    Raises:
        ModelLoadError: it is not; the message names the path, the reason and the way out.
    """
    try:
        _check(path)
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelLoadError(f"{path}: cannot be read: {words}") from error
    except DamagedError as error:
        raise ModelLoadError(f"{path}: {error}") from error


class DamagedError(Exception):
    """What is wrong with the file, and the way out, without its name."""


def _check(path: Path) -> None:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise DamagedError("is a folder; give the .gguf file in it")
    if not stat.S_ISREG(mode):
        raise DamagedError("is not a regular file")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise DamagedError(f"is empty; {AGAIN}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check_header(Cursor(data))


def _check_header(cursor: Cursor) -> None:
    if cursor.data[:4] != MAGIC:
        raise DamagedError(
            f"is not a GGUF file (it begins with {bytes(cursor.data[:4])!r}); give a .gguf model"
        )
    cursor.at = 4
    if not is_readable_version(cursor.number(U32)):
        return  # newer than this reader: llama.cpp decides
    header = read_header(cursor)
    for rule in _RULES:
        for reason in rule(header):
            raise DamagedError(reason)


def is_readable_version(version: int) -> bool:
    """Whether this GGUF version is one of 64-bit lengths; raises where no llama.cpp reads it."""
    if version & 0xFFFF == 0:
        raise DamagedError(f"is written for big-endian machines, or damaged; {AGAIN}")
    if version == 1:
        raise DamagedError("is GGUF version 1, which llama.cpp no longer reads; convert it again")
    return version <= 3


# --- reading ---


@dataclass(eq=False, slots=True)
class Cursor:
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
        """Return an unsigned integer."""
        value: int = kind.unpack_from(self.data, self.skip(kind.size))[0]
        return value

    def string(self) -> bytes:
        """Return a length-prefixed string."""
        n = self.number(U64)
        start = self.skip(n)
        return self.data[start : start + n]


@dataclass(eq=False, slots=True)
class Header:
    """What the rules look at; of arrays, only the tokens and those of 32-bit integers."""

    n_file: int
    values: dict[str, Scalar] = field(default_factory=dict)
    tokens: list[bytes] = field(default_factory=list)
    integers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    n_tensors: int = 0
    tensor_offsets: list[int] = field(default_factory=list)
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


def read_header(cursor: Cursor) -> Header:
    """Read what a file says of itself, behind magic number and version."""
    header = Header(n_file=len(cursor.data))
    header.n_tensors, n_values = cursor.number(U64), cursor.number(U64)
    for _ in range(n_values):
        key = cursor.string().decode(errors="replace")
        read_value(cursor, header, key)
    for _ in range(header.n_tensors):
        header.tensor_offsets.append(_read_tensor_offset(cursor))
    header.n_header = cursor.at
    return header


def read_value(cursor: Cursor, header: Header, key: str) -> None:
    """Read one value of the metadata into `header`, or past it."""
    kind = cursor.number(U32)
    if kind == _ARRAY:
        _read_array(cursor, header, key)
    elif kind == STRING:
        header.values[key] = cursor.string().decode(errors="replace")
    else:
        scalar = _scalar(kind)
        header.values[key] = scalar.unpack_from(cursor.data, cursor.skip(scalar.size))[0]


def _read_array(cursor: Cursor, header: Header, key: str) -> None:
    kind, n = cursor.number(U32), cursor.number(U64)
    if kind == STRING:
        _read_strings(cursor, n, header.tokens if key == "tokenizer.ggml.tokens" else None)
        return
    start = cursor.skip(n * _scalar(kind).size)
    if kind in _INTEGERS:
        header.integers[key] = struct.unpack_from(f"<{n}{_INTEGERS[kind]}", cursor.data, start)


def _read_strings(cursor: Cursor, n: int, into: list[bytes] | None) -> None:
    for _ in range(n):
        if into is None:
            cursor.skip(cursor.number(U64))
        else:
            into.append(cursor.string().partition(b"\0")[0])  # llama.cpp reads C strings


def _scalar(kind: int) -> struct.Struct:
    if kind not in _SCALARS:
        raise DamagedError(f"is damaged: its metadata has a value of unknown type {kind}; {AGAIN}")
    return _SCALARS[kind]


def _read_tensor_offset(cursor: Cursor) -> int:
    cursor.string()
    n_dims = cursor.number(U32)
    if n_dims > MAX_DIMS:
        raise DamagedError(f"is damaged: a tensor with {n_dims} dimensions; {AGAIN}")
    cursor.skip(n_dims * U64.size + U32.size)
    return cursor.number(U64)


# --- rules: each yields what is wrong with a header ---


def _kind_of_file(header: Header) -> Iterator[str]:
    kind = header.values.get("general.type", "model")
    if kind != "model":
        yield f"is of type {kind!r}, not a model; give the model's .gguf file"
    if header.values.get("split.no", 0) != 0:
        yield "is a later part of a split model; give the first part (-00001-of-…)"
    if header.n_tensors == 0 and header.values.get("split.count", 0) in (0, 1):
        yield "holds no weights (a vocabulary only); give the model's .gguf file"


def _tensors_in_file(header: Header) -> Iterator[str]:
    alignment = header.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment % _MAP_ALIGNMENT:
        yield f"is damaged: general.alignment is {alignment}, not a multiple of 32; {AGAIN}"
        return
    start = -(-header.n_header // max(alignment, 1)) * alignment
    n_needed = start + max(header.tensor_offsets, default=0)
    if header.tensor_offsets and n_needed >= header.n_file:
        yield (
            f"is cut off or damaged: it has {header.n_file} bytes, "
            f"but its weights reach past byte {n_needed}; {AGAIN}"
        )


# Source of the three below: llama-model.cpp, load_hparams, its assertions.


def _layers(header: Header) -> Iterator[str]:
    n_layers, n_nextn = header.count("block_count"), header.count("nextn_predict_layers")
    if not 0 < n_layers <= _MAX_LAYERS:
        yield f"is damaged: block_count is {n_layers}, not in 1 … {_MAX_LAYERS}; {AGAIN}"
    if n_nextn > n_layers:
        yield f"is damaged: nextn_predict_layers is {n_nextn} of {n_layers} layers; {AGAIN}"


def _experts(header: Header) -> Iterator[str]:
    n_experts, n_used = header.count("expert_count"), header.count("expert_used_count")
    n_groups, n_used_groups = (
        header.count("expert_group_count"),
        header.count("expert_group_used_count"),
    )
    if header.architecture.startswith("hunyuan") and n_experts <= 1:
        return  # llama.cpp overrides what these files say
    if not (_experts_fit(n_experts, n_used) and _groups_fit(n_experts, n_groups, n_used_groups)):
        yield (
            f"is damaged: {n_used} of {n_experts} experts, "
            f"{n_used_groups} of {n_groups} groups cannot be; {AGAIN}"
        )


def _experts_fit(n_experts: int, n_used: int) -> bool:
    return n_used <= n_experts <= _MAX_EXPERTS and (n_experts > 0) == (n_used > 0)


def _groups_fit(n_experts: int, n_groups: int, n_used: int) -> bool:
    if n_groups > 1 and (n_experts % n_groups or not 0 < n_used < n_groups):
        return False
    return n_groups < max(n_experts, 1)


def _rope_and_norm(header: Header) -> Iterator[str]:
    scaling = header.values.get(f"{header.architecture}.rope.scaling.type")
    if isinstance(scaling, str) and scaling not in _rope_scalings():
        yield f"is damaged: rope.scaling.type is {scaling!r}; {AGAIN}"
    for key, value in header.values.items():
        if key.endswith("epsilon") and isinstance(value, float) and not 0 <= value < math.inf:
            yield f"is damaged: {key} is {value}; {AGAIN}"


def _rope_scalings() -> set[str]:
    prefix = "LLAMA_ROPE_SCALING_TYPE_"
    names = {
        name.removeprefix(prefix).lower() for name in dir(llama_cpp) if name.startswith(prefix)
    }
    return names - {"unspecified", "max_value"}


# Source of the next: llama-vocab.cpp, which asserts unique tokens at load, and where token_to_byte
# and byte_to_token throw later.


def _vocabulary(header: Header) -> Iterator[str]:
    pieces = {token or f"[EMPTY_{i}]".encode() for i, token in enumerate(header.tokens)}
    n_twice = len(header.tokens) - len(pieces)
    if n_twice:
        yield f"is damaged: {n_twice} of its tokens stand twice; {AGAIN}"
    tokenizer = header.values.get("tokenizer.ggml.model")
    types = header.integers.get("tokenizer.ggml.token_type", ())
    for token, kind in zip(header.tokens, types, strict=False):
        if kind == _BYTE_TOKEN and (len(token) < 3 or tokenizer == "bert"):
            yield f"is damaged: token {token!r} cannot stand for a byte; {AGAIN}"
    if tokenizer == "llama" and not all(_has_byte(pieces, byte) for byte in range(256)):
        yield "is damaged: it has no token for some bytes, and llama.cpp ends when it meets one"


def _has_byte(pieces: set[bytes], byte: int) -> bool:
    return f"<0x{byte:02X}>".encode() in pieces or bytes([byte]) in pieces


_RULES: tuple[Callable[[Header], Iterator[str]], ...] = (
    _kind_of_file,
    _tensors_in_file,
    _layers,
    _experts,
    _rope_and_norm,
    _vocabulary,
)
