"""Answers whose clients read slowly, or not at all, are bounded in sum, and keep no others from being computed."""

from __future__ import annotations

import gc
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from cbatch import BatchResult, Engine
from cbatch.backend.fake import FakeBackend
from cbatch.server.held_answers import HeldAnswer, HeldAnswers
from cbatch.server.http_errors import HttpProblemError
from tests.runtime.backends import GatedBackend
from tests.server.clients import CHAT, COMPLETIONS, PATIENCE_S, USER, fake_app
from tests.server.test_large_bodies import Client
from tests.server.test_vectors import vector_app
from tests.worker.links import engine_over

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette

MIB = 2**20
LARGE: dict[str, Any] = {
    "messages": USER,
    "n": 8,
    "max_tokens": 90,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}
"""Its answer takes about 2.5 MiB."""
SMALL = {"messages": USER, "max_tokens": 2}


class Deaf(Client):
    """Takes nothing of its answer but the status."""

    def __init__(self, path: str, body: Any) -> None:
        super().__init__(path, body)
        self.problem: HttpProblemError | None = None

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            await anyio.sleep_forever()

    async def ask(self, app: Starlette) -> None:
        try:
            await super().ask(app)
        except HttpProblemError as error:
            self.problem = error


async def until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def status_of(app: Starlette, body: Any) -> int:
    client = Client(CHAT, body)
    await client.ask(app)
    status: int = client.sent[0]["status"]
    return status


@pytest.mark.parametrize("make", [Engine, engine_over])
@pytest.mark.parametrize("stream", [False, True])
def test_call_waits_for_no_reader_of_an_answer(make: Callable[..., Engine], stream: bool) -> None:
    async def main(app: Starlette) -> int:
        desk, deaf = app.state.desk, Deaf(CHAT, {**LARGE, "stream": stream})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deaf.ask, app)
            await until(lambda: desk.answers.n_bytes > 2 * MIB and not desk.n_open)
            found = await status_of(app, SMALL)
            assert desk.answers.n_bytes > 2 * MIB
            deaf.left.set()
            await until(lambda: not desk.answers.n_bytes)
            tasks.cancel_scope.cancel()
        return found

    engine = make(GatedBackend(4, 256))
    with fake_app(engine=engine, max_answers_mib=4) as app:
        assert anyio.run(main, app) == 200


@pytest.mark.parametrize("make", [Engine, engine_over])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_answer_is_freed_without_the_collector(
    make: Callable[..., Engine], stream: bool, leaves: bool
) -> None:
    async def main(app: Starlette) -> None:
        client = (Deaf if leaves else Client)(CHAT, {**LARGE, "stream": stream})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.ask, app)
            await until(lambda: bool(client.sent))
            if leaves:
                client.left.set()
        await until(lambda: not any(isinstance(one, BatchResult) for one in gc.get_objects()))

    with fake_app(engine=make(FakeBackend(4, 256))) as app:
        gc.collect()
        gc.disable()
        try:
            anyio.run(main, app)
        finally:
            gc.enable()


@pytest.mark.parametrize("n_characters", [10_000, 30_000])
def test_slow_reader_of_tokens_is_held_to_the_limit(n_characters: int) -> None:
    async def main(app: Starlette) -> None:
        desk = app.state.desk
        deaf = Deaf("/tokenize", {"content": "a" * n_characters, "with_pieces": True})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deaf.ask, app)
            if n_characters == 10_000:
                await until(lambda: desk.answers.n_bytes > 2 * MIB)
            else:  # there is no room
                await until(lambda: deaf.problem is not None or deaf.status == 503)
            tasks.cancel_scope.cancel()
        assert desk.answers.n_bytes == 0

    with fake_app(1, 2**16, max_answers_mib=4) as app:
        anyio.run(main, app)


