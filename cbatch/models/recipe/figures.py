"""Tasks with numbers and lists: count, add, subtract, sort, reverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.models.recipe import words
from cbatch.models.recipe.turns import Turn, ask, ask_in_any_case
from cbatch.models.recipe.words import lines, listed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

N_LARGEST_TERM = 20
_LARGEST_TERMS = (10, N_LARGEST_TERM, N_LARGEST_TERM)  # people ask for small sums more often
_N_LARGEST_COUNT = 60
_N_MOST_COUNTED = 30

_COUNT = lines("""
Count from {a} to {b}.
Count from {a} to {b}.
Count up from {a} to {b}.
Count the numbers from {a} to {b}.
Write the numbers from {a} to {b}.
List all numbers from {a} to {b}.
Start at {a} and count to {b}.
Say the numbers {a} to {b}.
Count {a} to {b}.
""")
_COUNT_DOWN = lines("""
Count down from {a} to {b}.
Count backwards from {a} to {b}.
Count from {a} down to {b}.
Count from {a} to {b}.
""")
_COUNT_TO = lines("""
Count to {b}.
Count up to {b}.
Count from one to {b}.
Count to {b} for me.
""")
_ADD = lines("""
What is {a} plus {b}?
What is {a} plus {b}?
What's {a} plus {b}?
{a} plus {b}
How much is {a} plus {b}?
How much is {a} and {b}?
Add {a} and {b}.
Add {b} to {a}.
Calculate {a} plus {b}.
What is the sum of {a} and {b}?
""")
_ADD_SIGN = lines("""
{a} + {b} =
{a} + {b} =
{a} + {b}
{a} + {b} = ?
{a} + {b}?
{a}+{b}=
{a}+{b}
What is {a} + {b}?
What is {a}+{b}?
Calculate {a} + {b}.
""")
_SUBTRACT = lines("""
What is {a} minus {b}?
What is {a} minus {b}?
What's {a} minus {b}?
{a} minus {b}
How much is {a} minus {b}?
Take {b} from {a}.
Subtract {b} from {a}.
Calculate {a} minus {b}.
What is {a} take away {b}?
""")
_SUBTRACT_SIGN = lines("""
{a} - {b} =
{a} - {b} =
{a} - {b}
{a} - {b} = ?
{a} - {b}?
{a}-{b}=
{a}-{b}
What is {a} - {b}?
What is {a}-{b}?
Calculate {a} - {b}.
""")
_SORT_NUMBERS = lines("""
Sort these numbers: {items}
Sort these numbers: {items}
Sort: {items}
Sort {items}.
Sort the numbers {items}.
Put these numbers in order: {items}
Order these numbers: {items}
Sort from small to large: {items}
Sort in ascending order: {items}
Sort the list {items}.
""")
_SORT_DOWN = lines("""
Sort from large to small: {items}
Sort these numbers from large to small: {items}
Sort in descending order: {items}
Sort with the largest first: {items}
""")
_SORT_WORDS = lines("""
Sort these words: {items}
Sort: {items}
Sort {items}.
Sort by the alphabet: {items}
Sort these words by the alphabet: {items}
Put these words in order: {items}
Put these words in alphabetical order: {items}
Sort the words {items}.
Sort alphabetically: {items}
""")
_REVERSE = lines("""
Reverse: {items}
Reverse this list: {items}
Reverse the list: {items}
Reverse the order: {items}
Write this list backwards: {items}
Say this backwards: {items}
Turn this list around: {items}
Say in reverse order: {items}
Reverse {items}.
Reverse the list {items}.
""")


def count(draw: Random) -> Turn:
    """Count up, up to 30 numbers; or down, up to 20."""
    kind = draw.random()
    if kind < 0.15:
        return _count(draw, _COUNT_TO, 1, draw.randint(2, _N_MOST_COUNTED))
    if kind < 0.35:
        a = draw.randint(2, _N_LARGEST_COUNT)
        return _count(draw, _COUNT_DOWN, a, draw.randint(max(0, a - 19), a - 1))
    a = draw.randint(0, _N_LARGEST_COUNT - 2)
    return _count(draw, _COUNT, a, min(_N_LARGEST_COUNT, a + draw.randint(1, _N_MOST_COUNTED - 1)))


def _count(draw: Random, phrasings: Sequence[str], a: int, b: int) -> Turn:
    numbers = range(a, b + 1) if a <= b else range(a, b - 1, -1)
    a_text, b_text = _as_typed(draw, a, b)
    return ask_in_any_case(draw, "count", phrasings, listed(numbers), a=a_text, b=b_text)


def _as_typed(draw: Random, a: int, b: int) -> tuple[str, str]:
    if max(a, b) < len(words.NUMBERS) and draw.random() < 0.4:
        return words.NUMBERS[a], words.NUMBERS[b]
    return str(a), str(b)


def add(draw: Random) -> Turn:
    """Add two numbers, each at most 20."""
    largest = draw.choice(_LARGEST_TERMS)
    a, b = draw.randint(0, largest), draw.randint(0, largest)
    if draw.random() < 0.5:
        return ask(draw, "add", _ADD_SIGN, str(a + b), a=a, b=b)
    a_text, b_text = _as_typed(draw, a, b)
    return ask_in_any_case(draw, "add", _ADD, str(a + b), a=a_text, b=b_text)


def subtract(draw: Random) -> Turn:
    """Subtract from a number of at most 20 one that is not larger."""
    a = draw.randint(0, draw.choice(_LARGEST_TERMS))
    b = draw.randint(0, a)
    if draw.random() < 0.5:
        return ask(draw, "subtract", _SUBTRACT_SIGN, str(a - b), a=a, b=b)
    a_text, b_text = _as_typed(draw, a, b)
    return ask_in_any_case(draw, "subtract", _SUBTRACT, str(a - b), a=a_text, b=b_text)


def sort(draw: Random) -> Turn:
    """Sort three to five numbers, or three or four words."""
    if draw.random() < 0.4:
        chosen = draw.sample(words.SORTABLE, draw.randint(3, 4))
        return ask(draw, "sort", _SORT_WORDS, listed(sorted(chosen)), items=listed(chosen))
    largest = draw.choice((9, 20, 99))
    numbers = draw.sample(range(largest + 1), draw.randint(3, 5))
    if draw.random() < 0.25:
        answer = listed(sorted(numbers, reverse=True))
        return ask_in_any_case(draw, "sort", _SORT_DOWN, answer, items=listed(numbers))
    answer = listed(sorted(numbers))
    return ask_in_any_case(draw, "sort", _SORT_NUMBERS, answer, items=listed(numbers))


def reverse(draw: Random) -> Turn:
    """Reverse a list of three to five words, numbers or letters."""
    kind, n = draw.random(), draw.randint(3, 5)
    items: list[str] = draw.sample(words.PLAIN, n)
    if kind < 0.3:
        items = [str(number) for number in draw.sample(range(100), n)]
    elif kind < 0.45:
        items = draw.sample("abcdefghijklmnopqrstuvwxyz", n)
    return ask(draw, "reverse", _REVERSE, listed(items[::-1]), items=listed(items))
