"""Tokens of a backend without a model: what they say, which one comes next, what constrains them."""

from __future__ import annotations

import json
import math
import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.core.plan import Binding, GrammarStep, TokenLogprobs
from cbatch.errors import GrammarError, PlanError
from cbatch.media import marked_messages, medium_of
from cbatch.pictures import NO_PROJECTOR
from cbatch.sounds import NO_ENCODER
from cbatch.support.picture_tokens import PictureTokens, ids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from cbatch.options import AdapterSet, Grammar

END_TOKEN = 256
_MASK = 2**64 - 1
_TAG_SHIFT = 24
"""Tags of cells are in the bits above those of a token."""


@dataclass(eq=False)
class FakePicture:
    """A picture or a sound whose rows are its bytes."""

    is_encoded: bool = True
    is_slow: bool = False
    key: str = "picture"

    def state(self) -> NDArray[np.uint8]:
        """Return its rows: one."""
        return np.frombuffer(self.key.encode(), np.uint8)

    def restore(self, data: NDArray[np.uint8]) -> None:
        """Take its rows."""
        if bytes(data) != self.key.encode():
            raise ValueError("are of another picture")
        self.is_encoded = True


class FakeVocab:
    """Bytes are tokens 0 … 255, `END_TOKEN` ends a generation; higher ids are letters of a made-up alphabet."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self.end_tokens: tuple[int, ...] = (END_TOKEN,)
        self.suppressed_tokens: tuple[int, ...] = ()
        self.template = ""
        self.tool_refusal = ""
        self.picture_refusal = NO_PROJECTOR
        """Tests that give pictures set it to ""."""
        self.sound_refusal = NO_ENCODER
        """Tests that give sound set it to ""."""
        self.controls: dict[int, bytes] = {END_TOKEN: b"<end>"}
        """Control tokens with their text."""

    def start_chats(self) -> None:
        """Do nothing: this one renders them itself."""

    def picture_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, object] | None = None,
        check_length: Callable[[int], object] | None = None,
    ) -> PictureTokens:
        """Return the bytes of the text, and a row for each byte of a picture or sound; a byte is 1 to 256."""
        marked, parts = marked_messages(messages, lambda i, part: "\0")
        first, *others = self.render_text(marked, variables).split("\0")
        tokens, media = self.tokenize(first), [medium_of(part) for part in parts]
        for medium, text in zip(media, others, strict=True):
            tokens += ids_of(zlib.crc32(medium.data), len(medium.data))
            tokens += self.tokenize(text)
            if check_length is not None:
                check_length(len(tokens))
        pictures = [FakePicture() for _ in media]
        return PictureTokens(tokens, pictures, sum(len(m.data) for m in media if m.is_sound))

    @property
    def media_fingerprint(self) -> Mapping[str, str]:
        """See `Vocab`."""
        return {"projector": "fake"}

    def encode(self, tokens: PictureTokens) -> None:
        """Do nothing: rows are their ids."""

    def stop_encoding(self) -> None:
        """Do nothing."""

    @property
    def control_tokens(self) -> frozenset[int]:
        """The end token, and the tokens that a test made control tokens."""
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

    @property
    def n_added(self) -> tuple[int, int]:
        """None."""
        return 0, 0

    def tokenize_pair(self, query: str, document: str, instruction: str | None) -> list[int]:
        """Return the bytes of both texts, with the end token between them."""
        return [*self.tokenize(query), END_TOKEN, *self.tokenize(document)]

    def n_tokens_least(self, text: str) -> int:
        """Return 0: the text must be tokenized."""
        return 0

    def dry_breakers(self, strings: Sequence[str]) -> bytes:
        """Return the strings."""
        return "".join(strings).encode()

    def render_text(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, object] | None = None
    ) -> str:
        """Return the variables and `role:content` lines, the last left open."""
        lines = [json.dumps(variables)] if variables else []
        lines += [f"{m['role']}:{m['content']}" for m in messages]
        return "\n".join(lines)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the bytes of `render_text`."""
        return self.tokenize(self.render_text(messages, variables))


