"""Bindings and spans of small numbers, for a fake backend."""

from __future__ import annotations

from cbatch.core.plan import Binding, Slot
from cbatch.core.span import Span
from cbatch.options import GREEDY


def bind(slot: int = 0, n_prompt: int = 2) -> Binding:
    return Binding(Slot(slot), n_prompt, GREEDY, ())


def row(slot: int = 0, start: int = 0, n: int = 2, *, has_output: bool = True) -> Span:
    return Span(Slot(slot), start, tuple(range(1, n + 1)), has_output)
