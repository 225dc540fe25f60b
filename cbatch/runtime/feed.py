"""Prompts read one by one, as slots and reader take what comes of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.runtime.mailbox import Mailbox

N_AHEAD_PER_SLOT = 4
"""Items in hand for each slot: running, waiting, and ended but not yet given out."""


class Feed:
    """Reads a source of prompts while its mailbox has room, in a thread of its own or by `fill`."""

    def __init__(
        self, source: Iterator[object], mailbox: Mailbox, put: Callable[[object], None]
    ) -> None:
        """Make one that has read nothing yet.

        Args:
            source: the prompts; it may wait, and it may use the engine.
            mailbox: of the batch; it says when there is room, and is told of the end.
            put: submits one prompt.
        """
        self._source, self._mailbox, self._put = source, mailbox, put
        self._is_reading = threading.Lock()

    def start(self) -> None:
        """Read in a thread until the source or the batch ends."""
        threading.Thread(target=self._run, name="cbatch-feed", daemon=True).start()

    def fill(self) -> None:
        """Read what there is room for now. A source that waits for its own engine is not entered again."""
        if not self._is_reading.acquire(blocking=False):
            return
        try:
            while self._mailbox.has_room():
                self._read()
        finally:
            self._is_reading.release()

    def end(self, error: BaseException) -> None:
        """Read no more, for what was read is being ended; the batch's reader gets `error` behind that."""
        self._mailbox.break_off(error)

    def _run(self) -> None:
        while self._mailbox.wait_for_room():
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
