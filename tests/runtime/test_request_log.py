"""What the log says of a request that ends and of a model that is loaded, and that no handler of a log can do harm."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.support.logs import FIELDS, Log
from tests.cli.conftest import invoke, parse
from tests.kinds import Reason, each_kind, engine_on, thread_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cbatch.engine import Engine

pytestmark = each_kind

NAMES = [
    *("request_id", "model", "prompt_tokens", "completion_tokens", "cached_tokens", "queue_ms"),
    *("ttft_ms", "prompt_tps", "generation_tps", "total_tokens", "total_tps", "latency_ms"),
    "finish_reason",
]
SHORT = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the handler")


@pytest.fixture(params=[False, True], ids=["by hand", "threaded"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    backend = FakeBackend(4, 128, 64)
    with engine_on(backend, options=SHORT, threaded=request.param, model_name="fake") as made:
        yield made


@pytest.fixture
def seen(engine: Engine, caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Return what gives the values of all lines of requests so far."""
    caplog.set_level(logging.INFO, "cbatch")

    def values() -> list[dict[str, Any]]:
        engine.stats()  # the lines of a step come behind it
        lines = [r for r in caplog.records if r.getMessage().startswith("request ")]
        return [getattr(line, FIELDS) for line in lines]

    return values


def test_request_that_ends_is_one_line_with_the_figures_of_its_result(
    engine: Engine, seen: Callable[[], list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    results = engine.run(["question one", "question two"]).results()
    lines = {line["request_id"]: line for line in seen()}
    assert len(seen()) == 2
    for result in results:
        line, timings = lines[result.id], result.timings
        assert list(line) == NAMES
        assert (line["model"], line["finish_reason"]) == ("fake", "length")
        assert line["prompt_tokens"] == result.usage.prompt_tokens
        assert (line["completion_tokens"], line["cached_tokens"]) == (3, result.usage.cached_tokens)
        assert line["total_tokens"] == line["prompt_tokens"] + 3
        assert timings.ttft_s is not None
        assert line["ttft_ms"] == round(timings.ttft_s * 1e3, 3)
        assert line["latency_ms"] == round(timings.total_s * 1e3, 3)
        for name in ("prompt_tps", "generation_tps"):
            tps = getattr(timings, name)
            assert line[name] == (None if tps is None else round(tps, 2))
        assert line["total_tps"] == round(line["total_tokens"] / timings.total_s, 2)
    message = caplog.records[-1].getMessage()
    assert [word.partition("=")[0] for word in message.split()] == ["request", *NAMES]


def test_request_with_several_answers_is_one_line(
    engine: Engine, seen: Callable[[], list[dict[str, Any]]]
) -> None:
    engine.run(["question"], options={"n": 3, "best_of": 4}).results()
    [line] = seen()
    assert line["completion_tokens"] == 12


def test_request_that_fails_says_with_what(
    engine: Engine, seen: Callable[[], list[dict[str, Any]]]
) -> None:
    long = cbatch.BatchPrompt(tokens=[5] * 500, id='a "b"\nrequest c=1')
    engine.run([long]).results(return_errors=True)
    engine.run(iter(["fed"])).results()
    first, second = seen()
    assert (first["finish_reason"], first["error"]) == ("error", "PromptTooLongError")
    assert first["ttft_ms"] is first["generation_tps"] is None
    assert second["finish_reason"] == "length"


def test_name_of_a_request_makes_up_no_line(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cbatch")
    prompt = cbatch.BatchPrompt(prompt="a", id='a "b"\nrequest c=1 é')
    engine.run([prompt]).results()
    engine.stats()  # the lines of a step come behind it
    message = caplog.records[-1].getMessage()
    assert "\n" not in message
    assert message.isascii()
    quoted = re.search(r'request_id=("(?:[^"\\]|\\.)*") model=fake', message)
    assert quoted is not None
    assert json.loads(quoted[1]) == prompt.id


def test_line_is_made_for_nobody_where_the_level_is_off(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise AssertionError

    monkeypatch.setattr("cbatch.runtime.delivery.figures", fail)
    caplog.set_level(logging.WARNING, "cbatch")
    assert engine.run(["question"]).results()[0].error is None
    assert not caplog.records


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_handler_that_raises_costs_its_line_alone(
    engine: Engine, seen: Callable[[], list[dict[str, Any]]], level: int
) -> None:
    logger, handler = logging.getLogger("cbatch"), Raising()
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        for _ in range(3):
            assert engine.run(["question"] * 5).results()[0].text
    finally:
        logger.removeHandler(handler)
    assert engine.run(["question"]).results()[0].text
    assert len(seen()) > 0


def test_handler_that_raises_does_not_keep_a_model_from_loading(test_model: Path) -> None:
    logger, handler = logging.getLogger("cbatch"), Raising()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with cbatch.load(test_model, parallel=2, n_threads=1) as engine:
            assert engine.run(["a"], options=SHORT).results()[0].text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_model_that_is_loaded_is_a_line_with_its_sizes(
    test_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cbatch")
    with cbatch.load(test_model, parallel=2, ctx_per_seq=300, n_threads=1) as engine:
        engine.run(["a"], options=SHORT).results()
        window = engine.n_window
    [loaded] = [r for r in caplog.records if r.getMessage().startswith("loaded ")]
    values = getattr(loaded, FIELDS)
    expected = {"model": str(test_model), "slots": 2, "window": window, "cells": 2 * window}
    expected |= {"architecture": "llama", "file_type": "q8_0", "kv": "partitioned", "threads": 1}
    assert {name: values[name] for name in expected} == expected
    assert values["memory_bytes"] > 0
    assert values["weight_bytes"] > 0
    assert values["load_s"] > 0
    [line] = [r for r in caplog.records if r.getMessage().startswith("request ")]
    assert getattr(line, FIELDS)["model"] == test_model.stem


def test_command_shows_a_line_for_each_request_also_as_events(
    tmp_path: Path, test_model: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "x", "prompt": "a"}\n{"id": "y", "prompt": "b"}\n')
    asked = ("run", source, "-o", "-", "-m", test_model, "--threads", 1, "--max-tokens", 3)
    lines = invoke("--log-level", "info", *asked, "--quiet").stderr.splitlines()
    shown = [line for line in lines if line.startswith("INFO cbatch: request ")]
    assert len(shown) == 2
    assert "model=chat prompt_tokens=" in shown[0]
    assert sum(line.startswith("INFO cbatch: loaded model=") for line in lines) == 1
    events = parse(invoke("--log-level", "info", *asked, "--json").stderr)
    logged = [e for e in events if e["event"] == "log" and "request_id" in e]
    assert [set(NAMES) - e.keys() for e in logged] == [set(), set()]
    assert {type(e["latency_ms"]) for e in logged} == {float}


@thread_only(Reason.BY_HAND)
def test_level_is_asked_for_without_making_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log = Log("cbatch.test")
    for level, is_wanted in ((logging.WARNING, False), (logging.INFO, True)):
        caplog.set_level(level, "cbatch.test")
        assert log.has_info is is_wanted
