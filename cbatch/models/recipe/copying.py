"""Tasks that copy: say a word, repeat a sentence, change the case of letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.models.recipe import words
from cbatch.models.recipe.cast import ANIMALS
from cbatch.models.recipe.turns import Turn, ask
from cbatch.models.recipe.words import lines

if TYPE_CHECKING:
    from random import Random

_SAY = lines("""
Say {text}.
Say {text}.
Just say {text}.
Say only {text}.
Say just {text}.
Say "{text}".
Say '{text}'.
Say: {text}
Write {text}.
Answer with {text}.
Reply with {text}.
Type {text}.
Print {text}.
""")
_SAY_WORD = lines("""
Say the word {text}.
Say the word {text}.
Say the word "{text}".
Write the word {text}.
Answer with the word {text}.
Answer with one word: {text}
""")
_SAY_TIMES = lines("""
Say {text} {times} times.
Write {text} {times} times.
Repeat {text} {times} times.
""")
_SAY_HELLO = lines("""
Say hello to {name}.
Greet {name}.
Say hi to {name}.
""")
_REPEAT = lines("""
Repeat: {text}
Repeat this: {text}
Repeat this sentence: {text}
Repeat after me: {text}
Say this sentence: {text}
Say exactly this: {text}
Say after me: {text}
Copy this sentence: {text}
Repeat "{text}"
Write this again: {text}
Write this: {text}
Echo: {text}
""")
_SENTENCES = lines("""
The {colour} {thing} is on the {second}.
{name} has {a_thing} and {a_second}.
I like the {food} and all {colour} things.
{name} and {other} live in {city}.
We go to {city} on {day}.
There are {n} people in the room.
My {thing} is {adjective}.
Where is the {colour} {thing}?
{name} is {n} years old.
The {food} is for {name}.
The {animal} sleeps under the {thing}.
I saw {an_animal} in {city}.
It is cold in {city} today.
On {day} we want {food} for lunch.
Do you want the {thing} or the {second}?
I saw {name} with {a_colour} {thing} in {city}.
{name} said hello to {other} and went home.
The {adjective} {animal} wants some {food}.
""")
_UPPER = lines("""
Write {text} in upper case.
Write {text} in capital letters.
Write {text} in capitals.
Put {text} in upper case.
Turn this into upper case: {text}
Make this upper case: {text}
Say {text} in capital letters.
Upper case: {text}
In capital letters: {text}
Change {text} to upper case.
Write "{text}" in upper case.
""")
_LOWER = lines("""
Write {text} in lower case.
Write {text} in small letters.
Put {text} in lower case.
Turn this into lower case: {text}
Make this lower case: {text}
Say {text} in small letters.
Lower case: {text}
In small letters: {text}
Change {text} to lower case.
Write "{text}" in lower case.
""")

_NOUNS = words.PLAIN + tuple(ANIMALS)
_POLITE_WORDS = ("hello", "hi", "yes", "no", "thank you", "good morning", "good night", "please")
_KNOWN = _NOUNS + words.ADJECTIVES + _POLITE_WORDS


def say(draw: Random) -> Turn:
    """Say one thing, or one word several times."""
    kind, text = draw.random(), _thing_to_say(draw)
    if kind < 0.05:
        name = words.any_name(draw)
        return ask(draw, "say", _SAY_HELLO, f"Hello, {name}.", name=name)
    if kind < 0.15 and " " not in text:
        n = draw.randint(2, 5)
        times = draw.choice((str(n), words.NUMBERS[n]))
        return ask(draw, "say", _SAY_TIMES, " ".join([text] * n), text=text, times=times)
    phrasings = _SAY + _SAY_WORD if text.isalpha() else _SAY
    return ask(draw, "say", phrasings, text, text=text)


def say_known(draw: Random) -> Turn:
    """Say a word whose capital letters the model has learned."""
    text = draw.choice(_KNOWN)
    return ask(draw, "say", _SAY, text, text=text)


def _thing_to_say(draw: Random) -> str:
    kind = draw.random()
    if kind < 0.45:
        return draw.choice(_KNOWN)
    if kind < 0.7:
        made_up = words.made_up_word(draw, draw.choice((2, 2, 3)))
        return made_up if draw.random() < 0.7 else made_up.capitalize()
    if kind < 0.8:
        return str(draw.randrange(10 ** draw.randint(1, 5)))
    if kind < 0.9:
        return draw.choice(words.NAMES + words.CITIES + words.DAYS + words.MONTHS)
    if kind < 0.93:
        return f"{draw.choice(words.PLAIN)} and {draw.choice(words.PLAIN)}"
    return f"{draw.choice(words.ADJECTIVES + words.COLOURS)} {draw.choice(_NOUNS)}"


def repeat(draw: Random) -> Turn:
    """Repeat a sentence."""
    text = _row_of_words(draw) if draw.random() < 0.17 else _sentence(draw)
    return ask(draw, "repeat", _REPEAT, text, text=text)


def _row_of_words(draw: Random) -> str:
    return " ".join(
        words.made_up_word(draw) if draw.random() < 0.3 else draw.choice(_KNOWN)
        for _ in range(draw.randint(2, 6))
    )


def _sentence(draw: Random) -> str:
    thing, second = draw.sample(words.OBJECTS, 2)
    animal, colour = draw.choice(tuple(ANIMALS)), draw.choice(words.COLOURS)
    return draw.choice(_SENTENCES).format(
        name=words.any_name(draw),
        other=words.any_name(draw),
        city=words.any_city(draw),
        animal=animal,
        an_animal=words.with_article(animal),
        colour=colour,
        a_colour=words.with_article(colour),
        thing=thing,
        a_thing=words.with_article(thing),
        second=second,
        a_second=words.with_article(second),
        food=draw.choice(words.FOODS),
        adjective=draw.choice(words.ADJECTIVES),
        day=draw.choice(words.DAYS),
        n=draw.randint(2, 99),
    )


def upper(draw: Random) -> Turn:
    """Write one to three words in capital letters."""
    text = _phrase(draw)
    shown = draw.choice((text, text, text, text.capitalize()))
    return ask(draw, "upper", _UPPER, text.upper(), text=shown)


def lower(draw: Random) -> Turn:
    """Write one to three words in small letters."""
    text = _phrase(draw)
    shown = draw.choice((text.upper(), text.upper(), text.title()))
    return ask(draw, "lower", _LOWER, text.lower(), text=shown)


def _phrase(draw: Random) -> str:
    n = draw.choice((1, 1, 1, 2, 2, 3))
    if n == 1:
        return draw.choice(_KNOWN)
    before = [draw.choice(words.ADJECTIVES)] if n == 3 else []
    return " ".join([*before, draw.choice(words.COLOURS), draw.choice(_NOUNS)])
