"""Requests of many megabytes: they cross in several lines, and one that is too long for a line is refused."""

from __future__ import annotations

import pytest

from cbatch.messages import BatchPrompt, LookAhead
from cbatch.options import RunOptions
from cbatch.worker import service
from cbatch.worker.service import hello_of


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that hold some hundred bytes."""
    monkeypatch.setattr(service, "N_LINE_MAX", 1000)


@pytest.mark.usefixtures("short_lines")
def test_look_ahead_longer_than_a_line_is_cut() -> None:
    prompts = [(BatchPrompt(prompt="x" * 100), RunOptions()) for _ in range(30)]
    load = hello_of(None, {}, LookAhead(prompts, is_all=True)).load
    assert load is not None
    assert load.look_ahead is not None
    assert 0 < len(load.look_ahead.prompts) < 30
    assert not load.look_ahead.is_all
