"""Which request has which slot, which has the next turn, and which may be continued."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch.response import BatchResult


@dataclass(eq=False, slots=True)
class SlotRequest:
    """One request from its START to its end. It is paused while no token is due."""

    id: int
    slot: int
    epoch: int
    key: str
    """What the machine calls it: no other request ever has the same, so that late output finds nobody."""
    n_prompt: int
    n_total: int
    quantum: int | None
    """Tokens of a turn; None for one that runs to its end."""
    n_emitted: int = 0
    n_due: int = 0
    """Tokens that the turn may still bring; 0 while it is paused."""
    n_skip: int = 0
    """Tokens to come that were given out before it was continued."""
    n_more: int = 0
    """Tokens of the turn beyond those that are due: the machine pauses in the middle of a long one."""
    n_owed: int = 0
    """Frames for refused lines that come after the turn."""
    tokens: array[int] = field(default_factory=partial(array, "i"))
    """Of prompt and output so far."""
    is_in_prompt: bool = True
    """Whether it has brought nothing yet, for its prompt is being computed."""
    later: deque[int] = field(default_factory=deque)
    """Turns that were asked for while one ran."""

    @property
    def n_left(self) -> int:
        """Tokens that may still come."""
        return self.n_total - self.n_emitted

    @property
    def position(self) -> int:
        """Tokens of prompt and output so far."""
        return self.n_prompt + self.n_emitted


class SlotTable:
    """The slots with their active requests and their epochs, and a cursor that goes round over them."""

    def __init__(self, n_slots: int) -> None:
        self.owners: list[SlotRequest | None] = [None] * n_slots
        """The active request of each slot."""
        self.epochs = [0] * n_slots
        """How many requests have ended in each slot."""
        self._cursor = 0
        """The slot that the next turn is looked for from."""
        self.kept: dict[int, tuple[SlotRequest, BatchResult]] = {}
        """By id: requests to go on from, which ended by their total and whose slots have had no other since."""
        self._tokens: list[array[int] | None] = [None] * n_slots
        """Of the last request in each slot."""
        self.snapshots: dict[int, array[int]] = {}
        """Beginnings of prompts that clients have named, by number."""

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def active(self) -> list[SlotRequest]:
        """The active requests, by slot."""
        return [request for request in self.owners if request is not None]

    def find(self, id: int) -> SlotRequest | None:
        """Return the active request with this id."""
        return next((request for request in self.active if request.id == id), None)

    def first_free(self) -> int | None:
        """Return the lowest slot that is free."""
        return next((i for i, owner in enumerate(self.owners) if owner is None), None)

    def enter(self, request: SlotRequest) -> None:
        """Give a request its slot."""
        self.owners[request.slot] = request
        self._tokens[request.slot] = request.tokens
        self.kept = {
            id: found
            for id, found in self.kept.items()
            if id != request.id and found[0].slot != request.slot
        }

    def leave(self, request: SlotRequest) -> None:
        """Free a request's slot."""
        self.owners[request.slot] = None
        self.epochs[request.slot] += 1

    def snapshot(self, slot: int, number: int) -> int | None:
        """Keep a copy of the tokens of a slot's last request; return how many, None where the slot has had none."""
        tokens = self._tokens[slot]
        if tokens is None:
            return None
        self.snapshots[number] = tokens[:]
        return len(tokens)

    # ---- turns ----

    def in_turn(self) -> list[SlotRequest]:
        """Return the paused requests from the cursor on."""
        owners = self.owners[self._cursor :] + self.owners[: self._cursor]
        return [r for r in owners if r is not None and r.quantum and not r.n_due]

    def pass_on(self, last: SlotRequest) -> None:
        """Let the next turn be that of a slot after this request's."""
        self._cursor = (last.slot + 1) % len(self.owners)

    # ---- as text ----

    def slots_said(self) -> str:
        """Return each slot as slot:id:tokens:epoch, with - for no request."""
        return " ".join(
            f"{i}:{request.id}:{request.position}:{epoch}" if request else f"{i}:-:0:{epoch}"
            for i, (request, epoch) in enumerate(zip(self.owners, self.epochs, strict=True))
        )

    def requests_said(self) -> str:
        """Return each active request as id:slot:left:emitted:quantum:epoch."""
        return " ".join(
            f"{r.id}:{r.slot}:{r.n_left}:{r.n_emitted}:{r.quantum or 0}:{r.epoch}"
            for r in self.active
        )
