"""Sides that answer the same requests in turn, round by round, and what is kept of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from cbatch.bench.measured import Chains, Figures, MeasuredAnswer, WorkRequest
from cbatch.bench.pacing import Pace
from cbatch.bench.sides import ONE_BY_ONE, BareSide, HttpSide, ProcessSide, Side, SideError
from cbatch.bench.verdict import (
    degenerate,
    differences,
    n_ended_early,
    n_likely,
    problems,
    share_likely,
    unlikely,
    unlikely_text,
)
from cbatch.bench.workloads import Workload, n_distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.bench.exact_text import ExactText

T = TypeVar("T")

N_BARE_STEPS = 64
"""Steps of the bare loop in a round. Our choice."""

N_ALONE = 4
"""Requests of a round that are asked again, alone, to compare their tokens. Our choice."""

N_PROBES = 4
"""Short answers that a server must give as the model does. Our choice."""

COLD, WARM = "cold", "warm"


@dataclass(frozen=True, slots=True)
class Load:
    """What a round sends: how many at once, or how many a second.

    Args:
        at_once: clients of a closed loop, or None.
        rate: requests a second of an open loop, or None.
    """

    at_once: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.at_once} at once" if self.rate is None else f"{self.rate:g} a second"


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """What is measured.

    Args:
        n_rounds: rounds of each load.
        seed: of everything that is drawn.
        n_requests: of a round; None: four for each at once, at least eight, and 32 in an open loop.
        file: requests of one's own, instead of a workload's.
        has_warm: whether each round is repeated with the same requests.
        is_exact: whether the engine promises the same tokens alone and in company.
        is_streamed: whether answers are read as they come.
    """

    workloads: Sequence[Workload]
    loads: Sequence[Load]
    n_rounds: int = 3
    seed: int = 1
    n_requests: int | None = None
    file: Chains | None = None
    has_warm: bool = False
    is_exact: bool = False
    is_streamed: bool = True

    def n_of(self, load: Load) -> int:
        """Return how many chains of requests a round has."""
        if self.n_requests is not None:
            return self.n_requests
        return max(8, 4 * load.at_once) if load.at_once is not None else 32


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of one side. `problems` say why it does not count."""

    workload: str
    load: Load
    i_round: int
    state: str
    """`cold`, where the side has never seen the prompts, or `warm`."""
    side: str
    figures: Figures | None = None
    problems: tuple[str, ...] = ()
    n_early: int = 0
    """Tokens that the side did not generate because it ended answers itself."""
    n_distinct: int = 0
    """Prompt tokens that must be computed if every common beginning is computed once."""
    bare_tps: float | None = None
    """What so many rows decode in a loop of `llama_decode` alone, in the same round."""
    memory_mib: float | None = None

    @property
    def counts(self) -> bool:
        """Whether the figures may be shown."""
        return self.figures is not None and not self.problems


