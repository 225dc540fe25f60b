"""Embeddings and scores by plain calls of llama.cpp: one text alone in a context of its own size, for comparison."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Literal

import llama_cpp
import numpy as np

from cbatch.backend.llama.log import llama_log

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

Pooling = Literal["none", "mean", "cls", "last", "rank"]
_POOLINGS = ("none", "mean", "cls", "last", "rank")  # Source: llama.h, llama_pooling_type
_N_PIECES_MAX = 65_536


class PlainEmbedder:
    """A model, and a new context for every text: nothing of one text reaches another."""

    def __init__(self, path: str | os.PathLike[str], pooling: Pooling | None = None) -> None:
        """Load a model.

        Args:
            path: of the file.
            pooling: instead of the file's.
        """
        self._log = llama_log()
        self._log.install()
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, self._log.drain()
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._pooling = pooling

    def __enter__(self) -> PlainEmbedder:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Free the model."""
        llama_cpp.llama_model_free(self._model)
        self._log.remove()

    @property
    def n_embedding(self) -> int:
        """Numbers of an embedding."""
        return int(llama_cpp.llama_model_n_embd_out(self._model))

    def tokenize(self, text: str, *, has_special: bool = True) -> list[int]:
        """Return a text's tokens, what begins and ends a text included."""
        data = text.encode()
        ids = (ctypes.c_int32 * _N_PIECES_MAX)()
        n = llama_cpp.llama_tokenize(
            self._vocab, data, len(data), ids, _N_PIECES_MAX, has_special, False
        )
        assert n >= 0, text
        return list(ids[:n])

    def pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document. Source: llama.cpp's format_prompt_rerank."""
        template = llama_cpp.llama_model_chat_template(self._model, b"rerank")
        if template:
            text = template.replace(b"{query}", query.encode())
            text = text.replace(b"{document}", document.encode())
            ids = (ctypes.c_int32 * _N_PIECES_MAX)()
            n = llama_cpp.llama_tokenize(
                self._vocab, text, len(text), ids, _N_PIECES_MAX, False, True
            )
            return list(ids[:n])
        eos, sep = llama_cpp.llama_vocab_eos(self._vocab), llama_cpp.llama_vocab_sep(self._vocab)
        ended = [eos if eos >= 0 else sep] if llama_cpp.llama_vocab_get_add_eos(self._vocab) else []
        begun = (
            [llama_cpp.llama_vocab_bos(self._vocab)]
            if llama_cpp.llama_vocab_get_add_bos(self._vocab)
            else []
        )
        parted = [sep] if llama_cpp.llama_vocab_get_add_sep(self._vocab) else []
        asked, found = (self.tokenize(text, has_special=False) for text in (query, document))
        return [*begun, *asked, *ended, *parted, *found, *ended]

    def embed(self, token_ids: Sequence[int]) -> Floats:
        """Return the embedding of one text, not normalised: `(n_embedding,)`, with pooling none `(n_tokens,
        n_embedding)`, with rank `(n_outputs of the classifier,)`.
        """
        n = len(token_ids)
        params = llama_cpp.llama_context_default_params()
        params.embeddings, params.n_threads, params.n_threads_batch = True, 1, 1
        params.n_ctx = params.n_batch = params.n_ubatch = max(n, 32)
        if self._pooling is not None:
            params.pooling_type = _POOLINGS.index(self._pooling)
        context = llama_cpp.llama_init_from_model(self._model, params)
        assert context, self._log.drain()
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(token_ids):
                batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            run = (
                llama_cpp.llama_decode
                if llama_cpp.llama_get_memory(context)
                else llama_cpp.llama_encode
            )
            assert run(context, batch) == 0
            return self._read(context, n)
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)

    def score(self, query: str, document: str) -> float:
        """Return the classifier's first output of a pair: a raw logit, or of a Qwen3 the share of yes."""
        return float(self.embed(self.pair(query, document))[0])

    def _read(self, context: object, n: int) -> Floats:
        kind = _POOLINGS[llama_cpp.llama_pooling_type(context)]
        if kind == "none":
            rows = [llama_cpp.llama_get_embeddings_ith(context, i) for i in range(n)]
            return np.stack([_copied(row, self.n_embedding) for row in rows])
        size = llama_cpp.llama_model_n_cls_out(self._model) if kind == "rank" else self.n_embedding
        return _copied(llama_cpp.llama_get_embeddings_seq(context, 0), size)


def _copied(numbers: object, n: int) -> Floats:
    assert numbers, "llama.cpp has no embedding"
    copied: Floats = np.ctypeslib.as_array(numbers, (n,)).copy()
    return copied
