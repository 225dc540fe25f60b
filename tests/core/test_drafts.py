"""Draft tokens in the scheduler: answers as without them, in fewer steps; none where cells may not suffice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cbatch.core.plan import KvCapabilities, PromptCuts
from cbatch.core.scheduler import N_DRAFTS_MAX
from tests.helpers import Rig, drive, make_scheduler, make_sequences

MEMORY = KvCapabilities("partitioned", 3 * 64, can_draft=True)


def played(
    n: int = 6,
    options: dict[str, Any] | None = None,
    memory: KvCapabilities = MEMORY,
    **given: Any,
) -> Rig:
    rig = make_scheduler(3, memory=memory, **given)
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
    assert {p.n_drafts for p in rig.backend.plans} == ({0, N_DRAFTS_MAX} if can_draft else {0})
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
