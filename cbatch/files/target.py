"""Where the records of a run go: files that can be gone on with, or a pipe."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from cbatch.errors import ConfigError
from cbatch.files.detect import COLUMNAR
from cbatch.files.formats import Finisher, encoder, output_format
from cbatch.files.journal import Journal
from cbatch.files.manifest import manifest_of
from cbatch.files.pipe import Pipe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cbatch.files.formats import Encoder
    from cbatch.files.settings import FileOptions
    from cbatch.files.source import Source


@dataclass(frozen=True, slots=True)
class Target:
    """The outputs of a run.

    Args:
        path: of the output; `-` is stdout.
        errors: of the file of errors; None: they are in the output.
        format: of the output.
        encoder: writes it.
    """

    path: Path
    errors: Path | None
    format: str
    encoder: Encoder

    @classmethod
    def of(cls, output: str | Path, source: Source, options: FileOptions) -> Target:
        """Return the outputs that were asked for."""
        format = output_format(source, options.output_format or "auto")
        return cls(Path(output), options.errors, format, encoder(format, source))

    @property
    def is_pipe(self) -> bool:
        """Whether nobody can go on with it: stdout, a device, a named pipe."""
        return str(self.path) == "-" or (self.path.exists() and not _may_be_file(self.path))

    @property
    def records(self) -> Path:
        """The file that records are added to; a format of columns is made of it at the end."""
        if self.format not in COLUMNAR:
            return self.path
        return self.path.with_name(f"{self.path.name}.records")

    def check(self, inputs: Sequence[str], *, force: bool) -> None:
        """Check that records can be written, long before the first one is there.

        Raises:
            ConfigError: one of the inputs, or a file without a manifest.
        """
        for path in filter(None, (self.path, self.errors)):
            if path.is_file() and any(os.path.exists(i) and path.samefile(i) for i in inputs):
                raise ConfigError(f"{path}: is the input: give another file for the results")
        if self.is_pipe:
            if self.format in COLUMNAR:
                raise ConfigError(f"{self.path}: {self.format} cannot be piped: give a file")
        elif self.path.is_file() and not force and not manifest_of(self.records).exists():
            raise ConfigError(
                f"{self.path}: exists already and is not of cbatch, or its manifest is gone: give another file, or "
                "--force to replace it"
            )

    @contextmanager
    def opened(
        self, settings: Mapping[str, str], *, force: bool, retry_errors: bool
    ) -> Iterator[Journal | Pipe]:
        """Open the outputs for the length of the block.

        Raises:
            ConfigError, OutputError: see `Journal.open`.
        """
        if self.is_pipe:
            with self._piped() as pipe:
                yield pipe
            return
        with Journal.open(
            self.records,
            errors=self.errors,
            settings=settings,
            header=self.encoder.header(),
            force=force,
            retry_errors=retry_errors,
        ) as journal:
            yield journal

    @contextmanager
    def _piped(self) -> Iterator[Pipe]:
        with ExitStack() as stack:
            file = stack.enter_context(_opened(self.path))
            errors = stack.enter_context(_opened(self.errors)) if self.errors else None
            pipe = Pipe(file, errors, header=self.encoder.header())
            yield pipe
            pipe.close()

    def finish(self) -> None:
        """Make the output of its records, where it is not made of them as they come."""
        if isinstance(self.encoder, Finisher):
            self.encoder.finish(self.records, self.path)


def _may_be_file(path: Path) -> bool:
    return path.is_file() or path.is_dir()


def check_place(path: Path) -> None:
    """Check that a file can be here.

    Raises:
        ConfigError: a directory, a missing folder, no permission.
    """
    if str(path) == "-":
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory: give a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: no permission to write there")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        if sys.stdout is None:
            raise ConfigError("stdout is closed: there is nowhere to write to")
        yield sys.stdout.buffer
        return
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
