"""A backend without a model, for tests of scheduling and for simulation at scale.

It keeps a fake cell for every token. Its next token is a function of the tokens found in a sequence's cells, of the
sequence's seed and of the output position, never of the slot: a leaked cell, a wrong position or a recycled slot
that is not clean gives a wrong token, so equality of streams proves the scheduler right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbatch.core.plan import BROKEN_ROW, Binding, Chunk, Slot, StepPlan, StepResult
from cbatch.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

END_TOKEN = 256
_MASK = 2**64 - 1


class FakeVocab:
    """Bytes are tokens 0 … 255, `END_TOKEN` ends a generation; higher ids are letters of a made-up alphabet."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self.end_tokens: tuple[int, ...] = (END_TOKEN,)

    def piece(self, token: int) -> bytes:
        """Return a byte for itself, nothing for the end, else two bytes of UTF-8."""
        if token < END_TOKEN:
            return bytes([token])
        return b"" if token == END_TOKEN else chr(0x100 + token % 0x400).encode()

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode("utf-8", "replace"))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return `role:content` lines, the last left open."""
        lines = [f"{m['role']}:{m['content']}" for m in messages]
        return self.tokenize("\n".join(lines))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Virtual seconds of a step: `base_s`, plus `token_s` for every token in it."""

    base_s: float = 0.0
    token_s: float = 0.0


class FakeBackend:
    """Implements `Backend` over lists; every return code of `llama_decode` is to be had on demand.

    Args:
        n_slots: sequences at once.
        n_window: cells of a slot.
        n_batch: most tokens in a step.
        n_vocab: token ids; about one token in `n_vocab` ends a generation. At least 257.
        seed: changes every token of every sequence.
        code: called with the plan's chunks before each step; what it returns is the step's return code.
        broken: called with a chunk's tokens; True makes its row broken (NaN logits).
        cost: what a step takes of the virtual clock `now_s`.

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
        code: Callable[[Sequence[Chunk]], int] | None = None,
        broken: Callable[[Chunk], bool] | None = None,
        cost: StepCost = StepCost(),
    ) -> None:
        if n_vocab <= END_TOKEN:
            raise ConfigError(f"n_vocab must be above {END_TOKEN}, not {n_vocab}")
        self.n_slots, self.n_window, self.n_batch = n_slots, n_window, n_batch
        self.n_piece = 0
        self.vocab = FakeVocab(n_vocab)
        self.cells: list[list[int]] = [[] for _ in range(n_slots)]
        self.now_s = 0.0
        self.n_steps = 0
        self.plans: list[StepPlan] = []
        self._bindings: dict[Slot, Binding] = {}
        self._seed, self._code, self._broken, self._cost = seed, code, broken, cost
        self._is_interrupted = False
        self._is_closed = False

    def run(self, plan: StepPlan) -> StepResult:
        """Do one plan on the fake cells; see `Backend.run`."""
        self._check(plan)
        self._check_positions(plan)
        self.plans.append(plan)
        for slot in plan.clears:
            self.cells[slot].clear()
        self._bindings.update((b.slot, b) for b in plan.binds)
        tokens: list[list[int]] = [[] for _ in plan.chunks]
        chunks, n_done, code = list(plan.chunks), 0, 0
        while chunks and n_done < plan.n_steps:
            code = self._step(chunks)
            if code:
                break
            n_done += 1
            sampled = [self._sample(c) if c.has_output else None for c in chunks]
            for row, token in zip(tokens, sampled, strict=True):
                row.extend(() if token is None else (token,))
            if self._take_interrupt() or any(map(self._ends, chunks, sampled)):
                break
            chunks = [
                _next_chunk(c, t) for c, t in zip(chunks, sampled, strict=True) if t is not None
            ]
        return StepResult(tokens, n_done, code, decode_s=0.0, sample_s=0.0)

    def interrupt(self) -> None:
        """End the run in flight, or the next one, after one step."""
        self._is_interrupted = True

    def close(self) -> None:
        """Refuse further runs."""
        self._is_closed = True

    def expected(self, prompt: Sequence[int], binding: Binding, n_output: int) -> list[int]:
        """Return the first `n_output` tokens of a sequence run alone, its end included: the reference for tests."""
        cells, output = list(prompt), list[int]()
        while len(output) < n_output:
            output.append(self._token(cells, binding))
            if output[-1] in binding.stop_tokens:
                break
            cells.append(output[-1])
        return output

    def _step(self, chunks: Sequence[Chunk]) -> int:
        code = self._code(chunks) if self._code else 0
        self.n_steps += 1
        n_tokens = sum(len(c.tokens) for c in chunks)
        self.now_s += self._cost.base_s + self._cost.token_s * n_tokens
        for chunk in chunks:
            n = (
                len(chunk.tokens)
                if not code
                else 0
                if code in (1, -1)
                else (len(chunk.tokens) + 1) // 2
            )
            self.cells[chunk.slot].extend(chunk.tokens[:n])
        return code

    def _sample(self, chunk: Chunk) -> int:
        if self._broken is not None and self._broken(chunk):
            return BROKEN_ROW
        return self._token(self.cells[chunk.slot], self._bindings[chunk.slot])

    def _token(self, cells: Sequence[int], binding: Binding) -> int:
        state = self._seed * 2 + 1
        for key in (*cells, binding.sampling.seed, len(cells) - binding.n_prompt):
            state = ((state ^ key) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
            state ^= state >> 29
        return state % self.vocab.n_vocab

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

    def _check_positions(self, plan: StepPlan) -> None:
        bound = self._bindings.keys() | {b.slot for b in plan.binds}
        for c in plan.chunks:
            n_cells = 0 if c.slot in plan.clears else len(self.cells[c.slot])
            if c.start != n_cells:
                raise PlanError(f"slot {c.slot} holds {n_cells} cells: {plan}")
            if c.start + len(c.tokens) + plan.n_steps - 1 > self.n_window:
                raise PlanError(f"past the window of {self.n_window}: {plan}")
            if c.has_output and c.slot not in bound:
                raise PlanError(f"slot {c.slot} was never bound: {plan}")


def _next_chunk(chunk: Chunk, token: int) -> Chunk:
    return Chunk(chunk.slot, chunk.start + len(chunk.tokens), (token,), has_output=True)
