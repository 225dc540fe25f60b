"""Signals that arrive where their exception would be dropped."""

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from cbatch.cli.main import Interrupts
from cbatch.cli.signals import ended_softly

_DROPS_EXCEPTIONS = """
import signal
try:
    signal.raise_signal({number})
except BaseException:
    pass
"""


@pytest.mark.parametrize("wait_s", [60.0, 0.0], ids=["goes on", "ends first"])
@pytest.mark.parametrize(
    ("number", "handled", "raised"),
    [
        (signal.SIGTERM, ended_softly, SystemExit),
        (signal.SIGHUP, ended_softly, SystemExit),
        (signal.SIGINT, Interrupts, KeyboardInterrupt),
    ],
    ids=["SIGTERM", "SIGHUP", "Ctrl-C"],
)
def test_signal_amid_an_import_that_drops_exceptions_still_ends_the_block(
    number: signal.Signals,
    handled: Callable[[], AbstractContextManager[None]],
    raised: type[BaseException],
    wait_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """numpy.random is such an import: a command that SIGHUP had ended wrote its file to the end all the same."""
    name = f"drops_{number.name.lower()}"
    (tmp_path / f"{name}.py").write_text(_DROPS_EXCEPTIONS.format(number=int(number)))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(number)

    def run() -> None:
        with handled():
            __import__(name)
            threading.Event().wait(wait_s)

    try:
        with pytest.raises(raised):
            run()
    finally:
        signal.signal(number, before)
        sys.modules.pop(name, None)
