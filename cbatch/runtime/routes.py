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


def is_late(routes: Mapping[str, Route], id: str) -> bool:
    """Whether it is a choice of a request that was cancelled while this one waited for room in the queue."""
    target, _ = routes.get(id, (None, 0))
    return isinstance(target, Choices) and target.is_cancelled
