"""What the model learns from: right answers, the same every time, and nothing that it is graded by."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from functools import cache
from itertools import islice

import pytest

from cbatch.models import DEMO_CHATS
from cbatch.models.recipe.cast import ANIMALS, PLACES
from cbatch.models.recipe.stories import LENGTHS, Wish, is_story_of, tell
from cbatch.models.recipe.tasks import (
    SHORT_TASKS,
    TASKS,
    Example,
    demo_chats,
    demo_lines,
    held_out_chats,
    is_held_out,
    is_right,
    training_chats,
)
from cbatch.models.recipe.turns import combination
from tests.profiles import is_fast

N_HELD_OUT = 20 * len(TASKS)
N_TRAINING = 4_000 if is_fast() else 10_000
LEARNED_FROM = 3082820762
SHOWN_IN_THE_README = [
    "Say red.",
    "Say blue.",
    "Count from 3 to 9.",
    "What is 7 plus 5?",
    "7 + 5 =",
    "What day comes after Monday?",
    "Sort these numbers: 7, 3, 9",
    "Tell me a short story about a fox in the desert.",
]


@cache
def _training() -> list[Example]:
    return list(islice(training_chats(1), N_TRAINING))


@cache
def _held_out() -> list[Example]:
    return held_out_chats(2, N_HELD_OUT)


def _first_of(task: str) -> Example:
    return next(example for example in _training() if example.task == task)


def _asked(example: Example) -> str:
    return combination(example.prompt[-1]["content"])


def test_training_chats_are_those_the_models_learned_from() -> None:
    """The same in every version of Python; where this changes, new models have to be trained."""
    text = json.dumps([[dict(m) for m in e.messages] for e in islice(training_chats(0), 300)])
    assert zlib.crc32(text.encode()) == LEARNED_FROM
    assert list(islice(training_chats(7), 200)) != list(islice(training_chats(8), 200))


def test_training_chats_have_no_held_out_combination() -> None:
    for example in _training():
        assert not any(map(is_held_out, example.combinations)), example


def test_held_out_questions_are_not_among_the_training_questions() -> None:
    alone = {"again", "memory", "prefix", "style"}  # what they ask depends on what came before
    trained = {(e.task, _asked(e)) for e in _training()}
    for example in _held_out():
        if example.task not in alone and example.prompt[0]["role"] == "user":
            assert (example.task, _asked(example)) not in trained, example


def test_held_out_chats_have_every_task_equally_often() -> None:
    assert Counter(e.task for e in _held_out()) == dict.fromkeys(TASKS, 20)
    assert all(is_held_out(e.combinations[-1]) for e in _held_out())


def test_training_chats_have_every_task() -> None:
    counts = Counter(e.task for e in _training())
    assert set(counts) == set(TASKS)
    assert min(counts.values()) > N_TRAINING / 100
    lengths = [len(e.answer.split()) for e in _training()]
    assert (min(lengths), max(lengths) > 100) == (1, True)


@pytest.mark.parametrize("examples", [_training, _held_out, demo_chats])
def test_every_answer_is_right_and_roles_alternate(examples: object) -> None:
    assert callable(examples)
    for example in examples():
        assert is_right(example, example.answer), example
        roles = [m["role"] for m in example.messages]
        if roles[0] == "system":
            roles.pop(0)
        assert roles == ["user", "assistant"] * (len(roles) // 2), example
        assert all(m["content"].strip() == m["content"] != "" for m in example.messages), example
        assert not any("{" in m["content"] for m in example.prompt), example


@pytest.mark.parametrize("task", SHORT_TASKS)
def test_short_answer_that_is_spoiled_is_wrong(task: str) -> None:
    example = _first_of(task)
    for spoiled in ("", example.answer + ".", f" {example.answer}", example.answer[:-1]):
        assert not is_right(example, spoiled)


def test_json_answer_is_compared_by_its_fields() -> None:
    example = _first_of("json")
    right = json.loads(example.answer)
    assert is_right(example, json.dumps(right, indent=2))
    first, *_ = right
    wrong = {first: "somebody else"}
    for spoiled in (
        {**right, **wrong},
        {**right, "more": 1},
        {k: right[k] for k in right if k != first},
    ):
        assert not is_right(example, json.dumps(spoiled))
    assert not is_right(example, example.answer[:-1])


def test_story_that_is_spoiled_is_wrong() -> None:
    question, answer = (
        "Tell me a story about an owl in the old tower.",
        tell(Wish("owl", "old tower")),
    )
    assert is_story_of(question, answer)
    assert not is_story_of(question, answer.replace("owl", "fox"))
    assert not is_story_of(question, answer.replace("tower", "house"))
    assert not is_story_of(question, answer[:-1])
    assert not is_story_of(question, answer + " " + answer + " " + answer)
    assert not is_story_of(question, "An owl lived in the old tower.")


@pytest.mark.parametrize("length", ["", *LENGTHS])
def test_every_story_is_one_of_its_question(length: str) -> None:
    for animal in ANIMALS:
        for place, stage in PLACES.items():
            answer = tell(Wish(animal, place, length))
            assert is_story_of(f"a {animal} {stage.where}", answer), answer


def test_carelessness_does_not_change_a_combination() -> None:
    assert combination("can you please say red?") == combination("Say red.") == "say red"
    assert combination("Say red.") != combination("Say blue.")


def test_what_the_readme_asks_is_not_held_out() -> None:
    assert not any(is_held_out(combination(question)) for question in SHOWN_IN_THE_README)


def test_demo_has_64_chats_of_different_length() -> None:
    demo = demo_chats()
    assert len(demo) == 64
    assert demo[0].prompt == ({"role": "user", "content": "Say red."},)
    assert demo[0].answer == "red"
    assert len({len(e.answer) for e in demo}) > 30
    assert {e.task for e in demo} == set(TASKS)


def test_demo_that_ships_is_what_the_recipe_writes() -> None:
    assert DEMO_CHATS.read_text(encoding="utf-8") == demo_lines()
