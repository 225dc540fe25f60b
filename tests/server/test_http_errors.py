"""What a client is told of each error, of a request that is no request, and of one that may not enter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from cbatch import errors
from cbatch.backend.fake.fake_tokens import FakeVocab
from cbatch.server.http_errors import problem_of
from cbatch.server.pulse import Pulse
from cbatch.server.web_page import page_files
from tests.server.clients import CHAT, USER, call, error_of, fake_app, scope_of

ASKED = {"messages": USER, "max_tokens": 2}


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (errors.PromptTooLongError(9, 8), 400, "context_length_exceeded", None),
        (errors.UnsupportedOptionError("x"), 400, "unsupported_parameter", None),
        (errors.GrammarError("regex", "bad"), 400, "invalid_grammar", None),
        (errors.PromptError("bad"), 400, "invalid_prompt", None),
        (errors.BannedTokensError("all"), 400, "no_token_left", None),
        (errors.ConfigError("bad"), 400, None, None),
        (errors.QueueFullError(3, 3), 429, "rate_limit_exceeded", None),
        (errors.WorkerDiedError("killed"), 500, "worker_died", None),
        (errors.WorkerDiedError("killed", 2), 500, "worker_died", "false"),
        (errors.RequestFailedError("NaN"), 500, "request_failed", "false"),
        (errors.DecodeError(-3), 500, "engine_error", "false"),
        (errors.EngineClosedError("closed"), 503, "engine_closed", None),
        (errors.ModelLoadError("no file"), 503, "no_worker", None),
        (errors.RequestCancelledError("gone"), 503, "cancelled", None),
        (errors.DeadlineError(3.0), 504, "timeout", "false"),
        (KeyError("secret"), 500, "internal_error", "false"),
    ],
)
def test_error_has_its_status(
    error: Exception, status: int, code: str | None, retry: str | None
) -> None:
    problem = problem_of(error, "messages")
    assert (problem.status, problem.code) == (status, code)
    assert problem.headers.get("x-should-retry") == retry
    assert ("retry-after" in problem.headers) is (status in (429, 503))
    assert "secret" not in problem.message


SECRET = "/srv/secret/model.gguf"


@pytest.mark.parametrize(
    "error",
    [
        errors.CacheError("k", "nothing is kept", where=Path(SECRET)),
        errors.WorkerDiedError(f"signal 6: {SECRET}: abort", 2),
        errors.EngineClosedError(f"the engine stopped: {SECRET} is gone"),
        errors.ModelLoadError(f"{SECRET}: not a model"),
        errors.EngineError(f"no worker can be started: {SECRET}"),
        OSError(2, "not there", SECRET),
    ],
)
def test_no_error_tells_a_path_of_the_server(error: Exception) -> None:
    caused = errors.RequestFailedError(f"a bug of cbatch: {error}")
    caused.__cause__ = error
    for each in (error, caused):
        assert SECRET not in json.dumps(problem_of(each).as_openai())


def test_lack_of_processes_is_told_as_passing() -> None:
    failed = errors.RequestFailedError("the messages could not be rendered: no process")
    failed.__cause__ = OSError("no process")
    problem = problem_of(failed)
    assert (problem.status, problem.code) == (503, "no_resources")
    assert problem.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {}),
        (CHAT, {"stream": True}),
        ("/v1/chat/completions/input_tokens", {}),
        ("/apply-template", {}),
    ],
)
def test_chat_without_a_process_for_its_template_may_be_sent_again(
    path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*args: object, **named: object) -> None:
        raise errors.RequestFailedError("no process for the template") from OSError("it died")

    for name in ("render", "render_text"):
        monkeypatch.setattr(FakeVocab, name, render)
    with fake_app() as app:
        answer = call(app, path, {**ASKED, **more})
    assert error_of(answer, 503)["code"] == "no_resources"
    assert answer.headers["retry-after"] == "1"


def test_health_tells_no_path_of_the_server() -> None:
    class Ended:
        def stats(self) -> None:
            raise errors.EngineClosedError(f"the engine stopped: {SECRET}")

    ended: Any = Ended()
    pulse = Pulse(ended, float)
    anyio.run(pulse.ask)
    assert pulse.problem == "the engine has ended"


def test_deadline_in_the_queue_has_its_status(app: Starlette) -> None:
    for more in ({}, {"stream": True}):
        answer = call(app, CHAT, {**ASKED, "timeout_s": 0, **more})
        assert error_of(answer, 504)["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"


BODIES: dict[str, bytes] = {
    "empty": b"",
    "broken": b'{"messages": [',
    "list": b"[]",
    "NaN": b'{"temperature": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "not UTF-8": b'{"messages": "\xff"}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "deep": b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
    "deeper than Python": b'{"a": ' + b"[" * 200_000,
    "long number": b'{"seed": ' + b"9" * 5000 + b"}",
    "null": b"null",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_body_that_is_no_object_is_refused(app: Starlette, path: str, body: bytes) -> None:
    answer = call(app, path, body, headers={"content-type": "application/json"})
    error = error_of(answer, 400)
    assert error["code"] == "invalid_json"


def test_body_over_the_limit_is_refused_by_its_header_and_as_it_comes() -> None:
    with fake_app(max_body_mib=1) as app:
        large = json.dumps({**ASKED, "user": "x" * 2**20}).encode()
        headers = {"content-type": "application/json"}
        error = error_of(call(app, CHAT, large, headers=headers), 413)
        assert error["code"] == "request_too_large"
        assert "larger than 1,048,576 bytes: the server has --max-body-mib 1" in error["message"]
        lying = {**headers, "content-length": "9"}
        assert call(app, CHAT, large, headers=lying).status_code == 413
        assert call(app, CHAT, ASKED).status_code == 200


def test_other_media_types_are_refused(app: Starlette) -> None:
    body = json.dumps(ASKED).encode()
    for kind in ("text/plain", "multipart/form-data", ""):
        error_of(call(app, CHAT, body, headers={"content-type": kind}), 415)
    kind = "application/json; charset=utf-8"
    assert call(app, CHAT, body, headers={"content-type": kind}).status_code == 200


FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
def test_body_that_curl_calls_a_form_is_read_as_json(app: Starlette, path: str) -> None:
    body = json.dumps({**ASKED, "content": "a"}).encode()
    for agent in ("curl/8.5.0", ""):
        headers = {**FORM, "user-agent": agent}
        assert call(app, path, body, headers=headers).status_code == 200
    error = error_of(call(app, CHAT, b"messages=Hi", headers=FORM), 400)
    assert error["code"] == "invalid_json"


BROWSERS = [
    {"user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:60.0) Firefox/60.0"},
    {"user-agent": "Opera/9.80 (X11; Linux)"},
    {"referer": "http://127.0.0.1:8080/"},
    *({"sec-fetch-site": site} for site in ("same-origin", "none")),
    {"origin": "http://127.0.0.1:8080"},
]


@pytest.mark.parametrize("settings", [{}, {"api_keys": "k"}])
def test_form_of_a_browser_is_refused(settings: dict[str, Any]) -> None:
    body, url = json.dumps(ASKED).encode(), f"http://127.0.0.1:8080{CHAT}"
    with fake_app(**settings) as app:
        for marks in BROWSERS:
            headers = {**FORM, "x-api-key": "k", **marks}
            error_of(call(app, url, body, headers=headers), 415)
            as_json = {**headers, "content-type": "application/json"}
            assert call(app, url, body, headers=as_json).status_code == 200


def test_paths_and_methods_that_are_not_there_have_the_same_body(app: Starlette) -> None:
    assert error_of(call(app, "/v1/nothing"), 404)["code"] == "unknown_url"
    answer = call(app, CHAT, method="GET")
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    error = error_of(call(app, "/v1/models/none"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_path_that_is_not_there_is_told_whatever_the_host(app: Starlette) -> None:
    for host in ("localhost", "[1.2.3.4]", "[:::]", ""):
        for path in ("/v1/nothing", "/a?b#c"):
            answer = call(app, quote(path), headers={"host": host})
            assert error_of(answer, 404)["message"] == f"there is no {path}"


@pytest.mark.parametrize(
    "header", [{"authorization": "Bearer second"}, {"x-api-key": "first"}, {"api-key": "second"}]
)
def test_key_opens_by_any_header(header: dict[str, str]) -> None:
    with fake_app(api_keys=["first", "second"]) as app:
        assert call(app, CHAT, ASKED, headers=header).status_code == 200
        assert call(app, "/health").status_code == 200
        for wrong in ({}, {"authorization": "Bearer three"}, {"authorization": "second"}):
            answer = call(app, CHAT, b"never read", headers=wrong)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["x-request-id"].startswith("req_")
        assert "first" not in repr(app.state.desk.settings)


def test_every_path_but_health_and_the_page_needs_a_key() -> None:
    with fake_app(api_keys="k", page=False) as app:
        routes = [route for route in app.routes if isinstance(route, Route)]
        assert len(routes) > 70
        for route in routes:
            (method,) = (route.methods or set()) - {"HEAD"}
            path = re.sub(r"{.*?}", "a", route.path)
            if not path.endswith("/health"):
                assert call(app, path, method=method).status_code == 401, path


def test_pages_of_other_origins_may_call_where_that_is_said() -> None:
    asks: dict[str, Any] = {"origin": "http://page", "access-control-request-method": "POST"}
    with fake_app() as app:
        answer = call(app, CHAT, ASKED, headers={"origin": "http://page"})
        assert "access-control-allow-origin" not in answer.headers
    with fake_app(cors_origins="http://page", api_keys="k") as app:
        assert call(app, CHAT, method="OPTIONS", headers=asks).status_code == 200
        refused = call(app, CHAT, ASKED, headers={"origin": "http://page"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://page"


def test_body_that_does_not_arrive_is_told() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        await anyio.sleep_forever()

    async def send(message: Any) -> None:
        sent.append(message)

    with fake_app(body_timeout_s=0) as app:
        anyio.run(app, scope_of(CHAT), receive, send)
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["code"] == "body_timeout"


def test_application_may_be_mounted_in_another() -> None:
    with fake_app(api_keys="k") as app:
        outer = Starlette(routes=[Mount("/a/b", app)])
        for path in ("/health", "/", *(file.path for file in page_files())):
            assert call(outer, f"/a/b{path}").status_code == 200
        for path, asked in ((CHAT, ASKED), ("/props", None)):
            error_of(call(outer, f"/a/b{path}", asked), 401)
        headers = {"api-key": "k"}
        assert call(outer, f"/a/b{CHAT}", ASKED, headers=headers).status_code == 200
        assert error_of(call(outer, "/a/b/x", headers=headers), 404)
