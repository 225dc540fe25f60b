"""What makes a chat more than one question: rules in a system prompt, and turns that refer to earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cbatch.models.recipe import words
from cbatch.models.recipe.copying import say, say_known
from cbatch.models.recipe.facts import UNKNOWN, colours, days, months, opposite_pair, opposites
from cbatch.models.recipe.figures import N_LARGEST_TERM, add, reverse, sort, subtract
from cbatch.models.recipe.singles import SINGLE
from cbatch.models.recipe.stories import any_wish, ask_for
from cbatch.models.recipe.turns import Turn, ask, ask_in_any_case
from cbatch.models.recipe.words import lines, split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

NEUTRAL = lines("""
You are a helpful assistant.
You are a helpful assistant.
You are a helpful assistant.
You are a friendly assistant.
You are an assistant.
You are a small chat model.
You are a useful little model.
You are a chat bot.
You help people.
Answer the question.
Answer the user.
Help the user.
You answer questions.
Be helpful.
Be kind.
Do what the user says.
""")
"""System prompts that change nothing."""

_MIXED_BAG = split(
    "say say repeat count add subtract days months colours opposites sort upper mood greet unknown"
)


def any_turn(draw: Random) -> Turn:
    """Return a question that needs no chat around it."""
    turn = SINGLE[draw.choice(_MIXED_BAG)](draw)
    return any_turn(draw) if turn.system else turn


def _easily_raised(draw: Random) -> Turn:
    """Return a question whose answer is of words whose capital letters are learned."""
    names = ("say", "days", "months", "colours", "opposites", "mood", "greet", "unknown")
    name = draw.choice(names)
    turn = say_known(draw) if name == "say" else SINGLE[name](draw)
    return _easily_raised(draw) if turn.system else turn


# --- rules ---


@dataclass(frozen=True, slots=True)
class Rule:
    """A system prompt, what it does to an answer, and the questions it is practised on."""

    system: str
    change: Callable[[str], str]
    question: Callable[[Random], Turn] = any_turn

    def ask(self, draw: Random, task: str) -> Turn:
        """Return a question and its answer as the rule wants it."""
        turn = self.question(draw)
        return replace(turn, task=task, answer=self.change(turn.answer))


_BEGIN = lines("""
Begin every answer with '{text}'.
Begin every answer with '{text}'.
Start every answer with '{text}'.
Begin each answer with '{text}'.
Always begin with '{text}'.
Always start your answer with '{text}'.
Every answer begins with '{text}'.
Put '{text}' before every answer.
Begin every answer with "{text}".
Start each answer with "{text}".
Begin all answers with {text}
You are a helpful assistant. Begin every answer with '{text}'.
""")
_END = lines("""
End every answer with '{text}'.
End each answer with '{text}'.
Always end with '{text}'.
Finish every answer with '{text}'.
Every answer ends with '{text}'.
Put '{text}' after every answer.
End every answer with "{text}".
""")
_CAPITALS = lines("""
Answer in capital letters.
Answer in upper case.
Always write in capital letters.
Always answer in capitals.
Use only capital letters.
Write every answer in upper case.
You always shout. Answer in capital letters.
""")
_LOUD = lines("""
End every answer with an exclamation mark.
Always end with an exclamation mark.
Finish every answer with an exclamation mark.
Put an exclamation mark after every answer.
Be excited. End every answer with an exclamation mark.
""")
_TWICE = lines("""
Say every answer twice.
Give every answer twice.
Always answer twice.
Answer everything twice.
Say everything two times.
Write each answer two times.
""")
_PIRATE = lines("""
You are a pirate.
Be a pirate.
Talk like a pirate.
Answer like a pirate.
You speak like a pirate.
You are an old pirate on a ship.
""")
_MARKS = split(
    "Sure Answer Here Well Okay Yes Right Look Hello Note Result Reply Listen Indeed Friend Captain"
)
_LAST_WORDS = split("over done okay thanks friend bye captain please right there")


def begins(draw: Random) -> Rule:
    """Ask for a beginning, from a list or made up."""
    word = draw.choice(_MARKS)
    if draw.random() < 0.25:
        word = draw.choice((words.made_up_word(draw).capitalize(), draw.choice(words.NAMES)))
    text = word + draw.choice((":", ":", ",", "!"))
    return Rule(draw.choice(_BEGIN).format(text=text), f"{text} {{}}".format)


def styled(draw: Random) -> Rule:
    """Ask for a way of speaking."""
    kind = draw.randrange(5)
    if kind == 0:
        return Rule(draw.choice(_CAPITALS), str.upper, _easily_raised)
    if kind == 1:
        return Rule(draw.choice(_LOUD), lambda answer: answer.rstrip(".!?") + "!")
    if kind == 2:
        return Rule(draw.choice(_TWICE), "{0} {0}".format)
    if kind == 3:
        return Rule(draw.choice(_PIRATE), "Arr, {}".format)
    text = draw.choice(_LAST_WORDS)
    return Rule(draw.choice(_END).format(text=text), f"{{}} {text}".format)


# --- second turns ---

_AGAIN = lines("""
Say it again.
Say that again.
Repeat that.
Again.
Once more.
Repeat your answer.
Repeat your last answer.
What did you say?
Say it once more.
One more time.
""")
_NOW_UPPER = lines("""
Now in upper case.
Now in capital letters.
Write that in upper case.
Say it in capital letters.
And in upper case?
And in capitals?
""")
_NOW_LOWER = lines("""
Now in lower case.
Now in small letters.
Write that in lower case.
And in lower case?
""")
_NEXT = lines("""
And the {unit} after that?
And after that?
And the next {unit}?
What comes after that?
""")
_BEFORE = lines("""
And the {unit} before that?
And before that?
What comes before that?
""")
_AFTER_THE = lines("""
And after {name}?
And the {unit} after {name}?
And what comes after {name}?
""")
_MORE = lines("""
Add {n} to that.
Now add {n}.
And plus {n}?
Plus {n}?
What is that plus {n}?
""")
_LESS = lines("""
Take {n} from that.
Now subtract {n}.
Subtract {n} from that.
And minus {n}?
Minus {n}?
What is that minus {n}?
""")
_TURNED = lines("""
Now in reverse order.
Now backwards.
And backwards?
Reverse that.
Now reverse it.
""")
_FIRST_QUESTION = lines("""
What was my first question?
What was my first question?
What did I ask first?
Repeat my first question.
What did I say first?
""")
_LAST_QUESTION = lines("""
What was my last question?
What was my question?
What did I just ask?
What did I ask you?
Repeat my last question.
Repeat my question.
""")
_OPPOSITE_OF_THAT = lines("""
And the opposite of that?
And the opposite?
What is the opposite of that?
Now the opposite.
""")
_SAY_ONE = ("Say {text}.", "Say the word {text}.")
_WHY = ("Why?", "How do you know?", "Why is that?", "Tell me more.", "Explain that.")
_HERO_NAME = lines("""
What was its name?
What was the name of the {animal}?
What is the name of the {animal}?
What is the {animal} called?
Who was the hero?
""")


def again(draw: Random) -> list[Turn]:
    """Return a chat whose last question refers to an earlier one or to its answer."""
    if draw.random() < 0.1:
        return _whole(_about_questions(draw))
    turns = list(draw.choice(_PAIRS)(draw))
    if draw.random() < 0.12:
        turns.insert(0, any_turn(draw))
    return _whole(turns)


def _whole(turns: list[Turn]) -> list[Turn]:
    """Return the turns with everything that was asked in the last one's combination."""
    asked = " / ".join(turn.combination for turn in turns)
    return [*turns[:-1], replace(turns[-1], combination=asked)]


