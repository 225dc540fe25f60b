"""Vectors of texts: a second context on a model's weights, for micro-batches of whole texts.

Pooling is done here, from the vectors of tokens: llama.cpp's own mean is a product over the whole micro-batch, whose
rounding depends on the other texts. Only the scores of a classifier (`rank`) come from llama.cpp.

With embeddings on, a causal model of llama.cpp computes the whole last layer and the logits of every token, too. So for
the last token's vector all other tokens are computed with embeddings off and without outputs, then the last ones of all
texts together. A watch ends each graph at the vectors, before the logits; only a classifier's are behind them.
"""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.devices import computes_on_cpu
from cbatch.backend.host_limits import host_most
from cbatch.backend.llama.context import N_PAD, padded, set_computing
from cbatch.backend.llama.elastic_threads import ElasticThreads
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.watch import VECTORS, GraphWatch
from cbatch.backend.threads import teams
from cbatch.core.plan import Slot, StepPlan, StepResult
from cbatch.core.span import Span
from cbatch.errors import (
    DecodeError,
    EngineClosedError,
    ModelLoadError,
    PlanError,
    TextTooLongError,
    UnsupportedTaskError,
)
from cbatch.support.taken_cores import TakenCores, my_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.embedding import Pooling
    from cbatch.engine_options import EngineOptions

N_TEXTS = 64
"""Most texts of a micro-batch. llama.cpp keeps room for the logits of so many rows. Our choice."""

_N_FULL = (128, 512)
"""Bounds of a micro-batch of several texts, in tokens. Our choice."""

_N_BESIDE = 64
"""Most tokens of a graph of a causal model beside steps of requests, which wait for each of its nodes. Our choice."""

N_SHARED = 16
"""Least tokens of a common beginning that is computed once. Our choice."""

_POOLING_TYPES = {
    "none": llama_cpp.LLAMA_POOLING_TYPE_NONE,
    "rank": llama_cpp.LLAMA_POOLING_TYPE_RANK,
}


def check_pooling(model: LlamaModel, pooling: Pooling) -> None:
    """Raise an `UnsupportedTaskError` for what a model cannot do."""
    if not model.can_embed:
        raise UnsupportedTaskError(
            "embed", f"its architecture ({model.architecture}) has no embeddings of text"
        )
    if pooling == "rank" and model.pooling != "rank":
        raise UnsupportedTaskError("rerank", "its file has no classifier (pooling type rank)")


