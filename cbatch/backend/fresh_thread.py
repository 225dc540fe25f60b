"""Why nothing is computed in the caller's thread.

GNU's OpenMP keeps a team of workers for every thread that ever computed, until that thread ends. Once there are more
of them than cores, workers no longer spin between two parallel regions but sleep, and a decode step of a small model
takes twice as long. So the owner thread's team must be the only one: all else is computed in threads that end.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from cbatch.interrupts import Latch, Postponed

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def run_aside(work: Callable[[], T]) -> T:
    """Do `work` in a thread of its own, which has ended when this returns; return or raise what it does.

    A native call cannot be broken off: Ctrl-C is raised when `work` has ended, and the program ends no earlier.
    """
    done: Future[T] = Future()
    ended = Latch()

    def settle() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        finally:
            ended.open()

    with Postponed():
        at_exit = weakref.finalize(done, _outlast, ended)
        thread = threading.Thread(target=settle, name="cbatch-aside")
        thread.start()
        ended.wait()
        thread.join()
        at_exit.detach()
    return done.result()


def _outlast(ended: Latch) -> None:
    """Wait whatever happens: native code that runs on while a process ends takes it down."""
    with Postponed():
        ended.wait()
