"""`llama_cpp`, imported here alone: its threads are not to spin at barriers for long.

Every operation of a graph ends in a barrier, thousands of them a step. Where another program has a core, the threads
wait there for one that is not scheduled; GNU's OpenMP lets them spin for some milliseconds first, on the very core
that the late one waits for. `GOMP_SPINCOUNT` bounds that. The runtime reads it once, when it is loaded, so it is in
the environment only while llama.cpp's libraries are loaded; a policy that the user has set stays.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SPIN_COUNT = "1000"
"""Rounds of spinning before a thread sleeps: some microseconds. Source: `cbatch.bench.experiments.neighbours`."""

POLICIES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which a user says how OpenMP's threads wait. Source: the manual of GNU libgomp."""


@contextmanager
def short_spins() -> Iterator[None]:
    """Have an OpenMP runtime that is loaded in the block spin briefly, unless the user has said how it waits."""
    if any(name in os.environ for name in POLICIES):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


with short_spins():
    import llama_cpp
    from llama_cpp import llama_chat_format

__all__ = ["llama_chat_format", "llama_cpp"]
