"""A backend without a model, for tests of scheduling and for simulation at scale.

It keeps a fake cell for every token. Its next token is a function of the tokens found in a sequence's cells, of its
history, of its seed and of the output position, never of the slot: a leaked cell, a wrong position, a history that is
not its own or a recycled slot that is not clean gives a wrong token, so equality of streams proves the scheduler right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cbatch.backend.fake.fake_cells import FakeCells, History
from cbatch.backend.fake.fake_embedder import N_EMBEDDING, FakeEmbedder
from cbatch.backend.fake.fake_tokens import (
    END_TOKEN,
    FakeGrammars,
    FakeVocab,
    fake_logprobs,
    fake_score,
    matcher_of,
    mix,
    tag_of,
)
from cbatch.backend.logits_processors import LogitsProcessors
from cbatch.core.plan import (
    BROKEN_ROW,
    EMPTY_ROW,
    Binding,
    DraftCounts,
    GrammarStep,
    KvCapabilities,
    Slot,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from cbatch.core.span import ANYWHERE, N_TARGETS_MAX, Span
from cbatch.errors import ConfigError, PlanError, RequestFailedError, UnsupportedTaskError
from cbatch.support.model_facts import ModelFacts
from cbatch.support.picture_tokens import edges_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.fake.fake_tokens import FakeBudgetMatcher, FakeMatcher
    from cbatch.embedding import Pooling
    from cbatch.options import AdapterSet

_BITS_SHIFT = 57
"""Above the bits of a token and of adapters; cells have 63."""

_BITS_LEFT = 64 - _BITS_SHIFT
"""Bits of a mixed number that a cell has no room for."""

_N_SEEN = 4
"""Newest tokens of a history that the next token depends on, together with the history's length."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Virtual seconds of a step: `base_s`, plus `token_s` for every token in it."""

    base_s: float = 0.0
    token_s: float = 0.0

    def __call__(self, n_rows: int, n_prompt: int) -> float:
        """Return the seconds of a step of `n_rows` sequences with `n_prompt` tokens beyond one each."""
        return self.base_s + self.token_s * (n_rows + n_prompt)


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, asked before it could.

    Args:
        code: called with the plan's spans before each step; what it returns is the step's return code.
        broken: called with a span's tokens; True makes its row broken (NaN logits).
        swap: called with a key before cells are saved or loaded; False makes that fail.
    """

    code: Callable[[Sequence[Span]], int] = lambda _: 0
    broken: Callable[[Span], bool] = lambda _: False
    swap: Callable[[int], bool] = lambda _: True


@dataclass(frozen=True, slots=True)
class Bits:
    """How the bits of what is computed depend on the number of rows that are computed together.

    Args:
        of: which bits so many rows give, below 32; cells of other bits lead to other tokens.
        width: the rows of a step that has its shape, where spans are aligned: those of the slots from its first to its
            last, and pad rows.
    """

    of: Callable[[int], int]
    width: Callable[[int], int] = lambda n_rows: n_rows


_NO_FAULTS = Faults()
_NO_COST = StepCost()


@dataclass(slots=True)
class _Bound:
    binding: Binding
    history: History
    matcher: FakeMatcher | FakeBudgetMatcher | None


class FakeBackend:
    """Implements `Backend` over lists; `faults` brings every return code of `llama_decode`.

    Args:
        n_slots: sequences at once.
        n_window: cells of a slot.
        n_batch: most tokens in a step.
        n_vocab: token ids; about one token in `n_vocab` ends a generation. At least 257.
        seed: changes every token of every sequence.
        faults: what goes wrong.
        cost: seconds of a step on the virtual clock `now_s`: called with its sequences, and its tokens beyond one each.
        memory: partitioned by default; in unified memory a step that finds no room returns code 1.

    After code 2 and below −1 an unknown part of the step's cells stays behind, as in llama.cpp.
    """

    sampling_defaults: Mapping[str, float] = {}

    def __init__(
        self,
        n_slots: int = 4,
        n_window: int = 256,
        n_batch: int = 64,
        *,
        n_vocab: int = 320,
        seed: int = 0,
        faults: Faults = _NO_FAULTS,
        cost: Callable[[int, int], float] = _NO_COST,
        memory: KvCapabilities | None = None,
    ) -> None:
        if n_vocab <= END_TOKEN:
            raise ConfigError(f"n_vocab must be above {END_TOKEN}, not {n_vocab}")
        self.n_slots, self.n_window, self.n_batch = n_slots, n_window, n_batch
        self.cuts = ANYWHERE
        self.bits: Bits | None = None
        """What depends on the number of rows; nothing by default. With `cuts`, rows of one token are
        computed together and every longer span alone, as the backend of llama.cpp does it."""
        self.n_rests = 0
        """Times that it was told that nothing runs for a while."""
        self.memory = memory or KvCapabilities("partitioned", n_slots * n_window)
        self.vocab = FakeVocab(n_vocab)
        self.start = seed * 2 + 1
        """The state of an empty slot; see `state_after`."""
        self._kv = FakeCells(n_slots, n_window, self.memory, self.start, faults.swap)
        self.cells, self.saved = self._kv.cells, self._kv.saved
        self.adapters: tuple[str, ...] = ()
        self.fim: dict[str, int] = {}
        self.answer_settings: dict[str, str] = {}
        self.now_s = 0.0
        self.n_steps = 0
        self.n_rebuilt = 0
        self.plans: list[StepPlan] = []
        self._tag = 0
        self._scores: dict[Slot, list[TokenLogprobs]] = {}
        self._drafted: dict[Slot, list[int]] = {}
        self._bound: dict[Slot, _Bound] = {}
        self._processors = LogitsProcessors()
        self._failures: dict[Slot, RequestFailedError] = {}
        self.grammars = FakeGrammars()
        self._seed, self._faults, self._cost = seed, faults, cost
        self._is_interrupted = False
        self.is_closed = False
        self.can_generate = True
        self.pooling: Pooling = "last"
        """How vectors are made by default; with "rank" it is a reranker."""
        self.embedders: list[FakeEmbedder] = []
        self.hold_texts: Callable[[], object] = bool
        """Called before texts are computed; may raise or wait."""

    def run(self, plan: StepPlan) -> StepResult:
        """Do one plan on the fake cells; see `Backend.run`."""
        self._check(plan)
        self._kv.check(plan)
        self.plans.append(plan)
        self._failures = {}
        lost = self._kv.do(plan)
        self._bind(plan)
        tokens: list[list[int]] = [[] for _ in plan.spans]
        if any(key in lost for _, key, _ in plan.loads):
            return StepResult(tokens, 0, lost=lost)
        start_s = self.now_s
        self._drafted = {c.slot: [0, 0] for c in plan.spans}
        n_done, code, first_s = self._steps(plan, tokens)
        n_kept = tuple(self._settle(c) for c in plan.spans) if code not in (0, 1, -1) else ()
        found = self._logprobs(plan.spans, tokens)
        return StepResult(
            tokens,
            n_done,
            code,
            decode_s=self.now_s - start_s,
            first_s=first_s,
            n_kept=n_kept,
            lost=lost,
            logprobs=found,
            scores=self._scores if n_done else {},
            grammar_steps=self._follow(plan.spans, tokens) if n_done else {},
            n_drafts=(sum(n for n, _ in self._drafted.values()), 0, 0),
            n_accepted=(sum(n for _, n in self._drafted.values()), 0, 0),
            drafted=[DraftCounts(n, n_own_accepted=m) for n, m in self._drafted.values()],
            failures=self._failures,
        )

    def _bind(self, plan: StepPlan) -> None:
        if plan.is_rebuild:
            self.n_rebuilt += 1
            self._bound.clear()
            self._processors.clear()
        self._tag = tag_of(plan.adapters)
        for slot, _, n in plan.shifts:
            bound = self._bound[slot]
            bound.history.shift(n)
            origin = bound.binding.output_origin - n
            bound.binding = replace(bound.binding, output_origin=origin)
        for b in plan.binds:
            self._bound[b.slot] = _Bound(b, History(b.history), matcher_of(b))
            self._processors.bind(b)

    def _steps(self, plan: StepPlan, tokens: list[list[int]]) -> tuple[int, int, float]:
        """Do a plan's steps and add to `tokens`; return how many were done, the code and when the first one ended."""
        spans, n_done, start_s, first_s = list(plan.spans), 0, self.now_s, 0.0
        while spans and n_done < plan.n_steps:
            n_room = plan.n_steps - 1 - max(map(len, tokens))
            n_each = min(plan.n_drafts, n_room, N_TARGETS_MAX // len(spans))
            n_drafts = [self._n_made(c, n_each) for c in spans]
            code = self._step(spans, n_drafts)
            if code:
                return n_done, code, first_s
            n_done += 1
            first_s = first_s or self.now_s - start_s
            sampled = [
                self._sample_ahead(c, n) if c.has_output else []
                for c, n in zip(spans, n_drafts, strict=True)
            ]
            for row, new in zip(tokens, sampled, strict=True):
                row.extend(new)
            is_interrupted, self._is_interrupted = self._is_interrupted, False
            pairs = [*zip(spans, sampled, strict=True)]
            is_over = is_interrupted or 0 < plan.slice_s < self.now_s - start_s
            is_over = is_over or n_done == plan.n_steps or max(map(len, tokens)) >= plan.n_steps
            if is_over or any(new and self._ends(c, new[-1]) for c, new in pairs):
                break
            spans = [
                Span(c.slot, c.start + len(c.inputs) + len(new) - 1, new[-1:], has_output=True)
                for c, new in pairs
                if new
            ]
        return n_done, 0, first_s

    def _n_made(self, span: Span, n_most: int) -> int:
        """Return how many draft tokens stand behind a span: any number, by its place."""
        is_asked = span.has_output and self._bound[span.slot].binding.has_drafts
        return mix(span.start, span.slot) % (n_most + 1) if is_asked and n_most > 0 else 0

    def _sample_ahead(self, span: Span, n_drafts: int) -> list[int]:
        """Sample a span with so many draft tokens behind it, the first of which are accepted: any number of them."""
        sampled = [self._sample(span)]
        n_accepted = mix(span.slot, span.start) % (n_drafts + 1)
        drafted = self._drafted[span.slot]
        drafted[0] += n_drafts
        while len(sampled) <= n_accepted and not self._ends(span, sampled[-1]):
            at = span.start + len(span.inputs) + len(sampled) - 1
            row = Span(span.slot, at, sampled[-1:], has_output=True)
            self._bound[span.slot].history.feed(row)
            self._compute(row, 1, self._tag)
            sampled.append(self._sample(row))
            drafted[1] += 1
        return sampled

    def rest(self) -> None:
        """Count that nothing runs for a while."""
        self.n_rests += 1

    def interrupt(self) -> None:
        """End the run in flight, or the next one, after one step."""
        self._is_interrupted = True

    def close(self) -> None:
        """Refuse further runs."""
        self.is_closed = True

    def make_embedder(self, pooling: Pooling) -> FakeEmbedder:
        """Return a fake embedder, which is among `embedders`."""
        if pooling == "rank" and self.pooling != "rank":
            raise UnsupportedTaskError("rerank", "this fake model has no classifier")
        self.embedders.append(FakeEmbedder(pooling, self.n_window, self.hold_texts))
        return self.embedders[-1]

    @property
    def model_facts(self) -> ModelFacts:
        """A model without weights."""
        return ModelFacts(
            self.vocab.n_vocab,
            self.n_window,
            end_ids=(END_TOKEN,),
            adapters=tuple(self.adapters),
            fim=self.fim,
            sampling=dict(self.sampling_defaults),
            can_generate=self.can_generate,
            can_see=not self.vocab.picture_refusal,
            can_hear=not self.vocab.sound_refusal,
            can_embed=self.pooling != "rank",
            can_rerank=self.can_generate or self.pooling == "rank",
            n_embedding=N_EMBEDDING,
            pooling=self.pooling,
            is_causal=self.can_generate,
            n_embed_max=self.n_window,
        )

    @property
    def n_used(self) -> int:
        """Cells in use; in unified memory a cell that several slots share counts once."""
        return self._kv.n_used

    def fingerprint(self, adapters: AdapterSet) -> Mapping[str, str]:
        """Return what cells depend on."""
        return {"seed": str(self._seed), "kind": self.memory.kind, "adapters": repr(adapters)}

    def import_state(self, key: int, data: NDArray[np.uint8], n_cells: int) -> None:
        """Keep cells that were saved elsewhere; data that is not a whole number of cells holds none."""
        self.saved[key] = data.view(np.int64).tolist() if len(data) % 8 == 0 else []
        self._kv.n_said[key] = n_cells

    def validate_state(self, data: NDArray[np.uint8], n_wanted: int) -> NDArray[np.uint8]:
        """Return the first cells as they are."""
        if len(data) < 8 * n_wanted or len(data) % 8:
            raise ValueError("are cut off")
        return data[: 8 * n_wanted]

    def export_state(self, key: int, *, is_kept: bool = False) -> NDArray[np.uint8] | None:
        """Hand out saved cells, and forget them unless they are kept."""
        cells = self.saved.get(key) if is_kept else self.saved.pop(key, None)
        return None if cells is None else np.array(cells, np.int64).view(np.uint8)

    def _follow(self, spans: Sequence[Span], tokens: list[list[int]]) -> dict[Slot, GrammarStep]:
        """Have constraints follow what was sampled; a row that breaks its constraint becomes a broken one."""
        steps: dict[Slot, GrammarStep] = {}
        for span, sampled in zip(spans, tokens, strict=True):
            bound = self._bound.get(span.slot)
            if bound is None or bound.matcher is None or not sampled or sampled[-1] < 0:
                continue
            if sampled[-1] not in bound.binding.stop_tokens:
                steps[span.slot] = step = bound.matcher.follow(sampled[-1])
                sampled[-1] = BROKEN_ROW if step.problem else sampled[-1]
        return steps

    def _settle(self, span: Span) -> int:
        """Return how many cells of a failed step's slot are known: none where they cannot be taken off."""
        if not self.memory.can_trim:
            self._kv.put(span.slot, [])
        return len(self.cells[span.slot])

    def _step(self, spans: Sequence[Span], n_drafts: Sequence[int]) -> int:
        self._scores = {}
        code = self._faults.code([*map(_with_drafts, spans, n_drafts)])
        self.n_steps += 1
        n_tokens = sum(len(c.inputs) for c in spans) + sum(n_drafts)
        self.now_s += self._cost(len(spans), n_tokens - len(spans))
        if not code and self.memory.kind == "unified":
            code = int(self.n_used + n_tokens > self.memory.n_cells)
        parts = spans if code else [part for c in spans for part in self.cuts.parts(c)]
        for span, n_together in zip(parts, self._n_together(parts), strict=True):
            if bound := self._bound.get(span.slot):
                bound.history.feed(span)
            bits = self.bits.of(n_together) << _BITS_SHIFT if self.bits else 0
            self._compute(span, _n_computed(code, len(span.inputs)), self._tag | bits)
        return code

    def _n_together(self, spans: Sequence[Span]) -> list[int]:
        """Return with how many rows each span is computed, its own included."""
        if not self.bits or not self.cuts:
            return [sum(len(c.inputs) for c in spans)] * len(spans)
        rows = [c.slot for c in spans if c.is_lone_token]
        n_rows = self.bits.width(rows[-1] - rows[0] + 1) if rows else 0
        return [n_rows if c.is_lone_token else len(c.inputs) for c in spans]

    def _compute(self, span: Span, n: int, tag: int) -> None:
        """Make cells of the first `n` tokens of a span, and score what comes after them."""
        state, tokens = self._kv.states[span.slot], span.inputs
        if self.memory.has_whole_pictures:
            tokens = _with_rows(tokens)
        cells = [t | tag for t in tokens[:n]]
        for i, cell in enumerate(cells):
            state = mix(state, cell)
            if i < len(span.targets):
                score = self._score(span, i, state)
                self._scores.setdefault(span.slot, []).append(score)
        self._kv.append(span.slot, cells, state)

    def _score(self, span: Span, i: int, state: int) -> TokenLogprobs:
        if self._faults.broken(Span(span.slot, span.start, span.inputs[: i + 1], False)):
            return TokenLogprobs(math.nan)
        bound = self._bound.get(span.slot)
        return fake_score(state, span.targets[i], bound.binding.n_target_top if bound else 0)

    def _sample(self, span: Span) -> int:
        if self._faults.broken(span):
            return BROKEN_ROW
        slot, bound = span.slot, self._bound[span.slot]
        token = self.next_token(
            self._kv.states[slot], bound.history.tokens, bound.binding, len(self.cells[slot])
        )
        if bound.binding.processor is not None:
            token = self._processed(slot, token)
        return bound.matcher.choose(token) if bound.matcher and token >= 0 else token

    def _processed(self, slot: Slot, token: int) -> int:
        """Return the likeliest token after the slot's processor changed a row in which `token` was the likeliest."""
        n = self.vocab.n_vocab
        row = (-((np.arange(n) - token) % n) / n).astype(np.float32)
        try:
            self._processors.change(slot, row)
        except RequestFailedError as error:
            self._failures[slot] = error
            return BROKEN_ROW
        return int(row.argmax()) if row.max() > -np.inf else EMPTY_ROW

    def next_token(self, state: int, history: Sequence[int], binding: Binding, n_cells: int) -> int:
        """Return the token that follows cells which lead to a state, before a constraint changes it."""
        for seen in (*history[-_N_SEEN:], len(history), binding.sampling.seed):
            state = mix(state, seen)
        return mix(state, n_cells - binding.output_origin) % self.vocab.n_vocab

    def _logprobs(
        self, spans: Sequence[Span], tokens: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[TokenLogprobs]]:
        """Return made-up log-probabilities of the spans' tokens: `fake_logprobs` of each."""
        n_top = [self._bound[c.slot].binding.n_logprobs if c.has_output else None for c in spans]
        if all(n is None for n in n_top):
            return ()
        return [
            [] if n is None else [fake_logprobs(token, n) for token in row]
            for n, row in zip(n_top, tokens, strict=True)
        ]

    def _ends(self, span: Span, token: int | None) -> bool:
        return (
            token in (BROKEN_ROW, EMPTY_ROW) or token in self._bound[span.slot].binding.stop_tokens
        )

    def _check(self, plan: StepPlan) -> None:
        spans, is_one_step = plan.spans, plan.n_steps == 1
        bindings = {} if plan.is_rebuild else {slot: b.binding for slot, b in self._bound.items()}
        bindings.update((b.slot, b) for b in plan.binds)
        constrained = [slot for slot, b in bindings.items() if b.constraint or b.processor]
        n_targets = sum(len(c.targets) for c in spans)
        broken = {
            "the backend is closed": self.is_closed,
            "nothing to compute": plan.n_steps < 1,
            f"more than {self.n_batch} tokens": sum(len(c.inputs) for c in spans) > self.n_batch
            and not (self.memory.has_whole_pictures and _is_picture(spans)),
            f"{n_targets} targets are too many": n_targets > N_TARGETS_MAX * is_one_step,
            "a target has no token before it": any(
                len(c.targets) > len(c.inputs) - c.has_output for c in spans
            ),
            "only steps with outputs can be repeated": not is_one_step
            and not all(c.has_output for c in spans),
            "steps under a constraint or with a processor cannot be repeated": not is_one_step
            and any(c.slot in constrained for c in spans),
            "this memory allows no draft tokens": plan.n_drafts and not self.memory.can_draft,
            "no such adapter": any(name not in self.adapters for name, _ in plan.adapters),
            "a slot was never bound": any(c.has_output and c.slot not in bindings for c in spans),
        }
        for rule, is_broken in broken.items():
            if is_broken:
                raise PlanError(f"{rule}: {plan}")


def _is_picture(spans: Sequence[Span]) -> bool:
    return len(spans) == 1 and edges_of(spans[0].inputs) == (0, len(spans[0].inputs))


def _with_rows(tokens: Sequence[int]) -> Sequence[int]:
    """Return what cells are made of: a row depends on all rows of its picture that are computed with it."""
    found, edges = [*tokens], edges_of(tokens)
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        n = end - begin
        found[begin:end] = [mix(mix(n, 0), t) >> _BITS_LEFT for t in tokens[begin:end]]
    return found


def _with_drafts(span: Span, n_drafts: int) -> Span:
    """Return a span with its draft tokens, whatever they are: a fault at their places is one of the step."""
    if not n_drafts:
        return span
    return Span(span.slot, span.start, [*span.inputs, *[0] * n_drafts], span.has_output)


def _n_computed(code: int, n_tokens: int) -> int:
    """Return how many tokens of a span get cells in a step that returns `code`."""
    if code in (1, -1):
        return 0
    return (n_tokens + 1) // 2 if code else n_tokens
