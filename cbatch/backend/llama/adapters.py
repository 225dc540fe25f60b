"""LoRA adapters of one model: checked before llama.cpp reads them, set before a step, freed once."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.fingerprint import is_unchanged, model_parts
from cbatch.backend.llama.gguf import (
    AGAIN,
    FLOAT,
    STRING,
    DamagedError,
    Header,
    StoredTensor,
    read_header,
)
from cbatch.backend.llama.log import llama_log
from cbatch.errors import ConfigError, EngineClosedError, ModelLoadError, PlanError
from cbatch.support.checks import reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.options import AdapterSet

_CONVERT = "give the .gguf file that llama.cpp's convert_lora_to_gguf.py makes of an adapter"
_N_HASHED = 2**20  # bytes read at once


class Adapters:
    """LoRA adapters of one model, by name; frees them."""

    def __init__(self, model: LlamaModel, files: Mapping[str, str | os.PathLike[str]]) -> None:
        """Load all adapters into the memory that the model's weights are in.

        A context that was made before may use the adapters: llama.cpp sizes its graph anew whenever the set changes.

        Args:
            model: the model that the adapters were trained for, or one of the same shape; it must stay open as long.
            files: names and GGUF files.

        Raises:
            ModelLoadError: a file is missing, damaged, no LoRA adapter, or does not fit the model; none is loaded then.
        """
        with reading("adapters"):
            self._files = {name: Path(file).absolute() for name, file in files.items()}
        self.names = tuple(files)
        self._pointers: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        with llama_log().captured(), ExitStack() as undo:
            undo.callback(self.close)
            try:
                for name, path in self._files.items():
                    parts = model_parts(os.fspath(path))
                    self._pointers[name] = _load(model, path)
                    with suppress(OSError):  # it was removed meanwhile
                        digest = _digest(path)
                        if is_unchanged(parts):
                            self._digests[name] = digest
            except DamagedError as error:
                raise ModelLoadError(f"adapter {name!r}: {path}: {error}") from error
            undo.pop_all()

    def digest(self, name: str) -> str:
        """Return "sha256:…" of an adapter's file, as it was loaded.

        Raises:
            ConfigError: no adapter of that name.
            OSError: the file was replaced while it was loaded.
        """
        self._path(name)
        if name not in self._digests:
            raise OSError(f"the file of adapter {name!r} was replaced while it was loaded")
        return self._digests[name]

    def use(self, ctx: Any, adapters: AdapterSet) -> None:
        """Have `ctx` compute with these adapters and no others, from its next step on.

        llama.cpp compares the set with the context's in about a microsecond, so nothing is cached here that a rebuilt
        context could contradict. Where the set differs, the next step also plans its graph again.

        Args:
            ctx: `llama_context *` of the adapters' model; it holds them until the next call, or until it is freed.
            adapters: names with scales; empty for the model alone.

        Raises:
            ConfigError: no adapter of one of the names; nothing has changed.
            PlanError: llama.cpp refuses the set.
            EngineClosedError: the adapters are freed.
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
        """Free the adapters. Twice is harmless; before the model is freed, and when no context computes with them."""
        while self._pointers:
            llama_cpp.llama_adapter_lora_free(self._pointers.popitem()[1])

    def _pointer(self, name: str) -> Any:
        self._path(name)
        if name not in self._pointers:
            raise EngineClosedError(f"adapter {name!r} is closed")
        return self._pointers[name]

    def _path(self, name: str) -> Path:
        if name not in self._files:
            raise ConfigError(f"no adapter {name!r}; loaded: {', '.join(self._files) or 'none'}")
        return self._files[name]


def _load(model: LlamaModel, path: Path) -> Any:
    header = read_header(path, _CONVERT)
    if header is not None:
        rules = (_metadata, _weights, _sizes, _uses)
        for reason in chain.from_iterable(rule(header, model) for rule in rules):
            raise DamagedError(reason)
    pointer = llama_cpp.llama_adapter_lora_init(model.pointer, os.fsencode(path))
    said = llama_log().drain()
    if not pointer:
        raise DamagedError(f"llama.cpp refuses it: {said[-1] if said else 'it gave no reason'}")
    if llama_cpp.llama_adapter_get_alora_n_invocation_tokens(pointer):
        llama_cpp.llama_adapter_lora_free(pointer)
        raise DamagedError(
            "is an activated LoRA, which starts at its own invocation tokens: give a plain LoRA adapter"
        )
    return pointer


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_N_HASHED):
            found.update(data)
    return f"sha256:{found.hexdigest()}"


