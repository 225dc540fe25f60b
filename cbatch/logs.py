"""The library's log: a handler that raises loses its line and disturbs nothing else."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress

FIELDS = "cbatch"
"""The attribute of a record that holds the values of its line by name."""

_WORD = re.compile(r"[\w.:/@+-]+", re.ASCII)


class Log:
    """A logger whose methods never raise, so that the thread that computes can use it."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    @property
    def has_debug(self) -> bool:
        """Whether the level DEBUG is enabled now."""
        return self._logger.isEnabledFor(logging.DEBUG)

    @property
    def has_info(self) -> bool:
        """Whether the level INFO is enabled now."""
        return self._logger.isEnabledFor(logging.INFO)

    def tell(self, event: str, **values: object) -> None:
        """Log an event at level INFO, with its values as `name=value` and as the record's `FIELDS`."""
        with suppress(Exception):
            pairs = " ".join(f"{name}={_shown(value)}" for name, value in values.items())
            self._logger.info("%s %s", event, pairs, extra={FIELDS: values}, stacklevel=2)

    def write(self, level: int, text: str, *args: object) -> None:
        """Log a line, as `logging.Logger.log` does."""
        with suppress(Exception):
            self._logger.log(level, text, *args, stacklevel=2)

    def warn(self, text: str, *args: object) -> None:
        """Log a warning."""
        with suppress(Exception):
            self._logger.warning(text, *args, stacklevel=2)

    def fail(self, text: str) -> None:
        """Log an error with the exception that is being handled."""
        with suppress(Exception):
            self._logger.exception(text, stacklevel=2)


def _shown(value: object) -> str:
    """Return a value as one word, other text as JSON, so that no text can forge values or lines."""
    if value is None:
        return "-"
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)
