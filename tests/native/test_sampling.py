"""The native sampler and its oracle in numpy: one token of both."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cbatch.backend.llama import native
from cbatch.core.plan import BROKEN_ROW, EMPTY_ROW, Binding, Slot
from cbatch.errors import PlanError
from cbatch.options import GREEDY, Sampling
from tests.breakers import pack
from tests.oracle import native_row, sampling
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.oracle.sampling import Logits, Mask

ISAS = range(native_row.row_library().cbatch_isa_best() + 1)


def row(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def random_row(n_vocab: int, seed: int, scale: float = 3.0, step: float = 0.0) -> Logits:
    """Return normal logits, rounded to multiples of a `step` so that many are equal."""
    logits = np.random.default_rng(seed).standard_normal(n_vocab) * scale
    return (np.round(logits / step) * step if step else logits).astype(np.float32)


def sample(
    logits: Logits,
    how: Sampling,
    i_output: int = 0,
    history: Sequence[int] = (),
    mask: Mask | None = None,
    isa: int = native.ISA_BEST,
) -> int:
    """Return the token that the native library chooses; the row must be as it was afterwards."""
    before = logits.tobytes()
    binding = Binding(Slot(0), 0, how, (), tuple(history), 5)
    found = native_row.sample_row(logits, binding, i_output, mask=mask, isa=isa)
    assert logits.tobytes() == before
    assert found.token < 0 or found.kept[found.token] > 0
    return found.token


def native_tokens(
    logits: Logits,
    how: Sampling,
    i_output: int = 0,
    history: Sequence[int] = (),
    mask: Mask | None = None,
) -> set[int]:
    return {sample(logits, how, i_output, history, mask, isa) for isa in ISAS}


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


@settings(max_examples=examples(500), deadline=None)
@given(SHORT_ROWS | LONG_ROWS, SAMPLINGS, st.integers(0, 2**31 - 1))
@example(row(-0.0, 0.0), Sampling(top_k=1), 0)
@example(row(1.0, 1.0, 1.0), Sampling(top_p=0.5, top_k=0), 7)
def test_native_row_equals_the_oracle(logits: Logits, how: Sampling, i_output: int) -> None:
    expected = sampling.sample_row(logits, how, i_output)
    assert native_tokens(logits, how, i_output) == {expected}


def everything(n_vocab: int) -> st.SearchStrategy[Sampling]:
    """Samplings with every option, for rows of `n_vocab`."""
    tokens = st.integers(0, min(n_vocab, 40) - 1)
    biases = st.dictionaries(tokens, st.sampled_from([-math.inf, -3.0, 5.0, 100.0]), max_size=5)
    breakers = st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3)
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1e-9, 0.8, 1.0, 30.0]),
        top_k=st.sampled_from([0, 0, 1, 40, 257, 10**9]),
        top_p=st.sampled_from([1.0, 0.95, 0.3]),
        min_p=st.sampled_from([0.0, 0.05, 1.0]),
        seed=st.integers(0, 2**64 - 1),
        i_choice=st.integers(0, 3),
        typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.2, 0.0]) | AMOUNTS,
        top_n_sigma=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]),
        xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
        xtc_threshold=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.6]),
        repeat_penalty=st.sampled_from([1.0, 1.1, 2.0, 0.5]),
        repeat_last_n=st.sampled_from([0, 1, 64, 1000]),
        presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.3, -0.1]),
        dry_multiplier=st.sampled_from([0.0, 0.8, 3.0]),
        dry_base=st.sampled_from([1.75, 1.0, 0.5, 4.0]),
        dry_allowed_length=st.sampled_from([0, 1, 2, 5]),
        dry_penalty_last_n=st.sampled_from([0, 10, 64, 1000]),
        dry_breakers=breakers.map(pack),
        logit_bias=biases.map(lambda found: tuple(sorted(found.items()))),
    )


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_native_row_with_every_option_equals_the_oracle(data: st.DataObject) -> None:
    logits = data.draw(LONG_ROWS)
    n_vocab = len(logits)
    if data.draw(st.booleans()):
        logits[data.draw(st.integers(0, 6)) :: data.draw(st.integers(2, 9))] = -np.inf
    how = data.draw(everything(n_vocab))
    history = data.draw(st.lists(st.integers(0, min(n_vocab, 12) - 1), max_size=150))
    words = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**32 - 1])
    n_words = (n_vocab + 31) // 32
    mask = data.draw(
        st.none()
        | st.lists(words, min_size=1, max_size=9).map(
            lambda found: np.resize(np.array(found, dtype=np.uint32), n_words)
        )
    )
    expected = sampling.sample_row(logits, how, 3, history, mask)
    assert native_tokens(logits, how, 3, history, mask) == {expected}


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
        Sampling(top_k=0, typical_p=0.9, top_p=0.5),
        Sampling(top_k=0, top_n_sigma=2.0, top_p=0.9, xtc_probability=1.0, xtc_threshold=1e-4),
    ],
    ids=lambda how: f"{how.top_k}-{how.typical_p}-{how.top_p}-{how.min_p}-{how.temperature}",
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
def test_row_of_minus_infinities_is_empty(n_vocab: int) -> None:
    logits = np.full(n_vocab, -np.inf, dtype=np.float32)
    assert sampling.sample_row(logits, Sampling(), 0) == EMPTY_ROW
    assert native_tokens(logits, Sampling()) == {EMPTY_ROW}


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
        Sampling(typical_p=-0.1),
        Sampling(typical_p=math.nan),
        Sampling(top_n_sigma=math.inf),
        Sampling(xtc_probability=1.1),
        Sampling(xtc_threshold=-1.0),
        Sampling(repeat_penalty=0.0),
        Sampling(repeat_penalty=-1.0),
        Sampling(repeat_penalty=1e-40),
        Sampling(repeat_penalty=math.inf),
        Sampling(presence_penalty=math.nan),
        Sampling(frequency_penalty=math.inf),
        Sampling(repeat_last_n=-1),
        Sampling(repeat_last_n=2**20 + 1),
        Sampling(dry_multiplier=-1.0),
        Sampling(dry_base=math.nan),
        Sampling(dry_allowed_length=-1),
        Sampling(dry_penalty_last_n=-1),
        *(
            Sampling(dry_multiplier=1.0, dry_breakers=array("i", numbers).tobytes())
            for numbers in ([-1], [1], [1, 0], [1, 0, 0], [2, 1, 0, 0, 0, 1, 0], [0, 1], [0, 1, 1])
        ),
        Sampling(logit_bias=((2, 1.0),)),
        Sampling(logit_bias=((-1, 1.0),)),
        Sampling(logit_bias=((0, math.nan),)),
        Sampling(logit_bias=((0, math.inf),)),
    ],
    ids=repr,
)
def test_sampling_value_out_of_range_is_refused(how: Sampling) -> None:
    with pytest.raises(PlanError):
        sample(row(1.0, 2.0), how, 0)


def test_history_with_a_token_that_is_not_there_is_refused() -> None:
    for history in ([2], [-1]):
        with pytest.raises(PlanError):
            sample(row(1.0, 2.0), Sampling(), history=history)


# ---- filters by hand ----

HALVES = np.log(np.array([4, 8, 2, 1, 1], dtype=np.float32))  # shares 1/4, 1/2, 1/8, 1/16, 1/16


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"top_k": 2}, [1, 0]),
        ({"top_k": 4}, [1, 0, 2, 3]),
        ({"top_p": 0.7}, [1, 0]),
        ({"top_p": 0.8}, [1, 0, 2]),
        ({"top_k": 2, "top_p": 0.6}, [1]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 0.2}, [1, 0, 2]),
        ({"min_p": 1.0}, [1]),
        ({}, [1, 0, 2, 3, 4]),
        # −log p is 1.39; the entropy is 1.30, that of the first 0.69
        ({"typical_p": 0.2}, [0]),
        ({"typical_p": 0.5}, [1, 0]),
        ({"top_n_sigma": 1.0}, [1, 0]),  # the deviation is 0.80, the distances 0.69 and 1.39
        ({"top_n_sigma": 2.0}, [1, 0, 2]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.1}, [2, 3, 4]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.2}, [0, 2, 3, 4]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.5}, [1, 0, 2, 3, 4]),
        ({"logit_bias": ((1, -math.inf), (4, 1.0))}, [0, 4, 2, 3]),
    ],
    ids=str,
)
def test_filters_keep_what_their_names_say(given: dict[str, Any], expected: list[int]) -> None:
    how = replace(Sampling(top_k=0, top_p=1.0, min_p=0.0), **given)
    assert list(sampling.kept_ids(sampling.edited(HALVES, how, ()), how)) == expected
    assert {t for i in range(200) for t in native_tokens(HALVES, how, i)} == set(expected)


def test_greedy_is_the_likeliest_whatever_the_filters_say() -> None:
    how = replace(GREEDY, typical_p=0.1, xtc_probability=1.0, xtc_threshold=0.0)
    assert native_tokens(HALVES, how) == {1}


# ---- history and masks ----

FREE = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def edited_logits(history: Sequence[int], **options: object) -> list[float]:
    """Return log-probabilities of 10 tokens that were alike, each relative to the likeliest."""
    how = replace(FREE, **options)  # type: ignore[arg-type]
    logits = np.full(10, 2.0, dtype=np.float32)
    kept = native_row.sample_row(logits, Binding(Slot(0), 0, how, (), tuple(history))).kept
    with np.errstate(divide="ignore"):
        return [round(x, 3) for x in np.log(kept / 2.0**32).tolist()]


def test_penalties_count_the_newest_tokens_alone() -> None:
    history = [1, 1, 2, 1, 3, 3]
    assert edited_logits(history, repeat_penalty=2.0)[:5] == [0, -1, -1, -1, 0]
    assert edited_logits(history, repeat_penalty=2.0, repeat_last_n=2)[:5] == [0, 0, 0, -1, 0]
    assert edited_logits(history, presence_penalty=0.5)[:5] == [0, -0.5, -0.5, -0.5, 0]
    assert edited_logits(history, frequency_penalty=0.5)[:5] == [0, -1.5, -0.5, -1, 0]
    assert edited_logits(history, frequency_penalty=0.5, repeat_last_n=3)[:5] == [0, -0.5, 0, -1, 0]
    assert edited_logits(history, repeat_penalty=2.0, repeat_last_n=0) == [0] * 10


def test_dry_lowers_what_goes_on_with_a_repetition() -> None:
    history = [1, 2, 3, 4, 9, 1, 2, 3]
    found = edited_logits(history, dry_multiplier=1.0, dry_base=2.0)
    assert found == [0, 0, 0, 0, -2, 0, 0, 0, 0, 0]  # three tokens repeated, two are free: 2 ** 1
    broken = edited_logits(history, dry_multiplier=1.0, dry_base=2.0, dry_breakers=pack([(2,)]))
    assert broken == [0] * 10


def test_mask_bans_what_has_no_bit() -> None:
    mask = np.array([1 << 1 | 1 << 31, 1 << 2], dtype=np.uint32)
    drawn = {sample(np.zeros(40, np.float32), FREE, i, mask=mask) for i in range(200)}
    assert drawn == {1, 31, 34}


def test_mask_without_a_bit_gives_an_empty_row() -> None:
    mask = np.array([0, 1 << 31], dtype=np.uint32)  # a bit past the vocabulary
    assert native_tokens(np.zeros(40, np.float32), FREE, mask=mask) == {EMPTY_ROW}


@pytest.mark.parametrize("how", [GREEDY, Sampling()], ids=repr)
def test_bans_of_all_that_a_mask_allows_give_an_empty_row(how: Sampling) -> None:
    logits, mask = np.zeros(40, np.float32), np.array([0b110, 0], dtype=np.uint32)
    banned = replace(how, logit_bias=((1, -math.inf), (2, -math.inf)))
    assert native_tokens(logits, banned, mask=mask) == {EMPTY_ROW}
    assert sampling.sample_row(logits, banned, 0, mask=mask) == EMPTY_ROW
    one_left = replace(how, logit_bias=((1, -math.inf),))
    assert native_tokens(logits, one_left, mask=mask) == {2}


@pytest.mark.parametrize("bad", [3, 39])
def test_nan_under_a_mask_breaks_the_row(bad: int) -> None:
    logits = np.zeros(40, np.float32)
    logits[bad] = np.nan
    mask = np.array([1, 0], dtype=np.uint32)
    assert native_tokens(logits, FREE, mask=mask) == {BROKEN_ROW}


def test_mask_that_allows_few_of_many_leaves_top_k_what_there_is() -> None:
    logits = random_row(151_936, seed=3)
    mask = np.zeros(151_936 // 32, dtype=np.uint32)
    mask[[17, 18, 4000]] = 1 << 3
    for i in range(20):
        expected = sampling.sample_row(logits, Sampling(), i, (), mask)
        assert native_tokens(logits, Sampling(), i, (), mask) == {expected}


# ---- log-probabilities ----


@settings(max_examples=examples(150), deadline=None)
@given(LONG_ROWS.filter(lambda logits: np.abs(logits).max() < 1e6), st.integers(0, 20))
def test_logprobs_are_those_of_the_raw_logits(logits: Logits, n_top: int) -> None:
    how = Sampling(repeat_penalty=2.0, logit_bias=((0, -math.inf),) if len(logits) > 1 else ())
    binding = Binding(Slot(0), 0, how, (), (0,), n_top)
    for isa in ISAS:
        found = native_row.sample_row(logits, binding, isa=isa)
        wanted = sampling.logprobs(logits, found.token, n_top)
        assert found.logprobs is not None
        assert found.logprobs.logprob == pytest.approx(wanted.logprob, abs=1e-5, rel=1e-6)
        assert [t for t, _ in found.logprobs.top] == [t for t, _ in wanted.top]
        assert [p for _, p in found.logprobs.top] == pytest.approx(
            [p for _, p in wanted.top], abs=1e-5, rel=1e-6
        )


def test_logprobs_leave_out_what_cannot_be() -> None:
    logits = np.array([-math.inf, 1.0, -math.inf, 1.0], dtype=np.float32)
    found = native_row.sample_row(logits, Binding(Slot(0), 0, GREEDY, (), (), 20)).logprobs
    assert found is not None
    assert found.logprob == pytest.approx(math.log(0.5))
    assert [token for token, _ in found.top] == [1, 3]


def test_logprobs_of_a_broken_row_are_not_numbers() -> None:
    found = native_row.sample_row(row(1.0, math.nan), Binding(Slot(0), 0, GREEDY, (), (), 2))
    assert found.logprobs is not None
    assert math.isnan(found.logprobs.logprob)
    assert found.logprobs.top == ()


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


@settings(max_examples=examples(100), deadline=None)
@given(LONG_ROWS, st.sampled_from([1e-9, 0.1, 0.8, 1.0, 3.0, 1e4]))
def test_native_weights_equal_the_oracles(logits: Logits, temperature: float) -> None:
    expected = sampling.weights(logits, logits.max(), temperature)
    for isa in ISAS:
        found = np.zeros(len(logits), dtype=np.uint64)
        at = (logits.ctypes.data, len(logits), temperature, isa, found.ctypes.data)
        assert native_row.row_library().cbatch_weights(*at) == 0
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
    native_row.row_library().cbatch_philox(
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
        sample(logits, how, i)
        for how, i in [(base, 0), (base, 1), (other_seed, 0), (other_choice, 0)]
    ]
    assert len(set(draws)) == 4
    assert sample(logits, base, 0) == draws[0]
