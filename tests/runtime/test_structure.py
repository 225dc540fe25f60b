"""Structured output through the engine: on the model that ships, and on the fake one where time must stand still."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import cbatch
from cbatch.backend.fake import FakeBackend, FakeConstraint, FakeGrammars, FakeVocab
from cbatch.backend.llama.grammar_matchers import GrammarMatchers
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import DeadlineError, GrammarError, QueueFullError, RequestCancelledError
from cbatch.files.file_run import run_file
from cbatch.messages import BatchPrompt
from tests import structure_runs
from tests.kinds import Reason, each_kind, engine_on, no_pool, thread_only
from tests.runtime.backends import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.core.span import Span
    from cbatch.engine import Engine
    from cbatch.options import Grammar

pytestmark = each_kind

PERSON = structure_runs.SCHEMAS[0]


@pytest.fixture(scope="module")
def engine(test_model: Path) -> Iterator[Engine]:
    with cbatch.load(test_model, parallel=4, ctx_per_seq=512) as loaded:
        yield loaded


# ---- on a real model ----


def test_answers_parse_and_validate_at_a_high_temperature(engine: Engine) -> None:
    found = structure_runs.run(engine, 32)
    assert found.n_right > 18


@pytest.mark.real
def test_answers_do_not_depend_on_company_where_that_is_promised() -> None:
    prompts = structure_runs.prompts(12)
    with cbatch.load(parallel=4, ctx_per_seq=512, exact=True) as exact:
        options = {"temperature": 1.5, "max_tokens": 60}
        together = exact.run(prompts, options=options).results()
        alone = [exact.submit(p, options=options).result() for p in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.finish_reason for r in together] == [r.finish_reason for r in alone]


@pytest.mark.real
def test_answers_validate_where_cells_are_taken_back() -> None:
    # one answer of 200 tokens leaves little of 256 cells to its neighbours
    with cbatch.load(parallel=8, n_ctx=256, kv="unified", swap_mib=0) as small:
        assert structure_runs.run(small, 48).n_right > 24
        assert small.stats().n_preempted > 0


def test_bad_grammar_fails_alone_and_the_next_request_runs(engine: Engine) -> None:
    prompts = [
        BatchPrompt(prompt="A", options={"regex": "a(b"}),
        BatchPrompt(prompt="B", options={"json_schema": PERSON}),
        BatchPrompt(prompt="C"),
    ]
    bad, good, free = engine.run(prompts, options={"max_tokens": 80}).results(return_errors=True)
    assert isinstance(bad.error, GrammarError)
    assert "unclosed group" in str(bad.error)
    assert (good.error, free.error) == (None, None)
    assert engine.submit("D", options={"max_tokens": 2}).result().error is None


def test_answer_is_one_of_the_choices(engine: Engine) -> None:
    texts = ["yes", "yes, but", 'a/b "c"', "(x|y)*", "two\nlines", "größer", "-", "[^a]", "\\d"]
    options = [{"choice": [text], "max_tokens": 80} for text in texts]
    prompts = [BatchPrompt(prompt="A", options=o) for o in options]
    results = engine.run(prompts).results()
    assert [r.text for r in results] == texts
    assert {r.finish_reason for r in results} == {"stop"}
    for seed in range(6):
        asked = {"choice": texts, "max_tokens": 80, "temperature": 9, "min_p": 0, "seed": seed}
        assert engine.submit("A", options=asked).result().text in texts


def test_schema_that_ends_its_compiler_fails_its_line_of_a_file_alone(
    engine: Engine, tmp_path: Path
) -> None:
    schemas = [
        {"const": 1},
        {"const": -(2**63)},
        {"type": "number", "multipleOf": -15793585},
        PERSON,
    ]
    options = [{"json_schema": s, "max_tokens": 80} for s in schemas]
    lines = [json.dumps({"prompt": "A", "options": o}) for o in options]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    summary = run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", engine=engine)
    assert (summary.n_done, summary.n_failed, summary.n_left) == (4, 2, 0)


def test_bad_grammar_leaves_the_options_of_the_next_request_as_they_were(engine: Engine) -> None:
    options = {"max_tokens": 20, "seed": 9, "ignore_eos": True}
    before = engine.submit("A", options=options).result()
    bad = {"grammar": "start: (", "temperature": 0, "repeat_penalty": 2.0, "seed": 1}
    assert engine.submit("A", options=bad).results(return_errors=True)[0].error is not None
    after = engine.submit("A", options=options).result()
    assert (after.token_ids, after.seed) == (before.token_ids, before.seed)


def test_format_of_an_item_comes_before_that_of_its_run(engine: Engine) -> None:
    prompts = [
        BatchPrompt(prompt="A", options={"response_format": {"type": "text"}, "seed": 3}),
        BatchPrompt(prompt="A", options={"response_format": {"type": "json_object"}}),
        BatchPrompt(prompt="A"),
    ]
    options = {"regex": "(x|y)", "max_tokens": 30, "seed": 3}
    free, held, bound = engine.run(prompts, options=options).results()
    again = engine.submit("A", options={"max_tokens": 30, "seed": 3}).result()
    assert free.text == again.text
    assert held.text.startswith("{")
    assert bound.text in ("x", "y")


def test_stream_joined_is_the_result(engine: Engine) -> None:
    response = engine.run(structure_runs.prompts(8), options={"max_tokens": 60, "temperature": 1.5})
    texts = dict.fromkeys(response.ids, "")
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(response.ids, ())
    for chunk in response:
        texts[chunk.id] += chunk.text
        tokens[chunk.id] += chunk.token_ids
    for result in response.results():
        assert texts[result.id] == result.text
        assert tokens[result.id] == result.token_ids


def test_stop_string_ends_a_constrained_answer(engine: Engine) -> None:
    options = {"json_schema": PERSON, "stop": '", "age"', "temperature": 1.5, "seed": 5}
    result = engine.submit("A", options=options).result()
    assert result.finish_reason == "stop"
    assert result.text.startswith('{"name": "')
    assert "age" not in result.text


def test_ignored_end_tokens_leave_the_end_to_the_grammar(engine: Engine) -> None:
    options = {"json_schema": PERSON, "ignore_eos": True, "temperature": 1.5}
    result = engine.submit("A", options=options).result()
    assert result.finish_reason == "stop"
    json.loads(result.text)
    options = {"regex": "a+", "ignore_eos": True, "max_tokens": 20}
    result = engine.submit("A", options=options).result()
    assert (result.finish_reason, len(result.token_ids)) == ("length", 20)


@pytest.mark.parametrize("cap", [1, 5, 13])
def test_extended_answer_is_the_one_in_one_go(engine: Engine, cap: int) -> None:
    options = {"json_schema": PERSON, "temperature": 1.5, "seed": 11}
    whole = engine.submit("A", options=options).result()
    part = engine.submit("A", options={**options, "max_tokens": cap}).result()
    assert part.finish_reason == "length"
    assert part.token_ids == whole.token_ids[:cap]
    extended = engine.extend(part, 200).result()
    json.loads(extended.text)
    assert extended.finish_reason == "stop"


def test_moving_window_keeps_to_the_grammar(engine: Engine) -> None:
    options = {"regex": "([a-z]{3} [0-9]{2}, )*", "ignore_eos": True, "max_tokens": 900}
    said = {**options, "n_discard": 100, "n_keep": 2, "temperature": 1.5}
    prompts = [cbatch.BatchPrompt(prompt="A", options={"seed": i}) for i in range(8)]
    for result in engine.run(prompts, options=said).results():
        assert result.usage.context_shifts > 0
        assert len(result.token_ids) == 900
        for part in result.text.split(", ")[:-1]:
            assert part[:3].isalpha()
            assert part[3:4] == " "
            assert part[4:].isdigit()


@pytest.mark.real
def test_pause_amid_an_answer_changes_no_token_of_it() -> None:
    options = {"json_schema": PERSON, "temperature": 1.5, "seed": 11}
    with cbatch.load(parallel=2, ctx_per_seq=512, exact=True, threaded=False) as by_hand:
        whole = by_hand.submit("A", options=options).result()
        response = by_hand.submit("A", options=options)
        chunks = iter(response)
        first = next(chunks)
        assert 0 < len(first.token_ids) < len(whole.token_ids)
        assert by_hand.pause(first.id)
        by_hand.submit("B", options=options).result()
        assert by_hand.stats().n_paused == 1
        assert by_hand.resume(first.id)
        rest = [token for chunk in chunks for token in chunk.token_ids]
    assert (*first.token_ids, *rest) == whole.token_ids
    json.loads(whole.text)


@pytest.mark.real
def test_engine_without_a_thread_compiles_too() -> None:
    with cbatch.load(parallel=2, ctx_per_seq=256, threaded=False) as byhand:
        results = byhand.run(["A", "B"], options={"json_schema": PERSON}).results()
        assert all(json.loads(r.text) for r in results)


# ---- while compiling ----


class GatedGrammars(FakeGrammars):
    """Compiles nothing before it is let go."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.n_compiled = 0

    def compile(self, grammar: Grammar) -> FakeConstraint:
        self.entered.set()
        assert self.go.wait(PATIENCE_S)
        self.n_compiled += 1
        return super().compile(grammar)


