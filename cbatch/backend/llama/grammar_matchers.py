"""The matchers of slots: masks of the tokens that grammars allow next, and the tokens that grammars force."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.core.plan import BROKEN_ROW, FREE, Binding, GrammarStep, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cbatch.core.span import Span

_N_TEAM_MIN = 4
"""Threads from which on masks are computed by several. With two it took as long or longer, as the decoder's other
thread spins on for a while. Measured with 16 rows of 152,000 tokens, and of 1,500."""


_N_FORCED_BYTES = 4096
"""Longest text that is forced at once, about a millisecond's work: a longer one is sampled until this much is left of
it, for llguidance's time to make it tokens grows with its square (90,000 bytes: 0.6 s)."""

_N_PIECE = 256
"""Bytes of a token, at most in all but odd vocabularies: then a long text is forced somewhat later."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled grammar; opaque to the rest of the package."""

    matcher: Any
    """At the grammar's beginning; never advanced, only copied."""
    n_words: int
    """Words of a mask, of 32 tokens each."""
    n_row_words: int
    """Those for a row of logits: one less where the last word is for an end token alone that no row has."""
    end_tokens: tuple[int, ...]


@dataclass(eq=False, slots=True)
class _SlotMatcher:
    matcher: Any
    banned: NDArray[np.uint32] | None
    """Bits of end tokens that must not be sampled."""
    forces: bool = True
    """Whether tokens that must follow join the output without being sampled: they have no log-probabilities then."""
    n_unforced: int = 0
    """Tokens to sample before it is asked again what must follow: more than was forced at once."""
    problem: str = ""

    def forced(self) -> list[int]:
        """Return the tokens that must follow, if they are not too many to be asked for."""
        if not self.forces:
            return []
        if self.n_unforced:
            self.n_unforced -= 1
            return []
        n_more = len(self.matcher.compute_ff_bytes()) - _N_FORCED_BYTES
        if n_more > 0:
            self.n_unforced = n_more // _N_PIECE
            return []
        found: list[int] = self.matcher.compute_ff_tokens()
        return found


class GrammarMatchers:
    """The matchers of all slots. Owner thread."""

    def __init__(self, n_slots: int, n_threads: int) -> None:
        self._n_slots, self._n_threads = n_slots, n_threads
        self._rows: dict[Slot, _SlotMatcher] = {}
        self._masks = np.zeros((n_slots, 0), np.uint32)
        self._n_row_words = 0
        self._executor: Any = None
        self._filler = ThreadPoolExecutor(1, "cbatch-masks")

    def bind(self, binding: Binding) -> None:
        """Have a slot follow its constraint after the output so far; without a constraint every token is allowed."""
        self._rows.pop(binding.slot, None)
        constraint = binding.constraint
        if not isinstance(constraint, Constraint):
            return
        if self._masks.shape[1] != constraint.n_words:
            self._masks = np.zeros((self._n_slots, constraint.n_words), np.uint32)
            self._n_row_words = constraint.n_row_words
        forces = binding.n_logprobs is None
        row = _SlotMatcher(
            constraint.matcher.deep_copy(), _banned(constraint, binding), forces=forces
        )
        if binding.output and not row.matcher.consume_tokens(list(binding.output)):
            row.problem = problem_of(row.matcher)
        self._rows[binding.slot] = row

    def masks(self, chunks: Sequence[Span]) -> list[NDArray[np.uint32] | None] | None:
        """Return the memory of the masks, one an output, for `fill` to write; None where no output has a constraint."""
        if not self._constrained(chunks):
            return None
        slots = [c.slot for c in chunks if c.has_output]
        n = self._n_row_words
        return [self._masks[slot, :n] if slot in self._rows else None for slot in slots]

    def fill(self, chunks: Sequence[Span]) -> None:
        """Write the masks of chunks. Raises nothing: a matcher's error is kept for `follow`."""
        rows = [(slot, row) for slot, row in self._constrained(chunks) if not row.problem]
        self._compute(rows)
        for slot, row in rows:
            if row.matcher.is_error():
                row.problem = problem_of(row.matcher)
            elif row.banned is not None:
                self._masks[slot] &= ~row.banned

    def fill_meanwhile(self, chunks: Sequence[Span]) -> Callable[[], object]:
        """Do as `fill` in another thread; return a function that waits for its end. One at a time."""
        return self._filler.submit(self.fill, chunks).result

    def follow(
        self, chunks: Sequence[Span], tokens: list[list[int]]
    ) -> tuple[list[list[int]], dict[Slot, GrammarStep]]:
        """Advance the matchers by sampled tokens.

        Returns:
            The tokens, `BROKEN_ROW` for those that break their constraint, and what constraints say of them.
        """
        constrained = self._constrained(chunks)
        if not constrained:
            return tokens, {}
        sampled = {c.slot: row for c, row in zip(chunks, tokens, strict=True)}
        steps: dict[Slot, GrammarStep] = {}
        for slot, row in constrained:
            step = _after(row, sampled[slot][-1])
            if step.problem:
                sampled[slot] = [BROKEN_ROW]
            if step != FREE:
                steps[slot] = step
        return list(sampled.values()), steps

    def close(self) -> None:
        """Drop all matchers."""
        self._rows.clear()
        self._executor = None
        self._filler.shutdown()

    def _constrained(self, chunks: Sequence[Span]) -> list[tuple[Slot, _SlotMatcher]]:
        if not self._rows:
            return []
        slots = (c.slot for c in chunks if c.has_output)
        return [(slot, self._rows[slot]) for slot in slots if slot in self._rows]

    def _compute(self, rows: Sequence[tuple[Slot, _SlotMatcher]]) -> None:
        masks = self._masks
        n_bytes = masks.strides[0]
        if len(rows) > 1 and self._n_threads >= _N_TEAM_MIN:
            jobs = [(row.matcher, int(slot)) for slot, row in rows]
            self._team().unsafe_compute_mask_ptr(jobs, masks.ctypes.data, n_bytes, len(masks))
            return
        for slot, row in rows:
            row.matcher.unsafe_compute_mask_ptr(masks.ctypes.data + slot * n_bytes, n_bytes)

    def _team(self) -> Any:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._n_threads)
        return self._executor


