"""What settings are worth for a model on this machine: each is compared with the given ones, round by round.

Both engines answer the same requests in each round, in turn. How much two engines of the same settings differ is
measured first. A change that is faster is measured again, and what is faster is measured together.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cbatch.backend.load.attention_trial import TrialRound
from cbatch.bench.sides import RoundRunner, SideError
from cbatch.bench.verdict import problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cbatch.bench.measured import Chains
    from cbatch.bench.pacing import Pace
    from cbatch.bench.workloads import Workload

N_ROUNDS, N_ROUNDS_MOST = 3, 9
"""Rounds of a change, the least and the most; one that is faster has twice as many. Our choice."""

LEAST_NOISE = 0.01
"""Part of a time that always counts as noise. Our choice."""

LEAST_CPU = 0.7
"""CPU time over wall time below which other programs disturbed the rounds, as in the trial of a load."""

LEAST_JOB_S = 1.0
"""Seconds of a job, at least: shorter ones differ by how their first and last requests meet. Our choice."""

N_WARM_UP = 4
"""Requests with which an engine warms up. Our choice."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """Settings that differ from the given ones; none where the same are measured again."""

    settings: Mapping[str, Any]
    is_lossy: bool = False
    """Whether cells lose precision, so that answers change."""


def changes_of(
    given: Mapping[str, Any],
    n_cores: int,
    flash_attn: str,
    speculate: str | int,
    *,
    is_packed: bool = False,
) -> list[SettingChange]:
    """Return the changes to try, the most promising first; a setting that was given stays as it is.

    Args:
        given: settings of the engine.
        n_cores: those that this process may use.
        flash_attn: what a load with these settings has: "auto" is llama.cpp's choice, on where it can be.
        speculate: the default of this option.
        is_packed: whether weights are packed with these settings.
    """
    threads = dict.fromkeys(n for n in (n_cores - 1, n_cores // 2) if n)
    replicas = [n for n in (2, 4) if n <= n_cores]
    tried: list[tuple[str, Sequence[Any]]] = [
        ("flash_attn", ["on" if flash_attn == "off" else "off"]),
        ("speculate", ["auto" if speculate == "off" else "off"]),
        ("repack", ["llama"] * is_packed),
        ("n_threads", [*threads]),
        ("replicas", replicas),
        ("kv", ["partitioned", "unified"]),
        ("n_ubatch", [256, 1024, 128]),
    ]
    found = [
        SettingChange({name: value})
        for name, values in tried
        if name not in given
        for value in values
    ]
    if not {"cache_type_k", "cache_type_v"} & given.keys() and given.get("flash_attn") != "off":
        found.append(SettingChange({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, is_lossy=True))
    return found


class JobTimes(NamedTuple):
    """Seconds of one job in one round."""

    given_s: float
    changed_s: float
    cpu_s: float
    """CPU seconds of the process with the given settings."""

    @property
    def ratio(self) -> float:
        """How many times as fast the job is with the change."""
        return self.given_s / self.changed_s


@dataclass(frozen=True, slots=True)
class Worth:
    """How many times as fast a job is with a change: the median of its rounds, and by how much that may be wrong."""

    ratio: float
    noise: float

    @classmethod
    def of(cls, ratios: Sequence[float], floor: float) -> Worth:
        """Return what rounds show; noise is half of their range, or `floor` where that is more."""
        return cls(median(ratios), max(floor, (max(ratios) - min(ratios)) / 2))

    @property
    def sign(self) -> int:
        """1 where the job is faster, −1 where it is slower, 0 where the difference is noise."""
        return (self.ratio > 1 + self.noise) - (self.ratio < 1 - self.noise)

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ± {self.noise:.2f}"


@dataclass(eq=False, slots=True)
class TriedChange:
    """The rounds of a change so far."""

    change: SettingChange
    times: dict[str, list[JobTimes]] = field(default_factory=dict)
    """By job."""
    refused: str = ""
    """Why it cannot be measured."""

    @property
    def n_rounds(self) -> int:
        """Rounds that are whole."""
        return min(map(len, self.times.values()), default=0)

    def ratios(self, job: str) -> list[float]:
        """Return the ratios of a job's rounds."""
        return [times.ratio for times in self.times.get(job, ())]


class TunedSide(RoundRunner, Protocol):
    """An engine that answers the requests of a job."""

    cpu_s: float
    """CPU seconds of its last job."""


