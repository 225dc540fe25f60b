"""What packed weights are worth here: `python -m cbatch.bench.experiments.repack MODEL`.

The bare decode loop, with weights as `repack="auto"` has them and as llama.cpp has them, in turn: milliseconds of a
step by rows, as a mean of so many steps from empty cells on, and of a prompt of 512 tokens.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from cbatch.backend.llama.log import llama_log
from cbatch.backend.load.open_model import open_model
from cbatch.backend.threads import run_in_fresh_thread
from cbatch.bench.bare import BareLoop
from cbatch.bench.experiments.rounds import compare, parser
from cbatch.bench.harness import FIRST_TOKEN, emit
from cbatch.engine_options import EngineOptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from cbatch.backend.llama.model import LlamaModel

_N_PROMPT = 512


def _ways(
    models: Sequence[LlamaModel], options: EngineOptions, n_steps: int, stack: ExitStack
) -> Sequence[Callable[[], float]]:
    loops = [stack.enter_context(closing(BareLoop(model, options))) for model in models]
    return [lambda loop=loop: 1e3 * loop.decode(n_steps) / n_steps for loop in loops]  # type: ignore[misc]


def _measure(a: argparse.Namespace) -> None:
    with ExitStack() as models:
        both = [
            models.enter_context(closing(open_model(a.model, EngineOptions(repack=repack))))
            for repack in ("llama", "auto")
        ]
        for n_rows in a.rows:
            options = EngineOptions(
                parallel=n_rows, ctx_per_seq=a.steps, n_threads=a.threads, flash_attn=a.flash_attn
            )
            with ExitStack() as loops:
                llama, packed = _ways(both, options, a.steps, loops)
                emit(rows=n_rows, steps=a.steps, **compare(a.rounds, 2, llama=llama, packed=packed))
        options = EngineOptions(parallel=1, ctx_per_seq=_N_PROMPT + 1, n_threads=a.threads)
        with ExitStack() as loops:
            made = [loops.enter_context(closing(BareLoop(model, options))) for model in both]
            tokens = [FIRST_TOKEN + i % 64 for i in range(_N_PROMPT)]
            llama, packed = (lambda one=one: 1e3 * one.run(tokens, [[1]], 1) for one in made)
            emit(prompt=_N_PROMPT, **compare(a.rounds, 1, llama=llama, packed=packed))


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of rows, and one for a prompt: milliseconds, and llama.cpp's over ours."""
    asked = parser(__doc__, n_rounds=4)
    asked.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="widths to try")
    asked.add_argument("--steps", type=int, default=128, help="tokens a row")
    asked.add_argument("--threads", type=int, help="threads that compute")
    asked.add_argument("--flash-attn", default="auto", help="auto, on or off")
    with llama_log().captured():
        run_in_fresh_thread(lambda: _measure(asked.parse_args(words)))


if __name__ == "__main__":
    main()
