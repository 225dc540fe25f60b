"""Vectors of small random models against plain calls of llama.cpp, a text alone in its own context."""

from __future__ import annotations

import ctypes
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest

import cbatch
from cbatch.backend.llama.embed_only import EmbedOnlyBackend
from cbatch.backend.llama.embedder import LlamaEmbedder, check_pooling
from cbatch.backend.llama.model import facts_of
from cbatch.backend.load.loader import load_backend
from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic import SHAPES, write_model
from cbatch.engine_options import EngineOptions
from cbatch.errors import EmbeddingError, EngineClosedError, PlanError, UnsupportedTaskError
from tests.backend.damage import without_numbers
from tests.oracle.embeddings import PlainEmbedder
from tests.zoo import write_arch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cbatch.embedding import Pooling
    from tests.conftest import SynthFactory

pytestmark = pytest.mark.real

N_LEAST = 1 - 0.9999
"""What the cosine to llama.cpp's own vector may lack."""

EMBEDDERS = ("bert", "bert-cls", "nomic-bert", "jina-bert-v2", "gemma-embedding", "qwen3-embedding")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write models by name, each once; of f16 weights, whose rounding hides nothing."""
    folder, found = tmp_path_factory.mktemp("models"), dict[str, Any]()

    def path_of(name: str) -> Path:
        if name not in found:
            shape = replace(SHAPES[name], type="f16")
            found[name] = write_model(folder / f"{name}.gguf", shape)
        path: Path = found[name]
        return path

    return path_of


def texts_of(n_vocab: int, *sizes: int, before: Sequence[int] = ()) -> list[tuple[int, ...]]:
    random = np.random.default_rng(sum(sizes))
    return [(*before, *map(int, random.integers(5, n_vocab, n))) for n in sizes]


def lack(a: Any, b: Any) -> float:
    """By how much the least cosine of two arrays of vectors is less than 1."""
    a, b = np.atleast_2d(a).astype(np.float64), np.atleast_2d(b).astype(np.float64)
    assert a.shape == b.shape
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return float(1 - cosines.min())


@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
@pytest.mark.parametrize("name", [*EMBEDDERS, "test"])
def test_vectors_equal_those_of_plain_llama(models: Any, name: str, pooling: Pooling) -> None:
    path = models(name)
    backend, _ = load_backend(path, EngineOptions())
    with closing(backend), closing(backend.make_embedder(pooling)) as embedder:
        n_vocab = backend.vocab.n_vocab
        before = texts_of(n_vocab, 30)[0]
        groups = [
            texts_of(n_vocab, 3, 7, 1, 12, 20, 2),
            texts_of(n_vocab, 300),
            texts_of(n_vocab, 4, 1, 6, before=before),
            texts_of(n_vocab, 2, 5, before=before),
        ]
        if not embedder.n_shared:
            groups = groups[:2]
        with PlainEmbedder(path, pooling) as oracle:
            for group in groups:
                for text, vector in zip(group, embedder.compute(group), strict=True):
                    assert lack(vector, oracle.embed(text)) < N_LEAST


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vector_has_the_rope_factors_of_its_own_length(
    longrope_model: Path, pooling: Pooling
) -> None:
    with closing(open_model(longrope_model)) as model:
        embedder = LlamaEmbedder(model, EngineOptions(), 1, pooling)
        with closing(embedder), PlainEmbedder(longrope_model, pooling) as oracle:
            for sizes in ((40, 3), (700,), (1200,), (40, 50), (1024,), (1025,), (3,)):
                group = texts_of(model.vocab.n_vocab, *sizes)
                for text, vector in zip(group, embedder.compute(group), strict=True):
                    assert lack(vector, oracle.embed(text)) < N_LEAST, sizes


def test_longer_common_beginning_than_before_is_computed_once(models: Any) -> None:
    path = models("test")
    with closing(open_model(path)) as model:
        embedder = LlamaEmbedder(model, EngineOptions(), 1, "last")
        with closing(embedder), PlainEmbedder(path, "last") as oracle:
            n_vocab = model.vocab.n_vocab
            long = texts_of(n_vocab, 600)[0]
            embedder.compute([long])  # the context keeps its size
            for before, n_texts in ((long[:20], 2), (long[:400], 60), (long[:30], 2)):
                group = texts_of(n_vocab, *[1] * n_texts, before=before)
                for text, vector in zip(group[:4], embedder.compute(group), strict=False):
                    assert lack(vector, oracle.embed(text)) < N_LEAST


class WatchedEmbedder(LlamaEmbedder):
    """Notes the nodes at which llama.cpp asks whether to stop."""

    def context_params(self, n_room: int) -> Any:
        params, self.names = super().context_params(n_room), list[str]()
        typed = llama_cpp.llama_cpp.ctypes_function
        name_of = typed("ggml_get_name", [ctypes.c_void_p], ctypes.c_char_p)(lambda: None)
        kind = llama_cpp.ggml_backend_sched_eval_callback
        own = kind(ctypes.cast(params.cb_eval, ctypes.c_void_p).value)

        def watch(tensor: int, is_before: bool, given: int) -> bool:
            if is_before:
                self.names.append(name_of(tensor).decode())
            return bool(own(tensor, is_before, given))

        params.cb_eval = self.callback = kind(watch)
        return params


@pytest.mark.parametrize("pooling", ["mean", "none", "last"])
def test_graph_of_a_causal_model_ends_at_its_vectors(models: Any, pooling: Pooling) -> None:
    with closing(open_model(models("test"))) as model:
        embedder = WatchedEmbedder(model, EngineOptions(), 1, pooling)
        with closing(embedder):
            embedder.compute(texts_of(model.vocab.n_vocab, 20, 7))
            assert embedder.names[-1] == "result_embd_pooled"


UNIGRAM: dict[str, object] = {
    "tokenizer.ggml.model": "t5",
    "tokenizer.ggml.add_sep_token": True,
    "tokenizer.ggml.remove_extra_whitespaces": True,
}
"""Of XLM-RoBERTa, such as bge-m3 and bge-reranker-v2-m3."""


@pytest.mark.parametrize("metadata", [{}, UNIGRAM], ids=["words", "unigrams"])
def test_texts_of_a_file_model_are_those_of_llama(
    synth: SynthFactory, metadata: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    path = synth("bert-cls", type="f16", metadata=metadata)
    texts = ["red", " The  sky, is blue! ", "ünïcode", "春 is 夏", "x" * 300]
    with cbatch.load(path) as engine, PlainEmbedder(path) as oracle:
        assert [engine.tokenize(text) for text in texts] == [*map(oracle.tokenize, texts)]
        assert [engine.tokenize(texts[0])[i] for i in (0, -1)] == [1, 2]
        found = engine.embed(texts, normalize=False).array()
        for text, vector in zip(texts, found, strict=True):
            assert lack(vector, oracle.embed(oracle.tokenize(text))) < N_LEAST
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("name", "metadata"), [("bert-rerank", {}), ("bert-rerank", UNIGRAM), ("qwen3-rerank", {})]
)
def test_scores_equal_those_of_plain_llama(
    synth: SynthFactory, name: str, metadata: dict[str, object]
) -> None:
    path = synth(name, type="f16", metadata=metadata)
    documents = ["red", "the sky is blue", "a long document " * 5]
    with cbatch.load(path) as engine, PlainEmbedder(path) as oracle:
        found = engine.rerank("what is red?", documents, raw_scores=name == "bert-rerank").scores()
        expected = [oracle.score("what is red?", document) for document in documents]
    assert found == pytest.approx(expected, abs=1e-2)


def test_plans_that_would_end_the_process_are_refused(models: Any) -> None:
    backend, _ = load_backend(models("bert"), EngineOptions())
    assert isinstance(backend, EmbedOnlyBackend)
    with closing(backend), closing(backend.make_embedder("mean")) as embedder:
        n_vocab, n_most = backend.vocab.n_vocab, embedder.n_most
        wrong: list[Any] = [
            [],
            [()],
            [(5,) * (n_most + 1)],
            [(n_vocab,)],
            [(-1,)],
            [(5,) * 80] * 2,
            [(5,)] * (embedder.n_texts + 1),
        ]
        for texts in wrong:
            with pytest.raises(PlanError):
                embedder.compute(texts)
        with pytest.raises(UnsupportedTaskError):
            backend.make_embedder("rank")


@pytest.mark.parametrize(
    ("name", "metadata", "n_embedding"),
    [
        ("deepseek4", {}, None),  # its head for draft tokens takes more than a vector
        ("lfm2", {"embedding_length_out": 32}, 32),  # of a dense layer
        ("lfm2", {}, 64),
    ],
    ids=str,
)
def test_vectors_narrower_than_llama_reads_are_refused(
    tmp_path: Path, name: str, metadata: dict[str, int], n_embedding: int | None
) -> None:
    path = write_arch(name, tmp_path / "model.gguf", metadata=metadata)
    with closing(open_model(path, is_trial=True)) as model:
        facts = facts_of(model)
        assert (facts.can_embed, facts.n_embedding) == (n_embedding is not None, n_embedding or 0)
        if n_embedding is None:
            with pytest.raises(UnsupportedTaskError, match="deepseek4"):
                check_pooling(model, "last")
            return
        with closing(LlamaEmbedder(model, EngineOptions(), 1, "last")) as embedder:
            (vector,) = embedder.compute([(5, 6, 7)])
            assert vector is not None
            assert vector.shape == (n_embedding,)


@pytest.mark.parametrize("name", ["bert", "qwen3-embedding"])
def test_exact_vectors_are_the_same_bits_alone_and_together(models: Any, name: str) -> None:
    texts = [f"text {i} " * (i % 7 + 1) for i in range(40)]
    with cbatch.load(models(name), exact=True) as engine:
        assert engine.exactness == "bitwise"
        together = engine.embed(texts).array()
        alone = np.concatenate([engine.embed([text]).array() for text in texts[::7]])
    with cbatch.load(models(name), exact=True) as engine:
        anew = np.concatenate([engine.embed([text]).array() for text in texts[::7]])
    assert np.array_equal(together[::7], alone)
    assert np.array_equal(together[::7], anew)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_text_of_nan_fails_alone(synth: SynthFactory, tmp_path: Path, pooling: Pooling) -> None:
    path = without_numbers(synth(type="f16", tied=False), tmp_path / "model.gguf", 5)
    texts = [[300 + i, 7, 8, *range(20, 20 + 9 * i)] for i in range(8)]
    broken = [5, *range(300, 500)]
    with cbatch.load(path, flash_attn="off", parallel=2, ctx_per_seq=512) as engine:
        expected = engine.embed(texts[:4], pooling=pooling).array()
        [found] = engine.embed([broken], pooling=pooling).results(return_errors=True)
        assert isinstance(found.error, EmbeddingError)
    with cbatch.load(path, flash_attn="off", parallel=2, ctx_per_seq=512) as engine:
        engine.embed([broken], pooling=pooling).results(return_errors=True)
        later = engine.embed(texts[:4], pooling=pooling).array()
        assert np.allclose(later, expected, atol=1e-3)
        mixed = engine.embed([*texts[4:], broken[:-1]], pooling=pooling)
        assert [r.error is None for r in mixed.results(return_errors=True)] == [*[True] * 4, False]


def test_model_for_chats_embeds_beside_a_chat() -> None:
    with cbatch.load(parallel=2) as engine:
        assert engine.can_embed
        assert engine.can_rerank
        assert engine.can_generate
        answer = engine.submit("a", options={"max_tokens": 20, "temperature": 0})
        found = engine.embed([f"text {i}" for i in range(30)]).array()
        assert found.shape == (30, engine.n_embedding)
        assert answer.result().finish_reason in ("length", "stop")
        scores = engine.rerank("What is red?", ["The sky is red.", "No."]).scores()
        assert ((scores >= 0) & (scores <= 1)).all()


def test_vectors_and_answers_beside_each_other_are_those_alone(synth: SynthFactory) -> None:
    """Under `exact`, to the bit: a pause between nodes changes nothing, nor do steps amid a text."""
    texts = [[7 + i] * n for i, n in enumerate((300, 5, 40, 129, 64, 1, 250))]
    prompts = [f"Say {i}." for i in range(4)]
    options = {"max_tokens": 200, "ignore_eos": True, "temperature": 0, "logprobs": True}
    settings: dict[str, Any] = {"exact": True, "parallel": 4, "ctx_per_seq": 1024}
    with cbatch.load(synth("exact"), **settings) as engine:
        vectors = engine.embed(texts).array()
        answers = engine.run(prompts, options=options).results()
    with cbatch.load(synth("exact"), **settings) as engine:
        running = engine.run(prompts, options=options, streamed=True)
        chunks = iter(running)
        next(chunks)  # to leave the iteration would cancel them
        assert np.array_equal(engine.embed(texts).array(), vectors)
        beside = running.results()
    assert [a.logprobs for a in beside] == [a.logprobs for a in answers]


def test_borrowed_model_may_be_closed_amid_a_text(test_model: Path) -> None:
    """By what is called in a step: the text is computed to its end, then nothing of the model is used."""
    llama = llama_cpp.Llama(str(test_model), n_ctx=64, verbose=False)
    backend, _ = load_backend(llama, EngineOptions())
    embedder = backend.make_embedder("last")
    turns: list[bool] = []

    def take_turn() -> float:
        if not turns:
            llama.close()
        turns.append(llama._model.model is None)
        return 0.0

    (vector,) = embedder.compute([[5] * 300], take_turn)
    assert vector is not None
    assert np.isfinite(vector).all()
    assert len(turns) > 1
    with pytest.raises(EngineClosedError, match="closed under its engine"):
        embedder.compute([[5] * 3])
    backend.close()


def test_fewer_threads_embed_while_others_have_the_cores(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the computing thread stands still: it waits all the time."""
    asked: list[int] = []
    real = llama_cpp.llama_set_n_threads

    def set_threads(ctx: Any, n_threads: int, n_threads_batch: int) -> None:
        asked.append(n_threads)
        real(ctx, n_threads, n_threads_batch)

    backend, _ = load_backend(models("bert"), EngineOptions())
    backend.n_threads = 2
    monkeypatch.setattr(llama_cpp, "llama_set_n_threads", set_threads)
    monkeypatch.setattr("cbatch.backend.llama.embedder.time.thread_time", lambda: 0.0)
    with closing(backend), closing(backend.make_embedder("mean")) as embedder:
        texts = texts_of(backend.vocab.n_vocab, 300)
        before = embedder.compute(texts)
        for _ in range(2_000):
            after = embedder.compute(texts)
            if asked[-1] < 2:
                break
        assert asked[0] == 2
        assert asked[-1] == 1
        assert lack(before, after) < N_LEAST
        turns = iter(range(1, 9))
        embedder.compute(texts, lambda: 0.0 * next(turns))
        assert next(turns) > 1
