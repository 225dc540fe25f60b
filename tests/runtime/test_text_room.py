"""Texts to embed on the fake backend: what comes back, in which order, and what ends them."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.backend.fake.fake_embedder import fake_vector
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import (
    ConfigError,
    DeadlineError,
    DuplicateIdError,
    EmbeddingError,
    EngineClosedError,
    PromptError,
    RequestCancelledError,
    RequestFailedError,
    TextTooLongError,
    UnsupportedTaskError,
)
from cbatch.runtime import text_room
from cbatch.runtime.ids import check_own
from cbatch.runtime.text_room import KeptVectors, WaitingText
from tests.kinds import each_kind, engine_on
from tests.runtime.backends import GatedBackend, parts_of
from tests.server.clients import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.backend.fake.fake_embedder import FakeEmbedder


def unit(text: str) -> Any:
    found = fake_vector(list(text.encode())).astype(np.float64)
    return (found / np.linalg.norm(found)).astype(np.float32)


class Gate:
    """Holds up computing until it is opened; says when the first call waits."""

    def __init__(self) -> None:
        self.has_come, self.may_go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.has_come.set()
        self.may_go.wait()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(2, 64)


@pytest.fixture
def engine(backend: FakeBackend) -> Iterator[Engine]:
    with Engine(backend) as made:
        yield made


class Queued:
    """Texts that are all in the queue when `wait` returns."""

    def __init__(self, *texts: str) -> None:
        self._texts, self._done = texts, threading.Event()

    def __iter__(self) -> Iterator[str]:
        yield from self._texts
        self._done.set()

    def wait(self) -> None:
        self._done.wait()


def calls(backend: FakeBackend) -> list[str]:
    """The texts that were computed, in order."""
    found: list[FakeEmbedder] = backend.embedders
    return [bytes(text).decode() for e in found for call in e.calls for text in call]


def test_array_has_a_unit_vector_for_each_text_in_order(engine: Engine) -> None:
    texts = ["red", "a longer text", "b"]
    found = engine.embed(texts).array()
    assert found.dtype == np.float32
    assert np.array_equal(found, np.stack([unit(text) for text in texts]))


def test_vectors_come_from_a_generator_as_they_end(engine: Engine) -> None:
    found = {result.index: result for result in engine.embed(f"text {i}" for i in range(1000))}
    assert len(found) == 1000
    assert found[432].embedding is not None
    assert np.array_equal(found[432].embedding, unit("text 432"))
    assert found[0].n_tokens == len("text 0")


def test_await_and_async_for_give_the_same_results(engine: Engine) -> None:
    async def source() -> Any:
        for text in ("a", "b"):
            yield text

    async def run() -> None:
        awaited = await engine.embed(["a", "b"])
        seen = [result async for result in engine.embed(source())]
        assert [r.index for r in awaited] == [0, 1]
        assert {r.index: r.embedding.tolist() for r in seen if r.embedding is not None} == {
            r.index: r.embedding.tolist() for r in awaited if r.embedding is not None
        }

    asyncio.run(run())


def test_wrong_texts_fail_alone_under_their_ids(engine: Engine) -> None:
    texts = ["", 7, "x" * 65, [400], "fine", "\xff", "\xfe"]
    found = engine.embed(texts, ids=list("abcdefg")).results(return_errors=True)
    kinds = [PromptError, ConfigError, TextTooLongError, PromptError, type(None)]
    assert [type(r.error) for r in found[:5]] == kinds
    assert [r.id for r in found] == list("abcdefg")
    assert found[2].error is not None
    assert (found[2].error.n_prompt, found[2].error.n_limit) == (65, 64)  # type: ignore[attr-defined]
    with pytest.raises(cbatch.BatchError, match="4 of 7"):
        engine.embed(texts).results()


def test_text_without_a_finite_vector_is_an_error(engine: Engine) -> None:
    none, nan, fine = engine.embed([[255], [254], [1]]).results(return_errors=True)
    assert isinstance(none.error, EmbeddingError)
    assert isinstance(nan.error, EmbeddingError)
    assert fine.error is None


def test_normalize_off_and_dimensions_are_as_asked(engine: Engine) -> None:
    raw = fake_vector(b"red")
    found = engine.embed(["red"], normalize=False, dimensions=3).array()[0]
    assert np.array_equal(found, raw[:3])
    cut = engine.embed(["red"], dimensions=3).array()[0]
    assert np.allclose(np.linalg.norm(cut), 1)
    with pytest.raises(ConfigError, match="dimensions=9"):
        engine.embed(["red"], dimensions=9)


def test_pooling_none_gives_a_vector_for_each_token(engine: Engine) -> None:
    response = engine.embed(["red"], pooling="none", normalize=False)
    (found,) = response.results()
    assert found.embedding is not None
    assert np.array_equal(found.embedding, np.stack([fake_vector([t]) for t in b"red"]))
    with pytest.raises(ConfigError, match="several vectors"):
        engine.embed(["red"], pooling="none").array()


def test_truncate_keeps_the_end_or_the_start(engine: Engine) -> None:
    text = "a" * 40 + "b" * 40
    for truncate, kept in (("end", text[:64]), ("start", text[-64:])):
        assert np.array_equal(engine.embed([text], truncate=truncate).array()[0], unit(kept))  # type: ignore[arg-type]


@contextmanager
def tokenized(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of what is made tokens."""
    lengths, tokenize = list[int](), backend.vocab.tokenize

    def noted(text: str) -> list[int]:
        lengths.append(len(text))
        return tokenize(text)

    with monkeypatch.context() as patched:
        patched.setattr(backend.vocab, "tokenize", noted)
        yield lengths


