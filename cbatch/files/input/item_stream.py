"""The input of a run: opened, copied where it has to be, looked into before a model is loaded."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from itertools import chain, islice
from queue import Empty, Queue
from typing import TYPE_CHECKING

from cbatch.files.input.item import ItemError
from cbatch.files.input.source import open_source
from cbatch.files.input.spool import Spool, checked, refusal_of
from cbatch.files.window import MAX_CHARS, length
from cbatch.messages import LookAhead
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path
    from typing import TypeAlias

    from cbatch.files.input.item import Item
    from cbatch.files.settings import FileOptions
    from cbatch.messages import BatchPrompt

    Paths: TypeAlias = "str | Path | Sequence[str | Path]"

N_LOOKED_AHEAD = 1024
"""Items that are read before a model is loaded, for windows to be made to their measure: as many as `load` looks at."""

N_ARRIVED = 64
"""Items of a pipe that are read before they are asked for, at most: our choice."""

SOON_S = 0.5
"""Our choice: less than a model takes to load, more than a file takes to come through a pipe."""

PATIENCE_S = 1.0
"""Our choice: for a thread that reads what is no file of the system's, and cannot be told to stop."""


class Arrivals:
    """Items of a pipe, read by a thread of its own: who takes them knows whether the next one is there."""

    def __init__(self, items: Iterator[Item]) -> None:
        """Make one that begins to read when the first item is asked for."""
        self.has_ended = False
        """Whether `soon` has given out all of them."""
        self._items = items
        self._came: Queue[Item | BaseException | None] = Queue(N_ARRIVED)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_dry(self) -> bool:
        """Whether the next item has not come yet."""
        return self._came.empty()

    def soon(self, n_most: int) -> Iterator[Item]:
        """Wait for the first one, and a little while for others."""
        ends_s = None
        with suppress(Empty):
            for _ in range(n_most):
                left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
                item = self._next(left_s)
                if item is None:
                    self.has_ended = True
                    return
                ends_s = ends_s or time.monotonic() + SOON_S
                yield item

    def __iter__(self) -> Iterator[Item]:
        """Yield those that are left."""
        while item := self._next(None):
            yield item

    def close(self) -> None:
        """Let the thread end, which must not wait for the pipe any more."""
        self._is_closed = True
        with suppress(Empty):
            while True:
                self._came.get_nowait()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)

    def _next(self, timeout_s: float | None) -> Item | None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="cbatch-pipe", daemon=True)
            self._thread.start()
        item = self._came.get(timeout=timeout_s)
        if item is None or isinstance(item, BaseException):
            self._came.put(item)  # for who asks next
        if isinstance(item, BaseException):
            raise item
        return item

    def _read(self) -> None:
        end: BaseException | None = None
        try:
            for item in self._items:
                self._came.put(item)
                if self._is_closed:
                    break
        except BaseException as error:
            end = error
        self._came.put(end)


class Reading:
    """The items of an input, in the order in which they are to be read, once.

    Attributes:
        source: where they come from.
        items: all of them.
    """

    def __init__(self, paths: Paths, options: FileOptions, without: Collection[str] = ()) -> None:
        """Open the input; where it is to be strict or shuffled, read it whole into a temporary file.

        Args:
            paths: of the input.
            options: say how it is read.
            without: real paths of what no pattern is to find: the files of the run.

        Raises:
            ConfigError: it cannot be read; where it is to be strict, the first item that is wrong.
        """
        self.source = open_source(
            paths,
            format=options.format,
            template=options.template,
            system=options.system,
            is_raw=options.is_raw,
            without=without,
        )
        self._spool: Spool | None = None
        self._n_read = self._n_looked = 0
        self._has_ended = False
        self._arrivals: Arrivals | None = None
        try:
            self.items: Iterator[Item] = iter(self._ordered(options))
        except BaseException:
            self.source.close()
            raise

    def _ordered(self, options: FileOptions) -> Iterator[Item]:
        if not options.strict and not options.shuffle:
            if self.source.n_bytes is not None:
                return self._counted()
            self._arrivals = Arrivals(self._counted())
            return iter(self._arrivals)
        self._spool = Spool(checked(self.source) if options.strict else self.source)
        if options.shuffle:
            self._spool.shuffle(options.shuffle_seed)
        return iter(self._spool)

    def _counted(self) -> Iterator[Item]:
        for item in self.source:
            self._n_read += 1
            yield item

    def check(self, why: Callable[[Item], ItemError | int]) -> None:
        """Stop at the first item, of an input that is checked whole, for which `why` finds an error.

        Raises:
            ConfigError: which one, and why.
        """
        for item in self._spool.as_read() if self._spool is not None else ():
            if isinstance(error := why(item), ItemError):
                raise refusal_of(item, error)

    @property
    def n_items(self) -> int | None:
        """How many there are, where it was read whole."""
        return None if self._spool is None else len(self._spool)

    @property
    def is_piped(self) -> bool:
        """Whether reading may have to wait for somebody to write."""
        return self._arrivals is not None

    def is_dry(self) -> bool:
        """Return whether the next item has not come yet, so that reading on may take long."""
        return self._arrivals is not None and self._arrivals.is_dry

    def look_ahead(self, defaults: RunOptions, n_most: int = N_LOOKED_AHEAD) -> LookAhead | None:
        """Return what comes first, with the options that hold for it; it stays in `items`.

        Of a pipe that is what comes at once: who writes there may wait for the first answers.
        """
        first = self._look(n_most)
        prompts = [item.prompt for item in first if item.prompt is not None]
        return ahead_of(prompts, defaults, is_all=self._has_ended)

    @property
    def is_at_hand(self) -> bool:
        """Whether `peek` need not wait for somebody to write."""
        return not self.is_piped or self._n_looked > 0

    def peek(self) -> list[Item]:
        """Return the items that were looked at, else what comes first, of a pipe one item; they stay in `items`."""
        if not self._n_looked:
            return self._look(1 if self.is_piped else N_LOOKED_AHEAD)
        first = list(islice(self.items, self._n_looked))
        self.items = chain(first, self.items)
        return first

    def _look(self, n_most: int) -> list[Item]:
        first = list(self._first(n_most))
        self._n_looked = len(first)
        self.items = chain(first, self.items)
        return first

    def _first(self, n_most: int) -> Iterator[Item]:
        """Yield so many items, fewer where they are long; note whether these were all."""
        n_chars = 0
        items = self.items if self._arrivals is None else self._arrivals.soon(n_most)
        for n, item in enumerate(items, 1):
            yield item
            n_chars += length(item.prompt, RunOptions()) if item.prompt else 0
            if n >= n_most or n_chars > MAX_CHARS:
                return
        self._has_ended = self._arrivals is None or self._arrivals.has_ended

    def about(self) -> int | None:
        """Return about how many items there are, by the bytes of those that were read; None where nobody knows."""
        n_bytes, n_read = self.source.n_bytes, self.source.n_bytes_read
        if self.n_items is not None or not n_bytes or not n_read:
            return self.n_items
        return round(self._n_read * n_bytes / n_read)

    def close(self) -> None:
        """Close the input."""
        if self._arrivals is not None:
            self.source.stop()
            self._arrivals.close()
        self.source.close()
        if self._spool is not None:
            self._spool.close()


def ahead_of(
    prompts: Sequence[BatchPrompt], defaults: RunOptions, *, is_all: bool
) -> LookAhead | None:
    """Return prompts with the options that hold for each; None where there is no prompt."""
    pairs = [(prompt, RunOptions.of(prompt.options).over(defaults)) for prompt in prompts]
    return LookAhead(pairs, is_all=is_all) if pairs else None
