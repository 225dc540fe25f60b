"""Which answers a rate may be made of."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cbatch.bench.measured import MeasuredAnswer, WorkRequest
from cbatch.bench.verdict import (
    degenerate,
    differences,
    n_ended_early,
    n_likely,
    problems,
    unlikely,
    unlikely_text,
)

N = 20
REQUESTS = [WorkRequest(str(i), "a", 10, 16) for i in range(N)]
ANSWERS = [
    MeasuredAnswer(
        str(i), 0.0, 0.1, 1.0, 16, n_prompt=10, n_distinct=9, finish="length", tokens=(i, 2, 3)
    )
    for i in range(N)
]


def with_first(n: int, **changes: object) -> list[MeasuredAnswer]:
    return [replace(a, **changes) if i < n else a for i, a in enumerate(ANSWERS)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (with_first(1, error="it broke"), "1 of 20 requests failed: it broke"),
        (ANSWERS[1:], "1 of 20 requests have no answer"),
        (
            with_first(2, n_output=5),
            "2 of 20 requests have short answers: one has 5 of 16 tokens, finish reason length",
        ),
        (
            with_first(1, finish="window"),
            "1 of 20 requests have short answers: .* finish reason window",
        ),
        (with_first(1, finish=None), "1 of 20 requests have short answers: .* finish reason None"),
        (with_first(N, n_output=0, finish="stop"), "all answers are empty"),
        (
            with_first(1, n_prompt=40),
            "1 of 20 requests have other prompts: one has 40 tokens, not 10",
        ),
    ],
)
def test_broken_answers_are_named(answers: list[MeasuredAnswer], words: str) -> None:
    [found] = problems(REQUESTS, answers)
    assert re.search(words, found)


@pytest.mark.parametrize(("n", "n_found"), [(0, 0), (1, 0), (2, 0), (3, 3), (N, N)])
def test_degenerate_answers_are_found_where_they_are_not_few(n: int, n_found: int) -> None:
    answers = with_first(n, n_distinct=1)
    assert problems(REQUESTS, answers) == []
    assert degenerate(answers) == [str(i) for i in range(n_found)]
    assert degenerate(with_first(n, n_distinct=1, n_output=3)) == []  # short ones
    assert problems(REQUESTS, with_first(n, n_prompt=11)) == []  # a mark before the prompt


def test_answer_that_the_server_ended_is_not_cut_and_counted() -> None:
    answers = with_first(2, finish="stop", n_output=10)
    assert problems(REQUESTS, answers) == []
    assert n_ended_early(REQUESTS, answers) == 12


def test_answers_must_be_equal_alone_exact_ones_to_the_last_token() -> None:
    alone = {str(i): (i, 2, 4 if i == 3 else 3) for i in range(5)}
    [words] = differences(alone, ANSWERS, is_exact=True)
    assert words == "1 of 5 answers differ from those of the same requests run alone"
    assert differences(alone, ANSWERS, is_exact=False) == []
    for n_alike, n_problems in ((1, 1), (2, 0)):
        first = {str(i): (i if i < n_alike else 99,) for i in range(5)}
        found = differences(first, ANSWERS, is_exact=False)
        words = "4 of 5 first tokens differ from those of the same requests run alone"
        assert found == [words] * n_problems
    # a side that knows no tokens is not compared by them
    assert differences({"0": (9,)}, with_first(1, tokens=()), is_exact=True) == []


GREEDY = WorkRequest("a", "a", 10, 64, {"temperature": 0, "seed": 1})
DRAWN = WorkRequest("a", "a", 10, 64, {"temperature": 0.8, "top_k": 40})


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({"temperature": 0.0, "seed": 3}, 1),
        ({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.0, "seed": 3}, 20),
        ({}, 20),
        ({"top_k": 0}, None),
        ({"top_k": 1000}, None),
        ({"json_schema": {}}, None),
        ({"temperature": 0, "repeat_penalty": 1.1}, None),
    ],
)
def test_options_tell_which_tokens_may_be_drawn(options: dict[str, object], n: int | None) -> None:
    assert n_likely(WorkRequest("a", "a", 10, 16, options)) == n


@pytest.mark.parametrize("request_", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_junk_behind_a_right_token_is_refused_wherever_it_is(request_: WorkRequest) -> None:
    right, junk = [0.0, 1.5, -0.3, 0.2], [-9.0] * 4
    assert unlikely([request_], [right * 16]) == []
    assert unlikely([request_] * 2, [right * 16, []]) == []
    [words] = unlikely([request_], [right[:1] + junk])
    assert words == "4 of 5 tokens are unlikely by the model itself, given the tokens before"
    for found in (right * 8 + junk * 8, junk * 8 + right * 8):
        [words] = unlikely([request_] * 2, [right * 16, found])
        assert words == "32 of 128 tokens are unlikely by the model itself, given the tokens before"


def test_ties_and_a_few_unlikely_tokens_are_the_models() -> None:
    assert unlikely([GREEDY], [[-0.4] * 64]) == []
    assert unlikely([GREEDY], [[-9.0, 0.0, 0.0, 0.0, 0.0] * 12]) == []
    assert unlikely([DRAWN], [[-9.0, 0.0] * 32]) == []
    assert unlikely([GREEDY], [[-9.0, 0.0] * 32]) != []


def test_text_is_set_against_text_of_the_model_alone() -> None:
    assert unlikely_text(0.6, [[0.0, -9.0] * 8]) == []
    assert unlikely_text(0.0, [[-9.0] * 8]) == []
    assert unlikely_text(0.9, [[]]) == []
    [words] = unlikely_text(0.8, [[0.0] + [-9.0] * 9])
    assert (
        words
        == "only 10% of the text's tokens are likely by the model itself; of its own answers, 80% are"
    )
