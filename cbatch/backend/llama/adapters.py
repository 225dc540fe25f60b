"""LoRA adapters of one model: checked before llama.cpp reads them, set before a step, freed once."""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.log import llama_log
from cbatch.backend.load.gguf_check import (
    AGAIN,
    MAGIC,
    MAX_DIMS,
    STRING,
    U32,
    U64,
    Cursor,
    DamagedError,
    Header,
    is_readable_version,
    read_value,
)
from cbatch.errors import ConfigError, EngineClosedError, ModelLoadError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.options import AdapterSet

_CONVERT = "give the .gguf file that llama.cpp's convert_lora_to_gguf.py makes of an adapter"
_N_HASHED = 2**20  # bytes read at once


class Adapters:
    """LoRA adapters of one model, by name; frees them."""

    def __init__(self, model: LlamaModel, files: Mapping[str, str | os.PathLike[str]]) -> None:
        """Load all of them into the memory that the model's weights are in.

        A context that was made before may use them: llama.cpp sizes its graph anew whenever the set changes.

        Args:
            model: what they were trained for, or one of the same shape; open for as long as these are.
            files: names and GGUF files.

        Raises:
            ModelLoadError: a file is missing, damaged, no LoRA adapter, or does not fit the model; none is loaded then.
        """
        self._files = {name: Path(file).absolute() for name, file in files.items()}
        self._pointers: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        log = llama_log()
        log.install()
        try:
            for name, path in self._files.items():
                self._pointers[name] = _load(model, name, path)
        except BaseException:
            self.close()
            raise
        finally:
            log.remove()

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order they were given."""
        return tuple(self._files)

    def digest(self, name: str) -> str:
        """Return "sha256:…" of an adapter's file, read when it is first asked for.

        Raises:
            ConfigError: no adapter of that name.
            ModelLoadError: the file cannot be read any more.
        """
        if name not in self._files:
            raise self._unknown(name)
        if name not in self._digests:
            try:
                self._digests[name] = _digest(self._files[name])
            except OSError as error:
                raise _cannot_load(
                    name, self._files[name], f"cannot be read: {error.strerror}"
                ) from error
        return self._digests[name]

    def use(self, ctx: Any, adapters: AdapterSet) -> None:
        """Have `ctx` compute with these adapters and no others, from its next step on.

        llama.cpp compares with what the context has, in about a microsecond; so nothing is remembered here that a
        context made anew could belie. Where the set differs, the next step also plans its graph anew.

        Args:
            ctx: `llama_context *` of the adapters' model; it holds them until the next call, or until it is freed.
            adapters: names with scales; empty for the model alone.

        Raises:
            ConfigError: no adapter of one of the names; nothing has changed.
            PlanError: llama.cpp refuses the set.
            EngineClosedError: they are freed.
        """
        n = len(adapters)
        pointers = (llama_cpp.llama_adapter_lora_p_ctypes * n)(
            *(self._pointer(name) for name, _ in adapters)
        )
        scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
        code = llama_cpp.llama_set_adapters_lora(ctx, pointers, n, scales)
        if code:
            raise PlanError(f"llama.cpp refuses the adapters {adapters!r} with code {code}")

    def close(self) -> None:
        """Free them. Twice is harmless; before the model is freed, and no context may compute with them."""
        while self._pointers:
            llama_cpp.llama_adapter_lora_free(self._pointers.popitem()[1])

    def _pointer(self, name: str) -> Any:
        if name not in self._files:
            raise self._unknown(name)
        if name not in self._pointers:
            raise EngineClosedError(f"adapter {name!r} is closed")
        return self._pointers[name]

    def _unknown(self, name: str) -> ConfigError:
        return ConfigError(f"no adapter {name!r}; loaded: {', '.join(self._files) or 'none'}")


def _load(model: LlamaModel, name: str, path: Path) -> Any:
    """Return a new `llama_adapter_lora *`."""
    try:
        _check(path, model)
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise _cannot_load(name, path, f"cannot be read: {words}") from error
    except DamagedError as error:
        raise _cannot_load(name, path, str(error)) from error
    pointer = llama_cpp.llama_adapter_lora_init(model.pointer, os.fsencode(path))
    said = llama_log().drain()
    if not pointer:
        raise _cannot_load(
            name, path, f"llama.cpp refuses it: {said[-1] if said else 'it gave no reason'}"
        )
    if llama_cpp.llama_adapter_get_alora_n_invocation_tokens(pointer):
        llama_cpp.llama_adapter_lora_free(pointer)
        raise _cannot_load(
            name, path, "is an activated LoRA, which begins at tokens of its own: give a plain one"
        )
    return pointer


def _cannot_load(name: str, path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"adapter {name!r}: {path}: {reason}")


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_N_HASHED):
            found.update(data)
    return f"sha256:{found.hexdigest()}"


# --- reading a file's header ---


@dataclass(frozen=True, slots=True)
class _Tensor:
    type: int
    sizes: tuple[int, ...]
    """Always four, the innermost first, as llama.cpp counts them."""


@dataclass(eq=False, slots=True)
class _Contents:
    header: Header
    kinds: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, _Tensor] = field(default_factory=dict)

    def pairs(self) -> Iterator[tuple[str, _Tensor, _Tensor]]:
        """Yield (name of the weight, a, b); what has no other half is left for llama.cpp to refuse."""
        for name, tensor in self.tensors.items():
            base = name.removesuffix(".lora_a")
            other = self.tensors.get(f"{base}.lora_b")
            if base != name and other is not None:
                yield base, tensor, other


@contextmanager
def _opened(path: Path) -> Iterator[Cursor]:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise DamagedError(f"is a folder; {_CONVERT}")
    if not stat.S_ISREG(mode):
        raise DamagedError("is not a regular file")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise DamagedError(f"is empty; {AGAIN}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield Cursor(data)


def _read(cursor: Cursor) -> _Contents | None:
    """Return what a file says it holds; None if it is newer than this reader, for llama.cpp to decide."""
    if cursor.data[:4] != MAGIC:
        begins = bytes(cursor.data[:4])
        raise DamagedError(f"is not a GGUF file (it begins with {begins!r}); {_CONVERT}")
    cursor.at = 4
    if not is_readable_version(cursor.number(U32)):
        return None
    contents = _Contents(Header(n_file=len(cursor.data)))
    n_tensors, n_values = cursor.number(U64), cursor.number(U64)
    for _ in range(n_values):
        key = _read_name(cursor, contents.kinds)
        contents.kinds[key] = cursor.number(U32)
        cursor.at -= U32.size
        read_value(cursor, contents.header, key)
    for _ in range(n_tensors):
        name = _read_name(cursor, contents.tensors)
        contents.tensors[name] = _read_tensor(cursor)
    return contents


def _read_name(cursor: Cursor, taken: Mapping[str, object]) -> str:
    """Return a name up to its first NUL, where llama.cpp's comparisons end."""
    name = cursor.string().partition(b"\0")[0].decode(errors="replace")
    if name in taken:
        raise DamagedError(f"is damaged: {name} stands twice; {AGAIN}")
    return name


