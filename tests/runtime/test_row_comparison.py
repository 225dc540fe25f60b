"""The next rows of live sequences in a shared step and alone: what is told, and that nothing of it is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cbatch
from cbatch.backend.fake import Faults
from cbatch.core.plan import BROKEN_ROW, KvCapabilities
from cbatch.engine import Engine
from cbatch.errors import (
    ConfigError,
    DecodeError,
    EngineClosedError,
    RequestFailedError,
    UnsupportedOptionError,
)
from cbatch.messages import BatchPrompt
from tests.helpers import recurrent, shared_pool
from tests.profiles import examples
from tests.runtime.backends import (
    FailingBackend,
    GatedBackend,
    all_results,
    check_balance,
    streams,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cbatch.backend.fake import FakeBackend
    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.core.span import Span
    from cbatch.runtime.batch_response import BatchResponse
    from cbatch.runtime.row_comparison import RowComparison

W = 24


class OneByOne(GatedBackend):
    """Does one step a run, and has an adapter."""

    def __init__(self, *sizes: int, **given: Any) -> None:
        super().__init__(*sizes, **given)
        self.adapters = ("a",)


class Crowded(OneByOne):
    """In a shared step slot 1 has another token, and all slots log-probabilities with another last bit."""

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if len(plan.spans) < 2 or not result.logprobs:
            return result
        logprobs = [
            [replace(p, logprob=math.nextafter(p.logprob, 0.0)) for p in row]
            for row in result.logprobs
        ]
        tokens = [
            [t + (c.slot == 1) for t in row]
            for c, row in zip(plan.spans, result.tokens, strict=True)
        ]
        return replace(result, logprobs=logprobs, tokens=tokens)


def begun(
    backend: FakeBackend, items: Sequence[BatchPrompt], n_steps: int = 4
) -> tuple[Engine, BatchResponse]:
    """An engine without a thread that has done some steps of a batch."""
    engine = Engine(backend, threaded=False, options={"ignore_eos": True, "seed": 1})
    response = engine.run(items)
    for _ in range(n_steps):
        engine.step()
    return engine, response


def item(id: str, **options: Any) -> BatchPrompt:
    return BatchPrompt(tokens=[3, 1, ord(id)], id=id, options={"max_tokens": 12, **options})


ITEMS = [
    item("a"),
    item("b", repeat_penalty=1.5, seed=4),
    item("c", regex="1"),
    item("d", logprobs=True, top_logprobs=2),
    item("e", n_discard=8, max_tokens=60),
    item("f", adapter="a"),
    item("g", prompt_logprobs=1, n=2),
    item("h", regex="0:5"),
]
"""Sequences with something that a comparison could lose: history, grammar, a window that moves, adapters, choices."""

SHIFTING = KvCapabilities("partitioned", 4 * W, can_shift=True, can_copy=True)


def ids(rows: Sequence[RowComparison]) -> list[str]:
    return [row.id for row in rows]


def test_rows_are_told_with_slot_position_and_company() -> None:
    items = [item("a"), item("b"), item("f", adapter="a")]
    engine, response = begun(OneByOne(3, W, 16), items, 7)
    with engine:
        rows = engine.compare_rows()
        assert [(row.id, row.slot, row.n_rows) for row in rows] == [
            ("a", 0, 2),
            ("b", 1, 2),
            ("f", 2, 1),
        ]
        assert all(row.is_exact and row.is_same_token for row in rows)
        # a turn of either set of adapters at a time: 7 steps are 4 and 3
        assert [row.position for row in rows] == [3 + 3, 3 + 3, 3 + 2]
        assert len(all_results(response)) == 3


def test_rows_that_differ_in_company_are_told_apart() -> None:
    engine, _ = begun(Crowded(2, W, 16), [item("a"), item("b")])
    with engine:
        first, second = engine.compare_rows()
        assert (first.is_same_token, first.is_exact) == (True, False)
        assert first.shared_logprob == math.nextafter(first.single_logprob, 0.0)
        assert (second.is_same_token, second.is_exact) == (False, False)
        assert second.shared_token == second.single_token + 1
        [alone] = engine.compare_rows(["b"])
        assert (alone.n_rows, alone.is_exact, alone.id) == (1, True, "b")


def test_broken_rows_are_equal_where_both_are_broken() -> None:
    broken = set[int]()
    faults = Faults(broken=lambda chunk: chunk.slot in broken)
    engine, _ = begun(OneByOne(2, W, 16, faults=faults), [item("a"), item("b")])
    with engine:
        broken.add(1)
        first, second = engine.compare_rows()
        assert (first.is_exact, second.is_exact) == (True, True)
        assert second.single_token == BROKEN_ROW
        assert math.isnan(second.single_logprob)


def test_only_sequences_that_decode_are_compared() -> None:
    long = BatchPrompt(tokens=[5] * 20, id="long")
    engine, _ = begun(OneByOne(3, W, 4), [item("a"), item("b"), long, item("d")], 4)
    with engine:
        assert ids(engine.compare_rows()) == ["a", "b"]
        assert ids(engine.compare_rows(["long", "d", "b", "nobody"])) == ["b"]
        assert ids(engine.compare_rows([])) == []
        assert engine.pause("a")
        assert ids(engine.compare_rows()) == ["a", "b"]


def test_id_of_a_request_that_ended_does_not_mean_a_later_one() -> None:
    engine, response = begun(OneByOne(1, W, 16), [item("a", max_tokens=1)])
    with engine:
        [ended] = all_results(response)
        engine.run([item("a")])
        engine.step()
        assert engine.compare_rows([ended.id]) == []
        assert ids(engine.compare_rows(["a"])) == ["a"]


def test_every_choice_of_a_request_is_compared() -> None:
    engine, _ = begun(OneByOne(3, W, 16), [item("a", n=2), item("b")])
    with engine:
        assert ids(engine.compare_rows(["a"])) == ["a[0]", "a[1]"]


@pytest.mark.parametrize("memory", [SHIFTING, replace(shared_pool(80), can_shift=True)])
@given(data=st.data())
@settings(max_examples=examples(40))
def test_answers_do_not_depend_on_comparisons(memory: KvCapabilities, data: st.DataObject) -> None:
    items = data.draw(st.permutations(ITEMS))
    n_slots, n_batch = 4, data.draw(st.sampled_from([4, 16]))
    when = data.draw(st.sets(st.integers(0, 60)))
    paused = data.draw(st.dictionaries(st.integers(0, 40), st.sampled_from("abcdefg"), max_size=3))

    def run(*, compares: bool) -> list[Any]:
        backend = OneByOne(n_slots, W, n_batch, memory=memory)
        engine, response = begun(backend, items, 0)
        with engine:
            for i in range(61):
                engine.step()
                if i in paused:
                    engine.pause(paused[i])
                if i - 3 in paused:
                    engine.resume(paused[i - 3])
                if compares and i in when:
                    assert all(row.is_exact for row in _compared(engine))
                    check_balance(engine)
            for id in "abcdefg":
                engine.resume(id)
            return [(r.finish_reason, r.token_ids, r.logprobs) for r in all_results(response)]

    assert run(compares=True) == run(compares=False)


def _compared(engine: Engine) -> list[RowComparison]:
    """The rows; none where a full pool has no room for them."""
    try:
        return engine.compare_rows()
    except RequestFailedError as error:
        if "cells are free" not in str(error):
            raise
        return []


def test_ids_that_are_no_ids_are_refused() -> None:
    engine, _ = begun(OneByOne(1, W, 16), [item("a")])
    wrong: Any
    with engine:
        for wrong in ("a", ["a", 1.5], 3):
            with pytest.raises(ConfigError):
                engine.compare_rows(wrong)
    with pytest.raises(EngineClosedError):
        engine.compare_rows()


def test_comparison_leaves_no_trace_in_statistics() -> None:
    engine, _ = begun(OneByOne(2, W, 16), [item("a"), item("b")])
    with engine:
        before = engine.stats()
        assert len(engine.compare_rows()) == 2
        after = engine.stats()
    assert (after.n_runs, after.n_steps, after.n_output_tokens) == (
        before.n_runs,
        before.n_steps,
        before.n_output_tokens,
    )


def test_memory_that_cannot_trim_is_refused_by_name() -> None:
    engine, response = begun(OneByOne(2, W, 16, memory=recurrent(2)), [item("a")])
    with engine:
        with pytest.raises(UnsupportedOptionError, match="recurrent"):
            engine.compare_rows()
        assert len(all_results(response)[0].token_ids) == 12


def test_row_is_compared_where_forced_tokens_wait_for_a_resume() -> None:
    items = [item("a", regex="0:5", pause_every=1), item("b")]
    engine, response = begun(OneByOne(2, W, 16), items, 0)
    with engine:
        n_compared = 0
        while response.n_open:
            engine.step()
            rows = engine.compare_rows()
            assert all(row.is_exact for row in rows)
            n_compared += len(rows)
            engine.resume("a")
        answers = streams(response)
    engine, response = begun(OneByOne(2, W, 16), [item("a", regex="0:5"), item("b")], 0)
    with engine:
        assert streams(response) == answers
    assert n_compared > 11


def test_sequences_keep_their_draft_tokens_after_a_comparison() -> None:
    memory = KvCapabilities("partitioned", 2 * W, can_draft=True)
    backend = OneByOne(2, W, 16, memory=memory)
    engine, _ = begun(backend, [item("a")], 2)
    with engine:
        assert len(engine.compare_rows()) == 1
        assert [bound.has_drafts for bound in backend.plans[-1].binds] == [True]


def test_pool_without_a_cell_for_each_row_is_refused_and_stays() -> None:
    # after a step with the prompts and nine that decode: 2 × (3 + 9) of 25 cells
    engine, response = begun(OneByOne(2, W, 16, memory=shared_pool(25)), [item("a"), item("b")], 10)
    with engine:
        with pytest.raises(
            RequestFailedError, match="2 rows cannot be compared: only 1 cells are free"
        ):
            engine.compare_rows()
        assert len(engine.compare_rows(["a"])) == 1
        check_balance(engine)
        assert [r.finish_reason for r in all_results(response)] == ["length"] * 2


@pytest.mark.parametrize(("code", "i_run"), [(1, 0), (2, 1), (-1, 2), (-3, 0), (-3, 2)])
def test_failed_step_is_told_and_sequences_go_on(code: int, i_run: int) -> None:
    codes: list[int] = []

    def fail(chunks: Sequence[Span]) -> int:
        return codes.pop(0) if codes else 0

    items = [item("a", regex="1"), item("b", seed=3)]
    engine, response = begun(OneByOne(2, W, 16), items, 0)
    with engine:
        expected = streams(response)
    engine, response = begun(OneByOne(2, W, 16, faults=Faults(code=fail)), items)
    with engine:
        codes += [0] * i_run + [code]
        with pytest.raises(RequestFailedError) as caught:
            engine.compare_rows()
        assert isinstance(caught.value.__cause__, DecodeError)
        assert caught.value.__cause__.code == code
        check_balance(engine)
        assert streams(response) == expected


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("i_run", range(4))
def test_comparison_that_is_broken_off_changes_no_answer(i_run: int, *, is_late: bool) -> None:
    items = [item("a"), item("b", seed=3)]
    engine, response = begun(OneByOne(2, W, 16), items, 0)
    with engine:
        expected = streams(response)
    ctrl_c = FailingBackend(2, W, 16, error=KeyboardInterrupt(), fail_at=4 + i_run, is_late=is_late)
    engine, response = begun(ctrl_c, items)
    with engine:
        with pytest.raises(KeyboardInterrupt):
            engine.compare_rows()
        check_balance(engine)
        assert streams(response) == expected


REAL: dict[str, Any] = {"parallel": 4, "ctx_per_seq": 256, "n_threads": 1, "threaded": False}
SAMPLED: dict[str, Any] = {
    "max_tokens": 24,
    "logprobs": True,
    "top_logprobs": 2,
    "ignore_eos": True,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "red": {"temperature": 0},
    "blue": {"seed": 7, "repeat_penalty": 1.3, "dry_multiplier": 0.8},
    "green": {"seed": 8, "regex": "[a-z ]{40}"},
    "white": {"temperature": 0, "presence_penalty": 0.5},
}
CHATS = [
    BatchPrompt([{"role": "user", "content": f"Say {id}."}], id=id, options={**SAMPLED, **options})
    for id, options in OPTIONS.items()
]


def real_answers(
    path: Path, when: Callable[[int], bool], **settings: Any
) -> tuple[list[Any], list[RowComparison]]:
    """What each chat gives, log-probabilities to the bit, and what comparisons between its chunks said.

    Without a thread, so that the same rows share steps each time.
    """
    rows: list[RowComparison] = []
    with cbatch.load(path, **REAL, **settings) as engine:
        response = engine.run(CHATS)
        for i, _ in enumerate(response):
            if when(i):
                rows += engine.compare_rows()
        return [(r.token_ids, r.logprobs) for r in response.results()], rows


@pytest.mark.parametrize("settings", [{"exact": True}, {"kv": "unified"}], ids=str)
def test_real_answers_do_not_depend_on_comparisons(
    test_model: Path, settings: dict[str, Any]
) -> None:
    undisturbed, _ = real_answers(test_model, lambda _: False, **settings)
    disturbed, rows = real_answers(test_model, lambda i: i % 5 == 2, **settings)
    assert len(rows) >= 8
    assert {row.id for row in rows} == {chat.id for chat in CHATS}
    if settings.get("exact"):
        assert all(row.is_exact for row in rows)
        assert disturbed == undisturbed
    else:
        assert [tokens for tokens, _ in disturbed] == [tokens for tokens, _ in undisturbed]


@pytest.mark.real
def test_real_memory_of_states_is_refused(synth: Any) -> None:
    with cbatch.load(synth("mamba"), **REAL) as engine:
        response = engine.run([BatchPrompt(tokens=[300, 301], options={"max_tokens": 5})])
        with pytest.raises(UnsupportedOptionError, match="recurrent"):
            engine.compare_rows()
        assert len(response.results()) == 1
