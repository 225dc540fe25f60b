"""Batches: checked, answered line by line as their endpoints answer, cancelled, expired, refused."""

from __future__ import annotations

import bz2
import errno
import gzip
import logging
import lzma
import sqlite3
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.errors import EngineError, ModelLoadError
from cbatch.files.output import durable
from cbatch.server import batches
from cbatch.server.batch_store import BatchStore
from cbatch.server.batches import BatchLane
from cbatch.server.desk import Desk
from cbatch.worker.pool import N_FAILED_MAX
from tests.runtime.backends import GatedBackend, in_thread
from tests.server.clients import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    USER,
    call,
    error_of,
    wait_until,
)
from tests.server.kept import (
    SHORT,
    answers,
    batch_of,
    begun,
    begun_over,
    content,
    ended,
    kept_app,
    line,
    lines,
    upload,
)
from tests.server.test_watching import of, scrape
from tests.worker.links import Launches, MortalBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from starlette.applications import Starlette

    from cbatch.server.batch_index import StoredBatch
    from cbatch.server.exchange import Exchange

RESPONSES = "/v1/responses"


def many(n: int) -> bytes:
    return lines(*(line(f"r{i}") for i in range(n)))


def test_line_with_numbers_that_json_lacks_is_refused_alone(kept: Starlette) -> None:
    good = line("a", RESPONSES, model="m", input="Hi", max_output_tokens=2)
    odd = [line(f"{n}", RESPONSES, model="m", input="Hi", metadata={"a": n}) for n in (1, 2)]
    data = lines(good, *odd).replace(b'{"a": 1}', b'{"a": 1e999}')
    batch = ended(kept, begun(kept, data.replace(b'{"a": 2}', b'{"a": NaN}'), RESPONSES))
    found = {id: each["response"] for id, each in answers(kept, batch).items()}
    assert {id: found[id]["status_code"] for id in found} == {"a": 200, "1": 400, "2": 400}
    assert found["1"]["body"]["error"]["code"] == "invalid_json"


