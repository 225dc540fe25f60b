"""Which workers in threads a client has started, also after its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from cbatch.worker.client import Workers

RUNTIMES: WeakKeyDictionary[Workers, list[Any]] = WeakKeyDictionary()
"""The runtimes of a client's workers, the newest last."""
