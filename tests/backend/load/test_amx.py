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


@pytest.mark.parametrize(("code", "n_tried"), [("", 1), ("raise SystemExit(1)", 2), (_DIES, 2)])
def test_sound_amx_is_tried_once_and_a_failed_trial_is_not_kept(
    built_with_amx: Callable[[str], list[str]], test_model: Path, code: str, n_tried: int
) -> None:
    runs = built_with_amx(code)
    open_model(test_model, has_weights=False).close()
    assert runs == []  # weights that are not read need no trial
    for _ in range(2):  # as two processes would
        assert amx.has_sound_amx(test_model) is (code != _DIES)
        amx.has_sound_amx.cache_clear()
    assert len(runs) == n_tried


@pytest.mark.parametrize("is_there", [True, False])
def test_trial_computes_with_the_model(test_model: Path, tmp_path: Path, is_there: bool) -> None:
    path = test_model if is_there else tmp_path / "none.gguf"
    done = processes.run_apart(amx.__name__, str(path), wall_s=60)
    assert done is not None
    assert done.returncode == (not is_there), done.stderr  # no crash
