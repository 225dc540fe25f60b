"""cbatch's lines in the log: a handler of somebody else's that raises loses its line, and nobody notices otherwise."""

from __future__ import annotations

import logging
from contextlib import suppress


class Log:
    """One logger of the library's, for the thread that computes too."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    @property
    def has_debug(self) -> bool:
        """Whether lines for debugging are wanted now."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def write(self, level: int, text: str, *args: object) -> None:
        """Log a line, as `logging.Logger.log` does."""
        with suppress(Exception):
            self._logger.log(level, text, *args, stacklevel=2)

    def warn(self, text: str, *args: object) -> None:
        """Log a warning."""
        with suppress(Exception):
            self._logger.warning(text, *args, stacklevel=2)

    def fail(self, text: str) -> None:
        """Log an error, with the exception that is being handled."""
        with suppress(Exception):
            self._logger.exception(text, stacklevel=2)