def _read_tensor(cursor: Cursor) -> _Tensor:
    n_dims = cursor.number(U32)
    if n_dims > MAX_DIMS:
        raise DamagedError(f"is damaged: a tensor with {n_dims} dimensions; {AGAIN}")
    sizes = [cursor.number(U64) for _ in range(n_dims)] + [1] * (MAX_DIMS - n_dims)
    tensor = _Tensor(cursor.number(U32), tuple(sizes))
    cursor.skip(U64.size)
    return tensor


# --- rules: each yields what is wrong; llama.cpp would end the process, or compute nonsense ---

_FLOAT = 6
# Source: llama-adapter.cpp, llama_adapter_lora_init_impl, whose getters assert these types (gguf.h, gguf_type).
_KINDS = {
    "general.type": STRING,
    "general.architecture": STRING,
    "adapter.type": STRING,
    "adapter.lora.alpha": _FLOAT,
}
# Source: convert_lora_to_gguf.py, --outtype; of some others, such as integers, llama.cpp has no product.
_TYPES = {0: "f32", 1: "f16", 8: "q8_0", 30: "bf16"}
_EMBEDDING = "token_embd.weight"


def _check(path: Path, model: LlamaModel) -> None:
    with _opened(path) as cursor:
        contents = _read(cursor)
    if contents is not None:
        for rule in _RULES:
            for reason in rule(contents, model):
                raise DamagedError(reason)


