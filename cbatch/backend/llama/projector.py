"""Pictures and sounds become rows of embeddings: by llama.cpp's libmtmd, and a projector's file for the model."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cbatch.backend.bindings import build_name, llama_cpp, mtmd_bindings
from cbatch.backend.llama.bitmaps import pillow, pixels_of, size_of
from cbatch.backend.llama.fingerprint import digest_of_loaded, model_parts
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.openmp import end_team
from cbatch.backend.llama.positions import FlatPicture
from cbatch.backend.llama.watch import GraphWatch
from cbatch.backend.llama.waves import samples_of, sound_libraries
from cbatch.errors import (
    ConfigError,
    EngineClosedError,
    ModelLoadError,
    PlanError,
    PromptError,
    RequestFailedError,
    words_of,
)
from cbatch.support import moments
from cbatch.support.checks import readable
from cbatch.support.interrupts import Uses
from cbatch.support.picture_tokens import (
    N_ROWS_MAX,
    edges_of,
    ids_of,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.media import Medium

_N_BYTES_KEPT = 2**28
"""Bytes of rows that are kept for later requests, besides those of running ones. Our choice."""

_N_NUMBERS_KEPT = 2**16
"""Pictures and sounds whose numbers are known, so that their cells are found again. Our choice."""

_N_NUMBER_BYTES = 4

# Source: tools/mtmd/mtmd.h, enum mtmd_input_chunk_type
_TEXT, _SOUND = 0, 2

_ORDER = (0, 2, 1, 3)
"""Of the numbers t, x, y, z in a batch. Source: tools/mtmd/mtmd-helper-common.h, set_position_mrope_2d."""

_N_PIXELS_QUICK, _N_SECONDS_QUICK = 2**24, 120
"""Largest picture and longest sound that are decoded among others: larger ones take long. Our choice."""

_N_SIDE_TRIED = 64
"""Pixels of each side of a picture that tells the kind of a projector. Our choice."""

NO_EYES = "this model's projector has no encoder of pictures"
NO_EARS = "this model's projector has no encoder of sound"


class _Rows:
    """The rows of one picture or sound, or of one part of it."""

    __slots__ = (
        *("__weakref__", "attends_ahead", "n", "n_positions", "number", "offsets", "values"),
    )

    def __init__(
        self,
        number: int,
        n: int,
        offsets: NDArray[np.int32] | None = None,
        n_positions: int = 0,
        *,
        attends_ahead: bool = False,
    ) -> None:
        """Take the number and how many rows there are; and what llama.cpp adds to a position that they share.

        Args:
            number: of the picture's part; see `ids_of`.
            offsets: (4, n) int32: of time, height, width and one more; None where each has the next position.
            n_positions: how many positions further on the sequence goes on behind them, with `offsets`.
            attends_ahead: each row attends to later ones too.
        """
        self.number, self.n = number, n
        self.offsets, self.n_positions = offsets, n_positions
        self.attends_ahead = attends_ahead
        self.values: NDArray[np.float32] | None = None
        """(n, n_embd) float32; None until they are encoded."""


@dataclass(eq=False)
class Picture:
    """A picture or a sound as a prompt has it: the model's own tokens around it, and ids for its rows."""

    digest: bytes
    """What tells it from others."""
    tokens: Sequence[int]
    rows: Sequence[_Rows]
    """What holds the rows in memory."""
    medium: Medium
    """What is to be encoded."""
    n_embd: int
    """Numbers of a row."""
    is_slow: bool = False
    """Whether decoding it takes long."""

    @property
    def is_encoded(self) -> bool:
        """Whether its rows are there."""
        return all(rows.values is not None for rows in self.rows)

    @property
    def key(self) -> str:
        """What tells it from all others, in any process."""
        return f"{'sound' if self.medium.is_sound else 'picture'} {self.digest.hex()}"

    def state(self) -> NDArray[np.uint8]:
        """Return the rows; see `PromptMedium`."""
        found = [rows.values for rows in self.rows if rows.values is not None]
        return np.concatenate(found).ravel().view(np.uint8)

    def restore(self, data: NDArray[np.uint8]) -> None:
        """Take rows in place of encoding; see `PromptMedium`."""
        n_rows = [rows.n for rows in self.rows]
        if data.size != sum(n_rows) * self.n_embd * _N_NUMBER_BYTES:
            raise ValueError(
                f"have {data.size:,} bytes, which is not the size of {sum(n_rows):,} rows"
            )
        values = data.view(np.float32).reshape(-1, self.n_embd)
        if not np.isfinite(values).all():
            raise ValueError("hold NaN or infinite numbers")
        for rows, part in zip(self.rows, np.split(values, np.cumsum(n_rows)[:-1]), strict=True):
            rows.values = part
        self.end()

    def end(self) -> None:
        """Drop the file, because all rows are encoded."""
        self.medium = replace(self.medium, data=b"")

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(rows.values.nbytes for rows in self.rows if rows.values is not None)

    @property
    def n_sound_rows(self) -> int:
        """How many rows are of a sound."""
        return sum(rows.n for rows in self.rows) if self.medium.is_sound else 0


