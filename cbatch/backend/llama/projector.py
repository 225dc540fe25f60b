"""Pictures become rows of embeddings: by llama.cpp's libmtmd, and a projector's file that belongs to the model."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.bindings import llama_cpp, mtmd_bindings
from cbatch.backend.llama.bitmaps import pillow, pixels_of
from cbatch.backend.llama.fingerprint import file_digest, model_parts
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.openmp import end_team
from cbatch.errors import ModelLoadError, PlanError, PromptError, RequestFailedError
from cbatch.support.checks import readable
from cbatch.support.picture_tokens import N_ROWS_MAX, ids_of, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel

_N_BYTES_KEPT = 2**28
"""Bytes of rows that are kept for later requests, besides those of running ones. Our choice."""

_N_NUMBERS_KEPT = 2**16
"""Pictures whose numbers are known, so that their cells are found again. Our choice."""

# Source: tools/mtmd/mtmd.h, enum mtmd_input_chunk_type
_TEXT, _IMAGE = 0, 1


class _Rows:
    """The rows of one picture, or of one part of it."""

    __slots__ = ("__weakref__", "values")

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.values = values


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as a prompt has it: the model's own tokens around it, and its rows under their ids."""

    tokens: Sequence[int]
    rows: Sequence[_Rows]
    """What holds the rows in memory."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(rows.values.nbytes for rows in self.rows)


def n_projector_bytes(path: str) -> int:
    """Return the bytes of a projector's file.

    Raises:
        ModelLoadError: there is none, or it has no encoder of pictures: llama.cpp would take it for something else.
        IncompatibleLlamaError: libmtmd is not there.
    """
    caps = _bindings().mtmd_get_cap_from_file(os.fsencode(path))
    if not caps.inp_vision:
        raise ModelLoadError(
            f"{readable(path)} has no encoder of pictures: mmproj takes the file that belongs to the model, often "
            "named mmproj-….gguf"
        )
    return os.stat(path).st_size


def _bindings() -> Any:
    """Return libmtmd's bindings; its lines go where llama.cpp's do."""
    mtmd, log = mtmd_bindings(), llama_log()
    mtmd.mtmd_log_set(log.callback, ctypes.c_void_p(log.ring))
    return mtmd


class Projector:
    """Encodes pictures. From any thread; one picture at a time."""

    def __init__(
        self, model: LlamaModel, path: str, n_threads: int, *, is_on_device: bool = False
    ) -> None:
        """Load a projector's file.

        Args:
            model: whose embeddings it gives.
            path: the GGUF file.
            n_threads: that encode a picture.
            is_on_device: a device encodes them.

        Raises:
            ModelLoadError: it is no projector, not of this model, or of a kind that is not supported.
            ConfigError: Pillow is not installed.
        """
        pillow()  # before anything is loaded
        self._mtmd = mtmd = _bindings()
        self._model, self.name = model, path
        self._n_embd = int(llama_cpp.llama_model_n_embd_inp(model.pointer))
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()
        self._n_kept_bytes = 0
        self._known: weakref.WeakValueDictionary[bytes, Picture] = weakref.WeakValueDictionary()
        self._rows: weakref.WeakValueDictionary[int, _Rows] = weakref.WeakValueDictionary()
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._n_numbers = 0
        self.n_encoded = 0
        """Pictures that were encoded: one that is known is not encoded again."""
        n_projector_bytes(path)
        self.digest = file_digest(model_parts(path))
        """What tells this file from another."""
        params = mtmd.mtmd_context_params_default()
        params.use_gpu = is_on_device
        params.print_timings, params.n_threads = False, n_threads
        self._ctx: Any = mtmd.mtmd_init_from_file(os.fsencode(path), model.pointer, params)
        llama_log().drain()
        if not self._ctx:
            said = "; ".join(llama_log().recent[-2:])
            raise ModelLoadError(
                f"{readable(path)} is no projector of this model: {said or 'llama.cpp gave no reason'}"
            )
        try:
            self._check_kind()
        except ModelLoadError:
            self.close()
            raise

    def _check_kind(self) -> None:
        mtmd = self._mtmd
        if mtmd.mtmd_decode_use_mrope(self._ctx):
            kind = "its pictures have positions in two dimensions (M-RoPE)"
        elif mtmd.mtmd_decode_use_non_causal(self._ctx, None):
            kind = "the rows of a picture attend to later ones"
        else:
            return
        raise ModelLoadError(
            f"{readable(self.name)} cannot be used yet: {kind}. Projectors as LLaVA's, Pixtral's, SmolVLM's and "
            "InternVL's can"
        )

    def picture(self, data: bytes) -> Picture:
        """Return a picture's tokens and rows; it is encoded unless it is known.

        Raises:
            PromptError: the file cannot be decoded.
            RequestFailedError: llama.cpp could not encode it.
        """
        digest = hashlib.sha256(data).digest()
        found = self._known.get(digest)
        if found is None:
            pixels = pixels_of(data)
            with self._lock, self._model.in_use():
                found = self._known.get(digest) or self._encode(pixels, digest)
                self._known[digest] = found
        with self._lock:
            self._keep(digest, found)
        return found

    def rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the rows that ids stand for, ids one after another of one picture: (n, n_embd) float32."""
        number, i = place_of(tokens[0])
        found = self._rows[number].values[i : i + len(tokens)]
        if len(found) != len(tokens):
            raise PlanError(f"{len(tokens)} rows of a picture from row {i}, which has {len(found)}")
        return found

    def _encode(self, pixels: NDArray[np.uint8], digest: bytes) -> Picture:
        mtmd, ctx = self._mtmd, self._ctx
        height, width, _ = pixels.shape
        pixels = np.ascontiguousarray(pixels)
        at = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(width, height, at)
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(None, bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            code = mtmd.mtmd_tokenize_from_parts(ctx, chunks, parts, 1, False)
            if code != 0:
                raise PromptError(
                    f"llama.cpp cannot prepare a picture of {width:,} × {height:,} pixels (code {code})"
                )
            tokens: list[int] = []
            rows: list[_Rows] = []
            for i in range(mtmd.mtmd_input_chunks_size(chunks)):
                chunk = mtmd.mtmd_input_chunks_get(chunks, i)
                if mtmd.mtmd_input_chunk_get_type(chunk) == _TEXT:
                    n_text = ctypes.c_size_t()
                    text = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n_text))
                    tokens += text[: n_text.value]
                    continue
                values = self._encode_chunk(chunk)
                number = self._number(digest + len(rows).to_bytes(4, "little"))
                rows.append(_Rows(values))
                self._rows[number] = rows[-1]
                tokens += ids_of(number, len(values))
            self.n_encoded += 1
            return Picture(tokens, rows)
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _encode_chunk(self, chunk: Any) -> NDArray[np.float32]:
        mtmd, ctx = self._mtmd, self._ctx
        n_rows = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        if not 0 < n_rows < N_ROWS_MAX:
            raise PromptError(f"a picture has {n_rows:,} rows")
        code = mtmd.mtmd_encode_chunk(ctx, chunk)
        end_team()
        if code != 0:
            raise RequestFailedError(f"llama.cpp could not encode a picture (code {code})")
        at = ctypes.cast(mtmd.mtmd_get_output_embd(ctx), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(at, shape=(n_rows, self._n_embd)).copy()

    def _number(self, key: bytes) -> int:
        """Return the number of a part of a picture: the one that it had, where that is known."""
        if key not in self._numbers:
            self._numbers[key] = self._n_numbers
            self._n_numbers += 1
            if len(self._numbers) > _N_NUMBERS_KEPT:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(key)
        return self._numbers[key]

    def _keep(self, digest: bytes, picture: Picture) -> None:
        """Keep a picture for later requests; the longest unused ones go. With the lock."""
        if digest not in self._kept:
            self._n_kept_bytes += picture.n_bytes
        self._kept[digest] = picture
        self._kept.move_to_end(digest)
        while self._n_kept_bytes > _N_BYTES_KEPT and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self._n_kept_bytes -= gone.n_bytes

    def close(self) -> None:
        """Free the projector. Twice is harmless."""
        with self._lock:
            ctx, self._ctx = self._ctx, None
            if ctx:
                self._mtmd.mtmd_free(ctx)
            self._kept.clear()
