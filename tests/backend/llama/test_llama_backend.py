"""Step plans on a real llama.cpp: equal by both steppers, refused where llama.cpp would end the process."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest
from llama_cpp._logger import llama_log_callback

import cbatch
from cbatch.backend.llama import context, llama_backend
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.native import NativeStepper
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import Binding, Slot, StepPlan, StepResult
from cbatch.core.span import Span
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions, ScheduleOptions
from cbatch.errors import (
    ConfigError,
    EngineClosedError,
    IncompatibleLlamaError,
    ModelLoadError,
    PlanError,
)
from cbatch.loading import load
from cbatch.messages import BatchPrompt
from cbatch.options import GREEDY, Sampling
from tests.oracle.python_stepper import PythonStepper
from tests.runtime.backends import PATIENCE_S, in_thread, streams

if TYPE_CHECKING:
    from collections.abc import Sequence


ROOT = Path(cbatch.__file__).parents[1]  # of the package under test, installed or not
N_SLOTS, N_BATCH = 3, 64
SHORT = {"max_tokens": 3, "ignore_eos": True}
MakeBackend = Callable[..., LlamaBackend]


@pytest.fixture
def make(test_model: Path) -> Iterator[MakeBackend]:
    """Return a factory of backends on the test model: 3 slots of 256 cells, steps of 64 tokens."""
    log, made = llama_log(), list[LlamaBackend]()
    log.install()

    def make_backend(*, stepper: Any = None, path: Path = test_model, **given: Any) -> LlamaBackend:
        sizes = {"parallel": N_SLOTS, "ctx_per_seq": 256, "n_batch": N_BATCH, "n_threads": 1}
        options = EngineOptions(**{**sizes, **given})
        model = open_model(path)
        try:
            made.append(LlamaBackend(model, Tuning(options), stepper=stepper))
        except BaseException:
            model.close()
            raise
        return made[-1]

    yield make_backend
    for backend in made:
        backend.close()
    log.remove()


def chunk(slot: int, start: int, n_tokens: int = 1, *, has_output: bool = True) -> Span:
    return Span(Slot(slot), start, [(7 * i + slot) % 900 for i in range(n_tokens)], has_output)


def bind_all(backend: LlamaBackend, sampling: Sampling = GREEDY) -> None:
    slots = range(backend.n_slots)
    backend.run(StepPlan((), binds=tuple(Binding(Slot(i), 4, sampling, ()) for i in slots)))


def last_positions(backend: LlamaBackend) -> list[int]:
    """Each slot's last position as llama.cpp has it; −1 where it is empty."""
    memory = llama_cpp.llama_get_memory(backend.ctx)
    return [
        int(llama_cpp.llama_memory_seq_pos_max(memory, slot)) for slot in range(backend.n_slots)
    ]


# ---- the same by both steppers ----

MIXED_OPTIONS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 2.0, "min_p": 0.2, "ignore_eos": False},
    {"temperature": 0, "stop": "e"},
    {"temperature": 1.0, "stop_token_ids": list(range(300, 400))},
)


@pytest.mark.parametrize("is_exact", [False, True])
def test_native_and_python_stepper_give_the_same_streams(make: MakeBackend, is_exact: bool) -> None:
    items = [
        BatchPrompt(
            tokens=[300 + 5 * i + j for j in range(1 + 17 * i)],
            options={"max_tokens": 5 + i, "ignore_eos": True, "seed": 2**40 + i, **options},
        )
        for i, options in enumerate(MIXED_OPTIONS)
    ]
    found = []
    for stepper in (NativeStepper, PythonStepper):
        # by hand and with a step a run: else the time that a step takes decides what joins it
        backend = make(stepper=one_step_a_run(stepper), exact=is_exact)
        with Engine(backend, threaded=False) as engine:
            found.append(streams(engine.run(items)))
    assert found[0] == found[1]
    assert {reason for reason, _ in found[0]} == {"length", "stop"}
    assert len({tokens for _, tokens in found[0]}) == len(items)


def one_step_a_run(stepper: type[NativeStepper | PythonStepper]) -> Callable[..., Any]:
    def make_stepper(ctx: Any, **sizes: Any) -> NativeStepper | PythonStepper:
        made = stepper(ctx, **sizes)
        run = made.run
        made.run = lambda chunks, *_, pads=(), **_more: run(chunks, 1, pads=pads)  # type: ignore[method-assign]
        return made

    return make_stepper


def test_several_steps_in_one_run_are_those_of_several_runs(make: MakeBackend) -> None:
    backend = make()
    bind_all(backend, Sampling(seed=3))
    prompts = tuple(chunk(i, 0, 4) for i in range(N_SLOTS))
    at_once = [list[int]() for _ in prompts]
    result = backend.run(StepPlan(prompts, n_steps=8))
    while True:
        for row, new in zip(at_once, result.tokens, strict=True):
            row += new
        n_done = len(at_once[0])
        if n_done == 8:
            break
        rest = tuple(Span(Slot(i), 3 + n_done, r[-1:], True) for i, r in enumerate(at_once))
        result = backend.run(StepPlan(rest, n_steps=8 - n_done))
    one_by_one = [r[:1] for r in at_once]
    backend.run(StepPlan(prompts, clears=(Slot(0), Slot(1), Slot(2))))
    for start in range(4, 11):
        rows = tuple(Span(Slot(i), start, r[-1:], True) for i, r in enumerate(one_by_one))
        for row, new in zip(one_by_one, backend.run(StepPlan(rows)).tokens, strict=True):
            row += new
    assert at_once == one_by_one
    assert last_positions(backend) == [10] * N_SLOTS


