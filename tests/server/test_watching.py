"""Metrics, slots, and the log's line of a request: read as their readers do."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.runtime.step_record import SlotState
from cbatch.server import pulse
from cbatch.server.desk import keep_asking
from cbatch.server.meters import Histogram
from cbatch.server.pulse import EngineQuestion, Pulse
from cbatch.stats import EngineStats, Percentiles
from cbatch.support.logs import FIELDS
from tests.no_threads import NoThreads
from tests.runtime.backends import PATIENCE_S, GatedBackend, n_commands
from tests.server.clients import (
    CHAT,
    COMPLETIONS,
    USER,
    call,
    events_of,
    fake_app,
    wait_until,
)
from tests.worker.links import engine_over

if TYPE_CHECKING:
    from starlette.applications import Starlette

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

ASKED = {"messages": USER, "max_tokens": 9, "ignore_eos": True, "seed": 1}
HISTOGRAMS = (
    *(f"cbatch:{what}_seconds" for what in ("queue", "ttft", "e2e")),
    *(f"cbatch:request_{what}_tokens" for what in ("prompt", "output")),
    *("vllm:request_queue_time_seconds", "vllm:time_to_first_token_seconds"),
    *("vllm:e2e_request_latency_seconds", "vllm:request_prompt_tokens"),
    "vllm:request_generation_tokens",
)


@pytest.fixture(autouse=True)
def answers_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has time answers, however late, and its last figures are never told instead."""
    monkeypatch.setattr(pulse, "_PATIENCE_S", PATIENCE_S)


