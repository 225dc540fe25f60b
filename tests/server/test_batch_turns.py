"""Whose batch is worked on: few at a time, owners in turn, and nothing is lost where the system lacks threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine
from cbatch.files.served_batch import check_requests
from cbatch.server import batches
from cbatch.server.batch_store import BatchStore
from tests.no_threads import NoThreads
from tests.runtime.backends import PATIENCE_S, GatedBackend, in_thread
from tests.server.clients import CHAT, call, error_of, wait_until
from tests.server.kept import answers, batch_of, begun, ended, kept_app, line, lines, upload

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.applications import Starlette

KEYS = ["key-of-ada", "key-of-bob", "key-of-eve"]
ADA, BOB, EVE = ({"x-api-key": key} for key in KEYS)
ONE = lines(line("a"))


def asked(app: Starlette, headers: dict[str, str]) -> Any:
    file = upload(app, ONE, headers=headers).json()["id"]
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    return call(app, "/v1/batches", body, headers=headers)


def status(app: Starlette, id: str, headers: dict[str, str]) -> str:
    return str(call(app, f"/v1/batches/{id}", headers=headers).json()["status"])


class Steps:
    """Holds a step of each batch until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.begun: list[str] = []
        """Ids of batches that have begun the step."""
        self._go = threading.Semaphore(0)
        step = getattr(batches.Batches, name)

        def held(found: batches.Batches, job: Any, *args: Any) -> Any:
            self.begun.append(job.batch.id)
            assert self._go.acquire(timeout=PATIENCE_S)
            return step(found, job, *args)

        monkeypatch.setattr(batches.Batches, name, held)

    def release(self, n: int = 1) -> None:
        self._go.release(n)

    def wait_for(self, *ids: str) -> None:
        wait_until(lambda: len(self.begun) >= len(ids))
        assert self.begun == [*ids]


def test_checks_are_begun_one_after_the_other_and_owners_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "CHECKING", batches.BatchLane(1, 2))
    steps = Steps(monkeypatch, "_check")
    with kept_app(tmp_path, api_keys=KEYS) as app:
        ada = [asked(app, ADA).json()["id"] for _ in range(4)]
        steps.wait_for(ada[0])
        bob = [asked(app, BOB).json()["id"] for _ in range(2)]
        steps.wait_for(ada[0], bob[0])
        eve = asked(app, EVE).json()["id"]
        steps.wait_for(ada[0], bob[0])
        n_threads = sum(thread.name.startswith("cbatch-batch_") for thread in threading.enumerate())
        assert n_threads == 2
        steps.release()
        wait_until(lambda: len(steps.begun) == 3)
        assert steps.begun[2] == eve
        steps.release(99)
        for headers, ids in ((ADA, ada), (BOB, bob), (EVE, [eve])):
            for id in ids:
                wait_until(lambda: status(app, id, headers) == "completed")  # noqa: B023
    assert [id for id in steps.begun if id in ada] == ada


def test_cancelled_batch_need_not_wait_for_the_checks_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "CHECKING", batches.BatchLane(1, 2))
    steps = Steps(monkeypatch, "_check")
    with kept_app(tmp_path) as app:
        first, second, third = (begun(app, ONE) for _ in range(3))
        steps.wait_for(first)
        call(app, f"/v1/batches/{third}/cancel", method="POST")
        steps.release()
        assert ended(app, third)["status"] == "cancelled"
        steps.release()
        assert ended(app, second)["status"] == "completed"
    assert steps.begun == [first, second]


