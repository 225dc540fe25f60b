"""Prompts become tokens once, and so does the first message of a chat where the window moves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeVocab
from cbatch.core.driver import SequenceDriver
from cbatch.messages import BatchPrompt
from cbatch.runtime.prompts import PromptTokenizer
from tests.helpers import make_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.options import RunOptions

CHAT = BatchPrompt(messages=tuple({"role": "user", "content": c} for c in "ab"))


def prepared(prompt: BatchPrompt, **options: Any) -> tuple[SequenceDriver, int]:
    """A sequence that was prepared twice, and how often something was made tokens."""
    asked: list[BatchPrompt] = []

    def tokenize(prompt: BatchPrompt, options: RunOptions) -> Sequence[int]:
        asked.append(prompt)
        return range(10) if prompt.messages is None else range(3 * len(prompt.messages))

    request = replace(make_request(**options), prompt=prompt)
    driver = SequenceDriver.of(request, FakeVocab(320).piece, 0.0)
    for _ in range(2):
        PromptTokenizer(tokenize, 16).tokenize(driver)
    return driver, len(asked)


def test_choices_of_a_request_share_the_tokens_of_its_prompt() -> None:
    asked: list[BatchPrompt] = []

    def tokenize(prompt: BatchPrompt, options: RunOptions) -> Sequence[int]:
        asked.append(prompt)
        return range(3)

    tokenizer = PromptTokenizer(tokenize, 16)
    one, other = make_request(n=3), make_request(n=3)
    for request in (one, one, other, other):
        found = tokenizer.find(replace(request, n_prompt_logprobs=None))
        assert getattr(found, "tokens", None) == range(3)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("prompt", "n_discard", "n_asked", "n_keep"),
    [
        (BatchPrompt(tokens=(1,)), 0, 1, 0),
        (BatchPrompt(tokens=(1,)), 4, 1, 1),
        (CHAT, 0, 1, 0),
        (CHAT, 4, 2, 3),
    ],
)
def test_prompt_is_tokenized_once_and_its_first_message_where_kept(
    prompt: BatchPrompt, n_discard: int, n_asked: int, n_keep: int
) -> None:
    driver, n = prepared(prompt, n_discard=n_discard)
    assert (n, driver.window.n_keep if driver.window else 0) == (n_asked, n_keep)
