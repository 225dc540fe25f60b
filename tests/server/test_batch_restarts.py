"""Batches through the ends of their servers: each line is answered once, whatever happens."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.errors import ConfigError, EngineClosedError
from cbatch.files.input import raw_streams
from cbatch.files.input.text_files import InputFile
from cbatch.files.served_batch import BatchPlaces, ServedBatch, ServedReply
from cbatch.files.work import OpenGate
from cbatch.server import batches
from cbatch.server.batch_store import BatchStore
from tests.runtime.backends import GatedBackend
from tests.server.clients import CHAT, call, wait_until
from tests.server.kept import (
    answers,
    batch_of,
    begun,
    begun_and_held,
    begun_over,
    ended,
    kept_app,
    line,
    lines,
    upload,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from starlette.applications import Starlette

N = 40
MANY = lines(*(line(f"r{i}") for i in range(N)))


def ended_by(folder: Path, backend: GatedBackend) -> tuple[str, bytes]:
    """A batch whose server ended amid it: its id, and its answers so far."""
    with kept_app(folder, Engine(backend)) as app:
        id, place = begun_and_held(app, backend, MANY)
    found = place.read_bytes()
    assert 0 < found.count(b"\n") < N
    return id, found


def test_batch_goes_on_with_the_next_server(tmp_path: Path) -> None:
    id, before = ended_by(tmp_path, GatedBackend(4, 256, hold_at=40))
    with kept_app(tmp_path) as app:
        batch = ended(app, id)
        found = answers(app, batch)
        data = call(app, f"/v1/files/{batch['output_file_id']}/content").content
    assert batch["request_counts"] == {"total": N, "completed": N, "failed": 0}
    assert found.keys() == {f"r{i}" for i in range(N)}
    assert data.startswith(before)
    assert not [*(tmp_path / "kept" / "work").iterdir()]


def test_stop_amid_blank_lines_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = BatchPlaces(*(tmp_path / name for name in ("requests", "answers", "errors")))
    places.requests.write_bytes(lines(line("a")) + b"\n" * 99 + lines(line("b")))
    read, n_read, stop_at = InputFile.lines, 0, 9
    refused = ServedReply(400, {})

    def run() -> tuple[str, int]:
        served = ServedBatch(engine, places, CHAT, lambda _: refused, OpenGate(), "", 9999, 1)

        def counted(file: InputFile) -> Iterator[Any]:
            nonlocal n_read
            for n_read, found in enumerate(read(file), 1):
                if n_read == stop_at:
                    served.stop()
                yield found

        monkeypatch.setattr(InputFile, "lines", counted)
        return served.run(None, bool).ending, served.n_failed

    with Engine(FakeBackend()) as engine:
        assert (*run(), n_read) == ("asked", 1, stop_at)
        stop_at = 0
        assert (*run(), n_read) == ("done", 2, 101)


def test_batch_of_an_earlier_version_goes_on_with_what_is_refused_now(tmp_path: Path) -> None:
    places = BatchPlaces(*(tmp_path / name for name in ("requests", "answers", "errors")))
    long = "x" * 2000
    places.requests.write_bytes(gzip.compress(lines(line(long))))
    refused = ServedReply(400, {})
    with Engine(FakeBackend()) as engine:
        ServedBatch(engine, places, CHAT, lambda _: refused, OpenGate(), "", 9999, 1).run(
            None, bool
        )
    assert json.loads(places.errors.read_bytes())["custom_id"] == long


def test_batch_of_another_model_waits_for_its_own(tmp_path: Path) -> None:
    id, before = ended_by(tmp_path, GatedBackend(4, 256, hold_at=40))
    with kept_app(tmp_path, Engine(FakeBackend(4, 256), options={"top_k": 7})) as app:
        other = ended(app, begun(app, lines(line("a"))))
        assert other["status"] == "completed"
        n_before = before.count(b"\n")
        wait_until(lambda: batch_of(app, id)["request_counts"]["completed"] == n_before)
        assert batch_of(app, id)["status"] == "in_progress"
    with kept_app(tmp_path) as app:
        assert len(answers(app, ended(app, id))) == N


def test_batch_that_was_being_cancelled_is_cancelled_by_the_next_server(tmp_path: Path) -> None:
    backend = GatedBackend(2, 256, hold_at=20)
    with kept_app(tmp_path, Engine(backend)) as app:
        id = begun(app, MANY)
        backend.wait_until_held()
        call(app, f"/v1/batches/{id}/cancel", method="POST")
        backend.release_when_asked()
    with kept_app(tmp_path) as app:
        batch = ended(app, id)
        assert batch["status"] == "cancelled"
        assert len(answers(app, batch)) == N


@pytest.mark.parametrize("hangs", [False, True])
def test_engine_that_is_closed_or_hangs_leaves_its_batches_to_the_next(
    tmp_path: Path, *, hangs: bool
) -> None:
    backend = GatedBackend(2, 256, hold_at=20)
    with kept_app(tmp_path, Engine(backend)) as app:
        id = begun(app, MANY)
        backend.wait_until_held()
        if hangs:
            app.state.desk.close(0.01)
            assert backend.is_held
            backend.release()
        else:
            backend.release_when_asked()
            app.state.desk.engine.close()
            assert batch_of(app, id)["status"] == "in_progress"
    with kept_app(tmp_path) as app:
        assert len(answers(app, ended(app, id))) == N


def test_server_may_end_at_any_line_of_the_end_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_lines, backend = 6, GatedBackend(2, 256, hold_at=10)
    n_checks = i_end = 0
    has_stopped = threading.Event()

    def check(kept: batches.Batches) -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks > i_end:
            has_stopped.set()
            raise EngineClosedError("as if killed")

    with monkeypatch.context() as patch, kept_app(tmp_path, Engine(backend)) as app:
        id = begun(app, lines(*(line(f"r{i}") for i in range(n_lines))))
        backend.wait_until_held()
        patch.setattr(batches.Batches, "_check_open", check)
        call(app, f"/v1/batches/{id}/cancel", method="POST")
        backend.release_when_asked()
    for i_end in range(99):
        n_checks, folder = 0, tmp_path / str(i_end)
        has_stopped.clear()
        shutil.copytree(tmp_path / "kept", folder / "kept")
        with monkeypatch.context() as patch:
            patch.setattr(batches.Batches, "_check_open", check)
            with kept_app(folder) as app:
                wait_until(
                    lambda: has_stopped.is_set() or batch_of(app, id)["status"] == "cancelled"
                )
        with kept_app(folder) as app:
            batch = ended(app, id)
            assert (batch["status"], len(answers(app, batch))) == ("cancelled", n_lines)
        if not has_stopped.is_set():
            break
    assert i_end == n_checks == 2 * n_lines  # every line is written or found, and counted


STEPS = ("save", "adopt_file", "put_file")


class Ending:
    """Ends a server's work before or after a step of its store: what follows is left to the next server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, i_end: int, *, is_after: bool) -> None:
        self.n_steps, self._i_end, self._is_after = 0, i_end, is_after
        self.has_come = threading.Event()
        for name in STEPS:
            monkeypatch.setattr(BatchStore, name, self._watched(getattr(BatchStore, name)))

    def _watched(self, do: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            self.n_steps += 1
            is_end = self.n_steps > self._i_end
            if is_end and not (self._is_after and self.n_steps == self._i_end + 1):
                self.has_come.set()
                raise EngineClosedError("as if killed")
            found = do(*args)
            if is_end:
                self.has_come.set()
                raise EngineClosedError("as if killed")
            return found

        return watched


@pytest.mark.parametrize("is_after", [False, True])
def test_server_may_end_at_any_step_of_a_batch(tmp_path: Path, *, is_after: bool) -> None:
    wrong = line("wrong", messages=[])
    data = lines(*(line(f"r{i}") for i in range(5)), wrong)
    for i_end in range(99):
        folder = tmp_path / str(i_end)
        with pytest.MonkeyPatch.context() as patch, kept_app(folder) as app:
            file = upload(app, data).json()["id"]
            ending = Ending(patch, i_end, is_after=is_after)
            id = begun_over(app, file)
            _wait(app, id, ending)
        with kept_app(folder) as app:
            batch = ended(app, id)
            assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
            assert len(answers(app, batch)) == 6
            assert len(call(app, "/v1/files").json()["data"]) == 3
            assert not [*(folder / "kept" / "work").iterdir()]
            assert len([*(folder / "kept" / "content").iterdir()]) == 3
        if not ending.has_come.is_set():
            break
    assert i_end > 5


def _wait(app: Starlette, id: str, ending: Ending) -> None:
    wait_until(lambda: ending.has_come.is_set() or batch_of(app, id)["status"] == "completed")


PROGRAM = """
import sys, time
from pathlib import Path
from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.server import create_app
from cbatch.server.batch_index import BATCH
from cbatch.server.batch_store import Page

class Slow(FakeBackend):
    def run(self, plan):
        time.sleep(0.005)
        self.interrupt()
        return super().run(plan)

engine = Engine(Slow(4, 256))
desk = create_app(engine, files_dir=sys.argv[1]).state.desk
store = desk.batches.store
if not store.batches("", Page(1))[0]:
    with store.arriving() as arriving:
        arriving.write(Path(sys.argv[2]).read_bytes())
        file = arriving.keep("in", BATCH, None, "")
    fields = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    desk.batches.create(store.path_of(file), 86400, **fields)
print("ready", flush=True)
while not store.batches("", Page(1))[0][0].has_ended:
    time.sleep(0.01)
    print(store.batches("", Page(1))[0][0].status, flush=True)
"""


@pytest.mark.real
def test_killed_servers_answer_each_line_once(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(MANY)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "kept"), str(tmp_path / "in")]
    n_kills = 0
    for n_lines in range(4, 99, 8):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in zip(range(n_lines), process.stdout, strict=False):
                pass
            is_over = process.poll() is not None
            process.kill()
        n_kills += not is_over
        if is_over:
            break
    assert n_kills > 1
    with kept_app(tmp_path) as app:
        (batch,) = call(app, "/v1/batches").json()["data"]
        batch = ended(app, batch["id"])
        found = answers(app, batch)
        files = call(app, "/v1/files").json()["data"]
    assert batch["request_counts"] == {"total": N, "completed": N, "failed": 0}
    assert found.keys() == {f"r{i}" for i in range(N)}
    assert len(files) == 2
    texts = {json.dumps(each["response"]["body"]["choices"]) for each in found.values()}
    assert len(texts) == 1


