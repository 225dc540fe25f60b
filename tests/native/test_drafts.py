"""Draft tokens of the native stepper: the same tokens as one a step gives, in fewer steps, and no cell left behind."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import strategies as st

from cbatch.backend.llama.library import LlamaApi
from cbatch.backend.llama.native import NativeStepper
from cbatch.core.plan import BROKEN_ROW, Binding, Slot, StepResult
from cbatch.core.span import Span
from cbatch.errors import PlanError
from cbatch.options import GREEDY, Sampling
from tests.native.test_native import DECODE, GET_LOGITS, SeenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.core.plan import DraftCounts

N_VOCAB = 40

GET_MEMORY = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
CLOCK = ctypes.CFUNCTYPE(ctypes.c_int64)
SEQ_RM = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32
)


@dataclass(eq=False, slots=True)
class TextLlama:
    """Keeps cells, and a clock; the logits of a row follow from the tokens of its sequence up to there."""

    row: Callable[[list[int]], Any]
    """The logits after so many tokens, (n_vocab,) float32."""
    cost_ns: Callable[[int], int] = lambda n_tokens: 1_000_000
    """What a step of so many tokens takes by the clock; at first, tokens count for nothing."""
    now_ns: int = 0
    n_window: int = 1000
    n_vocab: int = N_VOCAB
    code: int = 0
    """What decoding returns."""
    cells: dict[int, list[int]] = field(default_factory=dict)
    counts: set[tuple[int, ...]] = field(default_factory=set)
    """How many tokens each sequence had in a batch, of all batches."""
    _batch: SeenBatch | None = None
    _rows: list[Any] = field(default_factory=list)

    def api(self, *, can_cut: bool = True) -> LlamaApi:
        return LlamaApi(
            DECODE(self.decode),
            GET_LOGITS(self.get_logits),
            get_memory=GET_MEMORY(lambda _: 1) if can_cut else None,
            memory_seq_rm=SEQ_RM(self.cut) if can_cut else None,
            clock_ns=CLOCK(lambda: self.now_ns),
        )

    def cut(self, memory: int | None, slot: int, start: int, end: int) -> bool:
        assert (memory, end) == (1, -1)
        assert 0 < start < len(self.cells[slot])
        del self.cells[slot][start:]
        return True

    def decode(self, ctx: int | None, batch: Any) -> int:
        self._batch = seen = SeenBatch.of(batch)
        for token, pos, slot in zip(seen.token, seen.pos, seen.slot, strict=True):
            cells = self.cells.setdefault(slot, [])
            assert pos == len(cells)
            cells.append(token)
        self.counts.add(tuple(seen.slot.count(slot) for slot in sorted(set(seen.slot))))
        self.now_ns += self.cost_ns(len(seen.token))
        return self.code

    def get_logits(self, ctx: int | None, i_token: int) -> int:
        seen = self._batch
        assert seen is not None
        assert seen.logits[i_token] == 1
        row = self.row(self.cells[seen.slot[i_token]][: seen.pos[i_token] + 1])
        self._rows.append(row)
        return int(row.ctypes.data)


DRAFT = 7
"""The context of a draft model."""

N_DRAFT_BATCH = 16
"""Most tokens of one of its calls."""


@dataclass(eq=False, slots=True)
class Pair:
    """A model and one that drafts for it, by the context that is asked; both have the first one's clock."""

    model: TextLlama
    draft: TextLlama

    def of(self, ctx: int | None) -> TextLlama:
        return self.draft if ctx == DRAFT else self.model

    def api(self) -> LlamaApi:
        return LlamaApi(
            DECODE(self.decode),
            GET_LOGITS(lambda ctx, i: self.of(ctx).get_logits(ctx, i)),
            get_memory=GET_MEMORY(lambda ctx: ctx or 1),
            memory_seq_rm=SEQ_RM(self.cut),
            clock_ns=CLOCK(lambda: self.model.now_ns + self.draft.now_ns),
        )

    def decode(self, ctx: int | None, batch: Any) -> int:
        return self.of(ctx).decode(ctx, batch)

    def cut(self, memory: int | None, slot: int, start: int, end: int) -> bool:
        if memory != DRAFT:
            return self.model.cut(memory, slot, start, end)
        cells = self.draft.cells.setdefault(slot, [])
        assert start <= len(cells)
        del cells[start:]
        return True


