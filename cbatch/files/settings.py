"""What a run over a file may be told, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.checks import check_int, check_seconds
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_WINDOW = 65_536
"""Items that a window holds at most: more would not be better mixed."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How a batch file is read, run and written.

    Args:
        format: of the input; "auto" goes by the names of the files and their first lines.
        output_format: of the output; None for that of the input.
        template: the prompt of each row, with `{column}` for what stands there.
        system: a system message for each row, a template as well.
        is_raw: rows are text to complete as it stands, instead of chats.
        errors: a file of their own for records of errors.
        limit: most items to run; those that are done do not count.
        shuffle: read the input in random order. It is copied to a temporary file first; 8 bytes of memory an item.
        shuffle_seed: the same number gives the same order.
        strict: check the whole input before anything runs, and stop at the first bad item.
        retry_errors: run items anew that ended with an error.
        adopt: make the manifest again of JSON lines that are there, where it is lost or does not fit, and go on.
        force: go on although settings differ from those of the earlier run, or replace a file that is not cbatch's.
        window: items that are read ahead to be put in a better order; None: 8 a slot.
        max_time_s: seconds for the whole run; what is not done then is left for the next one.
        report: where to write an HTML page on the run.
        trace: where to write its steps for Chrome's or Perfetto's viewer.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    format: str = "auto"
    output_format: str | None = None
    template: str | None = None
    system: str | None = None
    is_raw: bool = False
    errors: Path | None = None
    limit: int | None = None
    shuffle: bool = False
    shuffle_seed: int = 0
    strict: bool = False
    retry_errors: bool = False
    adopt: bool = False
    force: bool = False
    window: int | None = None
    max_time_s: float | None = None
    report: Path | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_int("limit", self.limit, 1, 2**63 - 1)
        check_int("window", self.window, 1, MAX_WINDOW)
        check_seconds("max_time_s", self.max_time_s)
        if self.adopt and self.force:
            raise ConfigError(
                "adopt keeps the records that are there, and force may replace them: give one of them"
            )
        for name in ("errors", "report", "trace"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))


def split_settings(settings: Mapping[str, Any]) -> tuple[FileOptions, dict[str, Any]]:
    """Return the options of the file, and the rest, which is for the engine.

    Raises:
        ConfigError: a value is wrong.
        UnsupportedOptionError: a name that there is not.
    """
    names = {f.name for f in fields(FileOptions)}
    rest = {name: value for name, value in settings.items() if name not in names}
    EngineOptions.of(rest)
    return FileOptions(**{n: v for n, v in settings.items() if n in names}), rest
