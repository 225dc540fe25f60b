"""What a job of texts to embed, or of pictures, costs streams: `python -m cbatch.bench.experiments.side_job MODEL`.

Streams run alone and beside the job, which the same engine does and which is never done, in turn. With `--mmproj` each
piece of the job is a chat with a new picture. Gaps between two tokens of a stream are those that its reader sees;
where several tokens come together, each has its part of the time.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from cbatch.bench.experiments.rounds import CHAIN, beside, parser
from cbatch.bench.harness import emit, percentile
from cbatch.bench.synthetic_vocabulary import words as english_words
from cbatch.loading import load

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cbatch.engine import Engine

N_A_CALL = 64
"""Texts."""
N_SIDE = 336
"""Pixels of each side of a picture."""
SIZES = (4, 300)
"""Fewest and most words of a text."""

N_CELLS = 64
"""Cells of a sequence besides those of its output."""

SHOWN = (50, 90, 99)


def streamed(engine: Engine, n_streams: int, n_tokens: int) -> tuple[list[float], float]:
    """Return the gaps between tokens of all streams in ms, and the tokens a second of all together."""
    prompts = [f"Once {i} " for i in range(n_streams)]
    options = {**CHAIN, "seed": 1, "max_tokens": n_tokens}
    last: dict[str, float] = {}
    gaps: list[float] = []
    start_s = time.perf_counter()
    for chunk in engine.run(prompts, options=options, streamed=True):
        if chunk.error is not None:
            raise chunk.error
        now, n = time.perf_counter(), len(chunk.token_ids)
        if n and chunk.id in last:
            gaps += [1e3 * (now - last[chunk.id]) / n] * n
        last[chunk.id] = now
    return gaps, n_streams * n_tokens / (time.perf_counter() - start_s)


@contextmanager
def job(call: Callable[[int], Iterable[object]]) -> Iterator[list[int]]:
    """Have calls made in a block, one after another; the list grows by an element for each piece of work done."""
    done = list[int]()

    def work(is_over: threading.Event) -> None:
        for i in count():
            for _ in call(i):
                done.append(i)
                if is_over.is_set():
                    return

    with beside(work):
        yield done


def texts(engine: Engine) -> Callable[[int], Iterable[object]]:
    """Return what embeds texts that are not known."""
    chance, known = random.Random(1), english_words()
    drawn = [" ".join(chance.choices(known, k=chance.randint(*SIZES))) for _ in range(2000)]
    return lambda i: engine.embed(
        [f"{i} {drawn[(i * N_A_CALL + k) % len(drawn)]}" for k in range(N_A_CALL)]
    )


def pictures(engine: Engine) -> Callable[[int], Iterable[object]]:
    """Return what asks about a picture that is not known."""

    def ask(i: int) -> Iterable[object]:
        pixels = np.random.default_rng(i).integers(0, 255, (N_SIDE, N_SIDE, 3), np.uint8)
        parts = [{"type": "image", "image": pixels}, {"type": "text", "text": "What is it?"}]
        return engine.run([[{"role": "user", "content": parts}]], options={"max_tokens": 1})

    return ask


def main(words: Sequence[str] | None = None) -> None:
    """Print a JSON line: quantiles of all gaps, alone and beside the job, and rates of both."""
    asked = parser(__doc__, n_rounds=6)
    asked.add_argument("--streams", type=int, default=8)
    asked.add_argument("--tokens", type=int, default=1500, help="of a stream")
    asked.add_argument("--itl-ms", type=float, help="the engine's option")
    asked.add_argument("--mmproj", help="a projector: the job is one of pictures")
    arguments = asked.parse_args(words)
    sizes = arguments.streams, arguments.tokens
    alone: list[float] = []
    amid: list[float] = []
    rates: list[tuple[float, float, float]] = []
    with load(
        arguments.model,
        parallel=arguments.streams + bool(arguments.mmproj),
        ctx_per_seq=arguments.tokens + N_CELLS,
        itl_ms=arguments.itl_ms,
        mmproj=arguments.mmproj,
    ) as engine:
        call = pictures(engine) if arguments.mmproj else texts(engine)
        streamed(engine, *sizes)
        for _ in range(arguments.rounds):
            gaps, alone_tps = streamed(engine, *sizes)
            alone += gaps
            with job(call) as done:
                time.sleep(0.3)  # it has begun
                n_before, start_s = len(done), time.perf_counter()
                gaps, beside_tps = streamed(engine, *sizes)
                amid += gaps
                rates.append(
                    (
                        alone_tps,
                        beside_tps,
                        (len(done) - n_before) / (time.perf_counter() - start_s),
                    )
                )
    found = [(f"p{p}", percentile(alone, p / 100), percentile(amid, p / 100)) for p in SHOWN]
    alone_tps, beside_tps, pieces_per_s = (sum(r) / len(rates) for r in zip(*rates, strict=True))
    emit(
        alone_ms={name: round(a, 2) for name, a, _ in found},
        beside_ms={name: round(b, 2) for name, _, b in found},
        ratios={name: round(b / a, 3) for name, a, b in found},
        tps_ratio=round(beside_tps / alone_tps, 3),
        pieces_per_s=round(pieces_per_s, 2),
    )


if __name__ == "__main__":
    main()
