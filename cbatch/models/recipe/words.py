"""The words of the model's little world, and made-up ones for what is outside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random


def split(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


def lines(text: str) -> tuple[str, ...]:
    """Return the lines of a text that are not empty."""
    return tuple(line for line in text.splitlines() if line)


COLOURS = split("red blue green yellow black white brown pink orange purple grey gold")
NAMES = split(
    "Ada Tom Anna Ben Clara David Emma Felix Grace Hugo Ida Jack Kate Leo Mia Nina Oscar Paul Rosa Sam "
    "Tara Uma Victor Wendy Zoe Alice Bob Carl Dora Eva Frank Gina Henry Iris John Lena Mark Nora Otto Peter"
)
CITIES = split(
    "Rome Paris London Berlin Madrid Vienna Oslo Tokyo Cairo Lima Boston Dublin Prague Athens Delhi "
    "Bern Seoul Lisbon Sydney Toronto Warsaw Milan Chicago Havana Hamburg"
)
COUNTRIES = split(
    "France Spain Italy Germany Japan China India Brazil Egypt Peru Canada Mexico Norway Poland Greece "
    "Turkey Chile Kenya Cuba Ireland"
)
JOBS = split("baker teacher farmer doctor painter driver singer writer nurse cook judge sailor")
FOODS = split(
    "apple banana lemon bread cheese cake soup rice honey egg pear tomato carrot potato milk tea "
    "butter salad pizza cherry"
)
OBJECTS = split(
    "lamp chair table book bag hat coat shoe cup plate box ball clock phone bike car boat ring "
    "pen key door window bed mirror drum kite basket bottle pillow umbrella"
)
NATURE = split("sun moon star rain snow wind tree flower stone river cloud leaf fire water")
ADJECTIVES = split(
    "small big old young happy sad quick slow quiet loud kind brave clever tired hungry warm cold"
)
PETS = split("dog cat bird fish horse mouse rabbit duck goat frog")
DAYS = split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = split(
    "January February March April May June July August September October November December"
)
NUMBERS = split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)

PLAIN = COLOURS + FOODS + OBJECTS + NATURE
"""Common nouns and colours, for tasks in which any word will do."""

SORTABLE = split(
    "apple ball cat dog egg fox gold hat ice jam king lamp moon nest owl pen queen rain sun tree "
    "water yellow zebra bread cake door fire green honey kite lion milk night orange plate river "
    "stone table window bird car fish goat house lemon mouse pear rose ship tiger wolf bear duck "
    "frog horse leaf ring snow wind"
)
"""The words that are put into alphabetical order: few enough for every pair to be learned."""

OPPOSITES = tuple(
    pair.split("/")
    for pair in split(
        "hot/cold big/small up/down day/night happy/sad fast/slow open/closed full/empty high/low "
        "long/short light/dark old/young rich/poor strong/weak wet/dry hard/soft early/late left/right "
        "loud/quiet clean/dirty good/bad in/out yes/no black/white first/last near/far true/false "
        "thick/thin wide/narrow sweet/bitter win/lose push/pull start/stop love/hate buy/sell give/take "
        "come/go over/under before/after always/never north/south east/west friend/enemy question/answer"
    )
)

COLOUR_OF = dict(
    line.split(": ")
    for line in lines("""
the sky: blue
the sea: blue
grass: green
a leaf: green
a frog: green
snow: white
milk: white
a swan: white
coal: black
the night: black
a raven: black
a banana: yellow
a lemon: yellow
the sun: yellow
a tomato: red
blood: red
a cherry: red
fire: red
a carrot: orange
a pumpkin: orange
chocolate: brown
wood: brown
a bear: brown
coffee: brown
a flamingo: pink
a pig: pink
a mouse: grey
an elephant: grey
a plum: purple
a grape: purple
a crown: gold
""")
)

MIXED = {
    ("red", "blue"): "purple",
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
    ("red", "green"): "brown",
}

_STARTS = split("b d f g k l m n p r s t v z br dr fl gr kl pl st tr sh")
_VOWELS = split("a e i o u a e o")
_ENDS = split("n l r s t m k x nd rt")


def with_article(noun: str) -> str:
    """Return the noun with a or an."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def joined(items: Sequence[str]) -> str:
    """Return the items as people write them: with commas, and the last with "and"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def listed(items: Sequence[object]) -> str:
    """Return the items with commas between them."""
    return ", ".join(str(item) for item in items)


def made_up_word(draw: Random, n_syllables: int = 2) -> str:
    """Return a word that can be spoken and means nothing."""
    syllables = [draw.choice(_STARTS) + draw.choice(_VOWELS) for _ in range(n_syllables)]
    return "".join(syllables) + (draw.choice(_ENDS) if draw.random() < 0.5 else "")


def any_name(draw: Random) -> str:
    """Return a name, one in three made up."""
    return draw.choice(NAMES) if draw.random() < 0.67 else made_up_word(draw).capitalize()


def any_city(draw: Random) -> str:
    """Return a city, one in four made up."""
    return draw.choice(CITIES) if draw.random() < 0.75 else made_up_word(draw).capitalize()
