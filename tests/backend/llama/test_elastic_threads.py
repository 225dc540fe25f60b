"""How many threads compute while other programs come and go; the kernel and the machine are played."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cbatch.backend.llama.elastic_threads import Cores, ElasticThreads, count_cores


@dataclass
class Machine:
    """Steps on `n_cores`, beside `n_loops` programs that never sleep; `alone_s` by threads is what a step takes."""

    n_cores: int = 2
    n_loops: int = 0
    works: float = 1.0
    """Seconds of one thread that a step takes."""
    now_s: float = 0.0
    idle_s: float = 0.0
    delays_s: dict[str, float] = field(default_factory=dict)
    n_threads: int = 0
    uses: list[int] = field(default_factory=list)
    is_told: bool = True

    def use(self, n: int) -> None:
        self.n_threads = n
        self.uses.append(n)

    def count(self) -> Cores | None:
        return Cores(self.idle_s, dict(self.delays_s)) if self.is_told else None

    def step(self) -> float:
        """Compute one step; a thread that shares its core makes all others wait for it."""
        n_free = self.n_cores - self.n_loops
        has_core = self.n_threads <= n_free
        seconds = 0.01 * self.works / self.n_threads
        if not has_core:
            seconds *= 3 if self.n_threads > 1 else 1.5
        self.now_s += seconds
        n_shared = max(0, self.n_threads - n_free)
        for i in range(self.n_cores):
            self.delays_s[str(i)] = self.delays_s.get(str(i), 0.0) + seconds / 2 * (i < n_shared)
        self.idle_s += max(0, n_free - self.n_threads) * seconds
        return seconds


def run(machine: Machine, threads: ElasticThreads, seconds: float) -> None:
    end_s = machine.now_s + seconds
    while machine.now_s < end_s:
        threads.note("rows", machine.step())


def elastic(machine: Machine) -> ElasticThreads:
    machine.n_threads = machine.n_cores
    return ElasticThreads(
        machine.n_cores, machine.use, clock=lambda: machine.now_s, count=machine.count
    )


def test_alone_all_threads_compute_and_nothing_is_tried() -> None:
    machine = Machine()
    threads = elastic(machine)
    run(machine, threads, 60)
    assert machine.uses == []
    assert threads.n_threads == 2


@pytest.mark.parametrize(("n_cores", "n_loops"), [(2, 1), (4, 1), (8, 3)])
def test_fewer_threads_compute_beside_busy_programs_and_all_afterwards(
    n_cores: int, n_loops: int
) -> None:
    machine = Machine(n_cores)
    threads = elastic(machine)
    run(machine, threads, 2)
    machine.n_loops = n_loops
    run(machine, threads, 10)
    assert threads.n_threads == max(1, n_cores - n_loops)
    machine.n_loops = 0
    run(machine, threads, 2)
    assert threads.n_threads == n_cores


def test_threads_that_wait_but_are_faster_stay() -> None:
    """Where fewer threads are slower still, trials become rare."""

    class Steady(Machine):
        def step(self) -> float:
            seconds = 0.01 / self.n_threads + 0.001
            self.now_s += seconds
            self.delays_s["0"] = self.delays_s.get("0", 0.0) + seconds * 0.3
            return seconds * (1 + 0.2 * (round(self.now_s * 100) % 3))

    machine = Steady()
    threads = elastic(machine)
    run(machine, threads, 120)
    assert threads.n_threads == 2
    assert 2 <= len(machine.uses) <= 2 * 8


def test_nothing_is_tried_where_the_kernel_does_not_tell() -> None:
    machine = Machine(n_loops=1, is_told=False)
    threads = elastic(machine)
    run(machine, threads, 20)
    assert machine.uses == []


def test_steps_of_other_shapes_are_not_taken_for_slow_ones() -> None:
    machine = Machine()
    threads = elastic(machine)
    for works in (1.0, 20.0, 1.0, 60.0):
        machine.works = works
        for _ in range(200):
            threads.note(works, machine.step())
    assert machine.uses == []


def test_kernel_tells_what_threads_have_waited() -> None:
    found = count_cores()
    if found is None:
        pytest.skip("no /proc")
    assert found.idle_s > 0
    assert all(s >= 0 for s in found.delays_s.values())
    assert found.delays_s
