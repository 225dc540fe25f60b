"""Runs of `cbatch doctor`, in environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def run_doctor(*words: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what it found."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "LLAMA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "cbatch", "doctor", "--json", *words],
        env={**kept, **variables},
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def names_of(found: Mapping[str, Any], *, only: str = "") -> set[str]:
    """Return the names of the findings, or of those of one severity."""
    return {f["name"] for f in found["findings"] if only in ("", f["severity"])}
