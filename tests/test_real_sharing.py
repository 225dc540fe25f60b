"""On llama.cpp: whatever is shared, kept, moved or read from disk, the tokens are those of computing it all alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cbatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

SIZES: dict[str, Any] = {"ctx_per_seq": 512, "n_batch": 64, "n_ubatch": 32, "n_threads": 1}
"""Under `exact` prompts are computed in pieces of 32 tokens, so short ones share some."""


@pytest.fixture(scope="module")
def sharing(test_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cells = tmp_path_factory.mktemp("cells")
    with cbatch.load(test_model, parallel=5, exact=True, cache_dir=cells, **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def lonely(test_model: Path) -> Iterator[Engine]:
    settings = {**SIZES, "parallel": 1, "share_prefixes": False}
    with cbatch.load(test_model, exact=True, **settings) as engine:
        yield engine


@st.composite
def requests(draw: st.DrawFn) -> cbatch.BatchPrompt:
    """A prompt that begins as others do, with a short answer."""
    n_common, n_own = draw(st.sampled_from([0, 31, 32, 33, 64, 97, 200])), draw(st.integers(1, 40))
    base, own = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    tokens = [5 + (7 * i + 11 * base) % 190 for i in range(n_common)]
    tokens += [5 + (3 * i + 17 * own + base) % 190 for i in range(n_own)]
    options = {
        "max_tokens": draw(st.integers(1, 12)),
        "temperature": draw(st.sampled_from([0.0, 1.0])),
        "seed": draw(st.integers(0, 3)),
        "ignore_eos": True,
        "prefill_only": draw(st.integers(0, 7)) == 7,
        "cache_key": draw(st.sampled_from([None, None, f"base {base}"])),
    }
    return cbatch.BatchPrompt(tokens=tokens, options=options)


@given(st.lists(requests(), min_size=1, max_size=9), st.integers(0, 9))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_prompts_with_common_beginnings_give_the_tokens_of_alone(
    sharing: Engine, lonely: Engine, prompts: list[cbatch.BatchPrompt], n_first: int
) -> None:
    together = sharing.run(prompts[:n_first]).results() if prompts[:n_first] else []
    together += sharing.run(prompts[n_first:]).results() if prompts[n_first:] else []
    plain = [
        cbatch.BatchPrompt(tokens=p.tokens, options={**_said(p), "cache_key": None})
        for p in prompts
    ]
    for found, expected in zip(together, lonely.run(plain).results(), strict=True):
        assert found.token_ids == expected.token_ids
        assert found.usage.prompt_tokens == expected.usage.prompt_tokens


def _said(prompt: cbatch.BatchPrompt) -> dict[str, Any]:
    options = cbatch.RunOptions.of(prompt.options)
    names = ("max_tokens", "temperature", "seed", "ignore_eos", "prefill_only")
    return {name: getattr(options, name) for name in names}


def test_sharing_has_saved_work_in_these_tests(sharing: Engine) -> None:
    prompt = cbatch.BatchPrompt(tokens=[5 + i % 100 for i in range(200)])
    options = {"max_tokens": 2, "cache_key": "base 0", "save_cache": True}
    first, second = (sharing.submit(prompt, options=options).result() for _ in range(2))
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 192)
