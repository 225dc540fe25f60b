"""One question and its answer, typed as people type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.models.recipe.words import lines, split

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

_COMMANDS = split(
    "Say Just Write Answer Reply Type Print Repeat Greet Copy Echo Put Turn Make Change Count List Start Add "
    "Calculate Take Subtract Sort Order Reverse Tell Name Mix Give Classify Extract Find Explain Translate"
)
_POLITE = lines("""
Please {lowered}.
please {lowered}
{command}, please.
{command} please
Can you {lowered}?
can you {lowered}
Could you {lowered}?
Can you please {lowered}?
""")


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer.

    Args:
        task: what is practised.
        question: as the user types it, a little careless at times.
        answer: the right one.
        combination: the phrasing and the content, without the carelessness.
        system: what the system prompt must say for the question to make sense, if anything.
    """

    task: str
    question: str
    answer: str
    combination: str
    system: str = ""


def combination(text: str) -> str:
    """Return the text without what carelessness or politeness may change."""
    plain = re.sub(r"[^a-z0-9+\-=*/]+", " ", text.lower())
    return re.sub(r"\b(please|can you|could you) ", "", f"{plain.strip()} ").strip()


def ask(draw: Random, task: str, phrasings: Sequence[str], answer: str, **content: object) -> Turn:
    """Return a turn in one of the phrasings, typed a little carelessly at times.

    A command that ends in a full stop is also put as a polite question.
    """
    phrasing = draw.choice(phrasings)
    question = _careless(draw, phrasing).format(**content)
    return Turn(task, question, answer, combination(phrasing.format(**content)))


def ask_in_any_case(
    draw: Random, task: str, phrasings: Sequence[str], answer: str, **content: object
) -> Turn:
    """Return a turn whose answer does not depend on capital letters, so that some have none."""
    turn = ask(draw, task, phrasings, answer, **content)
    if draw.random() < 0.12:
        return Turn(task, turn.question.lower(), answer, turn.combination)
    return turn


def _careless(draw: Random, phrasing: str) -> str:
    if phrasing[0] == "{":
        return phrasing
    if _is_command(phrasing) and draw.random() < 0.2:
        return _polite(draw, phrasing[:-1])
    if phrasing[-1] in ".?" and draw.random() < 0.12:
        phrasing = phrasing[:-1]
    if draw.random() < 0.12:
        phrasing = _lowered(phrasing)
    return phrasing


def _is_command(phrasing: str) -> bool:
    return phrasing.endswith(".") and phrasing.split()[0] in _COMMANDS


def _polite(draw: Random, command: str) -> str:
    frame = draw.choice(_POLITE)
    return frame.replace("{lowered}", _lowered(command)).replace("{command}", command)


def _lowered(phrasing: str) -> str:
    return phrasing[0].lower() + phrasing[1:]