def _banned(constraint: Constraint, binding: Binding) -> NDArray[np.uint32] | None:
    """Return the bits of the end tokens that a sequence ignores: only its grammar ends it."""
    ignored = [t for t in constraint.end_tokens if t not in binding.stop_tokens]
    if not ignored:
        return None
    bits = np.zeros(constraint.n_words, np.uint32)
    for token in ignored:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits


def _after(row: _SlotMatcher, token: int) -> GrammarStep:
    """Advance by a sampled token; return the tokens that must follow, and whether the output is complete."""
    if not row.problem and token >= 0 and not row.matcher.consume_token(token):
        row.problem = problem_of(row.matcher)
    if row.problem:
        return GrammarStep(problem=row.problem)
    if token < 0 or row.matcher.is_stopped():
        return GrammarStep(is_complete=token >= 0)
    forced = row.forced()
    if forced and not row.matcher.consume_tokens(forced):
        row.problem = problem_of(row.matcher)
        return GrammarStep(problem=row.problem)
    return GrammarStep(tuple(forced), is_complete=bool(row.matcher.is_stopped()))


def problem_of(matcher: Any) -> str:
    """Return what a matcher says is wrong."""
    return readable_problem(str(matcher.get_error()))


_WRONG_REGEX = re.compile(
    r"regex parse error:\n {4}(?P<regex>.*)\n {4}(?P<before> *)\^.*\nerror: (?P<why>.*)"
)
"""An expression of one line, and where it is wrong. Source: the Rust crate regex-syntax, error.rs."""


_NO_TOKEN = re.compile(f"token id {2**32 - 1} out of range|the index is {(2**32 - 1) // 32}$")
"""What llguidance says of the token −1, which llama.cpp gives for text that a vocabulary without `<unk>` lacks."""


def readable_problem(message: str) -> str:
    """Return a matcher's message without the dump of its state; of a wrong expression one line, with the place."""
    said = re.split(r"\n<(?:state|non-verbose|backtrace)", message)[0].strip()
    if found := _WRONG_REGEX.search(said):
        return f"{found['why']}, at character {len(found['before']) + 1} of {found['regex']!r}"
    if _NO_TOKEN.search(said):
        return "the model's vocabulary has no tokens for a text that must follow"
    return "nothing matches it" if said.startswith("NoExtension") else said
