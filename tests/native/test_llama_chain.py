"""Our sampling beside llama.cpp's own chain, on the same logits."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.backend.load.open_model import open_model
from cbatch.bench.experiments.sampler_bench import LlamaChain
from cbatch.core.plan import Binding, Slot
from cbatch.options import DRY_SEQUENCE_BREAKERS, Sampling
from tests.oracle import native_row
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel

    Logits = NDArray[np.float32]

pytestmark = pytest.mark.real

EDGE = 1e-3
"""How near to a cut two sums of probabilities may fall on different sides of it."""

N_FLAT_MAX = 1025
"""Largest vocabulary whose logits are all of one kind."""

ALL = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
"""What keeps every token."""


def make_row(n_vocab: int, seed: int, scale: float, step: float, n_banned: int) -> Logits:
    """Return normal logits, rounded to multiples of a `step`, some of them −∞ but never the first.

    In a large vocabulary a few are far above the others, as a model's are: llama.cpp adds probabilities up in float32,
    and with thousands of nearly equal ones it is further off than `EDGE`.
    """
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(n_vocab) * scale).astype(np.float32)
    if n_vocab > N_FLAT_MAX:
        logits[random.integers(0, n_vocab, 100)] += (scale * random.uniform(8, 12, 100)).astype(
            np.float32
        )
    if step:
        logits = np.round(logits / np.float32(step)) * np.float32(step)
    logits[random.integers(1, n_vocab, min(n_banned, n_vocab - 1)) if n_vocab > 1 else []] = -np.inf
    return logits


ROWS = st.builds(
    make_row,
    n_vocab=st.sampled_from([1, 2, 3, 17, 128, 257, 1000, 1025, 5000, 32_000]),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.01, 1.0, 3.0, 10.0]),
    step=st.sampled_from([0.0, 0.0, 0.5]),
    n_banned=st.just(0),
)
PEAKED_ROWS = st.builds(
    make_row,
    n_vocab=st.sampled_from([1, 2, 3, 17, 128, 257, 1000, 5000, 32_000]),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from(
        [1.0, 2.0, 3.0]
    ),  # with a p of 0, as of −∞, llama.cpp's typical_p adds up NaN
    step=st.sampled_from([0.0, 0.0, 0.5]),
    n_banned=st.just(0),
)
FLAT_ROWS = st.builds(
    lambda n_vocab, seed, scale: (
        np.random.default_rng(seed).standard_normal(n_vocab) * scale
    ).astype(np.float32),
    n_vocab=st.sampled_from([1, 2, 100, 5000, 32_000, 256_000]),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0]),
)
ROWS_WITH_BANS = st.builds(
    make_row,
    n_vocab=st.sampled_from([2, 17, 300, 5000]),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1e-30, 1.0, 5.0, 1e30]),
    step=st.sampled_from([0.0, 0.5]),
    n_banned=st.sampled_from([0, 3, 2000]),
)
TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama.cpp's `llama_token_data`."""

SHARES = st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.95, 0.99])
TEMPERATURES = st.sampled_from([0.3, 0.8, 1.0, 1.7])
TOP_K = st.sampled_from([0, 1, 2, 40, 256, 257, 3000])


def ours(
    logits: Logits, how: Sampling, history: Sequence[int] = ()
) -> tuple[int, dict[int, float]]:
    """Return what we choose, and each candidate's probability."""
    found = native_row.sample_row(logits, Binding(Slot(0), 0, how, (), tuple(history)))
    ids = np.flatnonzero(found.kept)
    p = found.kept[ids] / found.kept.sum(dtype=np.float64)
    return found.token, dict(zip(ids.tolist(), p.tolist(), strict=True))


