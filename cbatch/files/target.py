"""Where the records of a run go: files that can be gone on with, or a pipe."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.detect import COLUMNAR
from cbatch.files.encoders import Finisher, encoder, output_format
from cbatch.files.journal import Journal
from cbatch.files.manifest import manifest_of
from cbatch.files.pipe import Pipe
from cbatch.files.places import check_apart, is_dash, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cbatch.files.encoders import Encoder
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
        is_special = not (self.path.is_file() or self.path.is_dir())
        return is_dash(self.path) or (self.path.exists() and is_special)

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
            check_apart(path, inputs)
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
            file = stack.enter_context(opened(self.path, force=True))
            errors = stack.enter_context(opened(self.errors, force=True)) if self.errors else None
            pipe = Pipe(file, errors, header=self.encoder.header())
            yield pipe
            pipe.close()

    def finish(self) -> None:
        """Make the output of its records, where it is not made of them as they come."""
        if isinstance(self.encoder, Finisher):
            self.encoder.finish(self.records, self.path)
