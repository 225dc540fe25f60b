"""Grammars and DRY breakers: compiled in a thread of their own, for requests that wait for them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from cbatch.errors import GrammarError
from cbatch.options import DryBreakers, Grammar
from cbatch.runtime.work_thread import WorkThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.backend import Backend
    from cbatch.runtime.cache_io import Post

    Want = Grammar | DryBreakers
    Then = Callable[[Want, object], object]
    """Takes what was wanted and the result of compiling it: a constraint, tokens, or a `GrammarError`."""


class Compiler:
    """Compiles one after another, in a thread of its own.

    Results go to `post`, which has them handled by the owner thread between two runs.
    """

    def __init__(self, backend: Backend, post: Post, *, is_threaded: bool) -> None:
        self._backend, self._post = backend, post
        self._thread = WorkThread("cbatch-compiler", is_threaded=is_threaded)
        self._is_closed = False

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is the thread that compiles. From any thread."""
        return self._thread.is_current

    def compile(self, want: Want, then: Then) -> None:
        """Compile something, then have `then` called with the result."""

        def post(found: Future[object]) -> None:
            if not found.cancelled():
                self._post(lambda: then(want, found.result()))

        self.ask(want).add_done_callback(post)

    def ask(self, want: Want) -> Future[object]:
        """Compile something; return a future of the result, cancelled where the compiler is closed."""
        found: Future[object] = Future()
        if self._is_closed:
            found.cancel()
        else:
            self._thread.do(lambda: self._settle(want, found))
        return found

    def close(self) -> None:
        """Return when the current compilation is done; the others are cancelled, as are later ones."""
        self._is_closed = True
        self._thread.close()

    def _settle(self, want: Want, found: Future[object]) -> None:
        if self._is_closed:
            found.cancel()
        else:
            found.set_result(self._compiled(want))

    def _compiled(self, want: Want) -> object:
        try:
            if isinstance(want, DryBreakers):
                return self._backend.vocab.dry_breakers(want.strings)
            return self._backend.grammars.compile(want)
        except GrammarError as error:
            return error
        except BaseException as error:  # a panic of the compiler is no Exception
            kind = want.kind if isinstance(want, Grammar) else "dry_sequence_breakers"
            failure = GrammarError(kind, f"it could not be compiled: {error}")
            failure.__cause__ = error
            return failure