def test_batch_goes_on_while_the_clock_is_far_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, _ = ended_by(tmp_path, GatedBackend(4, 256, hold_at=40))
    now = [86_400.0]
    monkeypatch.setattr("cbatch.server.batch_index.time.time", lambda: now[0])
    with kept_app(tmp_path) as app:
        batch = ended(app, id)
        assert batch["request_counts"] == {"total": N, "completed": N, "failed": 0}
        assert len(answers(app, batch)) == N
        now[0] *= -1  # before 1970
        early = begun(app, lines(line("a")))
        assert ended(app, early)["status"] == "completed"
    with kept_app(tmp_path) as app:
        assert len(answers(app, batch_of(app, early))) == 1


# ---- batches that are given up ----


def given_up(folder: Path, id: str, before: bytes) -> dict[str, Any]:
    """The error of a batch that was given up: its answers are there, also with the next server."""
    for _ in range(2):
        with kept_app(folder) as app:
            batch = ended(app, id)
            assert batch["status"] == "failed"
            assert batch["request_counts"]["completed"] == before.count(b"\n")
            data = call(app, f"/v1/files/{batch['output_file_id']}/content").content
        assert data == before
    (problem,) = batch["errors"]["data"]
    assert str(folder) not in problem["message"]
    found: dict[str, Any] = problem
    return found


