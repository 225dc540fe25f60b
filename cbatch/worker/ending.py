"""Why a client's time with a worker is over, in either dialect."""

from __future__ import annotations

from enum import Enum


class Ending(Enum):
    """Why a session is over."""

    DONE = "the input has ended, or the client asked for the end, and all is done"
    LEFT = "the reader has left"
    FAILED = "the engine has stopped"
