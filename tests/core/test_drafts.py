"""Draft tokens in the scheduler: answers as without them, in fewer steps; none where cells may not suffice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.backend.fake import StepCost
from cbatch.core.plan import KvCapabilities
from cbatch.core.span import PromptCuts
from cbatch.engine_options import MAX_DRAFTS
from cbatch.response import DRAFT_COUNTS
from tests.helpers import Rig, drive, make_scheduler, make_sequences
from tests.profiles import examples

MEMORY = KvCapabilities("partitioned", 3 * 64, can_draft=True)


def played(
    n: int = 6,
    options: dict[str, Any] | None = None,
    memory: KvCapabilities = MEMORY,
    n_prompt: int = 4,
    **given: Any,
) -> Rig:
    rig = make_scheduler(3, memory=memory, **given)
    rig.submit(*make_sequences(n, n_prompt=n_prompt, **{"max_tokens": 40, **(options or {})}))
    drive(rig)
    return rig


def answers(rig: Rig) -> dict[str, tuple[object, str]]:
    return {id: (r.token_ids, r.finish_reason) for id, r in rig.results.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "end": {"ignore_eos": False},
    "stop": {"stop": ["R"]},
    "penalty": {"temperature": 0.9, "repeat_penalty": 1.2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_answers_are_those_without_drafts_in_fewer_steps(options: dict[str, Any]) -> None:
    plain, drafted = played(options=options, speculate="off"), played(options=options)
    assert answers(drafted) == answers(plain)
    assert drafted.backend.n_steps < plain.backend.n_steps
    stats = drafted.stats
    assert 0 < stats.n_accepted_tokens < stats.n_draft_tokens
    if "stop" not in options:  # what is sampled behind a stop string counts
        assert stats.n_output_tokens == plain.stats.n_output_tokens
    assert plain.stats.n_draft_tokens == 0


def test_cap_and_window_hold_in_the_middle_of_drafts() -> None:
    for cap in range(1, 20):
        rig = played(n=3, options={"max_tokens": cap})
        assert [len(r.token_ids) for r in rig.results.values()] == [cap] * 3
    rig = played(n=3, n_window=16, options={"max_tokens": None})
    assert {r.finish_reason for r in rig.results.values()} == {"window"}


@pytest.mark.parametrize("can_draft", [True, False])
def test_memory_without_drafts_has_none(can_draft: bool) -> None:
    memory = KvCapabilities("partitioned", 3 * 64, can_draft=can_draft)
    rig = played(n_window=64, memory=memory)
    assert {p.n_drafts for p in rig.backend.plans} == ({0, MAX_DRAFTS} if can_draft else {0})
    assert any(b.has_drafts for p in rig.backend.plans for b in p.binds) is can_draft


def test_full_pool_has_no_drafts_and_loses_nothing() -> None:
    tight = KvCapabilities("unified", 100, can_draft=True, can_save=True)
    plain = played(memory=tight, speculate="off")
    for memory in (tight, replace(tight, n_cells=1000)):
        made = played(memory=memory)
        assert answers(made) == answers(plain)
        assert any(p.n_drafts for p in made.backend.plans) is (memory.n_cells == 1000)


def test_aligned_chunks_have_no_drafts() -> None:
    rig = played(cuts=PromptCuts.every(8))
    assert {p.n_drafts for p in rig.backend.plans} == {0}


@given(
    n=st.integers(1, 9),
    n_prompt=st.integers(1, 20),
    cap=st.integers(1, 60),
    options=st.sampled_from([*OPTIONS.values()]),
    speculate=st.sampled_from(["auto", "ngram", "job", 1, 2, 3, 5, MAX_DRAFTS]),
    memory=st.sampled_from([MEMORY, KvCapabilities("unified", 600, can_draft=True, can_save=True)]),
)
@settings(max_examples=examples(1800), deadline=None)
def test_random_workload_is_answered_as_without_drafts(
    n: int,
    n_prompt: int,
    cap: int,
    options: dict[str, Any],
    speculate: str | int,
    memory: KvCapabilities,
) -> None:
    given: dict[str, Any] = {"memory": memory, "n_prompt": n_prompt}
    given["options"] = {"max_tokens": cap, **options}
    plain, drafted = played(n, speculate="off", **given), played(n, speculate=speculate, **given)
    assert answers(drafted) == answers(plain)
    check_counts(drafted)


def check_counts(rig: Rig) -> None:
    """Check that the draft tokens of all requests are those of the scheduler."""
    for name in DRAFT_COUNTS:
        found = sum(getattr(r.timings, name) for r in rig.results.values())
        assert found == getattr(rig.stats, name)


@pytest.mark.parametrize(
    ("speculate", "sources"),
    [
        ("auto", {(True, True)}),
        (3, {(True, True)}),
        ("ngram", {(True, False)}),
        ("job", {(True, False)}),
        ("off", {(False, False)}),
    ],
)
def test_sources_are_those_that_were_asked_for(
    speculate: str | int, sources: set[tuple[bool, bool]]
) -> None:
    rig = played(speculate=speculate)
    binds = [b for p in rig.backend.plans for b in p.binds]
    assert {(b.has_drafts, b.has_model_drafts) for b in binds} == sources


def test_number_is_the_most_drafts_after_a_row() -> None:
    rig = played(speculate=2)
    assert {p.n_drafts for p in rig.backend.plans} == {0, 2}


def test_steps_cost_what_rows_and_draft_tokens_take_together() -> None:
    rig = played(cost=StepCost(base_s=1.0, token_s=0.1))
    costs_s = rig.scheduler.costs.widths_s
    assert max(costs_s) > 3
    assert costs_s == pytest.approx({n: 1.0 + 0.1 * n for n in costs_s}, rel=0.1)
