"""SIGKILL ends `cbatch embed` and its workers at random moments; the same command goes on."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

import cbatch
from cbatch.bench.synthetic_vocabulary import words as english_words

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SynthFactory

N_TEXTS = 1500


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_embedding_run_has_one_vector_for_each_text_in_the_end(
    tmp_path: Path, synth: SynthFactory
) -> None:
    seed = random.randrange(2**32)
    chance, known, model = random.Random(seed), english_words(), synth("bert")
    texts = [" ".join(chance.choices(known, k=chance.randint(3, 60))) for _ in range(N_TEXTS)]
    source, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
    asked = ["--column", "text", "-m", str(model), "--quiet", "--keep-columns", "id"]
    command = [sys.executable, "-m", "cbatch", "embed", str(source), "-o", str(out), *asked]
    for _ in range(chance.randint(1, 2)):
        with subprocess.Popen(command, start_new_session=True) as run:
            with suppress(subprocess.TimeoutExpired):
                run.wait(chance.uniform(0.5, 2.5))
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert subprocess.run(command, check=False).returncode == 0, seed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {int(line["id"]): line for line in lines}
    assert len(found) == len(lines) == N_TEXTS, seed
    compared = chance.sample(range(N_TEXTS), 300)
    with cbatch.load(model) as engine:
        expected = engine.embed([texts[i] for i in compared]).array()
    rows = np.array([found[i]["embedding"] for i in compared])
    assert (rows * expected).sum(axis=1).min() > 0.9999, seed
