"""Anthropic's message batches: asked for, told and answered in their own form, over the store of all batches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine
from tests.runtime.backends import GatedBackend
from tests.server.clients import MESSAGES, USER, call, wait_until
from tests.server.kept import SHORT, begun, kept_app, line, lines
from tests.server.test_batch_restarts import Ending

if TYPE_CHECKING:
    from pathlib import Path

    import httpx
    from starlette.applications import Starlette

BATCHES = f"{MESSAGES}/batches"
PARAMS: dict[str, Any] = {"model": "m", "messages": USER, **SHORT}
N = 40


def request(id: str, **params: Any) -> dict[str, Any]:
    """A request of a batch; without params a short message."""
    return {"custom_id": id, "params": params or PARAMS}


def created(app: Starlette, *requests: dict[str, Any]) -> dict[str, Any]:
    answer = call(app, BATCHES, {"requests": [*requests]})
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    assert batch["processing_status"] == "in_progress"
    return batch


def told(app: Starlette, id: str) -> dict[str, Any]:
    answer = call(app, f"{BATCHES}/{id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    counts = found["request_counts"]
    if found["processing_status"] == "ended":
        assert counts["processing"] == 0
        assert found["ended_at"]
        assert found["results_url"] == f"{BATCHES}/{id}/results"
    else:
        assert counts["processing"] == sum(counts.values())
        assert found["ended_at"] is found["results_url"] is None
    return found


def ended(app: Starlette, id: str) -> dict[str, Any]:
    """A batch when it has ended."""
    wait_until(lambda: told(app, id)["processing_status"] == "ended")
    return told(app, id)


def results(app: Starlette, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The results of a batch by id, each once, and of each type as many as are counted."""
    answer = call(app, batch["results_url"])
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-jsonl"
    read = [json.loads(one) for one in answer.content.splitlines()]
    found = {each["custom_id"]: each["result"] for each in read}
    assert len(found) == len(read)
    counts = {name: n for name, n in batch["request_counts"].items() if n}
    types = [result["type"] for result in found.values()]
    assert {name: types.count(name) for name in types} == counts
    return found


