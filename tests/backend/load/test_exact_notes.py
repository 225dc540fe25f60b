"""What makes a model exact is found once for a model, its settings and a machine, and then remembered."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

import cbatch
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.pad_rows import RowShape
from cbatch.backend.load import exact_notes, notes
from cbatch.backend.load.exact_notes import exact_finding
from cbatch.backend.load.open_model import open_model
from cbatch.backend.load.probe import COULD_NOT_RUN
from cbatch.engine_options import BITWISE, EngineOptions
from cbatch.support.logs import FIELDS

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel

OPTIONS = EngineOptions(parallel=4, ctx_per_seq=256, exact=True, n_threads=1)
SHAPE = RowShape(4, 4, 8)


class Search:
    """Stands for `find_exact`: says what it is told to, and how often it was asked."""

    exactness = BITWISE
    flash_attn: Any = "off"
    shape = SHAPE
    n_asked = 0

    def __call__(self, model: object, options: EngineOptions, is_stopped: object) -> Tuning:
        self.n_asked += 1
        return Tuning(
            replace(options, flash_attn=self.flash_attn),
            exactness=self.exactness,
            shape=self.shape,
        )


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Search:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Search()
    monkeypatch.setattr(exact_notes, "find_exact", found)
    return found


@pytest.mark.parametrize("exactness", [BITWISE, "not guaranteed: so"])
def test_finding_is_remembered(model: LlamaModel, search: Search, exactness: str) -> None:
    search.exactness = exactness
    first, second = exact_finding(model, OPTIONS), exact_finding(model, OPTIONS)
    assert search.n_asked == 1
    assert (first.is_remembered, second.is_remembered) == (False, True)
    assert second == replace(first, is_remembered=True)
    assert second.options == replace(OPTIONS, flash_attn="off")


@pytest.mark.parametrize(
    "given",
    [
        {"parallel": 5},
        {"flash_attn": "on"},
        {"cache_type_k": "q8_0"},
        {"n_ubatch": 64},
        {"ctx_per_seq": 512},
        {"rope_freq_base": 9000.0},
    ],
    ids=str,
)
def test_finding_for_other_settings_is_not_used(
    model: LlamaModel, search: Search, given: dict[str, Any]
) -> None:
    exact_finding(model, OPTIONS)
    assert not exact_finding(model, replace(OPTIONS, **given)).is_remembered
    assert search.n_asked == 2


@pytest.mark.parametrize(
    "given",
    [
        {"parallel": 2, "exact_slots": 4},
        {"swap_mib": 7, "checkpoint_mib": 7, "memory_mib": 7, "max_queue": 7},
        {"cache_dir": "folder", "use_mmap": False, "policy": "shortest"},
        {"ctx_per_seq": 2048},  # longer windows than the probe has
        {"ctx_per_seq": None, "n_ctx": 8192},
    ],
    ids=str,
)
def test_finding_serves_a_replica_and_whatever_changes_no_bits(
    model: LlamaModel, search: Search, given: dict[str, Any]
) -> None:
    long = replace(OPTIONS, ctx_per_seq=1024)
    whole = exact_finding(model, long)
    part = exact_finding(model, replace(long, **given))
    assert part.is_remembered
    assert (part.shape, part.options.flash_attn) == (whole.shape, "off")
    assert search.n_asked == 1


@pytest.mark.parametrize("confirmed", [BITWISE, "not guaranteed: so"])
def test_finding_is_tried_once_with_another_number_of_threads(
    model: LlamaModel, search: Search, monkeypatch: pytest.MonkeyPatch, confirmed: str
) -> None:
    asked: list[Tuning] = []

    def confirm(model: object, tuning: Tuning, is_stopped: object) -> str:
        asked.append(tuning)
        return confirmed

    monkeypatch.setattr(exact_notes, "confirm", confirm)
    exact_finding(model, OPTIONS)
    for _ in range(2):
        found = exact_finding(model, replace(OPTIONS, n_threads=2))
        assert found.exactness.startswith(confirmed)
    assert (search.n_asked, len(asked)) == (1, 1 if confirmed == BITWISE else 2)
    threads = replace(OPTIONS, n_threads=2, flash_attn="off")
    assert (asked[0].options, asked[0].exactness, asked[0].shape) == (threads, BITWISE, SHAPE)
    if confirmed != BITWISE:
        assert "n_threads=2" in found.exactness
    assert exact_finding(model, OPTIONS).is_remembered


def test_settings_of_another_process_are_tried_for_real(
    test_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened = open_model(test_model, OPTIONS)
    first = exact_finding(opened, OPTIONS)
    again = exact_finding(opened, replace(OPTIONS, n_threads=2))
    assert (again.exactness, again.is_remembered) == (BITWISE, False)
    assert again.shape == first.shape
    assert exact_finding(opened, replace(OPTIONS, n_threads=2)).is_remembered
    opened.close()


def test_one_width_that_a_replica_cannot_have_is_refused(
    model: LlamaModel, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replace(OPTIONS, parallel=16)
    monkeypatch.setattr(Search, "shape", RowShape(16, 16, 8))
    assert exact_finding(model, whole).exactness == BITWISE
    part = exact_finding(model, replace(OPTIONS, parallel=8, exact_slots=16))
    assert "only steps of at least 16 rows" in part.exactness
    assert search.n_asked == 1


def test_finding_for_another_file_or_machine_is_not_used(
    test_model: Path, tmp_path: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(test_model, path)
    for change in ("", "file", "machine"):
        if change == "file":
            change_last_byte(path)
        elif change:
            monkeypatch.setattr(notes, "device_names", lambda: ["another processor"])
        opened = open_model(path, OPTIONS)
        assert not exact_finding(opened, OPTIONS).is_remembered
        opened.close()
    assert search.n_asked == 3


def change_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "wrong",
    [
        "nonsense",
        "[" * 99_999,
        "{}",
        {"exactness": 1},
        {"flash_attn": "maybe"},
        {"least": 99},
        {"multiple": 8},
        {"least": None},
        {"n_last": 7},
        {"probe_s": "long"},
    ],
    ids=lambda wrong: str(wrong)[:20],
)
def test_damaged_finding_is_ignored(
    model: LlamaModel, search: Search, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    exact_finding(model, OPTIONS)
    right = {
        "exactness": BITWISE,
        "flash_attn": "off",
        "least": 4,
        "multiple": 4,
        "n_last": 8,
        "probe_s": 1.0,
    }
    said = wrong if isinstance(wrong, str) else json.dumps({**right, **wrong})
    monkeypatch.setattr(notes, "read", lambda *_: said)
    assert not exact_finding(model, OPTIONS).is_remembered
    monkeypatch.setattr(notes, "read", lambda *_: json.dumps(right))
    assert exact_finding(model, OPTIONS).is_remembered
    assert search.n_asked == 2


@pytest.mark.parametrize("is_borrowed", [False, True])
def test_probe_that_could_not_run_or_of_a_borrowed_model_is_not_remembered(
    test_model: Path, model: LlamaModel, search: Search, is_borrowed: bool
) -> None:
    search.exactness = BITWISE if is_borrowed else f"{COULD_NOT_RUN}: so"
    llama = llama_cpp.Llama(str(test_model), n_ctx=64, verbose=False)
    borrowed = open_model(llama, OPTIONS)
    for _ in range(2):
        assert not exact_finding(borrowed if is_borrowed else model, OPTIONS).is_remembered
    assert search.n_asked == 2
    borrowed.close()
    llama.close()


def test_load_says_what_the_probe_took_and_whether_it_is_remembered(
    test_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, "cbatch")
    for exact in (True, True, False):
        cbatch.load(test_model, parallel=4, ctx_per_seq=256, n_threads=1, exact=exact).close()
    lines = [r for r in caplog.records if r.getMessage().startswith("loaded ")]
    first, second, plain = [getattr(line, FIELDS) for line in lines]
    assert (first["probe_remembered"], second["probe_remembered"]) == (False, True)
    assert first["probe_s"] == second["probe_s"] > 0
    assert (plain["probe_s"], plain["probe_remembered"]) == (None, None)
