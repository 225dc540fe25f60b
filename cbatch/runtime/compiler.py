"""Grammars: compiled for those that wait for them, never by the thread that computes."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from cbatch.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.backend import Grammars
    from cbatch.options import Grammar
    from cbatch.runtime.keeper import Post

    Then = Callable[[Grammar, object], object]
    """Takes a grammar and what compiling it brought: a constraint, or a `GrammarError`."""


class Compiler:
    """Compiles grammars in a thread of its own, which starts with the first of them, one after another.

    What it brings it hands to `post`, which has it done by the owner thread between two runs.
    """

    def __init__(self, grammars: Grammars, post: Post, *, is_threaded: bool) -> None:
        self._grammars, self._post, self._is_threaded = grammars, post, is_threaded
        self._work: SimpleQueue[tuple[Grammar, Then] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def compile(self, grammar: Grammar, then: Then) -> None:
        """Compile a grammar, then have `then` called with what came of it."""
        if not self._is_threaded:
            self._do(grammar, then)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cbatch-compiler", daemon=True)
            self._thread.start()
        self._work.put((grammar, then))

    def close(self) -> None:
        """Return when the one in hand is done; those behind it are not begun. Nothing may be asked for afterwards."""
        self._is_closed = True
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if not self._is_closed:
                self._do(*work)

    def _do(self, grammar: Grammar, then: Then) -> None:
        found = self._compiled(grammar)
        self._post(lambda: then(grammar, found))

    def _compiled(self, grammar: Grammar) -> object:
        try:
            return self._grammars.compile(grammar)
        except GrammarError as error:
            return error
        except BaseException as error:  # a panic of the compiler is no Exception
            failure = GrammarError(grammar.kind, f"it could not be compiled: {error}")
            failure.__cause__ = error
            return failure