@pytest.fixture
def gate() -> Iterator[GatedGrammars]:
    made = GatedGrammars()
    yield made
    made.go.set()


def gated(gate: GatedGrammars, **options: Any) -> Engine:
    backend = FakeBackend(2, 64, 32)
    backend.grammars = gate
    return engine_on(backend, schedule=ScheduleOptions(**options))


@no_pool(Reason.ONE_BACKEND)
def test_others_run_while_one_compiles(gate: GatedGrammars) -> None:
    with gated(gate) as engine:
        bound = engine.run(["a"], options={"regex": "1", "max_tokens": 4})
        assert gate.entered.wait(PATIENCE_S)
        assert engine.submit("b", options={"max_tokens": 4}).result().error is None
        assert engine.stats().n_held == 1
        gate.go.set()
        [result] = bound.results()
        assert all(t % 2 for t in result.token_ids)


@no_pool(Reason.ONE_BACKEND)
def test_cancel_while_compiling_ends_at_once(gate: GatedGrammars) -> None:
    with gated(gate) as engine:
        response = engine.run(["a"], options={"regex": "1"})
        assert gate.entered.wait(PATIENCE_S)
        assert engine.cancel(response.ids[0])
        [result] = response.results(return_errors=True)
        assert isinstance(result.error, RequestCancelledError)
        gate.go.set()


