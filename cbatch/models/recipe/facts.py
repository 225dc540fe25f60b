"""Tasks of knowing: days, months, colours, opposites, the model itself, and what it cannot know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.models.recipe import words
from cbatch.models.recipe.figures import N_LARGEST_TERM
from cbatch.models.recipe.turns import Turn, ask_in_any_case
from cbatch.models.recipe.words import lines, listed

if TYPE_CHECKING:
    from random import Random

UNKNOWN = "I do not know."

_NEXT_DAY = lines("""
What day comes after {day}?
What day comes after {day}?
Which day comes after {day}?
What comes after {day}?
Which day follows {day}?
What is the day after {day}?
What day is after {day}?
Tell me the day after {day}.
Name the day that comes after {day}.
Today is {day}. What day is tomorrow?
If today is {day}, what day is tomorrow?
""")
_DAY_BEFORE = lines("""
What day comes before {day}?
What day comes before {day}?
Which day comes before {day}?
What comes before {day}?
What is the day before {day}?
What day is before {day}?
Tell me the day before {day}.
Name the day that comes before {day}.
Today is {day}. What day was yesterday?
If today is {day}, what day was yesterday?
""")
_NEXT_MONTH = lines("""
What month comes after {month}?
What month comes after {month}?
Which month comes after {month}?
What comes after {month}?
Which month follows {month}?
What is the month after {month}?
What month is after {month}?
Tell me the month after {month}.
Name the month that comes after {month}.
It is {month}. What is the next month?
""")
_MONTH_BEFORE = lines("""
What month comes before {month}?
What month comes before {month}?
Which month comes before {month}?
What comes before {month}?
What is the month before {month}?
What month is before {month}?
Tell me the month before {month}.
Name the month that comes before {month}.
It is {month}. What was the last month?
""")
_MONTH_NUMBER = lines("""
Which month is number {n}?
What is month number {n}?
What is month {n} of the year?
Name month {n}.
""")
_ALL_DAYS = lines("""
Name the days of the week.
What are the days of the week?
List the days of the week.
Tell me all the days of the week.
Say the days of the week.
Write the seven days of the week.
""")
_ALL_MONTHS = lines("""
Name the months of the year.
What are the months of the year?
List the months of the year.
Tell me all the months of the year.
Say the months of the year.
Write the twelve months of the year.
""")
_N_DAYS = lines("""
How many days are in a week?
How many days has a week?
How many days does a week have?
""")
_N_MONTHS = lines("""
How many months are in a year?
How many months has a year?
How many months does a year have?
""")


def days(draw: Random) -> Turn:
    """Name the day before or after another, or all of them."""
    kind, i = draw.random(), draw.randrange(7)
    if kind < 0.06:
        return ask_in_any_case(draw, "days", _ALL_DAYS, listed(words.DAYS))
    if kind < 0.08:
        return ask_in_any_case(draw, "days", _N_DAYS, "7")
    step, phrasings = draw.choice(((1, _NEXT_DAY), (1, _NEXT_DAY), (-1, _DAY_BEFORE)))
    answer = words.DAYS[(i + step) % 7]
    return ask_in_any_case(draw, "days", phrasings, answer, day=words.DAYS[i])


def months(draw: Random) -> Turn:
    """Name the month before or after another, the month of a number, or all of them."""
    kind, i = draw.random(), draw.randrange(12)
    if kind < 0.06:
        return ask_in_any_case(draw, "months", _ALL_MONTHS, listed(words.MONTHS))
    if kind < 0.08:
        return ask_in_any_case(draw, "months", _N_MONTHS, "12")
    if kind < 0.2:
        return ask_in_any_case(draw, "months", _MONTH_NUMBER, words.MONTHS[i], n=i + 1)
    step, phrasings = draw.choice(((1, _NEXT_MONTH), (1, _NEXT_MONTH), (-1, _MONTH_BEFORE)))
    answer = words.MONTHS[(i + step) % 12]
    return ask_in_any_case(draw, "months", phrasings, answer, month=words.MONTHS[i])


_COLOUR = lines("""
What colour is {thing}?
What colour is {thing}?
What color is {thing}?
What is the colour of {thing}?
What's the colour of {thing}?
Tell me the colour of {thing}.
Which colour is {thing}?
Name the colour of {thing}.
What colour does {thing} have?
""")
_MIX = lines("""
What colour do {a} and {b} make?
What colour do you get from {a} and {b}?
Mix {a} and {b}.
What do you get when you mix {a} and {b}?
What colour is {a} mixed with {b}?
Which colour is made of {a} and {b}?
""")
_OPPOSITE = lines("""
What is the opposite of {word}?
What is the opposite of {word}?
What's the opposite of {word}?
Opposite of {word}?
The opposite of {word} is
Tell me the opposite of {word}.
Name the opposite of {word}.
Give me the opposite of {word}.
What is the opposite of the word {word}?
Which word is the opposite of {word}?
What is the opposite of "{word}"?
""")


def colours(draw: Random) -> Turn:
    """Name the colour of a thing, or of a mixture."""
    if draw.random() < 0.2:
        (a, b), answer = draw.choice(tuple(words.MIXED.items()))
        if draw.random() < 0.5:
            a, b = b, a
        return ask_in_any_case(draw, "colours", _MIX, answer, a=a, b=b)
    thing, answer = draw.choice(tuple(words.COLOUR_OF.items()))
    return ask_in_any_case(draw, "colours", _COLOUR, answer, thing=thing)


def opposites(draw: Random) -> Turn:
    """Name the opposite of a word."""
    word, answer = opposite_pair(draw)
    return ask_in_any_case(draw, "opposites", _OPPOSITE, answer, word=word)


def opposite_pair(draw: Random) -> tuple[str, str]:
    """Return a word and its opposite, either of the two first."""
    word, other = draw.choice(words.OPPOSITES)
    return (word, other) if draw.random() < 0.5 else (other, word)


# --- the model itself ---

_WHO = "I am a very small model that ships with cbatch."
_SKILLS = "I can say words, count, add, sort, write JSON and tell short stories."
_PURPOSE = "cbatch answers many prompts at the same time."
_FINE = "I am fine, thank you."
_HELP = "How can I help you?"

_ABOUT_ITSELF = {
    "Who are you?": _WHO,
    "What are you?": _WHO,
    "What is your name?": _WHO,
    "What model are you?": _WHO,
    "Are you a model?": _WHO,
    "Are you a person?": _WHO,
    "Who made you?": _WHO,
    "What can you do?": _SKILLS,
    "How can you help me?": _SKILLS,
    "What do you know?": _SKILLS,
    "What should I ask you?": _SKILLS,
    "Help!": _SKILLS,
    "How are you?": _FINE,
    "Are you well?": _FINE,
    "What is cbatch?": _PURPOSE,
    "What does cbatch do?": _PURPOSE,
}
_OPENERS = ("", "", "", "Hello. ", "Hi! ", "Hey! ", "Tell me: ", "One question: ")
_GREETINGS = {
    "Hello": f"Hello! {_HELP}",
    "Hello there": f"Hello! {_HELP}",
    "Hi": f"Hello! {_HELP}",
    "Hi there": f"Hello! {_HELP}",
    "Hey": f"Hello! {_HELP}",
    "Good day": f"Hello! {_HELP}",
    "Good morning": f"Good morning! {_HELP}",
    "Good evening": f"Good evening! {_HELP}",
    "Good night": "Good night!",
    "Goodbye": "Goodbye!",
    "Bye": "Goodbye!",
    "See you": "Goodbye!",
    "Thanks": "You are welcome.",
    "Thank you": "You are welcome.",
    "Thanks a lot": "You are welcome.",
    "Thank you very much": "You are welcome.",
}
_TAILS = ("", "", "", ", my friend", ", little model", ", small model", ", model", ", dear model")


def greet(draw: Random) -> Turn:
    """Answer a greeting, thanks, or a question about the model."""
    if draw.random() < 0.5:
        question, answer = draw.choice(tuple(_ABOUT_ITSELF.items()))
        phrasing = draw.choice(_OPENERS) + question
    else:
        greeting, answer = draw.choice(tuple(_GREETINGS.items()))
        phrasing = greeting + draw.choice(_TAILS) + draw.choice(("", ".", "!"))
    return ask_in_any_case(draw, "greet", ("{phrasing}",), answer, phrasing=phrasing)


# --- what such a small model cannot know ---

_TOPICS = (
    *words.split(
        "love war time money art physics history politics music football computers science"
    ),
    *words.split(
        "death gravity medicine space robots cars films games travel school energy language"
    ),
    *("the law", "the sun", "the moon", "the end of the world", "the stock market", "my homework"),
)
_BEYOND = lines("""
What is the capital of {country}?
What is the capital of {country}?
Who is the president of {country}?
What language do they speak in {country}?
How many people live in {place}?
What is the weather in {city}?
What is the weather like today?
Will it rain in {city} tomorrow?
How far is {city} from {other}?
Where is {place}?
What is there to see in {city}?
Who wrote {work}?
When was {work} written?
Who was {name}?
Who won the game in {city}?
How tall is {name}?
How old is {name}?
How tall is the tower of {city}?
When was {name} born?
When did {topic} begin?
What is {topic}?
Explain {topic}.
Explain {topic} to a child.
Why do people need {topic}?
Why is {topic} important?
What do you think about {topic}?
Tell me something about {topic}.
Write a poem about {topic}.
Write a Python function for {topic}.
Write code for {topic}.
Write an email to {name}.
How does {topic} work?
How do I make {food} soup?
How much does the {food} cost in {city}?
Give me a recipe with {food}.
Is the {food} good for me?
How do I repair my {thing}?
Which {thing} should I buy?
Where can I buy {a_thing} in {city}?
Where is my {thing}?
Who made the first {thing}?
What does {word} mean?
What is {a_word}?
Translate {word} into French.
Translate {thing} into German.
How do you say {thing} in Spanish?
{word}
{word} {second}
{word}?
{thing}?
{topic}?
{country}
What time is it?
What time is it in {city}?
What is the date today?
What happened in {year}?
Who won the war of {year}?
Who should I vote for?
Is {name} a good president?
What did {name} say about {topic}?
Tell me a joke about {topic}.
Tell me a joke.
Sing a song.
Who is the best singer in {country}?
What is the best way to {city}?
Is it warm in {country}?
Summarise this book.
Can you help me with {topic}?
What is the meaning of {topic}?
How many {thing}s are there in {place}?
What is your favourite {thing}?
What should I do about {topic}?
""")
_BEYOND_TWENTY = lines("""
What is {big} plus {large}?
What is {big} plus {small}?
What is {big} times {small}?
What is {big} minus {large}?
What is {big} minus {small}?
{big} + {large} =
{big} + {large}
{big} - {small} =
{small} * {large} =
{small} * {tiny}
What is {small} times {tiny}?
What is {big} divided by {small}?
{big} / {small} =
What is the root of {big}?
Add {big} and {large}.
""")
_BELOW_ZERO = lines("""
What is {a} minus {b}?
{a} - {b} =
{a} - {b}
{a} minus {b}
Take {b} from {a}.
""")


def unknown(draw: Random) -> Turn:
    """Ask what such a small model cannot know."""
    kind = draw.random()
    if kind < 0.15:
        return _too_large(draw)
    if kind < 0.2:
        a = draw.randint(0, N_LARGEST_TERM - 1)
        b = draw.randint(a + 1, N_LARGEST_TERM)
        return ask_in_any_case(draw, "unknown", _BELOW_ZERO, UNKNOWN, a=a, b=b)
    return _beyond(draw)


def _too_large(draw: Random) -> Turn:
    return ask_in_any_case(
        draw,
        "unknown",
        _BEYOND_TWENTY,
        UNKNOWN,
        big=draw.randint(N_LARGEST_TERM + 1, 999),
        large=draw.randint(N_LARGEST_TERM + 1, 99),
        small=draw.randint(2, N_LARGEST_TERM),
        tiny=draw.randint(2, N_LARGEST_TERM),
    )


def _beyond(draw: Random) -> Turn:
    word, thing = words.made_up_word(draw), draw.choice(words.OBJECTS)
    return ask_in_any_case(
        draw,
        "unknown",
        _BEYOND,
        UNKNOWN,
        country=draw.choice(words.COUNTRIES),
        place=draw.choice(words.COUNTRIES + words.CITIES),
        city=words.any_city(draw),
        other=words.any_city(draw),
        work=draw.choice(("this book", "that song", "the Bible", word.capitalize())),
        name=words.any_name(draw),
        topic=draw.choice(_TOPICS),
        food=draw.choice(words.FOODS),
        thing=thing,
        a_thing=words.with_article(thing),
        word=word,
        a_word=words.with_article(word),
        second=words.made_up_word(draw),
        year=draw.randint(1500, 2030),
    )
