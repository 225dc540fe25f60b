"""Every model of a folder tried, each in a process of its own: llama.cpp ends the process on what it asserts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from cbatch.errors import ConfigError
from cbatch.support.processes import run_apart
from cbatch.verify.findings import Finding


def models_in(folder: Path) -> list[Path]:
    """Return the model files of a folder, of a split model the first part.

    Raises:
        ConfigError: there is none.
    """
    found = [path for path in sorted(folder.glob("*.gguf")) if not _is_later_part(path)]
    if not found:
        raise ConfigError(
            f"{folder}: no .gguf files" if folder.is_dir() else f"{folder}: no folder"
        )
    return found


def _is_later_part(path: Path) -> bool:
    """Whether a file is a part of a split model, but not the first. Source: include/llama.h, llama_split_path."""
    _, _, part = path.stem.partition("-of-")
    number = path.stem.removesuffix(f"-of-{part}").rpartition("-")[2]
    return part.isdigit() and number.isdigit() and int(number) > 1


def verify_all(models: Sequence[Path], n_slots: int, timeout_s: float) -> Iterator[Finding]:
    """Yield what is found of each model, in their order."""
    for path in models:
        yield verify_apart(path, n_slots, timeout_s)


def verify_apart(path: Path, n_slots: int, timeout_s: float) -> Finding:
    """Try a model in a process of its own, which is killed after `timeout_s`."""
    words = os.fspath(path), str(n_slots)
    done = run_apart("cbatch.verify.one_model", *words, wall_s=timeout_s)
    if done is None:
        return Finding(path.name, end=f"not done after {timeout_s:g} s")
    if done.returncode == 0:
        return Finding(**json.loads(done.stdout))
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return Finding(path.name, end=f"{_how(done.returncode)}: {lines[-1] if lines else ''}")


def _how(code: int) -> str:
    try:
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    except ValueError:
        return f"ended by signal {-code}"
