"""Embeddings or rerank by several sides in turn, what is kept of it, and the table that shows it."""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from operator import mul
from typing import TYPE_CHECKING, Any

from cbatch.bench.sides import SideError, VectorSide
from cbatch.bench.summary import Middle, TextTable, shown_middle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cbatch.bench.text_work import TextCall, Tokenize, VectorWorkload
    from cbatch.bench.vector_process import Rows

_LEAST_COSINE = 0.99
"""Below it a side has another model, or other vectors: kernels and quantised cells round less apart. Our choice."""

_MOST_APART = 0.05
"""The same for scores, as probabilities or as logits."""


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """What is measured.

    Args:
        loads: calls at once, one after another.
        seed: of everything that is drawn.
        n_calls: of a round; None: four for each at once, at least eight.
    """

    workloads: Sequence[VectorWorkload]
    loads: Sequence[int]
    n_rounds: int = 3
    seed: int = 1
    n_calls: int | None = None


@dataclass(frozen=True, slots=True)
class VectorMeasured:
    """One round of one side. `problem` says why it does not count."""

    workload: str
    at_once: int
    i_round: int
    side: str
    n_texts: int
    n_tokens: int
    seconds: float = 0.0
    cpu_s: float | None = None
    memory_mib: float | None = None
    problem: str = ""


@dataclass(slots=True)
class VectorComparison:
    """Measures workload by workload; what is measured so far is there at any moment.

    Args:
        sides_of: makes the sides of a workload, the first one ours.
        tokenize: counts tokens by the model's vocabulary.
        say: takes a line about each round.
    """

    plan: VectorPlan
    sides_of: Callable[[VectorWorkload], Iterable[VectorSide]]
    tokenize: Tokenize
    say: Callable[[str], object]
    measured: list[VectorMeasured] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Sides that were left out, and why."""
    apart: dict[tuple[str, str], float] = field(default_factory=dict)
    """By workload and side: the least cosine to the first side's vectors, or the greatest difference of scores."""
    _sides: list[VectorSide] = field(default_factory=list)

    def run(self) -> None:
        """Measure; a side that fails is left out, and the others go on."""
        for workload in self.plan.workloads:
            self._sides = [*self.sides_of(workload)]
            self._measure(workload)
            self.close()

    def close(self) -> None:
        """End the sides. Twice is harmless."""
        for side in self._sides:
            side.close()

    def _measure(self, workload: VectorWorkload) -> None:
        [probe] = workload.calls(self.tokenize, 1, f"{self.plan.seed} probe")
        left = [*self._alike(workload, probe)]
        for at_once in self.plan.loads:
            for i in range(self.plan.n_rounds):
                n_calls = self.plan.n_calls or max(8, 4 * at_once)
                calls = workload.calls(self.tokenize, n_calls, f"{self.plan.seed} {at_once} {i}")
                for side in left[::-1] if i % 2 else [*left]:
                    found = self._round(workload, at_once, i, side, calls)
                    self.measured.append(found)
                    if found.problem:
                        self.refused.append(f"{workload.name}: {found.problem}")
                        left.remove(side)

    def _alike(self, workload: VectorWorkload, probe: TextCall) -> Iterator[VectorSide]:
        """Yield the sides that answer a call as the first one does. It also warms them up."""
        first: Rows | None = None
        for side in self._sides:
            try:
                rows = side.rows(probe)
            except SideError as error:
                self.refused.append(f"{workload.name}: {error}")
                continue
            if first is None:
                first = rows
            apart = _scores_apart(first, rows) if workload.n_query else _least_cosine(first, rows)
            is_alike = apart <= _MOST_APART if workload.n_query else apart >= _LEAST_COSINE
            if not is_alike:
                what = "difference of scores" if workload.n_query else "cosine"
                self.refused.append(
                    f"{workload.name}: {side.name}: has another model or other results: {what} {apart:.4f}"
                )
                continue
            self.apart[workload.name, side.name] = apart
            yield side

    def _round(
        self,
        workload: VectorWorkload,
        at_once: int,
        i: int,
        side: VectorSide,
        calls: Sequence[TextCall],
    ) -> VectorMeasured:
        n_texts = sum(len(call.texts) for call in calls)
        n_tokens = sum(len(self.tokenize(text)) for call in calls for text in call.texts)
        key = workload.name, at_once, i, side.name, n_texts, n_tokens
        try:
            found = side.answer(calls, at_once)
        except SideError as error:
            return VectorMeasured(*key, problem=str(error))
        self.say(
            f"{workload.name}, {at_once} at once, round {i + 1}: {side.name} {n_texts / found.seconds:.1f} texts/s"
        )
        return VectorMeasured(*key, found.seconds, found.cpu_s, side.memory_mib)

    # ---- what was found ----

    def tables(self) -> Iterator[TextTable]:
        """Yield a table of each workload."""
        for workload in self.plan.workloads:
            rows = [*self._rows(workload)]
            far = "most apart" if workload.n_query else "cosine"
            columns = ("load", "side", "texts/s", "tokens/s", "texts/CPU s", far, "MiB")
            title = f"{workload.name}: {workload.told} ({workload.sizes})"
            yield TextTable(title, (*columns, "cbatch over it", "by CPU"), rows)

    def _rows(self, workload: VectorWorkload) -> Iterator[tuple[str, ...]]:
        of_it = [m for m in self.measured if m.workload == workload.name and not m.problem]
        for at_once in self.plan.loads:
            by_side: dict[str, dict[int, VectorMeasured]] = {}
            for m in of_it:
                if m.at_once == at_once:
                    by_side.setdefault(m.side, {})[m.i_round] = m
            ours = next((by_side[name] for name in ("engine", "serve") if name in by_side), {})
            for side, rounds in by_side.items():
                is_ours = side in ("engine", "serve")
                yield (
                    f"{at_once} at once",
                    side,
                    _number(m.n_texts / m.seconds for m in rounds.values()),
                    _number(m.n_tokens / m.seconds for m in rounds.values()),
                    _number(m.n_texts / m.cpu_s for m in rounds.values() if m.cpu_s),
                    f"{self.apart[workload.name, side]:.6f}",
                    _number(m.memory_mib for m in rounds.values() if m.memory_mib),
                    "" if is_ours else shown_middle(_times(ours, rounds)),
                    "" if is_ours else shown_middle(_times(ours, rounds, is_cpu=True)),
                )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        apart = [
            {"workload": workload, "side": side, "apart": value}
            for (workload, side), value in self.apart.items()
        ]
        return {
            "rounds": [asdict(m) for m in self.measured],
            "apart": apart,
            "refused": self.refused,
        }


