"""Flash attention, where options leave it open: off on processors that decode faster without, and nowhere else."""

from __future__ import annotations

import math
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.load import attention, notes
from cbatch.backend.load.attention import settle_attention
from cbatch.backend.load.loader import load_backend
from cbatch.backend.load.open_model import open_model
from cbatch.backend.load.sizing import find_room, settle
from cbatch.bench import bare
from cbatch.bench.bare import BareLoop, PrefixLoop
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError
from cbatch.messages import BatchPrompt, LookAhead
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel
    from tests.conftest import SynthFactory

SLOW, FAST = {"on": 1.3, "off": 1.0}, {"on": 1.2, "off": 1.0}


@pytest.fixture(scope="module")
def model(synth: SynthFactory) -> Iterator[LlamaModel]:
    with closing(open_model(synth("test"))) as opened:
        yield opened


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, float]]:
    """What a trial finds from now on; no note is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = dict(SLOW)
    monkeypatch.setattr(attention, "seconds_of_steps", lambda: found)
    attention.is_faster_with.cache_clear()
    yield found
    attention.is_faster_with.cache_clear()


def settled(model: LlamaModel, **options: Any) -> str:
    return settle_attention(model, EngineOptions(**options)).flash_attn


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, "off"),
        ({"kv": "partitioned", "parallel": 64, "ctx_per_seq": 4096}, "off"),
        ({"kv": "partitioned", "parallel": 4, "n_ctx": 4096}, "off"),
        ({"flash_attn": "on"}, "on"),
        ({"flash_attn": "off"}, "off"),
        ({"exact": True}, "auto"),
        ({"kv": "unified"}, "auto"),
        ({"split_mode": "tensor"}, "auto"),
        ({"rpc_servers": ["host:1"]}, "auto"),
        ({"ctx_per_seq": 2**20}, "auto"),
        ({"n_ctx": 2**24, "parallel": 4}, "auto"),
        *(
            ({name: kind}, "auto")
            for name in ("cache_type_k", "cache_type_v")
            for kind in ("q8_0", "f32", "bf16")
        ),
    ],
    ids=str,
)
def test_flash_attention_that_is_left_open_is_turned_off(
    trial: dict[str, float], model: LlamaModel, said: dict[str, Any], found: str
) -> None:
    assert settled(model, **said) == found
    trial.update(FAST)
    attention.is_faster_with.cache_clear()
    assert settled(model, **said) == found, "the note says so"


def test_flash_attention_stays_where_it_is_not_slower(
    trial: dict[str, float], model: LlamaModel
) -> None:
    trial.update(FAST)
    assert settled(model) == "auto"


def test_flash_attention_stays_on_devices(
    trial: dict[str, float], model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "free_on_devices", lambda: [2**30])
    assert settled(model) == "auto"


@pytest.mark.parametrize(
    ("shape", "sizes"), [("test", {"n_window": 64}), ("mamba", {})], ids=["window", "state"]
)
def test_flash_attention_stays_where_memory_is_no_plain_cells(
    trial: dict[str, float], synth: SynthFactory, shape: str, sizes: dict[str, int]
) -> None:
    with closing(open_model(synth(shape, **sizes))) as opened:
        assert settled(opened) == "auto"


def test_trial_that_cannot_run_changes_nothing(
    trial: dict[str, float], model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> dict[str, float]:
        raise CBatchError("no memory")

    monkeypatch.setattr(attention, "seconds_of_steps", fail)
    assert settled(model) == "auto"
    assert notes.read("flash-attention") is None


def test_what_cannot_be_kept_for_other_processes_changes_nothing(
    trial: dict[str, float], model: LlamaModel, tmp_path: Path
) -> None:
    (tmp_path / "cbatch").write_text("in the way")
    assert settled(model) == "auto"


def test_what_another_process_found_meanwhile_holds(
    trial: dict[str, float], model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure() -> dict[str, float]:
        notes.write("faster", "flash-attention")
        return SLOW

    monkeypatch.setattr(attention, "seconds_of_steps", measure)
    assert settled(model) == "auto"


@pytest.mark.real
def test_trial_times_both() -> None:
    took = attention.seconds_of_steps()
    assert set(took) == {"on", "off"}
    assert all(0 < seconds < math.inf for seconds in took.values())


@pytest.mark.parametrize(
    ("n_prompt", "n_output", "options", "found"),
    [
        (1200, 50, {}, "auto"),
        (1200, 51, {}, "off"),
        (1000, 1, {}, "off"),
        (1200, None, {}, "off"),
        (1200, 8, {"n": 7}, "off"),
        (1200, 8, {"cache_key": "a"}, "off"),
    ],
)
def test_job_of_long_prompts_with_short_answers_keeps_it(
    trial: dict[str, float],
    model: LlamaModel,
    n_prompt: int,
    n_output: int | None,
    options: dict[str, Any],
    found: str,
) -> None:
    asked = EngineOptions(parallel=4, kv="partitioned")
    given = RunOptions(max_tokens=n_output, **options)
    job = LookAhead([(BatchPrompt(tokens=[300] * n_prompt), given)], is_all=True)
    room = find_room(model, asked)
    assert settle(model, asked, room, job).flash_attn == found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, ("partitioned", "off")),
        ({"kv": "unified"}, ("unified", "auto")),
        ({"flash_attn": "on"}, ("unified", "on")),
        ({"cache_type_k": "q8_0"}, ("unified", "auto")),
    ],
    ids=str,
)
def test_prompts_alike_get_no_pool_where_that_would_keep_it(
    trial: dict[str, float], model: LlamaModel, said: dict[str, Any], found: tuple[str, str]
) -> None:
    asked, given = EngineOptions(parallel=4, **said), RunOptions(max_tokens=8)
    job = LookAhead([(BatchPrompt(tokens=[300] * 1200), given)] * 4, is_all=True)
    settled = settle(model, asked, find_room(model, asked), job)
    assert (settled.kv, settled.flash_attn) == found
    trial.update(FAST)
    attention.is_faster_with.cache_clear()
    notes.write("faster", "flash-attention")
    assert settle(model, asked, find_room(model, asked), job).kv == "unified"


def test_engine_and_bare_loop_are_alike(
    trial: dict[str, float], synth: SynthFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def make(model: LlamaModel, options: EngineOptions, **given: Any) -> LlamaBackend:
        seen.append(options.flash_attn)
        return LlamaBackend(model, options, **given)

    monkeypatch.setattr(bare, "LlamaBackend", make)
    backend, _ = load_backend(synth("test"), EngineOptions(parallel=2, n_threads=1))
    with closing(backend):
        assert backend.options.flash_attn == "off"
        for loop in (BareLoop, PrefixLoop):
            loop(backend.model, EngineOptions(parallel=2, n_threads=1)).close()
    assert seen == ["off", "off"]
