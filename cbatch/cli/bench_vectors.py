"""`cbatch bench --workload embed,rerank`: embeddings and rerank, compared with other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbatch.bench.sides import VECTOR_KINDS, ProcessSide, VectorSide
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cbatch.bench.model_text import ModelText
    from cbatch.bench.text_work import VectorWorkload
    from cbatch.cli.bench import Beside
    from cbatch.support.model_facts import ModelFacts

_N_SLACK = 32
"""Tokens of a template and of marks beyond a text and its query. Our choice."""

_N_TEMPLATE = 512
"""Tokens that llama-server gets for a reranker's template besides. Our choice."""

_N_UBATCH = 512
"""llama-server's own micro-batch: a longer text needs a larger one. Source: its help."""

_SIDE_NAMES = {"llama": "Llama.embed"}


def check_fit(workloads: Sequence[VectorWorkload], text: ModelText) -> None:
    """Raise a `ConfigError` for what a model cannot do, or a text that is too long for it."""
    facts = text.facts
    for workload in workloads:
        can = facts.can_rerank if workload.n_query else facts.can_embed
        if not can:
            raise ConfigError(
                f"{text.path}: the model cannot {workload.name}: leave {workload.name} out of --workload"
            )
        n_most = _n_most(facts)
        if workload.n_longest + _N_SLACK > n_most:
            raise ConfigError(
                f"{workload.name} needs {workload.n_longest + _N_SLACK:,} tokens, but the model takes {n_most:,}: "
                "lower --prompt-tokens or --common-tokens"
            )


def _n_most(facts: ModelFacts) -> int:
    """Return the tokens of the longest text; a chat model that does not embed judges documents in a slot."""
    return facts.n_embed_max or facts.n_ctx_train


def vector_sides(
    workload: VectorWorkload,
    *,
    names: Sequence[str],
    text: ModelText,
    settings: Mapping[str, Any],
    beside: Beside,
    at_once: int,
) -> Iterator[VectorSide]:
    """Yield the sides of a workload, ours first."""
    for name in sorted(names, key=VECTOR_KINDS.index):
        if name == "serve":
            yield beside.ours(text, settings)
        elif name == "engine" or not workload.n_query:
            yield ProcessSide(_SIDE_NAMES.get(name, name), text.path, settings)
    n_window = workload.n_longest + (_N_TEMPLATE if workload.n_query else _N_SLACK)
    n_window = min(n_window, _n_most(text.facts))
    words = ["--reranking"] if workload.n_query else ["--embeddings"]
    if not workload.n_query and text.facts.can_generate:
        words += ["--pooling", text.facts.pooling]
    if n_window > _N_UBATCH:
        words += ["-b", str(n_window), "-ub", str(n_window)]
    slots = {"parallel": at_once, "ctx_per_seq": max(n_window, _N_UBATCH)}
    yield from beside.theirs(text, {**settings, **slots}, words)
