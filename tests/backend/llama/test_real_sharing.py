"""On llama.cpp: whatever is shared, kept, moved or read from disk, the tokens are those of computing it all alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cbatch
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

SIZES: dict[str, Any] = {"ctx_per_seq": 512, "n_batch": 64, "n_ubatch": 32, "n_threads": 1}
"""Under `exact` prompts are computed in pieces of 32 tokens, so short ones share some."""


@pytest.fixture(scope="module")
def sharing(test_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cells = tmp_path_factory.mktemp("cells")
    load = partial(cbatch.load, test_model, parallel=5, exact=True, cache_dir=cells, **SIZES)
    with load() as engine:
        for base in range(3):
            options = {"cache_key": f"base {base}", "save_cache": True, "prefill_only": True}
            engine.submit(cbatch.BatchPrompt(tokens=common(base, 200), options=options)).result()
    with load() as engine:
        yield engine


@pytest.fixture(scope="module")
def lonely(test_model: Path) -> Iterator[Engine]:
    settings = {**SIZES, "parallel": 1, "share_prefixes": False}
    with cbatch.load(test_model, exact=True, **settings) as engine:
        yield engine


def common(base: int, n: int) -> list[int]:
    return [5 + (7 * i + 11 * base) % 190 for i in range(n)]


@st.composite
def requests(draw: st.DrawFn) -> cbatch.BatchPrompt:
    """A prompt that begins as others do, with a short answer."""
    n_common, n_own = draw(st.sampled_from([0, 31, 32, 33, 64, 97, 200])), draw(st.integers(1, 40))
    base, own = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    tokens = common(base, n_common) + [5 + (3 * i + 17 * own + base) % 190 for i in range(n_own)]
    options = {
        "max_tokens": draw(st.integers(1, 12)),
        "temperature": draw(st.sampled_from([0.0, 1.0])),
        "seed": draw(st.integers(0, 3)),
        "ignore_eos": True,
        "n": draw(st.sampled_from([1, 1, 3])),
        "logprobs": draw(st.sampled_from([None, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
        "regex": draw(st.sampled_from([None, None, "[a-z ]+"])),
        "cache_key": draw(st.sampled_from([None, None, f"base {base}"])),
    }
    options["prefill_only"] = options["n"] == 1 and draw(st.integers(0, 7)) == 7
    return cbatch.BatchPrompt(tokens=tokens, options=options)


@given(st.lists(requests(), min_size=1, max_size=9), st.integers(0, 9))
@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_prompts_with_common_beginnings_give_the_tokens_of_alone(
    sharing: Engine, lonely: Engine, prompts: list[cbatch.BatchPrompt], n_first: int
) -> None:
    together = sharing.run(prompts[:n_first]).results() if prompts[:n_first] else []
    together += sharing.run(prompts[n_first:]).results() if prompts[n_first:] else []
    plain = [replace(p, options=replace(options_of(p), cache_key=None)) for p in prompts]
    for found, expected in zip(together, lonely.run(plain).results(), strict=True):
        assert found.token_ids == expected.token_ids
        assert found.usage.prompt_tokens == expected.usage.prompt_tokens
        assert (found.logprobs, found.prompt_logprobs) == (
            expected.logprobs,
            expected.prompt_logprobs,
        )
        assert [c.token_ids for c in found.choices] == [c.token_ids for c in expected.choices]


def options_of(prompt: cbatch.BatchPrompt) -> cbatch.RunOptions:
    return cbatch.RunOptions.of(prompt.options)


def test_sharing_has_saved_work_in_these_tests(sharing: Engine) -> None:
    prompt = cbatch.BatchPrompt(tokens=[5 + i % 100 for i in range(200)])
    options = {"max_tokens": 2, "cache_key": "base 0", "save_cache": True}
    first, second = (sharing.submit(prompt, options=options).result() for _ in range(2))
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 192)
