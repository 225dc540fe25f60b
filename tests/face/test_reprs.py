"""What a notebook shows of the values that callers get: short, and what matters first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.engine_options import EngineOptions
from cbatch.errors import RequestFailedError
from cbatch.response import BatchOutputChunk, BatchResult, Timings, ToolCall, Usage
from cbatch.stats import EngineStats, Percentiles
from cbatch.support.model_facts import ModelFacts
from tests.kinds import each_kind, engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.engine import Engine

N_MOST = 320
"""Characters: two lines of a wide notebook."""

RESULT = BatchResult(
    "b", "Blue, of course.", tuple(range(500)), "stop", None, Usage(12, 500), Timings(0.1, 0.2, 1.23456, None, None), 1
)  # fmt: skip


@pytest.fixture
def engine() -> Iterator[Engine]:
    options = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "seed": 1}
    with engine_on(FakeBackend(2, 2048, 16), options=options, model_name="tiny") as made:
        yield made


@each_kind
def test_values_of_a_run_are_shown_in_a_line(engine: Engine) -> None:
    response = engine.run(["one " * 200, "two"], options={"max_tokens": 100})
    results = response.results()
    answer = engine.chat("hello")
    shown = [*map(repr, [*results, response, engine, engine.stats(), answer, engine.model_facts])]
    assert [text for text in shown if len(text) > N_MOST or "\n" in text] == []
    assert shown[2] == "<BatchResponse: 2 of 2 items ended>"
    assert "'tiny'" in shown[3]
    assert "slots × 2,048 tokens>" in shown[3]
    assert "203 tokens" in shown[4]
    assert shown[5] == repr(answer.result)
    engine.close()
    assert repr(engine).endswith("the engine is closed>")


def test_result_shows_its_text_end_and_size_or_its_error() -> None:
    assert repr(RESULT) == "<BatchResult 'b': 'Blue, of course.', stop, 12 + 500 tokens, 1.23 s>"
    more = replace(
        RESULT, tool_calls=(ToolCall("1", "f", "{}"),), warnings=("a", "b"), text="x" * 999
    )
    assert "1 tool call, 2 warnings" in repr(more)
    assert len(repr(more)) < N_MOST
    failed = replace(RESULT, error=RequestFailedError("no luck"), finish_reason="error")
    assert "error, RequestFailedError: no luck" in repr(failed)


def test_chunk_shows_its_text_and_end() -> None:
    chunk = BatchOutputChunk("b", " red", (1,))
    assert repr(chunk) == "<BatchOutputChunk 'b': ' red'>"
    assert repr(replace(chunk, index=2, finish_reason="stop")).endswith("'b'[2]: ' red', stop>")


def test_statistics_show_counts_and_rates() -> None:
    stats = EngineStats(n_submitted=3, n_output_tokens=2000, n_finished={"stop": 2, "error": 1})
    assert "3 requests (ended: 1 error, 2 stop; 0 running, 0 waiting)" in repr(stats)
    assert "out 2,000 tokens" in repr(stats)
    times = Percentiles()
    assert repr(times) == "<Percentiles of 0 times>"
    times.add(1.0, 10)
    assert repr(times) == "<Percentiles of 10 times: p50 1.02 s, p90 1.02 s, p99 1.02 s>"


def test_options_show_what_is_set() -> None:
    assert (
        repr(cbatch.RunOptions(max_tokens=8, stop="x")) == "RunOptions(max_tokens=8, stop=('x',))"
    )
    assert repr(EngineOptions(parallel=4)) == "EngineOptions(parallel=4)"
    prompt = cbatch.BatchPrompt(prompt="a" * 200, options={"seed": 3})
    assert len(repr(prompt)) < N_MOST
    assert repr(prompt).endswith("options=RunOptions(seed=3))")
    assert len(repr(ModelFacts(1, chat_template="x" * 10_000))) < N_MOST