@pytest.mark.parametrize("truncate", [None, "end", "start"])
def test_text_of_megabytes_is_not_made_tokens_whole(
    engine: Engine, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, truncate: Any
) -> None:
    text = "a" * 10**6 + "b" * 10**6
    with tokenized(backend, monkeypatch) as lengths:
        (found,) = engine.embed([text], truncate=truncate).results(return_errors=True)
    assert max(lengths) <= 16 * 64
    if truncate is None:
        assert "at least 1024 tokens" in str(found.error)
    else:
        assert calls(backend) == ["a" * 64 if truncate == "end" else "b" * 64]


@pytest.mark.parametrize("truncate", [None, "end"])
def test_query_or_instruction_of_megabytes_is_not_made_tokens_whole(
    monkeypatch: pytest.MonkeyPatch, truncate: Any
) -> None:
    cases: list[tuple[FakeBackend, Callable[[Engine], Any]]] = [
        (reranker(), lambda e: e.rerank("q" * 10**6, ["a"], truncate=truncate)),
        (reranker(), lambda e: e.rerank("q", ["a" * 10**6])),
        (FakeBackend(2, 64), lambda e: e.embed(["a"], instruction="q" * 10**6, truncate=truncate)),
    ]
    for made, ask in cases:
        with Engine(made) as engine, tokenized(made, monkeypatch) as lengths:
            (found,) = ask(engine).results(return_errors=True)
        assert isinstance(found.error, TextTooLongError)
        assert max(lengths) <= 16 * 64


def test_text_with_few_tokens_for_its_characters_is_made_tokens_whole(
    engine: Engine, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.vocab, "tokenize", lambda text: [*text.replace(" ", "").encode()])
    assert engine.embed([" " * 5000 + "red"]).results()[0].n_tokens == 3


def test_truncate_leaves_the_instruction_whole(engine: Engine, backend: FakeBackend) -> None:
    text, before = "a" * 40 + "b" * 40, "Instruct: find\nQuery: "
    n_left = 64 - len(before)
    for truncate, kept in (("end", text[:n_left]), ("start", text[-n_left:])):
        engine.embed([text], truncate=truncate, instruction="find").array()  # type: ignore[arg-type]
        assert calls(backend)[-1] == before + kept
    (failed,) = engine.embed(["red"], truncate="start", instruction="x" * 99).results(
        return_errors=True
    )
    assert isinstance(failed.error, TextTooLongError)
    assert "instruction" in str(failed.error)
    (failed,) = engine.embed([[1, 2]], instruction="x").results(return_errors=True)
    assert isinstance(failed.error, PromptError)


