"""The tasks of one question that are graded by equality."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.models.recipe.copying import lower, repeat, say, upper
from cbatch.models.recipe.facts import colours, days, greet, months, opposites, unknown
from cbatch.models.recipe.figures import add, count, reverse, sort, subtract
from cbatch.models.recipe.reading import mood

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from cbatch.models.recipe.turns import Turn

SINGLE: dict[str, Callable[[Random], Turn]] = {
    "say": say,
    "repeat": repeat,
    "count": count,
    "add": add,
    "subtract": subtract,
    "days": days,
    "months": months,
    "colours": colours,
    "opposites": opposites,
    "sort": sort,
    "reverse": reverse,
    "upper": upper,
    "lower": lower,
    "mood": mood,
    "greet": greet,
    "unknown": unknown,
}
"""Each task's name and what draws a turn of it."""
