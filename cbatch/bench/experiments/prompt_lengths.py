"""How cost grows with the length of a prompt: `python -m cbatch.bench.experiments.prompt_lengths MODEL`.

Prompts of each length in turn, alone on one engine: the time to the first token, the prompt tokens a second until then,
and what a decoding step takes after such a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cbatch.bench.experiments.prompt_scores import prompts_of
from cbatch.bench.experiments.rounds import CHAIN, in_model, median, parser, take_turns
from cbatch.bench.harness import emit
from cbatch.engine import Engine
from cbatch.errors import ConfigError
from cbatch.loading import load
from cbatch.messages import BatchPrompt

LENGTHS = (64, 256, 1024, 4096)


def turn(engine: Engine, prompt: BatchPrompt, n_output: int) -> tuple[float, float]:
    """Answer a prompt with `n_output` tokens; return the seconds to the first, and from each to the next."""
    [result] = engine.run([prompt], options={**CHAIN, "max_tokens": n_output}).results()
    times = result.timings
    return times.ttft_s or 0.0, times.output_s / (n_output - 1)


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each length."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("--prompt", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    asked.add_argument("--output", type=int, default=32, help="tokens of an answer, at least 2")
    a = asked.parse_args(words)
    if a.output < 2:
        raise ConfigError(f"--output must be at least 2, not {a.output}: no step follows one token")
    n_vocab = in_model(a.model, lambda model: model.vocab.n_vocab)
    prompts = [prompts_of(1, n, n_vocab)[0] for n in a.prompt]
    n_window = max(a.prompt) + a.output
    with load(a.model, parallel=1, ctx_per_seq=n_window, share_prefixes=False) as engine:
        rounds = take_turns(a.rounds, *(partial(turn, engine, p, a.output) for p in prompts))
    for n_prompt, turns in zip(a.prompt, zip(*rounds, strict=True), strict=True):
        ttft_s = median((first_s for first_s, _ in turns), 6)
        emit(
            prompt_tokens=n_prompt,
            ttft_ms=round(1e3 * ttft_s, 1),
            prompt_tps=round(n_prompt / ttft_s),
            ms_step=round(1e3 * median((step_s for _, step_s in turns), 6), 2),
        )


if __name__ == "__main__":
    main()