@pytest.mark.parametrize(
    "error", [ConfigError("max_time_s is wrong"), ValueError("a bug")], ids=str
)
def test_batch_with_an_error_of_the_server_keeps_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    id, before = ended_by(tmp_path, GatedBackend(4, 256, hold_at=40))

    def fail(run: ServedBatch, *args: object) -> None:
        raise error

    monkeypatch.setattr(ServedBatch, "run", fail)
    assert given_up(tmp_path, id, before)["code"] == "internal_error"


def work_of(folder: Path, id: str) -> Path:
    return folder / "kept" / "work" / id


def becomes_a_pipe(work: Path) -> None:
    (work / "requests.jsonl").unlink()
    os.mkfifo(work / "requests.jsonl")


def without_manifest(work: Path) -> None:
    for path in work.glob("answers.jsonl.*"):
        path.unlink()


def broken_off(work: Path) -> None:
    with (work / "answers.jsonl").open("ab") as file:
        file.write(b'{"custom_id": "r')


CHANGES: dict[str, Callable[[Path], object]] = {
    "no requests": lambda work: (work / "requests.jsonl").unlink(),
    "a pipe of requests": becomes_a_pipe,
    "no manifest": without_manifest,
    "another manifest": lambda work: [
        path.write_bytes(b"what is this?" * 99) for path in work.glob("answers.jsonl.*")
    ],
    "more answers": broken_off,
}


