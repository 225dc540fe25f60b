"""The journal of a run: which items have a record, in the outputs and in the manifest, through kills at any moment.

A record counts from the commit of the manifest on, after its bytes are in the file. Memory grows by one bit a record.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from typing import Literal, NamedTuple, TypeAlias

from cbatch.files.output.identity import ERRORS, placed
from cbatch.files.output.manifest import DELETE, GONE, INSERT, NUMBERED, record_key
from cbatch.files.output.opening import OutputSpec, open_outputs

SYNC_S = 5.0
"""Seconds between two syncs: a loss of power costs the records since the last one."""

_N_MOVED = 1024
"""Moved items that are collected before they are renumbered together."""

_FIND = "SELECT record, digest, number, is_error FROM records WHERE key = ?"
_ANY_DOUBLE = "SELECT 1 FROM records WHERE key >= x'FE' AND key < x'FF' LIMIT 1"
_SET_ASIDE = "UPDATE records SET number = number | ? WHERE record = ?"
_SLICE = "SELECT record, key FROM records WHERE record > ? ORDER BY record LIMIT 4096"

_Row: TypeAlias = "tuple[int, bytes, bytes, int, int, int, int, int, bool]"
"""The columns of a record."""

Claim: TypeAlias = Literal["new", "done", "failed", "duplicate"]


class _Found(NamedTuple):
    record: int
    digest: bytes
    number: int
    is_error: bool


class _ClaimBits:
    """A bit for each record: whether an item of this run has claimed it."""

    def __init__(self) -> None:
        self.n, self._bits = 0, bytearray()

    def add(self, record: int) -> None:
        place = record >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1024 - len(self._bits)))
        self.n += record not in self
        self._bits[place] |= 1 << (record & 7)

    def __contains__(self, record: int) -> bool:
        place = record >> 3
        return place < len(self._bits) and bool(self._bits[place] >> (record & 7) & 1)


class Journal:
    """The outputs of one run. Any thread may call it.

    Attributes:
        n_done, n_failed: committed records: answers, and errors.
        first: after a claim that was a "duplicate", the number of the item that has the id.
        notes: messages of the opening, for people.
    """

    def __init__(
        self,
        spec: OutputSpec,
        *,
        retry_errors: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sync_s: float = SYNC_S,
    ) -> None:
        """Continue the files of an earlier run, or begin them; they are locked until `close`.

        Args:
            retry_errors: whether an item whose record is an error is "new".
            clock: in seconds, for syncs.
            sync_s: seconds between two syncs.

        Raises:
            ConfigError, OutputError: see `open_outputs`.
        """
        self._outputs = outputs = open_outputs(spec)
        self._manifest, self.notes = outputs.manifest, tuple(outputs.notes)
        self._retry_errors = retry_errors
        self._clock, self._sync_s = clock, sync_s
        self._sync_at = clock() + sync_s
        self._lock = threading.RLock()
        self._is_closed = False
        self.first = 0
        self._recount()
        self._last_record = self._manifest.last_record()
        self._marks = _ClaimBits()
        self._claims: dict[int, tuple[bytes, bytes, _Found | None]] = {}
        self._claimed_keys: dict[bytes, int] = {}
        self._added: list[_Row] = []
        self._superseded: list[_Found] = []
        self._moved: list[tuple[int, int]] = []
        self._has_doubles = self._manifest.execute(_ANY_DOUBLE).fetchone() is not None

    def _recount(self) -> None:
        counts = [file.count() for file in self._outputs.files]
        self.n_failed = sum(count.n_errors for count in counts)
        self.n_done = sum(count.n_records for count in counts) - self.n_failed

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def claim(
        self, id: str, digest: bytes, number: int, rival: str | None = None, *, place: str = ""
    ) -> Claim:
        """Return what to do with an item; call it once for each item, as it is read.

        Args:
            id: of the item, any text.
            digest: of the item, 16 bytes.
            rival: another id of the same item in its record: the first item that claims one of both has it.
            place: of the item, for people; the error of a duplicate names it.

        Returns:
            "new": run the item and `add` its record, which replaces an earlier one. "done", "failed": there is a
            record, an answer or an error. "duplicate": an item of this run has the id, or its rival: `add` an error;
            with that error in the output already, the item is "failed".
        """
        with self._lock:
            key = record_key(id)
            found = self._find(key)
            first = self._holder(key, found)
            if first is None and rival is not None:
                first = self._holder(record_key(rival), self._find(record_key(rival)))
            if first is not None:
                self._has_doubles, self.first = True, first
                key = duplicate_key(key, number)
                digest = placed(digest, place, first)
                return self._settle(key, self._find(key), digest, number, otherwise="duplicate")
            if self._has_doubles and (stale := self._find(duplicate_key(key, number))):
                # it was the second item with its id then, and is the first now
                self._superseded.append(stale)
            if rival is not None and (stale := self._find(record_key(rival))):
                self._superseded.append(stale)  # two records under one id would answer one item
            return self._settle(key, found, digest, number, otherwise="new")

    def _holder(self, key: bytes, found: _Found | None) -> int | None:
        """Return the number of the item of this run that has claimed a key, or the record of that key."""
        if key in self._claimed_keys:
            return self._claimed_keys[key]
        if found is None or found.record not in self._marks:
            return None
        moved = (number for number, record in self._moved if record == found.record)
        return next(moved, found.number)

    def _settle(
        self, key: bytes, found: _Found | None, digest: bytes, number: int, *, otherwise: Claim
    ) -> Claim:
        """Mark the record of an item as claimed, or expect a new one."""
        is_answered = found is not None and found.digest == digest
        if found is None or not is_answered or (found.is_error and self._retry_errors):
            self._claims[number] = key, digest, found
            self._claimed_keys[key] = number
            return otherwise
        self._marks.add(found.record)
        if found.number != number:
            self._moved.append((number, found.record))
            if len(self._moved) >= _N_MOVED:  # a line inserted at the top moves all
                self.commit()
        return "failed" if found.is_error else "done"

    def _find(self, key: bytes) -> _Found | None:
        row = self._manifest.execute(_FIND, key).fetchone()
        return None if row is None else _Found(*row)

    def add(self, number: int, record: bytes, *, is_error: bool) -> None:
        """Keep the record of an item that was claimed as "new" or "duplicate", for the next `commit`.

        Raises:
            KeyError: the item was not claimed so, or its record was added already.
        """
        with self._lock:
            key, digest, found = self._claims.pop(number)
            if found is not None:
                self._superseded.append(found)
            file = self._outputs.files[-1 if is_error else 0]
            start = file.add(record)
            self._last_record += 1
            place = (file.row.file, start, len(record), zlib.crc32(record))
            self._added.append((self._last_record, key, digest, number, *place, is_error))

    def commit(self) -> None:
        """Write the records that were added, then commit them; sync when it is due.

        Raises:
            OutputError: a file cannot be written. The records are kept for the next call.
        """
        with self._lock:
            if self._added or self._superseded or self._moved:
                self._write()
            if self._clock() >= self._sync_at:
                self._sync()

    def _write(self) -> None:
        for file in self._outputs.files:
            file.write()
        with self._manifest.transaction():
            self._manifest.execute_many(DELETE, [(f.record,) for f in self._superseded])
            self._manifest.execute_many(INSERT, self._added)
            self._manifest.execute_many(
                "UPDATE records SET number = ? WHERE record = ?", self._moved
            )
        for file in self._outputs.files:
            file.committed()
        self._count()

    def _count(self) -> None:
        for record, key, *_, is_error in self._added:
            self._marks.add(record)
            self._claimed_keys.pop(key, None)
            self.n_failed += bool(is_error)
            self.n_done += not is_error
        for found in self._superseded:
            self.n_failed -= found.is_error
            self.n_done -= not found.is_error
        self._added.clear()
        self._superseded.clear()
        self._moved.clear()

    def _sync(self) -> None:
        self._manifest.check_there()
        synced = [file.row for file in self._outputs.files if file.sync()]
        if synced:
            self._manifest.save(*synced)
            self._manifest.fold()
        self._sync_at = self._clock() + self._sync_s

    @property
    def noted_errors(self) -> str:
        """What earlier runs have noted of the errors among their records; "{}" if nothing."""
        return self._manifest.settings().get(ERRORS, "{}")

    def note_errors(self, text: str) -> None:
        """Keep a text about the errors among the records for later runs."""
        with self._lock:
            self.commit()
            self._manifest.note(ERRORS, text)

    def settle_unclaimed(self) -> tuple[int, int]:
        """Remove or set aside the records of items that this run has not claimed; return the number of each.

        For the end of a run that has read all of its input: these items are not in it any more. The records of items
        without an id are removed, for they may be of another input. The others are ordered after all records, which a
        later claim takes back.
        """
        n_removed = n_aside = last = 0
        with self._lock:
            self.commit()
            if self._marks.n == self.n_done + self.n_failed:
                return 0, 0
            while rows := self._manifest.execute(_SLICE, last).fetchall():
                last = rows[-1][0]
                left = [(record, key) for record, key in rows if record not in self._marks]
                removed = [(record,) for record, key in left if _has_no_id(key)]
                kept = [(GONE, record) for record, key in left if not _has_no_id(key)]
                with self._manifest.transaction():
                    self._manifest.execute_many(DELETE, removed)
                    self._manifest.execute_many(_SET_ASIDE, kept)
                n_removed, n_aside = n_removed + len(removed), n_aside + len(kept)
            self._recount()
        return n_removed, n_aside

    def close(self) -> None:
        """Commit, sync, remove superseded records from the files, and close them.

        Raises:
            OutputError: a file cannot be written; all files are closed nevertheless.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with closing(self._outputs):
                self.commit()
                self._sync()
                for file in self._outputs.files:
                    file.compact()
                self._outputs.put_away()


def duplicate_key(key: bytes, number: int) -> bytes:
    """Return the key of a second item with an id; 0xFE is in no UTF-8."""
    return b"\xfe%d:%b" % (number, key)


def _has_no_id(key: bytes) -> bool:
    """Whether a key depends on the item's number: it has no id, or the id of an item before it."""
    return NUMBERED[0] < key < NUMBERED[1] or key.startswith(b"\xfe")
