"""Ids of requests: an automatic id is never used again, and a handed-out id means one request for ever."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import count
from typing import Any

from cbatch.errors import DuplicateIdError


class RequestId(str):
    """The id of one request, as text like any other.

    Each request has an id object of its own, which tells it from a later request with an equal id. A copy is the
    object itself; a pickled, encoded or sliced id is text alone.
    """

    __slots__ = ()

    def __copy__(self) -> RequestId:
        """Return itself: it cannot change."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> RequestId:
        """Return itself, as a tuple of text would."""
        return self

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        """Be text alone in another process."""
        return str, (str(self),)


def own_id(text: str) -> RequestId:
    """Return the id of a new request with a text that its caller chose, and that earlier requests may have had."""
    return RequestId(str.__str__(text))  # an enumeration shows as another text than it is equal to


def is_meant(id: Any, request_id: str) -> bool:
    """Whether a caller's id means the request that has an equal one now: text does, another request's id does not."""
    return id is request_id or not isinstance(id, RequestId)


def check_own(ids: Sequence[str | None], taken: Container[str]) -> set[str]:
    """Return the ids that callers gave; a `DuplicateIdError` where one occurs twice or is in `taken`."""
    seen: set[str] = set()
    for id in ids:
        if id is None:
            continue
        if id in seen or id in taken:
            raise DuplicateIdError(id)
        seen.add(id)
    return seen


class Ids:
    """Gives requests their ids, from one thread at a time; each takes a number, so a first batch has its places."""

    def __init__(self) -> None:
        self._numbers = count()

    def automatic(self, *taken: Container[str]) -> RequestId:
        """Return a number that no request of this engine has had and that is in none of `taken`."""
        names = map(str, self._numbers)
        return RequestId(next(n for n in names if not any(n in ids for ids in taken)))

    def of_batch(self, own: Sequence[str | None], taken: Container[str]) -> list[RequestId]:
        """Return the ids of a batch: chosen ones, and automatic ones for None. Raises as `check_own`."""
        given = check_own(own, taken)
        return [self._of(id, given, taken) for id in own]

    def _of(self, own: str | None, given: Container[str], taken: Container[str]) -> RequestId:
        if own is None:
            return self.automatic(given, taken)
        next(self._numbers)
        return own_id(own)
