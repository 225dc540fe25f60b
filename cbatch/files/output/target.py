"""The outputs of a run: files that a later run can continue, or a pipe."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, BinaryIO

from cbatch.errors import ConfigError
from cbatch.files.adopt import adopt
from cbatch.files.file_formats import COLUMNAR, WRITTEN_LAST, check_name, output_format
from cbatch.files.input.item import Seen
from cbatch.files.output.durable import create, mode_of, take_access, told, whole
from cbatch.files.output.encoders import (
    WHERE_ASKED,
    AnswerColumns,
    CsvEncoder,
    Encoder,
    ObjectEncoder,
    TraceableEncoder,
    VectorColumns,
)
from cbatch.files.output.identity import MADE, mark_of
from cbatch.files.output.journal import Claim, Journal
from cbatch.files.output.json_answers import CbatchEncoder, OpenAIEncoder
from cbatch.files.output.manifest import LostError
from cbatch.files.output.opening import OutputSpec, check_made, reopened
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
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from cbatch.files.input.source import Source
    from cbatch.files.output.identity import InputIdentity
    from cbatch.files.settings import FileOptions


class RunOutputs:
    """The outputs of a run.

    Attributes:
        path: of the output; `-` is stdout.
    """

    def __init__(
        self,
        path: Path,
        source: Source,
        options: FileOptions,
        *,
        extra: Collection[str] = (),
        has_vectors: bool = False,
    ) -> None:
        """Check, long before the first record, that records can be written as the options ask.

        Args:
            extra: columns of a table of answers beside those that every table has.
            has_vectors: whether rows get embeddings instead of answers.

        Raises:
            ConfigError: columns that do not fit; an unknown format, one that the output's name contradicts, or one that
                cannot be adopted; a pipe for a columnar format; a file that belongs to no manifest.
        """
        asked = options.output_format or "auto"
        self.path, self._options, self._is_pipe = path, options, not is_file_place(path)
        self.format = output_format(source, asked, path)
        if has_vectors and self.format in ("openai", "cbatch"):
            self.format = "jsonl"
        if self.format == "npy" and not has_vectors:
            raise ConfigError(f"{path}: npy files hold embeddings, not answers: give another name")
        self._is_columnar = self.format in WRITTEN_LAST
        for file in [path] if self._is_columnar else self._paths:  # which has no file of errors
            check_name(file, self.format, is_asked=asked != "auto")
        layout: AnswerColumns | None
        if has_vectors:
            layout = VectorColumns(
                source.columns, keep=options.keep_columns, output_column=options.output_column
            )
        else:
            layout = layout_of(self.format, source, options, extra=extra)
        self.encoder = encoder(self.format, source, layout)
        self._records = records_at(path) if self._is_columnar else path
        self._check_format()
        self._check_replaceable()

    @property
    def _paths(self) -> list[Path]:
        return [path for path in (self.path, self._options.errors) if path is not None]

    @property
    def _can_adopt(self) -> bool:
        return not self._is_pipe and isinstance(self.encoder, TraceableEncoder)

    def _check_format(self) -> None:
        errors = self._options.errors
        if self._options.adopt and not self._can_adopt:
            what = "a pipe" if self._is_pipe else self.format
            raise ConfigError(
                f"{self.path}: --adopt needs an output in the format openai or cbatch, not {what}: leave --adopt out"
            )
        if self._is_columnar and self._is_pipe:
            raise ConfigError(f"{self.path}: {self.format} cannot be piped: give a file")
        if self._is_columnar and errors is not None:
            raise ConfigError(
                f"{errors}: failed rows are written into the {self.format} file, with their errors: leave --errors out"
            )

    def _check_replaceable(self) -> None:
        path = self._options.errors if self._is_pipe else self.path
        is_known = not self._is_pipe and manifest_at(self._records).exists()
        may_begin = self._options.force or self._options.adopt or is_known
        if path and path.is_file() and path.stat().st_size and not may_begin:
            adopt = "--adopt to rebuild the manifest from its lines, " if self._can_adopt else ""
            raise ConfigError(
                f"{path}: exists already, and cbatch did not write it or its manifest is missing: give another file, "
                f"{adopt}or --force to replace the file"
            )

    @contextmanager
    def opened(
        self, settings: Mapping[str, str], origin: InputIdentity
    ) -> Iterator[Journal | PipedOutput]:
        """Open the outputs for the length of the block.

        Raises:
            ConfigError, OutputError: see `open_outputs`.
        """
        if self._is_pipe:
            with ExitStack() as stack:
                files = [stack.enter_context(opened(path, force=True)) for path in self._paths]
                pipe = PipedOutput(*files, header=self.encoder.header())
                yield pipe
                pipe.close()
            return
        if self._is_columnar:
            self._keep_private()
            point_to(self.path, records_of(self.path), self._records)
        with self._journal(settings, origin) as journal:
            yield journal

    def _journal(self, settings: Mapping[str, str], origin: InputIdentity) -> Journal:
        options, header = self._options, self.encoder.header()
        spec = OutputSpec(
            self._records,
            settings,
            options.errors,
            origin,
            header,
            options.force,
            self.path if self._is_columnar else None,
        )
        try:
            return Journal(spec, retry_errors=options.retry_errors)
        except LostError:
            if not options.adopt or not isinstance(self.encoder, TraceableEncoder):
                raise
        note = adopt(spec.paths, spec.noted(), self.encoder)
        journal = Journal(spec, retry_errors=options.retry_errors)
        journal.notes = (note, *journal.notes)
        return journal

    def _keep_private(self) -> None:
        """Give the file of records the access of an earlier columnar output."""
        if self.path.is_file() and not self._records.exists():
            with told(self._records):
                fd = create(self._records)
                take_access(fd, self.path)
                os.close(fd)

    def finish(self, n_items: int) -> None:
        """Make a columnar output of its records, for an input of `n_items`; other outputs are complete already.

        Raises:
            ConfigError: the input was changed while it was read, or another program changed the output.
        """
        if self._is_columnar:
            sort_in_place(self._records)
            with reopened(self._records) as outputs, closing(outputs.files[0].numbers()) as numbers:
                marks = outputs.manifest.settings().get(MADE, "")
                with whole(self.path, mode=mode_of(self._records)) as part:
                    self.encoder.finish(self._records, part, n_items, numbers)
                    way_out = f"and run the same command again. No answer is lost: they are in {self._records}"
                    check_made(self.path, marks, way_out)
                    new = mark_of(part)
                    outputs.manifest.note(MADE, f"{marks}, {new}")
                outputs.manifest.note(MADE, new)


def layout_of(
    format: str, source: Source, options: FileOptions, *, extra: Collection[str] = ()
) -> AnswerColumns | None:
    """Return the columns of a format's rows; None for a format without.

    Raises:
        ConfigError: columns that do not fit.
    """
    keep, name = options.keep_columns, options.output_column
    if format in ("openai", "cbatch"):
        if keep is not None or name is not None:
            raise ConfigError(
                f"keep_columns and output_column are for tables, but answers are {format}: leave them out, or give a "
                "name in .csv or .parquet, or another format (--output-format)"
            )
        return None
    if format == "jsonl" or source.columns is None:
        extra = WHERE_ASKED
    return AnswerColumns(source.columns, keep=keep, output_column=name, extra=extra)


def encoder(format: str, source: Source, layout: AnswerColumns | None = None) -> Encoder:
    """Return the encoder of a format for the items of a source; `layout` is that of a format of rows."""
    has_rows = source.columns is not None
    if format == "openai":
        return OpenAIEncoder(has_rows=has_rows)
    if format == "cbatch":
        return CbatchEncoder(has_rows=has_rows)
    layout = layout or AnswerColumns(source.columns)
    if format == "jsonl":
        return ObjectEncoder(layout)
    if format == "npy":
        from cbatch.files.output.columnar_answers import NpyEncoder

        return NpyEncoder(layout)
    if format in COLUMNAR:
        from cbatch.files.output.columnar_answers import ColumnarEncoder  # pyarrow, slow to import

        return ColumnarEncoder(format, source, layout)
    return CsvEncoder(layout, "\t" if format == "tsv" else ",")


class PipedOutput:
    """The methods of `Journal` that a run needs, for open files without a manifest: no record is ever there before."""

    def __init__(self, *files: BinaryIO, header: bytes = b"") -> None:
        """Write to open files, which stay open: the output, then the file of errors, if any; none: nowhere."""
        self.n_done = self.n_failed = self.first = 0
        self.noted_errors = "{}"
        self.notes: tuple[str, ...] = ()
        self._files = files
        self._added = [(file, header) for file in files[:1]]
        self._seen = Seen()

    def claim(
        self, id: str, digest: bytes, number: int, rival: str | None = None, *, place: str = ""
    ) -> Claim:
        """Return "new", or "duplicate" if an item before has the id, or its rival."""
        self.first = self._seen.add(id, number, rival) or 0
        return "duplicate" if self.first else "new"

    def add(self, number: int, record: bytes, *, is_error: bool) -> None:
        """Keep a record until `commit`."""
        if self._files:
            self._added.append((self._files[-1 if is_error else 0], record))

    def commit(self) -> None:
        """Write and flush the records that were added."""
        for file, record in self._added:
            file.write(record)
        self._added.clear()
        for file in self._files:
            file.flush()

    def note_errors(self, text: str) -> None:
        """Keep nothing: no later run continues."""

    def settle_unclaimed(self) -> tuple[int, int]:
        """Remove and set aside nothing: written records stay."""
        return 0, 0

    def close(self) -> None:
        """Write the remaining records."""
        self.commit()
        self._seen.close()