def _metadata(contents: _Contents, model: LlamaModel) -> Iterator[str]:
    for key, kind in _KINDS.items():
        if contents.kinds.get(key, kind) != kind:
            yield f"is damaged: {key} is of another type than llama.cpp reads; {AGAIN}"
    values = contents.header.values
    if (kind_of_file := values.get("general.type", "model")) != "adapter":
        yield f"is of type {kind_of_file!r}, not an adapter; {_CONVERT}"
    if (kind_of_adapter := values.get("adapter.type")) != "lora":
        yield f"is an adapter of type {kind_of_adapter!r}; there is: 'lora'"
    if (architecture := contents.header.architecture) != model.architecture:
        yield f"is for a model of architecture {architecture!r}, and {model.name} is {model.architecture!r}"
    alpha = values.get("adapter.lora.alpha", 0.0)
    if not math.isfinite(float(alpha)):
        yield f"is damaged: adapter.lora.alpha is {alpha}; {AGAIN}"


def _weights(contents: _Contents, model: LlamaModel) -> Iterator[str]:
    for name, tensor in contents.tensors.items():
        if name.count(".lora_") > 1:
            yield f"is damaged: it has a tensor {name!r}; {AGAIN}"
        if name.endswith((".lora_a", ".lora_b")) and tensor.type not in _TYPES:
            known = ", ".join(_TYPES.values())
            yield f"has {name} in a type of number {tensor.type}; there is: {known}; convert it again"
    if not any(True for _ in contents.pairs()):
        yield f"holds no LoRA weights; {_CONVERT}"


def _sizes(contents: _Contents, model: LlamaModel) -> Iterator[str]:
    """Compare the halves with each other; llama.cpp compares their outer sizes with the model."""
    n_experts = model.metadata.get(f"{model.architecture}.expert_count", "0")
    for name, a, b in contents.pairs():
        n_rank = a.sizes[0 if name.endswith(_EMBEDDING) else 1]
        n_deep = n_experts if "exps." in name else "1"
        depths = {str(a.sizes[2]), str(b.sizes[2]), n_deep}
        if (n_rank, a.sizes[3], b.sizes[3], len(depths)) != (b.sizes[0], 1, 1, 1) or not n_rank:
            yield (
                f"does not fit {model.name}: {name} has lora_a of {list(a.sizes)} and lora_b of {list(b.sizes)}"
            )


def _uses(contents: _Contents, model: LlamaModel) -> Iterator[str]:
    """Source: llama-graph.cpp, build_lora_mm, which takes an embedding's adapter the wrong way round where the output
    has the embedding's weights, and build_ffn, which asserts that NVFP4 is not adapted.
    """
    adapted = {name for name, _, _ in contents.pairs()}
    if _EMBEDDING in adapted and not _has_own_output(Path(model.name)):
        yield f"adapts {_EMBEDDING}, which is also the output of {model.name}: llama.cpp cannot compute that"
    if model.file_type == "nvfp4" and any(".ffn_" in name for name in adapted):
        yield f"adapts feed-forward weights, which llama.cpp cannot compute where they are NVFP4, as in {model.name}"


def _has_own_output(path: Path) -> bool:
    """Return whether a model's output surely is not its embedding: False too where its file cannot be seen."""
    try:
        with _opened(path) as cursor:
            contents = _read(cursor)
    except (OSError, ValueError, DamagedError):
        return False
    return contents is not None and "output.weight" in contents.tensors


_RULES: tuple[Callable[[_Contents, LlamaModel], Iterator[str]], ...] = (
    _metadata,
    _weights,
    _sizes,
    _uses,
)