class EndlessChecks:
    """Makes checks of files with more than one line last until they are told to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_over = False

        def checked(path: Path, url: str, *, check: Any, **named: Any) -> Any:
            while path.read_bytes().count(b"\n") > 1 and not self.is_over:
                check()
            return check_requests(path, url, check=check, **named)

        monkeypatch.setattr(batches, "check_requests", checked)


def test_small_batch_ends_while_large_files_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = EndlessChecks(monkeypatch)
    with kept_app(tmp_path) as app:
        large = [begun(app, lines(line("a"), line("b"))) for _ in range(3)]
        assert ended(app, begun(app, ONE))["status"] == "completed"
        assert [batch_of(app, id)["status"] for id in large] == ["validating"] * 3
        call(app, f"/v1/batches/{large[0]}/cancel", method="POST")
        batch = ended(app, large[0])
        assert batch["status"] == "cancelled"
        assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        checks.is_over = True
        assert [ended(app, id)["status"] for id in large[1:]] == ["completed"] * 2


def test_check_of_a_large_file_is_left_to_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = EndlessChecks(monkeypatch)
    with kept_app(tmp_path) as app:
        id = begun(app, lines(line("a"), line("b")))
    checks.is_over = True
    with kept_app(tmp_path) as app:
        assert ended(app, id)["status"] == "completed"


def test_check_is_asked_to_go_on_at_each_line_also_of_a_blank_one(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"\n" * 500)
    n_asked: list[None] = []
    found = check_requests(
        tmp_path / "r", CHAT, n_problems=1, max_line_bytes=99, check=lambda: n_asked.append(None)
    )
    assert (found.n_items, len(n_asked)) == (0, 500)


def test_problems_of_a_batch_are_told_in_few_words_for_lists_of_them(tmp_path: Path) -> None:
    long = "x" * 5000
    wrong = ({**line("a"), "url": long}, {**line("b"), long: 1})
    with kept_app(tmp_path) as app:
        batch = ended(app, begun(app, lines(*wrong)))
    texts = [error[name] for error in batch["errors"]["data"] for name in ("message", "param")]
    assert [len(text) for text in texts] == [200, len("url"), 200, 200]


def test_check_is_asked_to_go_on_amid_a_line_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"x" * 2**21)
    n_asked: list[None] = []
    check_requests(
        tmp_path / "r", CHAT, n_problems=1, max_line_bytes=99, check=lambda: n_asked.append(None)
    )
    assert len(n_asked) > 2**21 / 2**18


@pytest.mark.parametrize("n_lines", [100, 101, 5000])
def test_file_is_read_no_further_after_too_many_problems(tmp_path: Path, n_lines: int) -> None:
    with kept_app(tmp_path) as app:
        batch = ended(app, begun(app, b"1\n" * n_lines))
    told = batch["errors"]["data"]
    assert [error["line"] for error in told[:100]] == [*range(1, 101)]
    assert batch["request_counts"]["total"] == min(n_lines, 101)
    last = [(error["code"], error["message"]) for error in told[100:]]
    words = "more than 100 lines are wrong: no line after line 101 was checked"
    assert last == ([] if n_lines == 100 else [("too_many_errors", words)])


def test_batches_of_one_owner_leave_others_a_turn_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, "_run_for")
    with kept_app(tmp_path, api_keys=KEYS) as app:
        ada = [asked(app, ADA).json()["id"] for _ in range(6)]
        wait_until(lambda: all(status(app, id, ADA) == "in_progress" for id in ada))
        wait_until(lambda: len(steps.begun) == 4)
        bob = [asked(app, BOB).json()["id"] for _ in range(2)]
        wait_until(lambda: all(status(app, id, BOB) == "in_progress" for id in bob))
        steps.wait_for(*ada[:4], bob[0])
        steps.release(99)
        for headers, ids in ((ADA, ada), (BOB, bob)):
            for id in ids:
                wait_until(lambda: status(app, id, headers) == "completed")  # noqa: B023


def test_batches_of_one_owner_leave_others_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_N_UNFINISHED", 2)
    steps = Steps(monkeypatch, "_check")
    with kept_app(tmp_path, api_keys=KEYS) as app:
        assert [asked(app, ADA).status_code for _ in range(2)] == [200, 200]
        assert "2 batches" in error_of(asked(app, ADA), 429)["message"]
        assert asked(app, BOB).status_code == 200
        monkeypatch.setattr(batches, "_N_UNFINISHED_MAX", 3)
        assert "all API keys" in error_of(asked(app, EVE), 429)["message"]
        steps.release(99)
        wait_until(lambda: asked(app, ADA).status_code == 200)


# ---- the disk, and threads ----


def test_batch_that_is_made_slowly_keeps_nobody_waiting_and_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, is_making, may_go = BatchStore.new_batch, threading.Event(), threading.Event()

    def slowly(*args: Any, **named: Any) -> Any:
        is_making.set()
        assert may_go.wait(PATIENCE_S)
        return make(*args, **named)

    monkeypatch.setattr(BatchStore, "new_batch", slowly)
    with kept_app(tmp_path) as app:
        id = in_thread(lambda: begun(app, ONE))
        assert is_making.wait(PATIENCE_S)
        assert call(app, "/v1/batches").json()["data"] == []
        closing = in_thread(app.state.desk.close)
        wait_until(lambda: app.state.desk.batches.is_closed)
        may_go.set()
        found = id()
        closing()
    with kept_app(tmp_path) as app:
        assert ended(app, found)["status"] == "completed"


@pytest.mark.parametrize("prefix", ["cbatch-batch_", "cbatch-batch-room", "cbatch-feed"])
def test_batch_waits_while_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setattr(batches, "_AGAIN_S", 0.01)
    threads = NoThreads(monkeypatch, prefix)
    with kept_app(tmp_path) as app:
        id = begun(app, ONE)
        wait_until(lambda: threads.n_refused > 2)
        assert batch_of(app, id)["status"] in ("validating", "in_progress")
        other = begun(app, ONE)
        call(app, f"/v1/batches/{other}/cancel", method="POST")
        threads.is_over = True
        batch = ended(app, id)
        assert len(answers(app, batch)) == 1
        assert ended(app, other)["status"] == "cancelled"


def test_batch_is_refused_while_nothing_can_give_it_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = NoThreads(monkeypatch, "cbatch-batch")
    with kept_app(tmp_path) as app:
        file = upload(app, ONE).json()["id"]
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        answer = call(app, "/v1/batches", body)
        assert error_of(answer, 503)["code"] == "no_threads"
        assert "retry-after" in answer.headers
        assert call(app, "/v1/batches").json()["data"] == []
        assert not [*(tmp_path / "kept" / "work").iterdir()]
        threads.is_over = True
        assert ended(app, begun(app, ONE))["status"] == "completed"


def test_batch_is_cancelled_though_no_thread_tells_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GatedBackend(2, 256, hold_at=1)
    NoThreads(monkeypatch, "cbatch-cancel")
    with kept_app(tmp_path, Engine(backend)) as app:
        id = begun(app, ONE)
        backend.wait_until_held()
        told = call(app, f"/v1/batches/{id}/cancel", method="POST")
        assert told.json()["status"] == "cancelling"
        backend.release()
        assert ended(app, id)["status"] == "cancelled"


def test_time_of_a_batch_is_over_while_it_waits_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "RUNNING", batches.BatchLane(1, 1))
    steps = Steps(monkeypatch, "_run_for")
    with kept_app(tmp_path) as app:
        first = begun(app, ONE)
        steps.wait_for(first)
        batch = ended(app, begun(app, ONE, completion_window="1s"))
        assert batch["status"] == "expired"
        assert len(answers(app, batch)) == 1
        steps.release()
        assert ended(app, first)["status"] == "completed"
