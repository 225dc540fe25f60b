"""Whether llama.cpp's AMX code works: built by GCC 12, it ends the process at the first product of matrices.

That compiler assumes that `_tile_loadconfig` reads eight bytes of the tiles' configuration (so says its header
amxtileintrin.h) and drops what llama.cpp stores after them, so the processor reads stale bytes. Weights reach that code
only where llama.cpp may repack them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.load import notes

if TYPE_CHECKING:
    from pathlib import Path

AMX_ADVICE = (
    "llama.cpp's AMX code ends the process here, as builds by GCC 12 do, so weights are not repacked, and prompts "
    "take longer. To use AMX, build llama-cpp-python with another compiler; to repack without AMX, build it with "
    'CXXFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"'
)
_WALL_S = 60.0
_SOUND = "sound"
SCRIPT = f"""
import sys
sys.path[:] = filter(None, sys.path)  # another cbatch may be where the process was started
from {__name__} import compute
compute(sys.argv[1])
"""


@functools.cache
def has_sound_amx(model: Path) -> bool:
    """Whether weights may be repacked: this processor has no AMX, or a process of its own survived a step with it.

    Tried once a process with a small model. A success is noted for this machine.
    """
    if b"AMX_INT8 = 1" not in llama_cpp.llama_print_system_info():
        return True
    if notes.read("amx") == _SOUND:
        return True
    code = _code_of_step(model)
    if code == 0:
        notes.write(_SOUND, "amx")
    return code is None or code >= 0


def _code_of_step(model: Path) -> int | None:
    """Return the exit status of a process that computes a step, negative where a signal ended it; None: unknown."""
    paths = os.pathsep.join(p for p in sys.path if p)
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, model],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_WALL_S,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode


def compute(model: str) -> None:
    """Compute two tokens; for a process of its own.

    Raises:
        SystemExit: there is no room for the model, which says nothing of AMX.
    """
    params = llama_cpp.llama_model_default_params()
    loaded = llama_cpp.llama_model_load_from_file(os.fsencode(model), params)
    if loaded is None:
        raise SystemExit("the model of the trial cannot be loaded")
    sizes = llama_cpp.llama_context_default_params()
    sizes.n_ctx, sizes.n_threads, sizes.n_threads_batch = 64, 1, 1
    context = llama_cpp.llama_init_from_model(loaded, sizes)
    if context is None:
        raise SystemExit("the context of the trial cannot be made")
    tokens = (llama_cpp.llama_token * 2)()
    llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, 2))
