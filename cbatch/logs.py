"""cbatch's lines in the log: a handler of somebody else's that raises loses its line, and nobody notices otherwise."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress

FIELDS = "cbatch"
"""Attribute of a record that has the values of its line, by name."""

_WORD = re.compile(r"[\w.:/@+-]+", re.ASCII)


class Log:
    """One logger of the library's, for the thread that computes too."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    @property
    def has_debug(self) -> bool:
        """Whether lines for debugging are wanted now."""
        return self._logger.isEnabledFor(logging.DEBUG)

    @property
    def has_info(self) -> bool:
        """Whether lines on what is done are wanted now."""
        return self._logger.isEnabledFor(logging.INFO)

    def tell(self, event: str, **values: object) -> None:
        """Log what happened with its values, `name=value` each, at level INFO; they are the record's `FIELDS` too."""
        with suppress(Exception):
            said = " ".join(f"{name}={_shown(value)}" for name, value in values.items())
            self._logger.info("%s %s", event, said, extra={FIELDS: values}, stacklevel=2)

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


def _shown(value: object) -> str:
    """Return a value as one word; text that is none as JSON, so that no name can make up other values or lines."""
    if value is None:
        return "-"
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)
