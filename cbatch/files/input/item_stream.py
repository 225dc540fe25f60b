"""The items of a run in their order: of files or a pipe, copied to disk first where the order needs it."""

from __future__ import annotations

import pickle
import random
import tempfile
import time
from array import array
from collections import deque
from contextlib import closing, suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, TypeAlias, cast

from cbatch.errors import ConfigError
from cbatch.files.input.item import Item, ItemError, Seen
from cbatch.files.input.source import open_source
from cbatch.files.window import MAX_HELD, n_held
from cbatch.messages import BatchPrompt, LookAhead
from cbatch.options import RunOptions
from cbatch.support.folders import told
from cbatch.support.interrupts import HeldBack
from cbatch.support.thread_start import started

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from cbatch.files.settings import FileOptions

    Paths: TypeAlias = "str | Path | Sequence[str | Path]"

N_LOOKED_AHEAD = 1024
"""Items read before a model is loaded, for the size of its windows: as many as `load` uses."""

N_COUNTED_BYTES, N_COUNTED = 2**22, 50_000
"""Most bytes and items of an input that are counted. Our choice: it takes some tenths of a second."""

N_ARRIVED = 64  # most items of a pipe that are read ahead: our choice

SOON_S = 0.5
"""Our choice: less than a model takes to load, more than a file takes to come through a pipe."""

PATIENCE_S = 1.0
"""Our choice: for a thread that reads from an object without a file descriptor, which cannot be stopped."""


class PipeItems:
    """Items of a pipe, read by a thread of its own, so that a reader knows whether the next item has arrived."""

    def __init__(self, items: Iterator[Item]) -> None:
        self.has_ended = False
        """Whether `soon` has yielded the last item."""
        self._items = items
        self._came: Queue[Item | BaseException | None] = Queue(N_ARRIVED)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_dry(self) -> bool:
        """Whether the next item has not arrived yet."""
        return self._came.empty()

    def soon(self, n_most: int) -> Iterator[Item]:
        """Wait for the first item, then at most `SOON_S` for others; yield them."""
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
        while item := self._next(None):
            yield item

    def close(self) -> None:
        """Let the thread end; the pipe must be stopped before."""
        self._is_closed = True
        with suppress(Empty):
            while True:
                self._came.get_nowait()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)

    def _next(self, timeout_s: float | None) -> Item | None:
        if self._thread is None:
            with HeldBack():
                self._thread = started(self._read, "cbatch-pipe")
        item = self._came.get(timeout=timeout_s)
        if item is None or isinstance(item, BaseException):
            self._came.put(item)  # for the next call
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


