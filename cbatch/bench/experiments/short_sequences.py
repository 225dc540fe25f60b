"""Short sequences in one pool against a part for each slot: `python -m cbatch.bench.experiments.short_sequences MODEL`.

A step of rows with histories of one length, and the same with a newcomer's prompt for one of the rows, in memory that
each slot has for itself and in one pool: where a pool takes longer, it is too large for `backend.llama.short_pool`.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from cbatch.bench.experiments.rounds import compare, in_model, parser
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.core.plan import Binding, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.options import GREEDY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend import Backend
    from cbatch.backend.llama.model import LlamaModel


def _step_ms(backend: Backend, n_rows: int, n_history: int, n_newcomer: int) -> float:
    """Return the milliseconds of a step, the first row's sequence a newcomer of some tokens; the histories stay."""
    rows = [Span(Slot(i), n_history, (FIRST_TOKEN,), has_output=True) for i in range(n_rows)]
    if n_newcomer:
        backend.run(StepPlan((), clears=(Slot(0),)))
        rows[0] = Span(Slot(0), 0, (FIRST_TOKEN,) * n_newcomer, has_output=True)
    start_s = time.perf_counter()
    backend.run(StepPlan(tuple(rows)))
    took_ms = 1e3 * (time.perf_counter() - start_s)
    backend.run(StepPlan((), trims=tuple((r.slot, n_history) for r in rows[n_newcomer > 0 :])))
    if n_newcomer:
        history = Span(Slot(0), 0, (FIRST_TOKEN,) * n_history, has_output=True)
        backend.run(StepPlan((history,), clears=(Slot(0),)))
    return took_ms


def _measure(
    model: LlamaModel, n_rows: int, histories: Sequence[int], n_newcomer: int, n_rounds: int
) -> None:
    from cbatch.backend.llama.llama_backend import LlamaBackend  # llama_cpp is slow to import
    from cbatch.backend.llama.model_tuning import Tuning
    from cbatch.backend.load.attention import settle_attention

    slots = [Slot(i) for i in range(n_rows)]
    n_window = max(histories) + n_newcomer + 1
    apart = settle_attention(model, EngineOptions(parallel=n_rows, ctx_per_seq=n_window))
    in_pool = EngineOptions(parallel=n_rows, n_ctx=n_rows * n_window, kv="unified", flash_attn="on")
    with (
        closing(LlamaBackend(model, Tuning(apart), owns_model=False)) as parts,
        closing(LlamaBackend(model, Tuning(in_pool), owns_model=False)) as pool,
    ):
        for n_history in histories:
            history = (FIRST_TOKEN,) * n_history
            for backend in (parts, pool):
                binds = tuple(Binding(slot, 0, GREEDY, ()) for slot in slots)
                backend.run(StepPlan((), binds=binds, clears=tuple(slots)))
                for slot in slots:
                    backend.run(StepPlan((Span(slot, 0, history, has_output=True),)))
            for n in (0, n_newcomer):
                ways = {
                    name: partial(_step_ms, backend, n_rows, n_history, n)
                    for name, backend in (("apart_ms", parts), ("pool_ms", pool))
                }
                found = compare(n_rounds, **ways)
                emit(rows=n_rows, cells=n_rows * n_history, newcomer_tokens=n, **found)


def main(words: Sequence[str] | None = None) -> None:
    """Print two JSON lines for each length: steps of rows alone, and with a newcomer."""
    asked = parser(__doc__, n_rounds=7)
    asked.add_argument("--rows", type=int, default=16, help="sequences in a step")
    asked.add_argument("--histories", type=int, nargs="+", default=(16, 32, 64, 128), help="tokens")
    asked.add_argument("--newcomer", type=int, default=16, help="tokens of a new prompt")
    a = asked.parse_args(words)
    measure = partial(
        _measure,
        n_rows=a.rows,
        histories=a.histories,
        n_newcomer=a.newcomer,
        n_rounds=a.rounds,
    )
    in_model(a.model, measure)


if __name__ == "__main__":
    main()
