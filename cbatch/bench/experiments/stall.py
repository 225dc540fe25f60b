"""How long a long prompt holds up streams of output: `python -m cbatch.bench.experiments.stall MODEL`.

Some requests are streamed while one with a long prompt arrives. The time between two tokens of a stream is
taken from before the newcomer's arrival to its end: by the engine's own records, and by the reader's clock.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING

from cbatch.bench.experiments.rounds import median, parser
from cbatch.bench.harness import emit, percentile
from cbatch.errors import ConfigError
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cbatch.engine import Engine
    from cbatch.runtime.batch_response import BatchResponse
    from cbatch.runtime.step_record import StepRecord

N_AROUND = 32
"""Steps of decoding before the newcomer comes, and its output: few, so that 1 % of all gaps is less than one step."""


@dataclass(frozen=True, slots=True)
class StallFigures:
    """What decoders and newcomer waited; gaps are between two tokens of one decoder."""

    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    p99_over_p50: float
    decode_p50_ms: float
    """Gaps of steps without prompt tokens: where a prompt takes most of the steps, the middle of all is one with it."""
    p99_over_decode: float
    read_p50_ms: float
    """By the reader's clock, as the two below."""
    read_p99_ms: float
    read_max_ms: float
    ttft_ms: float
    """Of the newcomer."""
    tokens_per_s: float
    """All decoders together."""
    n_steps: int
    n_prompt_steps: int
    """Steps that held a part of the newcomer's prompt."""


class _Recorder:
    """Keeps the engine's records; called in the thread that computes."""

    def __init__(self, n_steps: int) -> None:
        self.records: list[StepRecord] = []
        self.is_warm = threading.Event()
        self._n_steps = n_steps

    def __call__(self, record: StepRecord) -> None:
        self.records.append(record)
        self._n_steps -= record.n_steps
        if self._n_steps <= 0:
            self.is_warm.set()


class _GapReader(threading.Thread):
    """Reads a batch to its end, notes the gaps between each item's tokens, and then releases the waiting thread."""

    def __init__(self, response: BatchResponse, waited_for: threading.Event) -> None:
        super().__init__(name="reader")
        self.gaps_s: list[float] = []
        self._response, self._waited_for = response, waited_for

    def run(self) -> None:
        """Read; several tokens that come together share their gap."""
        last_s: dict[str, float] = {}
        try:
            for chunk in self._response:
                now, n = time.perf_counter(), len(chunk.token_ids)
                if n and chunk.id in last_s:
                    self.gaps_s.extend(repeat((now - last_s[chunk.id]) / n, n))
                last_s[chunk.id] = now
        finally:
            self._waited_for.set()


def measure(
    engine: Engine, n_decoders: int, n_prompt: int, n_around: int = N_AROUND
) -> StallFigures:
    """Stream `n_decoders` requests, let one with `n_prompt` tokens join them, and return what they waited.

    Args:
        engine: an engine for this benchmark alone, with more than `n_decoders` slots and room for the prompt in each.
        n_around: steps before it comes, and tokens that it generates; at least 2.

    Raises:
        ConfigError: too few steps around to tell what decoding alone takes.
    """
    if n_around < 2:
        raise ConfigError(f"n_around must be at least 2, not {n_around}")
    recorder = _Recorder(n_around)
    engine.record_steps(recorder)
    options = {"ignore_eos": True, "seed": 1}
    response = engine.run([BatchPrompt(tokens=[1 + i]) for i in range(n_decoders)], options=options)
    reader = _GapReader(response, recorder.is_warm)
    reader.start()
    recorder.is_warm.wait()
    prompt = BatchPrompt(tokens=[1 + i % 199 for i in range(n_prompt)])
    newcomer = engine.submit(prompt, options={**options, "max_tokens": n_around}).result()
    engine.record_steps(None)
    engine.cancel_all()
    reader.join()
    return _figures(recorder.records, reader.gaps_s, newcomer.timings.ttft_s or 0.0, n_decoders)


def _figures(
    records: Sequence[StepRecord], read_s: Sequence[float], ttft_s: float, n_decoders: int
) -> StallFigures:
    gaps_s = list(step_gaps(records))
    p50, p99 = percentile(gaps_s, 0.5), percentile(gaps_s, 0.99)
    alone = percentile(step_gaps(records, has_prompt=False), 0.5)
    return StallFigures(
        gap_p50_ms=_ms(p50),
        gap_p99_ms=_ms(p99),
        gap_max_ms=_ms(max(gaps_s)),
        p99_over_p50=round(p99 / p50, 3),
        decode_p50_ms=_ms(alone),
        p99_over_decode=round(p99 / alone, 3),
        read_p50_ms=_ms(percentile(read_s, 0.5)),
        read_p99_ms=_ms(percentile(read_s, 0.99)),
        read_max_ms=_ms(max(read_s)),
        ttft_ms=_ms(ttft_s),
        tokens_per_s=round(n_decoders * len(gaps_s) / sum(gaps_s), 1),
        n_steps=len(gaps_s),
        n_prompt_steps=sum(map(_has_prompt, records)),
    )


def step_gaps(records: Iterable[StepRecord], *, has_prompt: bool | None = None) -> Iterable[float]:
    """Yield what each step made a decoder wait, from one delivery to the next; steps of one run share its time.

    Args:
        records: runs that follow each other.
        has_prompt: only those of steps with prompt tokens, or without.
    """
    return chain.from_iterable(
        repeat((after.end_s - before.end_s) / after.n_steps, after.n_steps)
        for before, after in pairwise(r for r in records if r.n_steps)
        if has_prompt in (None, _has_prompt(after))
    )


def _has_prompt(record: StepRecord) -> bool:
    return record.n_tokens > record.n_rows


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def summary(rounds: Sequence[StallFigures]) -> dict[str, float]:
    """Return the median of each figure over all rounds."""
    found = [asdict(figures) for figures in rounds]
    return {name: median(f[name] for f in found) for name in found[0]}


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each round, then their medians."""
    asked = parser(__doc__)
    asked.add_argument("--decoders", type=int, default=15, help="requests that are streamed")
    asked.add_argument("--prompt", type=int, default=2500, help="prompt tokens of the newcomer")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--around", type=int, default=N_AROUND, help="steps before the newcomer")
    asked.add_argument("--prefill-budget", type=int, help="as in load; 2048: no protection")
    asked.add_argument("--itl-ms", type=float, help="as in load")
    a = asked.parse_args(words)
    n_window = a.prompt + 8 * a.around + 256
    with load(
        a.model,
        parallel=a.decoders + 1,
        ctx_per_seq=n_window,
        prefill_budget=a.prefill_budget,
        itl_ms=a.itl_ms,
        share_prefixes=False,  # every round has the same prompt
    ) as engine:
        rounds = []
        for i in range(a.rounds):
            rounds.append(measure(engine, a.decoders, a.prompt, a.around))
            emit(round=i, **asdict(rounds[-1]))
        emit(round="median", **summary(rounds))


if __name__ == "__main__":
    main()
