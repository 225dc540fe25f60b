"""A command that SIGKILL ends at random moments, and that goes on until it is done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


def killed_until_done(
    words: Sequence[str],
    chance: random.Random,
    n_kills: int,
    least_s: float,
    most_s: float,
    *,
    seed: int,
) -> tuple[int, int]:
    """Run `cbatch` with these words until it ends by itself; return how often it was killed, and started.

    Args:
        words: the arguments of the command.
        chance: draws the moments.
        n_kills: most kills, each with all processes of the command.
        least_s: seconds after a start at the earliest.
        most_s: seconds after a start at the latest.
        seed: of `chance`, for the error.

    Raises:
        RuntimeError: the command failed.
    """
    n_killed = n_starts = 0
    while True:
        run = subprocess.Popen([sys.executable, "-m", "cbatch", *words], start_new_session=True)
        n_starts += 1
        if n_killed < n_kills:
            with suppress(subprocess.TimeoutExpired):
                run.wait(chance.uniform(least_s, most_s))
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                n_killed += 1
        if run.wait() == 0:
            return n_killed, n_starts
        if run.returncode != -signal.SIGKILL:
            raise RuntimeError(f"seed {seed}: the command ended with {run.returncode}")