def scrape(app: Starlette) -> Samples:
    """All samples by name and labels; each occurs once."""
    answer = call(app, "/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def of(samples: Samples, name: str, **labels: str) -> float:
    if name.startswith("vllm:"):
        labels |= {"model_name": "m", "engine": "0"}
    return samples[name, frozenset(labels.items())]


# ---- metrics ----


SAME = {
    18: (
        "cbatch:output_tokens_total",
        "vllm:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
    14: (
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_queries_total",
        "cbatch:request_prompt_tokens_sum",
    ),
    0: (
        *(f"cbatch:requests_{what}" for what in ("running", "waiting", "paused")),
        *(f"vllm:num_requests_{what}" for what in ("running", "waiting")),
        *(f"llamacpp:requests_{what}" for what in ("processing", "deferred")),
        *("cbatch:preemptions_total", "vllm:num_preemptions_total"),
    ),
    2 * 64: ("cbatch:cells",),
    2: tuple(f"{name}_count" for name in HISTOGRAMS),
}
"""Figures that are equal where two answers have nine tokens each."""


def test_figures_of_answers_have_the_names_of_three_servers() -> None:
    with fake_app(2, 64, model_name="m") as app:
        assert call(app, CHAT, ASKED).status_code == 200
        events_of(call(app, CHAT, {**ASKED, "stream": True}))
        found = scrape(app)
    n_prompt, n_cached = (
        of(found, "cbatch:prompt_tokens_total", source=source) for source in ("computed", "cached")
    )
    assert n_prompt + n_cached == 2 * 7
    assert of(found, "vllm:prefix_cache_hits_total") == n_cached
    assert of(found, "llamacpp:prompt_tokens_cached_total") == n_cached
    assert of(found, "llamacpp:prompt_tokens_total") == n_prompt
    for n, names in SAME.items():
        assert {name: of(found, name) for name in names} == dict.fromkeys(names, n)
    assert of(found, "cbatch:steps_total") == of(found, "llamacpp:n_decode_total") > 0
    assert of(found, "cbatch:requests_finished_total", reason="length") == 2
    assert of(found, "vllm:request_success_total", finished_reason="length") == 2
    assert of(found, "cbatch:request_output_tokens_sum") == 18
    for bound, n in (("5.0", 0), ("10.0", 2)):
        assert of(found, "cbatch:request_output_tokens_bucket", le=bound) == n
    for name in ("cbatch:itl_seconds", "vllm:inter_token_latency_seconds"):
        assert of(found, f"{name}_bucket", le="+Inf") == of(found, f"{name}_count") == 16


def test_log_timings_metrics_and_stats_tell_the_same_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "cbatch")
    with (
        Engine(FakeBackend(2, 64), model_name="m") as engine,
        fake_app(engine=engine, model_name="m") as app,
    ):
        timings = call(app, CHAT, ASKED).json()["timings"]
        found, stats = scrape(app), engine.stats()
    [line] = [getattr(r, FIELDS) for r in caplog.records if r.getMessage().startswith("request ")]
    names = {"completion_tokens": "predicted_n", "cached_tokens": "cache_n"}
    assert {name: line[name] for name in names} == {n: timings[t] for n, t in names.items()}
    for tps, per_second in (("prompt_tps", "prompt"), ("generation_tps", "predicted")):
        told = timings[f"{per_second}_per_second"]
        assert (line[tps] or 0.0) == round(told, 2)
        assert timings[f"{per_second}_per_token_ms"] * told == pytest.approx(1e3 if told else 0.0)
    assert line["queue_ms"] == pytest.approx(timings["queue_ms"], abs=0.001)
    assert line["ttft_ms"] == pytest.approx(timings["queue_ms"] + timings["prompt_ms"], abs=0.002)
    in_s = {
        "cbatch:queue_seconds_sum": line["queue_ms"],
        "cbatch:ttft_seconds_sum": line["ttft_ms"],
        "cbatch:e2e_seconds_sum": line["latency_ms"],
        "llamacpp:prompt_seconds_total": timings["prompt_ms"],
        "llamacpp:tokens_predicted_seconds_total": timings["predicted_ms"],
    }
    for name, ms in in_s.items():
        assert of(found, name) == pytest.approx(ms / 1e3, abs=1e-6), name
    for name, (per_second, n) in {
        "llamacpp:prompt_tokens_seconds": ("prompt", 7),
        "llamacpp:predicted_tokens_seconds": ("predicted", 9 - 1),
    }.items():
        expected = n * 1e3 / timings[f"{per_second}_ms"]
        assert of(found, name) == pytest.approx(expected, rel=1e-6), name
    assert stats.n_output_tokens == timings["predicted_n"] == 9
    assert (stats.ttft_s.at(50) or 0.0) == pytest.approx(line["ttft_ms"] / 1e3, rel=0.05)


def test_scrape_resets_nothing_and_counts_itself() -> None:
    with fake_app(2, 64, model_name="m") as app:
        call(app, CHAT, ASKED)
        call(app, "/health")
        first, second = scrape(app), scrape(app)
    own = "cbatch:http_requests_total", frozenset({("route", "/metrics"), ("status", "200")})
    assert own not in first
    assert second.pop(own) == 1
    varies = "cbatch:figures_age_seconds", frozenset[tuple[str, str]]()
    assert first.pop(varies) >= 0 <= second.pop(varies)
    assert first == second


def test_metrics_are_made_once_for_all_that_ask_in_a_round_of_the_loop() -> None:
    """A client may ask thousands of times at once, and all others wait while they are made."""

    async def asked(app: Any) -> list[bytes]:
        exposition = app.state.desk.exposition
        found = [exposition.text(), exposition.text()]
        await asyncio.sleep(0)
        return [*found, exposition.text()]

    with fake_app(2, 64, model_name="m") as app:
        first, second, later = asyncio.run(asked(app))
    assert first is second
    assert later is not first


def test_labels_hold_neither_ids_nor_paths_of_clients() -> None:
    with fake_app(2, 64, model_name="m", api_keys=["k"]) as app:
        headers = {"x-api-key": "k"}
        first = call(app, "/metrics", headers=headers)
        assert first.headers["process-start-time-unix"] == str(app.state.desk.created)
        assert "llamacpp:predicted_tokens_seconds 0.0" in first.text  # no rate of no answer
        for path in ("/v1/models/a", "/models/b", "/secret", "/v1/secret/2"):
            call(app, path, headers=headers)
        call(app, "/v1/models")
        call(app, CHAT, ASKED, headers=headers)
        call(app, CHAT, {"messages": 3}, headers=headers)
        text = call(app, "/metrics", headers=headers).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["cbatch:http_requests"].samples
    routes = {(sample.labels["route"], sample.labels["status"]): sample.value for sample in samples}
    assert routes == {
        ("/metrics", "200"): 1,
        ("/models/{name:path}", "404"): 2,
        ("other", "404"): 2,
        ("other", "401"): 1,
        ("/chat/completions", "200"): 1,
        ("/chat/completions", "400"): 1,
    }
    assert "req_" not in text
    assert "secret" not in text


def test_workers_count_together() -> None:
    backends = [FakeBackend(2, 64) for _ in range(2)]
    with fake_app(engine=engine_over(*backends), model_name="m") as app:
        call(app, COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 2, "ignore_eos": True})
        found = scrape(app)
        slots = call(app, "/slots").json()
    assert of(found, "cbatch:cells") == 2 * 2 * 64
    assert of(found, "cbatch:output_tokens_total") == 6
    assert of(found, "cbatch:ttft_seconds_count") == 3
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]


def test_histogram_of_percentiles_keeps_their_number_and_nearly_their_sum() -> None:
    times = Percentiles()
    times.add(0.004, 3)
    times.add(0.3)
    histogram = Histogram.of(times, (0.01, 1.0))
    assert histogram.cumulative() == [(0.01, 3), (1.0, 4), (float("inf"), 4)]
    assert histogram.total == pytest.approx(0.312, rel=0.03)


# ---- slots, and an engine in a long run ----


