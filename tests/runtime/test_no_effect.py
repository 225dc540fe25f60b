"""Options that do nothing are told: in the result of each request, and once in the log of a load."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.core.plan import KvCapabilities
from cbatch.engine_options import EngineOptions
from cbatch.runtime.no_effect import idle_settings
from tests.face.test_tools import TIME
from tests.kinds import each_kind, engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

SHORT = {"max_tokens": 2, "ignore_eos": True}
CHAT = [{"role": "user", "content": "hi"}]
PARTITIONED = KvCapabilities("partitioned", 64)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(FakeBackend(2, 256, 16), options=SHORT) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"xtc_threshold": 0.2}, "without xtc_probability"),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, "with xtc_threshold above 0.5"),
        ({"dry_base": 1.5}, "without dry_multiplier"),
        ({"dry_allowed_length": 1}, "without dry_multiplier"),
        ({"dry_penalty_last_n": 9}, "without dry_multiplier"),
        ({"dry_sequence_breakers": ["a"]}, "without dry_multiplier"),
        ({"dry_multiplier": 1, "dry_base": 0.5}, "with dry_base below 1"),
        ({"dry_multiplier": 1, "dry_penalty_last_n": 0}, "with dry_penalty_last_n=0"),
        ({"repeat_last_n": 8}, "without repeat_penalty, presence_penalty or frequency_penalty"),
        ({"repeat_penalty": 2, "repeat_last_n": 0}, "with repeat_last_n=0"),
        ({"thinking_budget": 5}, "without messages: only chats think"),
        ({"parallel_tool_calls": False}, "without tools"),
        ({"strict_max_tokens": True, "max_tokens": None}, "without max_tokens"),
    ],
)
@each_kind
def test_option_without_effect_is_told_once(
    engine: Engine, options: dict[str, Any], said: str
) -> None:
    if "max_tokens" in options:
        with engine_on(FakeBackend(2, 64, 16)) as other:
            result = other.submit("a", options=options).result()
    else:
        result = engine.submit("a", options=options).result()
    [warning] = result.warnings
    assert warning == f"{next(iter(options))} has no effect {said}"


@pytest.mark.parametrize(
    "options",
    [
        {"xtc_threshold": 0.2, "xtc_probability": 0.5},
        {"xtc_probability": 0, "repeat_penalty": 1, "presence_penalty": 0, "repeat_last_n": 0},
        {"dry_multiplier": 0},
        {"dry_base": 1.5, "dry_multiplier": 1},
        {"repeat_last_n": 8, "frequency_penalty": 1},
        {"strict_max_tokens": False},
        {"tools": [TIME], "parallel_tool_calls": False, "tool_choice": "auto"},
        {"temperature": 0, "top_p": 0.5, "seed": 4},
    ],
)
def test_option_that_does_something_or_asks_for_nothing_is_not_told(
    engine: Engine, options: dict[str, Any]
) -> None:
    prompt: Any = CHAT if "tools" in options else "a"
    assert engine.submit(prompt, options=options).result().warnings == ()


@pytest.mark.parametrize(
    ("options", "memory", "said"),
    [
        ({"admission": "reserve"}, PARTITIONED, "admission='reserve' has no effect without"),
        ({"checkpoint_mib": 9}, PARTITIONED, "checkpoint_mib=9 has no effect with this model"),
        ({"n_gpu_layers": 9}, PARTITIONED, "n_gpu_layers=9 has no effect here: there is no GPU"),
        ({"tensor_split": [1, 2]}, PARTITIONED, "tensor_split=(1.0, 2.0) has no effect here"),
        ({"main_gpu": 1}, PARTITIONED, "main_gpu=1 has no effect here"),
        ({"split_mode": "row"}, PARTITIONED, "split_mode='row' has no effect here"),
        (
            {"checkpoint_mib": 9, "share_prefixes": False},
            KvCapabilities("recurrent", 2, can_trim=False),
            "checkpoint_mib=9 has no effect with share_prefixes=False",
        ),
    ],
)
def test_setting_without_effect_is_told(
    options: dict[str, Any], memory: KvCapabilities, said: str
) -> None:
    [warning] = idle_settings(EngineOptions(**options), memory, has_devices=False)
    assert warning.startswith(said)


def test_setting_with_an_effect_or_left_at_its_default_is_not_told() -> None:
    unified = KvCapabilities("unified", 64)
    given = EngineOptions(admission="reserve", kv="unified", n_gpu_layers=0, main_gpu=0)
    assert [*idle_settings(given, unified, has_devices=False)] == []
    on_gpu = EngineOptions(n_gpu_layers=9, tensor_split=[1, 2])
    assert [*idle_settings(on_gpu, PARTITIONED, has_devices=True)] == []
    assert [*idle_settings(EngineOptions(), PARTITIONED, has_devices=False)] == []


def test_load_logs_a_setting_without_effect(
    test_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="cbatch"):
        cbatch.load(test_model, parallel=2, n_threads=1, checkpoint_mib=5, kv="partitioned").close()
    said = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("checkpoint_mib=5 has no effect with this model")
