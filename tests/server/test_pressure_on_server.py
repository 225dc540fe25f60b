"""Clients that leave, read slowly or are too many, and an engine in a long run: over a socket, or in one loop."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import httpx
import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.bench.experiments.http_load import request
from cbatch.engine_options import ScheduleOptions
from cbatch.response import Timings, Usage
from cbatch.runtime.local import LocalRuntime
from cbatch.runtime.waking import call_soon_here
from cbatch.server import create_app
from cbatch.server.desk import Desk
from cbatch.server.exchange import CallRecord, Exchange, Threads
from cbatch.server.http_errors import HttpProblemError
from cbatch.server.meters import Meters
from cbatch.server.server_settings import ServerSettings
from tests.runtime.backends import GatedBackend, in_thread, n_commands
from tests.server.clients import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PATIENCE_S,
    USER,
    call,
    connected,
    error_of,
    fake_app,
    running,
    scope_of,
    wait_until,
)
from tests.server.test_large_bodies import Client
from tests.worker.links import engine_over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.applications import Starlette

    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions


LONG = {"messages": USER, "max_tokens": 200, "ignore_eos": True, "seed": 1}
SHORT = {**LONG, "max_tokens": 2}
COMMENT = b":\n\n"
"""What a stream has in its silences."""


def gated(
    n_slots: int = 2, *, hold_at: int = 0, make: Callable[[GatedBackend], Engine] = Engine
) -> tuple[GatedBackend, Engine]:
    """An engine that stops before a run until it is let go."""
    backend = GatedBackend(n_slots, 256, hold_at=hold_at)
    return backend, make(backend)


# ---- clients that leave ----


@pytest.mark.real
@pytest.mark.parametrize(
    ("make", "hold_at", "is_streamed"),
    [(Engine, 0, True), (Engine, 3, False), (engine_over, 0, False), (engine_over, 3, True)],
)
def test_client_that_leaves_frees_its_slot(
    is_streamed: bool, hold_at: int, make: Callable[[GatedBackend], Engine]
) -> None:
    backend, engine = gated(1, hold_at=hold_at, make=make)
    with engine, running(create_app(engine)) as server:
        desk = server.app.state.desk
        with connected(server, request(CHAT, {**LONG, "stream": is_streamed})):
            backend.wait_until_held()
            assert desk.n_in_flight == 1
        wait_until(lambda: desk.n_in_flight == 0)
        wait_until(lambda: n_commands(engine) > 0)  # the worker has read the cancel
        backend.release()
        with server.client() as client:
            assert client.post(CHAT, json=SHORT).status_code == 200
        stats = engine.stats()
        # the one that left has no token more than the steps before
        assert stats.n_finished["cancelled"] == 1
        assert stats.n_output_tokens <= hold_at + 1 + 2


@pytest.mark.real
def test_client_that_leaves_while_it_waits_is_never_computed() -> None:
    backend, engine = gated(1)
    with engine, running(create_app(engine)) as server, server.client() as client:
        desk = server.app.state.desk
        with connected(server, request(CHAT, LONG)) as first:
            backend.wait_until_held()
            with connected(server, request(CHAT, {**LONG, "stream": True})):
                wait_until(lambda: desk.n_in_flight == 2)
            wait_until(lambda: desk.n_in_flight == 1)
            first.close()
            wait_until(lambda: desk.n_in_flight == 0)
        backend.release()
        assert client.post(CHAT, json=SHORT).status_code == 200
        assert engine.stats().n_output_tokens <= 3


@pytest.mark.real
def test_client_that_leaves_in_its_body_disturbs_nobody() -> None:
    with fake_app() as app, running(app) as server, server.client() as client:
        connected(server, request(CHAT, LONG)[:-20]).close()
        assert client.post(CHAT, json=SHORT).status_code == 200
        wait_until(lambda: app.state.desk.n_in_flight == 0)


@pytest.mark.real
def test_slow_reader_stops_nobody() -> None:
    with fake_app(2, 4096) as app, running(app) as server, server.client() as client:
        body = {**LONG, "max_tokens": 3000, "stream": True, "return_tokens": True}
        with connected(server, request(CHAT, body), 4096) as slow:
            for _ in range(3):
                assert client.post(CHAT, json=SHORT).status_code == 200
            # the engine has computed all of it, whoever reads
            wait_until(lambda: app.state.desk.engine.stats().n_finished.get("length", 0) >= 4)
            data = b""
            while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                part = slow.recv(2**16)
                assert part
                data += part


# ---- many questions of one call ----

TEXTS = [f"text {i}" for i in range(50)]
LONG_TEXTS = [text + "." * 1000 for text in TEXTS]
MANY: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts": (COMPLETIONS, {"prompt": TEXTS}),
    "biases": (COMPLETIONS, {"prompt": "a", "logit_bias": [[text, 1] for text in LONG_TEXTS]}),
    "pieces": ("/completion", {"prompt": [piece for text in LONG_TEXTS for piece in (text, 5)]}),
    "documents": ("/v1/rerank", {"query": "q", "documents": TEXTS}),
}


@pytest.mark.parametrize("kind", MANY)
def test_client_that_left_has_nothing_more_tokenized(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = MANY[kind]
    monkeypatch.setattr("cbatch.server.desk._TURN_S", 0.0)
    backend, n_tokenized = FakeBackend(2, 1024), 0
    tokenize = backend.vocab.tokenize

    async def main(app: Starlette) -> None:
        asked = [{"type": "http.request", "body": json.dumps(body).encode()}]
        call_soon, has_left = call_soon_here(), anyio.Event()

        def counted(text: str) -> list[int]:
            nonlocal n_tokenized
            n_tokenized += text.count("text")
            call_soon(has_left.set)
            return tokenize(text)

        async def receive() -> Any:
            if asked:
                return asked.pop()
            if not has_left.is_set():  # else it does not wait, as a server's does not
                await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        monkeypatch.setattr(backend.vocab, "tokenize", counted)
        await app(scope_of(path), receive, send)

    with fake_app(engine=Engine(backend), max_queue_tokens=10**6) as app:
        anyio.run(main, app)
        assert app.state.desk.is_idle
    assert 0 < n_tokenized < len(TEXTS) // 2


N_SHORT = 2000
SHORT_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": (COMPLETIONS, {"prompt": "a", "logit_bias": [[f"{i}", 1] for i in range(N_SHORT)]}),
    "pieces": ("/completion", {"prompt": ["a", 5] * N_SHORT, "n_predict": 1}),
    "files": (
        "/infill",
        {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}] * N_SHORT},
    ),
}


@pytest.mark.parametrize("kind", SHORT_TEXTS)
def test_many_short_texts_are_few_questions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    lists_of, tokens_of = LocalRuntime.token_lists_of, LocalRuntime.tokens_of

    def counted_lists(self: LocalRuntime, texts: list[str]) -> list[list[int]]:
        asked.append(len(texts))
        return lists_of(self, texts)

    def counted(self: LocalRuntime, prompt: BatchPrompt, options: RunOptions) -> Sequence[int]:
        asked.append(1)
        return tokens_of(self, prompt, options)

    monkeypatch.setattr(LocalRuntime, "token_lists_of", counted_lists)
    monkeypatch.setattr(LocalRuntime, "tokens_of", counted)
    backend = FakeBackend(2, 3 * N_SHORT)
    backend.fim = {"pre": 1, "suf": 2, "mid": 3}
    with fake_app(engine=Engine(backend)) as app, running(app) as server:
        path, body = SHORT_TEXTS[kind]
        answer = httpx.post(server.url + path, json={"max_tokens": 1, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert sum(asked) >= min(N_SHORT, 3 * N_SHORT // 20)
    assert len(asked) <= N_SHORT // 100


def test_pieces_of_a_prompt_are_limited_as_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.server.prompt_size.MIN_TOKENS", 10)
    with fake_app(2, 16) as app, running(app) as server:
        body = {"prompt": ["a", 5] * 33}
        error = httpx.post(server.url + "/completion", json=body).json()["error"]
    assert "prompt has 66 token ids; at most 64 are read" in error["message"]
    assert error["param"] == "prompt"


def test_call_with_many_prompts_holds_no_thread_that_others_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cbatch.server.desk._CALLS", Threads("few_calls", 1))
    monkeypatch.setattr("cbatch.server.desk._TURN_S", 0.0)
    has_begun, is_answered = threading.Event(), threading.Event()

    def count(engine: Engine, prompt: Any, options: Any) -> int:
        assert not has_begun.is_set() or is_answered.wait(60)
        has_begun.set()
        return 1

    monkeypatch.setattr("cbatch.server.call.checked_tokens", count)
    with fake_app(2, 1024) as app, running(app) as server, server.client() as client:
        many = in_thread(lambda: httpx.post(server.url + COMPLETIONS, json=MANY["prompts"][1]))
        assert has_begun.wait(60)
        assert client.post("/tokenize", json={"content": "a"}).status_code == 200
        is_answered.set()
        assert many().status_code == 200


async def asks_nothing(*message: Any) -> Any:
    await anyio.sleep_forever()


@pytest.mark.parametrize("n_later", range(8))
def test_turn_of_a_call_that_is_ended_goes_to_the_next(n_later: int) -> None:
    """It is ended so many rounds of the event loop after its turn has come."""
    threads = Threads(f"turn_{n_later}", 1)

    async def main() -> float:
        scope = {**scope_of("/"), "state": {"record": CallRecord()}}
        first, limiter = object(), threads.limiter
        await limiter.acquire_on_behalf_of(first)
        exchange, calls = Exchange(scope, asks_nothing, asks_nothing), anyio.CancelScope()

        async def ask() -> None:
            with calls:
                await exchange.in_turn(threads, bool)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            limiter.release_on_behalf_of(first)
            for _ in range(n_later):
                await anyio.lowlevel.checkpoint()
            calls.cancel()
        return limiter.available_tokens

    assert anyio.run(main) == 1


# ---- silence ----


def answered_after(
    app: Starlette, silence: bytes, go: Callable[[], None], path: str = CHAT, **more: Any
) -> str:
    """All of a stream; `go` is called when three parts have told that nothing comes yet."""
    body = json.dumps({**SHORT, "stream": True, **more}).encode()
    parts: list[bytes] = []
    asked = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if not asked:
            await anyio.sleep_forever()
        return asked.pop()

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))
        if sum(silence in part for part in parts) == 3:
            go()

    anyio.run(app, scope_of(path), receive, send)
    return b"".join(parts).decode()


EARLY: dict[str, Any] = {"status_after_s": 0, "keep_alive_s": 0.01}


def test_stream_in_silence_has_its_status_and_comments() -> None:
    backend, engine = gated()
    with engine, fake_app(engine=engine, **EARLY) as app:
        text = answered_after(app, COMMENT, backend.release)
    assert text.startswith(":\n\n:\n\n:\n\n")
    assert text.endswith("data: [DONE]\n\n")


def test_silence_behind_early_text_has_comments() -> None:
    backend, engine = gated(hold_at=4)
    with engine, fake_app(engine=engine, status_after_s=1e6, keep_alive_s=0.01) as app:
        text = answered_after(app, COMMENT, backend.release)
    assert "content" in text.partition(":\n\n")[0]
    assert text.endswith("data: [DONE]\n\n")


def test_message_in_silence_has_its_beginning_and_pings() -> None:
    backend, engine = gated()
    with engine, fake_app(engine=engine, **EARLY) as app:
        text = answered_after(app, b"event: ping", backend.release, MESSAGES)
    frames = [frame for frame in text.split("\n\n") if frame != ":"]
    names = [frame.partition("\n")[0].removeprefix("event: ") for frame in frames]
    assert names[:4] == ["message_start", "ping", "ping", "ping"]
    assert names.count("message_start") == 1
    assert names[-2:] == ["message_stop", ""]


@pytest.mark.parametrize(("path", "settings"), [(MESSAGES, {}), (CHAT, {"max_queue_tokens": 99})])
def test_silence_while_tokens_are_counted_has_comments(
    path: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = threading.Event()

    def count(engine: Engine, prompt: Any, options: Any) -> int:
        assert counts.wait(60)
        return 1

    monkeypatch.setattr("cbatch.server.call.checked_tokens", count)
    monkeypatch.setattr(Desk, "has_queue", lambda desk, n_slots: True)
    with fake_app(**EARLY, **settings) as app:
        text = answered_after(app, COMMENT, counts.set, path)
    assert text.startswith(":\n\n:\n\n:\n\n")
    assert text.endswith(("data: [DONE]\n\n", 'data: {"type":"message_stop"}\n\n'))


def test_error_behind_the_status_is_an_event_and_ends_the_stream() -> None:
    """The prompt is found too long when its turn comes: the first request holds the engine."""
    backend, engine = gated()
    long = [{"role": "user", "content": "x" * 999}]
    with engine, fake_app(engine=engine, **EARLY) as app:
        engine.submit("ab", options={"max_tokens": 2})
        backend.wait_until_held()
        text = answered_after(app, COMMENT, backend.release, messages=long)
    last = text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"
    assert "[DONE]" not in text


# ---- too many ----


def waiting(app: Starlette, n: int, path: str, body: Any) -> list[Callable[[], httpx.Response]]:
    """Calls in flight, one behind the other; what is returned waits for their answers."""
    found: list[Callable[[], httpx.Response]] = []
    desk = app.state.desk
    for _ in range(n):
        n_before = desk.n_in_flight
        found.append(in_thread(lambda: call(app, path, body)))
        wait_until(lambda n_before=n_before: desk.n_in_flight > n_before)  # type: ignore[misc]
    return found


def test_queue_that_is_full_is_told() -> None:
    backend, engine = gated(1)
    with engine, fake_app(engine=engine, max_queue=1) as app:
        app.state.desk.clock = lambda: 100.0  # no time passes that the next might have to wait
        others = waiting(app, 2, CHAT, SHORT)
        refused, health = call(app, CHAT, SHORT), call(app, "/health")
        backend.release()
        assert [answer().status_code for answer in others] == [200, 200]
    assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "1"
    assert health.status_code == 200


@pytest.mark.parametrize("make", [Engine, engine_over])
def test_calls_that_wait_for_room_in_the_engine_hold_no_thread(
    make: Callable[..., Engine],
) -> None:
    backend, n = GatedBackend(1, 256, hold_at=0), 70
    asked = {"prompt": ["ab", "a"], "max_tokens": 2}

    async def main(app: Starlette) -> None:
        desk = app.state.desk
        clients = [Client(COMPLETIONS, asked) for _ in range(n)]
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.ask, app)
            try:
                with anyio.fail_after(PATIENCE_S):
                    while desk.n_visits < n:  # noqa: ASYNC110
                        await anyio.sleep(0.001)
                    for _ in range(10):  # each call has a thread in turn before this has one
                        await desk.in_thread(bool)
            finally:
                backend.release()
        assert {client.sent[0]["status"] for client in clients} == {200}

    engine = make(backend, schedule=ScheduleOptions(max_queue=1))
    with fake_app(engine=engine) as app:
        anyio.run(main, app)


@pytest.mark.parametrize(
    ("slot_s", "n_choices", "seconds"),
    [(None, 1, "7"), (0.001, 1, "1"), (12.0, 1, "6"), (12.0, 5, "30"), (999.0, 1, "60")],
)
def test_refused_client_is_told_when_there_will_be_room(
    slot_s: float | None, n_choices: int, seconds: str
) -> None:
    """Two slots and three places in the queue are taken: for one more, one answer must end."""
    now = [100.0]
    with Engine(FakeBackend(2, 256)) as engine:
        desk = Desk(engine, ServerSettings(max_queue=3), lambda: now[0])
        desk.meters.slot_s = slot_s

        async def main() -> HttpProblemError:
            with desk.visit(5, 2):
                now[0] += 13  # as long again, so one of the two slots is free in 6.5 s
                with pytest.raises(HttpProblemError) as told, desk.visit(n_choices, 2):
                    pass
            return told.value

        problem = anyio.run(main)
    assert (problem.status, problem.headers["retry-after"]) == (429, seconds)


def test_refused_client_is_told_when_there_will_be_room_for_its_prompt() -> None:
    """Of the three that would wait, two thirds of one are too many."""
    with Engine(FakeBackend(1, 256)) as engine:
        desk = Desk(engine, ServerSettings(max_queue_tokens=70))
        desk.meters.slot_s = 12.0

        async def main() -> None:
            with ExitStack() as stack:
                for _ in range(4):
                    desk.count_tokens(stack.enter_context(desk.visit(1, 1)), 30, 1)

        with pytest.raises(HttpProblemError) as told:
            anyio.run(main)
    assert (told.value.status, told.value.headers["retry-after"]) == (429, "8")


def test_open_sequences_are_counted_while_calls_come() -> None:
    """A thread counts them for `/health`."""
    with Engine(FakeBackend(2, 256)) as engine:
        desk = Desk(engine, ServerSettings())

        async def main() -> int:
            with ExitStack() as stack:

                class Joined:
                    """A response while whose sequences are counted another call comes."""

                    @property
                    def n_open(self) -> int:
                        stack.enter_context(desk.visit(1, 2))
                        return 1

                for _ in range(3):
                    stack.enter_context(desk.visit(1, 2)).response = cast("Any", Joined())
                return desk.n_open

        assert anyio.run(main) == 3


def test_time_in_slots_is_a_mean_of_the_newest_answers() -> None:
    meters = Meters()
    for queue_s, total_s in ((5.0, 7.0), (0.0, 9.0)):
        times = Timings(queue_s, None, total_s, None, None)
        result: Any = SimpleNamespace(timings=times, usage=Usage(1, 1))
        for _ in range(99):
            meters.count_answers([result])
        assert meters.slot_s == pytest.approx(total_s - queue_s, rel=0.01)


@pytest.mark.parametrize(
    ("make", "n_more", "is_streamed"),
    [
        *((Engine, n_more, is_streamed) for n_more, is_streamed in ((0, True), (2**16, False))),
        *(
            (engine_over, n_more, is_streamed)
            for n_more, is_streamed in ((0, False), (2**16, True))
        ),
    ],
)
def test_prompt_that_is_too_long_is_told_while_others_wait(
    make: Callable[[GatedBackend], Engine], is_streamed: bool, n_more: int
) -> None:
    backend, engine = gated(1, make=make)
    asked = {"prompt": "x" * (300 + n_more), "max_tokens": 2, "stream": is_streamed}
    with engine, fake_app(engine=engine) as app:
        others = waiting(app, 3, CHAT, {**SHORT, "max_tokens": 40, "ignore_eos": True})
        backend.wait_until_held()
        if make is engine_over:  # a worker tells it after the step in flight
            backend.step_when_asked()
        error = error_of(call(app, COMPLETIONS, asked), 400)
        backend.release()
        assert [answer().status_code for answer in others] == [200] * 3
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (300 + n_more, 256)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_queue_with_too_many_prompt_tokens_is_told(is_streamed: bool) -> None:
    backend, engine = gated(1)
    asked = {"prompt": "x" * 30, "max_tokens": 2, "stream": is_streamed}
    with engine, fake_app(engine=engine, max_queue_tokens=70) as app:
        desk = app.state.desk
        desk.clock = lambda: 100.0  # no time passes that the next might have to wait
        others = waiting(app, 3, COMPLETIONS, asked)  # the first has the slot
        wait_until(lambda: desk.n_queued_tokens(1) == 60)
        refused = call(app, COMPLETIONS, asked)
        others += waiting(app, 1, COMPLETIONS, {**asked, "prompt": "x"})
        wait_until(lambda: desk.n_queued_tokens(1) == 61)
        backend.release()
        assert [answer().status_code for answer in others] == [200] * 4
    error = error_of(refused, 429)
    assert error["code"] == "rate_limit_exceeded"
    assert "60 prompt tokens wait already, of at most 70" in error["message"]
    assert refused.headers["retry-after"] == "1"


def test_lone_call_is_answered_whatever_its_prompts() -> None:
    with fake_app(1, max_queue_tokens=0, max_queue=0) as app:
        asked = {"prompt": ["x" * 30] * 5, "max_tokens": 2}
        assert call(app, COMPLETIONS, asked).status_code == 200


def test_call_of_too_many_answers_is_refused() -> None:
    with fake_app(max_choices=3) as app:
        asked = {"prompt": ["a", "b"], "n": 2}
        assert error_of(call(app, COMPLETIONS, asked), 400)["param"] == "prompt"


# ---- health ----


def test_health_tells_an_engine_that_does_not_get_on() -> None:
    backend, engine = gated(1)
    with engine, fake_app(engine=engine, stall_s=30) as app:
        desk = app.state.desk
        now = [desk.clock()]
        desk.clock = desk.pulse.clock = lambda: now[0]
        response = engine.submit("ab", options={"max_tokens": 2})
        backend.wait_until_held()
        assert call(app, "/health").status_code == 200
        now[0] += 29
        assert call(app, "/health").status_code == 200
        now[0] += 2
        answer = call(app, "/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "unavailable_error"
        backend.release()
        response.result()
        wait_until(lambda: not desk.pulse.is_asking)
        assert call(app, "/health").status_code == 200


# ---- the end ----


@pytest.mark.real
def test_server_that_drains_finishes_what_it_has() -> None:
    backend, engine = gated(1)
    with (
        engine,
        running(create_app(engine), grace_s=60) as server,
        server.client() as client,
        connected(server, request(CHAT, {**SHORT, "stream": True})) as stream,
    ):
        backend.wait_until_held()
        server.ending.begin()
        assert error_of(client.post(CHAT, json=SHORT), 503)["code"] == "shutting_down"
        assert client.get("/health").status_code == 503
        backend.release()
        data = b""
        while b"[DONE]" not in data:
            part = stream.recv(2**16)
            assert part
            data += part


@pytest.mark.real
@pytest.mark.parametrize("is_streamed", [False, True])
def test_call_at_the_end_of_the_grace_is_told(is_streamed: bool) -> None:
    backend, engine = gated(1, hold_at=3)
    with engine, running(create_app(engine), grace_s=0) as server:
        with connected(server, request(CHAT, {**LONG, "stream": is_streamed})) as one:
            backend.wait_until_held()
            data = one.recv(2**16) if is_streamed else b""
            server.ending.begin()
            while part := one.recv(2**16):
                data += part
        backend.release()
    assert b'"code":"shutting_down"' in data
    assert data.startswith(b"HTTP/1.1 200" if is_streamed else b"HTTP/1.1 503")
    assert b"[DONE]" not in data