def choice(chain: LlamaChain, logits: Logits) -> tuple[int, dict[int, float]]:
    """Return the token that a chain chooses from a row, and every candidate's probability."""
    data = np.zeros(len(logits), TOKEN_DATA)
    data["id"], data["logit"] = np.arange(len(logits)), logits
    pointer = ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(pointer, len(logits), -1, False)
    llama_cpp.llama_sampler_apply(chain.pointer, ctypes.byref(array))
    start = ctypes.addressof(array.data.contents) - data.ctypes.data
    left = data[start // TOKEN_DATA.itemsize :][: array.size]
    found = dict(zip(left["id"].tolist(), left["p"].tolist(), strict=True))
    return int(left["id"][array.selected]), found


def theirs(
    logits: Logits, how: Sampling, history: Sequence[int] = (), **given: Any
) -> tuple[int, dict[int, float]]:
    """Return what llama.cpp chooses, and each candidate's probability where that is above 0."""
    with closing(LlamaChain(how, len(logits), **given)) as chain:
        chain.accept(history)
        token, found = choice(chain, logits)
    return token, {i: p for i, p in found.items() if p > 0}


def excess(logits: Logits, found: dict[int, float], other: dict[int, float]) -> float:
    """Return the probability of candidates that the other lacks; those with equal logits can be exchanged."""
    p = {float(logits[i]): q for i, q in found.items()}
    lacking = Counter(float(logits[i]) for i in found) - Counter(float(logits[i]) for i in other)
    return sum(n * p[logit] for logit, n in lacking.items())


def nearby(how: Sampling) -> Iterator[Sampling]:
    """Yield the same filters with their cuts a little lower and a little higher."""
    names = [
        name
        for name in ("typical_p", "top_p", "min_p", "top_n_sigma", "xtc_threshold")
        if getattr(how, name) != getattr(ALL, name)
    ]
    for moves in product((-EDGE, 0.0, EDGE), repeat=len(names)):
        values = {
            name: max(0.0, getattr(how, name) + by) for name, by in zip(names, moves, strict=True)
        }
        yield replace(
            how, **{n: min(1.0, v) if n != "top_n_sigma" else v for n, v in values.items()}
        )


def check_candidates(logits: Logits, how: Sampling) -> None:
    """Check that both have the same candidates and probabilities, or such as a cut nearby would give."""
    mine, other = ours(logits, how)[1], theirs(logits, how)[1]
    if max(excess(logits, mine, other), excess(logits, other, mine)) <= 1e-6:
        p = [sorted(found.values())[-min(len(mine), len(other)) :] for found in (mine, other)]
        assert np.abs(np.subtract(p[0], p[1])).max() <= 1e-5
        return
    around = [ours(logits, h)[1] for h in nearby(how)]
    assert min(excess(logits, found, other) for found in around) <= EDGE, "it has fewer"
    assert min(excess(logits, other, found) for found in around) <= EDGE, "it has more"


def filtered(rows: st.SearchStrategy[Logits], **cuts: Any) -> st.SearchStrategy[Any]:
    """Rows, and a sampling that cuts them by these options beside `top_k`."""
    return st.tuples(rows, st.builds(partial(replace, ALL), **{"top_k": TOP_K, **cuts}))


ANY_SHARE = SHARES | st.just(1.0)
FILTERS = {
    "top_k": filtered(ROWS, temperature=TEMPERATURES),
    "top_p": filtered(ROWS, top_p=SHARES, temperature=TEMPERATURES),
    "min_p": filtered(ROWS_WITH_BANS, min_p=st.sampled_from([0.001, 0.05, 0.5, 1.0])),
    # of two that are nearly alike, rounding decides which is the more typical
    "typical_p": filtered(
        PEAKED_ROWS,
        top_k=TOP_K.filter(lambda top_k: top_k != 2),
        typical_p=SHARES,
        top_p=ANY_SHARE,
    ),
    "top_n_sigma": filtered(ROWS, top_n_sigma=st.sampled_from([0.3, 1.0, 2.5]), top_p=ANY_SHARE),
    "xtc": filtered(
        ROWS,
        xtc_probability=st.just(1.0),
        xtc_threshold=st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5, 0.51]),
        top_p=ANY_SHARE,
        min_p=st.sampled_from([0.0, 0.02]),
    ),
    "whole chain": filtered(
        ROWS,
        top_n_sigma=st.sampled_from([1.0, 3.0]),
        top_p=SHARES,
        min_p=SHARES.map(lambda share: share / 10),
        xtc_probability=st.just(1.0),
        temperature=st.just(0.7),
    ),
}


