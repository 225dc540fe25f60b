"""Tries in a separate process whether llama.cpp crashes on a model's file, before it is loaded in this one.

Sizes that contradict each other fail an assertion in the model's graph, which ends the process. Each architecture has
its own assertions. Unless the header shows that none can fail, the separate process loads the model, sharing the pages
of its weights, and computes a few steps; without weights it only builds the graphs. The result is kept as a note.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from cbatch.backend.llama.fingerprint import model_parts
from cbatch.backend.load import notes
from cbatch.backend.load.note_parts import note_parts
from cbatch.errors import ConfigError, ModelLoadError
from cbatch.support.processes import has_crashed, run_apart

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cbatch.engine_options import EngineOptions

PROCESS = "cbatch.backend.load.survival"
"""The module whose `main` the process runs."""

KEPT = (
    *("flash_attn", "cache_type_k", "cache_type_v", "rope_scaling", "rope_freq_base"),
    *("rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"),
    *("yarn_orig_ctx", "n_threads"),
)
"""Engine options that the process has, too."""

WALL_S = 300.0
"""Seconds after which a process is killed, and nothing is known."""

NO_WEIGHTS = "no-weights"
"""The argument with which the process reads no weights and computes nothing."""

N_WINDOW = 256
"""Most tokens of a sequence in the process."""

_NOTE = "load"
SURVIVED = "survived"
"""The outcome of a process that did not crash."""
_ASSERTED = b"GGML_ASSERT"


def check_load(
    path: Path,
    options: EngineOptions,
    is_stopped: Callable[[], bool] = bool,
    *,
    has_weights: bool = True,
    projector: str | None = None,
) -> None:
    """Load a file in a separate process, and with weights compute one sequence. Done once on a machine.

    If the process cannot start, is killed or refuses the file, nothing is known: the load itself decides.

    Args:
        is_stopped: called now and then; once it is true, the process is killed.
        projector: a projector's file to encode with, in place of the sequence: then it is the file that is tried.

    Raises:
        ModelLoadError: llama.cpp ended the process.
    """
    depends = note_parts(model_parts(os.fspath(path)), options, has_weights=has_weights)
    tried = note_parts(model_parts(projector), options) if projector else depends
    if not depends or not tried:
        return
    said = {
        "parallel": 1,
        "n_batch": options.n_batch,
        "n_ubatch": options.n_ubatch,
        "ctx_per_seq": N_WINDOW,
        "n_gpu_layers": 0,  # assertions do not depend on the device
        "mmproj": projector,
        **{name: getattr(options, name) for name in KEPT},
    }
    words = (os.fspath(path), json.dumps(said), *(() if has_weights else (NO_WEIGHTS,)))
    found = outcome(_NOTE, (*depends, tried[0]), words, is_stopped)
    if found not in (None, SURVIVED):
        raise ModelLoadError(
            f"{projector or path}: llama.cpp crashed on this file in a separate process ({found}): the file is "
            "damaged, so copy or download it again, or this version of llama-cpp-python cannot compute it"
        )


def outcome(
    note: str, depends: Sequence[str], words: Sequence[str], is_stopped: Callable[[], bool]
) -> str | None:
    """Run `PROCESS` with some arguments, unless its outcome is noted.

    Returns:
        `SURVIVED`, or how the process crashed; None if nothing is known.
    """
    if known := notes.read(note, *depends):
        return known
    try:
        done = run_apart(PROCESS, *words, wall_s=WALL_S, is_stopped=is_stopped)
    except ConfigError:
        return None
    has_ended = done is not None and has_crashed(done.returncode)
    if done is None or not (has_ended or done.returncode == 0):
        return None
    found = _last_words(done) if has_ended else SURVIVED
    notes.write(found, note, *depends)
    return found


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the assertion that ended a process; without one, its exit code."""
    for line in done.stderr.splitlines():
        if _ASSERTED in line:
            return line[line.index(_ASSERTED) :].decode(errors="replace")
    return f"exit code {done.returncode}"
