"""What an engine finds that its steps cost, in virtual time, after steps of many shapes."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch.backend.fake import FakeBackend, StepCost
from cbatch.bench.fitted_costs import fitted_costs, show_steps, told
from cbatch.errors import ConfigError
from cbatch.stats import EngineStats
from tests.kinds import engine_on

COST = StepCost(base_s=1.0, token_s=0.01)


def shown(n_slots: int, n_window: int, cost: Any = COST) -> dict[str, Any]:
    backend = FakeBackend(n_slots, n_window, 2048, cost=cost)
    with engine_on(backend, threaded=False) as engine:
        show_steps(engine)
        return told(engine.stats())


@pytest.mark.parametrize("n_window", [64, 1024])
def test_costs_are_those_of_the_machine(n_window: int) -> None:
    found = shown(8, n_window)
    for n in (1, 2, 4, 8):
        assert found["rows_s"][str(n)] == pytest.approx(1 + 0.01 * n)
    assert found["prompt_s"] == pytest.approx(0, abs=1e-6)
    assert found["token_s"] == pytest.approx(0.01)
    assert set(found["budget_tokens"]) == {"1", "2", "4", "8"}
    assert found["width"] == 8


def test_width_that_decodes_most_is_found() -> None:
    found = shown(8, 256, lambda n_rows, n_prompt: (1 if n_rows <= 4 else 3) + 0.01 * n_prompt)
    assert found["width"] == 4
    assert told(EngineStats())["width"] is None
    alone = shown(1, 256)  # which has prompts alone
    assert list(alone["rows_s"]) == ["1"]
    assert alone["token_s"] == pytest.approx(0.01)


def test_slot_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="a slot of 32 tokens is too small"):
        shown(2, 32)


@pytest.mark.real
def test_costs_of_a_real_model() -> None:
    found = fitted_costs(None, {"parallel": 2, "ctx_per_seq": 256, "n_threads": 1})
    assert set(found["rows_s"]) == {"1", "2"}
    assert found["token_s"] >= 0
    assert found["cpu_share"] > 0
