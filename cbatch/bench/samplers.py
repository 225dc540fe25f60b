"""Our sampling beside llama.cpp's sampler chain: `python -m cbatch.bench.samplers [MODEL]`.

Both sample the same rows of one context in turn, on one thread; the last lines are ours on two threads and on one, each
right after a real decode. Without a model one with random weights and 151,936 tokens is written for it.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.bench.harness import in_model, markdown, median, parser, show, take_turns
from cbatch.bench.synthetic import SHAPES, write_model
from cbatch.engine_options import EngineOptions
from cbatch.options import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.sampler_bench import LogitRows

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


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison: medians of microseconds a row, and the median of each round's ratio."""

    name: str
    base_us: float
    ours_us: float
    ratio: float
    target: float | None


def compare(rows: LogitRows, n_steps: int, n_rounds: int) -> list[Line]:
    """Return a line for each chain; `n_steps` samples of each row a round."""
    history = [(7 * i) % rows.n_vocab for i in range(64)]
    return [
        _line(
            name,
            target,
            partial(rows.theirs_s, sampling, history, n_steps),
            partial(rows.ours_s, sampling, history, n_steps),
            n_rounds,
        )
        for name, (sampling, target) in CHAINS.items()
    ]


def compare_teams(rows: LogitRows, n_steps: int, n_rounds: int) -> list[Line]:
    """Return a line for each chain on two threads."""
    return [
        _line(
            f"{name}: two threads after a decode",
            target,
            partial(rows.after_decode_s, sampling, n_steps, 1),
            partial(rows.after_decode_s, sampling, n_steps, 2),
            n_rounds,
        )
        for name, (sampling, target) in TEAM.items()
    ]


def _line(
    name: str,
    target: float | None,
    base: Callable[[], float],
    ours: Callable[[], float],
    n_rounds: int,
) -> Line:
    rounds = take_turns(n_rounds, base, ours)
    return Line(
        name,
        1e6 * median((b for b, _ in rounds), 9),
        1e6 * median((o for _, o in rounds), 9),
        median(b / o for b, o in rounds),
        target,
    )


def table(lines: Sequence[Line], base: str, ours: str) -> str:
    """Return lines as a table of Markdown."""
    return markdown(
        ("µs a row", base, ours, "ratio", "target"),
        [
            (
                x.name,
                f"{x.base_us:.1f}",
                f"{x.ours_us:.1f}",
                f"{x.ratio:.2f}",
                "" if x.target is None else f"≥ {x.target:g}",
            )
            for x in lines
        ],
    )


def _measure(model: LlamaModel, n_rows: int, n_steps: int, n_rounds: int) -> str:
    from cbatch.backend.llama.sampler_bench import LogitRows  # llama_cpp is slow to import

    options = EngineOptions(
        parallel=n_rows, ctx_per_seq=n_steps + 8, n_threads=2, n_batch=max(n_rows, 512)
    )
    with closing(LogitRows(model, options)) as rows:
        alone = compare(rows, n_steps, n_rounds)
        teams = compare_teams(rows, n_steps, n_rounds)
    return table(alone, "llama.cpp", "cbatch") + "\n" + table(teams, "one thread", "two threads")


def main() -> None:
    """Print both tables."""
    asked = parser(__doc__, model="one that is written for it", n_rounds=7)
    asked.add_argument("--rows", type=int, default=16, help="rows of logits")
    asked.add_argument("--steps", type=int, default=8, help="samples of each row in a round")
    a = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = a.model or write_model(
            Path(folder) / "model.gguf", replace(SHAPES["small"], n_layer=1, n_embd=192, n_ff=192)
        )
        measure = partial(_measure, n_rows=a.rows, n_steps=a.steps, n_rounds=a.rounds)
        show(in_model(str(path), measure).removesuffix("\n"))


if __name__ == "__main__":
    main()
