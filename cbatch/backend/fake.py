"""A backend without a model, for tests of scheduling and for simulation at scale.

It keeps a fake cell for every token. Its next token is a function of the tokens found in a sequence's cells, of its
history, of its seed and of the output position, never of the slot: a leaked cell, a wrong position, a history that is
not its own or a recycled slot that is not clean gives a wrong token, so equality of streams proves the scheduler right.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.history import History
from cbatch.core.plan import (
    BROKEN_ROW,
    N_TARGETS_MAX,
    Binding,
    Chunk,
    Guidance,
    Memory,
    Slot,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from cbatch.errors import ConfigError, GrammarError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from cbatch.options import AdapterSet, Grammar

END_TOKEN = 256
_N_SEEN = 4
"""Newest tokens of a history that the next token depends on, besides how many there are."""

_MASK = 2**64 - 1


class FakeVocab:
    """Bytes are tokens 0 … 255, `END_TOKEN` ends a generation; higher ids are letters of a made-up alphabet."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self.end_tokens: tuple[int, ...] = (END_TOKEN,)
        self.suppressed_tokens: tuple[int, ...] = ()
        self.template = ""
        self.tool_refusal = ""
        self.controls: dict[int, bytes] = {END_TOKEN: b"<end>"}
        """Control tokens with their text."""

    @property
    def control_tokens(self) -> frozenset[int]:
        """The end, and what else a test made one."""
        return frozenset(self.controls)

    def piece(self, token: int) -> bytes:
        """Return a byte for itself, nothing for a control token, else two bytes of UTF-8."""
        if token in self.controls:
            return b""
        return bytes([token]) if token < END_TOKEN else chr(0x100 + token % 0x400).encode()

    def shown_piece(self, token: int) -> bytes:
        """Return as `piece`, but control tokens written out."""
        return self.controls.get(token) or self.piece(token)

    def named_token(self, mark: str) -> int | None:
        """Return the control token with this text."""
        return next((t for t, text in self.controls.items() if text == mark.encode()), None)

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode("utf-8", "replace"))

    def breakers(self, strings: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the bytes of each string."""
        return tuple(tuple(self.tokenize(text)) for text in strings)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the variables, if there are any, and `role:content` lines, the last left open."""
        lines = [json.dumps(variables)] if variables else []
        lines += [f"{m['role']}:{m['content']}" for m in messages]
        return self.tokenize("\n".join(lines))


@dataclass(frozen=True, slots=True)
class FakeConstraint:
    """Every token has a parity; some force a run behind them; one kind is the last, one cannot be followed.

    Args:
        parity: of every token, 0 or 1.
        last: a token of this rest modulo 16, forced runs behind it included, is followed by nothing.
        bad: a token of this rest modulo 16 cannot be sampled: there the constraint fails.
    """

    parity: int
    last: int = -1
    bad: int = -1


class FakeGrammars:
    """Makes a constraint of a regex such as "1", "1:5" or "1:5:7": parity, last, bad; of nothing else."""

    def compile(self, grammar: Grammar) -> FakeConstraint:
        """Compile a grammar; see `Grammars.compile`."""
        try:
            return FakeConstraint(*map(int, grammar.text.split(":")))
        except (TypeError, ValueError) as error:
            raise GrammarError(grammar.kind, f"not parity:last:bad: {error}") from error


class FakeMatcher:
    """Follows a constraint; what it forces depends on all of the output so far, so a wrong one is found out."""

    def __init__(
        self, constraint: FakeConstraint, output: Sequence[int] = (), *, forces: bool = True
    ) -> None:
        self._constraint, self._forces = constraint, forces
        self._state = 1
        self._forced: list[int] = []
        for token in output:
            self._take(token)

    def choose(self, token: int) -> int:
        """Return what is sampled where `token` would be without a constraint."""
        if self._forced:
            return self._forced[0]
        return token if token % 2 == self._constraint.parity else token - 1 if token else 1

    def follow(self, token: int) -> Guidance:
        """Take a sampled token and what it forces; return what there is to say."""
        if not self._forced and token % 16 == self._constraint.bad:
            return Guidance(problem="a bad token")
        self._take(token)
        forced = tuple(self._forced) if self._forces else ()
        for behind in forced:
            self._take(behind)
        is_last = (token, *forced)[-1] % 16 == self._constraint.last
        return Guidance(forced, is_complete=is_last and not self._forced)

    def _take(self, token: int) -> None:
        if token % 2 != self._constraint.parity:
            raise PlanError(f"token {token} breaks {self._constraint}")
        self._state = _mix(self._state, token)
        if not self._forced:
            n_forced = self._state % 16 - 10
            self._forced = [
                _mix(self._state, i) % 128 * 2 + self._constraint.parity for i in range(n_forced)
            ]
        elif self._forced.pop(0) != token:
            raise PlanError(f"token {token} is not the one that is forced")


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
        code: called with the plan's chunks before each step; what it returns is the step's return code.
        broken: called with a chunk's tokens; True makes its row broken (NaN logits).
        swap: called with a key before cells are saved or loaded; False makes that fail.
    """

    code: Callable[[Sequence[Chunk]], int] = lambda _: 0
    broken: Callable[[Chunk], bool] = lambda _: False
    swap: Callable[[int], bool] = lambda _: True


_NO_FAULTS = Faults()
_NO_COST = StepCost()


class FakeBackend:
    """Implements `Backend` over lists; every return code of `llama_decode` is to be had on demand.

    Args:
        n_slots: sequences at once.
        n_window: cells of a slot.
        n_batch: most tokens in a step.
        n_vocab: token ids; about one token in `n_vocab` ends a generation. At least 257.
        seed: changes every token of every sequence.
        faults: what goes wrong.
        cost: what a step takes of the virtual clock `now_s`: called with its sequences, and its tokens beyond one each.
        memory: partitioned unless said; in unified memory a step that finds no room returns code 1.

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
        memory: Memory | None = None,
    ) -> None:
        if n_vocab <= END_TOKEN:
            raise ConfigError(f"n_vocab must be above {END_TOKEN}, not {n_vocab}")
        self.n_slots, self.n_window, self.n_batch = n_slots, n_window, n_batch
        self.n_piece = 0
        self.memory = memory or Memory("partitioned", n_slots * n_window)
        self.vocab = FakeVocab(n_vocab)
        self.cells: list[list[int]] = [[] for _ in range(n_slots)]
        self.saved: dict[int, list[int]] = {}
        self._n_said: dict[int, int] = {}  # of those that were kept
        self.adapters: tuple[str, ...] = ()
        self.now_s = 0.0
        self.n_steps = 0
        self.n_rebuilt = -1
        self.plans: list[StepPlan] = []
        self._tag = 0
        self._states = [0] * n_slots
        self._shared: list[list[int]] = [[] for _ in range(n_slots)]  # which cell each one is
        self._n_made = 0
        self._scores: dict[Slot, list[TokenLogprobs]] = {}
        self._bindings: dict[Slot, Binding] = {}
        self._histories: dict[Slot, History] = {}
        self._matchers: dict[Slot, FakeMatcher] = {}
        self.grammars = FakeGrammars()
        self._seed, self._faults, self._cost = seed, faults, cost
        self._is_interrupted = False
        self._is_closed = False
        self._renew()

    def run(self, plan: StepPlan) -> StepResult:
        """Do one plan on the fake cells; see `Backend.run`."""
        self._check(plan)
        self._check_positions(plan)
        self.plans.append(plan)
        lost = self._do_orders(plan)
        self._tag = _tag(plan.adapters)
        self._bind(plan.binds)
        self._histories.update((b.slot, History(b.history)) for b in plan.binds)
        tokens: list[list[int]] = [[] for _ in plan.chunks]
        if any(key in lost for _, key, _ in plan.loads):
            return StepResult(tokens, 0, lost=lost)
        start_s, first_s = self.now_s, 0.0
        chunks, n_done, code = list(plan.chunks), 0, 0
        while chunks and n_done < plan.n_steps:
            code = self._step(chunks)
            if code:
                break
            n_done += 1
            first_s = first_s or self.now_s - start_s
            sampled = [self._sample(c) if c.has_output else None for c in chunks]
            for row, token in zip(tokens, sampled, strict=True):
                row.extend(() if token is None else (token,))
            is_interrupted = self._take_interrupt()
            if is_interrupted or n_done == plan.n_steps or any(map(self._ends, chunks, sampled)):
                break
            chunks = [
                _next_chunk(c, t) for c, t in zip(chunks, sampled, strict=True) if t is not None
            ]
        n_kept = tuple(self._settle(c) for c in plan.chunks) if code not in (0, 1, -1) else ()
        seconds = self.now_s - start_s
        found = self._logprobs(plan.chunks, tokens)
        guided = self._guide(plan.chunks, tokens) if n_done else {}
        return StepResult(
            tokens,
            n_done,
            code,
            seconds,
            0.0,
            first_s,
            n_kept,
            lost,
            logprobs=found,
            scores=self._scores if n_done else {},
            guided=guided,
        )

    def interrupt(self) -> None:
        """End the run in flight, or the next one, after one step."""
        self._is_interrupted = True

    def close(self) -> None:
        """Refuse further runs."""
        self._is_closed = True

    @property
    def n_used(self) -> int:
        """Cells in use; in unified memory those that several slots have are one."""
        if self.memory.kind != "unified":
            return sum(map(len, self.cells))
        return len(set().union(*self._shared))

    def expected(
        self, prompt: Sequence[int], binding: Binding, n_output: int, adapters: AdapterSet = ()
    ) -> list[int]:
        """Return the first `n_output` tokens of a sequence run alone, its end included: the reference for tests.

        `binding.history` is what it was before its first output.
        """
        tag = _tag(adapters)
        state, output = self._after([token | tag for token in prompt]), list[int]()
        while len(output) < n_output:
            matcher = _matcher(binding, output)
            history = (*binding.history, *output)
            output.append(self._token(state, history, binding, len(prompt) + len(output), matcher))
            if output[-1] in binding.stop_tokens:
                break
            guidance = matcher.follow(output[-1]) if matcher else Guidance()
            if guidance.problem:
                del output[-1]
            if guidance.problem or (guidance.is_complete and not guidance.forced):
                break
            state = _mix(state, output[-1] | tag)
        return output

    def expected_scores(
        self, tokens: Sequence[int], n_top: int, adapters: AdapterSet = ()
    ) -> list[TokenLogprobs]:
        """Return the scores of all tokens but the first, run alone: the reference for tests."""
        state, tag = self._after(()), _tag(adapters)
        scores = list[TokenLogprobs]()
        for token, target in pairwise(tokens):
            state = _mix(state, token | tag)
            scores.append(fake_score(state, target, n_top))
        return scores

    def fingerprint(self, adapters: AdapterSet) -> Mapping[str, str]:
        """Return what cells depend on."""
        return {"seed": str(self._seed), "kind": self.memory.kind, "adapters": repr(adapters)}

    def keep(self, key: int, data: NDArray[np.uint8], n_cells: int) -> None:
        """Take cells that were saved elsewhere; what is not a whole list of them is empty."""
        self.saved[key] = data.view(np.int64).tolist() if len(data) % 8 == 0 else []
        self._n_said[key] = n_cells

    def fit(self, data: NDArray[np.uint8], n_cells: int) -> NDArray[np.uint8]:
        """Return the cells as they are."""
        return data

    def take(self, key: int) -> NDArray[np.uint8] | None:
        """Hand out saved cells and forget them."""
        cells = self.saved.pop(key, None)
        return None if cells is None else np.array(cells, np.int64).view(np.uint8)

    def _bind(self, bindings: Sequence[Binding]) -> None:
        for binding in bindings:
            self._bindings[binding.slot] = binding
            self._matchers.pop(binding.slot, None)
            if matcher := _matcher(binding):
                self._matchers[binding.slot] = matcher

    def _guide(self, chunks: Sequence[Chunk], tokens: list[list[int]]) -> dict[Slot, Guidance]:
        """Have constraints follow what was sampled; a row that breaks one is broken."""
        guided: dict[Slot, Guidance] = {}
        for chunk, sampled in zip(chunks, tokens, strict=True):
            matcher = self._matchers.get(chunk.slot)
            if matcher is None or not sampled or sampled[-1] < 0:
                continue
            if sampled[-1] not in self._bindings[chunk.slot].stop_tokens:
                guided[chunk.slot] = guidance = matcher.follow(sampled[-1])
                sampled[-1] = BROKEN_ROW if guidance.problem else sampled[-1]
        return guided

    def _do_orders(self, plan: StepPlan) -> tuple[int, ...]:
        """Do what comes before computing; return the keys of cells that were lost."""
        for key in plan.forgets:
            self.saved.pop(key, None)
        wanted = [(slot, key) for slot, key in plan.saves if key not in plan.forgets]
        lost = [key for slot, key in wanted if not self._save(slot, key)]
        if plan.is_rebuild:
            self._renew()
        for slot in plan.clears:
            self._set_cells(slot, [])
        for slot, n_cells in plan.trims:
            self._set_cells(slot, self.cells[slot][:n_cells])
        unloaded = [key for slot, key, n in plan.loads if not self._load(slot, key, n)]
        for source, slot, n_cells in () if unloaded else plan.copies:
            self._set_cells(slot, self.cells[source][:n_cells], self._shared[source][:n_cells])
        for slot, n_kept, n in plan.shifts:
            cells = self.cells[slot]
            if len(cells) >= n_kept + n:  # else they were lost
                self._set_cells(slot, cells[:n_kept] + cells[n_kept + n :])
        return (*lost, *unloaded)

    def _save(self, slot: Slot, key: int) -> bool:
        if not self._faults.swap(key):
            return False
        self.saved[key] = list(self.cells[slot])
        return True

    def _load(self, slot: Slot, key: int, n_cells: int) -> bool:
        cells = self.saved.pop(key, None)
        if cells is None or len(cells) < n_cells or not self._faults.swap(key):
            return False
        self._set_cells(slot, cells[:n_cells])
        return True

    def _renew(self) -> None:
        self.n_rebuilt += 1
        self._bindings.clear()
        self._histories.clear()
        self._matchers.clear()
        for slot in range(self.n_slots):
            self._set_cells(slot, [])

    def _set_cells(self, slot: int, cells: list[int], shared: list[int] | None = None) -> None:
        n_kept = len(cells) if cells == self.cells[slot][: len(cells)] else 0
        self.cells[slot] = cells
        self._states[slot] = self._after(cells)
        if self.memory.kind == "unified":
            self._shared[slot] = shared or self._shared[slot][:n_kept]
            self._number(slot)

    def _number(self, slot: int) -> None:
        """Give each new cell of a slot a number of its own: a copy has those of its source."""
        n_new = len(self.cells[slot]) - len(self._shared[slot])
        self._shared[slot] += range(self._n_made, self._n_made + n_new)
        self._n_made += n_new

    def _settle(self, chunk: Chunk) -> int:
        """Return how many cells of a failed step's slot are known: none where they cannot be taken off."""
        if not self.memory.can_trim:
            self._set_cells(chunk.slot, [])
        return len(self.cells[chunk.slot])

    def _step(self, chunks: Sequence[Chunk]) -> int:
        self._scores = {}
        code = self._faults.code(chunks)
        self.n_steps += 1
        n_tokens = sum(len(c.tokens) for c in chunks)
        self.now_s += self._cost(len(chunks), n_tokens - len(chunks))
        if not code and self.memory.kind == "unified":
            code = int(self.n_used + n_tokens > self.memory.n_cells)
        for chunk in chunks:
            if chunk.slot in self._histories:
                self._histories[chunk.slot].feed(chunk)
            n = (
                len(chunk.tokens)
                if not code
                else 0
                if code in (1, -1)
                else (len(chunk.tokens) + 1) // 2
            )
            cells = [token | self._tag for token in chunk.tokens[:n]]
            for i, cell in enumerate(cells):
                self._states[chunk.slot] = state = _mix(self._states[chunk.slot], cell)
                if i < len(chunk.targets):
                    score = self._score(chunk, i, state)
                    self._scores.setdefault(chunk.slot, []).append(score)
            self.cells[chunk.slot].extend(cells)
            if self.memory.kind == "unified":
                self._number(chunk.slot)
        return code

    def _score(self, chunk: Chunk, i: int, state: int) -> TokenLogprobs:
        if self._faults.broken(Chunk(chunk.slot, chunk.start, chunk.tokens[: i + 1], False)):
            return TokenLogprobs(math.nan)
        binding = self._bindings.get(chunk.slot)
        return fake_score(state, chunk.targets[i], binding.n_target_top if binding else 0)

    def _sample(self, chunk: Chunk) -> int:
        if self._faults.broken(chunk):
            return BROKEN_ROW
        slot = chunk.slot
        history, matcher = self._histories[slot].tokens, self._matchers.get(slot)
        return self._token(
            self._states[slot], history, self._bindings[slot], len(self.cells[slot]), matcher
        )

    def _token(
        self,
        state: int,
        history: Sequence[int],
        binding: Binding,
        n_cells: int,
        matcher: FakeMatcher | None = None,
    ) -> int:
        for seen in (*history[-_N_SEEN:], len(history), binding.sampling.seed):
            state = _mix(state, seen)
        token = _mix(state, n_cells - binding.n_prompt) % self.vocab.n_vocab
        return matcher.choose(token) if matcher else token

    def _logprobs(
        self, chunks: Sequence[Chunk], tokens: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[TokenLogprobs]]:
        """Return made-up log-probabilities of the chunks' tokens: `fake_logprobs` of each."""
        n_top = [self._bindings[c.slot].n_logprobs if c.has_output else None for c in chunks]
        if all(n is None for n in n_top):
            return ()
        return [
            [] if n is None else [fake_logprobs(token, n) for token in row]
            for n, row in zip(n_top, tokens, strict=True)
        ]

    def _after(self, cells: Sequence[int]) -> int:
        """Return the state that cells leave a sequence in: it depends on each of them and on their order."""
        state = self._seed * 2 + 1
        for token in cells:
            state = _mix(state, token)
        return state

    def _ends(self, chunk: Chunk, token: int | None) -> bool:
        return token == BROKEN_ROW or token in self._bindings[chunk.slot].stop_tokens

    def _take_interrupt(self) -> bool:
        was, self._is_interrupted = self._is_interrupted, False
        return was

    def _check(self, plan: StepPlan) -> None:
        slots = [c.slot for c in plan.chunks]
        if self._is_closed:
            raise PlanError("the backend is closed")
        if slots != sorted(set(slots)) or any(not 0 <= s < self.n_slots for s in slots):
            raise PlanError(f"slots must ascend within {self.n_slots}: {plan}")
        if not all(c.tokens for c in plan.chunks) or plan.n_steps < 1:
            raise PlanError(f"nothing to compute: {plan}")
        if sum(len(c.tokens) for c in plan.chunks) > self.n_batch:
            raise PlanError(f"more than {self.n_batch} tokens: {plan}")
        if plan.n_steps > 1 and not all(c.has_output for c in plan.chunks):
            raise PlanError(f"only steps with outputs can be repeated: {plan}")
        self._check_targets(plan)
        if plan.n_steps > 1 and self._is_constrained(plan):
            raise PlanError(f"steps under a constraint cannot be repeated: {plan}")
        if any(name not in self.adapters for name, _ in plan.adapters):
            raise PlanError(f"no such adapter: {plan}")
        self._check_slots(plan)

    def _check_targets(self, plan: StepPlan) -> None:
        n_targets = sum(len(c.targets) for c in plan.chunks)
        if n_targets > (N_TARGETS_MAX if plan.n_steps == 1 else 0):
            raise PlanError(f"{n_targets} targets are too many: {plan}")
        if any(len(c.targets) > len(c.tokens) - c.has_output for c in plan.chunks):
            raise PlanError(f"a target without a token before it: {plan}")

    def _is_constrained(self, plan: StepPlan) -> bool:
        bindings = {**self._bindings, **{b.slot: b for b in plan.binds}}
        return any(bindings[c.slot].constraint for c in plan.chunks if c.slot in bindings)

    def _check_slots(self, plan: StepPlan) -> None:
        named: list[int] = [*plan.clears, *(b.slot for b in plan.binds)]
        named += [slot for slot, *_ in (*plan.trims, *plan.saves, *plan.loads, *plan.shifts)]
        named += [slot for source, target, _ in plan.copies for slot in (source, target)]
        if any(not 0 <= slot < self.n_slots for slot in named):
            raise PlanError(f"slots are 0 … {self.n_slots - 1}: {plan}")

    def _saved_after(self, plan: StepPlan) -> dict[int, int]:
        """Return how many cells are said to be under each key when loading begins, or refuse to save."""
        saved = {key: self._n_said.get(key, len(cells)) for key, cells in self.saved.items()}
        for slot, key in plan.saves:
            if not self.memory.can_save or key in saved or not self.cells[slot]:
                raise PlanError(f"slot {slot} cannot be saved under {key}: {plan}")
            saved[key] = len(self.cells[slot])
        for key in plan.forgets:
            saved.pop(key, None)
        return saved

    def _cells_after(self, plan: StepPlan) -> list[int]:
        """Return what each slot holds when computing begins, or refuse an order that cannot be done."""
        saved = self._saved_after(plan)
        n_cells = [0 if plan.is_rebuild else len(cells) for cells in self.cells]
        for slot in plan.clears:
            n_cells[slot] = 0
        for slot, n in plan.trims:
            if not self.memory.can_trim or not 0 <= n <= n_cells[slot]:
                raise PlanError(f"slot {slot} cannot be cut to {n} cells: {plan}")
            n_cells[slot] = n
        for source, slot, n in plan.copies:
            if not self.memory.can_copy or n_cells[slot] or not 0 < n <= n_cells[source]:
                raise PlanError(f"cannot copy {n} cells of slot {source} to {slot}: {plan}")
            n_cells[slot] = n
        for slot, key, n in plan.loads:
            if n_cells[slot] or not 0 < n <= min(saved.pop(key, 0), self.n_window):
                raise PlanError(f"cannot load {n} cells of {key} into slot {slot}: {plan}")
            n_cells[slot] = n
        for slot, n_kept, n in plan.shifts:
            self._check_shift(plan, slot, n_kept, n, n_cells[slot])
            n_cells[slot] -= n
        return n_cells

    def _check_shift(self, plan: StepPlan, slot: Slot, n_kept: int, n: int, n_cells: int) -> None:
        """Refuse to take out what is not there, or what others have too: in a pool they would move with it."""
        if not self.memory.can_shift or n < 1 or not 0 <= n_kept <= n_cells - n:
            raise PlanError(f"cannot take {n} cells out of slot {slot}: {plan}")
        others = [set(s) for i, s in enumerate(self._shared) if i != slot]
        is_copied = self.memory.kind == "unified" and any(slot in c[:2] for c in plan.copies)
        if is_copied or set(self._shared[slot][n_kept:]) & set().union(*others):
            raise PlanError(f"cells of slot {slot} belong to others too: {plan}")

    def _check_positions(self, plan: StepPlan) -> None:
        bound = {b.slot for b in plan.binds}
        if not plan.is_rebuild:
            bound |= self._bindings.keys()
        held = self._cells_after(plan)
        for c in plan.chunks:
            if c.start != held[c.slot]:
                raise PlanError(f"slot {c.slot} holds {held[c.slot]} cells: {plan}")
            if c.start + len(c.tokens) + plan.n_steps - 1 > self.n_window:
                raise PlanError(f"past the window of {self.n_window}: {plan}")
            if c.has_output and c.slot not in bound:
                raise PlanError(f"slot {c.slot} was never bound: {plan}")


