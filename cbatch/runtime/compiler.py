"""Grammars and DRY breakers: compiled in threads of their own, for requests that wait for them."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
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
    """Takes what was wanted and the result of compiling it: a constraint, tokens, a `GrammarError`, or None."""

_N_FAILED_MAX = 256
"""Grammars that are remembered because they took long and failed. Our choice."""

_PLAIN, _LONG = 0, 1
"""Ranks of what is compiled: grammars that may take long come after all others."""


@dataclass(frozen=True, slots=True)
class _CompileJob:
    """Something to compile, for as long as it is wanted."""

    want: Want
    is_wanted: Callable[[], bool]
    found: Future[object] = field(default_factory=Future)


class Compiler:
    """Compiles in two threads: all grammars in order in the first, those that take long once more in the second.

    The first thread gives a grammar up after a moment, so that the others do not wait for it. Results go to `post`,
    which has them handled by the owner thread between two runs.
    """

    def __init__(self, backend: Backend, post: Post, *, is_threaded: bool) -> None:
        self._backend, self._post, self._is_threaded = backend, post, is_threaded
        names = "cbatch-compiler", "cbatch-long-compiler"
        self._short, self._long = (WorkThread(name, is_threaded=is_threaded) for name in names)
        self._failed: dict[bytes, GrammarError] = {}
        """By the digest of a grammar, longest ago first. Only the thread that compiles what takes long writes it."""
        self._is_closed = False

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller's thread compiles. From any thread."""
        return self._short.is_current or self._long.is_current

    def compile(self, want: Want, is_wanted: Callable[[], bool], then: Then) -> None:
        """Compile something, then have `then` called with the result: None if it was not wanted when its turn came.

        `is_wanted` is called from any thread.
        """

        def post(found: Future[object]) -> None:
            if not found.cancelled():
                self._post(lambda: then(want, found.result()))

        job = _CompileJob(want, is_wanted)
        job.found.add_done_callback(post)
        self._begin(job)

    def ask(self, want: Want) -> Future[object]:
        """Compile something; return a future of the result, cancelled where the compiler is closed."""
        job = _CompileJob(want, lambda: True)
        self._begin(job)
        return job.found

    def close(self) -> None:
        """Return when the current compilations are done; the others are cancelled, as are later ones."""
        self._is_closed = True
        self._short.close()  # it gives work to the other
        self._long.close()

    def _begin(self, job: _CompileJob) -> None:
        want = job.want
        takes_long = isinstance(want, Grammar) and self._backend.grammars.takes_long(want)
        if self._is_closed:
            job.found.cancel()
        else:
            self._short.do(partial(self._do_shortly, job), _LONG if takes_long else _PLAIN)

    def _do_shortly(self, job: _CompileJob) -> None:
        """Compile something, or have the other thread do so if it takes long."""
        if not self._has_ended(job):
            found = self._compiled(job.want, self._quickly)
            if found is None:
                self._long.do(partial(self._do_long, job))
            else:
                job.found.set_result(found)

    def _do_long(self, job: _CompileJob) -> None:
        if not self._has_ended(job):
            job.found.set_result(self._compiled(job.want, self._with_patience))

    def _has_ended(self, job: _CompileJob) -> bool:
        """End a job whose result is known, or that nobody waits for; return whether it was one."""
        if self._is_closed:
            job.found.cancel()
        elif not job.is_wanted():
            job.found.set_result(None)
        elif isinstance(job.want, Grammar) and (error := self._failed.get(_digest(job.want))):
            job.found.set_result(error)
        else:
            return False
        return True

    def _quickly(self, want: Want) -> object | None:
        """Return what was compiled; None where it takes long and another thread has the time."""
        if self._is_threaded and isinstance(want, Grammar):
            return self._backend.grammars.compile_quickly(want)
        return self._with_patience(want)

    def _with_patience(self, want: Want) -> object:
        if isinstance(want, DryBreakers):
            return self._backend.vocab.dry_breakers(want.strings)
        try:
            return self._backend.grammars.compile(want)
        except GrammarError as error:
            self._failed[_digest(want)] = error
            if len(self._failed) > _N_FAILED_MAX:
                del self._failed[next(iter(self._failed))]
            raise

    def _compiled(self, want: Want, compile: Callable[[Want], object]) -> object:
        """Return what `compile` returns, or why that is nothing as a `GrammarError`."""
        try:
            return compile(want)
        except GrammarError as error:
            return error
        except BaseException as error:  # a panic of the compiler is not an Exception
            kind = want.kind if isinstance(want, Grammar) else "dry_sequence_breakers"
            failure = GrammarError(kind, f"it could not be compiled: {error}")
            failure.__cause__ = error
            return failure


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind}:{grammar.text}".encode(errors="surrogatepass")).digest()