def mix(state: int, key: int) -> int:
    """Return the state that follows one when `key` is added to it."""
    state = ((state ^ key) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    return state ^ state >> 29


def state_after(state: int, cells: Sequence[int]) -> int:
    """Return the state that cells lead to from another: it depends on each of them and on their order."""
    for cell in cells:
        state = mix(state, cell)
    return state


def shifted(start: int, cells: Sequence[int], n_kept: int, n: int) -> list[int]:
    """Return the cells left without `n` cells after the first `n_kept`; later ones still depend on those removed."""
    gone = zlib.crc32(b"%d" % state_after(start, cells[: n_kept + n])) << _TAG_SHIFT
    return [*cells[:n_kept], *[cell ^ gone for cell in cells[n_kept + n :]]]


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
    depth = mix(state, token) % 64
    return TokenLogprobs(found.logprob - depth, tuple((t, p - depth) for t, p in found.top))


def tag_of(adapters: AdapterSet) -> int:
    """Return bits above those of a token that tell apart cells computed with other adapters."""
    return zlib.crc32(repr(adapters).encode()) << _TAG_SHIFT if adapters else 0


@dataclass(frozen=True, slots=True)
class FakeBudget:
    """Behind a token, if it is one of the first three, so many others may follow before another one must.

    Args:
        begin: the token; −1 where the output begins behind it.
        end: what must follow.
        n_tokens: how many may stand between.
    """

    begin: int
    end: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class FakeConstraint:
    """Every token has a parity; some force a run after them; one kind is the last, one cannot be followed.

    Args:
        parity: of every token, 0 or 1.
        last: a token of this rest modulo 16, forced runs after it included, is followed by nothing.
        bad: a token of this rest modulo 16 cannot be sampled: there the constraint fails.
        budget: what holds instead of all this.
    """

    parity: int
    last: int = -1
    bad: int = -1
    budget: FakeBudget | None = field(default=None, kw_only=True)


_BUDGET = re.compile(
    r"start: (?:.*\(<\[(?P<begin>\d+)\]> )?(?:<\[\^\d+\]>\{0,(?P<n>\d+)\} )?<\[(?P<end>\d+)\]> <\[\*\]>\*"
)


class FakeGrammars:
    """Makes a constraint of a regex such as "1", "1:5" or "1:5:7": parity, last, bad; and of a budget of thinking."""

    def compile(self, grammar: Grammar) -> FakeConstraint:
        """Compile a grammar; see `Grammars.compile`."""
        if grammar.kind == "thinking_budget" and (found := _BUDGET.match(grammar.text)):
            begin, n_tokens = found["begin"] or -1, found["n"] or 0
            budget = FakeBudget(int(begin), int(found["end"]), int(n_tokens))
            return FakeConstraint(0, budget=budget)
        try:
            made = FakeConstraint(*map(int, grammar.text.split(":")))
            if made.parity not in (0, 1):
                raise ValueError(f"{made.parity} is not a parity")
            return made
        except (TypeError, ValueError) as error:
            raise GrammarError(grammar.kind, f"must be numbers PARITY:LAST:BAD: {error}") from error

    def compile_quickly(self, grammar: Grammar) -> FakeConstraint | None:
        """Compile a grammar; see `Grammars.compile_quickly`."""
        return self.compile(grammar)

    def takes_long(self, grammar: Grammar) -> bool:
        """Whether a grammar may take long: none does."""
        return False


class FakeMatcher:
    """Follows a constraint; what it forces depends on all of the output so far, so a wrong output raises an error."""

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

    def follow(self, token: int) -> GrammarStep:
        """Advance by a sampled token and what it forces."""
        if not self._forced and token % 16 == self._constraint.bad:
            return GrammarStep(problem="a bad token")
        self._take(token)
        forced = tuple(self._forced) if self._forces else ()
        for behind in forced:
            self._take(behind)
        is_last = (token, *forced)[-1] % 16 == self._constraint.last
        return GrammarStep(forced, is_complete=is_last and not self._forced)

    def _take(self, token: int) -> None:
        if token % 2 != self._constraint.parity:
            raise PlanError(f"token {token} breaks {self._constraint}")
        self._state = mix(self._state, token)
        if not self._forced:
            n_forced = self._state % 16 - 10
            self._forced = [
                mix(self._state, i) % 128 * 2 + self._constraint.parity for i in range(n_forced)
            ]
        elif self._forced.pop(0) != token:
            raise PlanError(f"token {token} is not the forced token")


class FakeBudgetMatcher:
    """Follows a budget."""

    def __init__(
        self, budget: FakeBudget, output: Sequence[int] = (), *, forces: bool = True
    ) -> None:
        self._budget, self._forces = budget, forces
        self._n_before = 0
        self._n_between: int | None = None if budget.begin >= 0 else 0
        self._is_over = False
        for token in output:
            self._take(token)

    def choose(self, token: int) -> int:
        """Return what is sampled where `token` would be without a constraint."""
        return self._budget.end if self._must_end else token

    def follow(self, token: int) -> GrammarStep:
        """Advance by a sampled token and what it forces."""
        self._take(token)
        if not (self._must_end and self._forces):
            return GrammarStep()
        self._take(self._budget.end)
        return GrammarStep((self._budget.end,))

    @property
    def _must_end(self) -> bool:
        return not self._is_over and self._n_between == self._budget.n_tokens

    def _take(self, token: int) -> None:
        if self._is_over:
            return
        if self._must_end and token != self._budget.end:
            raise PlanError(f"token {token} breaks {self._budget}")
        if self._n_between is not None:
            self._is_over = token == self._budget.end
            self._n_between += 1
        elif token == self._budget.begin:
            self._n_between = 0
        else:
            self._n_before += 1
            self._is_over = self._n_before > _N_BEFORE


_N_BEFORE = 2
"""Tokens that may stand before the one that begins a thinking. Source: `cbatch.chat.thinking_budget`."""


def matcher_of(
    binding: Binding, output: Sequence[int] | None = None
) -> FakeMatcher | FakeBudgetMatcher | None:
    """Return a matcher of a sequence's constraint after its output; None without a constraint."""
    constraint, forces = binding.constraint, binding.n_logprobs is None
    if not isinstance(constraint, FakeConstraint):
        return None
    said = [*binding.output, *(output or ())]
    if constraint.budget is not None:
        return FakeBudgetMatcher(constraint.budget, said, forces=forces)
    return FakeMatcher(constraint, said, forces=forces)
