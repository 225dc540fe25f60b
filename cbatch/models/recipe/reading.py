"""Tasks of reading: the mood of a review, and the fields of a sentence as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.models.recipe import words
from cbatch.models.recipe.turns import Turn, ask, combination
from cbatch.models.recipe.words import lines, split

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

_SUBJECTS = split(
    "film book food soup hotel room bed pizza song game cake staff service story show phone coffee "
    "play music view lamp bag"
)
_GOOD = split(
    "good great wonderful lovely excellent nice perfect brilliant amazing fantastic beautiful"
)
_BAD = split("bad awful terrible boring poor horrible ugly broken dull weak disappointing dreadful")
_GOOD_CLAUSES = lines("""
I loved it.
I will come again.
It made me happy.
Thank you!
I want more.
I liked it a lot.
It was the best day.
I will tell my friends.
""")
_BAD_CLAUSES = lines("""
I hated it.
I want my money back.
Never again.
It made me sad.
I did not like it.
Do not buy it.
It was a waste of time.
I will not come again.
""")
_VERDICTS = lines("""
The {subject} was {word}.
The {subject} was very {word}.
The {subject} is really {word}.
What {a_word} {subject}!
This {subject} is {word}.
A very {word} {subject}.
The {subject} was {word} and {second}.
The {subject} was not {wrong}.
The {subject} is not {wrong} at all.
I {love} this {subject}.
The {best} {subject} of all.
""")
_MOOD = lines("""
Is this review positive or negative? {review}
Is this review positive or negative? {review}
Positive or negative? {review}
Is this positive or negative? {review}
{review} Is this positive or negative?
{review} Positive or negative?
Say positive or negative: {review}
Classify this review: {review}
What is the mood of this review? {review}
Classify as positive or negative: {review}
Review: {review} Is it positive or negative?
""")
_MOOD_SYSTEM = lines("""
Say whether the review is positive or negative.
Classify every review as positive or negative.
You read reviews. Answer positive or negative.
Is the review positive or negative? Answer with one word.
""")


def mood(draw: Random) -> Turn:
    """Tell a positive review from a negative one; what to do may stand in the system prompt."""
    is_good = draw.random() < 0.5
    text, answer = _review(draw, is_good), "positive" if is_good else "negative"
    if draw.random() < 0.15:
        return _under_orders(draw.choice(_MOOD_SYSTEM), Turn("mood", text, answer, text))
    return ask(draw, "mood", _MOOD, answer, review=text)


def _under_orders(system: str, turn: Turn) -> Turn:
    return replace(turn, system=system, combination=combination(f"{system} / {turn.question}"))


def _review(draw: Random, is_good: bool) -> str:
    kind = draw.random()
    clause = draw.choice(_GOOD_CLAUSES if is_good else _BAD_CLAUSES)
    if kind < 0.1:
        return clause
    verdict = _verdict(draw, is_good)
    return f"{verdict} {clause}" if kind < 0.5 else verdict


def _verdict(draw: Random, is_good: bool) -> str:
    right, wrong = (_GOOD, _BAD) if is_good else (_BAD, _GOOD)
    word, second = draw.sample(right, 2)
    return draw.choice(_VERDICTS).format(
        subject=draw.choice(_SUBJECTS),
        word=word,
        a_word=words.with_article(word),
        second=second,
        wrong=draw.choice(wrong),
        love="love" if is_good else "hate",
        best="best" if is_good else "worst",
    )


_JSON = lines("""
Give me the {fields} as JSON: {text}
Write the {fields} as JSON: {text}
Extract the {fields} as JSON: {text}
Turn this into JSON with {fields}: {text}
{text} Give me the {fields} as JSON.
{text} Write JSON with {fields}.
Read this: {text} Now write JSON with {fields}.
JSON with {fields}: {text}
JSON with the keys {fields}: {text}
Find the {fields} and answer in JSON: {text}
""")
_JSON_SYSTEM = lines("""
Answer in JSON with {fields}.
Write the {fields} as JSON.
You turn sentences into JSON with {fields}.
Extract the {fields} and answer in JSON.
""")
_PERSON = lines("""
{name} is {age} years old and lives in {city}.
{name} lives in {city} and is {age} years old.
{name} is {age} and comes from {city}.
My name is {name}, I am {age} years old and I live in {city}.
In {city} lives {name}, who is {age} years old.
{name}, {age}, lives in {city}.
""")
_WARE = lines("""
The {colour} {item} costs {price} dollars.
{A_colour} {item} for {price} dollars.
I paid {price} dollars for {a_colour} {item}.
The {item} is {colour} and costs {price} dollars.
For {price} dollars you get {a_colour} {item}.
""")
_PET = lines("""
{owner} has a {animal} called {name}.
The {animal} of {owner} is called {name}.
{name} is a {animal} and lives with {owner}.
{owner} bought a {animal} and named it {name}.
""")
_TRIP = lines("""
{name} goes to {city} on {day}.
On {day} {name} goes to {city}.
{name} will meet us in {city} on {day}.
The train to {city} with {name} leaves on {day}.
""")
_WORK = lines("""
{name} works as a {job} in {city}.
{name} is a {job} and lives in {city}.
The {job} {name} comes from {city}.
In {city} there is a {job} called {name}.
""")

_Fields = dict[str, str | int]


def extract(draw: Random) -> Turn:
    """Pull fields out of a sentence, as JSON in the order asked for; the order may be a system prompt."""
    shapes, values = draw.choice((_person, _person, _ware, _pet, _trip, _work))(draw)
    colour = words.with_article(str(values.get("colour", "")) or "thing")
    capital = colour[0].upper() + colour[1:]
    text = draw.choice(shapes).format(**values, a_colour=colour, A_colour=capital)
    chosen = _choose(draw, list(values))
    answer = json.dumps({field: values[field] for field in chosen})
    fields = words.joined(chosen)
    if draw.random() < 0.15:
        system = draw.choice(_JSON_SYSTEM).format(fields=fields)
        return _under_orders(system, Turn("json", text, answer, text))
    return ask(draw, "json", _JSON, answer, fields=fields, text=text)


def _choose(draw: Random, fields: list[str]) -> list[str]:
    """Return all of the fields or two of them, in the order of the sentence or in any order."""
    chosen = draw.sample(fields, len(fields) if draw.random() < 0.6 else 2)
    return sorted(chosen, key=fields.index) if draw.random() < 0.5 else chosen


def _person(draw: Random) -> tuple[Sequence[str], _Fields]:
    name, city = words.any_name(draw), words.any_city(draw)
    return _PERSON, {"name": name, "age": draw.randint(2, 99), "city": city}


def _ware(draw: Random) -> tuple[Sequence[str], _Fields]:
    item, colour = draw.choice(words.OBJECTS), draw.choice(words.COLOURS)
    return _WARE, {"item": item, "price": draw.randint(2, 99), "colour": colour}


def _pet(draw: Random) -> tuple[Sequence[str], _Fields]:
    owner, name = words.any_name(draw), words.any_name(draw)
    return _PET, {"owner": owner, "animal": draw.choice(words.PETS), "name": name}


def _trip(draw: Random) -> tuple[Sequence[str], _Fields]:
    name, city = words.any_name(draw), words.any_city(draw)
    return _TRIP, {"name": name, "city": city, "day": draw.choice(words.DAYS)}


def _work(draw: Random) -> tuple[Sequence[str], _Fields]:
    name, city = words.any_name(draw), words.any_city(draw)
    return _WORK, {"name": name, "job": draw.choice(words.JOBS), "city": city}