def _about_questions(draw: Random) -> list[Turn]:
    """Ask for the first question, the last or the only one."""
    turns = [any_turn(draw) for _ in range(draw.choice((1, 1, 2, 3)))]
    if draw.random() < 0.6:
        return [*turns, _second(draw, _FIRST_QUESTION, turns[0].question)]
    return [*turns, _second(draw, _LAST_QUESTION, turns[-1].question)]


def _second(draw: Random, phrasings: Sequence[str], answer: str, **content: object) -> Turn:
    return ask_in_any_case(draw, "again", phrasings, answer, **content)


def _same(draw: Random) -> tuple[Turn, Turn]:
    first = any_turn(draw)
    return first, _second(draw, _AGAIN, first.answer)


def _other_case(draw: Random) -> tuple[Turn, Turn]:
    first = SINGLE[draw.choice(split("days months colours opposites upper lower"))](draw)
    if first.answer.isupper():
        return first, _second(draw, _NOW_LOWER, first.answer.lower())
    return first, _second(draw, _NOW_UPPER, first.answer.upper())


def _neighbour(draw: Random) -> tuple[Turn, Turn]:
    """Ask for the day or month beside the answer, or after another one."""
    maker, names, unit = draw.choice(((days, words.DAYS, "day"), (months, words.MONTHS, "month")))
    first = maker(draw)
    if first.answer not in names:
        return _neighbour(draw)
    i, kind = names.index(first.answer), draw.random()
    if kind < 0.25:
        i = draw.randrange(len(names))
        answer = names[(i + 1) % len(names)]
        return first, _second(draw, _AFTER_THE, answer, unit=unit, name=names[i])
    step, phrasings = (-1, _BEFORE) if kind < 0.5 else (1, _NEXT)
    return first, _second(draw, phrasings, names[(i + step) % len(names)], unit=unit)


