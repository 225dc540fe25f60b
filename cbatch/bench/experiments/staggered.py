"""A request that comes while another is answered: `python -m cbatch.bench.experiments.staggered MODEL`.

The second comes when 40 % of the first one's time alone is over. Each of them is measured alone, too, with prompts that
nobody has seen. Where requests wait for each other, the second takes 1.6 times as long as alone. On a CPU a step of two
rows takes longer than one of one row, whoever computes it: `bare_over_alone` is how much longer the first would take by
the bare `llama_decode` loop: two rows for the rest of its time, and the second prompt.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from cbatch.bench.experiments.rounds import median, parser, ratios
from cbatch.bench.harness import emit
from cbatch.bench.model_text import model_text
from cbatch.bench.pacing import Pace
from cbatch.bench.sides import BareSide, ProcessSide, SideError
from cbatch.bench.verdict import problems
from cbatch.bench.workloads import Workload, workload_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.bench.exact_text import ExactText
    from cbatch.bench.measured import Chains, MeasuredAnswer


def _answers(side: ProcessSide, chains: Chains, pace: Pace) -> dict[str, MeasuredAnswer]:
    answers, _ = side.run(chains, pace, 1, is_streamed=True)
    if found := problems([request for chain in chains for request in chain], answers):
        raise SideError(f"{side.name}: {found[0]}")
    return {answer.id: answer for answer in answers}


def one_round(
    side: ProcessSide, text: ExactText, workload: Workload, at: float, seed: int
) -> dict[str, float]:
    """Measure the first alone, the second alone, and both; return their seconds and the second's first token."""
    seconds = [
        _answers(side, workload.chains(text, 1, f"{seed} alone {i}"), Pace(1))["0"].end_s
        for i in range(2)
    ]
    pace = Pace(arrivals_s=(0.0, at * seconds[0]))
    both = _answers(side, workload.chains(text, 2, f"{seed} both"), pace)
    first, second = both["0"], both["1"]
    return {
        "first_alone_s": seconds[0],
        "second_alone_s": seconds[1],
        "first_s": first.end_s - first.sent_s,
        "second_s": second.end_s - second.sent_s,
        "second_ttft_s": (second.first_s or second.end_s) - second.sent_s,
        "overlap_s": first.end_s - (second.first_s or second.end_s),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line."""
    asked = parser(__doc__, n_rounds=5)
    asked.add_argument("--at", type=float, default=0.4, help="share of the first one's time")
    asked.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    asked.add_argument("--output", type=int, default=128, help="tokens of each answer")
    asked.add_argument("--parallel", type=int, default=16, help="slots")
    a = asked.parse_args(words)
    workload = workload_of("decode", own=(a.prompt,) * 2, output=(a.output,) * 2)
    settings = {"parallel": a.parallel, "ctx_per_seq": a.prompt + a.output + 8}
    with model_text(a.model) as text, closing(ProcessSide("engine", a.model, settings)) as side:
        one_round(side, text.exact, workload, a.at, -1)  # warms up
        rounds = [one_round(side, text.exact, workload, a.at, i) for i in range(a.rounds)]
    with closing(BareSide("bare", a.model, settings)) as bare:
        steps = [[n / bare.decode_tps(n, a.output) for n in (1, 2)] for _ in range(a.rounds)]
        prompt_s = median((a.prompt / bare.prompt_tps(1) for _ in range(a.rounds)), 6)
    alone_s = median((r["first_alone_s"] for r in rounds), 6)
    emit(
        at=a.at,
        rounds=a.rounds,
        **ratios(((r["first_s"], r["first_alone_s"]) for r in rounds), "first_over_alone"),
        bare_over_alone=median(
            a.at + (1 - a.at) * two / one + prompt_s / alone_s for one, two in steps
        ),
        second_over_alone=median(r["second_s"] / r["second_alone_s"] for r in rounds),
        second_ttft_ms=median((1e3 * r["second_ttft_s"] for r in rounds), 1),
        second_began_before_the_end_of_the_first=all(r["overlap_s"] > 0 for r in rounds),
    )


if __name__ == "__main__":
    main()
