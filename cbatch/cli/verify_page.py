"""A proof of `exact=True` in words, and as a page that needs nothing but a browser."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from typing import TYPE_CHECKING

from cbatch.files.report.page import templates

if TYPE_CHECKING:
    from cbatch.verify.proof import Proof

_COLORS = ("teal", "rose", "blue", "amber", "violet", "gray")
"""Of the groups of widths, in their order; what comes behind them begins again."""


def lines_of(proof: "Proof") -> Iterator[str]:
    """Yield a proof as lines of text."""
    steps = f", in steps of {proof.step_rows}" if proof.step_rows else ""
    when = "in an earlier load" if proof.is_remembered else "now"
    yield f"exactness: {proof.exactness}{steps} (probe: {proof.probe_s:.1f} s, {when})"
    groups = "; ".join(ranges(widths) for widths in proof.widths)
    yield f"numbers of rows in a step with bit-identical results: {groups}"
    for check in proof.checks:
        equal = "all" if check.n_equal == check.n_tokens else f"only {check.n_equal:,}"
        more = f", {check.n_cached:,} prompt tokens shared" if check.n_cached else ""
        yield f"{check.name}: {equal} of {check.n_tokens:,} tokens as alone{more}, {check.n_pad_rows:,} pad rows"
    if proof.ties:
        ties = ", ".join(f"{tie.margin:.2g}" for tie in proof.ties)
        yield f"smallest leads of the likeliest token, in log-probability: {ties} (median {proof.median_margin:.2g})"
    for price in proof.prices:
        yield (
            f"price, {price.name}: {price.exact_tps:,.0f} tokens/s with exact, {price.default_tps:,.0f} without, "
            f"median ratio of all rounds {price.ratio:.2f}"
        )


def ranges(widths: Sequence[int]) -> str:
    """Return ascending numbers as ranges: 1, 3–5."""
    runs = (
        [n for _, n in run]
        for _, run in groupby(enumerate(widths), key=lambda pair: pair[1] - pair[0])
    )
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def proof_page(
    proof: "Proof",
    settings: Mapping[str, object],
    machine: Mapping[str, str],
    now: datetime | None = None,
) -> str:
    """Return the page as HTML; every text in it is escaped by the template engine."""
    colors = {
        width: _COLORS[i % len(_COLORS)] for i, group in enumerate(proof.widths) for width in group
    }
    return (
        templates("cbatch.cli")
        .get_template("verify.html")
        .render(
            title=proof.model,
            now=now or datetime.now(timezone.utc),
            proof=proof,
            groups=[ranges(group) for group in proof.widths],
            colors=dict(sorted(colors.items())),
            palette=_COLORS,
            settings=settings,
            machine=machine,
        )
    )
