"""Fake backends that stop where a test wants them to, and the engines around them."""

from __future__ import annotations

import copy
import signal
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.cache.store import NoStore
from cbatch.runtime.loop import Loop
from cbatch.runtime.prompts import PromptLanes, PromptTokenizer, tokenize
from cbatch.runtime.text_room import Texts
from cbatch.support.logs import Log
from cbatch.worker.client import Workers
from tests.worker.started import RUNTIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.engine import Engine
    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse
    from cbatch.runtime.interface import Target
    from cbatch.runtime.mailbox import Mailbox
    from cbatch.stats import EngineStats
    from tests.helpers import Rig

    Clock = Callable[[], float]

T = TypeVar("T")

PATIENCE_S = 60.0
"""After this a test that hangs fails; no test waits for it to pass."""


PROMPT_THREADS = ("cbatch-prompts", "cbatch-long-prompts")


class GatedBackend(FakeBackend):
    """Does one step a run, and stops before run number `hold_at` until it is let go."""

    def __init__(self, *sizes: int, hold_at: int | None = None, **given: Any) -> None:
        super().__init__(*sizes, **given)
        self.hold_at = hold_at
        self.n_runs = 0
        self.n_interrupts = 0
        self._held, self._go = threading.Event(), threading.Event()
        self._is_asked: Callable[[], bool] = bool
        self._is_stepping = False

    def run(self, plan: StepPlan) -> StepResult:
        if plan.spans:
            if self.n_runs == self.hold_at:
                self._held.set()
                assert self._go.wait(PATIENCE_S)
            self.n_runs += 1
        super().interrupt()
        return super().run(plan)

    def interrupt(self) -> None:
        super().interrupt()
        if self._is_stepping:
            held, self._go = self._go, threading.Event()
            self.hold_at = self.n_runs + 1
            held.set()
        elif threading.current_thread().name in PROMPT_THREADS:
            return  # it comes at any time, and no command waits for it
        elif self._is_asked():
            self._go.set()
        self.n_interrupts += 1  # at last: one that is counted opens no gate later

    def __deepcopy__(self, memo: dict[int, Any]) -> GatedBackend:
        """Return one like it, which stops and goes on together with it."""
        memo.update((id(event), event) for event in (self._held, self._go))
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    @property
    def is_held(self) -> bool:
        return self._held.is_set()

    def wait_until_held(self) -> None:
        assert self._held.wait(PATIENCE_S)

    def release(self) -> None:
        if self._is_stepping:
            self._is_stepping, self.hold_at = False, None
        self._go.set()

    def release_when_asked(self, is_asked: Callable[[], bool] = lambda: True) -> None:
        """Go on when somebody interrupts and it is so: a command waits then."""
        self._is_asked = is_asked

    def step_when_asked(self) -> None:
        """Whenever somebody interrupts, do the run that is held, and stop before the next."""
        self._is_stepping = True


def loop_over(backend: FakeBackend, rig: Rig, clock: Clock) -> Loop:
    """Return a loop without files of cells; it has no thread before it is started."""
    store = NoStore("no folder")
    prompts = PromptTokenizer(partial(tokenize, backend.vocab), backend.n_window)
    lanes = PromptLanes(prompts, 0, is_threaded=False)
    return Loop(
        backend,
        rig.scheduler,
        rig.stats,
        clock,
        store,
        lanes,
        rig.wants,
        is_threaded=False,
    )


def no_texts(loop: Loop, rig: Rig) -> Texts:
    """Return a room for texts that has none."""
    return Texts(rig.backend, loop.routes, rig.stats, is_threaded=False)


@contextmanager
def together(n: int) -> Iterator[None]:
    """Have the first `n` prompts become tokens for the thread that computes at once, however long each takes."""
    tell, told, is_told = PromptLanes._tell, list[Any](), threading.Lock()

    def gather(lanes: PromptLanes, found: Sequence[Any]) -> None:
        with is_told:
            told.extend(found)
            if len(told) >= n:
                tell(lanes, [*told])
                told.clear()
                m.setattr(PromptLanes, "_tell", tell)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(PromptLanes, "_tell", gather)
        yield


class Cancelled:
    """Stands for requests in flight that are cancelled at once."""

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def check_wait(self) -> None:
        pass

    def watch(self, target: Target) -> None:
        pass

    def cancel_batch(self, target: Target) -> int:
        return self.n

    def cancel_batch_soon(self, target: Target) -> None:
        pass

    def cancel_waiting_soon(self, target: Target) -> None:
        pass