def test_lists_count_as_held_until_they_are_read(
    kept: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(kept, begun(kept, many(3)))
    respond, counted = Desk.respond_held, list[int]()

    async def noted(self: Desk, exchange: Exchange, value: object, n_bytes: int) -> None:
        counted.append(n_bytes)
        await respond(self, exchange, value, n_bytes)

    monkeypatch.setattr("cbatch.server.desk.Desk.respond_held", noted)
    for path in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
        answer = call(kept, path)
        assert answer.status_code == 200
        assert (counted.pop() > len(answer.content)) == (len(answer.json()["data"]) > 0)
    assert not counted


def test_answer_that_is_too_large_for_a_line_is_an_error_of_its_own(tmp_path: Path) -> None:
    large: dict[str, Any] = {
        "n": 4,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 20,
        "ignore_eos": True,
    }
    with kept_app(tmp_path, max_answers_mib=2) as app:
        data = lines(
            line("large", messages=USER, **large), line("small", messages=USER, max_tokens=5)
        )
        batch = ended(app, begun(app, data))
        found = {id: each["response"] for id, each in answers(app, batch).items()}
    assert {id: each["status_code"] for id, each in found.items()} == {"large": 400, "small": 200}
    assert "takes more than 0.25 MiB" in found["large"]["body"]["error"]["message"]


def test_batch_has_an_answer_for_each_line(tmp_path: Path) -> None:
    wrong = line("wrong", messages=USER, temperature=-1)
    streamed = line("streamed", messages=USER, stream=True)
    long = line("long", messages=[{"role": "user", "content": "a" * 999}])
    with kept_app(tmp_path) as app:
        alone = call(app, CHAT, {"messages": USER, **SHORT}).json()
        id = begun(app, lines(line("a"), wrong, line("b"), streamed, long), metadata={"k": "v"})
        batch = ended(app, id)
        found = answers(app, batch)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 5, "completed": 2, "failed": 3}
    assert (batch["object"], batch["metadata"], batch["model"]) == ("batch", {"k": "v"}, "m")
    assert batch["errors"] is None
    usage, told = alone["usage"], batch["usage"]
    assert told.pop("input_tokens_details").keys() == {"cached_tokens"}
    assert told.pop("output_tokens_details") == {"reasoning_tokens": 0}
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
    names["total_tokens"] = "total_tokens"
    assert told == {name: 2 * usage[alike] for name, alike in names.items()}
    stamps = [batch[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert stamps == sorted(stamps)
    assert batch["expires_at"] == batch["created_at"] + 86_400
    for name in ("a", "b"):
        body = found[name]["response"]["body"]
        assert body["choices"] == alone["choices"]
        assert body["object"] == "chat.completion"
        assert body["model"] == "m"
    told = {name: found[name]["response"] for name in ("wrong", "streamed", "long")}
    assert {name: each["status_code"] for name, each in told.items()} == dict.fromkeys(told, 400)
    assert told["wrong"]["body"]["error"]["param"] == "temperature"
    assert told["streamed"]["body"]["error"]["param"] == "stream"
    assert told["long"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        (COMPLETIONS, {"prompt": "ab"}, "text_completion"),
        (COMPLETIONS, {"prompt": [5, 6, 7]}, "text_completion"),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 4}, "response"),
    ],
)
def test_endpoints_answer_as_they_do_alone(
    tmp_path: Path, endpoint: str, body: dict[str, Any], kind: str
) -> None:
    body = {"temperature": 0, "ignore_eos": True, "seed": 1, **body}
    several = line("several", endpoint, **body | {"prompt": ["a", "b"]})
    with kept_app(tmp_path) as app:
        alone = call(app, endpoint, body).json()
        batch = ended(app, begun(app, lines(line("a", endpoint, **body), several), endpoint))
        found = {id: each["response"] for id, each in answers(app, batch).items()}
    answer = found["a"]["body"]
    assert answer["object"] == alone["object"] == kind
    for name in ("choices", "status"):
        assert answer.get(name) == alone.get(name)
    assert batch["usage"]["total_tokens"] == alone["usage"]["total_tokens"]
    if kind == "response":
        assert answer["output"][0]["content"] == alone["output"][0]["content"]
    assert (found["several"]["status_code"], batch["request_counts"]["failed"]) == (400, 1)
    assert found["several"]["body"]["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress, b"PK\x03\x04".__add__]
)
def test_compressed_file_fails_the_batch(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    with kept_app(tmp_path) as app:
        batch = ended(app, begun(app, pack(lines(line("a")))))
    (told,) = batch["errors"]["data"]
    words = "is compressed: upload the lines as they are"
    assert (batch["status"], told["code"], told["message"]) == ("failed", "invalid_file", words)


def test_wrong_lines_fail_the_batch_with_their_numbers(tmp_path: Path) -> None:
    wrong = [
        (b'{"custom_id": "a"', "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (lines({"method": "POST", "url": CHAT, "body": {}}), "missing_custom_id"),
        (lines({**line("b"), "custom_id": 3}), "invalid_custom_id"),
        (lines({**line("b"), "custom_id": "x" * 1025}), "invalid_custom_id"),
        (lines({**line("c"), "method": "GET"}), "invalid_method"),
        (lines({**line("d"), "url": COMPLETIONS}), "url_mismatch"),
        (lines({**line("e"), "url": 3}), "url_mismatch"),
        (lines({**line("f"), "body": 3}), "invalid_request"),
        (lines({**line("g"), "more": 3}), "invalid_request"),
        (lines(line("first")), "duplicate_custom_id"),
        (b'{"custom_id": "\xff"}', "invalid_utf8"),
        (lines(line("h", model="other", messages=USER)), "model_mismatch"),
        (b"[" * 100_000, "invalid_json_line"),
        (lines(line("i", model="m", messages="a" * 2**20)), "line_too_long"),
    ]
    data = lines(line("first")) + b"\n" + b"".join(one.rstrip(b"\n") + b"\n" for one, _ in wrong)
    with kept_app(tmp_path, max_body_mib=1) as app:
        batch = ended(app, begun(app, data))
    assert batch["status"] == "failed"
    assert batch["failed_at"] is not None
    assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)
    found = [(each["line"], each["code"]) for each in batch["errors"]["data"]]
    assert found == [(i, code) for i, (_, code) in enumerate(wrong, 3)]
    assert batch["errors"]["object"] == "list"
    told = " ".join(each["message"] for each in batch["errors"]["data"])
    assert str(tmp_path) not in told
    assert "max_line_bytes" not in told


def test_long_names_in_lines_are_cut_in_what_a_batch_tells(kept: Starlette) -> None:
    long = "x" * 100_000
    failed = ended(kept, begun(kept, lines({**line("a"), long: 1})))
    (error,) = failed["errors"]["data"]
    assert max(len(error["param"]), len(error["message"])) <= 2000
    batch = ended(kept, begun(kept, lines(line("a", model=long, messages=USER))))
    assert (batch["request_counts"]["failed"], batch["model"]) == (1, "x" * 1024)


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b" \n\n", "empty_file", ""),
        (b"\xef\xbb\xbf\n", "empty_file", ""),
        (many(1).decode().encode("utf-16"), "invalid_file", "is UTF-16"),
    ],
)
def test_file_without_requests_fails_its_batch(
    kept: Starlette, data: bytes, code: str, words: str
) -> None:
    batch = ended(kept, begun(kept, data))
    (error,) = batch["errors"]["data"]
    assert (batch["status"], error["code"]) == ("failed", code)
    assert error["message"].startswith(words)  # and not with a path