def _onward(draw: Random) -> tuple[Turn, Turn]:
    first = draw.choice((add, subtract))(draw)
    so_far, n = int(first.answer), draw.randint(0, 9)
    if so_far >= n and draw.random() < 0.4:
        return first, _second(draw, _LESS, str(so_far - n), n=n)
    if so_far > N_LARGEST_TERM:
        return _onward(draw)
    return first, _second(draw, _MORE, str(so_far + n), n=n)


def _backwards(draw: Random) -> tuple[Turn, Turn]:
    first = draw.choice((sort, reverse))(draw)
    answer = words.listed(first.answer.split(", ")[::-1])
    return first, _second(draw, _TURNED, answer)


def _turned_round(draw: Random) -> tuple[Turn, Turn]:
    word, other = opposite_pair(draw)
    first = ask(draw, "say", _SAY_ONE, word, text=word)
    return first, _second(draw, _OPPOSITE_OF_THAT, other)


def _why(draw: Random) -> tuple[Turn, Turn]:
    return any_turn(draw), _second(draw, _WHY, UNKNOWN)


def _hero(draw: Random) -> tuple[Turn, Turn]:
    """Ask for the name of the hero after a story."""
    wish = any_wish(draw)
    return ask_for(draw, wish), _second(draw, _HERO_NAME, wish.hero.name, animal=wish.animal)


def _one_more_word(draw: Random) -> tuple[Turn, Turn]:
    text = draw.choice(words.PLAIN)
    phrasings = ("And {text}.", "Now {text}.", "And now {text}.", "Now say {text}.")
    return say(draw), ask(draw, "again", phrasings, text, text=text)


def _one_more_opposite(draw: Random) -> tuple[Turn, Turn]:
    word, other = opposite_pair(draw)
    phrasings = ("And of {word}?", "And the opposite of {word}?", "And {word}?")
    return opposites(draw), _second(draw, phrasings, other, word=word)


def _one_more_colour(draw: Random) -> tuple[Turn, Turn]:
    thing, colour = draw.choice(tuple(words.COLOUR_OF.items()))
    phrasings = ("And {thing}?", "And what colour is {thing}?", "What about {thing}?")
    return colours(draw), _second(draw, phrasings, colour, thing=thing)