@dataclass(slots=True)
class Comparison:
    """Measures by a plan; what is measured so far is there at any moment.

    Args:
        sides: who answers, the first one ours.
        text: writes prompts.
        tokenize: counts tokens by the model's vocabulary.
        bare: the loop to measure shares of, or None.
        judge: an engine that answers some requests of each round alone and computes answers again, or None.
        end_tokens: which no answer has, as it goes on to its length.
        say: gets a line about each round.
    """

    plan: ComparisonPlan
    sides: Sequence[Side]
    n_slots: int
    text: ExactText
    tokenize: Callable[[str], Sequence[int]]
    bare: BareSide | None = None
    judge: ProcessSide | None = None
    end_tokens: Sequence[int] = ()
    say: Callable[[str], object] = bool
    measured: list[Measured] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Sides that could not be measured, with the reason."""
    notes: list[str] = field(default_factory=list)
    prompt_tps: dict[int, float] = field(default_factory=dict)
    """Prompt tokens a second of the bare loop, by rows."""
    bare_tps: dict[int, list[float]] = field(default_factory=dict)
    """Tokens a second that it decodes, by rows, of each round."""
    _likely_alone: dict[str, float] = field(default_factory=dict)
    """Share of likely tokens in the text of the model's own answers, by workload."""

    def run(self) -> None:
        """Measure everything; `KeyboardInterrupt` leaves what was measured before.

        Raises:
            ConfigError: no text of the sizes can be written.
        """
        ready = self._ready()
        for workload in self.plan.workloads:
            for load in self.plan.loads:
                for i_round in range(self.plan.n_rounds):
                    self._round(ready, workload, load, i_round)

    def close(self) -> None:
        """End all sides."""
        for side in (*self.sides, self.bare, self.judge):
            if side is not None:
                side.close()

    # ---- before the rounds ----

    def _ready(self) -> list[Side]:
        ready: list[Side] = []
        warm_up = self._workload("warm-up", 16, 8)
        chains = warm_up.chains(self.text, N_PROBES, f"{self.plan.seed} warm-up")
        for side in self.sides:
            if self._is_ready(side, chains, ready):
                ready.append(side)
        self._ready_bare()
        return ready

    def _is_ready(self, side: Side, chains: Chains, ready: Sequence[Side]) -> bool:
        """Start, check and warm up a side; False where it cannot be measured."""
        try:
            side.start()
            if isinstance(side, HttpSide):
                self._check(side, ready)
            answers, _ = side.run(chains, Pace(1), 1, is_streamed=self.plan.is_streamed)
            requests = [request for chain in chains for request in chain]
            if found := problems(requests, answers):
                raise SideError(f"{side.name}: {found[0]}")
        except SideError as error:
            self._refuse(str(error))
            side.close()
            return False
        self.say(f"{side.name}: ready")
        return True

    def _workload(self, name: str, n_own: int, n_output: int) -> Workload:
        first = self.plan.workloads[0]
        return replace(
            first, name=name, own=(n_own, n_own), output=(n_output, n_output), n_common=0, n_turns=1
        )

    def _ready_bare(self) -> None:
        if self.bare is None:
            return
        try:
            self.bare.start()
        except SideError as error:
            self._refuse(str(error))
            self.bare = None
            return
        try:
            for n_rows in dict.fromkeys((1, min(8, self.n_slots))):
                self.prompt_tps[n_rows] = self.bare.prompt_tps(n_rows)
        except SideError as error:
            self.notes.append(f"the best prompt rate could not be measured: {error}")

    def _check(self, side: HttpSide, ready: Sequence[Side]) -> None:
        """Ask a server some short questions that it must answer as the first of our own sides does."""
        options = {"temperature": 0.0, "seed": 1}
        drawn = self._workload("probe", 16, 4).chains(self.text, N_PROBES, str(self.plan.seed))
        probes = [replace(request, options=options) for [request] in drawn]
        ours = next((s for s in ready if s.name in ("engine", "one", "static")), None)
        expected = [""] * len(probes)
        if ours is not None:
            answers, _ = ours.run([[p] for p in probes], Pace(1), 1, is_streamed=False)
            texts = {answer.id: answer.text for answer in answers}
            expected = [texts[probe.id] for probe in probes]
        self.notes += [f"{side.name}: {note}" for note in side.check(probes, expected)]

    def _refuse(self, words: str) -> None:
        self.refused.append(words)
        self.say(f"refused: {words}")

    # ---- a round ----

    def _round(self, ready: Sequence[Side], workload: Workload, load: Load, i_round: int) -> None:
        seed = f"{self.plan.seed} {load} {i_round}"
        chains = self.plan.file or workload.chains(self.text, self.plan.n_of(load), seed)
        pace = Pace(load.at_once or 1)
        if load.rate is not None:
            pace = Pace.poisson(load.rate, len(chains), self.plan.seed + i_round)
        requests = [request for chain in chains for request in chain]
        blank = Measured(workload.name, load, i_round, COLD, "")
        blank = replace(
            blank,
            n_distinct=n_distinct(self.tokenize(request.prompt) for request in requests),
            bare_tps=self._bare_tps(load),
        )
        order = [*ready] if i_round % 2 == 0 else [*reversed(ready)]
        alone = self._alone(requests, load)
        for state in (COLD, WARM) if self.plan.has_warm else (COLD,):
            for side in order:
                if side.name in ONE_BY_ONE and load != self._load_of_one(load):
                    continue  # it is the same whatever comes at once
                row = replace(blank, side=side.name, state=self._state(side, state, i_round))
                self._add(self._of_side(side, row, chains, pace, alone))

    def _load_of_one(self, load: Load) -> Load:
        if load.rate is not None:
            return load
        return min(self.plan.loads, key=lambda each: each.at_once or 0)

    def _state(self, side: Side, state: str, i_round: int) -> str:
        """Return what the requests are for a side; one of a file's is started anew where it can be."""
        if self.plan.file is None or state == WARM:
            return state
        if side.is_remote:
            n_before = sum(m.side == side.name for m in self.measured)
            return WARM if i_round or n_before else COLD
        if i_round or any(m.side == side.name for m in self.measured):
            side.close()
        return COLD

    def _of_side(
        self,
        side: Side,
        row: Measured,
        chains: Chains,
        pace: Pace,
        alone: dict[str, tuple[int, ...]],
    ) -> Measured:
        requests = [request for chain in chains for request in chain]
        n_rows = min(row.load.at_once or self.n_slots, self.n_slots)
        try:
            side.start()
            answers, seconds = side.run(chains, pace, n_rows, is_streamed=self.plan.is_streamed)
        except SideError as error:
            side.close()  # the next round starts it anew
            return replace(row, problems=(str(error),))
        found = problems(requests, answers)
        found += self._degenerate(requests, degenerate(answers))
        if side.name in ("engine", "static"):
            found += differences(alone, answers, is_exact=self.plan.is_exact)
        if not isinstance(side, HttpSide) or side.draws_as_asked:
            found += self._unlikely(row.workload, requests, answers)
        return replace(
            row,
            figures=Figures.of(requests, answers, seconds),
            problems=tuple(found),
            n_early=n_ended_early(requests, answers),
            memory_mib=side.memory_mib,
        )

    def _bare_tps(self, load: Load) -> float | None:
        if self.bare is None or load.at_once is None:
            return None
        n_rows = min(load.at_once, self.n_slots)
        with suppress(SideError):
            tps = self.bare.decode_tps(n_rows, N_BARE_STEPS)
            self.bare_tps.setdefault(n_rows, []).append(tps)
            return tps
        self.bare.close()  # the next round starts it anew
        return None

    def _alone(self, requests: Sequence[WorkRequest], load: Load) -> dict[str, tuple[int, ...]]:
        """Return the tokens of some requests as an engine gives them that has nothing else to do."""
        if self.judge is None or load.at_once == 1:
            return {}
        some = requests[:: max(1, len(requests) // N_ALONE)][:N_ALONE]
        if not self.plan.is_exact:
            some = [replace(request, n_output=1) for request in some]
        return {answer.id: answer.tokens for answer in self._judged(some)}

    def _unlikely(
        self, workload: str, requests: Sequence[WorkRequest], answers: Sequence[MeasuredAnswer]
    ) -> list[str]:
        """Return why some answers are not the model's, which computes them again as prompts."""
        by_id = {answer.id: answer for answer in answers if not answer.error}
        known = [r for r in requests if r.id in by_id and n_likely(r) is not None]
        some = known[:: max(1, len(known) // N_ALONE)][:N_ALONE]
        said = [by_id[request.id] for request in some]
        if all(answer.tokens for answer in said):
            return unlikely(some, self._margins(some, [answer.tokens for answer in said]))
        if workload not in self._likely_alone:
            self._likely_alone[workload] = share_likely(self._in_text(some, self._judged(some)))
        return unlikely_text(self._likely_alone[workload], self._in_text(some, said))

    def _in_text(
        self, requests: Sequence[WorkRequest], answers: Sequence[MeasuredAnswer]
    ) -> list[list[float]]:
        """Return margins of the tokens that the answers' texts have by the vocabulary."""
        n_mark = len(self.tokenize(""))
        texts = {answer.id: answer.text for answer in answers}
        some = [request for request in requests if texts.get(request.id)]
        return self._margins(some, [self.tokenize(texts[r.id])[n_mark:] for r in some])

    def _margins(
        self, requests: Sequence[WorkRequest], outputs: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return margins of each token of some answers; of none where there is nobody to judge."""
        items = []
        for request, output in zip(requests, outputs, strict=True):
            prompt = self.tokenize(request.prompt)
            items.append(
                {
                    "tokens": [*prompt, *output[: request.n_output]],
                    "n_prompt": len(prompt),
                    "n_likely": n_likely(request),
                    "banned": [*self.end_tokens],
                }
            )
        found = self._judging(lambda judge: judge.do({"scored": items})) if items else None
        return [[] for _ in items] if found is None else found["margins"]

    def _degenerate(self, requests: Sequence[WorkRequest], ids: Sequence[str]) -> list[str]:
        """Return that answers are degenerate, where the model alone gives others to the same requests."""
        some = [request for request in requests if request.id in ids][:N_ALONE]
        alone = self._judged(some) if some else []
        if len(degenerate(alone)) == len(some):
            return []
        return [f"{len(ids)} of {len(requests)} answers are degenerate: they repeat a single token"]

    def _judged(self, requests: Sequence[WorkRequest]) -> list[MeasuredAnswer]:
        """Return the answers of an engine that has nothing else to do; none where there is none."""
        found = self._judging(
            lambda judge: judge.run([[r] for r in requests], Pace(1), 1, is_streamed=False)
        )
        return [] if found is None else [answer for answer in found[0] if not answer.error]

    def _judging(self, use: Callable[[ProcessSide], T]) -> T | None:
        """Return what the judge says; None where there is none, or none any more."""
        if self.judge is None:
            return None
        try:
            self.judge.start()
            return use(self.judge)
        except SideError as error:
            self._refuse(f"the model alone gave no answers to compare with: {error}")
            self.judge.close()
            self.judge = None
            return None

    def _add(self, row: Measured) -> None:
        self.measured.append(row)
        name = f"{row.workload}, {row.load}, round {row.i_round + 1}, {row.state}, {row.side}"
        if row.counts and row.figures is not None:
            self.say(f"{name}: {row.figures.output_tps:,.1f} tokens/s")
        else:
            self.say(f"{name}: refused: {'; '.join(row.problems)}")
