"""Structures that somebody waits for while nothing is submitted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from cbatch.backend.fake import FakeBackend, FakeConstraint, FakeGrammars
from cbatch.options import Grammar
from cbatch.runtime.compiler import Compiler
from tests.runtime.backends import PATIENCE_S


def test_nobody_waits_for_a_compiler_that_is_closed() -> None:
    entered, go = threading.Event(), threading.Event()

    class GatedGrammars(FakeGrammars):
        def compile(self, grammar: Grammar) -> FakeConstraint:
            entered.set()
            assert go.wait(PATIENCE_S)
            return super().compile(grammar)

    backend = FakeBackend(4, 128, 64)
    backend.grammars = GatedGrammars()
    compiler = Compiler(backend, lambda command: None, is_threaded=True)
    in_hand, behind = (compiler.ask(Grammar("regex", text)) for text in "10")
    assert entered.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(compiler.close)
        go.set()
        closing.result(PATIENCE_S)
    assert isinstance(in_hand.result(0), FakeConstraint)
    assert behind.done()
    assert compiler.ask(Grammar("regex", "1")).cancelled()
