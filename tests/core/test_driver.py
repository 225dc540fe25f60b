"""One request's life: its counters, its text, and why it ends."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest

from cbatch.backend.fake import END_TOKEN, FakeVocab
from cbatch.core.driver import TRANSITIONS, Event, SequenceDriver, Status
from cbatch.core.plan import BROKEN_ROW, EMPTY_ROW, Slot, TokenLogprobs
from cbatch.core.span import N_TARGETS_MAX, PromptCuts, Span
from cbatch.errors import (
    PromptTooLongError,
    RequestFailedError,
    SequenceStateError,
)
from cbatch.runtime.output import result_of, take_chunk
from cbatch.runtime.prompt_fit import set_prompt
from tests.core.drivers import HALF, N_WINDOW, A, B, C, D, make_driver, make_running
from tests.helpers import make_request

SAVING = make_request(cache_key="k", save_cache=True)


def make_in(status: Status) -> SequenceDriver:
    driver = make_driver() if status is Status.WAITING else make_running()
    if status is Status.STORING:
        driver.request = SAVING
    if status is Status.PAUSED:
        driver.undergo(Event.PAUSE)
    if status in (Status.STORING, Status.FINISHED):
        driver.finish("stop", 2.0)
    assert driver.status is status
    return driver


def send(driver: SequenceDriver, event: Event) -> None:
    if event is Event.ADMIT:
        driver.admit(Slot(1), 9.0)
    elif event is Event.FINISH:
        driver.finish("length", 9.0, RequestFailedError("late"))
    elif event is Event.STORE:
        driver.finish("length", 9.0)
    else:
        driver.undergo(event)


def snapshot(driver: SequenceDriver) -> dict[str, object]:
    names = [
        n
        for n in SequenceDriver.__slots__
        if n not in ("request", "slot", "clock", "text", "tokens")
    ]
    said: dict[str, object] = {n: getattr(driver, n) for n in names}
    return {
        **said,
        "tokens": [*driver.tokens],
        "clock": asdict(driver.clock),
        "text": [*driver.reply.text.parts],
    }


@pytest.mark.parametrize(
    ("status", "event"), [p for p in product(Status, Event) if p not in TRANSITIONS]
)
def test_transition_without_an_entry_raises_and_changes_nothing(
    status: Status, event: Event
) -> None:
    driver = make_in(status)
    if event is Event.STORE:
        driver.slot, driver.request = Slot(1), SAVING
    before = snapshot(driver)
    with pytest.raises(SequenceStateError, match=event.value):
        send(driver, event)
    assert snapshot(driver) == before


def test_transitions_name_every_status_and_event() -> None:
    assert {s for s, _ in TRANSITIONS} | set(TRANSITIONS.values()) == set(Status)
    assert {e for _, e in TRANSITIONS} == set(Event)
    assert all(status is not Status.FINISHED for status, _ in TRANSITIONS)


@pytest.mark.parametrize(
    ("n_prompt", "cap"), [(10, 7), (16, 1), (16, None), (17, None), (1, 2**31 - 1)]
)
def test_prompt_and_cap_past_the_window_raise_and_change_nothing(
    n_prompt: int, cap: int | None
) -> None:
    driver = make_driver(max_tokens=cap, strict_max_tokens=True)
    before = snapshot(driver)
    with pytest.raises(PromptTooLongError) as caught:
        set_prompt(driver, list(range(n_prompt)), N_WINDOW)
    error = caught.value
    assert (error.n_prompt, error.n_limit, error.n_output) == (n_prompt, N_WINDOW, cap or 1)
    for way_out in ("16", "raise ctx_per_seq"):
        assert way_out in str(error)
    assert ("lower max_tokens" in str(error)) == ("strict_max_tokens" in str(error))
    assert ("lower max_tokens" in str(error)) == (error.n_output > 1)
    assert snapshot(driver) == before


@pytest.mark.parametrize("sampled", [[A, B, D, END_TOKEN], [A, B, D, BROKEN_ROW]])
def test_what_comes_after_a_stop_string_in_one_run_does_not_matter(sampled: list[int]) -> None:
    driver = make_running(stop="b", ignore_eos=False)
    driver.accept(2, sampled, 2.0)
    result = result_of(driver)
    assert (result.finish_reason, result.error, result.text) == ("stop", None, "a")
    assert result.token_ids == (A, B)


@pytest.mark.parametrize(
    ("stands_for", "options", "words"),
    [
        (BROKEN_ROW, {}, "^the model's logits are NaN or infinite"),
        (EMPTY_ROW, {}, "^every token is ruled out by logit_bias"),
        (EMPTY_ROW, {"logit_bias": {5: -1}}, "^every token is ruled out by logit_bias"),
        (EMPTY_ROW, {"logit_bias": {5: -math.inf}}, "^logit_bias bans every token that could"),
        (BROKEN_ROW, {"regex": "a"}, "^the model's logits are NaN or infinite"),
        (
            EMPTY_ROW,
            {"regex": "a"},
            "^regex: every token that the grammar allows is ruled out by logit_bias",
        ),
    ],
)
def test_row_without_a_token_ends_with_the_reason(
    stands_for: int, options: dict[str, Any], words: str
) -> None:
    driver = make_running(**options)
    driver.request = replace(driver.request, grammar=driver.request.options.structure)
    driver.accept(2, [A, stands_for], 2.0)
    assert result_of(driver).text == "a"
    assert re.match(words, str(result_of(driver).error))


def test_broken_first_row_has_no_time_to_first_token() -> None:
    driver = make_running()
    driver.accept(2, [BROKEN_ROW], 2.0)
    assert result_of(driver).timings.ttft_s is None
    assert result_of(driver).usage.completion_tokens == 0


@pytest.mark.parametrize("ending", ["length", "window", "cancelled", "timeout", "error", "stop"])
def test_half_a_character_is_flushed_on_every_ending(ending: str) -> None:
    driver = make_running(
        n_prompt=13 if ending == "window" else 2,
        max_tokens={"length": 3, "window": None}.get(ending, 4),
        stop_token_ids=[D],
    )
    driver.accept(driver.n_prompt, [A, B, HALF], 2.0)
    if ending == "cancelled":
        driver.cancel(3.0)
    if ending == "timeout":
        driver.expire(3.0)
    if ending in ("stop", "error"):
        driver.accept(1, [D if ending == "stop" else BROKEN_ROW], 3.0)
    assert driver.finish_reason == ending
    assert result_of(driver).text == "ab\ufffd"


@pytest.mark.parametrize("ending", ["length", "cancelled", "timeout", "error", "stop"])
def test_tail_held_back_for_a_stop_string_is_flushed_on_every_ending(ending: str) -> None:
    driver = make_running(stop="bcd", stop_token_ids=[D], max_tokens=3 if ending == "length" else 9)
    driver.accept(2, [A, B, C], 2.0)
    if ending == "cancelled":
        chunk = take_chunk(driver)
        assert chunk is not None
        assert chunk.text == "a"
        driver.cancel(3.0)
    if ending == "timeout":
        driver.expire(3.0)
    if ending in ("stop", "error"):
        driver.accept(1, [D if ending == "stop" else BROKEN_ROW], 3.0)
    assert (driver.finish_reason, result_of(driver).text) == (ending, "abc")


# ---- what is scored, and in which pieces ----


def make_scored(n_scored: int, n_computed: int, start: int | None = None) -> SequenceDriver:
    """One with a prompt of 6 tokens, of which so many were scored from, or need not be."""
    driver = make_running(n_prompt=6, prompt_logprobs=0, prompt_logprobs_start=start)
    assert driver.scores is not None
    n_first = driver.scores.first
    driver.scores.take(n_first, [TokenLogprobs(-1.0)] * (n_scored - n_first))
    driver.n_computed = n_computed
    return driver


@pytest.mark.parametrize(
    ("n_scored", "n_computed", "n_tokens", "targets"),
    [(0, 0, 6, [1, 2, 3, 4, 5]), (0, 0, 3, [1, 2, 3]), (3, 3, 3, [4, 5]), (3, 0, 3, [])],
)
def test_chunk_scores_what_was_not_and_nothing_behind_the_prompt(
    n_scored: int, n_computed: int, n_tokens: int, targets: list[int]
) -> None:
    span = make_scored(n_scored, n_computed).span(Slot(0), n_computed, n_tokens)
    assert list(span.targets) == targets


@pytest.mark.parametrize("start", [None, 0, 1, 2, 5, 6, 900])
def test_scores_begin_where_they_are_asked_for(start: int | None) -> None:
    n_before = min(max(0, (start or 0) - 1), 5)
    driver = make_scored(n_before, 0, start)
    assert driver.n_reusable == n_before
    assert driver.is_scoring == (n_before < 5)
    for n_computed in range(n_before, 6):
        n_pending = 6 - n_computed
        driver.n_computed = n_computed
        assert list(driver.span(Slot(0), n_computed, n_pending).targets) == [
            *range(n_computed + 1, 6)
        ]


def test_chunk_that_cannot_be_cut_scores_all_and_keeps_the_wanted() -> None:
    driver = make_scored(3, 0, 4)
    assert driver.scores is not None
    span = driver.span(Slot(0), 0, 5)
    assert list(span.targets) == [1, 2, 3, 4, 5]
    scores = [TokenLogprobs(math.nan), *(TokenLogprobs(-float(i)) for i in range(1, 5))]
    assert driver.take_scores(span, scores, 1.0)
    assert [score.logprob for score in driver.scores.found] == [-3.0, -4.0]
    assert not driver.is_scoring


@pytest.mark.parametrize("n_scores", [0, 2, 4])
def test_score_that_a_backend_left_out_ends_the_request_with_an_error(n_scores: int) -> None:
    driver = make_scored(0, 0)
    span = driver.span(Slot(0), 0, 3)
    assert not driver.take_scores(span, [TokenLogprobs(-1.0)] * n_scores, 1.0)
    assert isinstance(driver.error, RequestFailedError)
    assert f"got {n_scores} scores for 3 tokens" in str(driver.error)


@pytest.mark.parametrize("first", range(3))
def test_part_of_a_span_has_its_targets_and_the_last_one_the_output(first: int) -> None:
    whole = Span(Slot(1), 5, (10, 11, 12), has_output=True, targets=(11, 12))
    ends = [(first, 2), (2, 3)] if first < 2 else [(2, 3)]
    parts = [whole.part(*place) for place in ends]
    assert [list(part.inputs) for part in parts] == [[10, 11, 12][a:b] for a, b in ends]
    assert [list(part.targets) for part in parts] == [[11, 12][a:b] for a, b in ends]
    assert [part.start for part in parts] == [5 + a for a, _ in ends]
    assert [part.has_output for part in parts] == [b == 3 for _, b in ends]


def test_cells_taken_over_again_are_no_longer_from_the_cache() -> None:
    driver = make_running(n_prompt=4)
    driver.tokens += [7, 8]
    driver.reuse(5)
    assert (driver.n_cached, driver.n_reached) == (4, 5)  # no more than the prompt
    driver.n_computed = 0
    driver.reuse(2)
    assert (driver.n_cached, driver.n_reached) == (4, 5)


# ---- a window that moves ----


def full(n_prompt: int) -> SequenceDriver:
    """A sequence of 17 tokens, one more than its window has."""
    driver = make_running(n_prompt, n_keep=2, n_discard=4, max_tokens=30)
    n_computed = driver.n_prompt
    driver.accept(n_computed, [A] * (17 - n_computed), 2.0)
    return driver


@pytest.mark.parametrize(("n_prompt", "n_left"), [(10, 6), (5, 2), (2, 2)])
def test_shift_takes_the_prompt_behind_what_is_kept_and_it_is_told_whole(
    n_prompt: int, n_left: int
) -> None:
    driver = full(n_prompt)
    assert driver.shift() == (2, 4)
    assert (driver.n_prompt, driver.n_tokens, driver.n_computed) == (n_left, 13, 12)
    assert (driver.n_given, driver.given) == (n_prompt, tuple(range(n_prompt)))


@pytest.mark.parametrize("n_left_out", [0, 8])
def test_window_that_lost_cells_from_before_its_move_begins_again(n_left_out: int) -> None:
    driver = full(10 + n_left_out)
    before = books_of(driver)
    driver.shift()
    after = books_of(driver)
    driver.unshift()
    assert books_of(driver) == before
    driver.shift()
    assert driver.keep(12) == 12
    assert books_of(driver) == after
    assert driver.keep(11) == 0
    driver.n_computed = 16
    assert books_of(driver) == before
    driver.shift()
    assert books_of(driver) == after


def test_window_moves_only_when_all_of_it_has_cells() -> None:
    driver = full(10)
    driver.keep(15)
    with pytest.raises(SequenceStateError, match="no full moving window"):
        driver.shift()


def books_of(driver: SequenceDriver) -> tuple[object, ...]:
    counters = driver.n_prompt, driver.n_computed, driver.n_reached, driver.n_removed
    return [*driver.tokens], driver.given, driver.n_lasting, *counters


def test_pieces_of_a_prompt_that_others_score_are_as_small() -> None:
    asked = make_request(prompt_logprobs=0)
    for request in (asked, replace(asked, n_prompt_logprobs=None)):
        driver = SequenceDriver.of(request, FakeVocab(320).piece, 0.0)
        assert driver.own_cuts(PromptCuts.every(512)) == PromptCuts.every(N_TARGETS_MAX)
