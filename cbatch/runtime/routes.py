"""Where the output of each request in flight goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cbatch.runtime.choices import Choices, mailbox_of
from cbatch.runtime.ids import is_meant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbatch.runtime.mailbox import Mailbox


class Route(NamedTuple):
    """Where a request's output goes; the object stands for this request, also where its id comes again."""

    target: Mailbox | Choices
    place: int
    """Its place there; −1 for an id that stands for several choices."""
    id: str
    """As it was handed out."""


def find(routes: Mapping[str, Route], id: str) -> Route | None:
    """Return the route of the request that a caller means; None where it is not in flight."""
    route = routes.get(id)
    return route if route is not None and is_meant(id, route.id) else None


def drop(routes: dict[str, Route], gone: Mapping[str, Route]) -> None:
    """Take out the routes of requests that were not submitted, but for ids that others have by now."""
    for id, route in gone.items():
        if routes.get(id) is route:
            del routes[id]


def ids_of(routes: Mapping[str, Route], mailbox: Mailbox) -> list[str]:
    """Return the ids of what a batch has in flight."""
    return [id for id, route in list(routes.items()) if mailbox_of(route.target) is mailbox]


def member_ids(routes: Mapping[str, Route], id: str) -> list[str]:
    """Return the ids of the sequences that answer a request."""
    target, place, _ = routes[id]
    return target.member_ids if isinstance(target, Choices) and place < 0 else [id]