WRONG: list[tuple[str, object]] = [
    *(("endpoint", said) for said in ("/v1/images", 3, None)),
    *(("completion_window", said) for said in ("0h", "31d", "soon", 24)),
    *(("input_file_id", said) for said in (7, ["a"])),
    *(("metadata", said) for said in ({"k": 1}, [1], {"k" * 65: ""}, {"k": "v" * 513})),
    ("metadata", {str(i): "" for i in range(17)}),
    ("output_expires_after", {"anchor": "created_at", "seconds": 3599}),
    *(("output_expires_after", said) for said in ({"anchor": "now", "seconds": 3600}, 3600)),
]


def test_wrong_field_of_a_batch_is_refused_by_name(kept: Starlette) -> None:
    asked = {"input_file_id": upload(kept, many(1)).json()["id"], "endpoint": CHAT}
    for field, value in WRONG:
        body = {**asked, "completion_window": "24h", field: value}
        error = error_of(call(kept, "/v1/batches", body), 400)
        assert field in error["message"]
        assert ("/v1/embeddings" in error["message"]) is (field == "endpoint")
    assert call(kept, "/v1/batches").json()["data"] == []


def test_unknown_fields_of_a_batch_are_named(tmp_path: Path) -> None:
    for is_strict in (False, True):
        with kept_app(tmp_path / str(is_strict), strict_fields=is_strict) as app:
            file = upload(app, many(1)).json()["id"]
            asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", "x": 1}
            answer = call(app, "/v1/batches", asked)
        if is_strict:
            assert error_of(answer, 400)["param"] == "x"
        else:
            assert answer.headers["x-ignored-fields"] == "x"


