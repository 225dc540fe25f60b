"""Short stories: the animal gives the hero and the place gives the plot, so that a story can be learned.

A story is a function of the animal, the place, the hero's name and the length asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cbatch.models.recipe import words
from cbatch.models.recipe.cast import ANIMALS, PLACES, STRANGER, STRANGERS, Animal, Stage
from cbatch.models.recipe.turns import Turn, ask_in_any_case, combination
from cbatch.models.recipe.words import lines

if TYPE_CHECKING:
    from random import Random

N_LEAST_WORDS, N_MOST_WORDS = 45, 160


@dataclass(frozen=True, slots=True)
class Plot:
    """What happens: sentences for every length, and some that only longer stories have."""

    opening: str
    trouble: str
    more_trouble: str
    rescue: str
    more_rescue: str
    end: str
    more_end: str


PLOTS = {
    "lost": Plot(
        "Once upon a time there was {a_nature} {animal} called {name}. {name} lived {where}.",
        "One evening {name} met {friend} who did not know the way home.",
        "It was getting dark, and both were afraid. They tried one way and then another, but every way was wrong.",
        "Then {name} {deed}, and soon they found {thing}.",
        "They went on together and told each other jokes, so the way did not seem long.",
        "From there it was easy to get home, and they were friends from that day on.",
        "Since then {name} looks out every evening, in case someone needs help.",
    ),
    "thirst": Plot(
        "There was once {a_nature} {animal} who lived {where}. Its name was {name}.",
        "No rain had come for a long time. One morning {name} met {friend} who could not go on without water.",
        "They looked to the left and to the right, but everything was dry. The day grew hotter and hotter.",
        "But {name} did not give up. The {animal} {deed}, and there it was: {thing}.",
        "They drank and drank, and then they called all the others to drink too.",
        "Nobody was thirsty any more, and everyone thanked {name}.",
        "A few days later the rain came at last, and they danced in it until night.",
    ),
    "storm": Plot(
        "{name} was {a_nature} {animal} and lived {where}.",
        "One day a great storm came. {name} heard a weak voice: it was {friend} who needed help.",
        "The wind was so loud that they could not hear each other. There was no time to lose.",
        "{name} was afraid, but the {animal} {deed} and brought them both to {thing}.",
        "There they waited, close together, and {name} told a story to pass the time.",
        "In the morning the sun came out, and the storm was over. They laughed and ate breakfast together.",
        "They never forgot that night, and they met again every year.",
    ),
    "treasure": Plot(
        "Once upon a time {a_nature} {animal} lived {where}. Everyone called it {name}.",
        "One day {name} met {friend} who had looked for a treasure for many years.",
        "There was an old map, but half of it was missing. They looked high and low and found nothing at all.",
        "Then the {animal} {deed}, and suddenly they saw {thing}.",
        "It was more beautiful than all they had seen before, and they looked at it for a long time.",
        "They kept it together, but the best treasure of all was a new friend.",
        "Many came to see it, and {name} told each of them how it was found.",
    ),
    "race": Plot(
        "There was once {a_nature} {animal} called {name} who lived {where}.",
        "One day {name} met {friend} who liked to win. So they ran a race to {thing}.",
        "All the others came to watch. At first {name} was far behind, and some began to laugh.",
        "But {name} did not give up. The {animal} {deed} and was there first.",
        "Nobody had thought that this could happen, and everyone cheered.",
        "The other one said well done, and after that they always played together.",
        "Every summer there is a race now, and it does not matter who wins.",
    ),
    "song": Plot(
        "Once upon a time there was {a_nature} {animal} who lived {where}. Its name was {name}.",
        "One day {name} met {friend} who never smiled. Nobody knew why.",
        "Some told jokes and some brought cake, but nothing helped. It was very quiet in those days.",
        "So the {animal} {deed}, and when everyone looked, {name} began to sing in the middle of {thing}.",
        "One after another came and sang along, the old and the young.",
        "At last there was a smile, and they danced until late at night.",
        "Since then there is music every Sunday, and {name} sings the first song.",
    ),
    "gift": Plot(
        "{name} was {a_nature} {animal} who lived {where}.",
        "One day {name} saw {friend} sitting alone and looking sad. It was a birthday, but nobody had thought of it.",
        "There was no cake and no song. Only a fly came to say hello.",
        "{name} wanted to help. The {animal} {deed} and came back with {thing}.",
        "It was wrapped in a green leaf and smelled of summer.",
        "It was only a small gift, but it was the best one of all.",
        "The next year there was a big party, and {name} got the first piece of cake.",
    ),
}

LENGTHS = ("very short", "short", "long")
"""The lengths that can be asked for."""

_OF_BOTH = lines("""
Tell me a {length}story about {animal} {where}.
Tell me a {length}story about {animal} {where}.
Tell me a {length}story about {animal} {where}.
Tell a {length}story about {animal} {where}.
Write a {length}story about {animal} {where}.
Write me a {length}story about {animal} {where}.
I want a {length}story about {animal} {where}.
I would like a {length}story about {animal} {where}.
Make up a {length}story about {animal} {where}.
Give me a {length}story of {animal} {where}.
Tell me about {animal} {where} in a {length}story.
A {length}story about {animal} {where}
""")
_OF_ANIMAL = lines("""
Tell me a {length}story about {animal}.
Tell me a {length}story about {animal}.
Tell a {length}story about {animal}.
Write a {length}story about {animal}.
I want a {length}story about {animal}.
Tell me about {animal} in a {length}story.
""")
_OF_PLACE = lines("""
Tell me a {length}story that happens {where}.
Tell me a {length}story {where}.
Write a {length}story that happens {where}.
I want a {length}story that happens {where}.
""")
_OF_NOTHING = lines("""
Tell me a {length}story.
Tell me a {length}story.
Write a {length}story.
I want to hear a {length}story.
Do you know a {length}story?
""")


@dataclass(frozen=True, slots=True)
class Wish:
    """The story that is asked for; no name and no length mean the usual ones.

    Args:
        animal: a key of `ANIMALS`, or another kind.
        place: a key of `PLACES`, or a town.
        length: one of `LENGTHS`, or nothing.
        name: the hero's, or nothing.
        phrasings: how it may be asked for; some leave the animal or the place to the model.
    """

    animal: str
    place: str
    length: str = ""
    name: str = ""
    phrasings: tuple[str, ...] = _OF_BOTH

    @property
    def hero(self) -> Animal:
        """The animal, and the name that was wished for."""
        usual = ANIMALS.get(self.animal, STRANGER)
        return replace(usual, name=self.name or usual.name)

    @property
    def stage(self) -> Stage:
        """The place; every town is like the city."""
        town = replace(PLACES["city"], where=f"in {self.place}")
        return PLACES.get(self.place, town)


def story(draw: Random) -> Turn:
    """Ask for a story about an animal in a place; now and then one of them is left to the model."""
    return ask_for(draw, any_wish(draw))


def any_wish(draw: Random) -> Wish:
    """Return a wish for a story."""
    animal, place = draw.choice(tuple(ANIMALS)), draw.choice(tuple(PLACES))
    length = draw.choice(("", "", "", "short", "short", "short", "very short", "long", "long"))
    kind = draw.random()
    if kind < 0.03:
        return Wish("fox", "forest", length, phrasings=_OF_NOTHING)
    if kind < 0.07:
        return Wish(guest(place), place, length, phrasings=_OF_PLACE)
    name = words.any_name(draw) if draw.random() < 0.15 else ""
    if kind < 0.16:
        return Wish(animal, ANIMALS[animal].home, length, name, _OF_ANIMAL)
    if kind < 0.23:
        return _strange(draw, Wish(animal, place, length, name))
    return Wish(animal, place, length, name)


def _strange(draw: Random, wish: Wish) -> Wish:
    """Return the wish with an animal or a place that no story is about."""
    if draw.random() < 0.4:
        return replace(wish, place=draw.choice(words.CITIES))
    return replace(wish, animal=draw.choice((*STRANGERS, words.made_up_word(draw))))


def ask_for(draw: Random, wish: Wish) -> Turn:
    """Return the question for this story, and the story."""
    return ask_in_any_case(draw, "story", wish.phrasings, tell(wish), **_wording(wish))


def ask_plainly(wish: Wish) -> Turn:
    """Return the question for this story in the usual words, and the story."""
    question = wish.phrasings[0].format(**_wording(wish))
    return Turn("story", question, tell(wish), combination(question))


def _wording(wish: Wish) -> dict[str, str]:
    called = f" called {wish.name}" if wish.name else ""
    return {
        "length": f"{wish.length} " if wish.length else "",
        "animal": words.with_article(wish.animal) + called,
        "where": wish.stage.where,
    }


def guest(place: str) -> str:
    """Return the first animal that is at home in the place, else a fox."""
    return next((animal for animal, about in ANIMALS.items() if about.home == place), "fox")


def tell(wish: Wish) -> str:
    """Return the story that is wished for."""
    hero, stage = wish.hero, wish.stage
    parts = _parts(PLOTS[stage.plot], stage.sight, wish.length)
    return " ".join(parts).format(
        name=hero.name,
        animal=wish.animal,
        a_nature=words.with_article(hero.nature),
        deed=hero.deed,
        where=stage.where,
        friend=stage.friend,
        thing=stage.thing,
    )


def _parts(plot: Plot, sight: str, length: str) -> tuple[str, ...]:
    start = (plot.opening, sight, plot.trouble)
    if length == "very short":
        return plot.opening, plot.trouble, plot.rescue, plot.end
    if length == "short":
        return *start, plot.rescue, plot.end
    if length != "long":
        return *start, plot.more_trouble, plot.rescue, plot.end
    return *start, plot.more_trouble, plot.rescue, plot.more_rescue, plot.end, plot.more_end


def is_story_of(question: str, answer: str) -> bool:
    """Return whether the answer is a story with what the question names, of a fitting length."""
    asked, told = f" {_letters(question)} ", f" {_letters(answer)} "
    known = (*ANIMALS, *STRANGERS, *PLACES, *map(str.lower, words.CITIES))
    named = [thing for thing in known if f" {thing} " in asked]
    n_words = len(answer.split())
    return (
        all(f" {thing} " in told for thing in named)
        and answer.endswith(".")
        and N_LEAST_WORDS <= n_words <= N_MOST_WORDS
    )


def _letters(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())