class Kept:
    """Answers by a clock of the test, and those that were ended."""

    def __init__(self, held: ExitStack) -> None:
        self.now, self.ended = 0.0, list[str]()
        self.answers = HeldAnswers(4, lambda: self.now)
        self._held = held

    def add(self, name: str, n_mib: int, *, is_computed: bool = True) -> HeldAnswer:
        answer = self.answers.held(lambda problem: self.ended.append(name), lambda: is_computed)
        found = self._held.enter_context(answer)
        found.add(n_mib * MIB)
        return found

    async def have_ended(self) -> list[str]:
        await anyio.lowlevel.checkpoint()
        return self.ended


def test_answers_that_grow_leave_room_or_calls_are_refused() -> None:
    async def main() -> None:
        with ExitStack() as held:
            kept = Kept(held)
            kept.add("read", 1)
            kept.add("grows", 2, is_computed=False)
            kept.answers.check(1)
            kept.add("grows too", 1, is_computed=False)
            with pytest.raises(HttpProblemError, match="half of --max-answers-mib 4"):
                kept.answers.check(1)

    anyio.run(main)


@pytest.mark.parametrize(
    ("seconds", "last", "ended"),
    [(60.0, 1, ["slow"]), (1.0, 1, ["large"]), (60.0, 5, ["slow", "last"])],
)
def test_slow_reader_gives_way_before_larger_answers(
    seconds: float, last: int, ended: list[str]
) -> None:
    async def main() -> list[str]:
        with ExitStack() as held:
            kept = Kept(held)
            kept.add("slow", 1)
            kept.now = seconds
            kept.add("large", 3)
            kept.add("last", last, is_computed=False)
            return await kept.have_ended()

    assert anyio.run(main) == ended


@pytest.mark.parametrize("make", [Engine, engine_over])
def test_answers_that_nobody_reads_are_bounded(make: Callable[..., Engine]) -> None:
    backend = GatedBackend(4, 256, hold_at=0)

    async def main(app: Starlette) -> list[Deaf]:
        desk = app.state.desk
        deaf = [Deaf(CHAT, {**LARGE, "stream": stream}) for stream in (False, True) * 4]
        async with anyio.create_task_group() as tasks:
            for client in deaf:
                tasks.start_soon(client.ask, app)
            await until(lambda: desk.n_visits == 8)
            backend.release()
            await until(lambda: not desk.n_open)
            assert 0 < desk.answers.n_bytes <= 4 * MIB
            tasks.cancel_scope.cancel()
        return deaf

    with fake_app(engine=make(backend), max_answers_mib=4) as app:
        deaf = anyio.run(main, app)
        assert not app.state.desk.answers.n_bytes
    told = [str(c.sent) + str(c.problem and c.problem.message) for c in deaf]
    assert sum("--max-answers-mib 4" in one for one in told) >= 5


def test_vectors_that_wait_for_their_client_count() -> None:
    async def main(app: Starlette) -> None:
        desk, deaf = app.state.desk, Deaf("/v1/embeddings", {"input": ["ab"] * 2000})
        with suppress(HttpProblemError):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(deaf.ask, app)
                await until(lambda: len(deaf.sent) > 1)
                assert desk.answers.n_bytes > 2000 * 100
                assert not desk.n_open
                tasks.cancel_scope.cancel()
        assert not desk.answers.n_bytes

    with vector_app() as app:
        anyio.run(main, app)


def test_answer_of_an_event_loop_that_ended_disturbs_no_engine() -> None:
    answers = HeldAnswers(1)
    with ExitStack() as held:

        async def begin() -> HeldAnswer:
            return held.enter_context(answers.held(lambda problem: None, lambda: True))

        anyio.run(begin).add(2 * MIB)
    assert not answers.n_bytes


def test_small_answers_take_little() -> None:
    asked = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True}

    async def main(app: Starlette) -> None:
        desk, deaf = app.state.desk, Deaf(COMPLETIONS, asked)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deaf.ask, app)
            await until(lambda: len(deaf.sent) > 1)
            assert 0 < desk.answers.n_bytes < 2**14
            tasks.cancel_scope.cancel()

    with fake_app() as app:
        anyio.run(main, app)
