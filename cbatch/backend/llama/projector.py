"""Pictures become rows of embeddings: by llama.cpp's libmtmd, and a projector's file that belongs to the model."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.bindings import llama_cpp, mtmd_bindings
from cbatch.backend.llama.bitmaps import pillow, pixels_of
from cbatch.backend.llama.fingerprint import file_digest, model_parts
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.openmp import end_team
from cbatch.backend.llama.positions import FlatPicture
from cbatch.errors import ModelLoadError, PlanError, PromptError, RequestFailedError
from cbatch.support.checks import readable
from cbatch.support.picture_tokens import (
    FIRST_PICTURE,
    N_ROWS_MAX,
    ids_of,
    n_rows_at,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel

_N_BYTES_KEPT = 2**28
"""Bytes of rows that are kept for later requests, besides those of running ones. Our choice."""

_N_NUMBERS_KEPT = 2**16
"""Pictures whose numbers are known, so that their cells are found again. Our choice."""

# Source: tools/mtmd/mtmd.h, enum mtmd_input_chunk_type
_TEXT, _IMAGE = 0, 1

_ORDER = (0, 2, 1, 3)
"""Of the numbers t, x, y, z in a batch. Source: tools/mtmd/mtmd-helper-common.h, set_position_mrope_2d."""

_N_SIDE_TRIED = 64
"""Pixels of each side of a picture that tells the kind of a projector. Our choice."""


class _Rows:
    """The rows of one picture, or of one part of it."""

    __slots__ = ("__weakref__", "attends_ahead", "n_positions", "offsets", "values")

    def __init__(
        self,
        values: NDArray[np.float32],
        offsets: NDArray[np.int32] | None = None,
        n_positions: int = 0,
        *,
        attends_ahead: bool = False,
    ) -> None:
        """Take the embeddings; and where the rows share a position, what llama.cpp adds to it for each of them.

        Args:
            values: (n_rows, n_embd) float32.
            offsets: (4, n_rows) int32: of time, height, width and one more; None where each has the next position.
            n_positions: how many positions further on the sequence goes on behind them, with `offsets`.
            attends_ahead: each row attends to later ones too.
        """
        self.values, self.offsets, self.n_positions = values, offsets, n_positions
        self.attends_ahead = attends_ahead


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
        self,
        model: LlamaModel,
        path: str,
        n_threads: int,
        *,
        n_ubatch: int,
        is_on_device: bool = False,
    ) -> None:
        """Load a projector's file.

        Args:
            model: whose embeddings it gives.
            path: the GGUF file.
            n_threads: that encode a picture.
            n_ubatch: most rows that llama.cpp computes together.
            is_on_device: a device encodes them.

        Raises:
            ModelLoadError: it is no projector, not of this model, or of a kind that is not supported.
            ConfigError: Pillow is not installed.
        """
        pillow()  # before anything is loaded
        self._mtmd = mtmd = _bindings()
        self._model, self.name, self._n_ubatch = model, path, n_ubatch
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
        self.has_flat_pictures = bool(mtmd.mtmd_decode_use_mrope(self._ctx))
        """Whether the rows of a picture share positions (M-RoPE)."""
        attends_ahead = bool(mtmd.mtmd_decode_use_non_causal(self._ctx, None))
        self.has_whole_pictures = self.has_flat_pictures or attends_ahead
        """Whether all rows of a picture must be computed one after another, or at once."""
        try:
            if self.has_whole_pictures:
                self._try_kind()
        except PromptError as error:
            self.close()
            raise ModelLoadError(f"{readable(self.name)} cannot be used: {error}") from None

    def _try_kind(self) -> None:
        """Refuse what cannot be computed of any picture, by a small one. Raises as `_shape_of`."""
        with self._chunks(np.zeros((_N_SIDE_TRIED, _N_SIDE_TRIED, 3), np.uint8)) as chunks:
            for chunk in chunks:
                if self._mtmd.mtmd_input_chunk_get_type(chunk) != _TEXT:
                    self._shape_of(chunk)

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

    def offsets(self, tokens: Sequence[int]) -> NDArray[np.int32] | None:
        """Return what is added to a picture's position for rows of it: (4, n) int32; None where positions ascend."""
        number, i = place_of(tokens[0])
        offsets = self._rows[number].offsets
        return None if offsets is None else offsets[:, i : i + len(tokens)]

    def attends_ahead(self, token: int) -> bool:
        """Whether the rows of a picture attend to later ones."""
        return self._rows[place_of(token)[0]].attends_ahead

    def flat(self, tokens: Sequence[int], start: int = 0) -> list[FlatPicture]:
        """Return the whole pictures in tokens whose rows share positions; `start` is the first token's index."""
        found: list[FlatPicture] = []
        if not self.has_flat_pictures or max(tokens, default=0) < FIRST_PICTURE:
            return found
        i = 0
        while i < len(tokens):
            n = n_rows_at(tokens, i)
            if n and (rows := self._rows[place_of(tokens[i])[0]]).offsets is not None:
                found.append(FlatPicture(start + i, n, rows.n_positions))
            i += n or 1
        return found

    @contextmanager
    def _chunks(self, pixels: NDArray[np.uint8]) -> Iterator[Sequence[Any]]:
        """Lend the parts that llama.cpp makes of a picture."""
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
            n_chunks = mtmd.mtmd_input_chunks_size(chunks)
            yield [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(n_chunks)]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _encode(self, pixels: NDArray[np.uint8], digest: bytes) -> Picture:
        mtmd = self._mtmd
        tokens: list[int] = []
        rows: list[_Rows] = []
        with self._chunks(pixels) as chunks:
            for chunk in chunks:
                if mtmd.mtmd_input_chunk_get_type(chunk) == _TEXT:
                    n_text = ctypes.c_size_t()
                    text = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n_text))
                    tokens += text[: n_text.value]
                    continue
                number = self._number(digest + len(rows).to_bytes(4, "little"))
                rows.append(self._encode_chunk(chunk))
                self._rows[number] = rows[-1]
                tokens += ids_of(number, len(rows[-1].values))
        self.n_encoded += 1
        return Picture(tokens, rows)

    def _shape_of(self, chunk: Any) -> tuple[int, NDArray[np.int32] | None, bool]:
        """Return the rows of a picture's part, their offsets, and whether they attend ahead; see `_Rows`.

        Raises:
            PromptError: it cannot be computed.
        """
        mtmd = self._mtmd
        n_rows = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        if not 0 < n_rows < N_ROWS_MAX:
            raise PromptError(f"a picture has {n_rows:,} rows")
        attends_ahead = bool(mtmd.mtmd_decode_use_non_causal(self._ctx, chunk))
        if attends_ahead and n_rows > self._n_ubatch:
            raise PromptError(
                f"a picture has {n_rows:,} rows, which must be computed together; n_ubatch={self._n_ubatch:,} allows "
                f"fewer: set n_ubatch and n_batch to {n_rows:,} or more"
            )
        if not self.has_flat_pictures:
            return n_rows, None, attends_ahead
        places = (mtmd.mtmd_decoder_pos * n_rows)()
        mtmd.mtmd_helper_image_get_decoder_pos(
            mtmd.mtmd_input_chunk_get_tokens_image(chunk), 0, places
        )
        offsets = np.frombuffer(places, np.int32).reshape(n_rows, 4)[:, _ORDER].T.copy()
        if offsets[0].any():
            raise PromptError("the rows of a picture have positions of an unknown kind")
        return n_rows, offsets, attends_ahead

    def _encode_chunk(self, chunk: Any) -> _Rows:
        mtmd, ctx = self._mtmd, self._ctx
        n_rows, offsets, attends_ahead = self._shape_of(chunk)
        code = mtmd.mtmd_encode_chunk(ctx, chunk)
        end_team()
        if code != 0:
            raise RequestFailedError(f"llama.cpp could not encode a picture (code {code})")
        at = ctypes.cast(mtmd.mtmd_get_output_embd(ctx), ctypes.POINTER(ctypes.c_float))
        values = np.ctypeslib.as_array(at, shape=(n_rows, self._n_embd)).copy()
        n_positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
        return _Rows(values, offsets, n_positions, attends_ahead=attends_ahead)

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
