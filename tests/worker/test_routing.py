"""Which worker gets a prompt, by its beginning and by what the workers have to do."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.worker import routing
from cbatch.worker.routing import N_BLOCK, N_BLOCKS_MAX, N_TOKENS_PER_BLOCK, Routing, beginnings

NONE = RunOptions()
SYSTEM = {"role": "system", "content": "be kind " * N_BLOCK}
BLOCK = [*range(N_TOKENS_PER_BLOCK)]


def keys(text: str = "", options: RunOptions = NONE, **given: Any) -> list[int]:
    """The numbers of the beginnings of a prompt."""
    given = given if "tokens" in given or "messages" in given else {"prompt": text, **given}
    return [*beginnings(BatchPrompt(**given), options)]


def n_common(a: list[int], b: list[int]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=False))


@pytest.mark.parametrize(("n", "n_keys"), [(N_BLOCK - 1, 0), (N_BLOCK, 1), (5 * N_BLOCK + 1, 5)])
def test_text_has_a_beginning_for_each_whole_block(n: int, n_keys: int) -> None:
    assert len({*keys("x" * n)}) == n_keys
    long = "x" * (N_BLOCK * N_BLOCKS_MAX)
    assert keys(long) == keys(long + "y" * N_BLOCK)
    assert len(keys(long)) == N_BLOCKS_MAX
    start, other = "x" * 2 * N_BLOCK, "c" * N_BLOCK
    a, b = (keys(start + letter * N_BLOCK + other) for letter in "ab")
    assert n_common(a, b) == 2
    assert not {*a[2:]} & {*b[2:]}  # also of equal blocks behind other ones


def test_tokens_have_a_beginning_for_each_whole_block() -> None:
    a, b = keys(tokens=[*BLOCK, *BLOCK, 1]), keys(tokens=[*BLOCK, *BLOCK[1:], 0])
    assert (len(a), len(b), n_common(a, b)) == (2, 2, 1)
    assert keys(tokens=BLOCK[1:]) == []


def test_chats_whose_first_message_is_the_same_have_a_common_beginning() -> None:
    a, b = (keys(messages=[SYSTEM, {"role": "user", "content": c * 600}]) for c in "ab")
    n = n_common(a, b)
    assert len(SYSTEM["content"]) // N_BLOCK <= n < len(a) == len(b)


def test_next_turn_of_a_chat_begins_as_the_turn_before() -> None:
    first = [SYSTEM, {"role": "user", "content": "hello " * N_BLOCK}]
    more = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "again"}]
    assert n_common(keys(messages=first), keys(messages=first + more)) == len(keys(messages=first))


def test_answers_of_another_adapter_have_no_beginning_in_common() -> None:
    text = "x" * N_BLOCK * 2
    of_run = keys(text, options=RunOptions(adapter="a"))
    of_prompt = [*beginnings(BatchPrompt(prompt=text, options={"adapter": "a"}), NONE)]
    assert of_run == of_prompt
    assert not {*keys(text)} & {*of_run}
    assert not {*keys(text, options=RunOptions(adapter={"a": 0.5}))} & {*of_run}


def test_cache_key_of_a_run_or_of_a_prompt_is_a_beginning() -> None:
    of_run = keys("short", options=RunOptions(cache_key="k"))
    of_prompt = [*beginnings(BatchPrompt(prompt="other", options={"cache_key": "k"}), NONE)]
    assert of_run == of_prompt
    assert len(of_run) == 1
    assert of_run != keys("short", options=RunOptions(cache_key="l"))


def test_prompt_without_a_known_beginning_goes_to_the_least_loaded() -> None:
    made = Routing()
    assert made.choose([1], [2.0, 0.5, 1.0]) == 1
    assert made.choose([], [2.0, 1.5, 1.0]) == 2


@pytest.mark.parametrize(("load", "chosen"), [(0.5, 0), (1.25, 0), (1.5, 1)])
def test_equal_beginnings_go_to_one_until_it_has_one_more_a_slot(load: float, chosen: int) -> None:
    made = Routing()
    assert made.choose([1], [0.0, 0.0]) == 0
    assert made.choose([1], [load, 0.25]) == chosen


def test_last_one_that_got_a_beginning_has_it() -> None:
    made = Routing()
    for loads, chosen in (([0.0, 0.0], 0), ([3.0, 0.0], 1), ([0.0, 0.5], 1)):
        assert made.choose([1], loads) == chosen


def test_longest_known_beginning_counts() -> None:
    made = Routing()
    made.choose([1, 2], [0.0, 1.0])
    made.choose([1, 3], [5.0, 0.0])
    assert made.choose([1, 2, 9], [0.0, 0.0]) == 0
    assert made.choose([1, 3, 8], [0.0, 0.0]) == 1


def test_worker_that_takes_none_or_is_gone_is_passed_over() -> None:
    made = Routing()
    made.choose([1], [0.0, 0.0, 9.0])
    assert made.choose([1], [inf, 7.0, 5.0]) == 2
    assert made.choose([2], [inf, inf, 5.0]) == 2
    assert made.choose([1], [1.0, 0.0]) == 1


def test_beginnings_used_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "N_KNOWN_MAX", 2)
    made = Routing()
    made.choose([1], [0.0, 0.5])
    made.choose([2], [0.0, 0.5])
    made.choose([1], [0.0, 0.0])  # used again
    made.choose([3], [0.0, 0.5])  # 2 is forgotten
    assert made.choose([1], [0.5, 0.0]) == 0
    assert made.choose([2], [0.5, 0.0]) == 1