def _matcher(binding: Binding, output: Sequence[int] | None = None) -> FakeMatcher | None:
    constraint = binding.constraint
    if not isinstance(constraint, FakeConstraint):
        return None
    forces = binding.n_logprobs is None
    return FakeMatcher(constraint, [*binding.output, *(output or ())], forces=forces)


def _mix(state: int, key: int) -> int:
    state = ((state ^ key) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    return state ^ state >> 29


def fake_logprobs(token: int, n_top: int) -> TokenLogprobs:
    """Return what the fake backend reports of a token, a function of it alone: it is the likeliest, id 0 comes next."""
    if token < 0:
        return TokenLogprobs(math.nan)
    others = [i for i in range(n_top) if i != token][: n_top - 1]
    top = [(t, -(1 + token % 7 + 3 * i) / 8) for i, t in enumerate((token, *others))]
    return TokenLogprobs(top[0][1], tuple(top[:n_top]))


def fake_score(state: int, token: int, n_top: int) -> TokenLogprobs:
    """Return what the fake backend reports of a given token: it depends on all cells before it."""
    found = fake_logprobs(token, n_top)
    depth = _mix(state, token) % 64
    return TokenLogprobs(found.logprob - depth, tuple((t, p - depth) for t, p in found.top))


def _tag(adapters: AdapterSet) -> int:
    """Return bits above those of a token that tell apart cells computed with other adapters."""
    return zlib.crc32(repr(adapters).encode()) << 24 if adapters else 0


def _next_chunk(chunk: Chunk, token: int) -> Chunk:
    return Chunk(chunk.slot, chunk.start + len(chunk.tokens), (token,), has_output=True)
