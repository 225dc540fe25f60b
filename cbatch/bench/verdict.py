"""Whether a round's answers may count: a rate of broken answers is not a rate."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from cbatch.bench.openai_client import MOST_BOS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.bench.measured import MeasuredAnswer, WorkRequest

N_LEAST_REPEATED = 8
"""Tokens from which an answer of one token alone is degenerate. Our choice."""

MOST_DEGENERATE = 0.1
"""Share of degenerate answers that says nothing, as a single one does: prompts may bring a model to it. Our choice."""

MOST_DIFFERENT = 0.75
"""Share of first tokens that may differ from those of the same requests alone, where only rounding may differ.
Our choice: kernels round a few apart, up to half where a model's weights are random, a broken batch nearly all."""

N_MOST_LIKELY = 20
"""Tokens of a place that count as likely where tokens are drawn: as many as `prompt_logprobs` tells."""

TIE = 0.5
"""Difference of natural log-probabilities up to which two tokens are equally likely: prompts use other kernels than
single tokens. Our choice, above the 0.18 by which llama.cpp differs from itself (docs/understand/exactness.md)."""

LEAST_GREEDY = 0.75
"""Share of greedy tokens that must be the likeliest. Our choice."""

LEAST_LIKELY = 0.25
"""Share of drawn tokens that must be among the likeliest. Our choice: of the 40 that `top_k` keeps, the first 20 are
drawn more than half of the time; of a vocabulary of 1,000, junk is among them for one token in fifty."""

LEAST_OF_ALONE = 0.5
"""Share of likely tokens, over that of the answers alone, where both are counted in text. Our choice."""

N_PIECE = 32
"""Tokens in a row that are judged together, so that junk in a part of one answer is seen. Our choice."""

_DRAWN_BY = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})
"""Options under which a token is one of the likeliest by the model's own logits; others ban or prefer tokens."""

_TOP_K = 40
"""`top_k` where nothing is said: llama.cpp's."""


def n_likely(request: WorkRequest) -> int | None:
    """Return how many of the likeliest tokens an answer may be made of; None where its options do not tell."""
    options = request.options
    if not options.keys() <= _DRAWN_BY:
        return None
    if options.get("temperature") == 0:
        return 1
    return N_MOST_LIKELY if 0 < options.get("top_k", _TOP_K) <= 2 * N_MOST_LIKELY else None


def unlikely(requests: Sequence[WorkRequest], margins: Sequence[Sequence[float]]) -> list[str]:
    """Return why answers are not the model's, by their tokens given those before them.

    Args:
        requests: which the answers are of.
        margins: for each token of an answer, how much likelier it is than the least likely one that could be drawn.
    """
    wrong, pieces = 0, list[tuple[bool, list[float]]]()
    short: dict[bool, list[float]] = {True: [], False: []}
    for request, found in zip(requests, margins, strict=True):
        is_greedy = n_likely(request) == 1
        starts = range(0, len(found) - N_PIECE + 1, N_PIECE)
        pieces += [(is_greedy, list(found[i : i + N_PIECE])) for i in starts]
        short[is_greedy] += found[len(starts) * N_PIECE :]
    pieces += [(is_greedy, found) for is_greedy, found in short.items() if found]
    for is_greedy, found in pieces:
        if share_likely([found]) < (LEAST_GREEDY if is_greedy else LEAST_LIKELY):
            wrong += sum(margin < -TIE for margin in found)
    n_tokens = sum(map(len, margins))
    return (
        [f"{wrong} of {n_tokens} tokens are unlikely by the model itself, given the tokens before"]
        if wrong
        else []
    )


def share_likely(margins: Sequence[Sequence[float]]) -> float:
    """Return the share of tokens that are likely; 1 of none."""
    found = [margin >= -TIE for margin in chain.from_iterable(margins)]
    return sum(found) / len(found) if found else 1.0


