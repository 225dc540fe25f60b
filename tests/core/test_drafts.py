"""Draft tokens in the scheduler: answers as without them, in fewer steps; none where cells may not suffice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cbatch.core.plan import KvCapabilities, PromptCuts
from cbatch.core.scheduler import N_DRAFTS_MAX
from tests.helpers import Rig, drive, make_scheduler, make_sequences


def played(
    n_slots: int = 3, n: int = 6, options: dict[str, Any] | None = None, **given: Any
) -> Rig:
    rig = make_scheduler(n_slots, **given)
    rig.submit(*make_sequences(n, **{"max_tokens": 40, **(options or {})}))
    drive(rig)
    return rig


def answers(rig: Rig) -> dict[str, tuple[object, str]]:
    return {id: (r.token_ids, r.finish_reason) for id, r in rig.results.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_eos": False},
        {"stop": ["R"]},
        {"temperature": 0.9, "repeat_penalty": 1.2},
        {"logprobs": True, "top_logprobs": 2},
    ],
    ids=["plain", "end", "stop", "penalty", "logprobs"],
)
def test_answers_are_those_without_drafts_in_fewer_steps(options: dict[str, Any]) -> None:
    plain, drafted = played(options=options), played(options=options, speculate="auto")
    assert answers(drafted) == answers(plain)
    assert drafted.backend.n_steps < plain.backend.n_steps
    stats = drafted.stats
    assert 0 < stats.n_accepted_tokens < stats.n_draft_tokens
    if "stop" not in options:  # what is sampled behind a stop string counts
        assert stats.n_output_tokens == plain.stats.n_output_tokens
    assert plain.stats.n_draft_tokens == 0


def test_cap_and_window_hold_in_the_middle_of_drafts() -> None:
    for cap in range(1, 20):
        rig = played(n=3, options={"max_tokens": cap}, speculate="auto")
        assert [len(r.token_ids) for r in rig.results.values()] == [cap] * 3
    rig = played(n=3, n_window=16, options={"max_tokens": None}, speculate="auto")
    assert {r.finish_reason for r in rig.results.values()} == {"window"}


@pytest.mark.parametrize("can_trim", [True, False])
def test_memory_that_cannot_be_cut_has_no_drafts(can_trim: bool) -> None:
    memory = KvCapabilities("partitioned", 3 * 64, can_trim=can_trim)
    rig = played(n_window=64, memory=memory, speculate="auto")
    assert {p.n_drafts for p in rig.backend.plans} == ({0, N_DRAFTS_MAX} if can_trim else {0})
    assert any(b.has_drafts for p in rig.backend.plans for b in p.binds) is can_trim


def test_full_pool_has_no_drafts_and_loses_nothing() -> None:
    memory = KvCapabilities("unified", 100, can_save=True)
    wide = replace(memory, n_cells=1000)
    plain = played(memory=memory)
    for made, cells in (
        (played(memory=memory, speculate="auto"), 100),
        (played(memory=wide, speculate="auto"), 1000),
    ):
        assert answers(made) == answers(plain)
        assert any(p.n_drafts for p in made.backend.plans) is (cells == 1000)


def test_aligned_chunks_have_no_drafts() -> None:
    rig = played(cuts=PromptCuts.every(8), speculate="auto")
    assert {p.n_drafts for p in rig.backend.plans} == {0}