class LlamaEmbedder:
    """Implements `cbatch.backend.Embedder` over contexts that are made when a text needs them."""

    def __init__(
        self, model: LlamaModel, options: EngineOptions, n_threads: int, pooling: Pooling
    ) -> None:
        """Make one without a context; the first call makes it.

        Args:
            model: a loaded model, which outlives it.
            options: how to compute; with `exact` each text is computed alone.
        """
        self._model, self._options, self._n_threads = model, options, n_threads
        self._pooling = pooling
        self._is_causal, self._has_memory = model.is_causal, True
        self._takes_first = self._is_causal and pooling == "cls"
        """Whether the first token is enough: it sees no other."""
        self._takes_last = self._is_causal and pooling in ("cls", "last", "rank")
        """Whether the vector of the last token that is computed is enough."""
        self._takes_scores = pooling == "rank"
        self._n_out = model.n_classes if self._takes_scores else model.n_embedding
        self.n_most = model.n_embed_max
        # attention is computed over a whole micro-batch, whichever text a token belongs to: beyond half the width of
        # the model this costs more than a fuller micro-batch saves
        low, high = _N_FULL
        self.n_full = min(max(low, model.n_embedding // 2), high)
        self._n_short = (model.n_window_short or 0) // N_PAD * N_PAD
        """Most cells of a context with the short ones of two sets of rope factors, which longer texts must not have."""
        if self._n_short:
            self.n_full = min(self.n_full, self._n_short)
        self.n_texts = 1 if options.exact else N_TEXTS
        is_alone = self._takes_first or options.exact or self._n_short
        is_shared = self._takes_last and not is_alone
        self.n_shared = N_SHARED if is_shared else 0
        ends_early = self._is_causal and not self._takes_scores
        self._watch = GraphWatch(VECTORS if ends_early else None, has_turns=True)
        self._elastic: ElasticThreads | None = None
        """Uses fewer threads beside other programs; None if the number of threads is fixed."""
        is_fixed = options.n_threads is not None or options.exact or n_threads == 1
        if not is_fixed and computes_on_cpu(options):
            self._elastic = ElasticThreads(n_threads, n_taken=TakenCores(my_cores()).n_since)
        self._turns_s = self._turns_cpu_s = 0.0
        """Seconds, and CPU seconds of this thread, that the turns of others took during the current graph."""
        self._ctx: Any = None
        self._n_room = 0
        """Tokens that the context has room for."""
        self._prefix: tuple[int, ...] = ()
        """What sequence `N_TEXTS` holds: a common beginning of texts."""
        self._busy = threading.Lock()
        self._is_closed = False
        model.contexts.add(self)

    def close(self) -> None:
        """Free the context. Twice is harmless."""
        with self._busy:
            self._is_closed = True
            self._free()

    def give_up(self) -> None:
        """Free the context, for the model's owner frees the model. From any thread."""
        self.close()

    def _free(self) -> None:
        ctx, self._ctx, self._n_room, self._prefix = self._ctx, None, 0, ()
        if ctx is not None:
            llama_cpp.llama_free(ctx)

    def prepare(self, texts: Sequence[Sequence[int]]) -> None:
        """Have memory for texts; see `cbatch.backend.Embedder`."""
        self._check(texts)
        texts = self._needed(texts)
        with self._in_use():
            self._make_room(sum(map(len, texts)) - self._n_common(texts) * (len(texts) - 1))

    def compute(
        self, texts: Sequence[Sequence[int]], take_turn: Callable[[], float] | None = None
    ) -> list[NDArray[np.float32] | None]:
        """Return the vector of each text; see `cbatch.backend.Embedder`."""
        self.prepare(texts)
        with self._model.amid_graphs(), self._in_use():
            if self._n_threads > 1:
                teams().join()
            try:
                with self._watch.turns(take_turn and partial(self._timed, take_turn)):
                    found = [*self._computed(self._needed(texts))]
            except BaseException:
                self._free()  # what it holds is unknown
                raise
            finally:
                llama_log().drain()
            if not all(vector is None or np.isfinite(vector).all() for vector in found):
                self._free()  # without flash attention, NaN in its free cells would reach later texts
            return found

    def _timed(self, take_turn: Callable[[], float]) -> float:
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        try:
            return take_turn()
        finally:
            self._turns_s += time.perf_counter() - begun_s
            self._turns_cpu_s += time.thread_time() - begun_cpu_s

    def hurry(self) -> None:
        """Have a turn taken soon; see `cbatch.backend.Embedder`."""
        self._watch.hurry()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the context, in a block. Raises an `EngineClosedError`."""
        with self._busy:
            if self._is_closed:
                self._model.check_open()
                raise EngineClosedError("the embedder is closed")
            yield

    def _needed(self, texts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        return [text[:1] for text in texts] if self._takes_first else texts

    def _check(self, texts: Sequence[Sequence[int]]) -> None:
        """Refuse what llama.cpp would end the process on."""
        n_vocab, sizes = self._model.vocab.n_vocab, [*map(len, texts)]
        if not 1 <= len(texts) <= self.n_texts or min(sizes) < 1 or max(sizes) > self.n_most:
            raise PlanError(
                f"need 1 … {self.n_texts} texts of 1 … {self.n_most} tokens, got texts of {sizes} tokens"
            )
        n_shared = self._n_common(texts)
        if len(texts) > 1 and sum(sizes) - n_shared * len(texts) > self.n_full:
            raise PlanError(
                f"several texts may have {self.n_full} tokens in all, got texts of {sizes} tokens"
            )
        if min(map(min, texts)) < 0 or max(map(max, texts)) >= n_vocab:
            raise PlanError(f"a token id is not in 0 … {n_vocab - 1}")

    def _n_common(self, texts: Sequence[Sequence[int]]) -> int:
        """Return how many tokens at the beginning of texts are computed once for all."""
        n = len(_common(texts)) if self.n_shared and len(texts) > 1 else 0
        return n if n >= self.n_shared else 0

    # ---- the context ----

    def _make_room(self, n_tokens: int) -> None:
        """Have a context for so many tokens; a longer text than before has a larger one made.

        llama.cpp chooses a model's rope factors by the cells of a context; here a text's own length chooses, whatever
        texts came before.

        Raises:
            TextTooLongError: the free memory is not enough.
            ModelLoadError: llama.cpp cannot make it.
        """
        is_alike = self._is_short(self._n_room) == self._is_short(n_tokens)
        if self._n_room >= n_tokens and is_alike:
            return
        n_room = max(self.n_full, self._n_room if is_alike else 0)
        while n_room < n_tokens:
            n_room *= 2
        if n_tokens <= self.n_most:
            n_room = max(self.n_full, min(n_room, self.n_most))
        if self._is_short(n_tokens):
            n_room = min(n_room, self._n_short)
        n_bytes, n_free = self._n_bytes(n_room), host_most()
        if n_free is not None and n_bytes > n_free:
            why = (
                f" here: that takes about {n_bytes >> 20:,} MiB, and {n_free >> 20:,} MiB are free"
            )
            raise TextTooLongError(n_tokens, self._n_room or self.n_full, reason=why)
        self._free()
        params = self.context_params(n_room)
        ctx = llama_cpp.llama_init_from_model(self._model.pointer, params)
        if not ctx:
            why = llama_log().reason()
            raise ModelLoadError(
                f"llama.cpp cannot make a context for texts of {n_room} tokens: {why}"
            )
        self._ctx, self._n_room = ctx, n_room
        self._has_memory = bool(llama_cpp.llama_get_memory(ctx))
        self._batch = _Batch(int(llama_cpp.llama_n_batch(ctx)))

    def _is_short(self, n_tokens: int) -> bool:
        """Whether texts of so many tokens have the short ones of two sets of rope factors."""
        return n_tokens <= self._n_short

    def context_params(self, n_room: int) -> Any:
        """Return the parameters of a context with room for `n_room` tokens."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_cells = padded(n_room)
        params.n_batch = params.n_ubatch = n_room
        if self._is_causal:  # in chunks, and with room for a common beginning besides
            params.n_ctx = (
                min(2 * n_cells, self._n_short) if self._is_short(n_room) else 2 * n_cells
            )
            params.n_batch = max(min(self._options.n_batch, n_cells), N_TEXTS + 1)
            params.n_ubatch = min(self._options.n_ubatch, params.n_batch)
        params.n_seq_max = self.n_texts + self._takes_last
        # llama.cpp ends the process where there are more; its graph has room for so many
        params.n_outputs_max = self.n_texts + 1 if self._takes_last else params.n_batch
        params.n_threads = params.n_threads_batch = self._n_threads
        params.kv_unified = params.swa_full = True
        params.embeddings = True
        params.pooling_type = _POOLING_TYPES["rank" if self._takes_scores else "none"]
        if self._is_causal:
            self._watch.watch(params)
        set_computing(params, self._options)
        return params

    def _n_bytes(self, n_room: int) -> int:
        """Return about the memory of a context: rows of outputs, which have logits too, attention's mask, cells."""
        model = self._model
        n_outputs = self.n_texts + 1 if self._takes_last else n_room
        n_row = 4 * (model.vocab.n_vocab * (1 + self._has_memory) + self._n_out)
        n_cells = 2 * padded(n_room) * model.n_layers * 4 * model.n_width if self._has_memory else 0
        return n_outputs * n_row + 4 * n_room * n_room + 64 * n_room * model.n_width + n_cells

    # ---- computing ----

    def _computed(self, texts: Sequence[Sequence[int]]) -> Iterator[NDArray[np.float32] | None]:
        if self._takes_last:
            yield from self._last_ones(texts)
        elif self._is_causal:
            yield from self._in_chunks(texts)
        else:
            self._clear()
            rows = self._run(texts, [0] * len(texts), [*range(len(texts))], has_outputs=True)
            if self._takes_scores:
                yield from (self._scores(i) for i in range(len(texts)))
                return
            for text in texts:
                found, rows = rows[: len(text)], rows[len(text) :]
                yield self._pooled(found)

    def _last_ones(self, texts: Sequence[Sequence[int]]) -> Iterator[NDArray[np.float32] | None]:
        """Yield what the last token of each text gives; what they begin with in common is computed once."""
        prefix, ids = self._share(texts), [*range(len(texts))]
        n = len(prefix)
        self._set_embeddings(is_on=False)
        for chunk in _chunks(
            [(i, n, text[n:-1]) for i, text in zip(ids, texts, strict=True)], self._n_chunk
        ):
            self._run(*_columns(chunk), has_outputs=False)
        self._set_embeddings(is_on=True)
        last = self._run(
            [t[-1:] for t in texts], [len(t) - 1 for t in texts], ids, has_outputs=True
        )
        for i in ids:
            yield self._scores(i) if self._takes_scores else last[i].copy()

    def _in_chunks(self, texts: Sequence[Sequence[int]]) -> Iterator[NDArray[np.float32]]:
        self._clear()
        parts: list[list[NDArray[np.float32]]] = [[] for _ in texts]
        for chunk in _chunks([(i, 0, text) for i, text in enumerate(texts)], self._n_chunk):
            rows = self._run(*_columns(chunk), has_outputs=True)
            for i, _, tokens in chunk:
                parts[i].append(rows[: len(tokens)].copy())
                rows = rows[len(tokens) :]
        for found in parts:
            yield self._pooled(np.concatenate(found))

    def _n_chunk(self) -> int:
        """Return how many tokens to compute next: few where others wait, for whom a pause is not to come late."""
        is_whole = self._watch.is_alone or self._options.exact
        return self._batch.n_most if is_whole else min(_N_BESIDE, self._batch.n_most)

    def _share(self, texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Have what the texts begin with in common in all their sequences, and nothing else; return it."""
        memory = llama_cpp.llama_get_memory(self._ctx)
        kept = self._prefix if self._prefix and _all_begin(texts, self._prefix) else ()
        prefix = _common(texts) if self.n_shared and len(texts) > 1 else kept
        if not prefix or len(prefix) < self.n_shared:
            self._clear()
            return ()
        if not kept:
            self._clear()
        for i in range(self.n_texts):
            llama_cpp.llama_memory_seq_rm(memory, i, -1, -1)
        if prefix != kept:
            self._set_embeddings(is_on=False)
            rest = (self.n_texts, len(kept), prefix[len(kept) :])
            for chunk in _chunks([rest], self._n_chunk):
                self._run(*_columns(chunk), has_outputs=False)
            self._prefix = prefix
        for i in range(len(texts)):
            llama_cpp.llama_memory_seq_cp(memory, self.n_texts, i, -1, -1)
        return prefix

    def _clear(self) -> None:
        if self._has_memory:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), False)
        self._prefix = ()

    def _set_embeddings(self, *, is_on: bool) -> None:
        llama_cpp.llama_set_embeddings(self._ctx, is_on)

    def _run(
        self,
        texts: Sequence[Sequence[int]],
        starts: Sequence[int],
        ids: Sequence[int],
        *,
        has_outputs: bool,
    ) -> NDArray[np.float32]:
        """Compute tokens of some sequences.

        Returns:
            (n_tokens, dimension) float32, borrowed until the next run; nothing without outputs, or for scores.

        Raises:
            DecodeError: llama.cpp could not.
        """
        batch = self._batch.filled(texts, starts, ids, has_outputs=has_outputs)
        run = llama_cpp.llama_encode if self._model.is_encoder else llama_cpp.llama_decode
        if self._elastic is None:
            code = int(run(self._ctx, batch))
        else:
            spans = [
                Span(Slot(i), start, text, has_output=False)
                for i, start, text in zip(ids, starts, texts, strict=True)
            ]
            compute = partial(self._run_with, partial(run, self._ctx, batch))
            code = self._elastic.run(StepPlan((*spans,)), compute).code
        self._watch.check()
        if code:
            raise DecodeError(code)
        if not has_outputs or self._takes_scores:
            return np.empty((0, self._n_out), np.float32)
        rows = llama_cpp.llama_get_embeddings(self._ctx)
        if not rows:
            return np.full((batch.n_tokens, self._n_out), np.nan, np.float32)
        return np.ctypeslib.as_array(rows, shape=(batch.n_tokens, self._n_out))

    def _run_with(self, run: Callable[[], int], _: StepPlan, n_threads: int) -> StepResult:
        """Run a graph with at most `n_threads` threads; its time excludes the turns of others."""
        n_threads = teams().n_affordable(n_threads)
        llama_cpp.llama_set_n_threads(self._ctx, n_threads, n_threads)
        self._turns_s = self._turns_cpu_s = 0.0
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        code = int(run())
        seconds = time.perf_counter() - begun_s - self._turns_s
        busy_s = time.thread_time() - begun_cpu_s - self._turns_cpu_s
        return StepResult(
            [],
            n_steps=int(not code),
            code=code,
            decode_s=seconds,
            first_s=seconds,
            waited_s=max(0.0, seconds - busy_s),
        )

    def _scores(self, i: int) -> NDArray[np.float32] | None:
        found = llama_cpp.llama_get_embeddings_seq(self._ctx, i)
        return np.ctypeslib.as_array(found, shape=(self._n_out,)).copy() if found else None

    def _pooled(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._pooling == "none":
            return np.array(rows)
        if self._pooling == "mean":
            return np.asarray(rows.mean(axis=0, dtype=np.float64), np.float32)
        return np.array(rows[-1 if self._pooling == "last" else 0])


class _Batch:
    """The arrays of a `llama_batch`, written anew for each run."""

    def __init__(self, n_most: int) -> None:
        self.n_most = n_most
        self._tokens, self._positions, self._ones = (np.zeros(n_most, np.int32) for _ in range(3))
        self._ones[:] = 1
        self._outputs = np.zeros(n_most, np.int8)
        self._ids = np.arange(N_TEXTS + 1, dtype=np.int32)
        self._id_places = np.zeros(n_most, np.uint64)
        self._struct = llama_cpp.llama_batch(
            0,
            _pointer(self._tokens, ctypes.c_int32),
            None,
            _pointer(self._positions, ctypes.c_int32),
            _pointer(self._ones, ctypes.c_int32),
            _pointer(self._id_places, ctypes.POINTER(ctypes.c_int32)),
            _pointer(self._outputs, ctypes.c_int8),
        )

    def filled(
        self,
        texts: Sequence[Sequence[int]],
        starts: Sequence[int],
        ids: Sequence[int],
        *,
        has_outputs: bool,
    ) -> Any:
        """Return the batch with tokens of some sequences, each from a position on; valid until the next call."""
        sizes = [*map(len, texts)]
        n = sum(sizes)
        if n > self.n_most:
            raise PlanError(f"{n} tokens, but a batch holds at most {self.n_most}")
        self._tokens[:n] = np.fromiter(chain.from_iterable(texts), np.int32, n)
        ends = np.cumsum(sizes)
        offsets = np.asarray(starts, np.int64) - (ends - sizes)
        self._positions[:n] = np.arange(n) + np.repeat(offsets, sizes)
        places = self._ids.ctypes.data + 4 * np.asarray(ids, np.uint64)
        self._id_places[:n] = np.repeat(places, sizes)
        self._outputs[:n] = has_outputs
        self._struct.n_tokens = n
        return self._struct


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))


def _chunks(
    parts: Sequence[tuple[int, int, Sequence[int]]], n_most: Callable[[], int]
) -> Iterator[list[tuple[int, int, Sequence[int]]]]:
    """Yield parts of sequences that have up to `n_most` tokens together, asked before each, in order."""
    chunk: list[tuple[int, int, Sequence[int]]] = []
    n_left = 0
    for id, first, text in parts:
        at = 0
        while at < len(text):
            n_left = n_left or n_most()
            some = text[at : at + n_left]
            chunk.append((id, first + at, some))
            at, n_left = at + len(some), n_left - len(some)
            if not n_left:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


def _columns(
    chunk: Sequence[tuple[int, int, Sequence[int]]],
) -> tuple[list[Sequence[int]], list[int], list[int]]:
    return [c[2] for c in chunk], [c[1] for c in chunk], [c[0] for c in chunk]


def _all_begin(texts: Sequence[Sequence[int]], prefix: tuple[int, ...]) -> bool:
    n = len(prefix)
    return all(len(text) > n and tuple(text[:n]) == prefix for text in texts)


def _common(texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return what all texts begin with; of none all of it."""
    as_tuples = [*map(tuple, texts)]
    first, last = min(as_tuples), max(as_tuples)
    n_room = min(map(len, texts)) - 1
    n = next((i for i in range(n_room) if first[i] != last[i]), n_room)
    return tuple(first[:n])