def test_batches_are_listed_by_pages_the_newest_first(kept: Starlette) -> None:
    ids = [begun(kept, many(1)) for _ in range(5)]
    for id in ids:
        ended(kept, id)
    whole = call(kept, "/v1/batches").json()
    assert [each["id"] for each in whole["data"]] == ids[::-1]
    assert (whole["first_id"], whole["last_id"]) == (ids[-1], ids[0])
    assert not whole["has_more"]
    first = call(kept, "/v1/batches?limit=2").json()
    rest = call(kept, f"/v1/batches?limit=3&after={first['last_id']}").json()
    assert [*first["data"], *rest["data"]] == whole["data"]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    for limit in ("0", "101", "x", "-1"):
        assert error_of(call(kept, f"/v1/batches?limit={limit}"), 400)["param"] == "limit"
    error_of(call(kept, "/v1/batches?after=batch_0"), 404)


def test_unknown_batches_are_not_there(kept: Starlette) -> None:
    for id in ("batch_0", "..%2Findex.sqlite3", "%00", "a" * 9999):
        error_of(call(kept, f"/v1/batches/{id}"), 404)
        error_of(call(kept, f"/v1/batches/{id}/cancel", method="POST"), 404)
    asked = {"input_file_id": "file-0", "endpoint": CHAT, "completion_window": "24h"}
    error_of(call(kept, "/v1/batches", asked), 404)


def test_server_without_a_folder_says_so(app: Starlette) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/batches/a"):
        assert error_of(call(app, path), 404)["code"] == "files_not_kept"
    for path in (f"{MESSAGES}/batches", f"{MESSAGES}/batches/a"):
        answer = call(app, path)
        assert (answer.status_code, "files_dir" in answer.text) == (404, True)


# ---- cancel, and time that is over ----


def test_cancelled_batch_has_what_is_done_and_tells_what_is_not(tmp_path: Path) -> None:
    backend = GatedBackend(2, 256, hold_at=20)
    with kept_app(tmp_path, Engine(backend)) as app:
        id = begun(app, many(40))
        backend.wait_until_held()
        told = call(app, f"/v1/batches/{id}/cancel", method="POST").json()
        assert told["status"] == "cancelling"
        again = call(app, f"/v1/batches/{id}/cancel", method="POST").json()
        assert again["cancelling_at"] == told["cancelling_at"]
        backend.release()
        batch = ended(app, id)
        found = answers(app, batch)
        late = call(app, f"/v1/batches/{id}/cancel", method="POST").json()
    assert batch["status"] == late["status"] == "cancelled"
    assert batch["request_counts"]["total"] == len(found) == 40
    assert 2 <= batch["request_counts"]["completed"] < 40
    never = [each for each in found.values() if each["response"] is None]
    assert len(never) == batch["request_counts"]["failed"]
    assert {each["error"]["code"] for each in never} == {"batch_cancelled"}


def test_ended_batch_is_not_cancelled(kept: Starlette) -> None:
    for data, status in ((many(1), "completed"), (b" ", "failed")):
        id = begun(kept, data)
        ended(kept, id)
        answer = call(kept, f"/v1/batches/{id}/cancel", method="POST")
        assert status in error_of(answer, 409)["message"]
        assert answer.headers["x-should-retry"] == "false"


