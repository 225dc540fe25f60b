"""What is told of a sequence: its chunks, and its result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.fake_vocab import FakeVocab
from cbatch.core.driver import SequenceDriver
from cbatch.core.outcome import result_of, take_chunk
from cbatch.core.plan import Slot
from cbatch.errors import SequenceStateError
from cbatch.response import TokenLogprob
from tests.core.drivers import HALF, N_WINDOW, A, B, C, D, make_driver, make_running
from tests.helpers import make_request

if TYPE_CHECKING:
    from cbatch.response import BatchOutputChunk


def test_chunks_joined_are_the_result() -> None:
    driver = make_running(stop="cd")
    chunks: list[BatchOutputChunk | None] = []
    for token in (A, HALF, B, C, B, C, D):
        driver.accept(2 if not chunks else 1, [token], 2.0)
        chunks.append(take_chunk(driver))
    given = [c for c in chunks if c is not None]
    assert [c.text for c in given] == ["a", "\ufffdb", "cb", ""]
    assert [c.finish_reason for c in given] == [None, None, None, "stop"]
    assert "".join(c.text for c in given) == result_of(driver).text
    assert tuple(t for c in given for t in c.token_ids) == result_of(driver).token_ids


def test_nothing_new_gives_no_chunk() -> None:
    driver = make_running()
    assert take_chunk(driver) is None
    driver.accept(2, [A], 2.0)
    assert take_chunk(driver) is not None
    assert take_chunk(driver) is None


def test_result_before_the_end_raises() -> None:
    with pytest.raises(SequenceStateError, match="not finished"):
        result_of(make_running())


def test_result_reports_the_seed_and_the_counts() -> None:
    driver = make_driver(seed=7, max_tokens=1)
    driver.prepare([1, 2, 3], N_WINDOW)
    driver.admit(Slot(0), 1.0)
    driver.accept(3, [A], 2.0)
    result = result_of(driver)
    assert result.seed == 7
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 1)
    assert (result.timings.queue_s, result.timings.ttft_s) == (1.0, 2.0)


# ---- what goes on from a result ----


def extension(*output: int) -> SequenceDriver:
    """A sequence that goes on from some output, with a log-probability for each token."""
    known = tuple(TokenLogprob(token, b"", -1.0) for token in output)
    request = replace(make_request(logprobs=0), output=output, output_logprobs=known)
    return SequenceDriver.of(request, FakeVocab(320).piece, 0.0)


def test_rate_of_an_extension_counts_what_it_sampled_itself() -> None:
    driver = extension(A, B, C)
    driver.prepare([1, 2], N_WINDOW)
    driver.admit(Slot(0), 1.0)
    for i, token in enumerate((A, B, D)):
        driver.accept(5 if not i else 1, [token], 2.0 + i)
    driver.cancel(4.0)
    assert result_of(driver).timings.generation_tps == 1.0  # two tokens behind its first in 2 s


def test_extension_that_never_ran_tells_of_no_token() -> None:
    driver = extension(A, B, C)
    driver.cancel(1.0)
    assert (result_of(driver).token_ids, result_of(driver).logprobs) == ((), ())
