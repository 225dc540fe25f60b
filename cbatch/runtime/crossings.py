"""Declares which methods of an engine other processes may call; see `crosses`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar, cast, get_type_hints

_Method = TypeVar("_Method", bound="Callable[..., Any]")


class ElsewhereError(Exception):
    """Raised nowhere: the body of a method that is only declared."""


@dataclass(frozen=True, eq=False)
class Crossing:
    """A method that may be called over the border of a process. Everything there follows from its signature."""

    op: str
    """What the protocol calls it."""
    method: Callable[..., Any]
    waits: bool
    """Whether it may compute for long: commands after it do not wait for it."""

    @property
    def name(self) -> str:
        """The method's name."""
        return self.method.__name__

    @property
    def summary(self) -> str:
        """The first line of the method's docstring."""
        return (self.method.__doc__ or "").partition("\n")[0]

    @cached_property
    def parameters(self) -> Mapping[str, tuple[Any, Any]]:
        """Each parameter's type and default, by name; `inspect.Parameter.empty` for no default."""
        own = [*inspect.signature(self.method).parameters.values()][1:]
        return {p.name: (self._hints[p.name], p.default) for p in own}

    @property
    def result(self) -> Any:
        """The type of the result."""
        return self._hints["return"]

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self.method, include_extras=True)

    def arguments(self, *given: object, **named: object) -> dict[str, Any]:
        """Return the arguments of a call by name, defaults included."""
        bound = inspect.signature(self.method).bind(None, *given, **named)
        bound.apply_defaults()
        return {name: bound.arguments[name] for name in self.parameters}


def crosses(op: str, *, waits: bool = False) -> Callable[[_Method], _Method]:
    """Declare that a method of an engine may be called from another process, under the name `op`.

    Its parameters and its result are values that msgspec knows, prompts or options. A class that inherits the method
    puts the call to its own `put(crossing, arguments)`.
    """

    def declare(method: _Method) -> _Method:
        crossing = Crossing(op, method, waits)

        @wraps(method)
        def ask(self: Any, *given: object, **named: object) -> object:
            return self.put(crossing, crossing.arguments(*given, **named))

        ask.crossing = crossing  # type: ignore[attr-defined]
        return cast("_Method", ask)

    return declare


def crossings_of(interface: type) -> list[Crossing]:
    """Return the methods of an interface that are declared so, in their order."""
    found = (getattr(value, "crossing", None) for value in vars(interface).values())
    return [crossing for crossing in found if crossing is not None]
