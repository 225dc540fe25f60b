"""A system that has no more threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class NoThreads:
    """Lets no threads of some names start, as a system does that has no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
        self.n_refused, self.is_over = 0, False
        start: Callable[[threading.Thread], None] = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith(prefix) and not self.is_over:
                self.n_refused += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
