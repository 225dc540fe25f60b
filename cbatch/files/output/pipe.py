"""An output that cannot be gone on with, a pipe or a device: it takes records and remembers which ids there were."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

from cbatch.files.input.seen import Seen

if TYPE_CHECKING:
    from cbatch.files.output.journal import Claim


class Pipe:
    """Has the methods of a `Journal` that a run needs, without a manifest: nothing is ever known to be done."""

    def __init__(
        self, file: BinaryIO | None, errors: BinaryIO | None = None, *, header: bytes = b""
    ) -> None:
        """Write to open files, which stay open; None: nowhere."""
        self.n_done = self.n_failed = 0
        self.notes: tuple[str, ...] = ()
        self._files = {False: file, True: errors or file}
        self._parts: dict[bool, list[bytes]] = {False: [header] if header else [], True: []}
        self._seen = Seen()

    def claim(
        self, id: str, digest: bytes, number: int, rival: str | None = None, *, place: str = ""
    ) -> Claim:
        """Return "new", or "duplicate" for an id that was claimed before, by this item or its rival."""
        return "new" if self._seen.add(id, rival) else "duplicate"

    def add(self, number: int, id: str, digest: bytes, record: bytes, *, is_error: bool) -> None:
        """Keep a record until `commit`."""
        if self._files[is_error] is not None:
            self._parts[is_error].append(record)

    def commit(self) -> None:
        """Write what was added; the system has it when this returns."""
        for is_error, file in self._files.items():
            parts = self._parts[is_error]
            if file is not None and parts:
                file.write(b"".join(parts))
                file.flush()
                parts.clear()

    def drop_unclaimed(self, *, is_by_number: bool = False) -> int:
        """Return 0: what is written stays."""
        return 0

    def set_unclaimed_aside(self) -> int:
        """Return 0: what is written stays where it is."""
        return 0

    def close(self) -> None:
        """Write what is left."""
        self.commit()
        self._seen.close()
