"""How many examples the tests with random ones have: `full`, as CI runs them, and `fast`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("full", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=5)


def load(name: str) -> None:
    """Have every test of random examples run under a profile, before it is imported."""
    settings.load_profile(name)


def examples(n: int) -> int:
    """`n` in the profile `full`, a tenth of it in `fast`."""
    is_fast = settings.get_current_profile_name() == "fast"
    return max(3, n // 10) if is_fast else n
