"""Engines for other processes: specs as values, one engine for all who share it, and loading in an event loop."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import cbatch
from cbatch import engine_spec
from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.runtime.local import LocalRuntime
from tests.runtime.backends import PATIENCE_S, FailingBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from cbatch.backend import Backend

OPTIONS = {
    "max_tokens": 3,
    "temperature": 0,
    "ignore_eos": True,
}  # the fake ends some answers early
SETTINGS: dict[str, Any] = {"parallel": 2, "options": OPTIONS}


def test_specs_of_equal_content_are_equal_also_after_pickling() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"parallel": 4, "options": {"logit_bias": {7: -1.0}, "json_schema": schema}}
    spec = cbatch.EngineSpec("model.gguf", **given)
    options = cbatch.RunOptions(**given["options"])  # type: ignore[arg-type]
    same = cbatch.EngineSpec(Path("model.gguf"), options=options, parallel=4)
    copied = pickle.loads(pickle.dumps(spec))
    assert len({spec, same, copied, copy.deepcopy(spec)}) == 1
    others = {cbatch.EngineSpec("other.gguf"), spec.changed(parallel=5), cbatch.EngineSpec()}
    assert spec not in others
    assert len(others) == 3


def test_specs_are_told_apart_by_types_and_order_of_keys_in_options() -> None:
    values = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": True, "b": 2}, {"a": 1.0, "b": 2}]
    specs = {cbatch.EngineSpec(options={"chat_template_kwargs": {"x": v}}) for v in values}
    assert len(specs) == len(values)


def test_paths_of_a_spec_mean_the_same_file_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = cbatch.EngineSpec("m.gguf", adapters={"a": "a.gguf"}, cache_dir="cells", draft="d.gguf")
    monkeypatch.chdir("/")
    assert spec.model == str(tmp_path / "m.gguf")
    assert spec.settings == {
        "adapters": {"a": str(tmp_path / "a.gguf")},
        "cache_dir": str(tmp_path / "cells"),
        "draft": str(tmp_path / "d.gguf"),
    }
    assert cbatch.EngineSpec("hf:a/b/c.gguf").model == "hf:a/b/c.gguf"


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (None, {"paralel": 3}, "did you mean parallel"),
        (None, {"look_ahead": None}, "look_ahead"),
        (None, {"parallel": 0}, "parallel must be 1"),
        (None, {"options": {"logits_processor": print}}, "plain values"),
        (None, {"options": {"max_tokens": "x"}}, "max_tokens"),
        (object(), {}, "a model's path, not object"),
    ],
)
def test_wrong_value_of_a_spec_is_refused(
    model: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(cbatch.ConfigError, match=message):
        cbatch.EngineSpec(model, **settings)


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engine_that_is_pickled_names_the_spec(take: Callable[[Engine], object]) -> None:
    with (
        Engine(FakeBackend(2, 64, 64)) as engine,
        pytest.raises(cbatch.ConfigError, match=r"cbatch\.EngineSpec"),
    ):
        take(engine)


# ---- sharing ----


class Loads:
    """Stands for `cbatch.load`: makes engines of fake backends, and holds loading until it is let go."""

    def __init__(self, make: Callable[[], Backend] = lambda: FakeBackend(2, 64, 64)) -> None:
        self.engines: list[Engine] = []
        self.go = threading.Event()
        self.go.set()
        self._make = make

    def __call__(self, model: object, **settings: Any) -> Engine:
        assert self.go.wait(PATIENCE_S)
        self.engines.append(Engine(self._make(), options=settings.get("options")))
        return self.engines[-1]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    loads = Loads()
    monkeypatch.setattr("cbatch.engine_spec.load", loads)
    return loads


def test_users_of_equal_specs_share_one_engine_until_the_last_leaves(loads: Loads) -> None:
    spec, same = cbatch.EngineSpec("a", **SETTINGS), cbatch.EngineSpec("a", **SETTINGS)
    with spec.shared() as engine:
        with same.shared() as inner:
            assert inner is engine
        assert engine.submit("Hi").result().usage.completion_tokens == 3
        with cbatch.EngineSpec("b", **SETTINGS).shared() as other:
            assert other is not engine
    with pytest.raises(cbatch.EngineClosedError):
        engine.submit("Hi")
    with spec.shared() as later:
        assert later is not engine
    assert len(loads.engines) == 3


def test_threads_that_ask_at_once_wait_for_one_load(loads: Loads) -> None:
    spec, have_all = cbatch.EngineSpec("a"), threading.Barrier(4)
    lent: list[Engine] = []
    loads.go.clear()

    def use() -> None:
        with spec.shared() as engine:
            lent.append(engine)
            have_all.wait(PATIENCE_S)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    loads.go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(lent) == 4
    assert [*{*lent}] == loads.engines


def test_engine_that_has_failed_is_not_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = RuntimeError("broken")
    loads = Loads(lambda: FailingBackend(2, 64, 64, error=broken, fail_at=1))
    monkeypatch.setattr("cbatch.engine_spec.load", loads)
    spec = cbatch.EngineSpec("a")
    with spec.shared() as failed:
        with pytest.raises(cbatch.EngineClosedError):
            failed.submit("Hi", options=OPTIONS).result()
        with spec.shared() as second:
            assert second is not failed
        with spec.shared() as third:  # the user of the failed one is not counted
            assert third is not second
    assert len(loads.engines) == 3


def test_user_of_an_ended_engine_closes_no_other(loads: Loads) -> None:
    lent = cbatch.EngineSpec("a").shared()
    first = lent.__enter__()
    first.close()
    with lent as second:
        lent.__exit__()  # the first user's
        assert second is not first
        assert not second.submit("Hi", options=OPTIONS).result().error


def test_finalizer_gives_the_engine_back_while_the_next_user_takes_it(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a collector does that finds an abandoned generator there."""
    spec, lent, has_ended = (
        cbatch.EngineSpec("a", **SETTINGS),
        list[Engine](),
        engine_spec.has_ended,
    )

    def use() -> Generator[Engine, None, None]:
        with spec.shared() as engine:
            yield engine

    def collect(engine: Engine) -> bool:
        abandoned.close()
        return has_ended(engine)

    def take() -> None:
        with spec.shared() as engine:
            lent.append(engine)
            assert engine.submit("Hi").result().usage.completion_tokens == 3

    abandoned = use()
    first = next(abandoned)
    monkeypatch.setattr(engine_spec, "has_ended", collect)
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert lent == [first] == loads.engines
    with pytest.raises(cbatch.EngineClosedError):
        first.submit("Hi")


