"""What is said before a run: estimates of samples that were cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cbatch.cli.run import _in_flags
from cbatch.errors import PromptTooLongError
from cbatch.files.preview import Sample, estimate_file, extrapolated
from cbatch.response import BatchResult, Timings, Usage
from cbatch.stats import EngineStats
from tests.files.runs import make_engine, write_requests

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.response import FinishReason


def test_estimate_of_a_sample_that_computed_nothing_says_so(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 100)
    with make_engine() as engine:
        found = estimate_file(source, engine=engine, sample_s=1e-9)
    assert (found.n_sample, found.seconds, found.output_tokens) == (0, None, None)
    assert found.max_output_tokens == 300  # three of each
    words = "\n".join(found.lines())
    assert "no answer ended within" in words
    assert "unknown: nothing was computed" in words


def result_of(n_prompt: int, n_output: int, reason: FinishReason = "timeout") -> BatchResult:
    timings = Timings(0.0, None, 20.0, None, None)
    return BatchResult("a", "", (), reason, None, Usage(n_prompt, n_output), timings, 0)


def test_estimate_of_answers_that_did_not_end_is_by_their_tokens() -> None:
    stats = EngineStats(n_pure_tokens=100, pure_prefill_s=1.0, cost_rows_s={"1": 1.0, "4": 0.4})
    results = [*[result_of(100, 10)] * 4, *[result_of(100, 0)] * 6]
    # 400 prompt tokens at 0.01 s and 40 of output at 0.1 s, in 16 s
    found = extrapolated(Sample(results, [50] * 10, 400, 16.0), 100, stats)
    assert (found.prompt_tokens, found.output_tokens, found.max_output_tokens) == (
        10_000,
        None,
        5_000,
    )
    assert found.seconds == pytest.approx((2 * (100 + 100), 2 * (100 + 500)))
    assert "6 min 40 s … 20 min 00 s for all: the longer time if" in found.lines()[2]

    prompts_only = extrapolated(Sample([result_of(100, 0)] * 10, [50] * 10, 400, 16.0), 100, stats)
    assert prompts_only.seconds == pytest.approx((400.0, None))
    assert "more than 6 min 40 s" in prompts_only.lines()[2]


def test_estimate_of_items_that_all_fail_is_of_their_time() -> None:
    results = [result_of(0, 0, "error")] * 5
    found = extrapolated(Sample(results, [0] * 5, 0, 0.5), 50, EngineStats())
    assert found.seconds == (5.0, 5.0)


def test_run_names_flags_to_a_commands_user() -> None:
    error = PromptTooLongError(9, 8, 2, can_slide=True, can_lower=True)
    words = _in_flags(f"the first: line 7: {error}")
    assert "give --set n_discard=N" in words
    assert "or raise --ctx-per-seq to at least 11 (or --n-ctx)" in words
    assert _in_flags("unknown option 'n_ctx'") == "unknown option 'n_ctx'"