# ---- rules: each yields what is wrong; llama.cpp would end the process, or compute nonsense ----

# Source: llama-adapter.cpp, llama_adapter_lora_init_impl, whose getters assert these types (gguf.h, gguf_type).
_KINDS = {
    "general.type": STRING,
    "general.architecture": STRING,
    "adapter.type": STRING,
    "adapter.lora.alpha": FLOAT,
}
# Source: convert_lora_to_gguf.py, --outtype; llama.cpp cannot multiply some others, such as integers.
_TYPES = {0: "f32", 1: "f16", 8: "q8_0", 30: "bf16"}
_EMBEDDING = "token_embd.weight"


def _pairs(header: Header) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    """Yield (name of the weight, a, b); llama.cpp itself refuses a tensor without its other half."""
    for name, tensor in header.tensors.items():
        base = name.removesuffix(".lora_a")
        other = header.tensors.get(f"{base}.lora_b")
        if base != name and other is not None:
            yield base, tensor, other


def _metadata(header: Header, model: LlamaModel) -> Iterator[str]:
    for key, kind in _KINDS.items():
        if header.kinds.get(key, kind) != kind:
            yield f"is damaged: {key} is of another type than llama.cpp reads; {AGAIN}"
    values = header.values
    if (kind_of_file := values.get("general.type", "model")) != "adapter":
        yield f"is of type {kind_of_file!r}, not an adapter; {_CONVERT}"
    if (kind_of_adapter := values.get("adapter.type")) != "lora":
        yield f"is an adapter of type {kind_of_adapter!r}; the one type that can be loaded is 'lora'"
    if (architecture := header.architecture) != model.architecture:
        yield f"is for a model of architecture {architecture!r}, and {model.name} is {model.architecture!r}"
    alpha = values.get("adapter.lora.alpha", 0.0)
    if not math.isfinite(float(alpha)):
        yield f"is damaged: adapter.lora.alpha is {alpha}; {AGAIN}"


def _weights(header: Header, model: LlamaModel) -> Iterator[str]:
    for name, tensor in header.tensors.items():
        if name.count(".lora_") > 1:
            yield f"is damaged: it has a tensor {name!r}; {AGAIN}"
        if name.endswith((".lora_a", ".lora_b")) and tensor.type not in _TYPES:
            known = ", ".join(_TYPES.values())
            yield f"stores {name} as type {tensor.type}, but must use one of {known}; convert it again"
    if not any(True for _ in _pairs(header)):
        yield f"holds no LoRA weights; {_CONVERT}"


def _sizes(header: Header, model: LlamaModel) -> Iterator[str]:
    """Compare a with b; llama.cpp compares their outer sizes with the model."""
    n_experts = model.metadata.get(f"{model.architecture}.expert_count", "0")
    for name, a, b in _pairs(header):
        n_rank = a.sizes[0 if name.endswith(_EMBEDDING) else 1]
        n_deep = n_experts if "exps." in name else "1"
        depths = {str(a.sizes[2]), str(b.sizes[2]), n_deep}
        if (n_rank, a.sizes[3], b.sizes[3], len(depths)) != (b.sizes[0], 1, 1, 1) or not n_rank:
            yield (
                f"does not fit {model.name}: {name} has lora_a of {list(a.sizes)} and lora_b of {list(b.sizes)}"
            )


def _uses(header: Header, model: LlamaModel) -> Iterator[str]:
    """Source: llama-graph.cpp, build_lora_mm, which takes an embedding's adapter the wrong way round where the output
    has the embedding's weights, and build_ffn, which asserts that NVFP4 is not adapted.
    """
    adapted = {name for name, _, _ in _pairs(header)}
    if _EMBEDDING in adapted and "output.weight" not in model.read_header().tensors:
        yield f"adapts {_EMBEDDING}, but {model.name} uses it for its output, too: llama.cpp cannot compute that"
    if model.file_type == "nvfp4" and any(".ffn_" in name for name in adapted):
        yield f"adapts feed-forward weights, but llama.cpp cannot adapt NVFP4 ones, such as those of {model.name}"