def _times(
    ours: dict[int, VectorMeasured], theirs: dict[int, VectorMeasured], *, is_cpu: bool = False
) -> Middle | None:
    """Return how many times their time of a round is ours, over the rounds that both have."""
    pairs = [(ours[i], m) for i, m in theirs.items() if i in ours]
    if is_cpu:
        return Middle.of(b.cpu_s / a.cpu_s for a, b in pairs if a.cpu_s and b.cpu_s)
    return Middle.of(b.seconds / a.seconds for a, b in pairs)


def _number(values: Any) -> str:
    found = [*values]
    return f"{statistics.median(found):,.4g}" if found else ""


def _least_cosine(first: Rows, second: Rows) -> float:
    """Return the least cosine of two vectors of one text; −1 where they cannot be compared."""
    with suppress(ValueError, ZeroDivisionError):
        return min(
            float(sum(map(mul, a, b))) / math.hypot(*a) / math.hypot(*b)
            for a, b in zip(first, second, strict=True)
        )
    return -1.0


def _scores_apart(first: Rows, second: Rows) -> float:
    """Return the greatest difference of two scores of one document: probabilities, or logits of the second."""
    pairs = [(a, b) for [a], [b] in zip(first, second, strict=True)]
    plain = max(abs(a - b) for a, b in pairs)
    by_logit = max(abs(a - 1 / (1 + math.exp(-max(-700.0, min(700.0, b))))) for a, b in pairs)
    return min(plain, by_logit)
