"""What is told of a sequence: its chunks, and its result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import BatchPrompt, Engine
from cbatch.backend.fake import FakeBackend, FakeVocab, fake_logprobs
from cbatch.core.driver import SequenceDriver
from cbatch.core.plan import Slot
from cbatch.errors import SequenceStateError
from cbatch.response import TokenLogprob
from cbatch.runtime import loop, output
from cbatch.runtime.delivery import deliver
from cbatch.runtime.output import result_of, take_chunk
from cbatch.runtime.prompt_fit import set_prompt
from tests.core.drivers import HALF, N_WINDOW, A, B, C, D, make_running
from tests.helpers import make_request

if TYPE_CHECKING:
    from cbatch.response import BatchOutputChunk


def test_chunk_for_each_token_does_not_wait_for_text() -> None:
    driver = make_running(stop="cd")
    chunks: list[BatchOutputChunk | None] = []
    for token in (A, HALF, B, C, D):
        driver.accept(2 if not chunks else 1, [token], 2.0)
        chunks.append(take_chunk(driver, by_token=True))
        assert driver.finish_reason is not None or take_chunk(driver, by_token=True) is None
    given = [c for c in chunks if c is not None]
    assert [c.token_ids for c in given] == [(A,), (HALF,), (B,), (C,), (D,)]
    assert [c.text for c in given] == ["a", "", "\ufffdb", "", ""]
    assert given[-1].finish_reason == "stop"


def test_tokens_without_text_are_told_where_the_sequence_pauses() -> None:
    driver = make_running(pause_every=2)
    driver.accept(2, [A], 2.0)
    assert take_chunk(driver) is not None
    driver.accept(1, [HALF], 2.0)
    chunk = take_chunk(driver)
    assert chunk is not None
    assert (chunk.token_ids, chunk.text) == ((HALF,), "")
    assert take_chunk(driver) is None


def test_first_chunk_of_an_extension_has_known_log_probabilities() -> None:
    driver = extension(A, B)
    set_prompt(driver, [1, 2], N_WINDOW)
    driver.admit(Slot(0), 1.0)
    driver.accept(4, [C], 2.0, logprobs=[fake_logprobs(C, 0)])
    chunk = take_chunk(driver)
    assert chunk is not None
    assert [token.logprob for token in chunk.logprobs or ()] == [
        -1.0,
        -1.0,
        fake_logprobs(C, 0).logprob,
    ]
    driver.cancel(3.0)
    assert result_of(driver).logprobs == chunk.logprobs


def test_result_before_the_end_raises() -> None:
    with pytest.raises(SequenceStateError, match="not finished"):
        result_of(make_running())


# ---- what ended it ----


@pytest.mark.parametrize(
    ("sampled", "options", "reason", "expected"),
    [
        ([A, B, C], {"stop": ["x", "bc"]}, "stop", "bc"),
        ([A, B, C, D], {"stop": ["x", "bc"], "include_stop": True}, "stop", "bc"),
        ([A, B, C], {"stop_token_ids": [C], "stop": "x"}, "stop", C),
        ([0], {"stop_token_ids": [0]}, "stop", 0),
        ([A, B, C], {"stop_token_ids": [C], "stop": "bc"}, "stop", C),
        ([A, B, C, D], {"stop_token_ids": [D], "stop": "bc"}, "stop", "bc"),
        ([A, 256], {"ignore_eos": False}, "stop", None),
        ([A, 256], {"stop_token_ids": [256]}, "stop", 256),
        ([A, B], {"max_tokens": 2, "stop": "x"}, "length", None),
    ],
)
@pytest.mark.parametrize("is_one_run", [True, False])
def test_stop_reason_is_the_callers_string_or_token(
    sampled: list[int],
    options: dict[str, Any],
    reason: str,
    expected: object,
    is_one_run: bool,
) -> None:
    driver = make_running(**options)
    runs = [sampled] if is_one_run else [[token] for token in sampled]
    for run in runs:
        if driver.finish_reason is None:
            driver.accept(2 if driver.n_computed == 0 else 1, run, 2.0)
    result = result_of(driver)
    assert (result.finish_reason, result.stop_reason) == (reason, expected)


def test_tokens_past_a_stop_string_are_not_timed() -> None:
    driver = make_running(stop="bc")
    driver.accept(2, [A], 2.0)
    driver.accept(1, [B, C, D, A], 10.0, later_s=6.0)  # at 4, 6, 8 and 10 s
    timings = result_of(driver).timings
    assert (timings.ttft_s, timings.last_token_s, timings.total_s) == (2.0, 6.0, 10.0)
    assert timings.generation_tps == 2 / 4


def test_failed_and_cancelled_answers_have_no_stop_reason() -> None:
    cancelled, broken = make_running(stop="x"), make_running(stop="x")
    cancelled.cancel(2.0)
    broken.accept(2, [-1], 2.0)
    assert [result_of(d).stop_reason for d in (cancelled, broken)] == [None, None]


# ---- what goes on from a result ----


def extension(*output: int) -> SequenceDriver:
    """A sequence that goes on from some output, with a log-probability for each token."""
    known = tuple(TokenLogprob(token, b"", -1.0) for token in output)
    request = replace(make_request(logprobs=0), output=output, output_logprobs=known)
    return SequenceDriver.of(request, FakeVocab(320).piece, 0.0)


def test_rate_of_an_extension_counts_what_it_sampled_itself() -> None:
    driver = extension(A, B, C)
    set_prompt(driver, [1, 2], N_WINDOW)
    driver.admit(Slot(0), 1.0)
    for i, token in enumerate((A, B, D)):
        driver.accept(5 if not i else 1, [token], 2.0 + i)
    driver.cancel(4.0)
    assert result_of(driver).timings.generation_tps == 1.0  # two tokens behind its first in 2 s


@pytest.mark.parametrize(("n_reused", "rate"), [(0, 5.0), (3, 2.0), (4, 1.0)])
def test_prompt_rate_of_an_extension_counts_all_that_it_computed_first(
    n_reused: int, rate: float
) -> None:
    driver = extension(A, B, C)
    set_prompt(driver, [1, 2], N_WINDOW)
    driver.admit(Slot(0), 1.0)
    driver.reuse(n_reused)
    driver.accept(5 - n_reused, [D], 2.0)
    driver.cancel(4.0)
    result = result_of(driver)
    assert result.timings.prompt_tps == rate
    assert result.usage.cached_tokens == min(n_reused, 2)


def test_extension_that_never_ran_tells_of_no_token() -> None:
    driver = extension(A, B, C)
    driver.cancel(1.0)
    assert (result_of(driver).token_ids, result_of(driver).logprobs) == ((), ())


@pytest.mark.parametrize(
    ("n_prompt", "options"),
    [
        (1, {"max_tokens": 400, "logprobs": True}),
        (401, {"max_tokens": 0, "prompt_logprobs": 2}),
        (401, {"max_tokens": 1, "prompt_logprobs": 2, "logprobs": 2, "echo": True}),
    ],
    ids=["output", "prompt", "echo"],
)
def test_scores_of_a_result_are_made_as_its_tokens_come(
    monkeypatch: pytest.MonkeyPatch, n_prompt: int, options: dict[str, Any]
) -> None:
    n_made, made = [0], output._logprob

    def counted(*args: Any) -> TokenLogprob:
        n_made[-1] += 1
        return made(*args)

    def delivered(*args: Any) -> bool:
        n_made.append(0)
        return deliver(*args)

    monkeypatch.setattr(output, "_logprob", counted)
    monkeypatch.setattr(loop, "deliver", delivered)
    with Engine(FakeBackend(1, 512)) as engine:
        prompt = BatchPrompt(tokens=[1] * n_prompt)
        engine.submit(prompt, options={"ignore_eos": True, **options}).result()
    assert sum(n_made) == 400 + (options["max_tokens"] == 1)
    assert max(n_made) < 100