@dataclass(slots=True)
class Tuner:
    """Measures changes until the time is up; what was found so far is there at any moment.

    Args:
        make_side: makes an engine with the given settings and these changed.
        chains: the requests of a job, `n` of them, by a seed.
        changes: what to try, asked for once an engine with the given settings is loaded.
        pace: how many requests come at once.
        n_requests: of each job, or a multiple of it where a job would take less than `LEAST_JOB_S`.
        budget_s: seconds after which nothing new begins.
        n_threads: threads with which the given settings compute.
        say: gets the settings of each change once it is measured, and the verdict.
        show: gets the rounds that are done, and those that are planned.
    """

    jobs: Sequence[Workload]
    make_side: Callable[[Mapping[str, Any]], TunedSide]
    chains: Callable[[Workload, int, str], Chains]
    changes: Callable[[], Sequence[SettingChange]]
    pace: Pace
    n_requests: int
    budget_s: float
    n_threads: int
    say: Callable[[Mapping[str, Any], str], object] = lambda *_: None
    show: Callable[[int, int], object] = lambda *_: None
    clock: Callable[[], float] = time.monotonic
    same: TriedChange = field(default_factory=lambda: TriedChange(SettingChange({})))
    """The given settings against themselves."""
    tried: list[TriedChange] = field(default_factory=list)
    left: list[SettingChange] = field(default_factory=list)
    """Changes that have not begun."""
    needed_s: float = 0.0
    """Seconds that all changes would have taken."""
    _given: TunedSide = field(init=False)
    _n_of: dict[str, int] = field(default_factory=dict)
    """Requests of each job."""
    _n_drawn: int = 0
    _n_done: int = 0
    _n_planned: int = 0
    _end_s: float = 0.0

    def __post_init__(self) -> None:
        self._given = self.make_side({})

    def run(self) -> None:
        """Measure; `KeyboardInterrupt` leaves what was measured before.

        Raises:
            SideError: the model cannot be loaded with the given settings, or fails.
        """
        start_s = self.clock()
        self._end_s = start_s + self.budget_s
        given = self._given
        try:
            self._warm_up(given)
            load_s = self.clock() - start_s
            self.left = [*self.changes()]
            round_s = 2 * sum(self._size(job) for job in self.jobs)
            n_all = len(self.left) + 1
            n_fit = (self.budget_s / n_all - load_s) / round_s
            n_rounds = int(min(N_ROUNDS_MOST, max(N_ROUNDS, n_fit)))
            self.needed_s = n_all * (load_s + N_ROUNDS * round_s) + load_s
            self._n_planned = n_all * n_rounds
            self._try(self.same, n_rounds)
            if self.same.refused:
                raise SideError(self.same.refused)
            while self.left and not self._is_over():
                self.tried.append(TriedChange(self.left.pop(0)))
                self._try(self.tried[-1], n_rounds)
            if (together := self._together()) is not None and not self._is_over():
                self.tried.append(TriedChange(together))
                self._n_planned += n_rounds
                self._try(self.tried[-1], n_rounds)
        finally:
            given.close()

    # ---- what was found ----

    @property
    def untold(self) -> list[SettingChange]:
        """Changes for which the time did not last."""
        begun = [t.change for t in self.tried if not t.refused and t.n_rounds < N_ROUNDS]
        return [*begun, *self.left]

    def worth(self, tried: TriedChange) -> dict[str, Worth]:
        """Return what a change is worth in each job; empty before it has rounds enough."""
        if tried.refused or tried.n_rounds < N_ROUNDS:
            return {}
        return {
            job.name: Worth.of(tried.ratios(job.name), self.noise(job.name)) for job in self.jobs
        }

    def noise(self, job: str) -> float:
        """Return by how much a round of two engines of the same settings differs at most, as a part of its time."""
        return max([LEAST_NOISE, *(abs(ratio - 1) for ratio in self.same.ratios(job))])

    def is_better(self, tried: TriedChange) -> bool:
        """Whether a change makes a job faster and none slower."""
        signs = [worth.sign for worth in self.worth(tried).values()]
        return 1 in signs and -1 not in signs

    def verdict(self, tried: TriedChange) -> str:
        """Say what a change is worth."""
        if tried.refused:
            return f"refused: {tried.refused}"
        worth = self.worth(tried)
        if not worth:
            return "too few rounds to tell"
        faster, slower = ([job for job, w in worth.items() if w.sign == sign] for sign in (1, -1))
        said = [f"faster in {', '.join(faster)}"] * bool(faster)
        said += [f"slower in {', '.join(slower)}"] * bool(slower)
        said += ["less precise"] * tried.change.is_lossy
        return "; ".join(said) if faster or slower else "no difference"

    def advice(self) -> Mapping[str, Any]:
        """Return the settings to use instead of the given ones; empty where these are the best."""
        better = [t for t in self.tried if self.is_better(t) and not t.change.is_lossy]
        return max(better, key=self._gain).change.settings if better else {}

    @property
    def cpu_share(self) -> float:
        """CPU time of the process with the given settings over wall time and threads; 1 before there are rounds."""
        times = [times for tried in (self.same, *self.tried) for times in _of_all_jobs(tried)]
        wall_s = self.n_threads * sum(t.given_s for t in times)
        return sum(t.cpu_s for t in times) / wall_s if wall_s else 1.0

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took so much that nothing should be decided."""
        return self.cpu_share < LEAST_CPU

    def attention(self) -> tuple[bool, list[TrialRound]] | None:
        """Return whether jobs are faster without flash attention, and the rounds; None where that is not known."""
        for tried in self.tried:
            if tried.change.settings.keys() == {"flash_attn"} and self.worth(tried):
                break
        else:
            return None
        is_change_off = tried.change.settings["flash_attn"] == "off"
        signs = [worth.sign for worth in self.worth(tried).values()]
        best = 1 if is_change_off else -1
        rounds = zip(tried.times["mixed"], tried.times["decode"], strict=True)
        seen = [self._trial_round(*pair, is_change_off=is_change_off) for pair in rounds]
        return best in signs and -best not in signs, seen

    def _trial_round(self, mixed: JobTimes, decode: JobTimes, *, is_change_off: bool) -> TrialRound:
        """Return times with flash attention over those without."""
        power = 1 if is_change_off else -1
        return TrialRound(
            mixed.ratio**power,
            decode.ratio**power,
            mixed.given_s + decode.given_s,
            (mixed.cpu_s + decode.cpu_s) / self.n_threads,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "noise": {job.name: round(self.noise(job.name), 4) for job in self.jobs},
            "cpu_share": round(self.cpu_share, 3),
            "changes": [self._told(tried) for tried in (self.same, *self.tried)],
            "not_measured": [change.settings for change in self.untold],
            "advice": self.advice(),
        }

    def _told(self, tried: TriedChange) -> dict[str, Any]:
        jobs = {
            job: {
                "ratio": round(worth.ratio, 4),
                "noise": round(worth.noise, 4),
                "ratios": [round(ratio, 4) for ratio in tried.ratios(job)],
            }
            for job, worth in self.worth(tried).items()
        }
        settings = tried.change.settings
        return {"settings": settings, "verdict": self.verdict(tried), "jobs": jobs}

    # ---- rounds ----

    def _try(self, tried: TriedChange, n_rounds: int) -> None:
        given, side = self._given, self.make_side(tried.change.settings)
        try:
            self._warm_up(given)
            self._warm_up(side)
            for i in range(2 * n_rounds):
                if i == n_rounds:
                    if not self.is_better(tried) or tried is self.same:
                        break
                    self._n_planned += n_rounds
                if self._is_over():
                    break
                self._round(side, tried, is_first=bool(i % 2))
        except SideError as error:
            tried.refused = str(error)
            given.close()  # it may be the one that failed
        finally:
            side.close()
        if tried is not self.same:
            self.say(tried.change.settings, self.verdict(tried))

    def _round(self, side: TunedSide, tried: TriedChange, *, is_first: bool) -> None:
        """Have both engines answer the requests of all jobs; `is_first`: the one with the change first."""
        for job in self.jobs:
            chains = self._draw(job)
            order = (side, self._given) if is_first else (self._given, side)
            took = {each: self._answer(each, chains) for each in order}
            seconds = took[self._given], took[side], self._given.cpu_s
            tried.times.setdefault(job.name, []).append(JobTimes(*seconds))
        self._n_done += 1
        self.show(self._n_done, self._n_planned)

    def _size(self, job: Workload) -> float:
        """Decide how many requests a job has; return about the seconds that it will take."""
        seconds = self._answer(self._given, self._draw(job))
        n_times = max(1, math.ceil(LEAST_JOB_S / seconds))
        self._n_of[job.name] = n_times * self.n_requests
        return n_times * seconds

    def _warm_up(self, side: TunedSide) -> None:
        side.start()
        self._answer(side, self._draw(self.jobs[0], N_WARM_UP))

    def _draw(self, job: Workload, n: int | None = None) -> Chains:
        """Return requests that no engine has seen."""
        self._n_drawn += 1
        n = n or self._n_of.get(job.name, self.n_requests)
        return self.chains(job, n, f"tune {self._n_drawn}")

    def _answer(self, side: TunedSide, chains: Chains) -> float:
        answers, seconds = side.run(chains, self.pace, self.pace.n_clients, is_streamed=True)
        if found := problems([request for chain in chains for request in chain], answers):
            raise SideError(found[0])
        return seconds

    def _is_over(self) -> bool:
        return self.clock() >= self._end_s

    # ---- several changes ----

    def _together(self) -> SettingChange | None:
        """Return all changes that are faster, of each setting the best; None of fewer than two."""
        best: dict[str, TriedChange] = {}
        for tried in self.tried:
            if self.is_better(tried) and not tried.change.is_lossy:
                [name] = tried.change.settings
                if name not in best or self._gain(tried) > self._gain(best[name]):
                    best[name] = tried
        settings = {name: tried.change.settings[name] for name, tried in best.items()}
        return SettingChange(settings) if len(settings) > 1 else None

    def _gain(self, tried: TriedChange) -> float:
        """Return how many times as fast all jobs are, as the logarithm of the product."""
        return sum(math.log(worth.ratio) for worth in self.worth(tried).values())


def _of_all_jobs(tried: TriedChange) -> Iterator[JobTimes]:
    for times in tried.times.values():
        yield from times
