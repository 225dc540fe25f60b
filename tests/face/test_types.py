"""Calls of an engine with values of the wrong kind: what a user means, or a typed error, and the engine goes on."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.errors import ConfigError, EngineClosedError, UnsupportedOptionError
from cbatch.messages import BatchPrompt, LookAhead
from cbatch.response import BatchError
from tests.runtime.backends import PATIENCE_S, is_threaded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHORT = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "seed": 1}


@pytest.fixture(params=[True, False], ids=["threaded", "by hand"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    backend = FakeBackend(2, 64, 32)
    with closing(Engine(backend, options=SHORT, threaded=request.param)) as made:
        yield made
        assert made.submit("still here").result(timeout=PATIENCE_S).token_ids


# ---- waiting ----


@pytest.mark.parametrize("endless", [math.inf, 1e300, 10**400, np.float64("inf"), None])
def test_wait_that_is_endless_ends_with_the_results(engine: Engine, endless: Any) -> None:
    assert len(engine.run(["a", "b"]).results(timeout=endless)) == 2
    assert engine.submit("a").result(timeout=endless).token_ids


@pytest.mark.parametrize("over", [0, -1, -math.inf, -(10**400), 0.0, np.int64(0)])
def test_wait_that_is_over_is_late_or_done(engine: Engine, over: Any) -> None:
    is_paused = False
    while not is_paused:  # the thread that computes may be through before
        response = engine.submit("a", options={"max_tokens": 60, "ignore_eos": True})
        is_paused = not is_threaded(engine) or engine.pause(response.ids[0])
    with pytest.raises(TimeoutError, match="had not ended"):
        response.results(timeout=over)
    engine.resume(response.ids[0])
    assert response.results()[0].finish_reason == "length"
    assert response.results(timeout=over)


@pytest.mark.parametrize("wrong", ["1", b"1", math.nan, True, [1], object(), 1j])
def test_wait_that_is_no_number_is_refused(engine: Engine, wrong: Any) -> None:
    response = engine.submit("a")
    for wait in (response.results, response.result):
        with pytest.raises(ConfigError, match="timeout must be a number of seconds"):
            wait(timeout=wrong)
    assert response.result(timeout=PATIENCE_S).token_ids


@pytest.mark.parametrize("wrong", [1, "no", None, [True]])
def test_flag_of_results_is_a_flag(engine: Engine, wrong: Any) -> None:
    response = engine.submit("a")
    with pytest.raises(ConfigError, match="return_errors must be True or False"):
        response.results(return_errors=wrong)
    assert response.results(return_errors=np.True_)  # type: ignore[arg-type]


def texts(n: int) -> Iterator[str]:
    yield from (f"text {i}" for i in range(n))


def test_result_of_a_generator_of_one_is_its_result(engine: Engine) -> None:
    assert engine.run(texts(1)).result(timeout=PATIENCE_S).token_ids


@pytest.mark.parametrize("n", [0, 2, 100])
def test_result_of_a_generator_of_several_is_refused(engine: Engine, n: int) -> None:
    response = engine.run(texts(n))
    with pytest.raises(ConfigError, match=r"result\(\) is for a batch of one"):
        response.result(timeout=PATIENCE_S)
    assert len(response.results(timeout=PATIENCE_S)) == n


def test_result_of_an_endless_generator_is_refused_at_once(engine: Engine) -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "a"

    response = engine.run(endless())
    with pytest.raises(ConfigError, match=r"result\(\) is for a batch of one"):
        response.result(timeout=PATIENCE_S)
    response.cancel()


def test_result_of_a_generator_that_raises_tells_so(engine: Engine) -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise OSError("no more")

    with pytest.raises(BatchError, match="no more"):
        engine.run(broken()).result(timeout=PATIENCE_S)


def test_result_that_was_given_out_is_refused(engine: Engine) -> None:
    response = engine.run(texts(1))
    assert len(list(response.as_completed())) == 1
    with pytest.raises(ConfigError, match=r"result\(\) is for a batch of one; this one has 0"):
        response.result(timeout=PATIENCE_S)


# ---- running ----


@pytest.mark.parametrize("wrong", [1, 0, "yes", "", object(), [True], 1.5])
def test_progress_is_a_flag_or_a_view(engine: Engine, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="progress must be True, False or a View"):
        engine.run(["a"], progress=wrong)


def test_progress_of_numpy_or_none_is_a_flag(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in (np.False_, None):
        assert engine.run(["a"], progress=flag).results()  # type: ignore[arg-type]
    assert not capsys.readouterr().err
    assert engine.run(["a"], progress=np.True_).results()  # type: ignore[arg-type]
    assert "1/1" in capsys.readouterr().err


class BrokenView:
    """Raises wherever it is asked."""

    interval_s = 0.001

    def say(self, line: str) -> None:
        raise RuntimeError("say")

    def show(self, snapshot: object) -> None:
        raise RuntimeError("show")

    def finish(self, snapshot: object) -> None:
        raise RuntimeError("finish")


def test_view_that_raises_is_told_in_the_log(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.run(["a"], progress=BrokenView()).results()
    assert "is not shown any more" in caplog.text


def test_options_named_by_numbers_are_refused(engine: Engine) -> None:
    for call in (
        lambda: engine.run(["a"], options={5: 3}),  # type: ignore[dict-item]
        lambda: engine.submit("a", options={5: 3}),  # type: ignore[dict-item]
        lambda: engine.count_tokens("a", options={5: 3}),  # type: ignore[dict-item]
        lambda: BatchPrompt(prompt="a", options={5: 3}),  # type: ignore[dict-item]
        lambda: Engine(options={5: 3}),  # type: ignore[dict-item]
    ):
        with pytest.raises(UnsupportedOptionError, match="unknown option '5'"):
            call()


@pytest.mark.parametrize("wrong", [5, None, b"0", [], {}, "", ("0",)])
def test_id_to_ask_by_is_text(engine: Engine, wrong: Any) -> None:
    for ask in (engine.cancel, engine.pause, engine.resume):
        with pytest.raises(ConfigError, match="an id must be a non-empty string"):
            ask(wrong)


def test_one_id_for_texts_is_not_taken_for_an_id_a_letter(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="ids must be a list of names, not 'ab'"):
        engine.embed(["a", "b"], ids="ab")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"threaded": 1}, "threaded must be True or False"),
        ({"threaded": None}, "threaded must be True or False"),
        ({"schedule": 5}, "schedule must be ScheduleOptions"),
        ({"cache_mib": "1"}, "cache_mib must be a whole number"),
        ({"cache_dir": 5}, "cache_dir must be a path"),
        ({"cache_dir": ""}, "cache_dir must be a path"),
        ({"cache_dir": "a\0b"}, "cache_dir must be a path"),
        ({"options": 5}, "options must be"),
    ],
)
def test_engine_is_made_of_what_it_takes(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(**given)


@pytest.mark.parametrize("wrong", [5, "ab", {"a": 1}, [5], [("a", None)]])
def test_prompts_to_look_at_are_pairs(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="look_ahead must be"):
        LookAhead(wrong)


# ---- paths ----


def test_home_in_the_path_of_a_model_is_found(
    test_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").symlink_to(test_model)
    with cbatch.load("~/m.gguf", parallel=1, ctx_per_seq=256) as engine:
        assert engine.submit("a", options=SHORT).result(timeout=PATIENCE_S).token_ids


def test_model_in_a_file_whose_name_is_no_text_is_run(test_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m\udcff.gguf"
    path.symlink_to(test_model)
    for given in (str(path), path):
        with cbatch.load(given, parallel=1, ctx_per_seq=256) as engine:
            assert engine.submit("a", options=SHORT).result(timeout=PATIENCE_S).token_ids
            assert engine.fingerprint["model"]


@pytest.mark.parametrize("wrong", ["", "a\0b", "\ud800", 5, b"m.gguf", ["m.gguf"]])
def test_what_can_be_no_path_of_a_model_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="model must be a path"):
        cbatch.load(wrong)


# ---- closed engines ----


def test_block_of_a_closed_engine_is_refused_as_it_begins() -> None:
    engine = Engine(FakeBackend(2, 64, 32))
    engine.close()
    with pytest.raises(EngineClosedError, match="closed"), engine:
        pytest.fail("the block of a closed engine")
    with pytest.raises(EngineClosedError, match="closed"):
        engine.open()

    async def enter() -> None:
        async with engine:
            pytest.fail("the block of a closed engine")

    with pytest.raises(EngineClosedError, match="closed"):
        asyncio.run(enter())
    engine.close()


# ---- handlers of the log ----


class BrokenHandler(logging.Handler):
    """Raises for each line."""

    n_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.n_lines += 1
        raise RuntimeError("no room for lines")


@pytest.fixture
def broken_handler() -> Iterator[BrokenHandler]:
    handler, logger = BrokenHandler(), logging.getLogger("cbatch")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_handler_of_the_log_that_raises_costs_its_line(
    engine: Engine, broken_handler: BrokenHandler
) -> None:
    def record(step: object) -> None:
        raise RuntimeError("no room for steps")

    engine.record_steps(record)
    assert engine.submit("a").result(timeout=PATIENCE_S).token_ids
    assert broken_handler.n_lines == 1


def test_handler_of_the_log_that_raises_does_not_keep_a_model_from_loading(
    test_model: Path, broken_handler: BrokenHandler, tmp_path: Path
) -> None:
    cache = tmp_path / "cells"
    cache.mkdir(mode=0o700)
    small: dict[str, Any] = {"parallel": 1, "ctx_per_seq": 256, "cache_dir": cache}
    logging.getLogger("cbatch").setLevel(logging.DEBUG)
    try:
        with cbatch.load(test_model, n_gpu_layers=1, **small) as engine:
            assert engine.submit("a", options=SHORT).result(timeout=PATIENCE_S).token_ids
    finally:
        logging.getLogger("cbatch").setLevel(logging.NOTSET)
    assert broken_handler.n_lines
