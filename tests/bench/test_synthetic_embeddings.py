"""Random models for embeddings and rerank: llama.cpp computes them, and texts differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.bench.synthetic import SHAPES
from cbatch.errors import ConfigError
from tests.oracle.embeddings import PlainEmbedder

if TYPE_CHECKING:
    from tests.conftest import SynthFactory
    from tests.oracle.embeddings import Floats

EMBEDDERS = (
    "bert",
    "bert-cls",
    "nomic-bert",
    "jina-bert-v2",
    "gemma-embedding",
    "qwen3-embedding",
)
RERANKERS = ("bert-rerank", "qwen3-rerank")
TEXTS = ["the red house by the river", "Count from one to ten.", "why", "blue " * 60]


def _cosine(a: Floats, b: Floats) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("name", EMBEDDERS)
def test_pooling_is_what_its_shape_says_and_texts_differ(synth: SynthFactory, name: str) -> None:
    kind = SHAPES[name].pooling
    with PlainEmbedder(synth(name)) as said, PlainEmbedder(synth(name), "none") as rows:
        found = [said.embed(said.tokenize(text)) for text in TEXTS]
        tokens = said.tokenize(TEXTS[0])
        pooled, each = said.embed(tokens), rows.embed(tokens)
    assert (pooled == found[0]).all()
    assert all(row.shape == (64,) and np.isfinite(row).all() for row in found)
    assert max(_cosine(a, b) for i, a in enumerate(found) for b in found[:i]) < 0.99
    assert each.shape == (len(tokens), 64)
    made = {"mean": each.mean(axis=0), "cls": each[0], "last": each[-1]}
    assert _cosine(pooled, made[kind]) > 0.9999
    assert all(_cosine(pooled, row) < 0.999 for name, row in made.items() if name != kind)


@pytest.mark.parametrize("name", RERANKERS)
def test_pairs_have_scores_that_differ(synth: SynthFactory, name: str) -> None:
    with PlainEmbedder(synth(name)) as model:
        scores = [model.score("what is red?", text) for text in TEXTS]
        assert scores != [model.score("what is blue?", text) for text in TEXTS]
    assert len({round(score, 3) for score in scores}) == len(TEXTS)


def test_parts_of_a_pair_are_parted_as_the_file_says(synth: SynthFactory) -> None:
    """As BERT's and as XLM-RoBERTa's are."""
    bos, eos = 1, 2
    said: dict[str, object] = {"tokenizer.ggml.add_sep_token": True}
    for metadata, n_between in (({}, 1), (said, 2)):
        with PlainEmbedder(synth("bert-rerank", metadata=metadata)) as model:
            query, document = (model.tokenize(text, has_special=False) for text in ("red", "blue"))
            parts = [bos, *query, *[eos] * n_between, *document, eos]
            assert model.pair("red", "blue") == parts


def test_tokens_before_the_last_see_those_behind_in_encoders(synth: SynthFactory) -> None:
    for name in EMBEDDERS:
        with PlainEmbedder(synth(name), "none") as model:
            tokens = model.tokenize(TEXTS[0])
            whole, cut = model.embed(tokens), model.embed(tokens[:4])
        changed = float(np.abs(whole[:3] - cut[:3]).max())
        assert (changed > 0.01) == SHAPES[name].is_encoder, name


def test_window_of_gemma_embedding_is_that_of_the_shape(synth: SynthFactory) -> None:
    """It tells in texts that are longer."""
    rows = []
    for n_window in (8, 64):
        path = synth("gemma-embedding", type="f32", n_layer=4, n_window=n_window)
        with PlainEmbedder(path) as model:
            rows.append([model.embed(model.tokenize(text)) for text in (TEXTS[2], TEXTS[3])])
    (short, long), (wide_short, wide_long) = rows
    assert _cosine(short, wide_short) > 0.9999 > _cosine(long, wide_long)


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("bert", {"n_expert": 2, "n_expert_used": 1}, "without experts"),
        ("bert", {"n_window": 8}, "no sliding window"),
        ("qwen3-embedding", {"n_window": 8}, "no sliding window"),
        ("gemma-embedding", {"n_window": 0}, "need a sliding window"),
        ("mamba", {"pooling": "mean"}, "no pooling"),
        ("bert", {"pooling": "max"}, "unknown pooling 'max'; known are none, mean"),
        ("nomic-bert", {"pooling": "rank"}, "rank needs the architecture bert or qwen3"),
    ],
)
def test_shape_of_embeddings_that_does_not_fit_is_refused(
    name: str, change: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        replace(SHAPES[name], **change)
