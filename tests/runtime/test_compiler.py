"""Structures are compiled beside each other: one that takes long, or that nobody wants, holds up no other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.fake import FakeBackend, FakeConstraint, FakeGrammars
from cbatch.engine import Engine
from cbatch.errors import GrammarError, RequestCancelledError
from cbatch.options import Grammar
from cbatch.runtime.compiler import _N_FAILED_MAX, Compiler
from tests.runtime.backends import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOW = "1:500", "0:500"
"""Two grammars that are not compiled quickly."""
BAD = "no parity"
"""Another, which fails."""


class SlowGrammars(FakeGrammars):
    """Compiles the long ones among grammars once it is let go, and not quickly."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Semaphore(0), threading.Event()
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> FakeConstraint:
        self.compiled.append(grammar.text)
        if grammar.text in (*SLOW, BAD):
            self.entered.release()
            assert self.go.wait(PATIENCE_S)
        return super().compile(grammar)

    def compile_quickly(self, grammar: Grammar) -> FakeConstraint | None:
        return None if len(grammar.text) > 4 else self.compile(grammar)

    def wait_until_entered(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_S)


@pytest.fixture
def grammars() -> Iterator[SlowGrammars]:
    made = SlowGrammars()
    yield made
    made.go.set()


@pytest.fixture
def compiler(grammars: SlowGrammars) -> Iterator[Compiler]:
    made = compiler_of(grammars)
    yield made
    grammars.go.set()
    made.close()


@pytest.fixture
def engine(grammars: SlowGrammars) -> Iterator[Engine]:
    backend = FakeBackend(4, 128, 64)
    backend.grammars = grammars
    with Engine(backend, options={"max_tokens": 3, "ignore_eos": True}) as made:
        yield made
        grammars.go.set()


def compiler_of(grammars: FakeGrammars) -> Compiler:
    backend = FakeBackend(4, 128, 64)
    backend.grammars = grammars
    return Compiler(backend, lambda command: None, is_threaded=True)


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


def test_nobody_waits_for_a_compiler_that_is_closed(
    compiler: Compiler, grammars: SlowGrammars
) -> None:
    in_hand, behind = (compiler.ask(regex(text)) for text in SLOW)
    grammars.wait_until_entered()
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(compiler.close)
        grammars.go.set()
        closing.result(PATIENCE_S)
    assert isinstance(in_hand.result(0), FakeConstraint)
    assert behind.done()
    assert compiler.ask(regex("1")).cancelled()


def test_grammar_that_takes_long_holds_up_no_other(engine: Engine, grammars: SlowGrammars) -> None:
    slow = engine.run(["a"] * 2, options={"regex": SLOW[0]})
    grammars.wait_until_entered()
    quick = [engine.run(["b"], options={"regex": text}) for text in "01"]
    assert [len(r.token_ids) for response in quick for r in response.results()] == [3, 3]
    grammars.go.set()
    assert all(not r.error for r in slow.results())
    assert grammars.compiled == [SLOW[0], "0", "1"]


def test_grammar_that_may_take_long_comes_after_the_others() -> None:
    entered, go = threading.Event(), threading.Event()

    class RankedGrammars(SlowGrammars):
        def takes_long(self, grammar: Grammar) -> bool:
            return grammar.text == "0:5"

        def compile_quickly(self, grammar: Grammar) -> FakeConstraint | None:
            if grammar.text == "1":
                entered.set()
                assert go.wait(PATIENCE_S)
            return super().compile_quickly(grammar)

    grammars = RankedGrammars()
    compiler = compiler_of(grammars)
    found = [compiler.ask(regex("1"))]
    assert entered.wait(PATIENCE_S)
    found += [compiler.ask(regex(text)) for text in ("0:5", "1:5", "0")]
    go.set()
    assert all(isinstance(f.result(PATIENCE_S), FakeConstraint) for f in found)
    assert grammars.compiled == ["1", "1:5", "0", "0:5"]
    compiler.close()


def test_grammar_whose_requests_have_left_is_passed_over(
    engine: Engine, grammars: SlowGrammars
) -> None:
    first, left, again = (engine.run(["a"], options={"regex": t}) for t in (*SLOW, SLOW[1]))
    grammars.wait_until_entered()
    for response in (left, again):
        assert engine.cancel(response.ids[0])
        [result] = response.results(return_errors=True)
        assert isinstance(result.error, RequestCancelledError)
    grammars.go.set()
    assert len(first.results()) == 1
    behind = engine.run(["a"], options={"regex": BAD})  # compiled after the one that left
    [bad] = behind.results(return_errors=True)
    assert isinstance(bad.error, GrammarError)
    assert grammars.compiled == [SLOW[0], BAD]
    [back] = engine.run(["a"], options={"regex": SLOW[1]}).results()
    assert len(back.token_ids) == 3


def test_failure_that_took_long_is_remembered(compiler: Compiler, grammars: SlowGrammars) -> None:
    grammars.go.set()
    for _ in range(3):
        error = compiler.ask(regex(BAD)).result(PATIENCE_S)
        assert isinstance(error, GrammarError)
    assert grammars.compiled == [BAD]
    for i in range(_N_FAILED_MAX):
        compiler.ask(regex(f"bad number {i}")).result(PATIENCE_S)
    compiler.ask(regex(BAD)).result(PATIENCE_S)
    assert grammars.compiled.count(BAD) == 2


def test_failure_of_the_moment_is_not_remembered() -> None:
    class FullGrammars(SlowGrammars):
        def compile(self, grammar: Grammar) -> FakeConstraint:
            self.compiled.append(grammar.text)
            raise OSError("no process can be started")

    grammars = FullGrammars()
    compiler = compiler_of(grammars)
    for _ in range(2):
        error = compiler.ask(regex(SLOW[0])).result(PATIENCE_S)
        assert isinstance(error, GrammarError)
        assert "no process can be started" in error.reason
    assert len(grammars.compiled) == 2
    compiler.close()