def refusal_of(answer: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """The message of a refusal in Anthropic's form."""
    assert answer.status_code == status, answer.text
    said = answer.json()
    assert (said["type"], said["error"]["type"]) == ("error", kind)
    assert said["request_id"] == answer.headers["request-id"]
    message: str = said["error"]["message"]
    return message


def test_batch_has_a_result_for_each_request(kept: Starlette) -> None:
    alone = call(kept, MESSAGES, PARAMS).json()
    wrong = request("wrong", **{**PARAMS, "temperature": -1})
    streamed = request("streamed", **{**PARAMS, "stream": True})
    other = request("other", **{**PARAMS, "model": "another"})
    empty = request("empty")
    empty["params"] = {}
    batch = created(kept, request("a"), wrong, streamed, other, empty)
    assert batch["request_counts"]["processing"] == 5
    done = ended(kept, batch["id"])
    found = results(kept, done)
    unchanged = ("id", "type", "created_at", "expires_at", "cancel_initiated_at", "archived_at")
    assert [done[name] for name in unchanged] == [batch[name] for name in unchanged]
    assert (batch["type"], batch["cancel_initiated_at"]) == ("message_batch", None)
    for name, model in (("a", "m"), ("other", "another")):
        message = found[name]["message"]
        assert message["id"].startswith("msg_")
        assert message["content"] == alone["content"]
        assert message["stop_reason"] == alone["stop_reason"]
        assert message["usage"]["output_tokens"] == alone["usage"]["output_tokens"]
        assert message["model"] == model
    errors = {name: found[name]["error"] for name in ("wrong", "streamed", "empty")}
    assert {each["type"] for each in errors.values()} == {"error"}
    assert {each["error"]["type"] for each in errors.values()} == {"invalid_request_error"}
    assert "temperature" in errors["wrong"]["error"]["message"]
    assert "stream" in errors["streamed"]["error"]["message"]
    assert "max_tokens" in errors["empty"]["error"]["message"]


WRONG: list[tuple[Any, str]] = [
    *((None, "requests"), ([], "requests"), ({}, "requests")),
    ([3], "requests.0"),
    ([request("a"), {"params": PARAMS}], "requests.1.custom_id"),
    *(([request(id)], "requests.0.custom_id") for id in ("a b", "a\n", "é", "x" * 65)),
    ([{"custom_id": 3, "params": PARAMS}], "requests.0.custom_id"),
    ([request("a"), request("b"), request("a")], "requests.2.custom_id"),
    ([{"custom_id": "a"}], "requests.0.params"),
    ([{"custom_id": "a", "params": []}], "requests.0.params"),
    ([request("a")] * 100_001, "requests must be a list of 1 … 100000 items, not 100001"),
]


def test_wrong_requests_are_refused_by_their_place(kept: Starlette, tmp_path: Path) -> None:
    for requests, place in WRONG:
        assert place in refusal_of(call(kept, BATCHES, {"requests": requests}), 400)
    assert call(kept, BATCHES).json()["data"] == []
    for name in ("work", "content"):
        assert not [*(tmp_path / "kept" / name).iterdir()]


def test_ten_thousand_small_requests_are_taken_by_default(kept: Starlette) -> None:
    kept.state.desk.room.set_calls(4)  # which leaves no slot
    id = created(kept, *(request(f"r{i}") for i in range(10_000)))["id"]
    assert told(kept, id)["request_counts"]["processing"] == 10_000
    call(kept, f"{BATCHES}/{id}/cancel", method="POST")
    assert ended(kept, id)["request_counts"]["canceled"] == 10_000


def test_limits_hold_in_the_form_of_the_dialect(tmp_path: Path) -> None:
    with kept_app(tmp_path, max_body_mib=1, max_stored_mib=1, api_keys=["k"]) as app:
        key = {"x-api-key": "k"}
        body = {"requests": [request("a", **{**PARAMS, "system": "x" * 2**20})]}
        message = refusal_of(call(app, BATCHES, body, headers=key), 413, "request_too_large")
        assert "--max-body-mib 1" in message
        refusal_of(call(app, BATCHES, body), 401, "authentication_error")
        # numbers may be longer as they are written here than as they came
        long = b'{"requests":[{"custom_id":"a","params":{"x":[' + b"1e15," * 99_999 + b"1]}}]}"
        answer = call(app, BATCHES, long, headers={**key, "content-type": "application/json"})
        message = refusal_of(answer, 413, "request_too_large")
        assert "requests.0" in message
        assert "--max-body-mib 1" in message
        app.state.desk.batches.store.reserve(2**20 - 99)
        some = {"requests": [request("a")]}
        refusal_of(call(app, BATCHES, some, headers=key), 507, "api_error")


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    for is_strict in (False, True):
        with kept_app(tmp_path / str(is_strict), strict_fields=is_strict) as app:
            answer = call(app, BATCHES, {"requests": [request("a")], "more": 1})
        if is_strict:
            assert "more" in refusal_of(answer, 400)
        else:
            assert answer.headers["x-ignored-fields"] == "more"


def test_canceled_batch_says_which_requests_were_not_asked(tmp_path: Path) -> None:
    backend = GatedBackend(2, 256, hold_at=20)
    with kept_app(tmp_path, Engine(backend)) as app:
        wrong = request("wrong", **{**PARAMS, "temperature": -1})
        id = created(app, wrong, *(request(f"r{i}") for i in range(N)))["id"]
        place = f"{BATCHES}/{id}"
        backend.wait_until_held()
        assert "not ended" in refusal_of(call(app, f"{place}/results"), 404, "not_found_error")
        refusal_of(call(app, place, method="DELETE"), 409)
        first, again = (call(app, f"{place}/cancel", method="POST").json() for _ in range(2))
        assert first["processing_status"] == "canceling"
        assert again["cancel_initiated_at"] == first["cancel_initiated_at"] is not None
        backend.release()
        batch = ended(app, id)
        found = results(app, batch)
        assert call(app, f"{place}/cancel", method="POST").json() == batch
    assert len(found) == N + 1
    counts = batch["request_counts"]
    assert counts["errored"] == 1
    assert 2 <= counts["succeeded"] < N
    assert counts["canceled"] == N - counts["succeeded"]
    canceled = [result for result in found.values() if result["type"] == "canceled"]
    assert canceled == [{"type": "canceled"}] * counts["canceled"]


def test_requests_are_expired_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.server.message_batches._WINDOW_S", 1)
    with kept_app(tmp_path) as app:
        app.state.desk.room.set_calls(4)  # which leaves no slot
        batch = ended(app, created(app, request("a"), request("b"))["id"])
        app.state.desk.room.set_calls(0)
        assert results(app, batch) == {"a": {"type": "expired"}, "b": {"type": "expired"}}
        refusal_of(call(app, f"{BATCHES}/{batch['id']}/cancel", method="POST"), 409)


@pytest.mark.parametrize("is_canceled", [False, True])
def test_server_may_end_at_any_step_of_a_batch(tmp_path: Path, *, is_canceled: bool) -> None:
    requests = [request("wrong", **{**PARAMS, "temperature": -1}), request("a"), request("b")]
    for i_end in range(99):
        folder = tmp_path / str(i_end)
        with pytest.MonkeyPatch.context() as patch, kept_app(folder) as app:
            if is_canceled:
                app.state.desk.room.set_calls(4)  # which leaves no slot
            ending = Ending(patch, i_end, is_after=False)
            id = created(app, *requests)["id"]
            if is_canceled:
                call(app, f"{BATCHES}/{id}/cancel", method="POST")
            _wait(app, id, ending)
        with kept_app(folder) as app:
            found = results(app, ended(app, id))
            assert found.keys() == {"wrong", "a", "b"}
            call(app, f"{BATCHES}/{id}", method="DELETE")
            for name in ("work", "content"):
                assert not [*(folder / "kept" / name).iterdir()]
        if not ending.has_come.is_set():
            break
    assert i_end > 3


def _wait(app: Starlette, id: str, ending: Ending) -> None:
    wait_until(lambda: ending.has_come.is_set() or told(app, id)["processing_status"] == "ended")


def test_deleted_batch_leaves_nothing(kept: Starlette, tmp_path: Path) -> None:
    wrong = request("wrong", **{**PARAMS, "temperature": -1})
    id = created(kept, request("a"), wrong)["id"]
    ended(kept, id)
    assert len([*(tmp_path / "kept" / "content").iterdir()]) == 2
    answer = call(kept, f"{BATCHES}/{id}", method="DELETE")
    assert answer.json() == {"id": id, "type": "message_batch_deleted"}
    for path, method in (("", "GET"), ("", "DELETE"), ("/results", "GET"), ("/cancel", "POST")):
        gone = call(kept, f"{BATCHES}/{id}{path}", method=method)
        refusal_of(gone, 404, "not_found_error")
    assert call(kept, BATCHES).json()["data"] == []
    assert [*(tmp_path / "kept" / "content").iterdir()] == []


def test_results_whose_file_was_deleted_are_not_half_told(kept: Starlette) -> None:
    id = created(kept, request("a"))["id"]
    ended(kept, id)
    (file,) = call(kept, "/v1/files").json()["data"]
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{id}_output.jsonl")
    call(kept, f"/v1/files/{file['id']}", method="DELETE")
    answer = call(kept, f"{BATCHES}/{id}/results")
    assert file["id"] in refusal_of(answer, 404, "not_found_error")
    assert call(kept, f"{BATCHES}/{id}", method="DELETE").status_code == 200


def test_batches_are_listed_by_pages_both_ways_and_by_dialect(kept: Starlette) -> None:
    openai = begun(kept, lines(line("a")))
    ids = [created(kept, request("a"))["id"] for _ in range(5)][::-1]
    for id in ids:
        ended(kept, id)
    whole = call(kept, BATCHES).json()
    assert [each["id"] for each in whole["data"]] == ids
    assert (whole["first_id"], whole["last_id"], whole["has_more"]) == (ids[0], ids[-1], False)

    def page(query: str) -> tuple[list[str], bool]:
        found = call(kept, f"{BATCHES}?{query}").json()
        return [each["id"] for each in found["data"]], found["has_more"]

    assert page("limit=2") == (ids[:2], True)
    assert page(f"limit=2&after_id={ids[1]}") == (ids[2:4], True)
    assert page(f"limit=2&after_id={ids[3]}") == (ids[4:], False)
    assert page(f"limit=2&before_id={ids[4]}") == (ids[2:4], True)
    assert page(f"limit=2&before_id={ids[2]}") == (ids[:2], False)
    for query, status in (("limit=0", 400), ("limit=1001", 400), ("after_id=x", 404)):
        assert call(kept, f"{BATCHES}?{query}").status_code == status
    both = call(kept, f"{BATCHES}?before_id={ids[0]}&after_id={ids[0]}")
    refusal_of(both, 400)
    assert [each["id"] for each in call(kept, "/v1/batches").json()["data"]] == [openai]
    assert call(kept, f"/v1/batches/{ids[0]}").status_code == 404
    refusal_of(call(kept, f"{BATCHES}/{openai}"), 404, "not_found_error")