@pytest.mark.parametrize("name", FILTERS)
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_filter_has_llama_cpps_candidates(name: str, data: st.DataObject) -> None:
    check_candidates(*data.draw(FILTERS[name]))


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"top_p": 0.95},
        {"typical_p": 0.9},
        {"top_n_sigma": 1.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02},
        {"top_k": 5000, "typical_p": 0.5, "top_p": 0.9},
    ],
    ids=str,
)
def test_large_vocabulary_has_llama_cpps_candidates(change: dict[str, Any]) -> None:
    for n_vocab, scale in ((151_936, 2.0), (256_000, 4.0)):
        check_candidates(make_row(n_vocab, 7, scale, 0.0, 0), replace(ALL, **change))


# ---- where llama.cpp's float32 is not exact enough ----


def exact_p(logits: Logits) -> NDArray[np.float64]:
    p: NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    return p


def check_prefix(
    p: NDArray[np.float64], order: NDArray[np.intp], kept: set[int], share: float
) -> None:
    """Check that what is kept is a prefix of an order, cut where the sum of probabilities passes a share."""
    n = len(kept)
    assert set(order[:n].tolist()) == kept
    assert share - EDGE <= p[order[:n]].sum() or n == len(p)
    assert p[order[: n - 1]].sum() <= share + EDGE


@settings(max_examples=examples(60), deadline=None)
@given(FLAT_ROWS, SHARES)
def test_top_p_of_flat_rows_is_cut_where_exact_sums_say(logits: Logits, top_p: float) -> None:
    kept = set(ours(logits, replace(ALL, top_p=top_p))[1])
    check_prefix(exact_p(logits), np.argsort(-logits, kind="stable"), kept, top_p)


@settings(max_examples=examples(60), deadline=None)
@given(FLAT_ROWS, SHARES)
def test_typical_p_of_flat_rows_is_cut_where_exact_sums_say(logits: Logits, share: float) -> None:
    p, kept = exact_p(logits), ours(logits, replace(ALL, typical_p=share))[1]
    distance = np.abs(np.log(p) - np.sum(p * np.log(p)))
    is_kept = np.isin(np.arange(len(p)), list(kept))
    assert (
        distance[is_kept].max() <= distance[~is_kept].min(initial=np.inf) + 1e-3
    )  # sums of floats
    total = p[is_kept].sum()
    assert share - EDGE <= total
    assert total - p[is_kept][np.argmax(distance[is_kept])] <= share + EDGE


# ---- bias, penalties, DRY ----

HISTORIES = st.lists(st.integers(0, 11), max_size=120) | st.lists(st.integers(0, 299), max_size=99)
PENALTIES = st.builds(
    Sampling,
    temperature=st.just(1.0),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.just(1.0),
    min_p=st.just(0.0),
    repeat_penalty=st.sampled_from([1.0, 1.1, 1.5, 0.7]),
    repeat_last_n=st.sampled_from([0, 1, 5, 64, 500]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.2, -0.1]),
    logit_bias=st.dictionaries(
        st.integers(0, 299), st.sampled_from([-math.inf, -5.0, 0.5, 3.0]), max_size=20
    ).map(lambda biases: tuple(sorted(biases.items()))),
)


def check_whole(logits: Logits, how: Sampling, history: Sequence[int], **given: Any) -> None:
    """Check every probability and the greedy token, after a history."""
    mine, other = ours(logits, how, history)[1], theirs(logits, how, history, **given)[1]
    assert all(abs(mine.get(i, 0.0) - other.get(i, 0.0)) <= 1e-5 for i in mine.keys() | other)
    greedy = replace(how, temperature=0.0)
    assert ours(logits, greedy, history)[0] == theirs(logits, greedy, history, **given)[0]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), PENALTIES, HISTORIES)
