"""`load` with workers: how many there are, and what is refused."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.fake.fake_backend import FakeBackend
from cbatch.backend.fake.fake_tokens import FakeVocab
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import ConfigError, EngineClosedError, EngineError, ModelLoadError
from cbatch.runtime.local import LocalRuntime
from cbatch.worker import connect, start
from cbatch.worker.service import begin

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (None, {"replicas": 0}, "replicas"),
        (None, {"replicas": 65}, "replicas"),
        (None, {"replicas": 1.5}, "replicas"),
        (None, {"replicas": "many"}, "replicas"),
        (None, {"replicas": True}, "replicas"),
        (None, {"replicas": 2, "threaded": False}, "threaded=True"),
        (object(), {"replicas": 1}, "the model's path, not object"),
    ],
)
def test_replicas_that_cannot_be_are_refused(model: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cbatch.load(model, **given)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of workers that were to be started; none is."""
    found: list[int] = []

    def open_workers(*_: object, n: int, n_sharing: int) -> object:
        found.append(n)
        raise EngineError("not started")

    monkeypatch.setattr(start, "open_workers", open_workers)
    return found


@pytest.mark.real
@pytest.mark.cpu("one process computes there")
@pytest.mark.parametrize(
    ("cores", "parallel", "expected"), [([0, 1, 2], 16, [2]), ([0, 1], 4, []), ([0], None, [])]
)
def test_auto_starts_workers_where_they_pay(
    cores: list[int],
    parallel: int | None,
    expected: list[int],
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    test_model: Path,
) -> None:
    monkeypatch.setattr("cbatch.support.taken_cores.my_cores", lambda: cores)
    monkeypatch.setattr("cbatch.worker.placement.nodes_of", lambda cores: [cores])
    if expected:
        with pytest.raises(EngineError, match="not started"):
            cbatch.load(test_model, replicas="auto", parallel=parallel)
    else:
        with cbatch.load(test_model, replicas="auto", parallel=parallel) as engine:
            assert engine.submit("a", options={"max_tokens": 1}).result().token_ids
    assert asked == expected


def test_worker_that_cannot_start_chats_closes_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was ready without them would fail each chat at once, and so get most of them."""

    def refuse(self: FakeVocab) -> None:
        raise ModelLoadError("no process can be started for the chat template: 11")

    monkeypatch.setattr(FakeVocab, "start_chats", refuse)
    runtime = LocalRuntime(FakeBackend(), ScheduleOptions())
    with pytest.raises(ModelLoadError, match="no process can be started for the chat template"):
        begin(runtime)
    with pytest.raises(EngineClosedError):
        runtime.check_open()


def test_worker_whose_file_was_replaced_amid_its_load_fails_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object) -> dict[str, str]:
        raise OSError("replaced")

    monkeypatch.setattr(FakeBackend, "fingerprint", unknown)
    runtime = LocalRuntime(FakeBackend(), ScheduleOptions())
    with pytest.raises(ModelLoadError, match="was replaced while a worker loaded it"):
        begin(runtime)
    with pytest.raises(EngineClosedError):
        runtime.check_open()


def test_socket_without_a_worker_is_an_error_by_name(tmp_path: Path) -> None:
    for address in (str(tmp_path / "none.sock"), "a..b:1", "127.0.0.1:99999", "a\0b"):
        with pytest.raises(EngineError, match="no worker answers at"):
            connect(address)


def test_settings_for_a_worker_that_has_its_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="parallel"):
        connect("some.sock", parallel=3)


def test_load_refuses_stacks_too_small_for_its_threads() -> None:
    before = threading.stack_size(65536)
    try:
        with pytest.raises(
            ConfigError, match="is 65,536 bytes; loading a model needs at least 262,144"
        ):
            cbatch.load()
    finally:
        threading.stack_size(before)