def test_slots_tell_who_computes_and_no_text() -> None:
    backend = GatedBackend(2, 256, hold_at=3)
    with Engine(backend) as engine, fake_app(engine=engine) as app:
        found = _while_answering(app, backend)
        running, free = sorted(found["/slots"].json(), key=lambda slot: slot["status"] == "free")
        backend.release()
    assert free["status"] == "free"
    assert not free["is_processing"]
    assert running["is_processing"]
    assert running["id_task"] == found[CHAT].headers["x-request-id"]
    assert (running["n_ctx"], running["n_prompt_tokens"]) == (256, 7)
    assert running["n_prompt_tokens_processed"] == 7
    (next_token,) = running["next_token"]
    assert next_token["n_decoded"] + next_token["n_remain"] == 9
    assert free["next_token"][0]["n_remain"] == -1
    assert "user" not in found["/slots"].text


def _while_answering(app: Starlette, backend: GatedBackend) -> dict[str, httpx.Response]:
    """What `/slots` and `/metrics` say while a chat is computed, and the chat's answer."""
    found: dict[str, httpx.Response] = {}

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://t") as client,
            anyio.create_task_group() as tasks,
        ):

            async def ask() -> None:
                found[CHAT] = await client.post(CHAT, json=ASKED)

            async def look() -> None:
                found["/slots"] = await client.get("/slots")

            tasks.start_soon(ask)
            await anyio.to_thread.run_sync(backend.wait_until_held)
            tasks.start_soon(look)
            # the question waits for the run; the next run is let go when it is answered
            while not n_commands(app.state.desk.engine):
                await anyio.lowlevel.checkpoint()
            backend.release()

    anyio.run(main)
    return found


def test_scrape_in_a_long_run_tells_the_last_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = GatedBackend(1, 256, hold_at=0)
    with Engine(backend) as engine, fake_app(engine=engine, model_name="m") as app:
        before = scrape(app)
        response = engine.submit("ab", options={"max_tokens": 2, "ignore_eos": True})
        backend.wait_until_held()
        with monkeypatch.context() as patch:
            patch.setattr(pulse, "_PATIENCE_S", 0.01)
            during = scrape(app)
            slots = call(app, "/slots")
        backend.release()
        response.result()
        wait_until(lambda: not app.state.desk.pulse.is_asking)
        after = scrape(app)
    name = "cbatch:output_tokens_total"
    assert [of(samples, name) for samples in (before, during, after)] == [0, 0, 2]
    assert slots.status_code == 503


def test_slot_may_be_demanded() -> None:
    with fake_app(1, 64) as app:
        assert call(app, "/slots?fail_on_no_slot=1").status_code == 200
        app.state.desk.slots = EngineQuestion(
            lambda: [SlotState(0, "paused", 3, "a", 3, 3)], lambda: 0
        )
        assert call(app, "/slots?fail_on_no_slot=1").status_code == 503
        assert call(app, "/slots?fail_on_no_slot=0").status_code == 200
        (slot,) = call(app, "/slots").json()
        assert (slot["status"], slot["is_processing"]) == ("paused", False)


# ---- health ----


def test_health_tells_steps_that_stop_while_figures_come() -> None:
    with fake_app(1, 64, stall_s=30) as app:
        desk = app.state.desk
        now = [0.0]
        stats = desk.engine.stats()
        stats.n_running, stats.n_steps = 1, 7
        engine = cast("Engine", SimpleNamespace(stats=stats.copy))
        desk.pulse = Pulse(engine, lambda: now[0])
        for now_s, status in ((1.0, 200), (30.0, 200), (32.0, 503)):
            now[0] = now_s
            assert call(app, "/health").status_code == status
        stats.n_steps += 1
        assert call(app, "/health").status_code == 200


class Figures:
    """An engine's figures, which come at once, or not before `gate` is opened."""

    def __init__(self) -> None:
        self.now = [0.0]
        self.found = EngineStats(n_running=1, n_steps=7)
        self.gate = threading.Event()
        self.gate.set()

    def stats(self) -> EngineStats:
        assert self.gate.wait(PATIENCE_S)
        return self.found.copy()

    def pulse(self, *, has_work: bool = False) -> Pulse:
        return Pulse(cast("Engine", self), lambda: self.now[0], lambda: has_work)


def silence(figures: Figures, pulse: Pulse, *times_s: float) -> float:
    """How long an engine was silent by the last of these times, at each of which it was asked."""
    for now_s in times_s:
        figures.now[0] = now_s
        anyio.run(pulse.ask)
    return pulse.silent_s


def test_silence_counts_from_the_last_progress_though_no_answer_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cbatch.server.pulse._PATIENCE_S", 0.5)
    figures = Figures()
    some = figures.pulse()
    assert silence(figures, some, 0.0, 5.0) == 5.0
    figures.gate.clear()
    assert silence(figures, some, 10.0, 61.0) == 61.0
    figures.gate.set()


