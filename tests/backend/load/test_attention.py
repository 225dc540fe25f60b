"""Flash attention, where options leave it open: off on processors that decode faster without, and nowhere else."""

from __future__ import annotations

import json
import math
import shutil
import time
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.load import attention, attention_trial, notes
from cbatch.backend.load.attention import (
    AttentionFinding,
    judge,
    settle_attention,
    why_attention,
)
from cbatch.backend.load.attention_trial import TrialRound, TrialShape
from cbatch.backend.load.loader import load_backend
from cbatch.backend.load.open_model import open_model
from cbatch.backend.load.sizing import find_room, settle
from cbatch.bench import bare
from cbatch.bench.bare import BareLoop
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError
from cbatch.messages import BatchPrompt, LookAhead
from cbatch.options import RunOptions
from cbatch.worker.start import settings_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.model_tuning import Tuning
    from tests.conftest import SynthFactory

pytestmark = pytest.mark.cpu("devices have their own attention, which is not tried")

DAY_S = 24 * 3600.0
SOON_S = 60.0
NOW_S = 1e9
Gains: TypeAlias = "Sequence[float | tuple[float, float]]"
"""Of rounds; two where they differ for rows of many lengths and for rows that are all long."""

GAINS: Gains = [1.3] * 9
LOSSES: Gains = [0.8] * 9


class Trial:
    """What trials find from now on, and how many rounds they took."""

    def __init__(self) -> None:
        self.gains: Gains = GAINS
        self.first_s, self.cpu_share = 0.1, 1.0
        self.n_trials = self.n_rounds = 0

    def rounds(self, *args: object) -> Generator[TrialRound, None, None]:
        self.n_trials += 1
        for gain, wall_s in zip([1.0, *self.gains], [self.first_s, *[0.1] * 9], strict=False):
            self.n_rounds += 1
            mixed, alike = gain if isinstance(gain, tuple) else (gain, gain)
            yield TrialRound(mixed, alike, wall_s, self.cpu_share * wall_s)


