"""Workloads of an exact number of tokens, and requests of a file."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.bench.exact_text import ExactText
from cbatch.bench.model_text import model_text
from cbatch.bench.workloads import WORKLOADS, n_distinct, read_requests, workload_of
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def tokenize(text: str) -> list[str]:
    """A mark, and three letters a token: most words are two tokens."""
    return ["<s>", *(w[i : i + 3] for w in re.findall(r"\S+", text) for i in range(0, len(w), 3))]


TEXT = ExactText(tokenize)  # type: ignore[arg-type]  # it compares tokens, whatever they are


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_have_as_many_tokens_as_they_say(name: str) -> None:
    workload = WORKLOADS[name]
    for chain in workload.chains(TEXT, 5, "a"):
        assert len(chain) == workload.n_turns
        for request in chain:
            assert len(tokenize(request.prompt)) == request.n_prompt
            assert workload.output[0] <= request.n_output <= workload.output[1]
            assert request.n_prompt + request.n_output <= workload.n_window
    own = [chain[0].n_prompt - workload.n_common for chain in workload.chains(TEXT, 50, "b")]
    assert workload.own[0] <= min(own) <= max(own) <= workload.own[1]


def test_tokens_in_common_are_those_of_all_prompts() -> None:
    prompts = [
        tokenize(chain[0].prompt)
        for chain in workload_of("shared", n_common=50).chains(TEXT, 8, "a")
    ]
    assert {tuple(prompt[:50]) for prompt in prompts} == {tuple(prompts[0][:50])}
    assert {len(prompt) for prompt in prompts} == {70}
    assert n_distinct(prompts) <= 50 + 8 * 20  # type: ignore[arg-type]


def test_turns_of_a_chat_go_on_where_the_last_ended() -> None:
    for chain in WORKLOADS["chat"].chains(TEXT, 3, "a"):
        for before, after in pairwise(chain):
            assert after.prompt.startswith(before.prompt)
            assert after.n_prompt > before.n_prompt + before.n_output


def test_distinct_tokens_are_counted_once() -> None:
    assert n_distinct([[1, 2, 3], [1, 2, 4], [5], [1, 2]]) == 5
    assert n_distinct([]) == 0
    first, again, other = (WORKLOADS["mixed"].chains(TEXT, 3, seed) for seed in "aab")
    assert first == again != other


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("fast", {}, "unknown workload 'fast'; known are decode"),
        (
            "burst",
            {"own": (9, 8)},
            "tokens of prompts must be 1 or more, with the smaller number first, not 9-8",
        ),
        ("burst", {"output": (0, 8)}, "tokens of answers must be 1 or more"),
        ("burst", {"n_common": -1}, "tokens in common must be at least 0"),
        ("burst", {"own": (1, 1)}, "give other sizes"),  # there is no such text
    ],
)
def test_wrong_workload_is_refused(name: str, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workload_of(name, **sizes).chains(TEXT, 1, "a")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "has no requests"),
        ("{", "line 1: "),
        ('{"prompt": "a"}', 'line 1: a request needs "max_tokens"'),
        ('{"prompt": "a", "max_tokens": true}', "a whole number of at least 1"),
        ('{"max_tokens": 3}', 'a "prompt" string'),
        ('{"prompt": "a", "max_tokens": 3, "heat": 1}', "line 1: .*heat"),
        ('{"prompt": "a", "max_tokens": 3}\n[]', "line 2: "),
    ],
)
def test_wrong_file_of_requests_is_refused_by_line(tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "own.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"own.jsonl.*{words}"):
        read_requests(tmp_path / "own.jsonl", tokenize)  # type: ignore[arg-type]


def test_file_of_requests_gives_prompts_with_their_tokens_and_options(tmp_path: Path) -> None:
    line = {"id": "x", "prompt": "one two", "max_tokens": 4, "temperature": 0, "seed": 3}
    with pytest.raises(ConfigError, match="No such file"):
        read_requests(tmp_path / "own.jsonl", tokenize)  # type: ignore[arg-type]
    (tmp_path / "own.jsonl").write_text(json.dumps(line), encoding="utf-8")
    [[request]] = read_requests(tmp_path / "own.jsonl", tokenize)  # type: ignore[arg-type]
    assert (request.id, request.n_prompt, request.n_output) == ("x", 3, 4)
    assert request.options == {"temperature": 0, "seed": 3, "min_p": 0.0}


@pytest.mark.real
@pytest.mark.parametrize("name", ["shared", "chat", "burst"])
def test_real_vocabulary_counts_the_same(name: str) -> None:
    with model_text(None) as text:
        workload = workload_of(name)
        chains = workload.chains(text.exact, 3, "a")
        prompts = [list(text.tokenize(r.prompt)) for chain in chains for r in chain]
        assert [len(p) for p in prompts] == [r.n_prompt for chain in chains for r in chain]
        assert len({tuple(p[: workload.n_common]) for p in prompts}) == 1
