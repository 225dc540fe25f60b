"""Whether a round's answers may count: a rate of broken answers is no rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.bench.openai_client import MOST_BOS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.bench.measured import Answer, WorkRequest

N_LEAST_REPEATED = 8
"""Tokens from which an answer of one token alone is degenerate. Our choice."""

MOST_DEGENERATE = 0.1
"""Share of degenerate answers that says nothing, as a single one does: prompts may bring a model to it. Our choice."""

MOST_DIFFERENT = 0.75
"""Share of first tokens that may differ from those of the same requests alone, where only rounding may differ.
Our choice: kernels round a few apart, up to half where a model's weights are random, a broken batch nearly all."""


def problems(requests: Sequence[WorkRequest], answers: Sequence[Answer]) -> list[str]:
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
        found.append("no answer has a token")
    other = [
        a
        for a in heard
        if a.n_prompt is not None and abs(a.n_prompt - asked[a.id].n_prompt) > MOST_BOS
    ]
    if other:
        first = other[0]
        found.append(
            f"{_of(other, answers)} have other prompts: {first.n_prompt} tokens of {asked[first.id].n_prompt}"
        )
    elif cut := [a for a in heard if _is_cut(asked[a.id], a)]:
        first = cut[0]
        found.append(
            f"{_of(cut, answers)} are cut: {first.n_output} tokens of {asked[first.id].n_output}"
            f", finish reason {first.finish}"
        )
    return found


def degenerate(answers: Sequence[Answer]) -> list[str]:
    """Return the ids of answers that are one token again and again; none where there are few."""
    found = [a.id for a in answers if a.n_output >= N_LEAST_REPEATED and a.n_distinct <= 1]
    return found if len(found) > max(1, MOST_DEGENERATE * len(answers)) else []


def _is_cut(request: WorkRequest, answer: Answer) -> bool:
    if answer.finish == "stop":
        return False
    return answer.finish != "length" or (
        answer.n_prompt is not None and answer.n_output < request.n_output
    )


def n_ended_early(requests: Sequence[WorkRequest], answers: Sequence[Answer]) -> int:
    """Return how many tokens fewer were generated than were asked for, where the server ended answers itself."""
    asked = {request.id: request.n_output for request in requests}
    return sum(max(0, asked[a.id] - a.n_output) for a in answers if a.finish == "stop")


def differences(
    alone: Mapping[str, Sequence[int]], answers: Sequence[Answer], *, is_exact: bool
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
    return [f"{len(other)} of {len(pairs)} {what} differ from those of the same requests alone"]


def _of(some: Sequence[Answer], every: Sequence[Answer]) -> str:
    return f"{len(some)} of {len(every)} requests"
