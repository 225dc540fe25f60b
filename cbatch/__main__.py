"""The program: `cbatch` and `python -m cbatch`. It handles signals before the slow imports."""

from __future__ import annotations

import os
import select
import signal
import sys
from types import FrameType

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def main() -> None:
    """Run the command that this process's arguments name.

    A signal for which the command has no handler of its own, while it is imported or later, ends the process at once:
    with one line and with 128 plus the signal's number; a server with 0, as supervisors expect it, except for Ctrl-C.
    """
    _settle_inherited()
    for number in [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _leave)
    from cbatch.cli import app

    app(prog_name="cbatch")


def _settle_inherited() -> None:
    """Put right what the parent process may have left: closed standard streams, and SIGCHLD ignored."""
    # in place of a closed stream: files and sockets would get its number, and with it what is said on stderr
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    # where it is ignored the system tells nobody how a process ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    # no exception: the interrupted import might catch it, or show it where nobody can
    words = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    try:
        can_write = select.poll()
        can_write.register(2, select.POLLOUT)
        if can_write.poll(0):  # else nobody reads it
            os.write(2, f"cbatch: {words}\n".encode())
    finally:
        is_asked = sys.argv[1:2] == ["serve"] and number != signal.SIGINT
        os._exit(0 if is_asked else 128 + number)


if __name__ == "__main__":
    main()
