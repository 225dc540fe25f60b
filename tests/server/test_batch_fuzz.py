"""Any bodies in the lines of a batch, any values in its fields, any forms and any ids: an answer or a refusal.

Lines are answered as they are at the endpoints, and refusals have the form of the path's dialect.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.server import test_message_batches as messages
from tests.server.clients import CHAT, COMPLETIONS, MESSAGES, call
from tests.server.kept import answers, begun, ended, kept_app, line, lines
from tests.server.test_body_fuzz import bodies, values
from tests.server.test_files import END, TYPE, part
from tests.server.test_message_batches import BATCHES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from starlette.applications import Starlette

RESPONSES = "/v1/responses"
unhurried = settings(
    max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow], deadline=None
)


@pytest.fixture(scope="module")
def app() -> Iterator[Starlette]:
    with tempfile.TemporaryDirectory() as folder, kept_app(Path(folder)) as made:
        yield made


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@unhurried
@given(data=st.data())
def test_line_is_answered_as_its_body_is_alone(
    app: Starlette, endpoint: str, data: st.DataObject
) -> None:
    asked: list[dict[str, Any]] = data.draw(st.lists(bodies(endpoint), min_size=1, max_size=4))
    for body in asked:
        body.pop("stream", None)
        body.pop("model", None)
        if endpoint == COMPLETIONS and isinstance(body.get("prompt"), list):
            body["prompt"] = "ab"
    found = of_messages(app, asked) if endpoint == MESSAGES else of_lines(app, asked, endpoint)
    for i, body in enumerate(asked):
        if not body and endpoint != MESSAGES:
            continue  # `line` has made one
        alone = call(app, endpoint, body)
        is_answered, error = found[f"r{i}"]
        assert is_answered is (alone.status_code == 200), alone.text
        if alone.status_code != 200:
            said = alone.json()
            said.pop("request_id", None)
            assert error == said


def of_lines(app: Starlette, asked: list[dict[str, Any]], endpoint: str) -> dict[str, Any]:
    """Whether each line of a batch is answered, and what else is told of it."""
    data = lines(*(line(f"r{i}", endpoint, **body) for i, body in enumerate(asked)))
    batch = ended(app, begun(app, data, endpoint))
    assert batch["status"] == "completed", batch["errors"]
    told = {id: each["response"] for id, each in answers(app, batch).items()}
    return {id: (each["status_code"] == 200, each["body"]) for id, each in told.items()}


def of_messages(app: Starlette, asked: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of a batch of messages."""
    requests = [{"custom_id": f"r{i}", "params": body} for i, body in enumerate(asked)]
    id = messages.created(app, *requests)["id"]
    told = messages.results(app, messages.ended(app, id))
    call(app, f"{BATCHES}/{id}", method="DELETE")
    return {id: (each["type"] == "succeeded", each.get("error")) for id, each in told.items()}


@unhurried
@given(
    parts=st.lists(
        st.binary(max_size=40)
        | st.sampled_from([b"\n", b"\r\n", b"\xef\xbb\xbf", b"\x1f\x8b\x08\0", b"[" * 999, b"null"])
        | values.map(lambda value: json.dumps(value).encode() + b"\n")
        | st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body"]), values).map(
            lambda value: json.dumps(value).encode() + b"\n"
        )
        | st.just(lines(line("a"))),
        min_size=1,
        max_size=5,
    )
)
def test_any_bytes_end_as_a_batch_that_says_why(app: Starlette, parts: list[bytes]) -> None:
    data = b"".join(parts)
    if not data:
        return
    batch = ended(app, begun(app, data))
    assert batch["status"] in ("completed", "failed")
    if batch["status"] == "failed":
        assert all(each["code"] != "internal_error" for each in batch["errors"]["data"])
        assert all(each["message"] for each in batch["errors"]["data"])
    else:
        assert set(parts) <= {lines(line("a")), b"", b"\n", b"\r\n", b"\xef\xbb\xbf"}