@pytest.fixture(scope="module")
def model(synth: SynthFactory) -> Iterator[LlamaModel]:
    with closing(open_model(synth("test"))) as opened:
        yield opened


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trial:
    """No note is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Trial()
    monkeypatch.setattr(attention, "rounds", found.rounds)
    return found


# ---- what rounds show ----


@pytest.mark.parametrize(
    ("gains", "is_off", "n_rounds", "lasts_days"),
    [
        (GAINS, True, 4, 30),
        (LOSSES, False, 2, 30),
        ([1.04] * 9, False, 2, 30),
        ([1.3, 0.4, 1.3, 1.3, 1.3, 1.3], True, 6, 1),
        ([(0.96, 1.5)] * 9, True, 4, 30),
        ([(0.8, 1.8)] * 9, False, 2, 30),
        ([1.08, 1.0] * 4 + [1.08], False, 9, 1),
        ([1.08, 1.0, 1.0, 1.0], False, 4, 1),
    ],
    ids=[
        "gain",
        "loss",
        "less than 5 %",
        "one bad round",
        "long rows",
        "loss of short rows",
        "noise",
        "more losses",
    ],
)
def test_flash_attention_is_off_only_where_rounds_show_a_clear_gain(
    gains: Gains, is_off: bool, n_rounds: int, lasts_days: int
) -> None:
    trial = Trial()
    trial.gains = gains
    found = judge(trial.rounds(), NOW_S)
    assert found is not None
    assert (found.is_off, len(found.rounds)) == (is_off, n_rounds)
    assert trial.n_rounds == 1 + n_rounds, "no more than it takes"
    assert found.due_s == NOW_S + lasts_days * DAY_S


# ---- what is noted ----


@pytest.mark.parametrize(
    ("gains", "first_s", "cpu_share"),
    [(GAINS, 0.6, 1.0), ([], 0.1, 1.0), (GAINS, 0.1, 0.5), (GAINS, 0.6, 0.5)],
    ids=["too slow", "no rounds", "disturbed", "both"],
)
def test_trial_that_shows_nothing_keeps_it_for_a_month_or_for_nothing(
    gains: Gains, first_s: float, cpu_share: float
) -> None:
    trial = Trial()
    trial.gains, trial.first_s, trial.cpu_share = gains, first_s, cpu_share
    found = judge(trial.rounds() if gains else iter(list[TrialRound]()), NOW_S)
    kept = AttentionFinding(is_off=False, made_s=NOW_S, due_s=NOW_S + 30 * DAY_S)
    assert found == (kept if cpu_share == 1.0 else None)
    assert trial.n_rounds <= 1 or cpu_share < 1.0


def find(model: LlamaModel, now_s: float = NOW_S, **options: Any) -> tuple[bool, float] | None:
    """Return whether flash attention is off, and until when that holds."""
    found = attention.find_attention(model, EngineOptions(**options), lambda: now_s)
    return None if found is None else (found.is_off, found.due_s - now_s)


def test_what_two_loads_have_found_is_not_tried_again(trial: Trial, model: LlamaModel) -> None:
    assert find(model) == (True, SOON_S)
    assert find(model, NOW_S + SOON_S) == (True, 30 * DAY_S)
    trial.gains = LOSSES
    assert find(model, NOW_S + SOON_S + 29 * DAY_S) == (True, DAY_S)
    assert trial.n_trials == 2


def test_another_model_or_number_of_threads_is_tried_by_itself(
    trial: Trial, model: LlamaModel, synth: SynthFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find(model) == (True, SOON_S)
    trial.gains = LOSSES
    assert find(model, n_threads=1) == (False, SOON_S)
    assert find(model, parallel=1) == (False, SOON_S)
    with closing(open_model(synth("test", n_layer=3))) as other:
        assert find(other) == (False, SOON_S)
    assert find(model) == (True, SOON_S)
    monkeypatch.setattr(notes, "device_names", lambda: ["another processor"])
    assert find(model) == (False, SOON_S)


def test_workers_of_a_pool_find_what_was_found_in_process(trial: Trial, model: LlamaModel) -> None:
    whole = EngineOptions(parallel=16, n_ctx=16 * 2048)
    assert settle_attention(model, whole).flash_attn == "off"
    trial.gains = LOSSES
    for share in settings_of(whole, 2):
        assert settle_attention(model, EngineOptions.of(share)).flash_attn == "off"
    assert trial.n_trials == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_off", None),
        ("due_s", math.inf),
        ("rounds", [{}]),
        ("rounds", [1]),
        ("rounds", [dict.fromkeys(("mixed", "alike", "wall_s", "cpu_s"), 0.0)]),
    ],
)
def test_damaged_note_does_not_hold(
    trial: Trial, model: LlamaModel, tmp_path: Path, name: str, value: object
) -> None:
    find(model)
    [note] = (tmp_path / "cbatch" / "notes").iterdir()
    said = json.loads(note.read_text())
    said["found"] = json.dumps({**json.loads(said["found"]), name: value})
    note.write_text(json.dumps(said))
    trial.gains = LOSSES
    assert find(model) == (False, SOON_S)


@pytest.mark.parametrize(
    ("is_confirmed", "now_s"),
    [(False, NOW_S + SOON_S), (True, NOW_S + SOON_S + 30 * DAY_S), (True, NOW_S - 3600)],
    ids=["of one load", "old", "clock set back"],
)
def test_false_note_is_put_right_by_the_second_quiet_load(
    trial: Trial, model: LlamaModel, is_confirmed: bool, now_s: float
) -> None:
    find(model)
    if is_confirmed:
        assert find(model, NOW_S + SOON_S) == (True, 30 * DAY_S)
    trial.gains = LOSSES
    assert find(model, now_s) == (False, SOON_S)
    assert find(model, now_s + SOON_S) == (False, 30 * DAY_S)


def test_trial_beside_other_programs_is_made_again_by_the_next_load(
    trial: Trial, model: LlamaModel
) -> None:
    trial.cpu_share = 0.5
    assert find(model) == (False, SOON_S)
    trial.cpu_share = 1.0
    assert find(model, NOW_S + SOON_S - 1) == (False, 1)
    assert find(model, NOW_S + SOON_S) == (True, SOON_S)
    assert find(model, NOW_S + 2 * SOON_S) == (True, 30 * DAY_S)
    trial.cpu_share = 0.5  # what was found before stays
    assert find(model, NOW_S + 31 * DAY_S) == (True, SOON_S)


@pytest.mark.parametrize("is_off", [True, False])
def test_jobs_of_tune_put_a_false_note_right(trial: Trial, model: LlamaModel, is_off: bool) -> None:
    trial.gains = LOSSES if is_off else GAINS
    assert settled(model) == ("auto" if is_off else "off")
    ratio = 1.2 if is_off else 0.8
    seen = [TrialRound(ratio, ratio, 1.0, 1.0)]
    assert attention.keep_attention(model, EngineOptions(), seen, is_off=is_off)
    assert settled(model) == ("off" if is_off else "auto")
    assert "measured with this model" in why_attention(model, EngineOptions())
    assert trial.n_trials == 1


@pytest.mark.parametrize(
    "said", [{"flash_attn": "on"}, {"exact": True}, {"kv": "unified"}], ids=str
)
def test_jobs_note_nothing_that_no_load_asks_for(
    trial: Trial, model: LlamaModel, said: dict[str, Any]
) -> None:
    options = EngineOptions(**said)
    assert not attention.keep_attention(model, options, [], is_off=True)
    assert settled(model) == "off", "by a trial of its own"


def test_trial_that_cannot_run_changes_nothing(
    trial: Trial, model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> Generator[TrialRound, None, None]:
        raise CBatchError("no memory")
        yield

    monkeypatch.setattr(attention, "rounds", fail)
    assert find(model) is None
    assert settled(model) == "auto"


def test_what_cannot_be_kept_for_other_processes_is_not_tried(
    trial: Trial, model: LlamaModel, tmp_path: Path
) -> None:
    (tmp_path / "cbatch").write_text("in the way")
    assert settled(model) == "auto"
    assert trial.n_trials == 0


def test_what_another_process_found_meanwhile_holds(
    trial: Trial, model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(*args: object) -> Generator[TrialRound, None, None]:
        monkeypatch.setattr(attention, "rounds", trial.rounds)
        find(model)
        trial.gains = LOSSES
        return trial.rounds()

    monkeypatch.setattr(attention, "rounds", slower)
    assert find(model) == (True, SOON_S)
    assert trial.n_trials == 2


def test_model_without_weights_is_not_tried(trial: Trial, synth: SynthFactory) -> None:
    with closing(open_model(synth("test"), has_weights=False)) as described:
        options = EngineOptions()
        assert attention.find_attention(described, options) is None
        assert (
            why_attention(described, options)
            == "llama.cpp's default; loading the model measures whether off is faster"
        )
        with closing(open_model(synth("test"))) as loaded:
            attention.find_attention(loaded, options)
        assert (
            why_attention(described, options) == "measured with this model on "
            f"{time.strftime('%Y-%m-%d', time.gmtime())}: 1.30 × as fast as with, 1.30–1.30 in 4 rounds"
        )
        assert trial.n_trials == 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"flash_attn": "off"}, "as asked for"),
        ({"exact": True}, ""),
        ({"kv": "unified"}, "llama.cpp's default"),
        (
            {},
            "measured with this model on 2001-09-09: 1.25 × as fast as without, 1.25–1.25 in 2 rounds",
        ),
    ],
)
def test_reason_is_told(trial: Trial, model: LlamaModel, said: dict[str, Any], why: str) -> None:
    trial.gains = LOSSES
    attention.find_attention(model, EngineOptions(), lambda: NOW_S)
    assert why_attention(model, EngineOptions(**said)) == why


# ---- what is decided by it ----


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
    trial: Trial, model: LlamaModel, said: dict[str, Any], found: str
) -> None:
    assert settled(model, **said) == found


def test_flash_attention_stays_on_devices(
    trial: Trial, model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "free_on_devices", lambda: [2**30])
    assert settled(model) == "auto"


@pytest.mark.parametrize(
    ("shape", "sizes"), [("test", {"n_window": 64}), ("mamba", {})], ids=["window", "state"]
)
def test_flash_attention_stays_where_memory_is_no_plain_cells(
    trial: Trial, synth: SynthFactory, shape: str, sizes: dict[str, int]
) -> None:
    with closing(open_model(synth(shape, **sizes))) as opened:
        assert settled(opened) == "auto"


@pytest.mark.real
@pytest.mark.parametrize("options", [{}, {"parallel": 1, "ctx_per_seq": 16}], ids=str)
def test_trial_times_both_ways(model: LlamaModel, options: dict[str, Any]) -> None:
    shape = TrialShape.of(model, EngineOptions(n_threads=1, **options))
    with closing(attention_trial.rounds(model, shape)) as rounds:
        for seen in islice(rounds, 3):
            assert all(0 < value < math.inf for value in asdict(seen).values())


def test_model_of_two_gibibytes_is_not_tried(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "n_bytes", 2**31 + 1)
    shape = TrialShape.of(model, EngineOptions())
    assert list(attention_trial.rounds(model, shape)) == []


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
    trial: Trial,
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
    trial: Trial,
    model: LlamaModel,
    tmp_path: Path,
    said: dict[str, Any],
    found: tuple[str, str],
) -> None:
    asked, given = EngineOptions(parallel=4, **said), RunOptions(max_tokens=8)
    job = LookAhead([(BatchPrompt(tokens=[300] * 1200), given)] * 4, is_all=True)
    settled = settle(model, asked, find_room(model, asked), job)
    assert (settled.kv, settled.flash_attn) == found
    trial.gains = LOSSES
    shutil.rmtree(tmp_path / "cbatch", ignore_errors=True)
    assert settle(model, asked, find_room(model, asked), job).kv == "unified"


def test_engine_and_bare_loop_are_alike(
    trial: Trial, synth: SynthFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def make(model: LlamaModel, tuning: Tuning, **given: Any) -> LlamaBackend:
        seen.append(tuning.options.flash_attn)
        return LlamaBackend(model, tuning, **given)

    monkeypatch.setattr(bare, "LlamaBackend", make)
    backend, _ = load_backend(synth("test"), EngineOptions(parallel=2, n_threads=1))
    with closing(backend):
        assert backend.options.flash_attn == "off"
        BareLoop(backend.model, EngineOptions(parallel=2, n_threads=1)).close()
    assert seen == ["off"]
