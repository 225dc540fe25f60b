"""Teams of OpenMP's threads: none is left of what only waits."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cbatch.backend.llama.openmp import ShortWaits, short_waits
from cbatch.loading import load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

_TASKS, _MAPS = Path("/proc/self/task"), Path("/proc/self/maps")


def others() -> set[str]:
    """Return the threads that Python did not start: OpenMP's are among them."""
    if "libgomp" not in _MAPS.read_text():
        pytest.skip("llama.cpp does not compute with GNU's OpenMP here")
    own = {str(thread.native_id) for thread in threading.enumerate()}
    return set(os.listdir(_TASKS)) - own


def n_others() -> int:
    """Return how many they are."""
    return len(others())


def test_engine_that_waits_has_no_team(test_model: Path) -> None:
    with load(test_model, parallel=2, ctx_per_seq=128, n_threads=4) as engine:
        n_idle = n_others()
        for _ in range(2):
            engine.run(["Count."], options={"max_tokens": 4}).results()
            while n_others() > n_idle:  # the test's own limit ends it
                time.sleep(0.01)


@pytest.mark.cpu("there is a team")
def test_engine_without_a_thread_leaves_no_team(test_model: Path) -> None:
    with load(test_model, parallel=2, ctx_per_seq=128, n_threads=4, threaded=False) as engine:
        engine.run(["Count."], options={"max_tokens": 4}).results()
        n_computing = n_others()
        while engine.step():
            pass
        assert n_others() <= n_computing - 3  # threads of an earlier test may end meanwhile, too


@pytest.mark.parametrize("is_gone", [False, True])
def test_waits_are_short_while_anybody_wants_it(*, is_gone: bool) -> None:
    shared = short_waits(os.cpu_count() or 1)
    if shared is None:
        pytest.skip("llama.cpp does not compute with GNU's OpenMP here, or a policy is set")
    waits, before = ShortWaits(shared._gnu), others()  # an engine may want it of the shared one
    some, other = (threading.Event() for _ in range(2))  # any two objects
    for whose, is_wanted in ((some, True), (other, True), (some, False)):
        waits.want(whose, 2, is_wanted=is_wanted)
    added = others() - before
    assert added
    if is_gone:
        del whose, other
        waits.want(some, 2, is_wanted=False)
    else:
        waits.want(other, 2, is_wanted=False)
    while added & others():  # the test's own limit ends it
        time.sleep(0.01)


@pytest.mark.parametrize(("n_procs", "n_threads", "n_missing"), [(2, 2, 1), (4, 2, 3), (2, 4, 1)])
def test_as_many_threads_are_added_as_cores_are_left_over(
    n_procs: int, n_threads: int, n_missing: int
) -> None:
    assert ShortWaits(Procs(n_procs)).n_missing(n_threads) == n_missing


@pytest.mark.parametrize(("n_procs", "is_there"), [(2, True), (3, True), (64, False)])
def test_few_threads_of_a_large_machine_add_none(
    n_procs: int, *, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cbatch.backend.llama.openmp._short_waits", lambda: ShortWaits(Procs(n_procs))
    )
    assert (short_waits(2) is not None) == is_there


@dataclass(frozen=True, slots=True)
class Procs:
    """A runtime on a machine with so many cores."""

    n: int

    def omp_get_num_procs(self) -> int:
        return self.n
