"""The library's log: a handler that raises loses its line and disturbs nothing else."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from contextvars import ContextVar
from typing import Any

from cbatch.support.interrupts import Contained, is_for_program, is_locked_here

FIELDS = "cbatch"
"""The attribute of a record that holds the values of its line by name."""

_WORD = re.compile(r"[\w.:/@+-]+", re.ASCII)


_kept: ContextVar[list[tuple[logging.Logger, logging.LogRecord]] | None] = ContextVar(
    "cbatch.support.logs", default=None
)
"""Records that the outermost `HeldLogs` of this thread holds."""


class _ThreadHandling(threading.local):
    """State of one thread."""

    n_handled = 0
    """Records that handlers have now: a handler may log, too."""


_here = _ThreadHandling()


def is_handling() -> bool:
    """Whether cbatch has called a log handler in this thread that has not returned.

    Handlers have locks, for which any thread that logs may wait: such a handler must not wait for an engine.
    """
    return _here.n_handled > 0


def must_not_wait() -> bool:
    """Whether another thread may want a lock that this thread has: one of cbatch, or that of a log handler.

    So it is in a log handler, and in a finalizer, which the garbage collector may run anywhere.
    """
    return is_handling() or is_locked_here()


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    _here.n_handled += 1
    try:
        logger.handle(record)
    finally:
        _here.n_handled -= 1


class HeldLogs:
    """A block whose log records go to handlers at its end, in order, so that no handler runs amid unfinished work.

    It holds only records that this thread logs with `Log`. Of nested blocks the outermost one counts.
    """

    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: list[tuple[logging.Logger, logging.LogRecord]] | None = None

    def __enter__(self) -> None:
        if _kept.get() is None:
            self._records = []
            _kept.set(self._records)

    def __exit__(self, *error: object) -> None:
        if self._records is None:
            return
        _kept.set(None)
        struck: BaseException | None = None
        for logger, record in self._records:
            try:
                _handle(logger, record)
            except BaseException as error:  # noqa: PERF203
                struck = struck or (error if is_for_program(error) else None)
        if struck is not None:
            raise struck


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
        with Contained():
            pairs = " ".join(f"{name}={_shown(value)}" for name, value in values.items())
            self._put(logging.INFO, "%s %s", (event, pairs), extra={FIELDS: values})

    def write(self, level: int, text: str, *args: object) -> None:
        """Log a line, as `logging.Logger.log` does."""
        with Contained():
            self._put(level, text, args)

    def warn(self, text: str, *args: object) -> None:
        """Log a warning."""
        with Contained():
            self._put(logging.WARNING, text, args)

    def pass_on(self, level: int, text: str, values: dict[str, Any]) -> None:
        """Log a line of another process, with its values by name."""
        with Contained():
            self._put(level, "%s", (text,), extra={FIELDS: values})

    def fail(self, text: str) -> None:
        """Log an error with the exception that is being handled."""
        with Contained():
            self._put(logging.ERROR, text, (), error=sys.exc_info())

    def _put(
        self,
        level: int,
        text: str,
        args: tuple[object, ...],
        *,
        extra: dict[str, object] | None = None,
        error: Any = None,
    ) -> None:
        logger = self._logger
        if not logger.isEnabledFor(level):
            return
        caller = sys._getframe(2)  # the caller of the public method
        code = caller.f_code
        place = code.co_filename, caller.f_lineno
        record = logger.makeRecord(
            logger.name, level, *place, text, args, error, code.co_name, extra
        )
        held = _kept.get()
        if held is None:
            _handle(logger, record)
        else:
            held.append((logger, record))


def _shown(value: object) -> str:
    """Return a value as one word, other text as JSON, so that no text can forge values or lines."""
    if value is None:
        return "-"
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)
