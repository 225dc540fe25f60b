"""What settings are worth: rounds in turn, what is noise, and what is advised, on engines that only say their times."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.bench.measured import MeasuredAnswer, WorkRequest
from cbatch.bench.pacing import Pace
from cbatch.bench.sides import SideError
from cbatch.bench.tuning import SettingChange, TriedChange, Tuner, Worth, changes_of
from cbatch.bench.workloads import WORKLOADS, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cbatch.bench.measured import Chains
    from cbatch.bench.tuning import TunedSide

JOBS = [WORKLOADS[name] for name in ("decode", "mixed", "shared")]
JOB_S = 10.0


def chains_of(job: Workload, n: int, seed: str) -> Chains:
    return [[WorkRequest(f"{job.name} {i}", seed, 4, 8)] for i in range(n)]


class Machine:
    """Engines that answer as fast as a table says, one after the other, by a clock of their own."""

    def __init__(self, speeds: Mapping[str, float] | None = None, *, noise: float = 0.0) -> None:
        self.speeds, self.noise = speeds or {}, noise
        self.now_s, self.cpu_share, self.chance = 0.0, 1.0, random.Random(1)
        self.job_s = JOB_S
        self.n_requests: set[int] = set()
        self.broken: set[str] = set()
        self.loaded: list[str] = []
        self.log: list[str] = []
        self.prompts: Counter[str] = Counter()
        self.before_job: Callable[[str], object] = bool

    def side(self, changed: Mapping[str, Any]) -> TunedSide:
        return SpokenSide(self, " ".join(f"{k}={v}" for k, v in changed.items()))

    def tuner(self, *changes: SettingChange, **more: Any) -> Tuner:
        made: dict[str, Any] = {"budget_s": 1e9, "n_threads": 2, **more}
        return Tuner(
            JOBS,
            self.side,
            chains_of,
            lambda: changes,
            Pace(2),
            4,
            clock=lambda: self.now_s,
            **made,
        )


class SpokenSide:
    """One engine."""

    def __init__(self, machine: Machine, name: str) -> None:
        self._machine, self._name, self.cpu_s = machine, name, 0.0

    def start(self) -> None:
        if f"start {self._name}" in self._machine.broken:
            raise SideError(f"{self._name}: no memory")
        if self._name not in self._machine.loaded:
            self._machine.loaded.append(self._name)

    def close(self) -> None:
        if self._name in self._machine.loaded:
            self._machine.loaded.remove(self._name)

    def run(
        self, chains: Chains, pace: Pace, n_rows: int, *, is_streamed: bool
    ) -> tuple[list[MeasuredAnswer], float]:
        machine, requests = self._machine, [r for chain in chains for r in chain]
        job = requests[0].id.split()[0]
        machine.before_job(self._name)
        machine.prompts[f"{self._name}: {requests[0].prompt}"] += 1
        machine.log.append(self._name)
        n_lost = 1 if self._name in machine.broken else 0
        speed = machine.speeds.get(self._name, 1.0) * machine.speeds.get(f"{self._name} {job}", 1.0)
        machine.n_requests.add(len(requests))
        seconds = len(requests) / 4 * machine.job_s / speed
        seconds *= 1 + machine.chance.uniform(-machine.noise, machine.noise)
        machine.now_s += seconds
        self.cpu_s = 2 * machine.cpu_share * seconds
        answers = [
            MeasuredAnswer(r.id, 0.0, 0.1, 0.5, r.n_output - n_lost, r.n_prompt, (), 5, "length")
            for r in requests
        ]
        return answers, seconds


def ran(machine: Machine, *changes: SettingChange, **more: Any) -> Tuner:
    tuner = machine.tuner(*changes, **more)
    tuner.run()
    assert machine.loaded == []
    return tuner


def verdicts(tuner: Tuner) -> list[str]:
    return [tuner.verdict(tried) for tried in tuner.tried]


WIDE, THREAD, OFF = (
    SettingChange({"n_ubatch": 1024}),
    SettingChange({"n_threads": 1}),
    SettingChange({"flash_attn": "off"}),
)
LOSSY = SettingChange({"cache_type_k": "q8_0"}, is_lossy=True)


@pytest.mark.parametrize(
    ("speeds", "noise", "change", "verdict", "advice"),
    [
        ({"n_ubatch=1024": 1.2}, 0.0, WIDE, "faster in decode, mixed, shared", {"n_ubatch": 1024}),
        ({"n_threads=1": 0.7}, 0.0, THREAD, "slower in decode, mixed, shared", {}),
        ({}, 0.0, OFF, "no difference", {}),
        ({"n_ubatch=1024": 1.03}, 0.05, WIDE, "no difference", {}),
        (
            {"n_ubatch=1024 decode": 1.5, "n_ubatch=1024 shared": 0.8},
            0.0,
            WIDE,
            "faster in decode; slower in shared",
            {},
        ),
        (
            {"cache_type_k=q8_0": 1.5},
            0.0,
            LOSSY,
            "faster in decode, mixed, shared; less precise",
            {},
        ),
    ],
    ids=["faster", "slower", "alike", "noise", "one job slower", "less precise"],
)
def test_setting_is_advised_where_it_is_faster_in_every_job(
    speeds: dict[str, float],
    noise: float,
    change: SettingChange,
    verdict: str,
    advice: dict[str, Any],
) -> None:
    tuner = ran(Machine(speeds, noise=noise), change)
    assert (verdicts(tuner), tuner.advice()) == ([verdict], advice)
    assert (tuner.noise("decode") > 0.03) == (noise > 0)
    if advice:
        assert tuner.worth(tuner.tried[0])["mixed"] == Worth(1.2, 0.01)
    n_rounds = tuner.tried[0].n_rounds
    assert n_rounds == 9 if verdict == "no difference" else n_rounds > 9 or "slower" in verdict
    assert ran(Machine(), change, budget_s=80 * JOB_S).tried[0].n_rounds < 9


def test_engines_take_turns_with_requests_that_none_has_seen() -> None:
    machine = Machine()
    tuner = ran(machine, WIDE)
    assert {n for seen, n in machine.prompts.items() if seen.startswith("n_ubatch")} == {1}
    given = tuner.tried[0].n_rounds * len(JOBS)
    assert Counter(machine.prompts.values())[2] == given, "seen by two engines of the same settings"
    rounds = machine.log[-2 * len(JOBS) * tuner.tried[0].n_rounds :]
    firsts = [rounds[i] for i in range(0, len(rounds), 2 * len(JOBS))]
    assert firsts[:4] == ["", "n_ubatch=1024", "", "n_ubatch=1024"]
    assert Counter(rounds) == {"": len(rounds) // 2, "n_ubatch=1024": len(rounds) // 2}


@pytest.mark.parametrize(("job_s", "n_requests"), [(10.0, {4}), (0.3, {4, 16}), (0.01, {4, 400})])
def test_job_of_a_fast_model_has_so_many_requests_that_it_lasts(
    job_s: float, n_requests: set[int]
) -> None:
    machine = Machine()
    machine.job_s = job_s
    tuner = ran(machine, WIDE)
    assert machine.n_requests == n_requests, "few only to warm up, and to see how long they take"
    assert all(t.given_s >= 1.0 for times in tuner.tried[0].times.values() for t in times)


def test_all_that_is_faster_is_measured_together_and_the_best_is_advised() -> None:
    both = "n_ubatch=1024 n_threads=1"
    alone = {"n_ubatch=1024": 1.2, "n_threads=1": 1.1}
    best = {"n_ubatch": 1024, "n_threads": 1}
    tuner = ran(Machine({**alone, both: 1.3}), WIDE, THREAD)
    assert [t.change.settings for t in tuner.tried][-1] == best
    assert tuner.advice() == best
    assert ran(Machine({**alone, both: 1.0}), WIDE, THREAD).advice() == {"n_ubatch": 1024}
    narrow = SettingChange({"n_ubatch": 128})  # each setting has its best value
    speeds = {**alone, "n_ubatch=128": 1.4, "n_ubatch=128 n_threads=1": 1.5}
    tuner = ran(Machine(speeds), WIDE, narrow, THREAD)
    assert tuner.advice() == {"n_ubatch": 128, "n_threads": 1}


@pytest.mark.parametrize("broken", ["start n_ubatch=1024", "n_ubatch=1024"])
def test_change_that_cannot_run_is_refused_and_the_others_go_on(broken: str) -> None:
    machine = Machine({"n_threads=1": 1.2})
    machine.broken = {broken}
    tuner = ran(machine, WIDE, THREAD)
    [refused, faster] = verdicts(tuner)
    assert refused.startswith("refused: ")
    assert faster.startswith("faster")
    assert tuner.advice() == {"n_threads": 1}


@pytest.mark.parametrize("broken", ["start ", ""])
def test_model_that_cannot_run_as_it_is_ends_it(broken: str) -> None:
    machine = Machine()
    machine.broken = {broken}
    with pytest.raises(SideError):
        machine.tuner(WIDE).run()
    assert machine.loaded == []


def test_nothing_begins_after_the_time_and_the_rest_is_named() -> None:
    machine = Machine()
    tuner = ran(machine, WIDE, THREAD, OFF, budget_s=55 * JOB_S)
    assert verdicts(tuner) == ["no difference", "too few rounds to tell"]
    assert tuner.untold == [THREAD, OFF]
    assert tuner.needed_s > 55 * JOB_S
    assert machine.now_s < 60 * JOB_S


def test_interrupted_it_knows_what_it_found_so_far() -> None:
    machine = Machine({"n_ubatch=1024": 1.2})
    tuner = machine.tuner(WIDE, THREAD)

    def interrupt(name: str) -> None:
        if name == "n_threads=1":
            raise KeyboardInterrupt

    machine.before_job = interrupt
    with pytest.raises(KeyboardInterrupt):
        tuner.run()
    assert machine.loaded == []
    assert tuner.advice() == {"n_ubatch": 1024}
    assert tuner.untold == [THREAD]


def test_progress_ends_with_all_rounds_done() -> None:
    seen: list[tuple[int, int]] = []
    said: list[tuple[Mapping[str, Any], str]] = []
    tuner = ran(
        Machine({"n_ubatch=1024": 1.2}),
        WIDE,
        THREAD,
        show=lambda n_done, n_all: seen.append((n_done, n_all)),
        say=lambda settings, verdict: said.append((settings, verdict)),
    )
    assert [n_done for n_done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][0] == seen[-1][1]
    assert [settings for settings, _ in said] == [t.change.settings for t in tuner.tried]


# ---- flash attention ----


@pytest.mark.parametrize(
    ("value", "speed", "is_off"),
    [
        ("off", 1.25, True),
        ("off", 1.0, False),
        ("off", 0.8, False),
        ("on", 1.25, False),
        ("on", 1.0, False),
        ("on", 0.8, True),
    ],
)
def test_flash_attention_is_off_only_where_that_is_faster(
    value: str, speed: float, is_off: bool
) -> None:
    tuner = ran(Machine({f"flash_attn={value}": speed}), SettingChange({"flash_attn": value}))
    found = tuner.attention()
    assert found is not None
    assert found[0] == is_off
    with_over_without = speed if value == "off" else 1 / speed
    for seen in found[1]:
        assert (seen.mixed, seen.alike) == pytest.approx((with_over_without,) * 2)
        assert seen.cpu_s == pytest.approx(seen.wall_s)


@pytest.mark.parametrize(("share", "is_disturbed"), [(0.95, False), (0.5, True)])
def test_other_programs_are_noticed_by_the_time_that_they_take(
    share: float, is_disturbed: bool
) -> None:
    machine = Machine()
    machine.cpu_share = share
    tuner = ran(machine, WIDE)
    assert tuner.cpu_share == pytest.approx(share)
    assert tuner.is_disturbed == is_disturbed


# ---- what is tried ----


def values(found: Sequence[SettingChange], name: str) -> list[Any]:
    return [c.settings[name] for c in found if name in c.settings]


GIVEN = {"kv": "unified", "n_ubatch": 64, "flash_attn": "off", "n_threads": 1, "speculate": "auto"}


@pytest.mark.parametrize(
    ("given", "n_cores", "attention", "is_packed", "tried"),
    [
        ({}, 1, "auto", False, {"flash_attn": ["off"], "n_threads": [], "replicas": []}),
        ({}, 2, "off", True, {"flash_attn": ["on"], "n_threads": [1], "replicas": [2]}),
        ({}, 8, "on", True, {"flash_attn": ["off"], "n_threads": [7, 4], "replicas": [2, 4]}),
        (GIVEN, 4, "off", True, {**{name: [] for name in GIVEN}, "replicas": [2, 4]}),
    ],
)
def test_what_was_not_given_is_tried_by_the_cores_and_the_attention(
    given: dict[str, Any], n_cores: int, attention: str, is_packed: bool, tried: dict[str, Any]
) -> None:
    found = changes_of(given, n_cores, attention, "off", is_packed=is_packed)
    assert {name: values(found, name) for name in tried} == tried
    assert values(found, "repack") == ["llama"] * is_packed


def test_json_tells_every_round() -> None:
    tuner = ran(Machine({"n_ubatch=1024": 1.2}), WIDE)
    said = tuner.as_dict()
    assert said["advice"] == {"n_ubatch": 1024}
    same, wide = said["changes"]
    assert (same["settings"], wide["settings"]) == ({}, {"n_ubatch": 1024})
    assert wide["jobs"]["decode"]["ratios"] == [1.2] * tuner.tried[0].n_rounds
    tuner = Machine().tuner(WIDE)  # without rounds
    assert (tuner.worth(TriedChange(WIDE)), tuner.cpu_share) == ({}, 1.0)
    assert tuner.attention() is None
