"""Ids that were seen, on the disk as soon as there are many."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from hashlib import blake2b
from typing import TYPE_CHECKING

from cbatch.files.item import bytes_of, duplicate_id

if TYPE_CHECKING:
    from cbatch.files.item import Item, ItemError


class Seen:
    """Ids that were seen."""

    def __init__(self) -> None:
        self._db = scratch("CREATE TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, id: str) -> bool:
        """Return whether it is new."""
        digest = blake2b(bytes_of(id), digest_size=16).digest()
        with closing(self._db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))) as done:
            return done.rowcount == 1

    def error_of(self, item: Item) -> ItemError | None:
        """Return what is wrong with an item, the id of another among it; called once for each."""
        is_new = item.error is not None or not item.is_labelled or self.add(item.id)
        return item.error if is_new else duplicate_id(item)

    def close(self) -> None:
        """Forget all."""
        self._db.close()


def scratch(*statements: str) -> sqlite3.Connection:
    """Return a database that goes when it is closed, on the disk where it is large; any thread may use it."""
    db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for statement in ("PRAGMA journal_mode = OFF", *statements, "BEGIN"):
        db.execute(statement)
    return db