@pytest.mark.parametrize("what", CHANGES)
def test_batch_whose_files_were_changed_keeps_its_answers(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    id, before = ended_by(tmp_path, GatedBackend(4, 256, hold_at=40))
    CHANGES[what](work_of(tmp_path, id))
    assert given_up(tmp_path, id, before)["code"] == "storage_changed"
    assert_sentence_alone(caplog, id)


def assert_sentence_alone(caplog: pytest.LogCaptureFixture, id: str) -> None:
    (told,) = [r for r in caplog.records if f"batch {id} has failed" in r.getMessage()]
    assert told.levelname == "WARNING"
    assert "its files were changed: " in told.getMessage()
    assert not [r for r in caplog.records if r.exc_info]


def test_folder_of_batches_removed_under_a_server_is_told_in_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_AGAIN_S", 0.01)
    backend = GatedBackend(4, 256, hold_at=1)
    with kept_app(tmp_path, Engine(backend)) as app:
        id = begun(app, lines(*map(line, "abc")))
        wait_until(lambda: batch_of(app, id)["status"] == "in_progress")  # its file was read
        (tmp_path / "kept" / "work").rename(tmp_path / "gone")  # it may be written to meanwhile
        backend.release()
        assert ended(app, id)["status"] == "failed"
    assert_sentence_alone(caplog, id)


def test_answers_that_cannot_be_published_are_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, before = ended_by(tmp_path, GatedBackend(4, 256, hold_at=40))
    (work_of(tmp_path, id) / "requests.jsonl").unlink()

    def fail(path: Path) -> None:
        raise RuntimeError("nobody expects it")

    monkeypatch.setattr(batches, "usage_of", fail)
    with kept_app(tmp_path) as app:
        assert ended(app, id)["status"] == "failed"
    (found,) = (tmp_path / "kept" / "aside").rglob("answers.jsonl")
    assert found.read_bytes() == before


def test_lack_of_file_handles_holds_a_batch_up_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, n_refused = raw_streams.open_raw, [0]

    def refuse(*args: Any, **named: Any) -> Any:
        n_refused[0] += 1
        if n_refused[0] % 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(*args, **named)

    monkeypatch.setattr("cbatch.files.input.text_files.open_raw", refuse)
    monkeypatch.setattr(batches, "_AGAIN_S", 0.01)
    with kept_app(tmp_path) as app:
        batch = ended(app, begun(app, lines(line("a"), line("b"))))
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert n_refused[0] > 3


def test_batch_whose_requests_can_never_be_read_fails_after_its_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **named: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("cbatch.files.input.text_files.open_raw", refuse)
    monkeypatch.setattr(batches, "_AGAIN_S", 0.01)
    with kept_app(tmp_path) as app:
        batch = ended(app, begun(app, lines(line("a")), completion_window="1s"))
    (told,) = batch["errors"]["data"]
    assert (batch["status"], told["code"]) == ("failed", "batch_expired")


def test_full_disk_holds_up_the_files_of_a_batch_that_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, before = ended_by(tmp_path, GatedBackend(4, 256, hold_at=40))
    (work_of(tmp_path, id) / "requests.jsonl").unlink()
    adopt, n_refused = BatchStore.adopt_file, [0]

    def refuse(*args: Any) -> Any:
        n_refused[0] += 1
        if n_refused[0] < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return adopt(*args)

    monkeypatch.setattr(BatchStore, "adopt_file", refuse)
    monkeypatch.setattr(batches, "_AGAIN_S", 0.01)
    assert given_up(tmp_path, id, before)["code"] == "storage_changed"
