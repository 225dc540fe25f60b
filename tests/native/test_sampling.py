"""The native sampler, its oracle in numpy and the definition spelled out: one token of all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cbatch.backend import native, sampling
from cbatch.core.plan import BROKEN_ROW
from cbatch.errors import PlanError
from cbatch.options import GREEDY, Sampling

if TYPE_CHECKING:
    from cbatch.backend.sampling import Logits

ISAS = range(native.library().cbatch_isa_best() + 1)


def row(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def random_row(n_vocab: int, seed: int, scale: float = 3.0, step: float = 0.0) -> Logits:
    """Return normal logits, rounded to multiples of a `step` so that many are equal."""
    logits = np.random.default_rng(seed).standard_normal(n_vocab) * scale
    return (np.round(logits / step) * step if step else logits).astype(np.float32)


def native_tokens(logits: Logits, how: Sampling, i_output: int = 0) -> set[int]:
    return {native.sample_row(logits, how, i_output, isa) for isa in ISAS}


# ---- the definition, spelled out: see native/sample.h ----


def kept_by_definition(logits: Logits, how: Sampling) -> list[int]:
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if how.top_k > 0:
        order = order[: how.top_k]
    top = logits[order[0]]
    if how.top_p < 1.0:
        mass = [int(w) for w in sampling.weights(logits[order], top, 1.0)]
        share, n = int(how.top_p * 2**32), 1
        while sum(mass[:n]) * 2**32 < sum(mass) * share:
            n += 1
        order = order[:n]
    if how.min_p > 0.0:
        order = [i for i in order if float(logits[i]) >= float(top) + math.log(how.min_p)]
    return order


def sample_by_definition(logits: Logits, how: Sampling, i_output: int) -> int:
    values = [float(x) for x in logits]
    if any(math.isnan(x) for x in values) or not math.isfinite(max(values)):
        return BROKEN_ROW
    if how.temperature == 0.0:
        return values.index(max(values))
    ids = sorted(kept_by_definition(logits, how))
    w = [int(x) for x in sampling.weights(logits[ids], logits.max(), how.temperature)]
    r = sampling.random_bits(how.seed, i_output, how.i_choice) * sum(w) >> 64
    return next(i for n, i in enumerate(ids) if sum(w[: n + 1]) > r)


# ---- strategies ----

AMOUNTS = st.sampled_from([0.0, 1e-9, 0.05, 0.5, 0.95, 0.999999, 1.0]) | st.floats(0, 1)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 0.8, 1.0, 30.0, 1e4, 1e300]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 255, 256, 257, 300, 10**9]),
    top_p=AMOUNTS,
    min_p=AMOUNTS,
    seed=st.integers(0, 2**64 - 1),
    i_choice=st.integers(0, 2**31 - 1),
)
EXTREMES = [0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-45, -1e-45, 1e-38, 20.5, -math.inf]
SHORT_ROWS = st.lists(
    st.sampled_from(EXTREMES) | st.floats(-40, 40, width=32), min_size=1, max_size=60
).map(lambda values: row(*values))
LONG_ROWS = st.builds(
    random_row,
    n_vocab=st.sampled_from([1, 15, 16, 127, 128, 129, 255, 256, 257, 1000, 2048, 5000]),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.01, 1.0, 3.0, 20.0, 1e30]),
    step=st.sampled_from([0.0, 0.5, 4.0]),
)


@settings(max_examples=300, deadline=None)
@given(SHORT_ROWS, SAMPLINGS, st.integers(0, 2**31 - 1))
@example(row(-0.0, 0.0), Sampling(top_k=1), 0)
@example(row(1.0, 1.0, 1.0), Sampling(top_p=0.5, top_k=0), 7)
def test_sample_row_equals_the_definition(logits: Logits, how: Sampling, i_output: int) -> None:
    expected = sample_by_definition(logits, how, i_output)
    assert sampling.sample_row(logits, how, i_output) == expected
    assert native_tokens(logits, how, i_output) == {expected}


@settings(max_examples=400, deadline=None)
@given(LONG_ROWS, SAMPLINGS, st.integers(0, 100))
def test_native_row_equals_the_oracle(logits: Logits, how: Sampling, i_output: int) -> None:
    expected = sampling.sample_row(logits, how, i_output)
    assert native_tokens(logits, how, i_output) == {expected}


@pytest.mark.parametrize("n_vocab", [32_000, 151_936])
@pytest.mark.parametrize("step", [0.0, 0.25], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    "how",
    [
        GREEDY,
        Sampling(),
        Sampling(top_k=0),
        Sampling(top_k=0, min_p=0.0, top_p=0.999),
        Sampling(top_k=5000, top_p=0.9, min_p=0.0),
        Sampling(top_k=5000, top_p=1.0, min_p=0.0),
        Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=2.0),
    ],
    ids=repr,
)
def test_native_row_of_a_real_size_equals_the_oracle(
    n_vocab: int, step: float, how: Sampling
) -> None:
    logits = random_row(n_vocab, seed=n_vocab, step=step)
    for i_output in range(3):
        expected = sampling.sample_row(logits, how, i_output)
        assert native_tokens(logits, how, i_output) == {expected}


@pytest.mark.parametrize("n_vocab", [5, 128, 5000])
@pytest.mark.parametrize("order", ["rising", "falling", "equal", "zeros of both signs"])
@pytest.mark.parametrize("top_k", [1, 40, 256, 1000])
def test_native_row_in_an_awkward_order_equals_the_oracle(
    n_vocab: int, order: str, top_k: int
) -> None:
    rising = np.linspace(0, 9, n_vocab, dtype=np.float32)
    zeros = np.resize(row(-0.0, 0.0, 0.0), n_vocab)
    logits = {"rising": rising, "falling": rising[::-1].copy(), "equal": rising * 0}.get(
        order, zeros
    )
    for i_output, top_p in enumerate((0.3, 0.5, 0.9, 1.0)):
        how = Sampling(top_k=top_k, top_p=top_p, min_p=0.0)
        assert native_tokens(logits, how, i_output) == {sampling.sample_row(logits, how, i_output)}


# ---- broken rows and greedy ----


@pytest.mark.parametrize("how", [GREEDY, Sampling(), Sampling(top_k=0)], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("place", [0, 17, 127, 128, 299])
def test_row_with_a_bad_logit_is_broken(how: Sampling, bad: float, place: int) -> None:
    logits = random_row(300, seed=1)
    logits[place] = bad
    assert sampling.sample_row(logits, how, 0) == BROKEN_ROW
    assert native_tokens(logits, how) == {BROKEN_ROW}


@pytest.mark.parametrize("n_vocab", [1, 128, 300])
def test_row_of_minus_infinities_is_broken(n_vocab: int) -> None:
    logits = np.full(n_vocab, -np.inf, dtype=np.float32)
    assert sampling.sample_row(logits, Sampling(), 0) == BROKEN_ROW
    assert native_tokens(logits, Sampling()) == {BROKEN_ROW}


def test_greedy_row_with_equal_maxima_gives_the_lowest_id() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    logits[[300, 301, 999]] = 5.0
    assert sampling.sample_row(logits, GREEDY, 0) == 300
    assert native_tokens(logits, GREEDY) == {300}


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=-1.0),
        Sampling(temperature=math.nan),
        Sampling(temperature=math.inf),
        Sampling(top_p=1.1),
        Sampling(top_p=math.nan),
        Sampling(min_p=-0.1),
        Sampling(top_k=-1),
        Sampling(i_choice=-1),
    ],
    ids=repr,
)
def test_sampling_value_out_of_range_is_refused(how: Sampling) -> None:
    with pytest.raises(PlanError):
        native.sample_row(row(1.0, 2.0), how, 0)


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(PlanError):
        native.sample_row(row(1.0), GREEDY, 0, isa=99)


# ---- filters by hand ----

HALVES = np.log(np.array([4, 8, 2, 1, 1], dtype=np.float32))  # shares 1/4, 1/2, 1/8, 1/16, 1/16


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Sampling(top_k=2, top_p=1.0, min_p=0.0), [1, 0]),
        (Sampling(top_k=4, top_p=1.0, min_p=0.0), [1, 0, 2, 3]),
        (Sampling(top_k=0, top_p=0.7, min_p=0.0), [1, 0]),
        (Sampling(top_k=0, top_p=0.8, min_p=0.0), [1, 0, 2]),
        (Sampling(top_k=2, top_p=0.6, min_p=0.0), [1]),
        (Sampling(top_k=0, top_p=0.0, min_p=0.0), [1]),
        (Sampling(top_k=0, top_p=1.0, min_p=0.2), [1, 0, 2]),
        (Sampling(top_k=0, top_p=1.0, min_p=1.0), [1]),
        (Sampling(top_k=0, top_p=1.0, min_p=0.0), [1, 0, 2, 3, 4]),
    ],
)
def test_filters_keep_what_their_names_say(how: Sampling, expected: list[int]) -> None:
    assert list(sampling.kept_ids(HALVES, how)) == expected
    assert kept_by_definition(HALVES, how) == expected
    drawn = {t for i in range(400) for t in native_tokens(HALVES, how, i)}
    assert drawn == set(expected)


# ---- weights ----


@pytest.mark.parametrize("temperature", [0.3, 1.0, 7.0])
def test_weights_are_exponentials(temperature: float) -> None:
    logits = np.linspace(-20 * temperature, 0, 10_001, dtype=np.float32)
    exact = 2.0**32 * np.exp(logits.astype(np.float64) / temperature)
    found = sampling.weights(logits, np.float32(0), temperature)
    assert np.all(np.abs(found - exact) <= 1 + 2e-6 * exact)
    assert found[-1] == 2**32


def test_weights_far_below_the_maximum_are_zero() -> None:
    found = sampling.weights(row(-22.5, -1e30, -math.inf, 0.0), np.float32(0), 1.0)
    assert found.tolist() == [0, 0, 0, 2**32]


@settings(max_examples=100, deadline=None)
@given(LONG_ROWS, st.sampled_from([1e-9, 0.1, 0.8, 1.0, 3.0, 1e4]))
def test_native_weights_equal_the_oracles(logits: Logits, temperature: float) -> None:
    expected = sampling.weights(logits, logits.max(), temperature)
    for isa in ISAS:
        found = np.zeros(len(logits), dtype=np.uint64)
        at = (logits.ctypes.data, len(logits), temperature, isa, found.ctypes.data)
        assert native.library().cbatch_weights(*at) == 0
        assert np.array_equal(found, expected)


# ---- the generator ----


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Source: Random123, tests/kat_vectors, philox4x32 10
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert sampling.philox(counter, key) == expected
    words = np.zeros(4, dtype=np.uint32)
    native.library().cbatch_philox(
        np.array(counter, dtype=np.uint32).ctypes.data,
        np.array(key, dtype=np.uint32).ctypes.data,
        words.ctypes.data,
    )
    assert tuple(words.tolist()) == expected


def test_draws_depend_on_seed_output_and_choice() -> None:
    logits = np.zeros(5000, dtype=np.float32)
    base = Sampling(top_k=0, top_p=1.0, min_p=0.0)
    other_seed = Sampling(top_k=0, top_p=1.0, min_p=0.0, seed=2**63)
    other_choice = Sampling(top_k=0, top_p=1.0, min_p=0.0, i_choice=1)
    draws = [
        native.sample_row(logits, how, i)
        for how, i in [(base, 0), (base, 1), (other_seed, 0), (other_choice, 0)]
    ]
    assert len(set(draws)) == 4
    assert native.sample_row(logits, base, 0) == draws[0]


def test_many_tokens_of_tiny_weight_are_drawn_in_proportion() -> None:
    logits = np.full(150_000, -17.0, dtype=np.float32)  # e⁻¹⁷ each, 0.6 % together
    logits[-1] = 0.0
    how = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    n_tiny = sum(native.sample_row(logits, how, i) < 149_999 for i in range(2000))
    assert 3 < n_tiny < 30


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1),
        Sampling(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0, seed=2),
        Sampling(temperature=2.0, top_k=4, top_p=1.0, min_p=0.0, seed=3),
    ],
    ids=repr,
)
def test_draws_follow_the_softmax(how: Sampling) -> None:
    logits = row(2.0, 1.0, 0.5, 0.0, -1.0, 1.5)
    ids = kept_by_definition(logits, how)
    p = np.exp(logits[ids].astype(np.float64) / how.temperature)
    n_draws = 20_000
    drawn = np.bincount([native.sample_row(logits, how, i) for i in range(n_draws)], minlength=6)
    expected = n_draws * p / p.sum()
    chi_square = float(np.sum((drawn[ids] - expected) ** 2 / expected))
    assert chi_square < 21  # five degrees of freedom: chance 0.001, but the seeds are fixed
    assert drawn.sum() == drawn[ids].sum()
