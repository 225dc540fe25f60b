"""How much the tests with many cases try: `full`, as CI runs them, `fast`, and `nightly`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

Case = TypeVar("Case")

settings.register_profile("nightly", deadline=None)
settings.register_profile("full", deadline=None, max_examples=40)
settings.register_profile("fast", deadline=None, max_examples=5)

PARTS = {"nightly": 1, "full": 3, "fast": 30}
"""Of how many random examples, or lines of code to be struck at, a profile tries one; examples differ in each run."""


def load(name: str) -> None:
    """Choose the profile, before a test is imported."""
    settings.load_profile(name)


def is_fast() -> bool:
    """Whether the profile is `fast`."""
    return settings.get_current_profile_name() == "fast"


def examples(n: int) -> int:
    """Return `n` in the profile `nightly`, a third of it in `full`, a thirtieth in `fast`."""
    return max(2, n // _part())


def lines_apart(n: int) -> int:
    """Return how many lines or steps after another something strikes: `n` in `nightly`, more in `full` and `fast`."""
    return n * min(_part(), 4)


def _part() -> int:
    return PARTS.get(settings.get_current_profile_name(), 1)


def some(cases: Sequence[Case], n: int = 2) -> Sequence[Case]:
    """Return all cases in the profile `full`, in `fast` only `n` of them."""
    return spread(cases, n) if is_fast() else cases


def spread(cases: Sequence[Case], n: int) -> Sequence[Case]:
    """Return `n` of the cases, from the first to the last; all where there are no more."""
    if len(cases) <= n:
        return cases
    return [cases[i * (len(cases) - 1) // max(1, n - 1)] for i in range(n)]