def check_refusal(path: str, answer: httpx.Response) -> None:
    """Check that a refusal is one, in the form of the path's dialect."""
    assert 400 <= answer.status_code < 500, answer.text
    said = answer.json()
    error = said["error"]
    assert error["message"]
    if path.startswith(MESSAGES):
        assert (said["type"], said["request_id"]) == ("error", answer.headers["request-id"])
    else:
        assert error.keys() >= {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"


texts = st.text(max_size=8) | st.sampled_from(["batch", "created_at", "3600", "x" * 5000])
parts = st.tuples(
    st.sampled_from(["file", "purpose", "expires_after[anchor]", "expires_after[seconds]"])
    | st.text(st.characters(exclude_characters='"\r\n', codec="utf-8"), max_size=4),
    st.binary(max_size=40) | texts.map(str.encode) | st.just(b"\r\n--\r\n------x\r\n"),
    st.none()
    | st.text(st.characters(exclude_characters='"\r\n', codec="utf-8"), max_size=9)
    | st.sampled_from(["../../etc/passwd", "a\\b", "%00", "x" * 999]),
)


@unhurried
@given(data=st.data())
def test_any_form_is_a_file_or_refused(app: Starlette, data: st.DataObject) -> None:
    some = data.draw(st.lists(parts, max_size=4))
    if data.draw(st.booleans()):
        some += [("purpose", b"batch", None), ("file", data.draw(st.binary(max_size=99)), "a")]
    body = b"".join(part(*each) for each in some) + END
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(body)))
        end = data.draw(st.integers(at, min(len(body), at + 20)))
        odd = [b"", b"\0", b"\xff", b"\r\n", b"--", b":", b"\r\n\r\n", b";", b'"', b"x" * 5000]
        body = body[:at] + data.draw(st.sampled_from(odd)) + body[end:]
    kind = data.draw(
        st.just(TYPE)
        | st.sampled_from([b"multipart/form-data; boundary=x", b"multipart/form-data", b""])
        | st.binary(max_size=20).map(lambda some: b"multipart/form-data; boundary=" + some)
    )
    headers = [(b"content-type", kind)]
    answer = call(app, "/v1/files", body, method="POST", headers=headers)
    if answer.status_code == 200:
        file = answer.json()
        sent = call(app, f"/v1/files/{file['id']}/content")
        assert len(sent.content) == file["bytes"] > 0
        assert call(app, f"/v1/files/{file['id']}", method="DELETE").json()["deleted"]
    else:
        check_refusal("/v1/files", answer)
    store, settings = app.state.desk.batches.store, app.state.desk.settings
    listed, _ = store.files("", None, 10_000, is_newest_first=True, purpose=None)
    found = {path.name for path in (Path(settings.files_dir) / "content").iterdir()}
    assert found == {file.id for file in listed}


NOBODY = [b"../index.sqlite3", b"..", b".", b"/", b"//", b"a/../..", b"\0", b"%2e%2e", b"'; --"]
NOBODY += [b"*", b"file-", b"batch_", b"msgbatch_", b"batch_*", b"x" * 5000]
ids = st.binary(max_size=12) | st.text(max_size=8).map(str.encode) | st.sampled_from(NOBODY)
ROUTES = [
    *("/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/batches/{}/cancel"),
    *(f"{BATCHES}/{{}}{end}" for end in ("", "/cancel", "/results")),
    *("/v1/files?after={}", "/v1/files?limit={}", f"{BATCHES}?before_id={{}}"),
]


@unhurried
@given(
    route=st.sampled_from(ROUTES),
    id=ids,
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
)
def test_any_id_of_nobody_is_not_there(app: Starlette, route: str, id: bytes, method: str) -> None:
    path = route.format(quote(id, safe=""))
    answer = call(app, path, method=method)
    if answer.status_code == 200:  # nothing was asked for but a list
        assert method == "GET"
        assert "data" in answer.json()
    else:
        assert answer.status_code in (400, 404, 405, 415), answer.text
        check_refusal(path, answer)