def test_instruction_stands_before_each_text(engine: Engine, backend: FakeBackend) -> None:
    engine.embed(["red"], instruction="find").array()
    assert calls(backend) == ["Instruct: find\nQuery: red"]
    backend.embedders.clear()
    with Engine(only_embeds(2)) as other:
        other.embed(["red"], instruction="search: ").array()
        assert other.model_facts.is_causal is False


def test_kept_vectors_are_bounded_with_what_they_take_besides_numbers() -> None:
    kept = KeptVectors(10_000)
    for i in range(1000):
        kept.put(bytes([i // 256, i % 256]), np.zeros(2, np.float32))
    found = [i for i in range(1000) if kept.get(bytes([i // 256, i % 256])) is not None]
    assert found == [*range(1000 - len(found), 1000)]
    assert 10 < len(found) < 50


def only_embeds(n_slots: int = 2) -> FakeBackend:
    backend = FakeBackend(n_slots, 64)
    backend.can_generate, backend.pooling = False, "mean"
    return backend


def test_equal_texts_are_computed_once(engine: Engine, backend: FakeBackend) -> None:
    found = engine.embed(["red", "blue"] * 300).array()
    again = engine.embed(["red"]).array()
    assert sorted(calls(backend)) == ["blue", "red"]
    assert np.array_equal(found[598], again[0])
    assert engine.stats().n_texts == 601


def test_texts_fill_micro_batches_up_to_their_limits() -> None:
    backend, gate = FakeBackend(2, 64), Gate()
    backend.hold_texts = gate
    with Engine(backend) as engine:
        response = engine.embed([chr(65 + i) * (i % 30 + 2) for i in range(50)])
        gate.has_come.wait()
        gate.may_go.set()
        response.array()
        sizes = [(len(c), sum(map(len, c))) for c in backend.embedders[0].calls]
    assert all(n <= 16 and n_tokens <= 64 for n, n_tokens in sizes)
    assert len(sizes) < 20


@pytest.mark.parametrize(
    ("settings", "more"), [({"instruction": "x" * 1000}, 0), ({"truncate": "end"}, 1000)]
)
def test_texts_that_are_refused_or_cut_count_whole_in_a_turn(
    settings: dict[str, Any], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_room, "N_TURN_TOKENS", 100)
    backend, gate = FakeBackend(2, 64), Gate()
    n_tokenized, seen = [0], list[int]()
    tokenize = backend.vocab.tokenize

    def counted(text: str) -> list[int]:
        n_tokenized[0] += "xxx" in text
        return tokenize(text)

    def hold() -> None:
        seen.append(n_tokenized[0])
        gate()

    monkeypatch.setattr(backend.vocab, "tokenize", counted)
    backend.hold_texts = hold
    with Engine(backend) as engine:
        responses = [engine.embed(["first"])]
        gate.has_come.wait()
        for texts, more_settings in (
            (Queued("second"), {}),
            (Queued(*(letter + "x" * more for letter in "abcdefgh")), settings),
        ):
            responses.append(engine.embed(texts, **more_settings))
            texts.wait()
        gate.may_go.set()
        for response in responses:
            response.results(return_errors=True)
    assert n_tokenized[0] == 8
    assert seen[:2] == [0, 1]


def test_call_that_fails_ends_only_the_text_at_fault() -> None:
    backend = FakeBackend(2, 64)

    def fail() -> None:
        if any(bytes(text) == b"bad" for text in backend.embedders[0].calls[-1]):
            raise RuntimeError("no")

    backend.hold_texts = fail
    with Engine(backend) as engine:
        found = engine.embed(["a", "bad", "b"]).results(return_errors=True)
    assert [type(r.error) for r in found] == [type(None), RequestFailedError, type(None)]


def test_texts_that_pass_ready_ones_are_made_tokens_as_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_room, "N_READY", 4)
    backend, gates, n_seen = FakeBackend(2, 64), (Gate(), Gate()), list[int]()

    def hold() -> None:
        n_seen.append(len(lengths))
        if len(n_seen) <= len(gates):
            gates[len(n_seen) - 1]()

    backend.hold_texts = hold
    with Engine(backend) as engine, tokenized(backend, monkeypatch) as lengths:
        responses = [engine.embed(["first"])]
        for gate, letters, is_patient in (
            (gates[0], "abcdefgh", True),
            (gates[1], "ijklmnopqrstuvwxyz", False),
        ):
            gate.has_come.wait()
            texts = Queued(*(letter * 40 for letter in letters))
            responses.append(engine.embed(texts, is_patient=is_patient))
            texts.wait()
            gate.may_go.set()
        for response in responses:
            response.array()
    assert max(b - a for a, b in pairwise(n_seen)) <= 5


def order_of(*asked: tuple[str, dict[str, Any]], **schedule: Any) -> str:
    """The beginnings of texts in the order in which they are computed; all wait while a first one is held."""
    backend, gate = FakeBackend(2, 64), Gate()
    backend.hold_texts = gate
    with Engine(backend, schedule=ScheduleOptions(**schedule)) as engine:
        first = engine.embed(["first"])
        gate.has_come.wait()
        others = []
        for text, named in asked:
            texts = Queued(text * 40)
            others.append(engine.embed(texts, **named))
            texts.wait()
        gate.may_go.set()
        for response in (first, *others):
            response.array()
    first_text, *found = calls(backend)
    assert first_text == "first"
    return "".join(text[0] for text in found)


def test_highest_priority_is_computed_first() -> None:
    asked = [(text, {"priority": n}) for text, n in (("l", -1), ("m", 0), ("h", 5))]
    assert order_of(*asked, policy="priority") == "hml"


def test_priority_of_texts_counts_as_seconds_of_waiting() -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("p", {"is_patient": True, "priority": 1}),
        ("n", {}),
    ]
    assert order_of(*asked, policy="priority", ageing_s=1e4) == "pn"
    assert order_of(*asked, policy="priority", ageing_s=1.0) == "np"


def test_priority_without_its_policy_is_refused_for_texts(engine: Engine) -> None:
    (found,) = engine.embed(["a"], priority=1).results(return_errors=True)
    assert isinstance(found.error, ConfigError)
    assert "policy='priority'" in str(found.error)


def test_patient_texts_let_later_ones_go_first() -> None:
    patient: dict[str, Any] = {"is_patient": True}
    assert order_of(("a", patient), ("b", {}), ("c", patient), ("d", {})) == "bdac"
    with Engine(FakeBackend(4, 1024)) as engine, pytest.raises(ConfigError, match="is_patient"):
        engine.rerank("q", ["a"], **patient)


def test_patient_texts_wait_for_no_later_ones_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.runtime.text_room.PATIENCE_S", 0.0)
    assert order_of(("a", {"is_patient": True}), ("b", {})) == "ab"


def test_cancel_ends_waiting_texts_and_one_that_is_computed() -> None:
    backend, gate = FakeBackend(2, 64), Gate()
    backend.hold_texts = gate
    with Engine(backend) as engine:
        response = engine.embed(["a"], ids=["a"])
        gate.has_come.wait()
        texts = Queued("b", "c")
        later = engine.embed(texts, ids=["b", "c"])
        texts.wait()
        assert engine.cancel("c")
        assert response.cancel() == 1
        gate.may_go.set()
        (found,) = response.results(return_errors=True)
        assert isinstance(found.error, RequestCancelledError)
        b, c = later.results(return_errors=True)
        assert b.error is None
        assert isinstance(c.error, RequestCancelledError)
        assert not engine.cancel("c")


@contextmanager
def held_up(*ids: str, backend: FakeBackend | None = None) -> Iterator[tuple[Engine, Gate, Any]]:
    """An engine that computes a text "first" until the gate is opened, with the response of others that wait."""
    backend, gate = backend or FakeBackend(2, 64), Gate()
    backend.hold_texts = gate
    with Engine(backend) as engine:
        first = engine.embed(["first"], ids=["first"])
        gate.has_come.wait()
        texts = Queued(*ids)
        waiting = engine.embed(texts, ids=ids)
        texts.wait()
        wait_until(lambda: parts_of(engine).texts.n_waiting == 1 + len(ids))
        try:
            yield engine, gate, waiting
        finally:
            gate.may_go.set()
            assert first.ids == ["first"]


def test_text_that_ends_as_it_is_taken_back_keeps_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with held_up("b", "c") as (engine, gate, waiting):
        parts = parts_of(engine)
        take_out, cancel = parts.texts.take_out, parts.texts.cancel

        def late(text: Any) -> bool:
            if getattr(text, "id", text) == "b":
                cancel(text)
            found: bool = take_out(text)
            return found

        monkeypatch.setattr(parts.texts, "take_out", late)
        assert parts.orders.take_back(["c", "b", "first"]) == ["c"]
        assert engine.stats().n_submitted == 2
        gate.may_go.set()
        assert isinstance(next(iter(waiting)).error, RequestCancelledError)


def test_id_of_a_text_cancelled_amid_computing_is_free_at_once() -> None:
    with held_up(backend=only_embeds()) as (engine, gate, _):
        assert engine.cancel("first")
        again = engine.embed(["again"], ids=["first"])
        wait_until(lambda: parts_of(engine).texts.n_waiting == 1)
        gate.may_go.set()
        wait_until(lambda: again.n_unread == 1)


def test_cancelled_texts_are_forgotten_while_others_wait() -> None:
    with held_up(*"abcd") as (engine, _, _):
        texts = parts_of(engine).texts
        for _ in range(3):
            more = Queued(*map(str, range(200)))
            response = engine.embed(more, timeout_s=1000, is_patient=True)
            more.wait()
            wait_until(lambda: texts.n_waiting == 205)
            assert response.cancel() == 200
        gc.collect()
        assert sum(isinstance(held, WaitingText) for held in gc.get_objects()) < 205


def test_deadline_ends_a_text_that_waits() -> None:
    backend, gate = FakeBackend(2, 64), Gate()
    backend.hold_texts = gate
    with Engine(backend) as engine:
        first = engine.embed(["first"])
        gate.has_come.wait()
        texts = Queued("late")
        late = engine.embed(texts, timeout_s=1e-6)
        texts.wait()
        gate.may_go.set()
        first.array()
        (found,) = late.results(return_errors=True)
    assert isinstance(found.error, DeadlineError)


def test_close_cancels_texts_and_frees_embedders() -> None:
    backend, gate = FakeBackend(2, 64), Gate()
    backend.hold_texts = gate
    engine = Engine(backend)
    first = engine.embed(["first"])
    gate.has_come.wait()
    texts = Queued("waiting")
    waiting = engine.embed(texts)
    texts.wait()
    closing = threading.Thread(target=engine.close)
    closing.start()
    (found,) = first.results(return_errors=True)
    gate.may_go.set()
    closing.join()
    assert isinstance(found.error, RequestCancelledError)
    assert backend.embedders[0].is_closed
    try:
        ended = waiting.results(return_errors=True)
    except cbatch.BatchError as error:  # that there is no other text was not read in time
        ended = error.results
    assert [type(result.error) for result in ended] == [RequestCancelledError]
    with pytest.raises(EngineClosedError):
        engine.embed(["more"])


def test_leaving_an_iteration_cancels_the_rest(backend: FakeBackend) -> None:
    with Engine(backend) as engine:
        for _ in engine.embed(f"text {i}" for i in iter(int, 1)):
            break
        assert engine.embed(["other"]).array().shape == (1, 8)


def test_id_in_flight_is_refused_for_texts_and_prompts() -> None:
    backend, gate = FakeBackend(2, 64), Gate()
    backend.hold_texts = gate
    with Engine(backend) as engine:
        response = engine.embed(["a"], ids=["same"])
        gate.has_come.wait()
        (other,) = engine.embed(["b"], ids=["same"]).results(return_errors=True)
        assert isinstance(other.error, DuplicateIdError)
        with pytest.raises(DuplicateIdError):
            engine.run([cbatch.BatchPrompt(prompt="x", id="same")])
        gate.may_go.set()
        response.array()


def test_one_of_two_texts_has_an_id_that_both_ask_for_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def check(ids: Any, taken: Any) -> None:
        check_own(ids, taken)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # the other one comes behind it

    monkeypatch.setattr("cbatch.runtime.in_flight.check_own", check)
    responses = [engine.embed([text], ids=["same"]) for text in "ab"]
    wait_until(lambda: all(response.n_unread for response in responses))
    found = [response.results(return_errors=True)[0].error for response in responses]
    assert [type(error) for error in found if error] == [DuplicateIdError]


def test_chats_go_on_beside_texts(engine: Engine) -> None:
    texts = engine.embed(f"text {i}" for i in range(500))
    answers = engine.run(["a", "b", "c"], options={"max_tokens": 5}).results()
    assert len(answers) == 3
    assert len(texts.results()) == 500


def test_engine_without_a_thread_computes_texts_by_steps(backend: FakeBackend) -> None:
    with Engine(backend, threaded=False) as engine:
        assert np.array_equal(engine.embed(["red", "b"]).array()[0], unit("red"))
        assert len(engine.run(["a"], options={"max_tokens": 2}).results()) == 1


def test_threads_of_an_engine_without_one_wait_for_each_others_texts() -> None:
    backend, gate = FakeBackend(2, 64), Gate()
    backend.hold_texts = gate
    with Engine(backend, threaded=False) as engine, ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: engine.embed(["a"]).array())
        gate.has_come.wait()
        assert engine.run(["a"], options={"max_tokens": 2}).results()  # chats do not wait
        second = pool.submit(lambda: engine.embed(["b"]).array())
        wait([second], 0.2)  # it has begun to wait
        gate.may_go.set()
        assert np.array_equal(first.result()[0], unit("a"))
        assert np.array_equal(second.result()[0], unit("b"))


def test_handler_may_close_an_engine_that_computes_texts_without_a_thread() -> None:
    backend = FakeBackend(2, 64)
    backend.hold_texts = partial(signal.raise_signal, signal.SIGUSR1)
    engine = Engine(backend, threaded=False)
    before = signal.signal(signal.SIGUSR1, lambda *_: engine.close())
    try:
        (found,) = engine.embed(["a"]).results(return_errors=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found.error is None
    with pytest.raises(EngineClosedError):
        engine.embed(["b"])


def test_model_that_only_embeds_refuses_to_generate() -> None:
    with Engine(only_embeds()) as engine:
        assert (engine.can_embed, engine.can_rerank, engine.can_generate) == (True, False, False)
        for call in (
            lambda: engine.run(["a"]),
            lambda: engine.generate("a"),
            lambda: engine.score([("a", "b")]).results(),
            lambda: engine.rerank("q", ["a"]),
            lambda: engine.embed(["a"], pooling="rank"),
        ):
            with pytest.raises(UnsupportedTaskError) as caught:
                call()
            assert caught.value.task in ("generate", "rerank")


def reranker() -> FakeBackend:
    backend = only_embeds()
    backend.pooling = "rank"
    return backend


def test_rerank_gives_the_best_document_first() -> None:
    with Engine(reranker()) as engine:
        assert (engine.can_embed, engine.can_rerank) == (False, True)
        documents = ["a", "b", "c", "d"]
        raw = engine.rerank("q", documents, raw_scores=True).scores()
        wanted = [fake_vector([*b"q", 256, *text.encode()])[0] for text in documents]
        assert raw.tolist() == [pytest.approx(float(x)) for x in wanted]
        found = engine.rerank("q", documents, top_n=3).results()
        assert [r.index for r in found] == np.argsort(-raw)[:3].tolist()
        assert all(0 <= r.score <= 1 for r in found)
        with pytest.raises(UnsupportedTaskError):
            engine.embed(documents)
        assert engine.embed(documents, pooling="rank").array().shape == (4, 1)


@pytest.mark.parametrize("make", [reranker, lambda: FakeBackend(4, 512)])
def test_each_document_may_have_a_query_of_its_own(make: Callable[[], FakeBackend]) -> None:
    queries, documents = ["q", "r", "q"], ["a", "b", "c"]
    with Engine(make()) as engine:
        found = engine.rerank(queries, documents).scores()
        alone = [engine.rerank(q, [d]).scores()[0] for q, d in zip(queries, documents, strict=True)]
        assert found.tolist() == alone
        wrong: list[Any] = ["q", "", 7]
        results = engine.rerank(wrong, documents).results(return_errors=True)
        assert {r.index: type(r.error) for r in results[1:]} == {1: ConfigError, 2: ConfigError}
        for others in (["a", "b"], iter(documents)):
            with pytest.raises(ConfigError, match="query has 3 texts, documents"):
                engine.rerank(queries, others)


def test_rerank_reports_wrong_documents_behind_the_others() -> None:
    with Engine(reranker()) as engine:
        documents: list[Any] = ["", "a", 7, "x" * 99]
        found = engine.rerank("q", documents).results(return_errors=True)
        assert next(r.index for r in found) == 1
        assert {r.index: type(r.error) for r in found[1:]} == {
            0: PromptError, 2: ConfigError, 3: TextTooLongError
        }  # fmt: skip
        cut = engine.rerank("q", ["x" * 99], truncate="end").results()[0]
        assert (cut.error, cut.n_tokens) == (None, 64)
        with pytest.raises(ConfigError, match="the query is empty"):
            engine.rerank("", ["a"])


@each_kind
def test_chat_model_judges_documents_by_yes_and_no() -> None:
    with engine_on(FakeBackend(4, 1024)) as engine:
        response = engine.rerank("what is red?", ["a red sky", "b", "c"], instruction="Judge.")
        scores = response.scores()
        assert scores.shape == (3,)
        assert ((scores >= 0) & (scores <= 1)).all()
        assert [r.index for r in engine.rerank("what is red?", ["a red sky", "b"]).results()]
        documents = ["a red sky", "red " * 1000]
        cut = engine.rerank("what is red?", documents, truncate="end").results()
        assert [r.error for r in cut] == [None, None]


@pytest.mark.parametrize(
    "wrong",
    [
        {"pooling": "max"},
        {"truncate": "middle"},
        {"dimensions": 0},
        {"normalize": 1},
        {"priority": 1000},
        {"timeout_s": -1},
        {"instruction": 5},
    ],
)
def test_wrong_arguments_are_refused_by_name(engine: Engine, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        engine.embed(["a"], **wrong)


@pytest.mark.parametrize("texts", ["text", b"text", 5, None])
def test_what_is_no_list_of_texts_is_refused(engine: Engine, texts: Any) -> None:
    with pytest.raises(ConfigError):
        engine.embed(texts)


DROPPED: dict[str, Callable[[Engine], object]] = {
    "embed": lambda engine: engine.embed(f"{i}" * 60 for i in range(500)),
    "rerank": lambda engine: engine.rerank("q", (f"{i}" for i in range(500))),
    "score": lambda engine: engine.score([("c", [f"{i}" for i in range(500)])]),
}


@pytest.mark.parametrize("what", DROPPED)
def test_what_was_read_of_a_dropped_response_is_cancelled(what: str) -> None:
    backend, gate = GatedBackend(4, 1024, hold_at=0), Gate()
    backend.hold_texts = gate
    with Engine(backend) as engine:
        response = DROPPED[what](engine)
        if what == "embed":
            gate.has_come.wait()
        else:
            backend.wait_until_held()
        backend.release_when_asked()
        del response
        gc.collect()
        gate.may_go.set()
        wait_until(lambda: engine.stats().n_finished.get("cancelled", 0) > 0)
        wait_until(lambda: sum(engine.stats().n_finished.values()) == engine.stats().n_submitted)
        assert engine.stats().n_finished.get("stop", 0) < 100


def test_reader_keeps_what_it_reads(engine: Engine) -> None:
    reader = iter(engine.embed(f"text {i}" for i in range(500)))
    gc.collect()
    assert len([*reader]) == 500


def test_long_texts_are_made_tokens_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(2, 4096)
    n_made, n_at_calls = [0], list[int]()
    tokenize = backend.vocab.tokenize
    gate = Gate()

    def counted(text: str) -> list[int]:
        gate()
        n_made[0] += 1
        return tokenize(text)

    monkeypatch.setattr(backend.vocab, "tokenize", counted)
    with Engine(backend) as engine:
        made = engine.embed(f"{i:03}" * 1000 for i in range(60))
        gate.has_come.wait()
        wait_until(lambda: len(made.ids) == 60)
        texts = parts_of(engine).texts
        wait_until(lambda: texts.n_waiting == 60)
        texts.on_admit = lambda _: n_at_calls.append(n_made[0])
        gate.may_go.set()
        assert made.array().shape == (60, 8)
    assert n_at_calls[0] == 11
