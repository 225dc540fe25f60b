"""Admission: who waits, who gets a slot, who leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cbatch.core.driver import SequenceDriver, Status
from cbatch.errors import CBatchError, RequestFailedError
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from cbatch.core.kv import KvLedger
    from cbatch.core.plan import Slot

Tokenize = Callable[[BatchPrompt], Sequence[int]]


class MultiRequestBatcher:
    """A first-come-first-served queue in front of the slots.

    A prompt becomes tokens when its turn comes, so a long queue costs nothing; a prompt that cannot run then
    ends with its own error and the next one gets the slot.
    """

    def __init__(self, ledger: KvLedger, tokenize: Tokenize) -> None:
        self.ledger = ledger
        self.running: list[SequenceDriver | None] = [None] * ledger.n_slots
        self.in_flight: dict[str, SequenceDriver] = {}
        self.n_waiting = 0
        self._tokenize = tokenize
        self._queue: deque[SequenceDriver] = deque()
        self._ended: list[SequenceDriver] = []
        self._to_clear: list[Slot] = []

    def submit(self, driver: SequenceDriver) -> None:
        """Queue a waiting sequence; its id must not be in flight."""
        self.in_flight[driver.request.id] = driver
        self._queue.append(driver)
        self.n_waiting += 1

    def admit(self, now: float) -> list[SequenceDriver]:
        """Give every free slot to the next in line; return who got one, in order of slots."""
        admitted: list[SequenceDriver] = []
        while self.n_waiting and self.ledger.has_free_slot:
            driver = self._queue.popleft()
            if driver.status is not Status.WAITING:
                continue  # cancelled while it waited
            self.n_waiting -= 1
            if self._enter(driver, now):
                admitted.append(driver)
        return admitted

    def cancel(self, id: str, now: float) -> bool:
        """End a request by id; False where no such request is in flight."""
        driver = self.in_flight.get(id)
        if driver is None:
            return False
        if driver.status is Status.WAITING:
            self.n_waiting -= 1
        driver.cancel(now)
        self.retire(driver)
        return True

    def retire(self, driver: SequenceDriver) -> None:
        """Take a finished sequence out of the books; its cells go with the next plan."""
        del self.in_flight[driver.request.id]
        self._ended.append(driver)
        if driver.slot is not None:
            self.running[driver.slot] = None
            self.ledger.give_back(driver.slot)
            self.drop_cells(driver.slot)

    def drop_cells(self, slot: Slot) -> None:
        """Have the next plan empty a slot, whatever the books say of it: a failed step may have left more."""
        self.ledger.clear(slot)
        self._to_clear.append(slot)

    def take_clears(self) -> tuple[Slot, ...]:
        """Return the slots to empty before anything else is computed; each once."""
        clears = tuple(sorted(set(self._to_clear)))
        self._to_clear.clear()
        return clears

    def take_ended(self) -> list[SequenceDriver]:
        """Return the sequences that ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def _enter(self, driver: SequenceDriver, now: float) -> bool:
        try:
            tokens = self._tokenize(driver.request.prompt)
            driver.admit(self.ledger.next_slot, tokens, self.ledger.n_window, now)
        except CBatchError as error:
            self._refuse(driver, error, now)
            return False
        except (
            Exception
        ) as error:  # a template may raise anything: it is this request's own failure
            failure = RequestFailedError(f"the prompt could not be prepared: {error}")
            failure.__cause__ = error
            self._refuse(driver, failure, now)
            return False
        self.running[self.ledger.lend()] = driver
        return True

    def _refuse(self, driver: SequenceDriver, error: CBatchError, now: float) -> None:
        driver.finish("error", now, error)
        self.retire(driver)
