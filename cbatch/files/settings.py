"""What a run over a file may be told, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from cbatch.checks import check_flag, check_int, check_seconds, check_string, refuse_none, settle
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.files.places import file_of
from cbatch.options import MAX_SEED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_WINDOW = 65_536
"""Items that a window holds at most: more would not be better mixed."""

_FILES = ("errors", "report", "trace")


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
        refuse_none(self)
        for name in ("format", "output_format", "template", "system"):
            settle(self, check_string, name)
        for name in ("is_raw", "shuffle", "strict", "retry_errors", "force", "adopt"):
            settle(self, check_flag, name)
        if self.adopt and self.force:
            raise ConfigError(
                "adopt keeps the records that are there, and force may replace them: give one of them"
            )
        settle(self, check_int, "limit", 1, 2**63 - 1)
        settle(self, check_int, "window", 1, MAX_WINDOW)
        settle(self, check_int, "shuffle_seed", -MAX_SEED, MAX_SEED)
        for name, check in (("max_time_s", check_seconds), *((n, file_of) for n in _FILES)):
            if getattr(self, name) is not None:
                settle(self, check, name)


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