def test_bias_and_penalties_give_llama_cpps_probabilities(
    seed: int, how: Sampling, history: list[int]
) -> None:
    check_whole(make_row(300, seed, 3.0, 0.0, 0), how, history)


@pytest.fixture(scope="module")
def model(test_model: Path) -> Iterator[LlamaModel]:
    opened = open_model(test_model)
    yield opened
    opened.close()


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    words=st.lists(
        st.sampled_from(["a", "b", " the", "\n", "x:", "end. ", '"', "b a"]), max_size=60
    ),
    base=st.sampled_from([1.0, 1.75, 3.0, 0.5]),
    allowed=st.sampled_from([0, 1, 2, 5]),
    last_n=st.sampled_from([0, 3, 20, 64, 1000]),
    breakers=st.sampled_from([(), DRY_SEQUENCE_BREAKERS, ("the\n", "nd. a"), ("é", "x")]),
)
def test_dry_gives_llama_cpps_probabilities(
    model: LlamaModel,
    seed: int,
    words: list[str],
    base: float,
    allowed: int,
    last_n: int,
    breakers: tuple[str, ...],
) -> None:
    vocab = model.vocab
    how = replace(
        ALL,
        top_k=40,
        dry_multiplier=0.8,
        dry_base=base,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_breakers=vocab.dry_breakers(breakers),
        repeat_penalty=1.1,
    )
    logits = make_row(vocab.n_vocab, seed, 1.0, 0.0, 0)
    history = vocab.tokenize("".join(words))
    check_whole(logits, how, history, vocab=vocab.pointer, breakers=breakers)


def test_dry_with_a_huge_repetition_stays_finite() -> None:
    how = replace(ALL, dry_multiplier=1.0, dry_base=50.0, dry_penalty_last_n=500)
    logits = make_row(20, 1, 1.0, 0.0, 0)
    check_whole(logits, how, [3] * 400)


# ---- greedy ----


@settings(max_examples=examples(200), deadline=None)
@given(ROWS | ROWS_WITH_BANS)
def test_greedy_gives_llama_cpps_token(logits: Logits) -> None:
    how = replace(ALL, temperature=0.0)
    assert ours(logits, how)[0] == theirs(logits, how)[0]


# ---- the choice ----


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.7, "top_k": 12},
        {"temperature": 1.5, "typical_p": 0.8},
        {"top_n_sigma": 1.0, "top_p": 0.9},
        {"repeat_penalty": 1.3, "presence_penalty": 0.5, "top_k": 20},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    ],
    ids=str,
)
def test_choice_follows_llama_cpps_probabilities(change: dict[str, Any]) -> None:
    logits, how = make_row(40, 5, 1.5, 0.0, 0), replace(ALL, **change, seed=11)
    history, n_draws = (3, 4, 3, 9), 20_000
    p = theirs(logits, how, history)[1]
    binding = Binding(Slot(0), 0, how, (), history)
    drawn = Counter(native_row.sample_row(logits, binding, i).token for i in range(n_draws))
    assert drawn.keys() <= p.keys()
    chi_square = sum((drawn[i] - n_draws * q) ** 2 / (n_draws * q) for i, q in p.items())
    assert chi_square < len(p) + 4 * math.sqrt(2 * len(p))  # four deviations, but the seed is fixed


def test_xtc_happens_as_often_as_it_is_asked() -> None:
    logits = np.array([2.0, 1.9, 0.0], np.float32)  # both of the first are above the threshold
    how = replace(ALL, xtc_probability=0.3, xtc_threshold=0.2, seed=3)
    binding = Binding(Slot(0), 0, how, ())
    n_dropped = sum(native_row.sample_row(logits, binding, i).kept[0] == 0 for i in range(10_000))
    assert abs(n_dropped - 3000) < 4 * math.sqrt(10_000 * 0.3 * 0.7)
