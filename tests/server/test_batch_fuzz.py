"""Any bodies in the lines of a batch, and any values in its fields: an answer or a refusal, as at the endpoints."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.server.clients import CHAT, COMPLETIONS, call
from tests.server.kept import answers, begun, ended, kept_app, line, lines, upload
from tests.server.test_body_fuzz import bodies, values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.applications import Starlette

RESPONSES = "/v1/responses"
FIELDS = (
    *("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"),
    *("model", "x", "anchor"),
)
unhurried = settings(
    max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow], deadline=None
)


@pytest.fixture(scope="module")
def app() -> Iterator[Starlette]:
    with tempfile.TemporaryDirectory() as folder, kept_app(Path(folder)) as made:
        yield made


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
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
    batch = ended(
        app,
        begun(
            app, lines(*(line(f"r{i}", endpoint, **body) for i, body in enumerate(asked))), endpoint
        ),
    )
    assert batch["status"] == "completed", batch["errors"]
    found = answers(app, batch)
    for i, body in enumerate(asked):
        if not body:
            continue  # `line` has made one
        alone, told = call(app, endpoint, body), found[f"r{i}"]["response"]
        assert told["status_code"] == alone.status_code, alone.text
        if alone.status_code != 200:
            assert told["body"] == alone.json()


@unhurried
@given(fields=st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_fields_of_a_batch_are_taken_or_refused(app: Starlette, fields: dict[str, Any]) -> None:
    file = upload(app, lines(line("a"))).json()["id"]
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **fields}
    answer = call(app, "/v1/batches", asked)
    if answer.status_code == 200:
        assert ended(app, answer.json()["id"])["status"] == "completed"
    else:
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["message"]


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
