"""A server of the shipped model, for clients that are not ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cbatch import load
from cbatch.server import create_app
from tests.server.clients import Running, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def server(test_model: Path) -> Iterator[Running]:
    with (
        load(test_model, parallel=4, n_threads=1, options={"temperature": 0}) as engine,
        running(create_app(engine)) as found,
    ):
        yield found
