"""Whether llama.cpp's AMX code works: built by GCC 12, it ends the process at the first product of matrices.

That compiler assumes that `_tile_loadconfig` reads eight bytes of the tiles' configuration (so says its header
amxtileintrin.h) and drops what llama.cpp stores after them, so the processor reads stale bytes. Weights reach that code
only where llama.cpp may repack them.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.load import notes
from cbatch.errors import ConfigError
from cbatch.support.processes import has_crashed, run_apart

AMX_ADVICE = (
    "llama.cpp's AMX code crashes here (a known fault of GCC 12), so weights are not repacked, and prompts take "
    "longer. To use AMX, build llama-cpp-python with another compiler; to repack without AMX, build it with "
    'CXXFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"'
)
_WALL_S = 60.0
_SOUND = "sound"


@functools.cache
def has_sound_amx(model: Path) -> bool:
    """Whether weights may be repacked: this processor has no AMX, or a process of its own survived a step with it.

    Tried once a process with a small model. A success is noted for this machine.
    """
    if b"AMX_INT8 = 1" not in llama_cpp.llama_print_system_info():
        return True
    if notes.read("amx") == _SOUND:
        return True
    try:
        done = run_apart(__name__, os.fspath(model), wall_s=_WALL_S)
    except ConfigError:
        return True
    if done is not None and done.returncode == 0:
        notes.write(_SOUND, "amx")
    return done is None or not has_crashed(done.returncode)


def main() -> None:
    """Compute two tokens with the model that the arguments name; runs in a separate process.

    Raises:
        SystemExit: no room for the model; this does not show whether AMX works.
    """
    params = llama_cpp.llama_model_default_params()
    loaded = llama_cpp.llama_model_load_from_file(os.fsencode(sys.argv[1]), params)
    if loaded is None:
        raise SystemExit("the test model cannot be loaded")
    sizes = llama_cpp.llama_context_default_params()
    sizes.n_ctx, sizes.n_threads, sizes.n_threads_batch = 64, 1, 1
    context = llama_cpp.llama_init_from_model(loaded, sizes)
    if context is None:
        raise SystemExit("the test context cannot be made")
    tokens = (llama_cpp.llama_token * 2)()
    llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, 2))
