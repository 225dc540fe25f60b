"""The items of a batch: counted, and read one by one as slots and reader have room for more."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cbatch.interrupts import HeldBack
from cbatch.progress import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cbatch.response import BatchResult
    from cbatch.runtime.mailbox import Mailbox

N_AHEAD_PER_SLOT = 4
"""Items in hand for each slot: running, waiting, and ended but not yet given out."""


class Items:
    """Counts the items of a batch, and says whether one more may be read. From any thread."""

    def __init__(self, n_items: int, n_ahead: int | None) -> None:
        """Make one of `n_items`; with `n_ahead` more may come, at most `n_ahead` of them in hand."""
        self.n_all = self.n_open = n_items
        self.is_fed = n_ahead is not None
        """Whether more items may come."""
        self.error: BaseException | None = None
        """What reading the prompts raised."""
        self._n_ahead = n_ahead or 0
        self._n_failed = self._n_cancelled = self._n_given = 0
        self._n_more_ends = 0
        """Ends to come besides one an item: a request with several choices ends once for each."""
        self._is_gathered = False
        self._changed = threading.Condition()  # held briefly, and under no handler of a signal

    @property
    def have_ended(self) -> bool:
        """Whether every item has ended and no more will come."""
        return not self.n_open and not self.is_fed

    def expect(self) -> int | None:
        """Count one more item and return its place; None where no more may come."""
        with HeldBack(), self._changed:
            if not self.is_fed:
                return None
            self.n_all += 1
            self.n_open += 1
            return self.n_all - 1

    def expect_choices(self, n: int) -> None:
        """Have one of the expected items end `n` times: once for each choice."""
        with HeldBack(), self._changed:
            self._n_more_ends += n - 1

    def end(self, results: Sequence[BatchResult]) -> None:
        """Count items that ended, behind the keeping of their results."""
        with HeldBack(), self._changed:
            for result in results:
                is_cancelled = result.finish_reason == "cancelled"
                self._n_cancelled += is_cancelled
                self._n_failed += result.error is not None and not is_cancelled
            self.n_open -= len(results)
            self._changed.notify_all()

    def end_feed(self, error: BaseException | None) -> bool:
        """Expect no more items; `error` is what reading them raised. Return False where that was known."""
        with HeldBack(), self._changed:
            if not self.is_fed:
                return False
            self.error = error
            self.is_fed = False  # last: a reader that sees it looks at the error
            self._changed.notify_all()
        return True

    def give_out(self, n_ends: int) -> None:
        """Count ends that a reader has taken: they hold up the feed no longer."""
        self._n_given += n_ends
        if self.is_fed:
            with HeldBack(), self._changed:
                self._changed.notify_all()

    def gather(self) -> None:
        """Have items that ended hold up the feed no longer, for a reader waits for all of them."""
        with HeldBack(), self._changed:
            self._is_gathered = True
            self._changed.notify_all()

    def has_room(self) -> bool:
        """Whether one more item may be read: slots and reader have work for long enough otherwise."""
        n_ends = self.n_all + self._n_more_ends
        n_held = self.n_open if self._is_gathered else n_ends - self._n_given
        return self.is_fed and n_held < self._n_ahead

    def wait_for_room(self) -> bool:
        """Wait until one more item may be read; False when no more may come."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room() or not self.is_fed)
            return self.is_fed

    def counts(self) -> Counts:
        """Return how many items there are, and how many have ended."""
        with HeldBack(), self._changed:
            n_total = None if self.is_fed else self.n_all
            n_done = self.n_all - self.n_open - self._n_cancelled
            return Counts(n_total, n_done, self._n_failed, self._n_cancelled)


class Feed:
    """Reads a source of prompts while its mailbox has room, in a thread of its own or by `fill`."""

    def __init__(
        self, source: Iterator[object], mailbox: Mailbox, put: Callable[[object], None]
    ) -> None:
        """Make one that has read nothing yet; `source` may wait and use the engine, `put` submits one prompt."""
        self._source, self._mailbox, self._put = source, mailbox, put
        self._is_reading = threading.Lock()

    def start(self) -> None:
        """Read in a thread until the source or the batch ends."""
        threading.Thread(target=self._run, name="cbatch-feed", daemon=True).start()

    def fill(self) -> None:
        """Read while there is room. A source that waits for its own engine is not entered again."""
        if not self._is_reading.acquire(blocking=False):
            return
        try:
            while self._mailbox.items.has_room():
                self._read()
        finally:
            self._is_reading.release()

    def end(self, error: BaseException) -> None:
        """Read no more, for the items in hand are being ended; the batch's reader gets `error` behind them."""
        self._mailbox.break_off(error)

    def _run(self) -> None:
        while self._mailbox.items.wait_for_room():
            self._read()

    def _read(self) -> None:
        try:
            self._put(next(self._source))
        except StopIteration:
            self._mailbox.end_feed()
        except BaseException as error:
            self._mailbox.end_feed(error)
            if not isinstance(error, Exception):  # Ctrl-C, where the reader's own thread reads here
                raise