def test_batch_that_waits_for_its_turn_is_cancelled_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "RUNNING", BatchLane(1, 1))
    backend = GatedBackend(2, 256, hold_at=1)
    with kept_app(tmp_path, Engine(backend)) as app:
        first = begun(app, many(2))
        backend.wait_until_held()
        second = begun(app, many(2))
        wait_until(lambda: batch_of(app, second)["status"] == "in_progress")
        call(app, f"/v1/batches/{second}/cancel", method="POST")
        assert ended(app, second)["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        backend.release()
        assert ended(app, first)["status"] == "completed"


def test_batch_whose_time_is_over_has_what_is_done(
    kept: Starlette, caplog: pytest.LogCaptureFixture
) -> None:
    kept.state.desk.room.set_calls(4)  # which leaves no slot
    batch = ended(kept, begun(kept, many(3), completion_window="1s"))
    kept.state.desk.room.set_calls(0)
    found = answers(kept, batch)
    assert batch["status"] == "expired"
    assert "tried again" not in caplog.text
    assert batch["expired_at"] >= batch["expires_at"]
    assert {each["error"]["code"] for each in found.values()} == {"batch_expired"}
    assert len(found) == 3


# ---- beside calls ----


def test_call_is_answered_while_a_batch_has_all_slots(tmp_path: Path) -> None:
    with kept_app(tmp_path, Engine(FakeBackend(2, 2**20, 64))) as app:
        id = begun(app, lines(*(line(name, messages=USER, **ENDLESS) for name in "abc")))
        engine = app.state.desk.engine
        wait_until(lambda: engine.stats().n_running == 2)
        for _ in range(3):
            assert call(app, CHAT, {"messages": USER, **SHORT}).status_code == 200
        assert batch_of(app, id)["request_counts"]["completed"] == 0
        wait_until(lambda: engine.stats().n_running == 2)


ENDLESS: dict[str, Any] = {"max_tokens": 10**6, "ignore_eos": True}
MANY_SEQUENCES: dict[str, dict[str, Any]] = {
    "n": {"prompt": "a", "n": 32, **ENDLESS},
    "room": {"prompt": "a", "n": 3, **ENDLESS},
    "best_of": {"prompt": "a", "n": 1, "best_of": 32, **ENDLESS},
    "choices": {
        "prompt": "a" * 2**13,
        "choice": [chr(i) for i in range(64, 96)],
        "choice_probs": True,
    },
}


@pytest.mark.parametrize("what", MANY_SEQUENCES)
def test_call_is_answered_while_a_batch_has_many_sequences(tmp_path: Path, what: str) -> None:
    some = lines(*(line(f"{i}", COMPLETIONS, **MANY_SEQUENCES[what]) for i in range(12)))
    with kept_app(tmp_path, Engine(FakeBackend(4, 2**20, 64))) as app:
        id, engine = begun(app, some, COMPLETIONS), app.state.desk.engine
        wait_until(lambda: engine.stats().n_running > 0)
        for _ in range(3):
            answer = in_thread(lambda: call(app, CHAT, {"messages": USER, **SHORT}))()
            assert answer.status_code == 200
        if what == "choices":
            assert ended(app, id)["request_counts"]["completed"] == 12
            return
        assert batch_of(app, id)["request_counts"]["completed"] == 0
        call(app, f"/v1/batches/{id}/cancel", method="POST")
        batch, stats = ended(app, id), engine.stats()
    assert (batch["status"], batch["request_counts"]["failed"]) == ("cancelled", 12)
    assert (stats.n_running, stats.n_waiting, stats.n_paused) == (0, 0, 0)


@pytest.mark.parametrize(
    "error", [ModelLoadError("the file is not there now"), EngineError("no memory")], ids=str
)
def test_batch_waits_while_no_worker_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: EngineError
) -> None:
    monkeypatch.setattr(batches, "_AGAIN_S", 0.01)
    monkeypatch.setattr("cbatch.worker.replica.BACK_OFF_S", (0.0, 0.01))
    backend = MortalBackend(2, 256)
    launches = Launches(lambda: backend if not launches.backends else MortalBackend(2, 256))
    with kept_app(tmp_path, launches.engine(1)) as app:
        call(app, CHAT, {"messages": USER, **SHORT})
        launches.error = error
        backend.die_at = backend.n_runs + 12
        id = begun(app, many(20))
        wait_until(lambda: launches.n_failed > N_FAILED_MAX)
        assert batch_of(app, id)["status"] == "in_progress"
        launches.error = None
        batch = ended(app, id)
        found = answers(app, batch).values()
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert len({str(each["response"]["body"]["choices"]) for each in found}) == 1


# ---- disks, files, other servers ----


