"""Our sampling against llama.cpp's sampler chain: `python -m cbatch.bench.experiments.samplers [MODEL]`.

Both sample the same rows of one context in turn, on one thread. The last lines compare our sampling on two threads with
one thread, each right after a real decode. Without a model, one with random weights and 151,936 tokens is written.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.bench.experiments.rounds import compare, in_model, parser
from cbatch.bench.harness import emit
from cbatch.bench.synthetic import SHAPES, write_model
from cbatch.engine_options import EngineOptions
from cbatch.options import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.llama.model import LlamaModel

_ALL = Sampling(top_k=0, top_p=1.0, min_p=0.0)
_FEW = replace(_ALL, top_k=40, top_p=0.95)

CHAINS: dict[str, tuple[Sampling, float | None]] = {
    "greedy": (replace(_ALL, temperature=0.0), 2.5),
    "top-k, top-p": (_FEW, 1.2),
    "top-p": (replace(_ALL, top_p=0.95), 6.0),
    "min-p": (replace(_ALL, min_p=0.05), None),
    "penalties, top-k, top-p": (replace(_FEW, repeat_penalty=1.1, presence_penalty=0.2), 3.5),
    "typical": (replace(_ALL, typical_p=0.9), None),
    "top-n-sigma": (replace(_ALL, top_n_sigma=1.0), None),
    "DRY, top-k, top-p": (replace(_FEW, dry_multiplier=0.8), None),
}
"""What is compared, and how many times as fast as llama.cpp ours is meant to be."""

TEAM = {"top-k, top-p": (_FEW, 1.7), "top-p": (replace(_ALL, top_p=0.95), 1.7)}
"""What two threads are compared on, and how many times as fast as one they are meant to be."""


def _measure(model: LlamaModel, n_rows: int, n_steps: int, n_rounds: int) -> None:
    from cbatch.bench.experiments.sampler_bench import LogitRows  # llama_cpp is slow to import

    options = EngineOptions(
        parallel=n_rows, ctx_per_seq=n_steps + 8, n_threads=2, n_batch=max(n_rows, 512)
    )
    with closing(LogitRows(model, options)) as rows:
        history = [(7 * i) % rows.n_vocab for i in range(64)]
        for name, (sampling, target) in CHAINS.items():
            theirs, ours = (
                partial(way, sampling, history, n_steps) for way in (rows.theirs_us, rows.ours_us)
            )
            found = compare(n_rounds, base_us=theirs, ours_us=ours)
            emit(chain=name, base="llama.cpp", **found, target=target)
        for name, (sampling, target) in TEAM.items():
            one, two = (partial(rows.after_decode_us, sampling, n_steps, n) for n in (1, 2))
            found = compare(n_rounds, base_us=one, ours_us=two)
            emit(chain=name, base="one thread", **found, target=target)


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each chain on one thread, then for each on two threads."""
    asked = parser(__doc__, model="one that is written for it", n_rounds=7)
    asked.add_argument("--rows", type=int, default=16, help="rows of logits")
    asked.add_argument("--steps", type=int, default=8, help="samples of each row in a round")
    a = asked.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        path = a.model or write_model(
            Path(folder) / "model.gguf", replace(SHAPES["small"], n_layer=1, n_embd=192, n_ff=192)
        )
        measure = partial(_measure, n_rows=a.rows, n_steps=a.steps, n_rounds=a.rounds)
        in_model(str(path), measure)


if __name__ == "__main__":
    main()
