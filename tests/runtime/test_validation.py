"""What is refused before it is taken in, one rule at a time."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.core.span import N_TARGETS_MAX, PromptCuts
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.runtime.validation import check_chat, check_fits
from tests.helpers import partitioned

CHAT = BatchPrompt(messages=({"role": "user", "content": "Hi"},))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def check(options: RunOptions, chunk_alignment: int = 0, **schedule: object) -> None:
    backend = FakeBackend(2, 64, 16, memory=partitioned(128))
    backend.cuts = PromptCuts.every(chunk_alignment)
    check_fits(options, backend, ScheduleOptions(**schedule))  # type: ignore[arg-type]


def test_priority_needs_the_policy_that_follows_it() -> None:
    check(RunOptions(priority=1), policy="priority")
    with pytest.raises(ConfigError, match="policy='priority'"):
        check(RunOptions(priority=1))


def test_slot_is_one_of_the_engines() -> None:
    check(RunOptions(slot=1))
    with pytest.raises(ConfigError, match=r"slot=2 is not a slot of this engine, which has 0 … 1"):
        check(RunOptions(slot=2))


@pytest.mark.parametrize("n_keep", [0, -1])
def test_kept_tokens_need_a_window_that_moves_but_where_none_are_named(n_keep: int) -> None:
    check(RunOptions(n_keep=n_keep))
    with pytest.raises(ConfigError, match="n_keep=1 has no effect without n_discard"):
        check(RunOptions(n_keep=1))


def test_saving_what_is_scored_needs_pieces_that_a_step_can_score() -> None:
    options = RunOptions(cache_key="k", save_cache=True, prompt_logprobs=0)
    check(options, chunk_alignment=N_TARGETS_MAX)
    with pytest.raises(ConfigError, match=f"n_ubatch={N_TARGETS_MAX}"):
        check(options, chunk_alignment=N_TARGETS_MAX + 1)


def test_tools_need_a_template_that_shows_them() -> None:
    vocab, options = FakeBackend(2, 64, 16).vocab, RunOptions(tools=[TOOL])
    with patch.object(vocab, "tool_refusal", "it has no tools"):
        check_chat(CHAT, RunOptions(), vocab)
        with pytest.raises(UnsupportedOptionError, match="it has no tools"):
            check_chat(CHAT, options, vocab)
