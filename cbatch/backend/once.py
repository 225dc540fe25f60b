"""What there is one of in a process, also where threads ask for it together; and what a fork leaves behind."""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, TypeVar

from cbatch.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls `make` the first time and returns what that returned; others wait meanwhile."""
    making, kept = threading.Lock(), functools.cache(make)

    @functools.wraps(make)
    def get() -> T:
        with making:
            return kept()

    return get


class Teams:
    """Knows which thread has a team of OpenMP's, in which process: a fork takes the thread along without its team."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def join(self) -> None:
        """Note that the calling thread computes with others, in this process.

        Raises:
            EngineError: it did so before the process was forked: it would wait for its team for ever.
        """
        pid = os.getpid()
        if vars(self._of_thread).setdefault("pid", pid) != pid:
            raise EngineError(
                "this thread computed before the process was forked, and the threads that helped it are not here: load "
                "with threaded=True, which computes in a new one, or start the process by multiprocessing's 'spawn', "
                "or fork before anything is computed"
            )


@once
def teams() -> Teams:
    """Return the process's one list of teams."""
    return Teams()
