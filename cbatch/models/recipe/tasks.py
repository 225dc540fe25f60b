"""Chats to learn from and chats to be graded by, made from the same rules and never the same.

A phrasing together with its content is a combination. Its digest decides for ever whether it is held
out: one combination in ten is, is never trained on, and is what the model is graded by.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from cbatch.models.recipe.demo_chats import SHORT, STORIES, Shown
from cbatch.models.recipe.reading import extract
from cbatch.models.recipe.singles import SINGLE
from cbatch.models.recipe.stories import ask_plainly, is_story_of, story
from cbatch.models.recipe.talk import (
    NEUTRAL,
    Rule,
    again,
    any_turn,
    begins,
    memory,
    styled,
)
from cbatch.models.recipe.turns import Turn, combination

Message = Mapping[str, str]

SHORT_TASKS = (*SINGLE, "prefix", "style", "again", "memory")
"""The tasks that are graded by equality."""

TASKS = (*SHORT_TASKS, "json", "story")
"""Every task."""

_WEIGHTS = {
    "again": 12,
    "story": 10,
    "json": 9,
    "sort": 7,
    "say": 6,
    "repeat": 6,
    "prefix": 6,
    "style": 6,
    "memory": 5,
    "add": 5,
    "subtract": 5,
    "reverse": 5,
    "upper": 5,
}
_USUAL_WEIGHT = 4
_HELD_OUT_ONE_IN = 10
_SALT = 9  # with this one, what the README asks is not held out
_P_EARLIER_TURN = 0.12
_P_NEUTRAL = 0.2
_N_MOST_TURNS = 5

_ALONE: dict[str, Callable[[Random], Turn]] = {**SINGLE, "json": extract, "story": story}
_SEVERAL: dict[str, Callable[[Random], list[Turn]]] = {"again": again, "memory": memory}
_RULES: dict[str, Callable[[Random], Rule]] = {"prefix": begins, "style": styled}


@dataclass(frozen=True, slots=True)
class Example:
    """A chat that ends with the answer to be learned or graded.

    Args:
        task: what its last turn practises.
        messages: the whole chat; every assistant's message in it is right.
        combinations: what was asked, one text for every phrasing with its content; the last decides about the answer.
    """

    task: str
    messages: tuple[Message, ...]
    combinations: tuple[str, ...] = ()

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The chat without its last answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """The right answer, or for a story one that would do."""
        return self.messages[-1]["content"]


def is_held_out(text: str) -> bool:
    """Return whether this combination is kept for grading."""
    return zlib.crc32(text.encode(), _SALT) % _HELD_OUT_ONE_IN == 0


def training_chats(seed: int) -> Iterator[Example]:
    """Yield chats for ever, the same for the same seed; none has a held-out combination."""
    draw = Random(seed)
    weights = [_WEIGHTS.get(task, _USUAL_WEIGHT) for task in TASKS]
    while True:
        example = _chat(draw, draw.choices(TASKS, weights)[0])
        if not any(map(is_held_out, example.combinations)):
            yield example


def held_out_chats(seed: int, n: int) -> list[Example]:
    """Return n chats whose last question is a held-out combination, every task equally often."""
    draw = Random(seed)
    return [_held_out_chat(draw, TASKS[i % len(TASKS)]) for i in range(n)]


def _held_out_chat(draw: Random, task: str) -> Example:
    while True:
        example = _chat(draw, task)
        if is_held_out(example.combinations[-1]):
            return example


# --- from turns to chats ---


def _chat(draw: Random, task: str) -> Example:
    if task in _RULES:
        return _ruled_chat(draw, task, _RULES[task](draw))
    if task in _SEVERAL:
        return _example(_SEVERAL[task](draw), _perhaps_neutral(draw))
    turns = [_ALONE[task](draw)]
    if turns[0].system:
        return _example(turns, turns[0].system)
    while draw.random() < _P_EARLIER_TURN and len(turns) < _N_MOST_TURNS:
        turns.insert(0, any_turn(draw))
    return _example(turns, _perhaps_neutral(draw))


def _perhaps_neutral(draw: Random) -> str:
    return draw.choice(NEUTRAL) if draw.random() < _P_NEUTRAL else ""


def _ruled_chat(draw: Random, task: str, rule: Rule) -> Example:
    turns = [rule.ask(draw, task) for _ in range(draw.choice((1, 1, 1, 2)))]
    example = _example(turns, rule.system)
    whole = f"{combination(rule.system)} / {turns[-1].combination}"
    return Example(task, example.messages, (*example.combinations, whole))


def _example(turns: Sequence[Turn], system: str = "") -> Example:
    messages = [_message("system", system)] if system else []
    for turn in turns:
        messages += [_message("user", turn.question), _message("assistant", turn.answer)]
    combinations = tuple(turn.combination for turn in turns)
    return Example(turns[-1].task, tuple(messages), combinations)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


# --- grading ---


def is_right(example: Example, answer: str) -> bool:
    """Return whether the answer will do for the example's last question.

    Short answers are compared as they are, JSON by its fields, and a story by what it names and its length.
    """
    if example.task == "json":
        return _same_json(example.answer, answer)
    if example.task == "story":
        return is_story_of(example.prompt[-1]["content"], answer)
    return answer == example.answer


def _same_json(right: str, answer: str) -> bool:
    try:
        return bool(json.loads(answer) == json.loads(right))
    except ValueError:
        return False


# --- for show ---


def demo_chats() -> list[Example]:
    """Return 64 mixed chats, easy on the eye, whose answers are of very different length."""
    short = [_shown_chat(shown) for shown in SHORT]
    stories = [_example([ask_plainly(wish)]) for wish in STORIES]
    return [
        example for i, told in enumerate(stories) for example in (*short[3 * i : 3 * i + 3], told)
    ]


def demo_lines() -> str:
    """Return the demo's chats without their last answers, as lines of a batch file."""
    prompts = ({"messages": list(example.prompt)} for example in demo_chats())
    return "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)


def _shown_chat(shown: Shown) -> Example:
    pairs = zip(shown.texts[::2], shown.texts[1::2], strict=True)
    turns = [Turn(shown.task, asked, answer, combination(asked)) for asked, answer in pairs]
    return _example(turns, shown.system)
