"""Constraints of a backend without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.backend.fake.fake_tokens import mix
from cbatch.core.plan import GrammarStep
from cbatch.errors import GrammarError, PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.plan import Binding
    from cbatch.options import Grammar


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

    def follow(self, token: int) -> GrammarStep:
        """Take a sampled token and what it forces; return what there is to say."""
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
            raise PlanError(f"token {token} is not the one that is forced")


def matcher_of(binding: Binding, output: Sequence[int] | None = None) -> FakeMatcher | None:
    """Return what follows the constraint of a sequence with so much output; None where it has none."""
    constraint = binding.constraint
    if not isinstance(constraint, FakeConstraint):
        return None
    forces = binding.n_logprobs is None
    return FakeMatcher(constraint, [*binding.output, *(output or ())], forces=forces)
