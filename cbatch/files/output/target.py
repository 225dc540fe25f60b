"""The outputs of a run: files that a later run can continue, or a pipe."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from cbatch.errors import ConfigError
from cbatch.files.adopt import Adopter, adopt
from cbatch.files.file_formats import COLUMNAR, check_name, output_format
from cbatch.files.input.item import Seen
from cbatch.files.output.durable import create, take_access, told
from cbatch.files.output.encoders import CsvEncoder, ObjectEncoder, TraceableEncoder
from cbatch.files.output.journal import Journal
from cbatch.files.output.json_answers import CbatchEncoder, OpenAIEncoder
from cbatch.files.output.manifest import LostError
from cbatch.files.output.opening import OutputSpec
from cbatch.files.output.run_paths import (
    is_file_place,
    manifest_at,
    point_to,
    records_at,
    records_of,
)
from cbatch.files.output.sorting import sort_in_place
from cbatch.files.places import opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cbatch.files.file_formats import Format
    from cbatch.files.input.source import Source
    from cbatch.files.output.encoders import Encoder
    from cbatch.files.output.identity import Origin
    from cbatch.files.output.journal import Claim
    from cbatch.files.settings import FileOptions


@dataclass(frozen=True, slots=True)
class Target:
    """The outputs of a run.

    Args:
        path: of the output; `-` is stdout.
        errors: of the file of errors; None: errors are in the output.
        format: of the output.
        encoder: of the format.
        adopter: makes a lost manifest again; None: a lost manifest is an error.
    """

    path: Path
    errors: Path | None
    format: str
    encoder: Encoder
    adopter: Adopter | None = None

    @classmethod
    def of(cls, output: str | Path, source: Source, options: FileOptions) -> Target:
        """Return the outputs that the options ask for.

        Raises:
            ConfigError: an unknown format, one that the output's name contradicts, or one that cannot be adopted.
        """
        path, asked = Path(output), options.output_format or "auto"
        format = output_format(source, asked, path)
        for file in filter(None, (path, options.errors)):
            check_name(file, format, is_asked=asked != "auto")
        writer = encoder(format, source)
        adopter = _adopter(path, format, writer, source) if options.adopt else None
        return cls(path, options.errors, format, writer, adopter)

    @property
    def is_pipe(self) -> bool:
        """Whether the output is stdout, a device or a named pipe, which no later run can continue."""
        return not is_file_place(self.path)

    @property
    def records(self) -> Path:
        """The file that records are added to; a columnar output is made of it at the end."""
        return records_at(self.path) if self.format in COLUMNAR else self.path

    def check(self, *, force: bool) -> None:
        """Check that records can be written, long before the first record.

        Raises:
            ConfigError: a pipe for a columnar format, or a file that belongs to no manifest.
        """
        if self.format in COLUMNAR:
            self._check_columnar()
        path = self.errors if self.is_pipe else self.path
        is_known = not self.is_pipe and manifest_at(self.records).exists()
        may_begin = force or is_known or self.adopter is not None
        if path and path.is_file() and path.stat().st_size and not may_begin:
            raise ConfigError(
                f"{path}: exists already and is not of cbatch, or its manifest is gone: give another file, --adopt to "
                "have the manifest made again of JSON lines, or --force to replace it"
            )

    def _check_columnar(self) -> None:
        if self.is_pipe:
            raise ConfigError(f"{self.path}: {self.format} cannot be piped: give a file")
        if self.errors is not None:
            raise ConfigError(
                f"{self.errors}: a row that fails is in the {self.format} file, with its error: leave the file of "
                "errors out"
            )

    @contextmanager
    def opened(
        self,
        settings: Mapping[str, str],
        origin: Origin | None = None,
        *,
        force: bool,
        retry_errors: bool,
    ) -> Iterator[Journal | PipedOutput]:
        """Open the outputs for the length of the block.

        Raises:
            ConfigError, OutputError: see `open_outputs`.
        """
        if self.is_pipe:
            with self._piped() as pipe:
                yield pipe
            return
        if self.records != self.path:
            self._keep_private()
            point_to(self.path, records_of(self.path), self.records)
        with self._journal(settings, origin, force=force, retry_errors=retry_errors) as journal:
            yield journal

    def _journal(
        self,
        settings: Mapping[str, str],
        origin: Origin | None,
        *,
        force: bool,
        retry_errors: bool,
    ) -> Journal:
        spec = OutputSpec(self.records, settings, self.errors, origin, self.encoder.header(), force)
        try:
            return Journal(spec, retry_errors=retry_errors)
        except LostError:
            if self.adopter is None:
                raise
        note = adopt(spec.paths, spec.noted(), self.adopter)
        journal = Journal(spec, retry_errors=retry_errors)
        journal.notes = (note, *journal.notes)
        return journal

    def _keep_private(self) -> None:
        """Give the file of records the access of an earlier columnar output."""
        if self.path.is_file() and not self.records.exists():
            with told(self.records):
                fd = create(self.records)
                take_access(fd, self.path)
                os.close(fd)

    @contextmanager
    def _piped(self) -> Iterator[PipedOutput]:
        with ExitStack() as stack:
            file = stack.enter_context(opened(self.path, force=True))
            errors = stack.enter_context(opened(self.errors, force=True)) if self.errors else None
            pipe = PipedOutput(file, errors, header=self.encoder.header())
            yield pipe
            pipe.close()

    def finish(self, n_items: int) -> None:
        """Make a columnar output of its records, for an input of `n_items`; other outputs are complete already.

        Raises:
            ConfigError: the input was changed while it was read.
        """
        if self.format in COLUMNAR:
            sort_in_place(self.records)
            self.encoder.finish(self.records, self.path, n_items)


def encoder(format: str, source: Source) -> Encoder:
    """Return the encoder of a format for the items of a source."""
    if format == "openai":
        return OpenAIEncoder()
    if format == "cbatch":
        return CbatchEncoder()
    if format == "jsonl":
        return ObjectEncoder(source.columns)
    if format in COLUMNAR:
        from cbatch.files.output.columnar_answers import ColumnarEncoder  # pyarrow, slow to import

        return ColumnarEncoder(format, source)
    return CsvEncoder(source.columns, "\t" if format == "tsv" else ",")


def _adopter(path: Path, format: Format, encoder: Encoder, source: Source) -> Adopter:
    """Return what makes a manifest of the output's records.

    Raises:
        ConfigError: the records do not name their items, or are not kept.
    """
    if not is_file_place(path) or not isinstance(encoder, TraceableEncoder):
        raise ConfigError(
            f"{path}: only files of openai's or cbatch's lines name the items that they answer, and this is {format}: "
            "leave --adopt out"
        )
    return Adopter(encoder, has_rows=source.columns is not None)


class PipedOutput:
    """The methods of `Journal` that a run needs, for open files without a manifest: no record is ever there before."""

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
        """Return "new", or "duplicate" if an item before has the id, or its rival."""
        return "new" if self._seen.add(id, rival) else "duplicate"

    def add(self, number: int, id: str, digest: bytes, record: bytes, *, is_error: bool) -> None:
        """Keep a record until `commit`."""
        if self._files[is_error] is not None:
            self._parts[is_error].append(record)

    def commit(self) -> None:
        """Write and flush the records that were added."""
        for is_error, file in self._files.items():
            parts = self._parts[is_error]
            if file is not None and parts:
                file.write(b"".join(parts))
                file.flush()
                parts.clear()

    def drop_unclaimed(self, *, is_by_number: bool = False) -> int:
        """Return 0: written records stay."""
        return 0

    def set_unclaimed_aside(self) -> int:
        """Return 0: written records stay in their place."""
        return 0

    def close(self) -> None:
        """Write the remaining records."""
        self.commit()
        self._seen.close()