def test_thread_that_a_load_waits_for_may_give_an_engine_back(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a collector does that runs in a thread of the load."""
    spec = cbatch.EngineSpec("a", **SETTINGS)

    def use() -> Generator[Engine, None, None]:
        with spec.shared() as engine:
            engine.close()
            yield engine

    def load(*args: Any, **settings: Any) -> Engine:
        helper = threading.Thread(target=abandoned.close, daemon=True)
        helper.start()
        helper.join(PATIENCE_S)
        assert not helper.is_alive()
        return loads(*args, **settings)

    abandoned = use()
    next(abandoned)
    monkeypatch.setattr(engine_spec, "load", load)
    with spec.shared() as engine:
        assert engine.submit("Hi").result().usage.completion_tokens == 3
    assert len(loads.engines) == 2


def test_fork_that_leaves_the_block_leaves_the_engine_to_its_parent(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = cbatch.EngineSpec("a", **SETTINGS).shared()
    with lent as engine:
        lent.__enter__()
        with monkeypatch.context() as patched:
            patched.setattr("cbatch.engine_spec.os.getpid", lambda: -1)
            with lent as own:
                assert own is not engine
            with pytest.raises(cbatch.EngineClosedError):
                own.submit("Hi")
            lent.__exit__(None, None, None)
    assert engine.submit("Hi").result().usage.completion_tokens == 3
    engine.close()


def test_load_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = cbatch.EngineSpec("none.gguf")
    for _ in range(2):
        with pytest.raises(cbatch.ModelLoadError), spec.shared():
            pass
    monkeypatch.setattr("cbatch.engine_spec.load", Loads())
    with spec.shared() as engine:
        assert engine.parallel == 2


def n_known(name: str) -> int:
    gc.collect()
    specs = [o for o in gc.get_objects() if isinstance(o, cbatch.EngineSpec)]
    return sum(name in str(spec.model) for spec in specs)


def test_spec_whose_last_user_has_left_is_forgotten(loads: Loads) -> None:
    for i in range(3):
        with cbatch.EngineSpec(f"forgotten-{i}").shared(), cbatch.EngineSpec("a").shared():
            pass
    assert not n_known("forgotten")


@pytest.mark.usefixtures("loads")
def test_spec_that_cannot_be_loaded_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.engine_spec.load", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), cbatch.EngineSpec("forgotten").shared():
        pass
    assert not n_known("forgotten")


def test_engine_that_is_lent_without_an_end_stays_shared(loads: Loads) -> None:
    first = cbatch.EngineSpec("a").shared().__enter__()
    with cbatch.EngineSpec("a").shared() as second:
        assert second is first
    with cbatch.EngineSpec("a").shared() as third:
        assert third is first
    first.close()


@pytest.mark.anyio
async def test_shared_engine_of_a_loop_is_loaded_when_it_is_lent(loads: Loads) -> None:
    async with cbatch.EngineSpec("a", **SETTINGS).shared() as engine:
        assert (await engine.chat("Hi")).usage.completion_tokens == 3
    with pytest.raises(cbatch.EngineClosedError):
        engine.submit("Hi")


@pytest.mark.anyio
async def test_load_that_fails_gives_no_other_engine_back(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = cbatch.EngineSpec("a").shared()
    async with lent as first:
        first.close()
        async with lent as second:
            second.close()
            with monkeypatch.context() as patch:
                patch.setattr("cbatch.engine_spec.load", lambda *_, **__: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    await lent.__aenter__()
    assert len(loads.engines) == 2


@pytest.mark.anyio
async def test_who_is_cancelled_while_a_shared_engine_loads_gives_it_back(loads: Loads) -> None:
    loads.go.clear()

    async def use() -> None:
        async with cbatch.EngineSpec("a").shared():
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(use)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        loads.go.set()
    [engine] = loads.engines
    with pytest.raises(cbatch.EngineClosedError):
        engine.submit("Hi")


# ---- loading in an event loop ----


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """Have `cbatch.load` make fake backends, which are noted."""
    made: list[FakeBackend] = []

    def open_local(*given: object, **more: object) -> LocalRuntime:
        made.append(FakeBackend(2, 64, 64))
        return LocalRuntime(made[-1], ScheduleOptions())

    monkeypatch.setattr("cbatch.loading.open_local", open_local)
    return made


@pytest.mark.anyio
async def test_load_async_returns_a_loaded_engine(backends: list[FakeBackend]) -> None:
    engine = await cbatch.load_async(options={"max_tokens": 2, "ignore_eos": True})
    assert len(backends) == 1
    async with engine:
        assert (await engine.chat("Hi")).usage.completion_tokens == 2
    assert len(backends) == 1


@pytest.mark.anyio
async def test_load_async_that_is_cancelled_frees_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, has_begun, go = FakeBackend(2, 64, 64), threading.Event(), threading.Event()

    def open_local(*given: object, **more: object) -> LocalRuntime:
        has_begun.set()
        assert go.wait(PATIENCE_S)
        return LocalRuntime(backend, ScheduleOptions())

    monkeypatch.setattr("cbatch.loading.open_local", open_local)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cbatch.load_async)
        await anyio.to_thread.run_sync(has_begun.wait)
        tasks.cancel_scope.cancel()
        go.set()
    assert backend.is_closed


@pytest.mark.anyio
async def test_load_async_raises_what_load_raises(tmp_path: Path) -> None:
    with pytest.raises(cbatch.ModelLoadError):
        await cbatch.load_async(tmp_path / "none.gguf")
    with pytest.raises(cbatch.ConfigError, match="parallel"):
        await cbatch.load_async(parallel=0)


@pytest.mark.anyio
async def test_load_in_a_loop_warns_where_nobody_enters_the_engine(
    backends: list[FakeBackend], caplog: pytest.LogCaptureFixture
) -> None:
    async with cbatch.load():
        pass
    engine = cbatch.load()
    engine.open()
    await anyio.wait_all_tasks_blocked()
    assert not caplog.records
    forgotten = cbatch.load()
    await anyio.wait_all_tasks_blocked()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "not loaded yet" in record.message
    assert "load_async" in record.message
    for each in (engine, forgotten):
        with suppress(cbatch.EngineClosedError):
            each.close()


@pytest.mark.parametrize(("replicas", "n_sharing"), [(None, 3), (2, 6)])
def test_share_of_the_memory_reaches_the_load(
    monkeypatch: pytest.MonkeyPatch, replicas: int | None, n_sharing: int
) -> None:
    seen: list[int] = []

    def here(*given: object, n_sharing: int, **more: object) -> LocalRuntime:
        seen.append(n_sharing)
        return LocalRuntime(FakeBackend(2, 64, 64), ScheduleOptions())

    def hello(*given: object, n_sharing: int, **more: object) -> None:
        seen.append(n_sharing)
        raise cbatch.EngineError("seen")

    monkeypatch.setattr("cbatch.loading.open_local", here)
    monkeypatch.setattr("cbatch.worker.start.hello_of", hello)
    with suppress(cbatch.EngineError):
        cbatch.load(replicas=replicas, n_sharing=3).close()
    assert seen == [n_sharing]
    with pytest.raises(cbatch.ConfigError, match="n_sharing must be 1"):
        cbatch.load(n_sharing=0)
