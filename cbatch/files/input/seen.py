"""Items that were seen, by their ids, on the disk as soon as there are many."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from hashlib import blake2b
from typing import TYPE_CHECKING

from cbatch.files.input.item import bytes_of, duplicate, item_key, rival_key

if TYPE_CHECKING:
    from cbatch.files.input.item import Item, ItemError


class Seen:
    """Ids that were seen."""

    def __init__(self) -> None:
        self._db = scratch("CREATE TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, key: str, rival: str | None = None) -> bool:
        """Return whether it is new, and its rival too; see `item_key` and `rival_key`."""
        with closing(
            self._db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (_digest(key),))
        ) as done:
            is_new = done.rowcount == 1
        return is_new and (rival is None or not self._has(rival))

    def _has(self, key: str) -> bool:
        found = self._db.execute("SELECT 1 FROM seen WHERE id = ?", (_digest(key),))
        return found.fetchone() is not None

    def error_of(self, item: Item) -> ItemError | None:
        """Return what is wrong with an item, the id of another among it; called once for each."""
        rival = rival_key(item)
        if not item.is_labelled and rival is None:  # a row, known by its number alone
            return item.error
        is_new = self.add(item_key(item), rival)
        return item.error if is_new else duplicate(item).error

    def close(self) -> None:
        """Forget all."""
        self._db.close()


def _digest(key: str) -> bytes:
    return blake2b(bytes_of(key), digest_size=16).digest()


def scratch(*statements: str) -> sqlite3.Connection:
    """Return a database that goes when it is closed, on the disk where it is large; any thread may use it."""
    db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for statement in ("PRAGMA journal_mode = OFF", *statements, "BEGIN"):
        db.execute(statement)
    return db