def _bindings() -> Any:
    """Return libmtmd's bindings; its lines go where llama.cpp's do."""
    mtmd, log = mtmd_bindings(), llama_log()
    mtmd.mtmd_log_set(log.callback, ctypes.c_void_p(log.ring))
    return mtmd


class _Bitmap(NamedTuple):
    pointer: Any
    """`mtmd_bitmap *`, to be freed."""
    size: str
    """In words, for errors."""
    is_slow: bool


class Projector:
    """Encodes pictures and sounds. From any thread: several are decoded at once, and one is encoded."""

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
            n_ubatch: most rows that llama.cpp computes together.

        Raises:
            ModelLoadError: it is not a projector, not of this model, or of a kind that is not supported.
            ConfigError: what decodes the only kind of file that it takes is not installed.
        """
        self._mtmd = _bindings()
        self._model, self.name, self._n_ubatch = model, path, n_ubatch
        self._n_embd = int(llama_cpp.llama_model_n_embd_inp(model.pointer))
        self._uses = Uses()
        self._lock = self._uses.changed
        """Guards all that is known; and how many calls of libmtmd are under way, for which `close` waits."""
        self._encoding, self._next = threading.Lock(), threading.Lock()
        """Held while libmtmd encodes, for its result is in the context; and by the one that waits for that."""
        self._is_stopped = False
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()
        self._n_kept_bytes = 0
        self._known: weakref.WeakValueDictionary[bytes, Picture] = weakref.WeakValueDictionary()
        self._rows: weakref.WeakValueDictionary[int, _Rows] = weakref.WeakValueDictionary()
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._n_numbers = 0
        self.n_encoded = 0
        """Pictures and sounds that were encoded: one that is known is not encoded again."""
        self._watch = GraphWatch()
        """What breaks off an encoding under way."""
        self._ctx: Any = None
        parts = model_parts(path)
        try:
            self._ctx = self._made(n_threads, is_on_device=is_on_device)
            self.digest = digest_of_loaded(parts)
            """What tells this file from another."""
            if not self.digest:
                raise ModelLoadError(
                    f"{readable(path)}: the file was replaced while it was loaded: load the engine again"
                )
            self._find_what_it_takes()
        except BaseException:
            self.close()
            raise

    def _made(self, n_threads: int, *, is_on_device: bool) -> Any:
        """Return a new `mtmd_context *`. Raises a ModelLoadError."""
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu = is_on_device
        params.print_timings, params.n_threads = False, n_threads
        if not is_on_device:
            self._watch.watch(params)
        ctx = self._mtmd.mtmd_init_from_file(os.fsencode(self.name), self._model.pointer, params)
        if not ctx:
            why = llama_log().reason()
            raise ModelLoadError(f"{readable(self.name)} is not a projector of this model: {why}")
        return ctx

    def _find_what_it_takes(self) -> None:
        mtmd, ctx = self._mtmd, self._ctx
        has_eyes, has_ears = mtmd.mtmd_support_vision(ctx), mtmd.mtmd_support_audio(ctx)
        self.picture_refusal = _refusal(pillow) if has_eyes else NO_EYES
        """Why chats cannot have pictures; empty where they can."""
        self.sound_refusal = _refusal(sound_libraries) if has_ears else NO_EARS
        """Why chats cannot have sound; empty where they can."""
        self.audio_rate = int(mtmd.mtmd_get_audio_sample_rate(ctx))
        """Samples per second that its encoder of sound takes."""
        self.has_flat_pictures = bool(mtmd.mtmd_decode_use_mrope(ctx))
        """Whether the rows of a picture share positions (M-RoPE)."""
        attends_ahead = bool(mtmd.mtmd_decode_use_non_causal(ctx, None))
        self.has_whole_pictures = self.has_flat_pictures or attends_ahead
        """Whether all rows of a picture must be computed one after another, or at once."""
        if self.picture_refusal and self.sound_refusal:
            raise ConfigError(self.picture_refusal if has_eyes else self.sound_refusal)
        if self.has_whole_pictures and has_eyes:
            self._try_kind()

    @cached_property
    def fingerprint(self) -> Mapping[str, str]:
        """What rows depend on, by readable names: other versions may make other pixels and samples of a file."""
        decoders = []
        if not self.picture_refusal:
            decoders.append(f"pillow {pillow().__version__}")
        if not self.sound_refusal:
            soundfile, soxr = sound_libraries()
            decoders.append(
                f"libsndfile {soundfile.__libsndfile_version__}, soxr {soxr.__version__}"
            )
        return {
            "projector": self.digest,
            "llama-cpp-python": build_name(),
            "decoders": ", ".join(decoders),
        }

    def _try_kind(self) -> None:
        """Refuse what cannot be computed of any picture, by a small one. Raises a ModelLoadError."""
        bitmap = self._mtmd.mtmd_bitmap_init(_N_SIDE_TRIED, _N_SIDE_TRIED, None)
        try:
            with self._parts(_Bitmap(bitmap, "a picture", is_slow=False)) as chunks:
                for chunk in chunks:
                    if self._mtmd.mtmd_input_chunk_get_type(chunk) != _TEXT:
                        self._rows_of(chunk, 0)
        except PromptError as error:
            raise ModelLoadError(f"{readable(self.name)} cannot be used: {error}") from None

    def try_out(self) -> None:
        """Encode a gray picture and a second of silence: where llama.cpp asserts sizes, the process ends here."""
        gray = (ctypes.c_uint8 * (3 * _N_SIDE_TRIED**2))()
        silence = (ctypes.c_float * max(self.audio_rate, 1))()
        if self.picture_refusal != NO_EYES:
            self._encode_all(self._mtmd.mtmd_bitmap_init(_N_SIDE_TRIED, _N_SIDE_TRIED, gray))
        if self.sound_refusal != NO_EARS:
            self._encode_all(self._mtmd.mtmd_bitmap_init_from_audio(len(silence), silence))

    def _encode_all(self, bitmap: Any) -> None:
        with self._parts(_Bitmap(bitmap, "a trial", is_slow=False)) as chunks:
            for chunk in chunks:
                if self._mtmd.mtmd_input_chunk_get_type(chunk) != _TEXT:
                    self._encode_chunk(chunk)

    def picture(self, medium: Medium) -> Picture:
        """Return a picture or a sound as tokens; nothing is encoded.

        Raises:
            PromptError: the file is refused. Pixels are not decoded here, so `encode` may refuse a damaged picture.
        """
        kind = bytes([medium.is_sound, medium.are_samples])
        digest = hashlib.sha256(kind + medium.data).digest()
        with self._lock:
            found = self._known.get(digest)
        if found is None:
            counted = self._counted(medium, digest)
            with self._lock:
                found = self._known.setdefault(digest, counted)
                self._rows.update({rows.number: rows for rows in found.rows})
        return found

    def encode(self, pictures: Sequence[Picture]) -> None:
        """Encode pictures and sounds that have no rows yet; `moments.pause` before each piece. From any thread.

        Parts that an interrupted call or another thread has encoded are not encoded again.

        Raises:
            PromptError: a file cannot be decoded.
            RequestFailedError: llama.cpp could not encode it.
        """
        for picture in pictures:
            medium = picture.medium  # another thread may drop it
            if not picture.is_encoded:
                self._encode(picture, medium)
            with self._lock:
                self._keep(picture)

    def rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the rows that ids stand for, ids one after another of one picture: (n, n_embd) float32."""
        number, i = place_of(tokens[0])
        values = self._rows[number].values
        if values is None or len(values) < i + len(tokens):
            n = 0 if values is None else len(values)
            raise PlanError(
                f"rows {i} … {i + len(tokens) - 1} of a picture are needed, but only {n} rows are encoded"
            )
        return values[i : i + len(tokens)]

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
        edges = edges_of(tokens) if self.has_flat_pictures else ()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            rows = self._rows[place_of(tokens[begin])[0]]
            if rows.offsets is not None:
                found.append(FlatPicture(start + begin, end - begin, rows.n_positions))
        return found

    def _counted(self, medium: Medium, digest: bytes) -> Picture:
        tokens: list[int] = []
        parts: list[_Rows] = []
        bitmap = self._bitmap(medium, is_counted=True)
        with self._parts(bitmap) as chunks:
            for chunk in chunks:
                if self._mtmd.mtmd_input_chunk_get_type(chunk) == _TEXT:
                    n_text = ctypes.c_size_t()
                    text = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n_text))
                    tokens += text[: n_text.value]
                    continue
                rows = self._rows_of(chunk, self._number(digest, len(parts)))
                parts.append(rows)
                tokens += ids_of(rows.number, rows.n)
        return Picture(digest, tokens, parts, medium, self._n_embd, bitmap.is_slow)

    def _n_rows(self, chunk: Any) -> int:
        n_rows = int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        if not 0 < n_rows < N_ROWS_MAX:
            raise PromptError(
                f"a picture or sound takes {n_rows:,} rows, but must take 1 … {N_ROWS_MAX - 1:,}"
            )
        return n_rows

    def _rows_of(self, chunk: Any, number: int) -> _Rows:
        """Return the rows of a part of a picture or sound, not encoded.

        Raises:
            PromptError: it cannot be computed.
        """
        mtmd, n_rows = self._mtmd, self._n_rows(chunk)
        with self._in_use() as ctx:
            attends_ahead = bool(mtmd.mtmd_decode_use_non_causal(ctx, chunk))
        if attends_ahead and n_rows > self._n_ubatch:
            raise PromptError(
                f"a picture takes {n_rows:,} rows, which must be computed together; n_ubatch={self._n_ubatch:,} is "
                "too small: "
                f"set n_ubatch and n_batch to {n_rows:,} or more"
            )
        is_sound = mtmd.mtmd_input_chunk_get_type(chunk) == _SOUND
        if is_sound or not self.has_flat_pictures:
            return _Rows(number, n_rows, attends_ahead=attends_ahead)
        places = (mtmd.mtmd_decoder_pos * n_rows)()
        mtmd.mtmd_helper_image_get_decoder_pos(
            mtmd.mtmd_input_chunk_get_tokens_image(chunk), 0, places
        )
        offsets = np.frombuffer(places, np.int32).reshape(n_rows, 4)[:, _ORDER].T.copy()
        if offsets[0].any():
            raise PromptError(
                "llama.cpp gives the rows of a picture positions of a kind that cbatch does not know"
            )
        n_positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
        return _Rows(number, n_rows, offsets, n_positions, attends_ahead=attends_ahead)

    @contextmanager
    def _parts(self, bitmap: _Bitmap) -> Iterator[list[Any]]:
        """Have the parts that libmtmd makes of a bitmap for the block, and free it. Raises a PromptError."""
        mtmd = self._mtmd
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(None, bitmap.pointer)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            with self._in_use() as ctx:
                code = mtmd.mtmd_tokenize_from_parts(ctx, chunks, parts, 1, False)
            if code != 0:
                raise PromptError(f"llama.cpp cannot prepare {bitmap.size} (code {code})")
            n_chunks = mtmd.mtmd_input_chunks_size(chunks)
            yield [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(n_chunks)]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap.pointer)

    def _bitmap(self, medium: Medium, *, is_counted: bool) -> _Bitmap:
        """Return a picture or a sound for libmtmd; a picture whose rows are only counted has no pixels.

        Raises:
            PromptError: the file is refused.
        """
        moments.pause()
        if medium.is_sound:
            samples = samples_of(medium.data, self.audio_rate, are_samples=medium.are_samples)
            first = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            bitmap = self._mtmd.mtmd_bitmap_init_from_audio(len(samples), first)
            seconds = len(samples) / self.audio_rate
            return _Bitmap(bitmap, f"a sound of {seconds:,.1f} s", seconds > _N_SECONDS_QUICK)
        pixels = None if is_counted else np.ascontiguousarray(pixels_of(medium.data))
        width, height = size_of(medium.data) if pixels is None else pixels.shape[1::-1]
        byte = ctypes.POINTER(ctypes.c_uint8)
        at = None if pixels is None else pixels.ctypes.data_as(byte)
        bitmap = self._mtmd.mtmd_bitmap_init(width, height, at)
        size = f"a picture of {width:,} × {height:,} pixels"
        return _Bitmap(bitmap, size, width * height > _N_PIXELS_QUICK)

    def _encode(self, picture: Picture, medium: Medium) -> None:
        with self._parts(self._bitmap(medium, is_counted=False)) as chunks:
            media = [c for c in chunks if self._mtmd.mtmd_input_chunk_get_type(c) != _TEXT]
            if [self._n_rows(chunk) for chunk in media] != [rows.n for rows in picture.rows]:
                raise RequestFailedError(
                    "llama.cpp encoded another number of rows of a picture than it announced"
                )
            for rows, chunk in zip(picture.rows, media, strict=True):
                moments.pause()
                with self._in_turn():
                    if rows.values is None:
                        rows.values = self._encode_chunk(chunk)
                        self.n_encoded += picture.is_encoded
        picture.end()

    def _encode_chunk(self, chunk: Any) -> NDArray[np.float32]:
        mtmd = self._mtmd
        with self._in_use() as ctx:
            code = mtmd.mtmd_encode_chunk(ctx, chunk)
            end_team()
            if self._is_stopped:
                raise EngineClosedError(f"{readable(self.name)}: the engine is closed")
            if code != 0:
                raise RequestFailedError(
                    f"llama.cpp could not encode a picture or sound (code {code})"
                )
            at = ctypes.cast(mtmd.mtmd_get_output_embd(ctx), ctypes.POINTER(ctypes.c_float))
            return np.ctypeslib.as_array(at, shape=(self._n_rows(chunk), self._n_embd)).copy()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Have the encoder for the block. A waiting thread is next: the parts of a long sound let others in."""
        with self._next:
            self._encoding.acquire()
        try:
            yield
        finally:
            self._encoding.release()

    def _number(self, digest: bytes, i_part: int) -> int:
        """Return the number of a part of a picture or sound: the one that it had, where that is known."""
        key = digest + i_part.to_bytes(4, "little")
        with self._lock:
            if key not in self._numbers:
                self._numbers[key] = self._n_numbers
                self._n_numbers += 1
                if len(self._numbers) > _N_NUMBERS_KEPT:
                    self._numbers.popitem(last=False)
            self._numbers.move_to_end(key)
            return self._numbers[key]

    def _keep(self, picture: Picture) -> None:
        """Keep a picture for later requests; the longest unused ones go. With the lock."""
        if picture.digest not in self._kept:
            self._n_kept_bytes += picture.n_bytes
        self._kept[picture.digest] = picture
        self._kept.move_to_end(picture.digest)
        while self._n_kept_bytes > _N_BYTES_KEPT and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self._n_kept_bytes -= gone.n_bytes

    @contextmanager
    def _in_use(self) -> Iterator[Any]:
        """Keep libmtmd's context, and the model, from being freed during the block."""
        with self._model.in_use(), self._uses.one(self._check_open):
            yield self._ctx

    def _check_open(self) -> None:
        if self._ctx is None or self._is_stopped:
            raise EngineClosedError(f"{readable(self.name)}: the engine is closed")

    def stop(self) -> None:
        """End the encoding under way, where the processor encodes, and refuse all later ones. From any thread."""
        with self._lock:
            self._is_stopped = True
            self._watch.stop()

    def close(self) -> None:
        """Free the projector. Twice is harmless."""
        self.stop()
        with self._lock:
            self._lock.wait_for(lambda: not self._uses.n)
            ctx, self._ctx = self._ctx, None
            if ctx:
                self._mtmd.mtmd_free(ctx)
            self._kept.clear()


def _refusal(libraries: Callable[[], object]) -> str:
    """Return why files cannot be decoded; empty where they can."""
    try:
        libraries()
    except ConfigError as error:
        return words_of(error)
    return ""
