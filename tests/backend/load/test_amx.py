"""llama.cpp's AMX code, tried in a process of its own where it was built; here the trial is made to end as it may."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.load import amx
from cbatch.backend.load.open_model import open_model
from cbatch.errors import ModelLoadError
from cbatch.support import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.fixture
def built_with_amx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str], list[str]]]:
    """Return a function that has trials run `code`, and returns a list that grows with each trial."""

    def prepare(code: str) -> list[str]:
        runs: list[str] = []

        def command_of(*words: str) -> list[str]:
            runs.append(" ".join(words))
            return [sys.executable, "-c", code]

        amx.has_sound_amx.cache_clear()
        monkeypatch.setattr(processes, "command_of", command_of)
        return runs

    monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: b"AVX2 = 1 | AMX_INT8 = 1 | ")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield prepare
    amx.has_sound_amx.cache_clear()


def test_build_whose_amx_crashes_loads_without_repacking_and_says_so(
    built_with_amx: Callable[[str], list[str]], test_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built_with_amx(_DIES)
    with caplog.at_level(logging.WARNING, "cbatch"):
        open_model(test_model).close()
    assert amx.AMX_ADVICE in caplog.text
    llama = llama_cpp.Llama(str(test_model), n_ctx=64, verbose=False)
    with pytest.raises(ModelLoadError, match="give its path instead of a Llama"):
        open_model(llama)
    llama.close()


def test_weights_that_are_not_read_need_no_trial(
    built_with_amx: Callable[[str], list[str]], test_model: Path
) -> None:
    runs = built_with_amx(_DIES)
    open_model(test_model, has_weights=False).close()
    assert runs == []


def test_sound_amx_is_tried_once_for_a_build(
    built_with_amx: Callable[[str], list[str]], test_model: Path
) -> None:
    runs = built_with_amx("")
    for _ in range(2):  # as two processes would
        assert amx.has_sound_amx(test_model)
        amx.has_sound_amx.cache_clear()
    assert len(runs) == 1


@pytest.mark.parametrize("code", ["raise SystemExit(1)", _DIES])
def test_what_a_failed_trial_found_is_not_kept(
    built_with_amx: Callable[[str], list[str]], test_model: Path, code: str
) -> None:
    runs = built_with_amx(code)
    assert amx.has_sound_amx(test_model) is (code != _DIES)
    amx.has_sound_amx.cache_clear()
    amx.has_sound_amx(test_model)
    assert len(runs) == 2


def test_trial_computes_with_the_model(test_model: Path) -> None:
    done = processes.run_apart(amx.__name__, str(test_model), wall_s=60)
    assert done is not None
    assert done.returncode == 0, done.stderr


@pytest.mark.real
def test_trial_that_cannot_load_its_model_is_no_crash(tmp_path: Path) -> None:
    done = processes.run_apart(amx.__name__, str(tmp_path / "none.gguf"), wall_s=60)
    assert done is not None
    assert done.returncode == 1, done.stderr
