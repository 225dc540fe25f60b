"""Workers in threads of the test's own process, on any backend; and engines over them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from cbatch.backend.fake import FakeVocab
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.runtime.local import LocalRuntime
from cbatch.worker.client import Workers
from cbatch.worker.framing import read_frames
from cbatch.worker.protocol_commands import Hello, first_line
from cbatch.worker.service import read_first, read_hello, serve
from cbatch.worker.wire import VERSION
from tests.runtime.backends import PATIENCE_S, GatedBackend
from tests.worker.started import RUNTIMES

if TYPE_CHECKING:
    from cbatch.backend import Backend
    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.errors import CBatchError

MakeRuntime = Callable[[], LocalRuntime]


class ThreadLink:
    """A worker in a thread, spoken to by pipes."""

    def __init__(self, make: MakeRuntime, *, is_silent: bool = False, **hello: Any) -> None:
        """Start one; a silent one never says that it is ready."""
        in_read, self._in_write = os.pipe()
        out_read, self._out_write = os.pipe()
        self._source, self._output = open(in_read, "rb"), open(out_read, "rb")  # noqa: SIM115
        self._is_closed, self._is_ended, self._how = False, False, ""
        self.has_stopped = False
        """Whether it seems to be stopped by a signal."""
        self._closing = threading.Lock()
        self.runtime = make()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        said = Hello(
            **{"cbatch": VERSION, "frames": "msgpack", "parts": True, "log_level": 100, **hello}
        )
        self._thread.start()
        if not is_silent:
            self.send(first_line(said))

    def _serve(self) -> None:
        if first := read_first(self._source):
            serve(self.runtime, read_hello(first), self._source, self._out_write)
        self.runtime.close()
        self._leave()

    def _leave(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._out_write)

    def send(self, message: bytes) -> None:
        data = memoryview(message)
        while data:
            data = data[os.write(self._in_write, data) :]

    def frames(self) -> Iterator[bytes]:
        return read_frames(self._output)

    def say(self, data: bytes) -> None:
        """Have the client read these bytes behind the frames so far."""
        os.write(self._out_write, data)

    def is_stopped(self) -> bool:
        return self.has_stopped

    def kill(self, how: str = "killed") -> None:
        """End the worker as a signal does: nothing more comes from it, and it reads nothing more."""
        with self._closing:
            if self._is_closed or self._is_ended or self._how:
                return
            self._how = how
            nobody, broken = os.pipe()
            os.close(nobody)
            # not closed: the numbers must not be those of another pipe while its threads use them
            os.dup2(broken, self._out_write)
            os.dup2(broken, self._in_write)
            os.close(broken)

    def end(self) -> str:
        with self._closing:
            if not self._is_ended:  # by then the number may be that of another file
                self._is_ended = True
                os.close(self._in_write)
        self._thread.join()
        self._source.close()
        self._output.close()
        return self._how


class MortalBackend(GatedBackend):
    """Kills its worker where a step computes a token of `poison`, or a prompt has `poison_text`, or in run `die_at`."""

    def __init__(
        self,
        *sizes: int,
        poison: int = -1,
        poison_text: str = "",
        die_at: int | None = None,
        **given: Any,
    ) -> None:
        super().__init__(*sizes, **given)
        self.die_at = die_at
        self.may_die = threading.Event()
        self.may_die.set()
        self.die: Callable[[str], object] = print
        self.poison = poison
        self.vocab = MortalVocab(self, poison_text) if poison_text else self.vocab

    def run(self, plan: StepPlan) -> StepResult:
        is_hit = any(self.poison in chunk.inputs for chunk in plan.spans)
        if is_hit or self.n_runs == self.die_at:
            assert self.may_die.wait(PATIENCE_S)
            self.die("ended by SIGABRT: GGML_ASSERT(token != poison) failed")
            raise RuntimeError("dead")
        return super().run(plan)


class MortalVocab(FakeVocab):
    """Kills its worker where a prompt has a text."""

    def __init__(self, backend: MortalBackend, poison: str) -> None:
        super().__init__(backend.vocab.n_vocab)
        self._backend, self._poison = backend, poison

    def tokenize(self, text: str) -> list[int]:
        if self._poison in text:
            self._backend.die("ended by SIGSEGV")
        return super().tokenize(text)


class Launches:
    """Starts workers in threads, each on a backend of its own, and keeps them; called instead of starting a process."""

    def __init__(self, make: Callable[[], MortalBackend]) -> None:
        self.make = make
        self.links: list[ThreadLink] = []
        self.backends: list[MortalBackend] = []
        self.error: CBatchError | None = None
        """Raised by every later start."""
        self.n_failed = 0
        """Starts that have raised it."""
        self._n_to_fail: float = math.inf
        self.is_silent = False
        """Whether later workers never say that they are ready."""
        self._started = threading.Condition()
        self.gate = threading.Event()
        """Every later start waits for it."""
        self.gate.set()

    def __call__(self) -> ThreadLink:
        if self.links:
            assert self.gate.wait(PATIENCE_S)
        with self._started:
            if self.error is not None and self._n_to_fail > 0:
                self._n_to_fail -= 1
                self.n_failed += 1
                raise self.error
        backend = self.make()
        make = partial(LocalRuntime, backend, ScheduleOptions())
        link = ThreadLink(make, is_silent=self.is_silent)
        backend.die = link.kill
        with self._started:
            self.links.append(link)
            self.backends.append(backend)
            self._started.notify_all()
        return link

    def fail_next(self, n: int, error: CBatchError) -> None:
        """Have the next `n` starts raise an error."""
        self._n_to_fail, self.error = n, error

    def wait_for(self, n: int) -> None:
        """Wait until so many workers were started."""
        with self._started:
            assert self._started.wait_for(lambda: len(self.links) >= n, PATIENCE_S)

    def engine(self, n: int = 1, **more: Any) -> Engine:
        """An engine over `n` such workers."""
        return Engine(opener=lambda _: Workers([self] * n, can_replace=True), **more)


def workers_over(*make: MakeRuntime, can_replace: bool = False) -> Workers:
    """A client of workers in threads, one for each factory of a runtime."""
    made: list[LocalRuntime] = []

    def launch(make: MakeRuntime) -> ThreadLink:
        link = ThreadLink(make)
        made.append(link.runtime)
        return link

    workers = Workers([partial(launch, m) for m in make], can_replace=can_replace)
    RUNTIMES[workers] = made
    return workers


def engine_over(*backends: Backend, schedule: ScheduleOptions | None = None, **more: Any) -> Engine:
    """An engine whose workers compute on these backends, one each."""

    made = [partial(LocalRuntime, backend, schedule or ScheduleOptions()) for backend in backends]

    return Engine(opener=lambda _: workers_over(*made), **more)
