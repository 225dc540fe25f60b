"""Prompts are computed before the rows of a step, by their lengths, where each slot has memory of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.llama.native import NativeStepper
from cbatch.core.plan import Binding, Slot, StepPlan, StepResult
from cbatch.core.span import Span
from cbatch.options import GREEDY
from tests.backend.slots import bind_all, chunk, failing, go_on, held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.llama_backend import LlamaBackend
    from tests.backend.slots import MakeBackend

Call = list[tuple[int, int, int, bool]]
"""Slot, start, tokens and output of each chunk."""


class WatchedStepper(NativeStepper):
    """Notes what it is asked to compute."""

    def __init__(self, ctx: Any, calls: list[Call], **sizes: Any) -> None:
        super().__init__(ctx, **sizes)
        self._calls = calls

    def run(self, spans: Sequence[Span], *args: Any, **given: Any) -> StepResult:
        """Do a run."""
        self._calls.append([(c.slot, c.start, len(c.inputs), c.has_output) for c in spans])
        return super().run(spans, *args, **given)


def watched(make: MakeBackend, kind: str, **given: Any) -> tuple[LlamaBackend, list[Call]]:
    calls: list[Call] = []
    backend = make(kind, stepper=partial(WatchedStepper, calls=calls), **given)
    bind_all(backend)
    return backend, calls


def text(slot: int, n: int) -> list[int]:
    return [300 + 7 * i + 11 * slot for i in range(n)]


def with_row(backend: LlamaBackend) -> Span:
    """A row of slot 0, which holds 5 cells now."""
    backend.run(StepPlan((chunk(0, 0, text(0, 5)),)))
    return chunk(0, 5, [7])


ROW = (0, 5, 1, True)
UNFINISHED = Span(Slot(1), 0, text(1, 9), has_output=False)
SCORED = Span(Slot(1), 0, text(1, 4), has_output=True, targets=text(1, 4)[1:])
LAST = [ROW, (1, 8, 1, True), (2, 11, 1, True)]


@pytest.mark.parametrize(
    ("kind", "prompts", "expected"),
    [
        *(
            (kind, (chunk(1, 0, text(1, 9)), chunk(2, 0, text(2, 12))), asked)
            for kind, asked in (
                ("partitioned", [[(1, 0, 8, False)], [(2, 0, 11, False)], LAST]),
                ("recurrent", [[(1, 0, 8, False)], [(2, 0, 11, False)], LAST]),
                ("unified", [[ROW, (1, 0, 9, True), (2, 0, 12, True)]]),
            )
        ),
        (
            "partitioned",
            (chunk(1, 0, text(1, 9)), chunk(2, 0, text(2, 9))),
            [[(1, 0, 8, False), (2, 0, 8, False)], [ROW, (1, 8, 1, True), (2, 8, 1, True)]],
        ),
        ("partitioned", (UNFINISHED,), [[(1, 0, 9, False)], [ROW]]),
        (
            "partitioned",
            (SCORED, chunk(2, 0, text(2, 12))),
            [[(2, 0, 11, False)], [ROW, (1, 0, 4, True), (2, 11, 1, True)]],
        ),
    ],
    ids=["apart", "states", "one pool", "of one length", "unfinished", "with targets"],
)
def test_prompts_come_before_the_rows_and_their_last_tokens_beside_them(
    make: MakeBackend, kind: str, prompts: tuple[Span, ...], expected: list[Call]
) -> None:
    backend, calls = watched(make, kind)
    row = with_row(backend)
    calls.clear()
    result = backend.run(StepPlan((row, *prompts)))
    assert calls == expected
    assert result.n_steps == 1
    assert [len(t) for t in result.tokens] == [1, *(c.has_output for c in prompts)]
    assert held(backend)[1] == len(prompts[0].inputs)
    assert all(np.isfinite(s.logprob) for scores in result.scores.values() for s in scores)
    assert sum(map(len, result.scores.values())) == len(prompts[0].targets)


def test_few_prompts_without_rows_stay_together_and_many_end_together(make: MakeBackend) -> None:
    backend, calls = watched(make, "partitioned", parallel=5)
    few = (chunk(0, 0, text(0, 9)), chunk(1, 0, text(1, 12)))
    assert backend.run(StepPlan(few, n_steps=3)).n_steps == 3
    assert calls == [[(0, 0, 9, True), (1, 0, 12, True)]]
    backend.run(StepPlan((), clears=(Slot(0), Slot(1))))
    calls.clear()
    backend.run(StepPlan(tuple(chunk(i, 0, text(i, 6 + i % 4)) for i in range(5))))
    assert [len(call) for call in calls] == [2, 1, 1, 1, 5]
    assert calls[0] == [(0, 0, 5, False), (4, 0, 5, False)]
    assert all(n == 1 and is_output for _, _, n, is_output in calls[-1])
    assert held(backend) == [6, 7, 8, 9, 6]


@pytest.mark.parametrize("kind", ["partitioned", "recurrent"])
def test_tokens_and_log_probabilities_are_those_of_each_prompt_alone(
    make: MakeBackend, kind: str
) -> None:
    backend = make(kind)
    slots = [Slot(i) for i in range(3)]
    binds = tuple(Binding(slot, 0, GREEDY, (), n_logprobs=2) for slot in slots)
    backend.run(StepPlan((), binds=binds))
    texts = [text(0, 6), text(1, 9), text(2, 12)]
    alone = [backend.run(StepPlan((chunk(i, 0, t),))) for i, t in enumerate(texts)]
    backend.run(StepPlan((), clears=tuple(slots)))
    backend.run(StepPlan((chunk(0, 0, texts[0][:-1]),)))
    chunks = (chunk(0, 5, texts[0][-1:]), chunk(1, 0, texts[1]), chunk(2, 0, texts[2]))
    found = backend.run(StepPlan(chunks))
    for i, expected in enumerate(alone):
        assert found.tokens[i] == expected.tokens[0]
        (is_now,), (was,) = found.logprobs[i], expected.logprobs[0]
        assert is_now.logprob == pytest.approx(was.logprob, abs=1e-3)
    follow = [go_on(backend, i, found.tokens[i], 3) for i in range(3)]
    for i, t in enumerate(texts):
        backend.run(StepPlan((), clears=(Slot(i),)))
        assert go_on(backend, i, t, 4)[1:] == follow[i]


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("partitioned", 1, (1, ())),
        ("partitioned", 2, (2, (5, 0, 0))),
        ("recurrent", 1, (1, ())),
        ("recurrent", -3, (-3, (0, 0, 0))),
    ],
)
def test_prompts_are_taken_back_where_the_rows_fail(
    make: MakeBackend, kind: str, code: int, expected: tuple[int, tuple[int, ...]]
) -> None:
    backend, failures = failing(make, kind)
    bind_all(backend)
    row = with_row(backend)
    failures += [None, None, (code, 0)]
    plan = StepPlan((row, chunk(1, 0, text(1, 9)), chunk(2, 0, text(2, 12))))
    result = backend.run(plan)
    assert (result.code, result.n_kept) == expected
    assert held(backend) == [0 if expected[1] == (0, 0, 0) else 5, 0, 0]
