"""Spans of requests and answers, as an exporter of OpenTelemetry gets them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.errors import ConfigError
from cbatch.server import create_app, telemetry
from tests.server.clients import CHAT, COMPLETIONS, USER, call, fake_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ASKED = {"messages": USER, "max_tokens": 4, "ignore_eos": True}
PARENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(telemetry, "find_tracer", lambda: provider.get_tracer("test"))
    yield found
    provider.shutdown()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_request_has_a_span_and_its_answer_one_within(
    exporter: InMemorySpanExporter, is_streamed: bool
) -> None:
    with fake_app(model_name="m") as app:
        answer = call(app, CHAT, {**ASKED, "stream": is_streamed}, headers=PARENT)
        spans = exporter.get_finished_spans()
    said, request = spans
    assert (said.name, request.name) == ("answer", "POST /chat/completions")
    assert request.parent is not None
    assert said.parent is not None
    assert f"{request.parent.trace_id:x}" == "a" * 32
    assert f"{request.parent.span_id:x}" == "b" * 16
    assert said.parent.span_id == request.context.span_id
    id = answer.headers["x-request-id"]
    assert dict(request.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/chat/completions",
        "http.response.status_code": 200,
        "cbatch.request_id": id,
    }
    told = dict(said.attributes or {})
    assert (told["cbatch.request_id"], told["cbatch.model"]) == (id, "m")
    assert (told["cbatch.completion_tokens"], told["cbatch.finish_reason"]) == (4, "length")
    assert None not in (said.start_time, said.end_time, request.start_time, request.end_time)
    assert "Hi" not in str(told)


def test_long_header_of_a_parent_is_not_read(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[dict[str, str]] = []
    monkeypatch.setattr("opentelemetry.propagate.extract", read.append)
    with fake_app() as app:
        for n in (100, 60_000):
            call(app, CHAT, ASKED, headers={**PARENT, "tracestate": " " * n + "a=b"})
    assert [sorted(told) for told in read] == [["traceparent", "tracestate"], ["traceparent"]]
    assert len(exporter.get_finished_spans()) == 4


def test_prompts_of_one_call_have_spans_of_their_own(exporter: InMemorySpanExporter) -> None:
    with fake_app() as app:
        call(app, COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2})
    assert [span.name for span in exporter.get_finished_spans()] == [
        "answer",
        "answer",
        "POST /completions",
    ]


def test_refusals_have_a_span_and_polls_have_none(exporter: InMemorySpanExporter) -> None:
    with fake_app(api_keys=["k"]) as app:
        call(app, "/slots", headers={"x-cbatch-poll": "1", "x-api-key": "k"})
        call(app, CHAT, ASKED)
        app.state.desk.is_draining = True
        call(app, CHAT, ASKED, headers={"x-api-key": "k"})
    refused, draining = exporter.get_finished_spans()
    assert dict(refused.attributes or {})["http.response.status_code"] == 401
    assert refused.status.is_unset
    assert dict(draining.attributes or {})["http.response.status_code"] == 503
    assert not draining.status.is_ok
    assert not draining.status.is_unset


def test_server_works_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    telemetry.find_tracer.cache_clear()
    try:
        assert telemetry.find_tracer() is None
        with fake_app() as app:
            assert call(app, CHAT, ASKED).status_code == 200
    finally:
        monkeypatch.undo()
        telemetry.find_tracer.cache_clear()


def test_nothing_is_recorded_where_nobody_asked_for_it() -> None:
    pytest.importorskip("opentelemetry")
    scope = {"method": "GET", "headers": []}
    assert telemetry.begun_span(scope, "a") is None


FIRST_REQUESTS = f"""
import sys
from tests.server.clients import call, fake_app
with fake_app() as app:
    before = {{*sys.modules}}
    for path, asked in {[(CHAT, ASKED), (COMPLETIONS, {"prompt": "a", "stream": True})]!r}:
        assert call(app, path, asked, headers={PARENT!r}).status_code == 200
    print(*(name for name in {{*sys.modules}} - before if name.startswith(("cbatch", "opentelemetry"))))
"""


@pytest.mark.real
def test_first_requests_load_no_module() -> None:
    pytest.importorskip("opentelemetry")
    done = subprocess.run(
        [sys.executable, "-c", FIRST_REQUESTS], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == []


def test_propagator_that_is_not_there_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opentelemetry")
    monkeypatch.setenv("OTEL_PROPAGATORS", "nowhere")
    monkeypatch.delitem(sys.modules, "opentelemetry.propagate", raising=False)
    telemetry.find_tracer.cache_clear()
    try:
        with Engine(FakeBackend(1, 64)) as engine, pytest.raises(ConfigError, match="nowhere"):
            create_app(engine)
    finally:
        monkeypatch.undo()
        telemetry.find_tracer.cache_clear()