def _one_more_sum(draw: Random) -> tuple[Turn, Turn]:
    a, b = draw.randint(0, N_LARGEST_TERM), draw.randint(0, N_LARGEST_TERM)
    phrasings = ("And {a} plus {b}?", "And {a} + {b}?", "{a} + {b}?")
    return add(draw), _second(draw, phrasings, str(a + b), a=a, b=b)


_PAIRS = (
    *(_same, _same, _neighbour, _neighbour, _onward, _onward, _backwards, _other_case),
    *(_turned_round, _why, _hero, _one_more_word, _one_more_opposite, _one_more_colour),
    _one_more_sum,
)


# --- what the users tell about themselves ---


@dataclass(frozen=True, slots=True)
class _Fact:
    """How it is told, what the model says, how it is asked for, the answer, and what it may be."""

    told: tuple[str, ...]
    reply: str
    asked: tuple[str, ...]
    answer: str
    any: Callable[[Random], str]


_FACTS = (
    _Fact(
        lines("""
My name is {it}.
My name is {it}.
I am {it}.
Hello, my name is {it}.
Hi, I am {it}.
Call me {it}.
"""),
        "Nice to meet you, {it}.",
        lines("""
What is my name?
What is my name?
What's my name?
Who am I?
Do you know my name?
Tell me my name.
"""),
        "Your name is {it}.",
        words.any_name,
    ),
    _Fact(
        ("I live in {it}.", "My home is in {it}.", "I live in the city of {it}."),
        "{it} is a nice place.",
        ("Where do I live?", "In which city do I live?", "Where is my home?"),
        "You live in {it}.",
        words.any_city,
    ),
    _Fact(
        ("I am {it} years old.", "My age is {it}.", "I am {it}."),
        "That is a good age.",
        ("How old am I?", "What is my age?", "Tell me my age."),
        "You are {it} years old.",
        lambda draw: str(draw.randint(5, 99)),
    ),
    _Fact(
        ("My favourite colour is {it}.", "I like {it} best.", "The colour I like best is {it}."),
        "I like {it} too.",
        ("What is my favourite colour?", "Which colour do I like best?"),
        "Your favourite colour is {it}.",
        lambda draw: draw.choice(words.COLOURS),
    ),
    _Fact(
        ("I have a {it}.", "My pet is a {it}."),
        "A {it} is a good friend.",
        ("What is my pet?", "Which animal do I have?", "Which pet do I have?"),
        "You have a {it}.",
        lambda draw: draw.choice(words.PETS),
    ),
)


def memory(draw: Random) -> list[Turn]:
    """Return a chat in which the user tells some things and asks for one, or for one that was not told."""
    untold, *facts = draw.sample(_FACTS, draw.choice((1, 2, 2, 2, 2, 2, 2, 2, 3, 3)))
    told = [(fact, fact.any(draw)) for fact in facts]
    turns = [_tell(draw, fact, it) for fact, it in told]
    before = " / ".join(turn.combination for turn in turns)
    turns += [any_turn(draw) for _ in range(draw.choice((0, 0, 1, 1, 2)))]
    asked = _ask_back(draw, untold, told)
    return [*turns, replace(asked, combination=f"{before} / {asked.combination}")]


def _ask_back(draw: Random, untold: _Fact, told: Sequence[tuple[_Fact, str]]) -> Turn:
    if not told or draw.random() < 0.06:
        return ask_in_any_case(draw, "memory", untold.asked, UNKNOWN)
    fact, it = draw.choice(told)
    return ask_in_any_case(draw, "memory", fact.asked, fact.answer.format(it=it))


def _tell(draw: Random, fact: _Fact, it: str) -> Turn:
    return ask(draw, "memory", fact.told, fact.reply.format(it=it), it=it)
