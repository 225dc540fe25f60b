"""Greedy answers about pictures and sounds by plain llama.cpp and its own helper, one prompt alone in a new context."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp

from cbatch.backend.llama.log import llama_log

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


def _bitmap(given: NDArray[Any]) -> Any:
    if given.ndim == 1:
        samples = given.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return mtmd_cpp.mtmd_bitmap_init_from_audio(len(given), samples)
    pixels = given.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    return mtmd_cpp.mtmd_bitmap_init(given.shape[1], given.shape[0], pixels)


class PlainSeer:
    """A model with its projector."""

    def __init__(self, model: Path, projector: Path) -> None:
        """Load both."""
        self._log = llama_log()
        self._log.install()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        assert self._model, self._log.drain()
        own = mtmd_cpp.mtmd_context_params_default()
        own.use_gpu = own.print_timings = False
        self._mtmd = mtmd_cpp.mtmd_init_from_file(str(projector).encode(), self._model, own)
        assert self._mtmd, self._log.drain()

    def __enter__(self) -> PlainSeer:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Free both."""
        mtmd_cpp.mtmd_free(self._mtmd)
        llama_cpp.llama_model_free(self._model)
        self._log.remove()

    def answer(self, text: str, pictures: Sequence[NDArray[Any]], n: int) -> tuple[int, ...]:
        """Return `n` tokens that follow a text, in which each picture or sound (1-D) stands as `<__media__>`."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads = 512, 1
        ctx = llama_cpp.llama_init_from_model(self._model, params)
        n_past = self._compute(ctx, text, pictures)
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        found: list[int] = []
        while True:
            row = llama_cpp.llama_get_logits_ith(ctx, -1)
            found.append(int(np.argmax(np.ctypeslib.as_array(row, shape=(n_vocab,)))))
            if len(found) == n:
                break
            batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(found[-1]), 1)
            assert llama_cpp.llama_decode(ctx, batch) == 0
            n_past += 1
        llama_cpp.llama_free(ctx)
        return tuple(found)

    def _compute(self, ctx: int, text: str, pictures: Sequence[NDArray[Any]]) -> int:
        bitmaps = [_bitmap(p) for p in pictures]
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        data = text.encode()
        given = mtmd_cpp.mtmd_input_text(data, len(data), True, True)
        array = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
        code = mtmd_cpp.mtmd_tokenize(self._mtmd, chunks, ctypes.byref(given), array, len(bitmaps))
        assert code == 0
        n_past = ctypes.c_int32()
        code = mtmd_cpp.mtmd_helper_eval_chunks(
            self._mtmd, ctx, chunks, 0, 0, 512, True, ctypes.byref(n_past)
        )
        assert code == 0
        mtmd_cpp.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            mtmd_cpp.mtmd_bitmap_free(bitmap)
        return n_past.value