def test_full_disk_holds_a_batch_up_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_full = durable.write_at, threading.Event()
    n_refused = [0]

    def refuse(fd: int, data: bytes, start: int) -> None:
        if is_full.is_set():
            n_refused[0] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write(fd, data, start)

    monkeypatch.setattr(durable, "write_at", refuse)
    monkeypatch.setattr(batches, "_AGAIN_S", 0.01)
    is_full.set()
    with kept_app(tmp_path) as app:
        id = begun(app, many(9))
        wait_until(lambda: n_refused[0] > 2)
        assert batch_of(app, id)["status"] == "in_progress"
        is_full.clear()
        batch = ended(app, id)
        assert batch["request_counts"] == {"total": 9, "completed": 9, "failed": 0}
        assert len(answers(app, batch)) == 9


@pytest.mark.parametrize("i_full", [0, 2, 5])
def test_full_disk_of_the_index_holds_a_batch_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, i_full: int
) -> None:
    save, n_saved = BatchStore.save, [0]

    def refuse(store: BatchStore, batch: StoredBatch) -> None:
        n_saved[0] += 1
        if n_saved[0] == i_full + 1:
            raise sqlite3.OperationalError("database or disk is full")
        save(store, batch)

    monkeypatch.setattr(BatchStore, "save", refuse)
    monkeypatch.setattr(batches, "_AGAIN_S", 0.01)
    with kept_app(tmp_path) as app:
        batch = ended(app, begun(app, many(3)))
        assert batch["status"] == "completed"
        assert len(answers(app, batch)) == 3


def test_batch_goes_on_when_its_file_is_deleted(tmp_path: Path) -> None:
    backend = GatedBackend(2, 256, hold_at=5)
    with kept_app(tmp_path, Engine(backend)) as app:
        file = upload(app, many(9)).json()["id"]
        id = begun_over(app, file)
        backend.wait_until_held()
        assert call(app, f"/v1/files/{file}", method="DELETE").json()["deleted"]
        error_of(call(app, f"/v1/files/{file}"), 404)
        backend.release()
        batch = ended(app, id)
        assert batch["input_file_id"] == file
        assert len(answers(app, batch)) == batch["request_counts"]["completed"] == 9


def test_answers_can_be_deleted_and_expire(kept: Starlette) -> None:
    expiry = {"anchor": "created_at", "seconds": 3600}
    batch = ended(kept, begun(kept, many(1), output_expires_after=expiry))
    file = call(kept, f"/v1/files/{batch['output_file_id']}").json()
    assert file["purpose"] == "batch_output"
    assert file["expires_at"] == file["created_at"] + 3600
    assert file["bytes"] == len(call(kept, f"/v1/files/{file['id']}/content").content)
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    assert error_of(call(kept, "/v1/batches", asked), 400)["param"] == "input_file_id"
    call(kept, f"/v1/files/{file['id']}", method="DELETE")
    error_of(call(kept, f"/v1/files/{file['id']}/content"), 404)
    assert content(kept, None) == []


def test_metrics_count_batches_and_the_log_has_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cbatch")
    with kept_app(tmp_path, model_name="m") as app:
        done = begun(app, lines(line("a"), line("private", messages=USER, top_p=7)))
        ended(app, done)
        failed = begun(app, b"x")
        ended(app, failed)
        found = scrape(app)
    for status, n in (("completed", 1), ("failed", 1), ("expired", 0)):
        assert of(found, "cbatch:batches_total", status=status) == n
    for outcome in ("completed", "failed"):
        assert of(found, "cbatch:batch_requests_total", outcome=outcome) == 1
    assert of(found, "cbatch:ttft_seconds_count") == 0
    told = [values for r in caplog.records if (values := getattr(r, "cbatch", None))]
    ends = {values["batch_id"]: values for values in told if "batch_id" in values}
    assert ends.keys() == {done, failed}
    counts = {"status": "completed", "completed": 1, "failed": 1}
    assert {name: ends[done][name] for name in counts} == counts
    assert ends[failed]["status"] == "failed"