class CtrlC:
    """Presses Ctrl-C for the thread that made it, which has to be the main one."""

    def __init__(self) -> None:
        self._ident, self._is_seen = threading.get_ident(), threading.Event()
        signal.signal(signal.SIGINT, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._is_seen.is_set():
            self._is_seen.set()
            raise KeyboardInterrupt

    def press(self) -> None:
        """Return when it was seen: a signal may strike just before a lock is waited for, and is then not noticed."""
        signal.pthread_kill(self._ident, signal.SIGINT)
        while not self._is_seen.wait(0.05):
            signal.pthread_kill(self._ident, signal.SIGINT)


class FailingBackend(FakeBackend):
    """Raises `error` in run number `fail_at`, before or after its work, and works otherwise."""

    def __init__(
        self, *sizes: int, error: BaseException, fail_at: int = 0, is_late: bool = False
    ) -> None:
        super().__init__(*sizes)
        self.error, self.fail_at, self.is_late = error, fail_at, is_late
        self.n_runs = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.n_runs += 1
        if self.n_runs != self.fail_at + 1:
            self.interrupt()
            return super().run(plan)
        if self.is_late:
            super().run(plan)
        raise self.error


class PokedBackend(FakeBackend):
    """Calls `poke` with the name of a place, in the middle of the work of the thread that computes."""

    poke: Callable[[str], object] = staticmethod(lambda _: None)

    def __init__(self, *sizes: int, **given: Any) -> None:
        super().__init__(*sizes, **given)
        tokenize, llama = self.vocab.tokenize, Log("cbatch.llama")

        def poked(text: str) -> list[int]:
            self.poke("tokenize")
            return tokenize(text)

        self.vocab.tokenize = poked  # type: ignore[method-assign]
        self._llama = llama

    def run(self, plan: StepPlan) -> StepResult:
        if plan.spans:
            self.poke("run")
            self._llama.warn("a warning")
        return super().run(plan)


def in_thread(work: Callable[[], object]) -> Callable[[], Any]:
    """Start `work` in a thread; return what waits for its value, or raises what it raised."""
    found: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the thread hangs"
        if errors:
            raise errors[0]
        return found[0]

    return wait


def runtime_of(engine: Engine) -> Any:
    """What computes the requests of an engine."""
    return engine._runtime


def parts_of(engine: Engine) -> Any:
    """What an engine is made of, or its only worker; read where no turn of its thread may be waited for."""
    runtime = runtime_of(engine)
    if not isinstance(runtime, Workers):
        return runtime
    [only] = RUNTIMES[runtime]
    return only


def loop_of(engine: Engine) -> Loop:
    """The loop of an engine."""
    loop: Loop = parts_of(engine).loop
    return loop


def owner_of(engine: Engine) -> threading.Thread:
    thread = loop_of(engine)._thread
    assert thread is not None
    return thread


def backend_of(engine: Engine, kind: type[T]) -> T:
    """What an engine computes on."""
    backend = parts_of(engine).backend
    assert isinstance(backend, kind)
    return backend


def stats_of(engine: Engine) -> EngineStats:
    """The statistics of an engine, read where no turn of its thread may be waited for."""
    stats: EngineStats = parts_of(engine)._stats
    return stats


def batcher_of(engine: Engine) -> MultiRequestBatcher:
    """The requests of an engine, read where no turn of its thread may be waited for."""
    batcher: MultiRequestBatcher = parts_of(engine).batcher
    return batcher


def books_of(engine: Engine) -> MultiRequestBatcher:
    """What an engine knows of slots and cells."""
    return batcher_of(engine)


def find_pool_full(engine: Engine) -> None:
    """Have the next step make room, as after a step that found no free cell."""
    loop_of(engine)._scheduler._is_pool_full = True


def is_threaded(engine: Engine) -> bool:
    return bool(parts_of(engine).is_threaded)


def n_commands(engine: Engine) -> int:
    """How many commands wait for the thread that computes."""
    return n_commands_of(loop_of(engine))


def n_commands_of(loop: Loop) -> int:
    return len(loop._commands)


def mailbox_of(response: BatchResponse) -> Mailbox:
    """What an engine's thread delivers to."""
    return response._mailbox


def ids_in_flight(engine: Engine) -> list[str]:
    return [*loop_of(engine).routes]


def check_balance(engine: Engine) -> None:
    """Fail unless the books of slots and cells balance."""
    assert not in_owner(engine, batcher_of(engine).imbalance)


def in_owner(engine: Engine, work: Callable[[], T]) -> T:
    """What `work` returns to the thread that computes, which does it between two runs."""
    return loop_of(engine).call(work)


def ids_outside(engine: Engine) -> list[str]:
    """The ids of requests that wait for room in the queue."""
    return [*parts_of(engine).orders._outside]


def is_room_awaited(engine: Engine) -> bool:
    """Whether a thread sleeps until there is room in the queue."""
    return len(loop_of(engine).waiters) > 0


def all_results(response: BatchResponse) -> list[BatchResult]:
    """The results, failed ones in place; fails rather than hangs."""
    return response.results(timeout=PATIENCE_S, return_errors=True)


def streams(response: BatchResponse) -> list[tuple[str, tuple[int, ...]]]:
    """What each item gave: why it ended and its tokens."""
    return [(r.finish_reason, r.token_ids) for r in all_results(response)]


def connections_of(engine: Engine) -> list[Any]:
    """The workers of an engine that has its requests computed in others, those that are ready."""
    return [*runtime_of(engine).pool.ready]