@no_pool(Reason.ONE_BACKEND)
def test_timeout_while_compiling_ends_at_its_time(gate: GatedGrammars) -> None:
    with gated(gate) as engine:
        response = engine.run(["a"], options={"regex": "1", "timeout_s": 0.01})
        [result] = response.results(return_errors=True)
        assert isinstance(result.error, DeadlineError)
        gate.go.set()


@thread_only(Reason.AT_ONCE)
def test_close_while_compiling_ends_everybody_and_begins_no_other(gate: GatedGrammars) -> None:
    engine = gated(gate)
    response = engine.run([BatchPrompt(prompt=str(i), options={"regex": str(i)}) for i in range(3)])
    assert gate.entered.wait(PATIENCE_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    for result in response.results(return_errors=True):
        assert isinstance(result.error, RequestCancelledError)
    gate.go.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert gate.n_compiled == 1


@no_pool(Reason.ONE_BACKEND)
def test_those_that_wait_for_a_grammar_fill_the_queue(gate: GatedGrammars) -> None:
    with gated(gate, max_queue=1, when_full="reject") as engine:
        engine.run(["a", "b", "c"], options={"regex": "1", "max_tokens": 1})
        with pytest.raises(QueueFullError):
            engine.run(["d"], options={"max_tokens": 1})
        gate.go.set()


@no_pool(Reason.ONE_BACKEND)
def test_compiler_that_panics_fails_the_request_alone(gate: GatedGrammars) -> None:
    class PanicError(BaseException):
        pass

    def panic(grammar: Grammar) -> FakeConstraint:
        raise PanicError("index out of range")

    gate.compile = panic  # type: ignore[method-assign]
    with gated(gate) as engine:
        [result] = engine.run(["a"], options={"regex": "1"}).results(return_errors=True)
        assert isinstance(result.error, GrammarError)
        assert "index out of range" in str(result.error)
        assert engine.submit("b", options={"max_tokens": 2}).result().error is None


DRY: dict[str, Any] = {"dry_multiplier": 1.0, "max_tokens": 4}


class GatedVocab(FakeVocab):
    """Finds no breakers before it is let go."""

    def __init__(self) -> None:
        super().__init__(300)
        self.entered, self.go = threading.Event(), threading.Event()
        self.asked: list[tuple[str, ...]] = []

    def dry_breakers(self, strings: Sequence[str]) -> bytes:
        self.entered.set()
        assert self.go.wait(PATIENCE_S)
        self.asked.append(tuple(strings))
        return super().dry_breakers(strings)


class Recorder(FakeBackend):
    """Keeps the breakers that slots were bound with."""

    def __init__(self, vocab: GatedVocab) -> None:
        super().__init__(2, 64, 32, n_vocab=300)
        self.vocab = vocab
        self.bound: list[bytes] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.bound += [b.sampling.dry_breakers for b in plan.binds]
        return super().run(plan)


@no_pool(Reason.ONE_BACKEND)
def test_first_request_with_dry_holds_up_neither_its_caller_nor_others() -> None:
    vocab = GatedVocab()
    backend = Recorder(vocab)
    with engine_on(backend) as engine:
        dry = engine.run(["a", "b"], options=DRY)  # returns while the breakers are looked for
        assert vocab.entered.wait(PATIENCE_S)
        assert engine.submit("c", options={"max_tokens": 4}).result().error is None
        assert engine.stats().n_held == 2
        vocab.go.set()
        assert [r.error for r in dry.results()] == [None, None]
        engine.submit("d", options=DRY).result()
    assert vocab.asked == [("\n", ":", '"', "*")]
    assert backend.bound == [b"", *[b'\n:"*'] * 3]


@no_pool(Reason.ONE_BACKEND)
def test_request_with_dry_and_a_grammar_waits_for_both() -> None:
    vocab = GatedVocab()
    vocab.go.set()
    backend = Recorder(vocab)
    with engine_on(backend) as engine:
        result = engine.submit("a", options={**DRY, "regex": "1"}).result()
        again = engine.submit("a", options={**DRY, "regex": "1", "n": 2}).result()
    assert all(t % 2 for t in result.token_ids)
    assert len(again.choices) == 2
    assert len(vocab.asked) == 1
    assert all(backend.bound)


@no_pool(Reason.ONE_BACKEND)
def test_breakers_that_cannot_be_found_fail_their_request_alone() -> None:
    class Panicking(GatedVocab):
        def dry_breakers(self, strings: Sequence[str]) -> bytes:
            raise MemoryError("no room")

    vocab = Panicking()
    with engine_on(Recorder(vocab)) as engine:
        [result] = engine.run(["a"], options=DRY).results(return_errors=True)
        assert str(result.error).startswith("dry_sequence_breakers: it could not be compiled")
        assert engine.submit("b", options={"max_tokens": 2}).result().error is None


def test_async_reader_gets_a_constrained_answer() -> None:
    async def ask() -> str:
        async with engine_on(FakeBackend(2, 64, 32)) as engine:
            [result] = await engine.run(["a"], options={"regex": "1", "max_tokens": 4})
            return result.text

    assert anyio.run(ask)


# ---- on a device: masks are made while it decodes ----


def on_device(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    """An engine that takes its processor for a device."""
    monkeypatch.setattr("cbatch.backend.llama.llama_backend.computes_on_cpu", lambda _: False)
    return cbatch.load(parallel=4, ctx_per_seq=128, n_threads=1, exact=True, **settings)


@pytest.mark.real
def test_masks_made_beside_decoding_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"json_schema": PERSON, "max_tokens": 40, "temperature": 1.5}
    prompts = [BatchPrompt(prompt=f"Item {i}:", options={"seed": i}) for i in range(6)]
    filled: set[str] = set()
    fill = GrammarMatchers.fill

    def fill_and_tell(guides: GrammarMatchers, chunks: Sequence[Span]) -> None:
        filled.add(threading.current_thread().name.rpartition("_")[0])
        time.sleep(0.002)  # later than decoding ends
        fill(guides, chunks)

    with cbatch.load(parallel=4, ctx_per_seq=128, n_threads=1, exact=True) as engine:
        wanted = [r.token_ids for r in engine.run(prompts, options=options).results()]
    monkeypatch.setattr(GrammarMatchers, "fill", fill_and_tell)
    with on_device(monkeypatch) as engine:
        found = [r.token_ids for r in engine.run(prompts, options=options).results()]
    assert found == wanted
    assert filled == {"cbatch-masks"}
