"""What several loads, owners and processes have to do with one another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import llama_cpp
import pytest

import cbatch
from cbatch.backend.llama import log as log_module
from cbatch.backend.threads import once
from cbatch.errors import EngineClosedError, ModelLoadError
from tests.runtime.backends import all_results, in_thread
from tests.test_engine import run_script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENDLESS = {"ignore_eos": True, "n_discard": 16, "max_tokens": 100_000}


@pytest.fixture
def llama(test_model: Path) -> Iterator[llama_cpp.Llama]:
    made = llama_cpp.Llama(str(test_model), n_ctx=64, verbose=False)
    yield made
    made.close()


# ---- a model that somebody else owns ----


def test_llama_without_weights_is_refused_by_name(test_model: Path) -> None:
    bare = llama_cpp.Llama(str(test_model), vocab_only=True, verbose=False)
    with pytest.raises(ModelLoadError, match=r"vocab_only=True.*no weights"):
        cbatch.load(bare)
    bare.close()


def test_llama_closed_before_loading_is_refused_by_name(llama: llama_cpp.Llama) -> None:
    llama.close()
    with pytest.raises(ModelLoadError, match="is closed"):
        cbatch.load(llama)


@pytest.mark.parametrize("threaded", [True, False])
def test_llama_closed_under_an_idle_engine_fails_the_next_request_by_name(
    llama: llama_cpp.Llama, threaded: bool
) -> None:
    engine = cbatch.load(llama, parallel=2, ctx_per_seq=256, threaded=threaded)
    assert engine.submit("a", options={"max_tokens": 2}).result().error is None
    llama.close()
    with pytest.raises(EngineClosedError, match="closed under its engine"):
        engine.submit("b", options={"max_tokens": 2}).result()
    engine.close()


def test_llama_closed_under_running_requests_fails_them_by_name(llama: llama_cpp.Llama) -> None:
    engine = cbatch.load(llama, parallel=2, ctx_per_seq=256)
    other = cbatch.load(llama, parallel=2, ctx_per_seq=256)
    response = engine.run(["a", "b", "c"], options=ENDLESS)
    chunks = iter(response)
    next(chunks)
    llama.close()
    for result in all_results(response):
        assert "closed under its engine" in str(result.error)
    other.close()
    engine.close()


def test_llama_closed_after_its_engines_is_closed_once(llama: llama_cpp.Llama) -> None:
    for _ in range(2):
        with cbatch.load(llama, parallel=2, ctx_per_seq=256) as engine:
            assert engine.submit("a", options={"max_tokens": 2}).result().error is None
    llama.close()
    llama.close()


# ---- threads that load together ----


def test_threads_that_ask_together_get_one_and_the_same() -> None:
    begun, n_made = threading.Barrier(8), []

    def make() -> object:
        n_made.append(1)
        return object()

    shared = once(make)

    def ask() -> object:
        begun.wait()
        return shared()

    waiting = [in_thread(ask) for _ in range(8)]
    assert len({id(wait()) for wait in waiting}) == 1
    assert len(n_made) == 1


def test_first_loads_in_many_threads_share_one_log(test_model: Path) -> None:
    run_script(
        """
        import sys, threading
        import cbatch
        from cbatch.backend.llama import log

        made, new = [], log.LlamaLog.__init__

        def slow(self, *args):
            made.append(self)
            threading.Event().wait(0.05)
            new(self, *args)

        log.LlamaLog.__init__ = slow
        begun = threading.Barrier(4)

        def load():
            begun.wait()
            engines.append(cbatch.load(sys.argv[1], parallel=1, ctx_per_seq=256, n_threads=1))

        engines = []
        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1, made
        assert made[0]._n_users == 4
        for engine in engines:
            engine.close()
        assert made[0]._n_users == 0
        """,
        test_model,
    )


def test_log_is_one() -> None:
    assert log_module.llama_log() is log_module.llama_log()


# ---- forks ----

FORK = """
    import os, sys
    import cbatch
    from cbatch.errors import EngineClosedError

    def load(threaded, n_threads=2):
        return cbatch.load(sys.argv[1], parallel=2, ctx_per_seq=256, threaded=threaded, n_threads=n_threads)

    def answer(engine):
        return engine.submit("a", options={"max_tokens": 4, "temperature": 0}).result().text

    parent = load(%r)
    expected = answer(parent)
    child = os.fork()
    if child == 0:
        engine = load(%r, %r)
        try:
            assert answer(engine) == expected
        except EngineClosedError as error:
            assert "before the process was forked" in str(error)
            engine.close()
            os._exit(7)
        engine.close()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == %d, code
    assert answer(parent) == expected
    parent.close()
"""


@pytest.mark.parametrize(
    ("parent", "child", "n_threads", "code"),
    [
        (True, True, 2, 0),
        (True, False, 2, 0),
        (False, True, 2, 0),
        (False, False, 2, 7),
        (False, False, 1, 0),
    ],
)
def test_child_of_a_fork_computes_or_is_told_why_not(
    test_model: Path, parent: bool, child: bool, n_threads: int, code: int
) -> None:
    run_script(FORK % (parent, child, n_threads, code), test_model)
