"""Where the records of a run go: files that can be gone on with, or a pipe."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.adopt import Adopter, adopt
from cbatch.files.input.detect import COLUMNAR
from cbatch.files.input.known import Traceable
from cbatch.files.output.durable import create, take_access, told
from cbatch.files.output.encoders import Finisher, check_name, encoder, output_format
from cbatch.files.output.home import manifest_at, point_to, records_at, records_of
from cbatch.files.output.journal import Journal
from cbatch.files.output.manifest import LostError
from cbatch.files.output.pipe import Pipe
from cbatch.files.output.sorting import sort_in_place
from cbatch.files.output.written import is_file_place
from cbatch.files.places import opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cbatch.files.input.detect import Format
    from cbatch.files.input.source import Source
    from cbatch.files.output.encoders import Encoder
    from cbatch.files.output.origin import Origin
    from cbatch.files.settings import FileOptions


@dataclass(frozen=True, slots=True)
class Target:
    """The outputs of a run.

    Args:
        path: of the output; `-` is stdout.
        errors: of the file of errors; None: they are in the output.
        format: of the output.
        encoder: writes it.
        adopter: knows its records again, where a manifest is to be made of them if it is lost.
    """

    path: Path
    errors: Path | None
    format: str
    encoder: Encoder
    adopter: Adopter | None = None

    @classmethod
    def of(cls, output: str | Path, source: Source, options: FileOptions) -> Target:
        """Return the outputs that were asked for.

        Raises:
            ConfigError: a format that there is not, that the name of the output contradicts, or that cannot be adopted.
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
        """Whether nobody can go on with it: stdout, a device, a named pipe."""
        return not is_file_place(self.path)

    @property
    def records(self) -> Path:
        """The file that records are added to; a format of columns is made of it at the end."""
        return records_at(self.path) if self.format in COLUMNAR else self.path

    def check(self, *, force: bool) -> None:
        """Check that records can be written, long before the first one is there.

        Raises:
            ConfigError: a pipe for what needs a file, or a file that no manifest knows of.
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
                f"{self.errors}: a row that fails stands in the {self.format} file, with its error: leave the file of "
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
    ) -> Iterator[Journal | Pipe]:
        """Open the outputs for the length of the block.

        Raises:
            ConfigError, OutputError: see `Journal.open`.
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
        open_journal = partial(
            Journal.open,
            self.records,
            errors=self.errors,
            settings=settings,
            origin=origin,
            header=self.encoder.header(),
            force=force,
            retry_errors=retry_errors,
        )
        try:
            return open_journal()
        except LostError:
            if self.adopter is None:
                raise
        noted = {**settings, **(origin.noted() if origin else {})}
        note = adopt(list(filter(None, (self.path, self.errors))), noted, self.adopter)
        journal = open_journal()
        journal.notes = (note, *journal.notes)
        return journal

    def _keep_private(self) -> None:
        """Let those alone read the records of an earlier output of columns who may read that."""
        if self.path.is_file() and not self.records.exists():
            with told(self.records):
                fd = create(self.records)
                take_access(fd, self.path)
                os.close(fd)

    @contextmanager
    def _piped(self) -> Iterator[Pipe]:
        with ExitStack() as stack:
            file = stack.enter_context(opened(self.path, force=True))
            errors = stack.enter_context(opened(self.errors, force=True)) if self.errors else None
            pipe = Pipe(file, errors, header=self.encoder.header())
            yield pipe
            pipe.close()

    def finish(self, n_items: int) -> None:
        """Make the output of its records, of so many items, where it is not made of them as they come.

        Raises:
            ConfigError: the input is not as it was read.
        """
        if isinstance(self.encoder, Finisher):
            sort_in_place(self.records)
            self.encoder.finish(self.records, self.path, n_items)


def _adopter(path: Path, format: Format, encoder: Encoder, source: Source) -> Adopter:
    """Return what knows the records of an output again.

    Raises:
        ConfigError: they do not tell what they answer, or are not kept.
    """
    if not is_file_place(path) or not isinstance(encoder, Traceable):
        raise ConfigError(
            f"{path}: only files of openai's or cbatch's lines tell what they answer, and this is {format}: leave "
            "--adopt out"
        )
    return Adopter(encoder, has_rows=source.columns is not None)