def unlikely_text(alone: float, margins: Sequence[Sequence[float]]) -> list[str]:
    """Return why answers that are known as text are not the model's.

    The tokens of a text need not be those that were drawn, so their share is compared with that of the model's own
    answers, read in the same way.

    Args:
        alone: share of likely tokens in the model's own answers.
        margins: as for `unlikely`.
    """
    share = share_likely(margins)
    if share >= LEAST_OF_ALONE * alone:
        return []
    return [
        f"only {share:.0%} of the text's tokens are likely by the model itself; of its own answers, {alone:.0%} are"
    ]


def problems(requests: Sequence[WorkRequest], answers: Sequence[MeasuredAnswer]) -> list[str]:
    """Return why a round does not count; nothing where it does.

    An answer that the server itself has ended, without a cap being reached, is not cut: rates count the tokens that
    there are.
    """
    asked = {request.id: request for request in requests}
    found = []
    if failed := [a for a in answers if a.error]:
        found.append(f"{_of(failed, answers)} failed: {failed[0].error}")
    if len(answers) < len(requests):
        found.append(f"{len(requests) - len(answers)} of {len(requests)} requests have no answer")
    heard = [a for a in answers if not a.error]
    if heard and not any(a.n_output for a in heard):
        found.append("all answers are empty")
    other = [
        a
        for a in heard
        if a.n_prompt is not None and abs(a.n_prompt - asked[a.id].n_prompt) > MOST_BOS
    ]
    if other:
        first = other[0]
        found.append(
            f"{_of(other, answers)} have other prompts: one has {first.n_prompt} tokens, not {asked[first.id].n_prompt}"
        )
    elif cut := [a for a in heard if _is_cut(asked[a.id], a)]:
        first = cut[0]
        found.append(
            f"{_of(cut, answers)} have short answers: one has {first.n_output} of {asked[first.id].n_output} tokens"
            f", finish reason {first.finish}"
        )
    return found


def degenerate(answers: Sequence[MeasuredAnswer]) -> list[str]:
    """Return the ids of answers that are one token again and again; none where there are few."""
    found = [a.id for a in answers if a.n_output >= N_LEAST_REPEATED and a.n_distinct <= 1]
    return found if len(found) > max(1, MOST_DEGENERATE * len(answers)) else []


def _is_cut(request: WorkRequest, answer: MeasuredAnswer) -> bool:
    if answer.finish == "stop":
        return False
    return answer.finish != "length" or (
        answer.n_prompt is not None and answer.n_output < request.n_output
    )


def n_ended_early(requests: Sequence[WorkRequest], answers: Sequence[MeasuredAnswer]) -> int:
    """Return how many tokens fewer were generated than were asked for, where the server ended answers itself."""
    asked = {request.id: request.n_output for request in requests}
    return sum(max(0, asked[a.id] - a.n_output) for a in answers if a.finish == "stop")


def differences(
    alone: Mapping[str, Sequence[int]], answers: Sequence[MeasuredAnswer], *, is_exact: bool
) -> list[str]:
    """Return why answers differ too much from those to the same requests alone, by the tokens.

    Args:
        alone: tokens by the ids of the requests that were asked alone.
        answers: of the round.
        is_exact: whether all tokens must be equal; else only most first ones.
    """
    pairs = [(a.id, a.tokens, tuple(alone[a.id])) for a in answers if a.id in alone and a.tokens]
    if is_exact:
        other = [id for id, here, there in pairs if here != there]
        share = 0.0
        what = "answers"
    else:
        other = [id for id, here, there in pairs if here[:1] != there[:1]]
        share, what = MOST_DIFFERENT, "first tokens"
    if len(other) <= share * len(pairs):
        return []
    return [f"{len(other)} of {len(pairs)} {what} differ from those of the same requests run alone"]


def _of(some: Sequence[MeasuredAnswer], every: Sequence[MeasuredAnswer]) -> str:
    return f"{len(some)} of {len(every)} requests"