class ItemStream:
    """Iterates over the items of an input in the order of the run, once."""

    def __init__(self, paths: Paths, options: FileOptions, without: Collection[str] = ()) -> None:
        """Open the input without the files `without`; copy, and check, all of it for `shuffle`, or `strict`."""
        self._open_source = partial(
            open_source,
            paths,
            format=options.format,
            template=options.template,
            system=options.system,
            is_raw=options.is_raw,
            image_column=options.image_column,
            audio_column=options.audio_column,
            without=without,
        )
        self.source = self._open_source()
        self._spool: Spool | None = None
        self._arrivals: PipeItems | None = None
        self._looked: deque[Item] = deque()  # items that were looked at, and not yet given
        self._has_looked_at_all = False
        try:
            self._rest = iter(self._ordered(options))
        except BaseException:
            self.source.close()
            raise
        self.is_piped = self._arrivals is not None

    def _ordered(self, options: FileOptions) -> Iterable[Item]:
        if options.strict or options.shuffle:
            with closing(Seen()) as seen:
                strictly = checked(self.source, seen.error_of)
                self._spool = Spool(strictly if options.strict else self.source)
            if options.shuffle:
                self._spool.shuffle(options.shuffle_seed)
            return self._spool
        if self.source.n_bytes is not None:
            return self.source
        self._arrivals = PipeItems(iter(self.source))
        return self._arrivals

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return self._looked.popleft() if self._looked else next(self._rest)

    def check(self, why: Callable[[Item], ItemError | int]) -> None:
        """Raise ConfigError for the first item, of an input that was read whole, of which `why` returns an error."""
        for _ in checked(self._spool.as_read(), why) if self._spool is not None else ():
            pass

    def is_dry(self) -> bool:
        """Return whether reading the next item would wait for a pipe."""
        return self._arrivals is not None and not self._looked and self._arrivals.is_dry

    def look_ahead(self, defaults: RunOptions, n_most: int = N_LOOKED_AHEAD) -> LookAhead | None:
        """Return the first prompts with their options, before the first item is read.

        Of a pipe these are the prompts that arrive soon: its writer may wait for the first answers.
        """
        self._look(n_most)
        prompts = [item.prompt for item in self._looked if item.prompt is not None]
        return ahead_of(prompts, defaults, is_all=self._has_looked_at_all)

    @property
    def is_at_hand(self) -> bool:
        """Whether `peek` returns without waiting for a pipe."""
        return not self.is_piped or bool(self._looked)

    def peek(self) -> list[Item]:
        """Return the items of `look_ahead`, else the first items, of a pipe one, before the first item is read."""
        if not self._looked:
            self._look(1 if self.is_piped else N_LOOKED_AHEAD)
        return list(self._looked)

    def first_prompt(self) -> BatchPrompt | None:
        """Return the first prompt of those items; waits for a pipe until one of its items has a prompt."""
        while True:
            prompts = (item.prompt for item in self.peek())
            found = next(filter(None, prompts), None)
            if found or self._has_looked_at_all or len(self._looked) >= N_LOOKED_AHEAD:
                return found
            self._look(len(self._looked) + 1)

    def _look(self, n_most: int) -> None:
        """Look at `n_most` items, fewer where they are large; note whether these are all."""
        n_in_all = 0
        for item in self._rest if self._arrivals is None else self._arrivals.soon(n_most):
            self._looked.append(item)
            n_in_all += n_held(item)
            if len(self._looked) >= n_most or n_in_all > MAX_HELD:
                return
        self._has_looked_at_all = self._arrivals is None or self._arrivals.has_ended

    @cached_property
    def n_items(self) -> int | None:
        """The number of items, from the copy or by reading short files twice; None if that would take long."""
        if self._spool is not None:
            return len(self._spool)
        n_bytes = self.source.n_bytes
        if n_bytes is None or n_bytes > N_COUNTED_BYTES:
            return None
        with (
            suppress(ConfigError, OSError),
            self._open_source() as again,
        ):  # the run itself reports errors
            n = sum(1 for _ in islice(again, N_COUNTED + 1))
            return n if n <= N_COUNTED else None
        return None

    def about(self) -> int | None:
        """Estimate the number of items by the bytes of the items that were read; None where nothing tells."""
        n_bytes, n_read = self.source.n_bytes, self.source.n_bytes_read
        return round(self.source.n_items_read * n_bytes / n_read) if n_bytes and n_read else None

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
    """Return prompts, each with its options over the defaults; None where there is no prompt."""
    pairs = [(prompt, RunOptions.of(prompt.options).over(defaults)) for prompt in prompts]
    return LookAhead(pairs, is_all=is_all) if pairs else None


class Spool:
    """A copy of all items in a temporary file; 8 bytes of memory an item."""

    def __init__(self, items: Iterable[Item]) -> None:
        """Copy the items; the file has no name, and closing removes it. Raises an `OutputError` if it has no room."""
        folder, way_out = Path(tempfile.gettempdir()), ", or name another folder in TMPDIR"
        with told(folder, way_out):
            self._file = tempfile.TemporaryFile(prefix="cbatch-")  # noqa: SIM115  # `close` closes it
        self._starts = array("Q")
        try:
            for item in items:
                self._starts.append(self._file.tell())
                with told(folder, way_out):
                    pickle.dump(item, self._file, pickle.HIGHEST_PROTOCOL)
            with told(folder, way_out):
                self._file.flush()
        except BaseException:
            with suppress(OSError):  # what could not be written is tried again
                self.close()
            raise

    def __len__(self) -> int:
        return len(self._starts)

    def shuffle(self, seed: int) -> None:
        """Change the order to one that depends on the seed alone."""
        random.Random(seed).shuffle(self._starts)

    def __iter__(self) -> Iterator[Item]:
        return map(self._at, self._starts)

    def as_read(self) -> Iterator[Item]:
        """Yield every item in the order of the input; another iteration may be open."""
        return map(self._at, sorted(self._starts))

    def _at(self, start: int) -> Item:
        self._file.seek(start)
        return cast("Item", pickle.load(self._file))

    def close(self) -> None:
        """Remove the copy."""
        self._file.close()


def checked(
    items: Iterable[Item], error_of: Callable[[Item], ItemError | int | None]
) -> Iterator[Item]:
    """Yield items; ConfigError for the first of which `error_of` returns an error."""
    for item in items:
        if isinstance(error := error_of(item), ItemError):
            raise ConfigError(f"{item.place}: {error.message} ({error.code})")
        yield item