def line(period: int, noise: int) -> Callable[[list[int]], Any]:
    """Return logits by which a text repeats itself, but for one place in `noise`."""

    def row(tokens: list[int]) -> Any:
        n = len(tokens)
        rng = np.random.default_rng((n, *tokens[-2:]))
        logits = rng.random(N_VOCAB, dtype=np.float32)
        again = tokens[n - period] if n >= period else tokens[-1] + 1
        if n % noise:
            logits[again % N_VOCAB] += 6.0
        return logits

    return row


def generate(
    llama: TextLlama,
    prompts: list[list[int]],
    bindings: list[Binding],
    n_tokens: int,
    n_drafts: int,
    n_steps: int = 16,
    *,
    are_apart: bool = True,
    has_all: bool = False,
    draft: TextLlama | None = None,
    n_draft_batch: int = N_DRAFT_BATCH,
) -> tuple[list[list[int]], list[StepResult]]:
    """Return the answers to prompts, each to `n_tokens` or to its stop token, and the results of all runs."""
    n_batch = max(64, *map(len, prompts))
    sizes: dict[str, Any] = {"n_slots": len(prompts), "n_batch": n_batch, "n_vocab": N_VOCAB}
    both = llama if draft is None else Pair(llama, draft)
    stepper = NativeStepper(None, n_threads=1, api=both.api(), **sizes)
    stepper.are_apart, stepper.has_all_drafts = are_apart, has_all
    if draft is not None:
        stepper.draft_with(
            DRAFT, n_batch=n_draft_batch, n_window=draft.n_window, n_vocab=draft.n_vocab
        )
    answers: list[list[int]] = [[] for _ in prompts]
    results: list[StepResult] = []
    try:
        for slot, prompt in enumerate(prompts):
            stepper.bind(bindings[slot])
            found = stepper.run([Span(Slot(slot), 0, prompt, has_output=True)])
            answers[slot] += found.tokens[0]
        while True:
            rows = [
                Span(Slot(i), len(prompts[i]) + len(a) - 1, a[-1:], has_output=True)
                for i, a in enumerate(answers)
                if len(a) < n_tokens and a[-1] not in bindings[i].stop_tokens and a[-1] >= 0
            ]
            if not rows:
                return answers, results
            n_left = min(n_tokens - len(answers[c.slot]) for c in rows)
            found = stepper.run(rows, min(n_steps, n_left), n_drafts=n_drafts if n_left > 1 else 0)
            results.append(found)
            for c, new in zip(rows, found.tokens, strict=True):
                assert 0 < len(new) <= min(n_steps, n_left)
                answers[c.slot] += new
                n_cells = len(prompts[c.slot]) + len(answers[c.slot]) - 1
                assert llama.cells[c.slot] == [*prompts[c.slot], *answers[c.slot]][:n_cells]
    finally:
        stepper.close()


def bindings_of(
    prompts: list[list[int]], sampling: Sampling, stop: tuple[int, ...] = (), **given: Any
) -> list[Binding]:
    return [
        Binding(
            Slot(i),
            len(p),
            sampling,
            stop,
            history=tuple(p),
            n_logprobs=2,
            **{"has_drafts": True, "has_model_drafts": True, **given},
        )
        for i, p in enumerate(prompts)
    ]


def n_drafted(results: list[StepResult]) -> int:
    return sum(sum(r.n_drafts) for r in results)


def counts_of(drafted: Sequence[DraftCounts]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*drafted, strict=True))) or (0,) * 6


def n_accepted(results: list[StepResult]) -> int:
    return sum(sum(r.n_accepted) for r in results)


