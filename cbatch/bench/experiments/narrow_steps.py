"""Steps with pad rows where that is faster, and without: `python -m cbatch.bench.experiments.narrow_steps MODEL`.

Two contexts of one model decode the same requests in turn; one of them learns which numbers of rows to fill, in rounds
before those that count: `learning_ratio` is of all of them.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from cbatch.bench.experiments.rounds import in_model, median, parser, ratios, take_turns
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.core.plan import N_STEPS_MAX, Binding, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, DecodeError
from cbatch.options import GREEDY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend import Backend
    from cbatch.backend.llama.model import LlamaModel

Turn: TypeAlias = "tuple[float, float]"
"""Tokens a second, and the pad rows of a step."""


def _turn(backend: Backend, n_rows: int, n_prompt: int, n_output: int) -> Turn:
    """Decode `n_output` tokens of each row behind prompts in empty slots."""
    slots = [Slot(i) for i in range(n_rows)]
    binds = tuple(Binding(slot, 0, GREEDY, ()) for slot in slots)
    prompt = (FIRST_TOKEN,) * n_prompt
    chunks = tuple(Span(slot, 0, prompt, has_output=True) for slot in slots)
    clears = tuple(Slot(i) for i in range(backend.n_slots))
    backend.run(StepPlan(chunks, clears=clears, binds=binds))
    n_done = n_pads = 0
    start_s = time.perf_counter()
    while n_done < n_output:
        start = n_prompt + n_done
        rows = tuple(Span(slot, start, (FIRST_TOKEN,), has_output=True) for slot in slots)
        result = backend.run(StepPlan(rows, n_steps=min(N_STEPS_MAX, n_output - n_done)))
        if result.code:
            raise DecodeError(result.code)
        n_done += result.n_steps
        n_pads += result.n_pad_rows
    return n_rows * n_output / (time.perf_counter() - start_s), n_pads / n_output


def _measure(
    model: LlamaModel,
    widths: Sequence[int],
    n_slots: int,
    lengths: tuple[int, int],
    n_rounds: tuple[int, int],
) -> None:
    from cbatch.backend.llama.llama_backend import LlamaBackend  # llama_cpp is slow to import
    from cbatch.backend.llama.model_tuning import Tuning
    from cbatch.backend.load.attention import settle_attention
    from cbatch.backend.load.weight_kernels import has_plain_weights

    if not has_plain_weights(model):
        raise ConfigError("steps of this model are never filled: its weights have several kernels")
    options = EngineOptions(parallel=n_slots, ctx_per_seq=sum(lengths) + 1, kv="partitioned")
    options = settle_attention(model, options)
    tunings = (Tuning(options, may_widen=is_filled) for is_filled in (True, False))
    filled, plain = (LlamaBackend(model, tuning, owns_model=False) for tuning in tunings)
    with closing(filled), closing(plain):
        for n_rows in widths:
            ways = (partial(_turn, b, n_rows, *lengths) for b in (filled, plain))
            turns = take_turns(sum(n_rounds), *ways, n_warm_up=0)
            learning, rounds = turns[: n_rounds[0]], turns[n_rounds[0] :]
            emit(
                rows=n_rows,
                pads=median(a[1] for a, _ in rounds),
                filled_tps=median((a[0] for a, _ in rounds), 1),
                plain_tps=median((b[0] for _, b in rounds), 1),
                **ratios((a[0], b[0]) for a, b in rounds),
                learning_ratio=round(
                    sum(1 / b[0] for _, b in learning) / sum(1 / a[0] for a, _ in learning), 4
                ),
            )


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of rows."""
    asked = parser(__doc__, n_rounds=5)
    asked.add_argument("--rows", type=int, nargs="+", default=(5, 6, 7, 13, 14, 15), help="widths")
    asked.add_argument("--slots", type=int, default=16, help="slots, some of them idle")
    asked.add_argument("--prompt", type=int, default=16, help="tokens")
    asked.add_argument("--output", type=int, default=200, help="tokens a row")
    asked.add_argument("--learning", type=int, default=5, help="rounds before, one at least")
    a = asked.parse_args(words)
    if max(a.rows) > a.slots:
        raise ConfigError(f"--rows {max(a.rows)} need as many --slots, not {a.slots}")
    lengths = (a.prompt, a.output)
    in_model(
        a.model,
        partial(
            _measure,
            widths=a.rows,
            n_slots=a.slots,
            lengths=lengths,
            n_rounds=(a.learning, a.rounds),
        ),
    )


if __name__ == "__main__":
    main()
