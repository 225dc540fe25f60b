"""Embedding runs that are killed and gone on with: `python -m tests.files.kill_vectors --texts 100000 --kills 10`.

SIGKILL ends `cbatch embed` and its workers at random moments; the same command goes on. In the end every row has one
vector, the one that its text has alone. `--seed` repeats what was drawn.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import cbatch
from cbatch.bench.synthetic import SHAPES, write_model
from cbatch.bench.synthetic_vocabulary import words as english_words

N_COMPARED = 500
"""Vectors that are computed again for comparison."""


@dataclass
class VectorTally:
    """What was done and found."""

    n_texts: int
    n_kills: int = 0
    n_rows: int = 0
    n_distinct: int = 0
    least_cosine: float = 0.0
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing is lost, doubled or of another text."""
        return self.n_rows == self.n_distinct == self.n_texts and self.least_cosine > 0.9999


def kills(folder: Path, n_texts: int, n_kills: int, most_s: float, seed: int) -> VectorTally:
    """Embed made-up texts with a small BERT, killed so many times, `most_s` seconds after a start at the latest."""
    chance, known = random.Random(seed), english_words()
    texts = [" ".join(chance.choices(known, k=chance.randint(3, 60))) for _ in range(n_texts)]
    source, out, model = folder / "in.csv", folder / "out.jsonl", folder / "model.gguf"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
    write_model(model, SHAPES["bert"])
    words = ["embed", str(source), "-o", str(out)]
    words += ["--column", "text", "-m", str(model), "--quiet", "--keep-columns", "id"]
    tally, start_s = VectorTally(n_texts), time.perf_counter()
    while tally.n_kills < n_kills:
        run = subprocess.Popen([sys.executable, "-m", "cbatch", *words], start_new_session=True)
        with suppress(subprocess.TimeoutExpired):
            run.wait(chance.uniform(0.5, most_s))
        if run.poll() is not None:
            break
        os.killpg(run.pid, signal.SIGKILL)
        tally.n_kills += run.wait() == -signal.SIGKILL
    if subprocess.run([sys.executable, "-m", "cbatch", *words], check=False).returncode:
        raise RuntimeError(f"seed {seed}: the command failed")
    tally.seconds = round(time.perf_counter() - start_s, 1)
    _compare(tally, out, texts, model, chance)
    return tally


def _compare(
    tally: VectorTally, out: Path, texts: list[str], model: Path, chance: random.Random
) -> None:
    """Count the rows, and compare some with vectors of their texts alone."""
    compared = set(chance.sample(range(len(texts)), min(N_COMPARED, len(texts))))
    found: dict[int, list[float]] = {}
    seen: set[int] = set()
    with out.open() as lines:
        for line in lines:
            record = json.loads(line)
            i = int(record["id"])
            tally.n_rows += 1
            seen.add(i)
            if i in compared:
                found[i] = record["embedding"]
    tally.n_distinct = len(seen)
    with cbatch.load(model) as engine:
        expected = engine.embed([texts[i] for i in sorted(compared)]).array()
    rows = np.array([found[i] for i in sorted(compared)])
    tally.least_cosine = float((rows * expected).sum(axis=1).min())


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--most-s", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally = kills(Path(folder), asked.texts, asked.kills, asked.most_s, asked.seed)
    print(json.dumps({"seed": asked.seed, **asdict(tally), "is_clean": tally.is_clean}))  # noqa: T201


if __name__ == "__main__":
    main()