SAMPLINGS = st.sampled_from(
    [
        GREEDY,
        Sampling(temperature=0.9, seed=5),
        Sampling(temperature=0.7, top_k=5, seed=1, repeat_penalty=1.3, repeat_last_n=16),
        Sampling(
            temperature=0.5, seed=2, presence_penalty=0.5, frequency_penalty=0.2, repeat_last_n=64
        ),
        Sampling(temperature=0.3, seed=9, dry_multiplier=0.8, dry_penalty_last_n=64),
        Sampling(temperature=0.4, seed=9, logit_bias=((3, 2.0), (4, float("-inf")))),
    ]
)


def test_reports_are_those_of_the_tokens() -> None:
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 5, 6]]
    bindings = bindings_of(prompts, GREEDY)
    _, plain = generate(TextLlama(line(3, 50)), prompts, bindings, 40, 0)
    _, drafted = generate(TextLlama(line(3, 50)), prompts, bindings, 40, 7)
    for i in range(len(prompts)):
        reports = [[p for r in each for p in r.logprobs[i]] for each in (plain, drafted)]
        assert reports[0] == reports[1]


def test_set_number_is_drafted_wherever_there_are_as_many_at_any_cost() -> None:
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]] * 2
    llama = TextLlama(line(4, 1000), lambda n_tokens: n_tokens * 1_000_000)
    bindings = bindings_of(prompts, GREEDY)
    _, results = generate(llama, prompts, bindings, 201, 4, 65, has_all=True)
    assert n_drafted(results) == n_accepted(results) == 2 * 200 * 4 / 5


@pytest.mark.parametrize("n", [1, 3])
def test_text_that_repeats_takes_fewer_steps(n: int) -> None:
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]] * n
    llama = TextLlama(line(4, 1000))
    answers, results = generate(llama, prompts, bindings_of(prompts, GREEDY), 200, 7, 64)
    assert [len(a) for a in answers] == [200] * n
    assert sum(r.n_steps for r in results) < 120
    assert n_accepted(results) > 80 * n


def test_long_prompt_is_looked_through_in_several_steps() -> None:
    prompt = [i * i % 37 for i in range(20_000)]  # repeats itself after 37 tokens
    bindings = bindings_of([prompt], GREEDY)
    _, results = generate(TextLlama(line(37, 1000)), [prompt], bindings, 400, 7, n_steps=2)
    first = next(i for i, r in enumerate(results) if any(r.n_drafts))
    assert 2 * first > 20_000 / 1024  # a run has two steps
    assert n_accepted(results) > 100


def test_nothing_is_drafted_where_each_row_costs_as_much_as_a_step() -> None:
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]] * 2
    llama = TextLlama(line(4, 9), lambda n_tokens: n_tokens * 1_000_000)
    _, results = generate(llama, prompts, bindings_of(prompts, GREEDY), 600, 7, 64)
    assert n_drafted(results) <= 2 * 2 * (1 + 2 + 3 + 5 + 7)  # each number twice


def test_rows_without_an_expected_draft_are_alone_though_more_cost_less() -> None:
    def row(tokens: list[int]) -> Any:
        return line(4, 1000 if len(tokens) < 60 else 1)(tokens)

    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]] * 2
    llama = TextLlama(row, lambda n_tokens: 2_000_000 - 50_000 * n_tokens)
    _, results = generate(llama, prompts, bindings_of(prompts, GREEDY), 300, 7, 64)
    assert n_accepted(results) > 50
    assert n_drafted(results) < 1000  # 3,064 where each step is as wide as is cheapest


def test_drafts_rest_where_steps_take_longer_than_they_mostly_do() -> None:
    """Half of the steps with drafts, less one, take very long: what they mostly take is short."""
    n_seen = 0

    def cost_ns(n_tokens: int) -> int:
        nonlocal n_seen
        n_seen += n_tokens == 2
        return 9_000_000 if n_tokens == 2 and n_seen % 5 < 2 else 1_000_000

    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
    _, results = generate(
        TextLlama(line(4, 9), cost_ns), prompts, bindings_of(prompts, GREEDY), 2000, 1
    )
    n_steps = sum(r.n_steps for r in results)
    assert 16 <= n_drafted(results) < n_steps / 8


