"""Engines on fake backends over one folder of cells, asked by threads, by hand, or in an event loop."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from cbatch.backend.fake import FakeBackend
from cbatch.cache.store import CacheStore
from cbatch.core.plan import Binding, KvCapabilities, Slot
from cbatch.core.span import ANYWHERE, PromptCuts
from cbatch.engine_options import ScheduleOptions
from cbatch.messages import BatchPrompt
from cbatch.options import Sampling
from cbatch.response import BatchError
from tests.kinds import engine_on
from tests.oracle.fake_streams import stream_alone
from tests.runtime.backends import PATIENCE_S, backend_of, in_thread, n_commands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cbatch.core.plan import StepPlan
    from cbatch.engine import Engine
    from cbatch.options import AdapterSet
    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.batch_response import BatchResponse
    from tests.runtime.backends import GatedBackend

T = TypeVar("T")

DEFAULTS = {"temperature": 0, "ignore_eos": True, "seed": 1, "max_tokens": 6}
ENDLESS = 10**6
"""A window that nobody fills."""


def text_of(n: int, start: int = 0) -> list[int]:
    """A prompt of `n` tokens; those of another start have nothing in common with it."""
    return [(7 * i + start) % 256 for i in range(n)]


def item(tokens: Sequence[int], id: str | None = None, **options: Any) -> BatchPrompt:
    return BatchPrompt(tokens=tokens, id=id, options=options)


def expected(
    tokens: Sequence[int], n: int = 6, *, seed: int = 1, adapters: AdapterSet = ()
) -> tuple[int, ...]:
    """What a prompt gives with nobody beside it and nothing kept."""
    binding = Binding(Slot(0), len(tokens), Sampling(seed=seed), (), tuple(tokens))
    return tuple(stream_alone(FakeBackend(1), tokens, binding, n, adapters))


def can_all(n_cells: int) -> KvCapabilities:
    """Partitioned memory that can do everything; a saved cell takes 1 KiB."""
    return KvCapabilities(
        "partitioned",
        n_cells,
        can_save=True,
        can_copy=True,
        can_shift=True,
        saved_bytes_per_cell=1024,
    )


@dataclass(eq=False)
class Place:
    """Engines over one folder of cells, all asked in the same way: waited for, by hand, or in an event loop."""

    folder: Path
    way: str = "threaded"
    made: list[Engine] = field(default_factory=list)

    def engine(
        self,
        n_slots: int = 4,
        n_window: int = 256,
        *,
        memory: KvCapabilities | None = None,
        cuts: PromptCuts = ANYWHERE,
        adapters: tuple[str, ...] = (),
        folder: Path | None = None,
        kind: type[FakeBackend] = FakeBackend,
        n_batch: int = 64,
        schedule: dict[str, Any] | None = None,
        **given: Any,
    ) -> Engine:
        memory = memory or can_all(n_slots * n_window)
        backend = kind(n_slots, n_window, n_batch, memory=memory, **given)
        backend.cuts, backend.adapters = cuts, adapters
        engine = engine_on(
            backend,
            options=DEFAULTS,
            schedule=ScheduleOptions(**(schedule or {})),
            threaded=self.way != "by hand",
            cache_dir=folder or self.folder,
        )
        self.made.append(engine)
        return engine

    def results(self, response: BatchResponse) -> list[BatchResult]:
        """Wait in this place's way; failed items are in place."""
        if self.way != "async":
            return response.results(timeout=PATIENCE_S, return_errors=True)

        async def gather() -> list[BatchResult]:
            with anyio.fail_after(PATIENCE_S):
                try:
                    return await response
                except BatchError as error:
                    return error.results

        return anyio.run(gather)

    def result(self, engine: Engine, tokens: Sequence[int], **options: Any) -> BatchResult:
        """Ask for one answer."""
        [result] = self.results(engine.submit(item(tokens, **options)))
        return result

    def keys(self, folder: Path | None = None) -> list[str]:
        return sorted(file.key for file in CacheStore(folder or self.folder, 2**40).files())

    def file(self) -> Path:
        """The only file there is."""
        [path] = self.folder.glob("*.cells")
        return path


@contextmanager
def place_of(folder: Path, way: str) -> Iterator[Place]:
    """Engines over a folder, closed in the end."""
    made = Place(folder, way)
    yield made
    for engine in made.made:
        engine.close()


def read_all(place: Place, response: BatchResponse) -> list[BatchOutputChunk]:
    """Read every chunk in the place's way."""
    if place.way != "async":
        return list(response)

    async def read() -> list[BatchOutputChunk]:
        return [chunk async for chunk in response]

    return anyio.run(read)


def expects_little(place: Place, engine: Engine) -> None:
    """Let an engine see that answers are short, so that it fills a pool with too many."""
    backend = backend_of(engine, FakeBackend)
    items = [item([i], max_tokens=100, stop_token_ids=range(320)) for i in range(200)]
    place.results(engine.run(items))
    engine.reset_stats()
    backend.plans.clear()


def wait_until(is_so: Callable[[], object]) -> None:
    """Let other threads and processes run until it is so; fails rather than hangs."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0)


def ask_held(engine: Engine, backend: GatedBackend, ask: Callable[[], T]) -> T:
    """Ask something of an engine whose run is held, and let it go on when it knows; return the answer.

    Whoever else hurries it meanwhile changes nothing.
    """
    n_before = n_commands(engine)
    wait = in_thread(ask)
    wait_until(lambda: n_commands(engine) > n_before)
    backend.release()
    answer: T = wait()
    return answer


def steps(engine: Engine, n: int) -> None:
    for _ in range(n):
        engine.step()


def plans_of(engine: Engine) -> list[StepPlan]:
    return backend_of(engine, FakeBackend).plans


_KEPT: list[object] = []


def first_chunk(response: BatchResponse) -> BatchOutputChunk:
    """Wait for the first chunk, and do not leave: that would cancel the batch."""
    chunks = iter(response)
    _KEPT.append(chunks)
    return next(chunks)
