"""Where the output of each request in flight goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from cbatch.runtime.choices import Choices, mailbox_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbatch.runtime.mailbox import Mailbox

Route: TypeAlias = "tuple[Mailbox | Choices, int]"
"""Where a request's output goes, and its place there; −1 for an id that stands for several choices."""


def drop(routes: dict[str, Route], gone: Mapping[str, Route]) -> None:
    """Take out the routes of requests that were not submitted, but for ids that others have by now."""
    for id, route in gone.items():
        if routes.get(id) is route:
            del routes[id]


def ids_of(routes: Mapping[str, Route], mailbox: Mailbox) -> list[str]:
    """Return the ids of what a batch has in flight."""
    return [id for id, (box, _) in list(routes.items()) if mailbox_of(box) is mailbox]


def member_ids(routes: Mapping[str, Route], id: str) -> list[str]:
    """Return the ids of the sequences that answer a request."""
    target, place = routes[id]
    return target.member_ids if isinstance(target, Choices) and place < 0 else [id]


def choices_of(routes: Mapping[str, Route], id: str) -> Choices | None:
    """Return what gathers the choices of a request, or None where it has one."""
    target, _ = routes.get(id, (None, 0))
    return target if isinstance(target, Choices) else None
