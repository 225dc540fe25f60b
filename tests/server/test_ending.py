"""How a server ends: by signals, at the end of its grace, or with its engine."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cbatch.bench import server_process
from cbatch.engine import Engine
from cbatch.errors import EngineClosedError
from cbatch.server import create_app, ending
from cbatch.server.ending import Ending
from cbatch.server.front import Front
from cbatch.server.serving import bound_socket, serve
from tests.files.kill_runs import children_of, lives
from tests.runtime.backends import PATIENCE_S, FailingBackend, in_thread
from tests.server.clients import CHAT, USER, call, error_of, fake_app, wait_until
from tests.worker.links import Launches, MortalBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = {"messages": USER, "max_tokens": 100_000, "ignore_eos": True}
SHORT = {"messages": USER, "max_tokens": 3}


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """Have this process handle signals as before, which an ending leaves to a process that ends."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield
    for number, handler in before:
        signal.signal(number, handler)


# ---- signals ----


class Left:
    """Notes the exit code instead of ending this process."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self._has_come = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self._has_come.set()

    def wait(self) -> bool:
        return self._has_come.wait(PATIENCE_S)


def test_second_signal_takes_the_grace_of_the_first() -> None:
    now, begun = [5.0], []
    end = Ending(30, clock=lambda: now[0])
    with end.serving(lambda: begun.append(now[0]), bool):
        assert (end.has_begun, end.is_over, end.left_s(60)) == (False, False, 60)
        end.begin()
        assert (end.has_begun, end.is_over, end.left_s(60), end.left_s(5)) == (True, False, 30, 5)
        now[0] = 10.0
        end.begin()
        assert end.is_over
        assert 0 < end.left_s(60) < 1  # parts of the server have some time all the same
    assert begun == [5.0, 10.0]


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_signal_before_there_are_calls_breaks_off_the_load(
    number: int, kind: type[BaseException]
) -> None:
    left = Left()
    end = Ending(1000, leave=left)

    def load() -> None:
        with end.on_signals():
            signal.raise_signal(number)

    with pytest.raises(kind) as told:
        load()
    assert end.is_over
    assert getattr(told.value, "code", 0) == 0
    signal.raise_signal(number)  # a second one does not break off the end
    assert left.codes == []


def test_what_does_not_end_in_time_is_given_up_and_then_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "_LAST_S", 0.01)
    left, is_over = Left(), threading.Event()
    with Ending(0, leave=left).on_signals() as end, end.serving(bool, is_over.set):
        os.kill(os.getpid(), signal.SIGTERM)
        assert is_over.wait(PATIENCE_S)
        assert left.wait()
    assert left.codes == [0]
    assert (
        "cbatch: ended by force after SIGTERM, because something still ran"
        in capsys.readouterr().err
    )


def test_end_by_force_does_not_wait_longer_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    now, left = [10.0], Left()
    monkeypatch.setattr(ending, "time", SimpleNamespace(sleep=slept.append))

    def be_late() -> None:
        now[0] += 0.5

    with (
        Ending(0, clock=lambda: now[0], leave=left).on_signals() as end,
        end.serving(be_late, bool),
    ):
        end.begin()
        assert left.wait()
    assert slept == [1.0]


def test_stderr_that_nobody_reads_does_not_delay_the_end_by_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Held(io.StringIO):
        def write(self, text: str) -> int:
            is_read.wait(PATIENCE_S)
            return len(text)

    is_read, has_left = threading.Event(), threading.Event()
    monkeypatch.setattr(ending, "_LAST_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Held())
    left: list[bool] = []

    def leave(code: int) -> None:
        left.append(is_read.is_set())
        has_left.set()

    with Ending(0, leave=leave).on_signals() as end, end.serving(bool, bool):
        end.begin()
        assert has_left.wait(PATIENCE_S / 2)
    is_read.set()
    assert left == [False]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_process_that_does_not_end_behind_a_load_or_block_is_ended(
    monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    monkeypatch.setattr(ending, "_LAST_S", 0.0)
    left, other = Left(), Left()

    def load() -> None:
        with Ending(3600, leave=left).on_signals():
            signal.raise_signal(number)

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        load()
    assert left.wait()
    assert left.codes == [code]
    with Ending(3600, leave=other).on_signals() as end, end.serving(bool, bool):
        end.begin()
    assert other.codes == []
    signal.raise_signal(number)  # takes the grace
    assert other.wait()
    assert other.codes == [0]


@pytest.mark.real
def test_signal_while_python_ends_changes_no_exit_code() -> None:
    code = """if True:
        import os, signal
        from cbatch.server.ending import Ending
        class Last:
            def __del__(self, kill=os.kill, pid=os.getpid()):
                kill(pid, signal.SIGTERM)
        with Ending(0).on_signals() as end, end.serving(bool, bool):
            os.kill(os.getpid(), signal.SIGTERM)
        end.leave_threads(0)
        last = Last()
    """
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


def test_threads_are_left_only_at_the_end_and_only_those_that_run() -> None:
    codes: list[int] = []
    end = Ending(3600, leave=codes.append)
    may_end = threading.Event()
    running = threading.Thread(target=may_end.wait)
    running.start()
    try:
        end.leave_threads(3)
        with end.serving(bool, bool):
            end.begin()
        assert codes == []
        end.leave_threads(3)
        assert codes == [3]
    finally:
        may_end.set()
        running.join()
    end.leave_threads(3)
    assert codes == [3]


# ---- an engine that ends ----


@pytest.mark.real
def test_server_whose_engine_ends_raises_its_error() -> None:
    engine = Engine(FailingBackend(1, 256, error=MemoryError("out of luck")))
    is_ready = threading.Event()
    with engine, bound_socket("127.0.0.1", 0) as address:
        app = create_app(engine)
        url = f"http://127.0.0.1:{address.getsockname()[1]}"
        given: Any = {"ending": Ending(60), "on_ready": is_ready.set}
        ended = in_thread(partial(serve, Front(app), address, **given))
        assert is_ready.wait(PATIENCE_S)
        assert httpx.post(url + CHAT, json=SHORT, timeout=60).status_code == 503
        with pytest.raises(EngineClosedError, match="the engine stopped: out of luck"):
            ended()


# ---- workers that are not there ----


def test_health_tells_an_engine_that_has_failed() -> None:
    engine = Engine(FailingBackend(1, 256, error=MemoryError("out of luck")))
    with fake_app(engine=engine) as app:
        call(app, CHAT, SHORT)
        health = call(app, "/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert "the engine has ended" in health.json()["error"]["message"]


def test_call_waits_while_a_worker_is_replaced_and_health_says_so() -> None:
    launches = Launches(partial(MortalBackend, 2, 256, 256))
    with launches.engine() as engine, fake_app(engine=engine) as app:
        assert call(app, "/health").json() == {"status": "ok", "in_flight": 0}
        assert call(app, "/v1/models").status_code == 200  # sizes are known from now on
        launches.gate.clear()
        launches.links[0].kill()
        wait_until(lambda: engine.outage is not None)
        health = call(app, "/health")
        waiting = in_thread(lambda: call(app, CHAT, SHORT))
        wait_until(lambda: app.state.desk.n_in_flight == 1)
        launches.gate.set()
        assert waiting().status_code == 200
        assert call(app, "/health").status_code == 200
    assert health.status_code == 503
    assert health.json()["status"] == "replacing"
    assert health.json()["error"]["message"] == "a worker died and is being replaced"


@pytest.mark.parametrize(("path", "body"), [(CHAT, SHORT), ("/props", None)])
def test_call_while_no_worker_can_be_started_is_told_when_to_try_again(
    path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.worker.replica.BACK_OFF_S", (0.0, 7200.0))
    launches = Launches(partial(MortalBackend, 2, 256, 256))
    with launches.engine() as engine, fake_app(engine=engine) as app:
        launches.error = EngineClosedError("no memory")
        launches.links[0].kill()
        wait_until(lambda: engine.outage is not None and engine.outage.has_failed)
        answer, health = call(app, path, body), call(app, "/health")
    assert error_of(answer, 503)["code"] == "no_worker"
    assert "no memory" not in answer.text + health.text  # it may name files
    assert 7000 < int(answer.headers["retry-after"]) <= 7200
    assert health.json()["status"] == "replacing"
    assert health.headers["retry-after"] == answer.headers["retry-after"]


# ---- real processes ----


PATIENT = """
from cbatch.__main__ import main
from cbatch.server import ending
ending._LAST_S = 3600.0
main()
"""
"""The program, which is not ended by force before a slow machine is done."""


def serving(model: Path, *arguments: str) -> Any:
    own = ("--threads", "1", "--parallel", "2", "--replicas", "1", "--port", "0")
    return server_process.serving(*own, "-m", str(model), *arguments, program=("-c", PATIENT))


@pytest.mark.real
def test_stopped_worker_holds_up_no_end(test_model: Path) -> None:
    with (
        serving(test_model, "--grace-s", "3600") as (process, where),
        httpx.Client(base_url=where, timeout=60) as client,
        client.stream("POST", CHAT, json={**LONG, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        [worker] = children_of(process.pid)
        os.kill(worker, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(where + "/health").json()["status"] == "stopping")
        process.send_signal(signal.SIGTERM)  # takes the grace
        told = [line for line in lines if line][-1]
        assert process.wait(PATIENCE_S) == 0
        assert json.loads(told.removeprefix("data: "))["error"]["code"] == "shutting_down"
    wait_until(lambda: not lives(worker))


ENDLESS = """
import threading
from cbatch.__main__ import main
threading.Thread(target=threading.Event().wait).start()
main()
"""
"""The program, with a thread that computes for ever for a client that has left."""


@pytest.mark.real
def test_thread_that_never_ends_holds_up_no_end(test_model: Path) -> None:
    own = ["-m", str(test_model), "--port", "0", "--replicas", "1", "--grace-s", "3600"]
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, "serve", *own], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert "serving" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.real
def test_signal_while_the_model_is_loaded_ends_server_and_worker(
    test_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    own = ["-m", str(test_model), "--uds", str(path), "--replicas", "1", "--grace-s", "3600"]
    with subprocess.Popen([sys.executable, "-m", "cbatch.cli", "serve", *own]) as process:
        wait_until(lambda: bool(children_of(process.pid)))
        workers = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    assert not path.exists()
    wait_until(lambda: not any(map(lives, workers)))


@pytest.mark.real
def test_worker_killed_again_and_again_is_replaced_and_all_is_told(test_model: Path) -> None:
    with serving(test_model, "--log-format", "none") as (process, where):
        last: list[int] = []

        def another() -> bool:
            return children_of(process.pid) not in ([], last)

        for _ in range(3):
            wait_until(another)
            last = children_of(process.pid)
            os.kill(last[0], signal.SIGKILL)
        wait_until(lambda: httpx.get(where + "/health").status_code == 200)
        assert httpx.post(where + CHAT, json=SHORT, timeout=60).status_code == 200
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        told = process.stderr.read().splitlines()
    assert told[0].startswith("cbatch: worker 0 died: ended by SIGKILL")
    assert told[-1] == "cbatch: worker 0 is running again"
