"""What a job of texts to embed costs streams of the same engine: `python -m cbatch.bench.experiments.text_job MODEL`.

Streams run alone and beside the job, which is never done, in turn. Gaps between two tokens of a stream are those that
its reader sees; where several tokens come together, each has its part of the time.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbatch.bench.harness import CHAIN, beside, emit, parser, percentile
from cbatch.bench.synthetic_vocabulary import words as english_words
from cbatch.loading import load

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from cbatch.engine import Engine

N_A_CALL = 64
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
def job(engine: Engine, texts: Sequence[str]) -> Iterator[list[int]]:
    """Have texts computed in a block, again and again; the list grows by an element for each."""
    done = list[int]()

    def embed(is_over: threading.Event) -> None:
        i = 0
        while not is_over.is_set():
            some = [f"{i} {texts[(i + k) % len(texts)]}" for k in range(N_A_CALL)]  # none is known
            i += N_A_CALL
            for _ in engine.embed(some):
                done.append(i)
                if is_over.is_set():
                    break

    with beside(embed):
        yield done


def main(words: Sequence[str] | None = None) -> None:
    """Print a JSON line: quantiles of all gaps, alone and beside the job, and rates of both."""
    asked = parser(__doc__, n_rounds=6)
    asked.add_argument("--streams", type=int, default=8)
    asked.add_argument("--tokens", type=int, default=1500, help="of a stream")
    asked.add_argument("--itl-ms", type=float, help="the engine's option")
    arguments = asked.parse_args(words)
    chance, known = random.Random(1), english_words()
    texts = [" ".join(chance.choices(known, k=chance.randint(*SIZES))) for _ in range(2000)]
    sizes = arguments.streams, arguments.tokens
    alone: list[float] = []
    amid: list[float] = []
    rates: list[tuple[float, float, float]] = []
    with load(
        arguments.model,
        parallel=arguments.streams,
        ctx_per_seq=arguments.tokens + N_CELLS,
        itl_ms=arguments.itl_ms,
    ) as engine:
        streamed(engine, *sizes)
        for _ in range(arguments.rounds):
            gaps, alone_tps = streamed(engine, *sizes)
            alone += gaps
            with job(engine, texts) as done:
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
    alone_tps, beside_tps, texts_per_s = (sum(r) / len(rates) for r in zip(*rates, strict=True))
    emit(
        alone_ms={name: round(a, 2) for name, a, _ in found},
        beside_ms={name: round(b, 2) for name, _, b in found},
        ratios={name: round(b / a, 3) for name, a, b in found},
        tps_ratio=round(beside_tps / alone_tps, 3),
        texts_per_s=round(texts_per_s, 1),
    )


if __name__ == "__main__":
    main()