def test_engine_that_nobody_asked_for_long_is_silent_since_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cbatch.server.pulse._PATIENCE_S", 0.5)
    figures = Figures()
    some = figures.pulse()
    assert silence(figures, some, 0.0) == 0.0
    figures.gate.clear()
    assert silence(figures, some, 3600.0, 3601.0) == 1.0
    figures.gate.set()


@pytest.mark.parametrize("has_work", [False, True])
def test_request_that_no_figure_counts_is_work_all_the_same(*, has_work: bool) -> None:
    figures = Figures()
    figures.found = EngineStats()
    times = (0.0, 10.0, 20.0, 30.0, 40.0)
    assert (silence(figures, figures.pulse(has_work=has_work), *times) >= 30.0) is has_work


def test_prompt_tokens_are_progress() -> None:
    figures = Figures()
    some = figures.pulse()
    silence(figures, some, 0.0, 10.0)
    figures.found.n_prompt_tokens += 1
    assert silence(figures, some, 20.0) == 0.0


def test_lack_of_threads_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.server.desk._ASK_S", 0.001)
    threads, some = NoThreads(monkeypatch, "AnyIO"), Figures().pulse()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            desk: Any = SimpleNamespace(pulse=some)
            tasks.start_soon(keep_asking, lambda: desk)
            with anyio.fail_after(PATIENCE_S):
                while some.answer is None:
                    threads.is_over = threads.n_refused > 1
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()

    anyio.run(main)
    assert threads.n_refused > 1


def test_engine_in_a_long_step_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.server.pulse._PATIENCE_S", 0.5)
    backend = GatedBackend(1, 256, hold_at=0)
    with Engine(backend) as engine, fake_app(engine=engine) as app:
        response = engine.submit("ab", options={"max_tokens": 2})
        backend.wait_until_held()
        assert call(app, "/health").json() == {"status": "busy", "in_flight": 0}
        backend.release()
        response.result()


def test_engine_that_has_ended_is_told() -> None:
    with fake_app(1, 64) as app:
        app.state.desk.engine.close()
        for path in ("/health", "/slots"):
            answer = call(app, path)
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "unavailable_error"
        assert call(app, CHAT, ASKED).json()["error"]["code"] == "engine_closed"


# ---- the log ----


def told_in(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of each line of the log."""
    return [values for r in caplog.records if (values := getattr(r, FIELDS, None))]


def test_log_has_a_line_for_each_request_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cbatch")
    with fake_app(2, 64, api_keys=["secret"], model_name="m") as app:
        headers = {"authorization": "Bearer secret"}
        asked = {**ASKED, "messages": [{"role": "user", "content": "private"}], "odd": 1}
        answer = call(app, CHAT, asked, headers=headers)
        call(app, CHAT, asked, headers={"x-api-key": "a-secret-try"})
        call(app, CHAT, {**asked, "stream": True, "temperature": -1}, headers=headers)
        call(app, "/nowhere?x=private", headers=headers)
    told = told_in(caplog)
    http = [line for line in told if "path" in line]
    (request,) = [line for line in told if "finish_reason" in line]
    assert [(line["path"], line["status"]) for line in http] == [
        *((CHAT, status) for status in (200, 401, 400)),
        ("/nowhere", 404),
    ]
    id = answer.headers["x-request-id"]
    assert http[0]["request_id"] == request["request_id"] == id
    assert f"http request_id={id} method=POST path={CHAT} status=200" in caplog.text
    usage: dict[str, Any] = answer.json()["usage"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert request[name] == usage[name]
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "fields=odd" in said
    assert "private" not in said
    assert "secret" not in said


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_polls_of_the_page_are_no_requests_of_somebody(
    caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, "cbatch")
    poll = {"x-cbatch-poll": "1"}
    with fake_app(2, 64) as app:
        for path in ("/slots", "/metrics", "/v1/slots", "/props"):
            assert call(app, path, headers=poll).status_code == 200
        call(app, "/slots")
        counted = app.state.desk.meters.n_http
    logged = [line["path"] for line in told_in(caplog) if "path" in line]
    polls = ["/slots", "/metrics", "/v1/slots"] if level == logging.DEBUG else []
    assert logged == [*polls, "/props", "/slots"]
    assert counted == {("/props", 200): 1, ("/slots", 200): 1}


def test_prompts_of_one_call_have_lines_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cbatch")
    with fake_app(2, 64) as app:
        answer = call(app, COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2, "n": 2})
    ids = sorted(line["request_id"] for line in told_in(caplog) if "finish_reason" in line)
    id = answer.headers["x-request-id"]
    assert ids == [f"{id}.0", f"{id}.1"]
    assert json.loads(answer.text)["usage"]["completion_tokens"] <= 8
