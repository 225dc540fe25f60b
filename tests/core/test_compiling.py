"""Who waits for a grammar: others pass, equal ones are compiled once, a bad one ends its own request."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch.core.driver import Wait
from cbatch.errors import GrammarError, RequestCancelledError
from cbatch.options import Grammar
from cbatch.runtime.wants import _N_GRAMMARS_MAX, to_compile
from tests.helpers import Rig, drive, make_request, make_scheduler, make_sequences, step, take_wants

ODD = Grammar("regex", "1")


def rig_with(*regexes: str | None, n_slots: int = 1, **options: int) -> Rig:
    """A scheduler with one request each, "0", "1", …"""
    rig = make_scheduler(n_slots)
    for i, regex in enumerate(regexes):
        said: dict[str, Any] = {"max_tokens": 3, "regex": regex, **options}
        rig.submit(make_request(str(i), **said))
    return rig


def test_one_that_waits_for_its_grammar_is_passed_and_runs_then() -> None:
    rig = rig_with("1", None, None)
    assert rig.drivers["0"].waits_for is Wait.COMPILE
    seen = rig.batcher.occupancy()
    assert (seen.n_held, seen.n_waiting, seen.n_unserved) == (1, 2, 3)
    drive(rig)
    assert [*rig.results] == ["1", "2", "0"]
    assert all(t % 2 for t in rig.results["0"].token_ids)


def test_equal_grammars_are_compiled_once_and_kept() -> None:
    rig = rig_with("1", "1", "0", n_slots=3)
    take_wants(rig)
    assert rig.compiling == [ODD, Grammar("regex", "0")]
    drive(rig)
    rig.submit(make_request("again", max_tokens=3, regex="1"))
    assert rig.drivers["again"].waits_for is None
    take_wants(rig)
    assert rig.compiling == []
    drive(rig)
    assert rig.results["again"].token_ids == rig.results["0"].token_ids


def test_grammar_unused_for_longest_is_compiled_again() -> None:
    rig = rig_with("1", *(f"0:{i}" for i in range(_N_GRAMMARS_MAX)), n_slots=2)
    drive(rig)
    rig.submit(make_request("old", regex="1", max_tokens=1))
    rig.submit(make_request("new", regex="0:9", max_tokens=1))
    take_wants(rig)
    assert rig.compiling == [ODD]
    drive(rig)


def test_grammar_that_was_asked_for_since_is_kept() -> None:
    rig = rig_with("1", *(f"0:{i}" for i in range(_N_GRAMMARS_MAX - 1)), n_slots=2)
    drive(rig)
    for id, regex in [("again", "1"), ("another", "1:15"), ("at last", "1")]:
        rig.submit(make_request(id, regex=regex, max_tokens=1))
        assert bool(to_compile(rig.drivers[id])) == (id == "another")
        drive(rig)


def test_bad_grammar_ends_its_requests_before_they_get_a_slot() -> None:
    rig = rig_with("x", None, "x", n_slots=3)
    drive(rig)
    for id in "02":
        error = rig.results[id].error
        assert isinstance(error, GrammarError)
        assert "PARITY" in error.reason
        assert not rig.drivers[id].has_run
    assert rig.results["0"].error is not rig.results["2"].error
    assert rig.results["1"].error is None


def test_bad_grammar_is_not_kept() -> None:
    rig = rig_with("x")
    drive(rig)
    rig.submit(make_request("again", regex="x"))
    assert rig.wants.take() == Grammar("regex", "x")
    assert rig.wants.take() is None


def test_grammar_that_was_passed_over_is_asked_for_again() -> None:
    rig = rig_with("1")
    assert rig.wants.take() == ODD
    assert rig.wants.is_wanted(ODD)
    rig.cancel("0")
    assert not rig.wants.is_wanted(ODD)
    rig.submit(make_request("late", max_tokens=3, regex="1"))
    assert rig.wants.take() is None
    rig.wants.resolve(ODD, None, rig.now)
    assert rig.wants.take() == ODD
    rig.cancel("late")
    rig.wants.resolve(ODD, None, rig.now)
    assert rig.wants.take() is None


@pytest.mark.parametrize("regex", ["1", "x"])
def test_cancel_while_compiling_ends_it_at_once(regex: str) -> None:
    rig = rig_with(regex, regex)
    step(rig)
    assert rig.cancel("0")
    assert isinstance(rig.batcher.take_ended()[0].error, RequestCancelledError)
    rig.drivers.pop("0")
    drive(rig)
    assert [*rig.results] == ["1"]


@pytest.mark.parametrize("regex", ["1", "x"])
def test_one_paused_while_compiling_goes_on_when_it_is_resumed(regex: str) -> None:
    rig = rig_with(regex)
    assert rig.batcher.pause("0")
    step(rig)
    step(rig)
    assert rig.batcher.resume("0") is (regex == "1")
    drive(rig)
    assert (rig.results["0"].error is None) is (regex == "1")


def test_released_ones_queue_in_their_order_behind_those_that_passed() -> None:
    rig = rig_with("1", "1", None, None, "1")
    drive(rig)
    assert [*rig.results] == ["2", "3", "0", "1", "4"]


# ---- in a slot ----


def test_plan_with_a_constrained_row_is_one_step() -> None:
    rig = rig_with("1", n_slots=2, max_tokens=40)
    step(rig)
    rig.submit(make_request("free", max_tokens=40))
    together = [p for p in drive(rig) if len(p.spans) == 2]
    assert together
    assert all(p.n_steps == 1 for p in together)


def test_forced_tokens_come_in_one_go_and_count() -> None:
    rig = rig_with("1", max_tokens=40)
    n_plans = sum(bool(p.spans) for p in drive(rig))
    result = rig.results["0"]
    assert result.token_ids == tuple(rig.alone(make_request("0", regex="1"), 40))
    assert result.usage.completion_tokens == 40
    assert n_plans < 40
    assert rig.stats.n_output_tokens >= 40


@pytest.mark.parametrize("cap", [1, 2, 5, 6, 19])
def test_cap_cuts_forced_tokens(cap: int) -> None:
    rig = rig_with("1", max_tokens=cap)
    drive(rig)
    result = rig.results["0"]
    assert result.token_ids == tuple(rig.alone(make_request("0", regex="1"), cap))
    assert result.finish_reason == "length"


def test_last_token_of_a_grammar_ends_stop_also_at_the_cap() -> None:
    free = make_sequences(1, regex="1")[0]
    stream = make_scheduler().alone(free, 12)
    rig = make_scheduler()
    rig.submit(make_request("0", free.prompt.tokens or (), regex=f"1:{stream[-1] % 16}"))
    drive(rig)
    found = rig.results["0"]
    assert found.finish_reason == "stop"
    again = make_scheduler()
    again.submit(
        make_request(
            "0",
            free.prompt.tokens or (),
            regex=f"1:{stream[-1] % 16}",
            max_tokens=len(found.token_ids),
        )
    )
    drive(again)
    assert again.results["0"].finish_reason == "stop"
    assert again.results["0"].token_ids == found.token_ids


def test_constraint_that_fails_ends_its_request_with_what_it_has() -> None:
    rig = rig_with("1:3:9", None, n_slots=2, max_tokens=60)
    drive(rig)
    error = rig.results["0"].error
    assert isinstance(error, GrammarError) == (rig.results["0"].finish_reason == "error")
    assert rig.results["1"].error is None