def test_logits_are_those_of_the_slots_last_token(make: MakeBackend) -> None:
    backend = make()
    bind_all(backend)
    result = backend.run(StepPlan((chunk(0, 0), chunk(1, 0, 5), chunk(2, 0, 3))))
    for slot, [token] in enumerate(result.tokens):
        assert int(backend.logits(Slot(slot)).argmax()) == token


# ---- cells ----


@pytest.mark.parametrize("is_exact", [False, True])
def test_slots_are_empty_when_everything_has_ended(make: MakeBackend, is_exact: bool) -> None:
    backend = make(stepper=one_step_a_run(NativeStepper), exact=is_exact)
    engine = Engine(backend, schedule=ScheduleOptions(share_prefixes=False), threaded=False)
    options = {"max_tokens": 6, "ignore_eos": True}
    response = engine.run([f"Count to {i}" for i in range(7)], options=options)
    engine.step()
    engine.cancel("1")
    assert {reason for reason, _ in streams(response)} >= {"cancelled"}
    while engine.step():
        pass
    assert last_positions(backend) == [-1] * N_SLOTS
    assert backend.n_cells == [0] * N_SLOTS
    engine.close()


def test_memory_that_counts_otherwise_is_refused(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_memory_seq_pos_max", lambda memory, slot: 3)
    with pytest.raises(IncompatibleLlamaError, match="took 4 positions, and 4 after"):
        make()


def test_context_that_computes_nothing_is_refused(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = StepResult([[]], 0, -3)
    monkeypatch.setattr(NativeStepper, "run", lambda *_: failed)
    with pytest.raises(
        IncompatibleLlamaError, match="llama_decode returned -3 for token 0 of a sequence"
    ):
        make()


# ---- plans that would end the process ----


def plan(*chunks: Span, **given: Any) -> StepPlan:
    return StepPlan(chunks, **given)


def test_second_thread_in_one_context_is_refused(make: MakeBackend) -> None:
    held, go = threading.Event(), threading.Event()

    class HeldStepper(PythonStepper):
        def run(self, spans: Sequence[Span], *args: Any, **given: Any) -> Any:
            if spans[0].has_output:
                held.set()
                assert go.wait(PATIENCE_S)
            return super().run(spans, *args, **given)

    backend = make(stepper=HeldStepper)
    bind_all(backend)
    wait = in_thread(lambda: backend.run(plan(chunk(0, 0))))
    assert held.wait(PATIENCE_S)
    with pytest.raises(PlanError, match="two threads"):
        backend.run(plan(chunk(1, 0)))
    go.set()
    assert wait().code == 0
    assert backend.run(plan(chunk(1, 0))).code == 0


def test_closed_backend_is_refused_and_closes_twice(make: MakeBackend) -> None:
    backend = make()
    backend.close()
    backend.close()
    backend.interrupt()
    for wrong in (plan(chunk(0, 0)), plan(clears=(Slot(0),)), plan()):
        with pytest.raises(EngineClosedError):
            backend.run(wrong)


# ---- sizes ----


@pytest.mark.parametrize(
    ("given", "n_window"),
    [
        ({"ctx_per_seq": 1}, 256),
        ({"ctx_per_seq": 256}, 256),
        ({"ctx_per_seq": 257}, 512),
        ({"ctx_per_seq": None, "n_ctx": 8}, 256),
        ({"ctx_per_seq": None, "n_ctx": 3 * 256 + 2}, 256),
        ({"ctx_per_seq": None, "n_ctx": 3 * 256 + 3}, 512),
        ({"ctx_per_seq": None}, context.DEFAULT_WINDOW),
    ],
)
def test_window_is_rounded_up_as_llama_cpp_does(
    make: MakeBackend, given: dict[str, Any], n_window: int
) -> None:
    backend = make(**given)
    assert backend.n_window == n_window
    assert int(llama_cpp.llama_n_ctx(backend.ctx)) == N_SLOTS * n_window
    assert int(llama_cpp.llama_n_seq_max(backend.ctx)) == N_SLOTS
    assert int(llama_cpp.llama_n_ctx_seq(backend.ctx)) == n_window


@pytest.mark.parametrize(
    ("given", "n_window", "n_cells"),
    [
        ({"ctx_per_seq": 300}, 300, 1024),
        ({"ctx_per_seq": 1}, 1, 256),
        ({"ctx_per_seq": 300, "n_ctx": 500}, 300, 512),
        ({"ctx_per_seq": None, "n_ctx": 300}, 512, 512),
        ({"ctx_per_seq": None, "n_ctx": 40_000}, 32_768, 40_192),
        ({"ctx_per_seq": 36_000, "n_ctx": 40_000}, 36_000, 40_192),
        ({"ctx_per_seq": None}, 3 * context.DEFAULT_WINDOW, 3 * context.DEFAULT_WINDOW),
    ],
)
def test_window_in_unified_memory_may_be_the_whole_pool(
    make: MakeBackend, random_model: Path, given: dict[str, Any], n_window: int, n_cells: int
) -> None:
    backend = make(path=random_model, kv="unified", **given)
    assert (backend.n_window, backend.memory.n_cells) == (n_window, n_cells)


def test_sizes_are_read_back(make: MakeBackend) -> None:
    assert make(n_batch=2**20).n_batch == N_SLOTS * 256
    backend = make(n_batch=100, n_ubatch=512)
    assert (backend.n_batch, int(llama_cpp.llama_n_ubatch(backend.ctx))) == (100, 100)
    assert (backend.n_slots, backend.n_threads) == (N_SLOTS, 1)
    assert int(llama_cpp.llama_n_threads(backend.ctx)) == 1


@pytest.mark.parametrize("parallel", [1, 256])
def test_fewest_and_most_slots_run(make: MakeBackend, parallel: int) -> None:
    backend = make(parallel=parallel, n_batch=256)
    bind_all(backend)
    result = backend.run(StepPlan(tuple(chunk(i, 0) for i in range(parallel))))
    assert (result.code, len(result.tokens)) == (0, parallel)


@pytest.mark.parametrize(
    ("given", "is_exact"),
    [({"n_batch": 1, "parallel": 1}, False), ({"n_batch": 3}, True), ({"n_ubatch": 1}, False)],
)
def test_smallest_steps_run(make: MakeBackend, given: dict[str, Any], is_exact: bool) -> None:
    with Engine(make(exact=is_exact, **given)) as engine:
        found = streams(engine.run(["abc", "defgh", "i", "jk"], options=SHORT))
    assert [reason for reason, _ in found] == ["length"] * 4


def test_context_larger_than_llama_cpp_can_count_is_refused(make: MakeBackend) -> None:
    with pytest.raises(ConfigError, match="parallel"):
        make(parallel=256, n_batch=256, ctx_per_seq=2**24)


# ---- what is left behind ----


def test_context_is_freed_where_its_backend_cannot_be_made(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("it is gone")

    freed, free = list[Any](), llama_cpp.llama_free

    def note(ctx: Any) -> None:
        freed.append(ctx)
        free(ctx)

    monkeypatch.setattr(llama_cpp, "llama_free", note)
    monkeypatch.setattr(llama_backend, "rope_factors", fail)
    with pytest.raises(OSError, match="is gone"):
        make()
    assert len(freed) == 1


def test_memory_is_freed(test_model: Path) -> None:
    script = """
        import resource, sys
        import cbatch
        peaks = []
        for _ in range(7):
            with cbatch.load(sys.argv[1], parallel=64, n_threads=1) as engine:
                engine.submit("Hi", options={"max_tokens": 2}).result()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        print(peaks[0], peaks[-1] - peaks[2])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(test_model)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
        check=True,
    )
    first, grown = map(int, done.stdout.split())
    assert grown < first // 4  # one context left behind is nearly all of the first peak


def record_log_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that gets every callback llama.cpp's log is set to."""
    calls: list[object] = []
    log_set = llama_cpp.llama_log_set

    def record(callback: object, data: object) -> None:
        calls.append(callback)

    record.restype, record.argtypes = log_set.restype, log_set.argtypes  # type: ignore[attr-defined]
    monkeypatch.setattr(llama_cpp, "llama_log_set", record)
    return calls


def test_log_is_handed_back_after_the_last_engine(
    test_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_log_calls(monkeypatch)
    native_callback = llama_log_callback
    one = load(test_model, parallel=1, n_threads=1)
    with pytest.raises(ModelLoadError):
        load(tmp_path / "none.gguf")
    two = load(test_model, parallel=1, n_threads=1)
    one.close()
    one.close()
    assert native_callback not in calls
    two.close()
    with pytest.raises(ModelLoadError):
        load(tmp_path / "none.gguf")
    assert calls[-1] is native_callback
    assert calls.count(native_callback) == 2


def test_log_reaches_the_logger_of_cbatch(
    test_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="cbatch.llama"):
        load(test_model, parallel=1, n_threads=1).close()
    assert any("llama_context" in r.message for r in caplog.records)
    assert llama_log().drain() == []


def test_llama_object_is_shared_and_outlives_the_engine(test_model: Path) -> None:
    borrowed = llama_cpp.Llama(str(test_model), n_ctx=64, verbose=False)
    with load(borrowed, parallel=2, n_threads=1) as engine:
        [(reason, _)] = streams(engine.submit("Hi", options=SHORT))
        assert reason == "length"
    assert borrowed.tokenize(b"Hi")
    borrowed.close()