def test_drafts_rest_where_the_steps_behind_theirs_take_longer() -> None:
    """The first step without drafts behind one with drafts needs a new graph, as in llama.cpp."""
    before = 1

    def cost_ns(n_tokens: int) -> int:
        nonlocal before
        is_new, before = n_tokens == 1 != before, n_tokens
        return 9_000_000 if is_new else 1_000_000

    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
    _, results = generate(
        TextLlama(line(4, 9), cost_ns), prompts, bindings_of(prompts, GREEDY), 2000, 1
    )
    n_steps = sum(r.n_steps for r in results)
    assert 16 <= n_drafted(results) < n_steps / 8


@pytest.mark.parametrize(
    ("groups", "is_drafted"), [((1, 1), True), ((1, 2), False), ((0, 0), False)]
)
def test_answers_of_a_group_are_drafted_from(groups: tuple[int, int], is_drafted: bool) -> None:
    """Both answers are the same: each token follows from its place, and hardly two of them come again."""
    answer = np.random.default_rng(1).integers(0, N_VOCAB, 200)

    def row(tokens: list[int]) -> Any:
        logits = np.zeros(N_VOCAB, np.float32)
        logits[answer[len(tokens) - 3]] = 1.0
        return logits

    llama = TextLlama(row)
    stepper = NativeStepper(
        None, n_slots=1, n_batch=8, n_vocab=N_VOCAB, n_threads=1, api=llama.api()
    )
    accepted = []
    for prompt, group in zip(([3, 1, 2], [9, 8, 2]), groups, strict=True):
        llama.cells.clear()
        [binding] = bindings_of([prompt], GREEDY)
        stepper.bind(replace(binding, draft_group=group))
        found, n_right = stepper.run([Span(Slot(0), 0, prompt, has_output=True)]).tokens[0], 0
        while len(found) < 150:
            chunk = Span(Slot(0), 2 + len(found), [found[-1]], has_output=True)
            result = stepper.run([chunk], 16, n_drafts=7)
            found, n_right = [*found, *result.tokens[0]], n_right + sum(result.n_accepted)
        assert found == [*answer[: len(found)]]
        accepted.append(n_right)
    stepper.close()
    assert accepted[0] < 20
    assert (accepted[1] > 80) is is_drafted


def test_slot_without_drafts_has_none() -> None:
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
    llama = TextLlama(line(4, 1000))
    bindings = [Binding(Slot(0), len(prompts[0]), GREEDY, (), history=tuple(prompts[0]))]
    _, results = generate(llama, prompts, bindings, 100, 7)
    assert n_drafted(results) == 0


def test_slot_without_drafts_may_sample_what_fills_its_rows_up() -> None:
    """Beside a slot with drafts it has as many rows, and these compute token 0."""
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [0, 0, 0]]

    def row(tokens: list[int]) -> Any:
        logits = line(4, 1000)(tokens)
        logits[0] += 99.0 * (tokens[0] == 0)
        return logits

    bindings = bindings_of(prompts, GREEDY)
    bindings[1] = replace(bindings[1], has_drafts=False, has_model_drafts=False)
    answers, results = generate(TextLlama(row), prompts, bindings, 100, 7, has_all=True)
    assert answers[1] == [0] * 100
    assert n_accepted(results) > 0


def test_broken_row_behind_a_draft_ends_the_run() -> None:
    def row(tokens: list[int]) -> Any:
        logits = np.zeros(N_VOCAB, np.float32)
        logits[tokens[-1]] = np.nan if len(tokens) == 60 else 1.0
        return logits

    [answer], _ = generate(TextLlama(row), [[1] * 8], bindings_of([[1] * 8], GREEDY), 99, 7, 64)
    assert answer == [*[1] * 52, BROKEN_ROW]


def test_drafts_are_refused_where_memory_cannot_be_cut() -> None:
    llama = TextLlama(line(4, 9))
    stepper = NativeStepper(
        None, n_slots=1, n_batch=8, n_vocab=N_VOCAB, n_threads=1, api=llama.api(can_cut=False)
    )
    stepper.bind(Binding(Slot(0), 0, GREEDY, ()))
    with pytest.raises(PlanError, match="draft tokens"):
        stepper.run([Span(Slot(0), 0, [1], has_output=True)], 4, n_drafts=1)
    assert not llama.cells
    stepper.close()
