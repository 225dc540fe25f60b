"""Servers of the shipped model, for clients that are not ours."""

from __future__ import annotations

from contextlib import contextmanager
from traceback import format_stack
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import load
from cbatch.runtime.commands import Command
from cbatch.runtime.waking import is_in_event_loop
from cbatch.server import create_app
from cbatch.worker.connection import Reply
from tests.server.clients import Running, fake_app, running
from tests.server.kept import kept_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.applications import Starlette


@pytest.fixture(autouse=True)
def loop_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let no event loop wait for what an engine answers: all clients would. A test of such waits clears the list."""
    found: list[str] = []

    def watch(kind: Any) -> None:
        wait = kind.wait

        def checked(asked: Any) -> Any:
            if is_in_event_loop() and not asked._done.is_open:
                found.append("".join(format_stack()))
                raise AssertionError("an event loop would wait for an engine")
            return wait(asked)

        monkeypatch.setattr(kind, "wait", checked)

    watch(Command)
    watch(Reply)
    yield found
    assert not found, found[0]


@contextmanager
def served(test_model: Path, **settings: Any) -> Iterator[Running]:
    with load(test_model, parallel=4, n_threads=1, options={"temperature": 0}) as engine:
        app = create_app(engine, **settings)
        with running(app) as found:
            yield found
        app.state.desk.close()


@pytest.fixture(scope="module")
def app() -> Iterator[Starlette]:
    """An application over a fake backend, for tests that leave nothing behind in it."""
    with fake_app() as made:
        yield made


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Starlette]:
    """An application over a fake backend that keeps files in the folder `kept`."""
    with kept_app(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def server(test_model: Path) -> Iterator[Running]:
    with served(test_model) as found:
        yield found


@pytest.fixture(scope="module")
def keeping_server(test_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that keeps files and batches."""
    with served(test_model, files_dir=tmp_path_factory.mktemp("kept")) as found:
        yield found
