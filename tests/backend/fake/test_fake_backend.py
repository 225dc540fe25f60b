"""The fake backend is as strict as the real one: what breaks a rule is refused, and what leaks is seen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cbatch.backend.fake import END_TOKEN, FakeBackend, FakeVocab, Faults, StepCost, fake_logprobs
from cbatch.core.plan import BROKEN_ROW, Binding, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.errors import ConfigError, PlanError
from cbatch.options import GREEDY
from tests.backend.fake.plans import bind, row
from tests.oracle.fake_streams import stream_alone


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan((row(n=9),), binds=(bind(),)),
        StepPlan((row(),)),
        StepPlan((row(),), n_steps=16, binds=(bind(),)),
    ],
)
def test_plan_that_breaks_a_rule_raises_and_does_nothing(plan: StepPlan) -> None:
    backend = FakeBackend(n_slots=4, n_window=16, n_batch=8)
    backend.run(StepPlan((row(3),), binds=(bind(3),)))
    with pytest.raises(PlanError):
        backend.run(replace(plan, clears=(Slot(3),)))
    assert backend.cells == [[], [], [], [1, 2]]
    assert len(backend.plans) == 1


def test_plan_up_to_every_limit_is_run() -> None:
    backend = FakeBackend(n_slots=4, n_window=16, n_batch=8)
    result = backend.run(StepPlan((row(3, n=8),), n_steps=9, binds=(bind(3, 8),)))
    assert (result.n_steps, len(result.tokens[0])) == (9, 9)
    assert len(backend.cells[3]) == 16


def test_stream_is_the_expected_one_and_does_not_depend_on_the_slot() -> None:
    backend = FakeBackend(n_slots=2)
    plan = StepPlan((row(0), row(1)), n_steps=5, binds=(bind(0), bind(1)))
    first, second = backend.run(plan).tokens
    assert first == second == stream_alone(backend, [1, 2], bind(), 5)


def test_leaked_cell_gives_another_token() -> None:
    clean, leaky = FakeBackend(), FakeBackend()
    leaky.run(StepPlan((Span(Slot(0), 0, (7,), has_output=False),), binds=(bind(),)))
    good = clean.run(StepPlan((row(),), binds=(bind(),))).tokens
    assert leaky.run(StepPlan((row(start=1),), binds=(bind(),))).tokens != good


def test_run_ends_after_the_step_in_which_a_row_stops() -> None:
    backend = FakeBackend()
    stop = stream_alone(backend, [1, 2], bind(), 3)[2]
    binding = Binding(Slot(0), 2, GREEDY, (stop,))
    result = backend.run(StepPlan((row(),), n_steps=9, binds=(binding,)))
    assert (result.n_steps, result.tokens[0][-1]) == (3, stop)
    assert stream_alone(backend, [1, 2], binding, 9) == result.tokens[0]


def test_run_ends_after_a_broken_row() -> None:
    backend = FakeBackend(faults=Faults(broken=lambda chunk: chunk.start >= 3))
    result = backend.run(StepPlan((row(),), n_steps=9, binds=(bind(),)))
    assert (result.n_steps, result.tokens[0][-1]) == (3, BROKEN_ROW)


def test_interrupt_without_a_run_ends_only_the_next_one_after_a_step() -> None:
    backend = FakeBackend()
    backend.interrupt()
    assert backend.run(StepPlan((row(),), n_steps=4, binds=(bind(),))).n_steps == 1
    more = Span(Slot(0), 2, (5,), has_output=True)
    assert backend.run(StepPlan((more,), n_steps=4)).n_steps == 4


@pytest.mark.parametrize(("code", "n_cells"), [(1, 0), (-1, 0), (2, 2), (-2, 2), (-3, 2)])
def test_failed_step_leaves_what_llama_cpp_would_leave(code: int, n_cells: int) -> None:
    backend = FakeBackend(faults=Faults(code=lambda _: code))
    result = backend.run(StepPlan((row(n=4),), binds=(bind(),)))
    assert (result.code, result.n_steps, result.tokens) == (code, 0, [[]])
    assert len(backend.cells[0]) == n_cells


@pytest.mark.parametrize(
    ("slice_s", "n_done"), [(0.0, 9), (0.9, 2), (1.0, 3), (9.0, 9)], ids="for {}".format
)
def test_run_ends_after_the_first_step_that_is_late(slice_s: float, n_done: int) -> None:
    backend = FakeBackend(cost=StepCost(base_s=0.25, token_s=0.25))
    plan = StepPlan((row(n=1),), 9, slice_s, binds=(bind(),))
    assert backend.run(plan).n_steps == n_done
    assert backend.now_s == 0.5 * n_done


def test_closed_backend_refuses_runs() -> None:
    backend = FakeBackend()
    backend.close()
    backend.close()
    with pytest.raises(PlanError, match="closed"):
        backend.run(StepPlan((row(),), binds=(bind(),)))


def test_vocabulary_without_an_end_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="256"):
        FakeBackend(n_vocab=END_TOKEN)


def test_vocabulary_goes_there_and_back() -> None:
    vocab = FakeVocab(4096)
    tokens = vocab.tokenize("é€")
    assert b"".join(map(vocab.piece, tokens)).decode() == "é€"
    assert vocab.piece(END_TOKEN) == b""
    assert all(len(vocab.piece(t).decode()) == 1 for t in range(257, 4096))
    assert vocab.render([{"role": "user", "content": "hi"}]) == vocab.tokenize("user:hi")


# ---- histories and log-probabilities ----


def test_history_of_another_sequence_gives_other_tokens() -> None:
    def tokens(*history: int) -> list[list[int]]:
        binding = Binding(Slot(0), 2, GREEDY, (), history)
        return FakeBackend().run(StepPlan((row(),), n_steps=3, binds=(binding,))).tokens

    assert tokens(1, 2) == tokens(1, 2)
    assert tokens(1, 2) != tokens(1, 3)
    assert tokens(1, 2) != tokens(2)
    assert tokens(9, 1, 2, 3, 4) != tokens(1, 2, 3, 4)


def test_history_grows_by_what_is_computed() -> None:
    binding = Binding(Slot(0), 2, GREEDY, (), (1, 2))
    backend = FakeBackend()
    whole = backend.run(StepPlan((row(),), n_steps=6, binds=(binding,))).tokens[0]
    assert whole == stream_alone(backend, [1, 2], binding, 6)
    parts = FakeBackend()
    found = parts.run(StepPlan((row(),), n_steps=2, binds=(binding,))).tokens[0]
    chunk = Span(Slot(0), 3, found[1:], has_output=True)
    assert parts.run(StepPlan((chunk,), n_steps=4)).tokens[0] == whole[2:]
    again = Binding(Slot(0), 2, GREEDY, (), (1, 2, *whole))
    more = Span(Slot(0), 7, whole[-1:], has_output=True)
    rebound = parts.run(StepPlan((more,), binds=(again,)))
    assert backend.run(StepPlan((more,))).tokens == rebound.tokens


def test_logprobs_are_made_up_for_who_wants_them() -> None:
    binds = (Binding(Slot(0), 2, GREEDY, (), (), 3), bind(1))
    result = FakeBackend().run(StepPlan((row(0), row(1)), n_steps=2, binds=binds))
    [wanted, none] = result.logprobs
    assert list(wanted) == [fake_logprobs(token, 3) for token in result.tokens[0]]
    assert list(none) == []
    for found, token in zip(wanted, result.tokens[0], strict=True):
        assert found.top[0] == (token, found.logprob)
        assert len(dict(found.top)) == 3
        assert sum(map(math.exp, dict(found.top).values())) < 3
    assert FakeBackend().run(StepPlan((row(),), binds=(bind(),))).logprobs == ()
