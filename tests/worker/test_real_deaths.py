"""Worker processes that die, on the model that ships: what is told, what is lost, and who goes on."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cbatch
from cbatch.errors import EngineError, ModelLoadError, PromptTooLongError, WorkerDiedError
from cbatch.messages import BatchPrompt
from cbatch.worker.host import DEBUG
from cbatch.worker.process import ProcessLink
from cbatch.worker.protocol_commands import Abort, Hello
from cbatch.worker.wire import VERSION
from tests.files.kill_runs import children_of, lives
from tests.places import wait_until
from tests.runtime.backends import PATIENCE_S, all_results, connections_of

pytestmark = [pytest.mark.real, pytest.mark.skipif(sys.platform == "win32", reason="needs signals")]

LONG = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}


def load(model: Path, n: int = 1) -> cbatch.Engine:
    return cbatch.load(model, parallel=4, ctx_per_seq=256, replicas=n)


def pids_of(engine: cbatch.Engine) -> list[int]:
    return [connection.link.pid for connection in connections_of(engine)]


def prompts(n: int) -> list[BatchPrompt]:
    return [BatchPrompt(prompt=f"question {i}", id=f"r{i}") for i in range(n)]


def test_abort_fails_one_request_by_name_and_the_next_is_answered(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DEBUG, "1")
    with load(test_model) as engine, caplog.at_level(logging.WARNING, "cbatch"):
        # it pauses, so it cannot end before it is cut off
        response = engine.run(prompts(1), options={**LONG, "pause_every": 4})
        chunks = iter(response)
        got = [next(chunks)]
        connections_of(engine)[0].tell(Abort())
        got += chunks
        with pytest.raises(WorkerDiedError) as told:
            response.result()
        [result] = all_results(response)
        assert "ended by SIGABRT" in told.value.cause
        assert "GGML_ASSERT(device) failed" in told.value.cause
        assert result.text == "".join(chunk.text for chunk in got)
        assert engine.submit("hello", options={"max_tokens": 3}).result().error is None
    warnings = [r.getMessage() for r in caplog.records if "died" in r.getMessage()]
    assert len(warnings) == 1
    assert "GGML_ASSERT(device) failed" in warnings[0]
    assert "\n" not in warnings[0]


def test_worker_is_started_and_replaced_where_its_folder_is_gone(
    test_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with load(test_model) as engine:
        [pid] = pids_of(engine)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pids_of(engine) not in ([], [pid]))
        assert engine.submit("hello", options={"max_tokens": 3}).result().error is None


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ((), "killed by the process that started it"),
        (("stopped for long",), "stopped for long"),
        (None, "ended by SIGKILL, which the system"),
    ],
)
def test_end_of_a_worker_says_why_it_was_killed_from_here(
    tmp_path: Path, why: tuple[str, ...] | None, told: str
) -> None:
    link = ProcessLink(Hello(cbatch=VERSION), str(tmp_path))
    if why is None:
        os.kill(link.pid, signal.SIGKILL)
    else:
        link.kill(*why)
    assert link.end().startswith(told)


def test_killed_worker_costs_no_answer_where_items_are_asked_again(test_model: Path) -> None:
    with load(test_model) as engine:
        with pytest.raises(cbatch.ConfigError, match="op must be one of"):
            connections_of(engine)[0].call(Abort()).wait()  # is no command unless asked for
        found: list[set[tuple[str, tuple[int, ...]]]] = []
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, None):
            [pid] = pids_of(engine)
            done = engine.run(prompts(12), options=LONG, ask_again=True).as_completed()
            first = next(done)
            if number is not None:
                os.kill(pid, number)
            found.append({(r.id, r.token_ids) for r in (first, *done)})
            assert (pids_of(engine) == [pid]) == (number is None)
    assert len(found[0]) == 12
    assert found[1:] == found[:-1]


def test_stopped_worker_holds_up_no_other_and_is_replaced_when_killed(test_model: Path) -> None:
    with load(test_model, 2) as engine:
        stopped = pids_of(engine)[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            # long ones do not fit into a slot, and several of them not into a pipe
            texts = [f"question {i}" if i % 2 else "far " * 10_000 for i in range(60)]
            items = [BatchPrompt(prompt=text, id=f"r{i}") for i, text in enumerate(texts)]
            done = engine.run(iter(items), options={"max_tokens": 1}, ask_again=True).as_completed()
            found = [next(done) for _ in range(30)]
        finally:
            os.kill(stopped, signal.SIGKILL)
        found += done
    assert sorted(r.id for r in found) == sorted(str(item.id) for item in items)
    assert {type(r.error) for r in found} == {type(None), PromptTooLongError}


def test_stopped_worker_is_found_and_a_list_and_others_are_answered(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.worker.replica.N_STOPPED_MAX", 2)
    with load(test_model, 2) as engine:
        before = pids_of(engine)
        os.kill(before[0], signal.SIGSTOP)
        results = all_results(engine.run(prompts(40), options={"max_tokens": 2}, ask_again=True))
        assert {r.error for r in results} == {None}
        wait_until(lambda: len(pids_of(engine)) == 2)
        assert len({*before, *pids_of(engine)}) == 3
    assert not [pid for pid in before if lives(pid)]


def test_spoiled_model_fails_what_waits_until_it_is_mended(
    test_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.worker.replica.BACK_OFF_S", (0.0,))
    model = tmp_path / "model.gguf"
    model.write_bytes(test_model.read_bytes())
    with load(model) as engine:
        model.unlink()  # its bytes stay mapped in the worker that runs
        model.write_bytes(b"no model")
        # they pause, so none can end before the kill, and four have the slots
        response = engine.run(prompts(64), options={**LONG, "pause_every": 4})
        chunks = iter(response)
        first = next(chunks)
        os.kill(pids_of(engine)[0], signal.SIGKILL)
        assert all(chunk.finish_reason in (None, "error") for chunk in chunks)
        kinds = {r.id: type(r.error) for r in all_results(response)}
        assert kinds[first.id] is WorkerDiedError
        assert {*kinds.values()} == {ModelLoadError, WorkerDiedError}
        with pytest.raises(ModelLoadError, match="no worker can be started: "):
            engine.count_tokens("a")
        model.unlink()
        model.write_bytes(test_model.read_bytes())
        wait_until(lambda: engine.outage is None)
        assert engine.submit("hello", options={"max_tokens": 3}).result().error is None


CLIENT = """
import sys, cbatch
from tests.worker.test_real_deaths import LONG, load, pids_of, prompts
engine = load(sys.argv[1], 2)
response = engine.run(prompts(400), options=LONG)
print(*pids_of(engine), flush=True)
response.results()
"""


@pytest.mark.parametrize(
    ("number", "is_stopped"),
    [(signal.SIGKILL, True), (signal.SIGHUP, False), (signal.SIGINT, False)],
)
def test_workers_end_when_their_client_does(
    test_model: Path, number: int, *, is_stopped: bool
) -> None:
    if is_stopped and sys.platform != "linux":
        pytest.skip("needs PR_SET_PDEATHSIG")
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(test_model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as client:
        assert client.stdout is not None
        pids = [int(text) for text in client.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(lives, pids))
        if is_stopped:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            client.kill()
        else:
            os.killpg(client.pid, number)  # as a terminal does
        client.wait(PATIENCE_S)
    wait_until(lambda: not any(map(lives, pids)))


@pytest.mark.parametrize(
    ("does", "told"),
    [("exit 3", "exit code 3"), ("kill -9 $$", "ended by SIGKILL, which the system")],
)
def test_worker_that_dies_before_it_reads_is_told_by_its_end(
    does: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(*_: object) -> None:
        raise BrokenPipeError("Broken pipe")

    monkeypatch.setattr("cbatch.worker.process.LineSender.send", send)
    monkeypatch.setattr("cbatch.worker.process.command_of", lambda _: ["sh", "-c", does])
    with pytest.raises(EngineError, match=f"a worker ended before it was ready: {told}"):
        cbatch.load(replicas=1)


def test_workers_end_when_their_client_dies_while_they_load(test_model: Path) -> None:
    code = CLIENT.replace("engine = load", "print(flush=True); engine = load")
    chance = random.Random()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(test_model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as client:
        assert client.stdout is not None
        client.stdout.readline()
        wait_until(lambda: children_of(client.pid))
        children = children_of(client.pid)
        for _ in range(chance.randrange(2000)):
            os.sched_yield()
        children += children_of(client.pid)
        client.kill()
    wait_until(lambda: not any(map(lives, children)))


def test_death_in_a_program_that_ignores_sigchld_has_a_reason(
    test_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with load(test_model) as engine, caplog.at_level(logging.WARNING, "cbatch"):
            [pid] = pids_of(engine)
            if sys.platform == "linux":  # what ps shows of it
                about = Path(f"/proc/{pid}")
                assert about.joinpath("comm").read_text() == "cbatch worker\n"
                words = about.joinpath("cmdline").read_bytes().split(b"\0")
                assert words[2].startswith(b'"cbatch worker"; import sys; ')
            os.kill(pid, signal.SIGKILL)
            assert engine.submit("hello", options={"max_tokens": 3}).result().error is None
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert any("died: the system does not say how; restarting" in m for m in caplog.messages)
