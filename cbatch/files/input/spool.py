"""A copy of all items in a temporary file, for an input that is read in another order or checked whole first."""

from __future__ import annotations

import pickle
import random
import tempfile
from array import array
from contextlib import closing
from typing import TYPE_CHECKING, cast

from cbatch.errors import ConfigError
from cbatch.files.input.seen import Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cbatch.files.input.item import Item, ItemError


class Spool:
    """Items on disk; in memory, 8 bytes for each."""

    def __init__(self, items: Iterable[Item]) -> None:
        """Copy them; the file has no name and goes with this object."""
        self._file = tempfile.TemporaryFile(prefix="cbatch-")  # noqa: SIM115  # `close` closes it
        self._starts = array("Q")
        try:
            for item in items:
                self._starts.append(self._file.tell())
                pickle.dump(item, self._file, pickle.HIGHEST_PROTOCOL)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._starts)

    def shuffle(self, seed: int) -> None:
        """Put them in an order that depends on the seed alone."""
        random.Random(seed).shuffle(self._starts)

    def __iter__(self) -> Iterator[Item]:
        """Yield every item, once."""
        return map(self._at, self._starts)

    def as_read(self) -> Iterator[Item]:
        """Yield every item in the order in which they came; others may be reading too."""
        return map(self._at, sorted(self._starts))

    def _at(self, start: int) -> Item:
        self._file.seek(start)
        return cast("Item", pickle.load(self._file))

    def close(self) -> None:
        """Remove the copy."""
        self._file.close()


def checked(items: Iterable[Item]) -> Iterator[Item]:
    """Yield items; stop at the first that is wrong, or has the id of another.

    Raises:
        ConfigError: which one, and why.
    """
    with closing(Seen()) as seen:
        for item in items:
            if error := seen.error_of(item):
                raise refusal_of(item, error)
            yield item


def refusal_of(item: Item, error: ItemError) -> ConfigError:
    """Return what ends a run that stops at the first wrong item."""
    return ConfigError(f"{item.place}: {error.message} ({error.code})")
