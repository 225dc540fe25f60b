"""Captioning runs that are killed and gone on with: `python -m tests.files.kill_pictures --pictures 500 --kills 6`.

SIGKILL ends `cbatch run` over a Parquet file of pictures at random moments; the same command goes on. In the end every
picture has one answer, the one that it has alone. `--seed` repeats what was drawn.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

import cbatch
from cbatch.bench.synthetic import SHAPES, write_model
from cbatch.bench.synthetic_projector import write_projector
from tests.files.killed_until_done import killed_until_done

N_COMPARED = 50
"""Answers that are computed again for comparison."""

OPTIONS: dict[str, int] = {"max_tokens": 12, "temperature": 0}


@dataclass
class CaptionTally:
    """What was done and found."""

    n_pictures: int
    n_kills: int = 0
    n_starts: int = 0
    n_rows: int = 0
    n_distinct: int = 0
    n_errors: int = 0
    n_other: int = 0
    """Answers that differ from those alone."""
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing is lost, doubled, failed or of another picture."""
        is_whole = self.n_rows == self.n_distinct == self.n_pictures
        return is_whole and not self.n_errors and not self.n_other


def _png(seed: int) -> bytes:
    draw, file = np.random.default_rng(seed), io.BytesIO()
    width, height = (int(n) for n in draw.integers(40, 400, 2))
    Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def kills(folder: Path, n_pictures: int, n_kills: int, most_s: float, seed: int) -> CaptionTally:
    """Caption made-up pictures, killed so many times, `most_s` seconds after a start at the latest."""
    chance, pictures = random.Random(seed), [_png(seed + i) for i in range(n_pictures)]
    source, out = folder / "in.parquet", folder / "out.parquet"
    table = {"id": [*range(n_pictures)], "image": pictures, "text": ["What is it?"] * n_pictures}
    parquet.write_table(pyarrow.table(table), source)
    model = write_model(folder / "model.gguf", SHAPES["test"])
    projector = write_projector(folder / "mmproj.gguf", SHAPES["test"].n_embd, kind="llava-tiles")
    words = ["run", str(source), "-o", str(out), "--quiet"]
    words += ["--image-column", "image", "-m", str(model), "--mmproj", str(projector)]
    words += ["--parallel", "4", "--ctx-per-seq", "512", "--max-tokens", "12"]
    words += ["--temperature", "0"]
    tally, start_s = CaptionTally(n_pictures), time.perf_counter()
    tally.n_kills, tally.n_starts = killed_until_done(
        words, chance, n_kills, 1.0, most_s, seed=seed
    )
    tally.seconds = round(time.perf_counter() - start_s, 1)
    _compare(tally, parquet.read_table(out), pictures, (model, projector), chance)
    return tally


def _compare(
    tally: CaptionTally,
    table: pyarrow.Table,
    pictures: list[bytes],
    files: tuple[Path, Path],
    chance: random.Random,
) -> None:
    """Count the rows, and compare some with the answers that their pictures have alone."""
    rows = table.to_pylist()
    found = {row["id"]: row["response"] for row in rows}
    tally.n_rows, tally.n_distinct = len(rows), len(found)
    tally.n_errors = sum(row["error"] is not None for row in rows)
    model, projector = files
    with cbatch.load(model, mmproj=projector, parallel=1, ctx_per_seq=512) as engine:
        for i in chance.sample(range(len(pictures)), min(N_COMPARED, len(pictures))):
            parts = [
                {"type": "image", "image": pictures[i]},
                {"type": "text", "text": "What is it?"},
            ]
            asked = [{"role": "user", "content": parts}]
            tally.n_other += found.get(i) != engine.chat(asked, **OPTIONS).text


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--most-s", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally = kills(Path(folder), asked.pictures, asked.kills, asked.most_s, asked.seed)
    print(json.dumps({"seed": asked.seed, **asdict(tally), "is_clean": tally.is_clean}))  # noqa: T201


if __name__ == "__main__":
    main()
