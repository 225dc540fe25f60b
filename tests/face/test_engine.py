"""The engine as a caller sees it: what goes in comes out, whatever happens around it."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.fake import FakeBackend, Faults, StepCost
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load import loader
from cbatch.backend.load.open_model import open_model
from cbatch.engine import Engine, open_local
from cbatch.engine_options import EngineOptions
from cbatch.errors import (
    ConfigError,
    DecodeError,
    EngineClosedError,
    ModelLoadError,
    RequestCancelledError,
    RequestFailedError,
)
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.response import BatchError
from cbatch.runtime.batch_response import BatchResponse
from tests.kinds import Reason, each_kind, engine_on, no_pool, thread_only
from tests.places import ENDLESS, wait_until
from tests.runtime.backends import (
    PATIENCE_S,
    FailingBackend,
    GatedBackend,
    all_results,
    backend_of,
    in_thread,
    owner_of,
    streams,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.core.plan import StepPlan, StepResult
    from cbatch.core.span import Span
    from cbatch.messages import Prompt
    from cbatch.runtime.step_record import StepRecord

pytestmark = each_kind

ROOT = Path(cbatch.__file__).parents[1]  # of the package under test, installed or not
CAPS = (3, 9, 5, 2, 7, 4)
MakeEngine = Callable[..., Engine]
MakeGated = Callable[..., tuple[Engine, GatedBackend]]


class RecordingBackend(LlamaBackend):
    """The real backend; keeps its plans as the fake one does."""

    plans: list[StepPlan]

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().run(plan)


def fake_backend(parallel: int) -> FakeBackend:
    return FakeBackend(parallel, 64, 16)


def real_backend(path: Path, parallel: int) -> RecordingBackend:
    model = open_model(path, EngineOptions(exact=True))
    options = EngineOptions(parallel=parallel, ctx_per_seq=256, exact=True, n_threads=1)
    backend = RecordingBackend(model, Tuning(options))
    backend.plans = []
    return backend


@pytest.fixture(params=["fake", "fake by hand", "real"])
def make(request: pytest.FixtureRequest, test_model: Path) -> Iterator[MakeEngine]:
    """Return a factory of engines: the fake backend with and without a thread, and the real one."""
    made: list[Engine] = []

    def make_engine(parallel: int = 2, **options: Any) -> Engine:
        is_real = request.param == "real"
        backend = real_backend(test_model, parallel) if is_real else fake_backend(parallel)
        is_threaded = request.param != "fake by hand"
        options = {"temperature": 0, "ignore_eos": True, **options}
        made.append(engine_on(backend, options=options, threaded=is_threaded))
        return made[-1]

    yield make_engine
    for engine in made:
        engine.close()


@pytest.fixture
def gated() -> Iterator[MakeGated]:
    """Return a factory of engines that stop before a run."""
    made: list[tuple[Engine, GatedBackend]] = []

    def make_gated(hold_at: int = 0, parallel: int = 2) -> tuple[Engine, GatedBackend]:
        backend = GatedBackend(parallel, 64, 16, hold_at=hold_at)
        made.append((engine_on(backend, options={"ignore_eos": True}), backend))
        return made[-1]

    yield make_gated
    for engine, backend in made:
        backend.release()
        engine.close()


def prompts(n: int, **options: Any) -> list[BatchPrompt]:
    said = {"seed": 1, **options}
    return [BatchPrompt(tokens=[5 + i, 6, 7 * i, 8], options=said) for i in range(n)]


def capped(caps: Sequence[int] = CAPS) -> list[BatchPrompt]:
    return [prompts(i + 1, max_tokens=cap)[i] for i, cap in enumerate(caps)]


def plans_of(engine: Engine) -> list[StepPlan]:
    backend = backend_of(engine, object)
    assert isinstance(backend, FakeBackend | RecordingBackend)
    return backend.plans


# ---- slots ----


def test_six_requests_on_two_slots_all_finish_and_join_in_midstream(make: MakeEngine) -> None:
    engine = make(parallel=2)
    results = all_results(engine.run(capped()))
    assert [len(r.token_ids) for r in results] == list(CAPS)
    assert {r.finish_reason for r in results} == {"length"}
    joined = sum(len(p.binds) for p in plans_of(engine) if len(p.spans) > len(p.binds))
    assert joined >= 4
    assert max(len(p.spans) for p in plans_of(engine)) == 2


def test_each_request_of_many_gives_what_it_gives_alone(make: MakeEngine) -> None:
    engine = make(parallel=2)
    together = streams(engine.run(capped()))
    alone = [streams(engine.submit(prompt))[0] for prompt in capped()]
    assert together == alone
    assert len(set(together)) == len(CAPS)


def test_recycled_slot_is_clean(make: MakeEngine) -> None:
    engine = make(parallel=1)
    [ours, other] = prompts(2, max_tokens=12, temperature=0.8)
    before = streams(engine.submit(ours))
    between = streams(engine.submit(other))
    assert streams(engine.submit(ours)) == before != between


def test_cap_one_gives_one_token_and_no_decode_step(make: MakeEngine) -> None:
    engine = make()
    [result] = all_results(engine.run(prompts(1, max_tokens=1)))
    assert (len(result.token_ids), result.finish_reason) == (1, "length")
    assert [c.start for p in plans_of(engine) for c in p.spans] == [0]
    assert engine.stats().n_steps == 1


def test_window_ends_a_request_without_a_cap(make: MakeEngine) -> None:
    engine = make()
    [result] = all_results(engine.run(prompts(1)))
    assert (result.finish_reason, len(result.token_ids)) == ("window", engine.n_window - 4)


def test_stats_count_the_work(make: MakeEngine) -> None:
    engine = make(parallel=2)
    all_results(engine.run(capped()))
    stats = engine.stats()
    assert (stats.n_submitted, stats.n_waiting, stats.n_running) == (6, 0, 0)
    assert (stats.n_prompt_tokens, stats.n_output_tokens) == (24, sum(CAPS))
    assert stats.n_finished == {"length": 6}
    assert stats.n_active_max == 2
    assert stats.n_steps < stats.n_active_steps <= 2 * stats.n_steps


# ---- delivery ----


@no_pool(Reason.ONE_BACKEND)
def test_ids_are_known_at_once_and_results_come_in_input_order(gated: MakeGated) -> None:
    engine, backend = gated()
    items: list[Prompt] = ["one", BatchPrompt(prompt="two", id="b"), "three"]
    response = engine.run(items)
    assert response.ids == ["0", "b", "2"]
    backend.release()
    assert [r.id for r in all_results(response)] == response.ids


def test_as_completed_gives_results_in_order_of_completion(make: MakeEngine) -> None:
    response = make(parallel=3).run(capped((9, 2, 5)))
    assert [r.id for r in response.as_completed()] == ["1", "2", "0"]


def test_results_know_the_places_of_their_prompts(make: MakeEngine) -> None:
    engine = make(parallel=3)
    engine.run(capped((1,))).results()
    results = [*engine.run(capped((9, 2, 5))).as_completed()]
    assert [r.i_item for r in results] == [1, 2, 0]
    asked: list[str | BatchPrompt] = ["a", BatchPrompt(prompt="b", options={"n": 2}), "c"]
    for prompts in (asked, iter(asked)):
        results = engine.run(prompts, options={"max_tokens": 2}).results()
        assert [r.i_item for r in results] == [0, 1, 2]
        assert [choice.i_item for choice in results[1].choices] == [1, 1]


def test_chunks_joined_are_the_result(make: MakeEngine) -> None:
    response = make().run(capped())
    chunks = list(response)
    for result in all_results(response):
        ours = [c for c in chunks if c.id == result.id]
        assert "".join(c.text for c in ours) == result.text
        assert tuple(t for c in ours for t in c.token_ids) == result.token_ids
        assert [c.finish_reason for c in ours] == [None] * (len(ours) - 1) + ["length"]


@thread_only(Reason.BY_HAND)
def test_chunks_come_while_the_request_runs() -> None:
    engine = engine_on(GatedBackend(2, 64, 16), options={"ignore_eos": True}, threaded=False)
    response = engine.run(prompts(1, max_tokens=4))
    chunks = [len(c.token_ids) for c in response if c.text]
    assert len(chunks) > 1
    assert sum(chunks) == 4
    engine.close()


def test_streaming_begun_after_the_end_gives_each_item_once(make: MakeEngine) -> None:
    response = make().run(capped())
    results = all_results(response)
    chunks = {c.id: c for c in response}
    assert [(chunks[r.id].text, chunks[r.id].finish_reason) for r in results] == [
        (r.text, "length") for r in results
    ]
    assert list(response) == []


def test_nearest_options_win() -> None:
    items: list[Prompt] = [BatchPrompt(prompt="ab", options=RunOptions(max_tokens=7)), "b"]
    with engine_on(FakeBackend(2, 64, 16), options={"max_tokens": 3, "ignore_eos": True}) as engine:
        assert [len(r.token_ids) for r in all_results(engine.run(items))] == [7, 3]
        response = engine.run(items, options={"max_tokens": 5})
        assert [len(r.token_ids) for r in all_results(response)] == [7, 5]


def test_run_is_short_until_it_is_known_whether_somebody_reads() -> None:
    records: list[StepRecord] = []
    backend = FakeBackend(1, 512, 16, cost=StepCost(base_s=0.03))
    with engine_on(backend, options={"max_tokens": 200, "ignore_eos": True}) as engine:
        engine.record_steps(records.append)
        prompts = [BatchPrompt(prompt="Hi", id=id) for id in ("first", "queued")]
        engine.run(prompts).results()
        engine.record_steps(None)
    runs = [record.n_steps for record in records if record.rows[0].id == "queued"]
    assert runs[:3] == [1, 17, 17]  # steps end later than 20 ms, then half a second


def test_result_is_for_a_batch_of_one(make: MakeEngine) -> None:
    engine = make(max_tokens=2)
    assert engine.submit("ab").result(timeout=PATIENCE_S).finish_reason == "length"
    response = engine.run(["ab", "cd"])
    with pytest.raises(ConfigError, match="2"):
        response.result()
    all_results(response)


def test_runs_from_several_threads_share_the_slots(make: MakeEngine) -> None:
    engine = make(parallel=3)
    start = threading.Barrier(4)

    def work(i: int) -> list[tuple[str, tuple[int, ...]]]:
        start.wait(PATIENCE_S)
        return streams(engine.run([prompts(4 * i + 4, max_tokens=6 + i)[4 * i + 2]] * 3))

    waits = [in_thread(partial(work, i)) for i in range(4)]
    found = [wait() for wait in waits]
    for i, in_company in enumerate(found):
        alone = streams(engine.submit(prompts(4 * i + 4, max_tokens=6 + i)[4 * i + 2]))
        assert in_company == alone * 3
    assert engine.stats().n_active_max == 3


# ---- by hand ----


def test_step_by_hand_gives_the_streams_of_the_thread() -> None:
    with engine_on(FakeBackend(2, 64, 16)) as threaded:
        expected = streams(threaded.run(capped()))
    engine = engine_on(FakeBackend(2, 64, 16), threaded=False)
    response = engine.run(capped()[:4])
    for _ in range(3):
        assert engine.step()
    late = engine.run(capped()[4:])
    while engine.step():
        pass
    assert streams(response) + streams(late) == expected
    assert not engine.step()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.step()


def test_step_is_refused_where_a_thread_does_it() -> None:
    with engine_on(FakeBackend()) as engine, pytest.raises(ConfigError, match="threaded=False"):
        engine.step()


@thread_only(Reason.BY_HAND)
def test_cancel_from_another_thread_by_hand_waits_for_the_step() -> None:
    backend = GatedBackend(2, ENDLESS, 16, hold_at=3)
    engine = engine_on(backend, options={"ignore_eos": True}, threaded=False)
    ours, other = engine.run(prompts(1)), engine.run(prompts(1, max_tokens=20))
    wait = in_thread(lambda: streams(ours))
    backend.wait_until_held()
    backend.release_when_asked()
    assert in_thread(lambda: engine.cancel("0"))() is True
    [(reason, _)], [(other_reason, other_tokens)] = wait(), streams(other)
    assert (reason, other_reason, len(other_tokens)) == ("cancelled", "length", 20)
    engine.close()


@thread_only(Reason.BY_HAND)
def test_two_readers_by_hand_take_turns() -> None:
    backend = GatedBackend(2, 64, 16, hold_at=3)
    engine = engine_on(backend, options={"ignore_eos": True}, threaded=False)
    one, two = (engine.run(prompts(2, max_tokens=9)) for _ in range(2))
    waits = [in_thread(lambda: streams(one))]
    backend.wait_until_held()
    waits.append(in_thread(lambda: streams(two)))
    backend.release()
    first, second = waits[0](), waits[1]()
    assert first == second
    engine.close()


# ---- cancel ----


@no_pool(Reason.ONE_BACKEND)
def test_cancelled_running_item_keeps_its_text_and_harms_nobody(gated: MakeGated) -> None:
    engine, backend = gated(hold_at=5)
    alone = streams(
        engine_on(FakeBackend(2, 64, 16)).run(prompts(2, max_tokens=20, ignore_eos=True))
    )
    response = engine.run(prompts(2, max_tokens=20))
    backend.wait_until_held()
    backend.release_when_asked()
    assert engine.cancel("0") is True
    ours, other = all_results(response)
    assert (ours.finish_reason, ours.error) == ("cancelled", None)
    assert ours.token_ids == alone[0][1][: len(ours.token_ids)]
    assert 0 < len(ours.token_ids) < 20
    assert ours.text
    assert (other.finish_reason, other.token_ids) == alone[1]


@no_pool(Reason.ONE_BACKEND)
def test_cancelled_queued_item_never_runs(gated: MakeGated) -> None:
    engine, backend = gated(parallel=1)
    response = engine.run(prompts(2, max_tokens=5))
    backend.wait_until_held()
    backend.release_when_asked()
    assert engine.cancel("1")
    ours, queued = all_results(response)
    assert ours.finish_reason == "length"
    assert (queued.finish_reason, queued.token_ids, queued.text) == ("cancelled", (), "")
    assert isinstance(queued.error, RequestCancelledError)
    assert sum(len(p.binds) for p in backend.plans) == 1


def test_cancel_twice_late_or_of_nobody_is_false(make: MakeEngine) -> None:
    engine = make(max_tokens=3)
    assert engine.cancel("0") is False
    all_results(engine.run(["ab"]))
    assert engine.cancel("0") is False
    assert engine.cancel_all() == 0
    [(reason, _)] = streams(engine.run(["ab"]))
    assert reason == "length"


@no_pool(Reason.ONE_BACKEND)
def test_late_cancel_spares_the_next_occupant_of_the_slot(gated: MakeGated) -> None:
    engine, backend = gated(parallel=1, hold_at=4)
    first = BatchPrompt(prompt="first", id="first", options={"max_tokens": 2})
    response = engine.run([first, BatchPrompt(prompt="next", id="next", options={"max_tokens": 9})])
    backend.wait_until_held()
    backend.release_when_asked()
    assert engine.cancel("first") is False
    backend.release()
    assert [len(r.token_ids) for r in all_results(response)] == [2, 9]


@no_pool(Reason.ONE_BACKEND)
def test_cancel_all_spares_what_comes_later(gated: MakeGated) -> None:
    engine, backend = gated(hold_at=2)
    response = engine.run(prompts(3))
    backend.wait_until_held()
    backend.release_when_asked()
    assert engine.cancel_all() == 3
    later = engine.run(prompts(1, max_tokens=5))
    assert [r.finish_reason for r in all_results(response)] == ["cancelled"] * 3
    assert [r.finish_reason for r in all_results(later)] == ["length"]


@no_pool(Reason.ONE_BACKEND)
def test_response_cancels_its_own_items_only(gated: MakeGated) -> None:
    engine, backend = gated(hold_at=2)
    ours = engine.run(prompts(1))
    backend.wait_until_held()
    n_interrupts = backend.n_interrupts
    other = engine.run(prompts(1, max_tokens=9))
    wait_until(lambda: backend.n_interrupts > n_interrupts)  # the next that asks is `cancel`
    backend.release_when_asked()
    assert ours.cancel() == 1
    assert ours.cancel() == 0
    assert [r.finish_reason for r in all_results(other)] == ["length"]
    assert [r.finish_reason for r in all_results(ours)] == ["cancelled"]


@thread_only(Reason.BY_HAND)
def test_cancel_by_the_reader_of_a_stream() -> None:
    engine = engine_on(GatedBackend(2, 64, 16), options={"ignore_eos": True}, threaded=False)
    response = engine.run(prompts(3))
    for chunk in response:
        if chunk.text:
            engine.cancel(chunk.id)
    results = all_results(response)
    assert [r.finish_reason for r in results] == ["cancelled"] * 3
    assert all(0 < len(r.token_ids) < 9 for r in results)
    engine.close()


# ---- late orders ----


ORDERS: tuple[Callable[[Engine, str], bool], ...] = (Engine.cancel, Engine.pause, Engine.resume)


@pytest.fixture
def stepped() -> Iterator[Engine]:
    """Return an engine that does one step at a time, by hand."""
    backend = GatedBackend(2, 64, 16)
    with closing(engine_on(backend, options={"ignore_eos": True}, threaded=False)) as engine:
        yield engine


def ended(engine: Engine, prompt: Prompt) -> BatchResponse:
    response = engine.run([prompt], options={"max_tokens": 2})
    all_results(response)
    return response


def begun(engine: Engine, prompt: Prompt) -> BatchResponse:
    response = engine.run([prompt])
    assert engine.step()
    return response


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("id", [None, "mine"])
def test_late_order_touches_nobody_though_the_id_comes_again(
    stepped: Engine, order: Callable[[Engine, str], bool], id: str | None
) -> None:
    prompt = BatchPrompt(prompt="a", id=id)
    first, second = ended(stepped, prompt), begun(stepped, prompt)
    [late], [result], [now] = first.ids, all_results(first), second.ids
    if order is Engine.resume:
        assert stepped.pause(now)
    for known in (late, result.id, copy.deepcopy(result).id, next(iter(first)).id):
        assert order(stepped, known) is False
    assert first.cancel() == 0
    assert order(stepped, now) is True
    assert stepped.cancel(now) is (order is not Engine.cancel)


@thread_only(Reason.BY_HAND)
def test_request_pauses_after_as_many_tokens_as_the_resume_says(stepped: Engine) -> None:
    response = stepped.run(["a"], options={"max_tokens": 12, "pause_every": 3})
    whole = all_results(stepped.run(["a"], options={"max_tokens": 12, "seed": 7}))
    [id], n_before = response.ids, stepped.stats().n_output_tokens
    assert stepped.stats().n_paused == 1
    assert stepped.resume(id, 5)
    while stepped.step():
        pass
    assert stepped.stats().n_output_tokens - n_before == 5
    assert stepped.resume(id, n_tokens=4)
    assert len(all_results(response)[0].token_ids) == len(whole[0].token_ids) == 12


@pytest.mark.parametrize("seed", range(3))
def test_reader_that_comes_late_gets_what_a_paused_request_has(make: MakeEngine, seed: int) -> None:
    engine = make(max_tokens=20)
    response = engine.run(["a"], options={"pause_every": 4, "ignore_eos": True, "seed": seed})
    [id] = response.ids
    all_results(engine.run(["b"]))  # meanwhile the first pauses
    assert engine.stats().n_paused == 1
    tokens: list[int] = []
    for chunk in response:
        tokens += chunk.token_ids
        if len(tokens) % 4 == 0:
            engine.resume(id)
    assert len(tokens) == 20
    assert tuple(tokens) == all_results(response)[0].token_ids


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("n_tokens", [0, -1, True, 1.5, "3"])
def test_resume_for_what_is_no_number_of_tokens_is_refused(stepped: Engine, n_tokens: Any) -> None:
    response = stepped.run(["a"])
    assert stepped.pause(response.ids[0])
    with pytest.raises(ConfigError, match="n_tokens"):
        stepped.resume(response.ids[0], n_tokens)
    assert stepped.resume(response.ids[0])


def test_automatic_id_is_unique_for_the_engines_life(make: MakeEngine) -> None:
    engine = make(max_tokens=1)
    ids = [id for _ in range(3) for id in engine.run(["a", "b"]).ids]
    ids += [r.id for r in engine.run(iter(["a", "b"])).as_completed()]
    ids += [engine.submit("a").result().id]
    assert len(set(ids)) == len(ids) == 9
    assert ids[:2] == ["0", "1"]


@thread_only(Reason.BY_HAND)
def test_id_of_a_result_given_to_a_new_prompt_begins_a_new_life(stepped: Engine) -> None:
    [first] = ended(stepped, "a").results()
    second = begun(stepped, BatchPrompt(prompt="b", id=first.id))
    assert second.ids == [first.id]
    assert stepped.cancel(first.id) is False
    assert stepped.cancel(second.ids[0]) is True


@thread_only(Reason.BY_HAND)
def test_extending_begins_a_new_life_of_the_id(stepped: Engine) -> None:
    [first] = ended(stepped, "a").results()
    longer = stepped.extend(first, 9)
    assert stepped.step()
    assert longer.ids == [first.id]
    assert stepped.cancel(first.id) is False
    assert stepped.cancel(longer.ids[0]) is True
    assert [r.finish_reason for r in all_results(longer)] == ["cancelled"]


def test_id_of_another_engine_means_nobody_here(stepped: Engine) -> None:
    with engine_on(FakeBackend(2, 64, 16)) as other:
        theirs, ours = ended(other, "a"), begun(stepped, "a")
    assert theirs.ids == ours.ids
    assert stepped.cancel(theirs.ids[0]) is False
    assert stepped.cancel(ours.ids[0]) is True


@thread_only(Reason.BY_HAND)
def test_refused_prompt_and_its_later_namesake_are_told_apart(stepped: Engine) -> None:
    bad = BatchPrompt(prompt="a", id="mine", options={"adapter": "none"})
    [refused] = all_results(stepped.run(iter([bad])))
    second = begun(stepped, BatchPrompt(prompt="b", id="mine"))
    assert stepped.cancel(refused.id) is False
    assert stepped.cancel(second.ids[0]) is True


def test_chunks_and_results_have_the_ids_of_the_response(make: MakeEngine) -> None:
    engine = make(max_tokens=2)
    items: list[Prompt] = ["a", BatchPrompt(prompt="b", id="mine", options={"n": 2})]
    response = engine.run(items)
    known = {id(name) for name in response.ids}
    assert {id(chunk.id) for chunk in response} == known
    results = all_results(response)
    assert {id(r.id) for r in results} == known
    assert {id(choice.id) for r in results for choice in r.choices} <= known


# ---- errors of items ----


def test_batch_error_carries_all_results(make: MakeEngine) -> None:
    engine = make(max_tokens=2)
    response = engine.run(["ab", "x" * 1000, "cd"])
    with pytest.raises(BatchError, match="1 of 3") as caught:
        response.results(timeout=PATIENCE_S)
    assert [r.finish_reason for r in caught.value.results] == ["length", "error", "length"]
    assert response.results(return_errors=True) == caught.value.results


def test_decode_failure_ends_the_guilty_alone() -> None:
    def code(chunks: Sequence[Span]) -> int:
        return -3 if any(13 in c.inputs for c in chunks) else 0

    items = [BatchPrompt(tokens=[1, 2, t, 4]) for t in (11, 12, 13, 14)]
    options = {"max_tokens": 5, "ignore_eos": True, "seed": 0, "stop_token_ids": [13]}
    with engine_on(FakeBackend(4, 64, 16, faults=Faults(code=code))) as engine:
        results = all_results(engine.run(items, options=options))
        assert [r.finish_reason == "error" for r in results] == [False, False, True, False]
        assert isinstance(results[2].error, RequestFailedError)
        cause = results[2].error.__cause__
        assert isinstance(cause, DecodeError)
        assert cause.code == -3
    with engine_on(FakeBackend(4, 64, 16)) as engine:
        expected = streams(engine.run(items, options=options))
    assert [r.token_ids for r in results if not r.error] == [
        tokens for i, (_, tokens) in enumerate(expected) if i != 2
    ]


@pytest.mark.parametrize("code", [1, 2, -1, -2, -3])
def test_decode_that_always_fails_ends_every_request_and_leaves_the_engine(code: int) -> None:
    codes = [code]
    with engine_on(FakeBackend(2, 64, 16, faults=Faults(code=lambda _: codes[0]))) as engine:
        results = all_results(engine.run(prompts(3)))
        assert [type(r.error) for r in results] == [RequestFailedError] * 3
        codes[0] = 0
        assert streams(engine.run(prompts(1, max_tokens=2, ignore_eos=True)))[0][0] == "length"


# ---- time ----


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("is_threaded", [True, False])
def test_timeout_leaves_the_batch_running(is_threaded: bool) -> None:
    backend = GatedBackend(2, 64, 16, hold_at=0 if is_threaded else None)
    engine = engine_on(backend, options={"ignore_eos": True}, threaded=is_threaded)
    response = engine.run(prompts(2, max_tokens=40))
    with pytest.raises(TimeoutError, match="2 of 2"):
        response.results(timeout=0)
    backend.release()
    assert [r.finish_reason for r in all_results(response)] == ["length"] * 2
    engine.close()


# ---- the end ----


@no_pool(Reason.ONE_BACKEND)
def test_close_ends_every_waiter(gated: MakeGated) -> None:
    engine, backend = gated(hold_at=4)
    with together(2):
        ours = engine.run(prompts(4))
        backend.wait_until_held()
    n_interrupts = backend.n_interrupts
    other = engine.run(prompts(1))
    waits = [in_thread(lambda: all_results(ours)), in_thread(lambda: list(other))]
    wait_until(lambda: backend.n_interrupts > n_interrupts)  # the next that asks is `close`
    backend.release_when_asked()
    engine.close()
    results = waits[0]()
    assert [r.finish_reason for r in results] == ["cancelled"] * 4
    assert [r.error is None for r in results] == [True, True, False, False]
    assert [c.finish_reason for c in waits[1]()] == ["cancelled"]
    assert not owner_of(engine).is_alive()


def test_close_is_idempotent_and_nothing_is_accepted_after_it(make: MakeEngine) -> None:
    engine = make()
    response = engine.run(prompts(1, max_tokens=2))
    [result] = all_results(response)
    for _ in range(2):
        engine.close()
    for call in (
        lambda: engine.run(["ab"]),
        lambda: engine.submit("ab"),
        lambda: engine.extend(result, 5),
        lambda: engine.cancel("0"),
        lambda: engine.cancel_all(),
        engine.stats,
    ):
        with pytest.raises(EngineClosedError):
            call()
    assert [r.finish_reason for r in all_results(response)] == ["length"]


@no_pool(Reason.ONE_BACKEND)
def test_close_from_several_threads_at_once(gated: MakeGated) -> None:
    engine, backend = gated(hold_at=1)
    engine.run(prompts(4))
    backend.wait_until_held()
    backend.release_when_asked()
    for wait in [in_thread(engine.close) for _ in range(3)]:
        wait()
    owner_of(engine).join(PATIENCE_S)
    assert not owner_of(engine).is_alive()


@thread_only(Reason.DEATH)
@pytest.mark.parametrize("is_threaded", [True, False])
def test_backend_that_raises_ends_every_request_with_the_cause(is_threaded: bool) -> None:
    backend = FailingBackend(2, 64, 16, error=RuntimeError("it broke"), fail_at=2)
    engine = engine_on(backend, options={"ignore_eos": True}, threaded=is_threaded)
    response = engine.run(prompts(4))
    for result in all_results(response):
        assert result.finish_reason == "error"
        assert isinstance(result.error, EngineClosedError)
        assert result.error.__cause__ is backend.error
    with pytest.raises(EngineClosedError) as caught:
        engine.run(["ab"])
    assert caught.value.__cause__ is backend.error
    engine.close()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("fail_at", [0, 1, 2, 5, 11])
def test_ctrl_c_in_a_step_by_hand_leaves_the_engine_as_it_was(fail_at: int, is_late: bool) -> None:
    items = [
        BatchPrompt(tokens=range(3 + i), options={"max_tokens": cap, "ignore_eos": True, "seed": i})
        for i, cap in enumerate(CAPS)
    ]
    with engine_on(FakeBackend(2, 64, 16)) as engine:
        expected = streams(engine.run(items))
    backend = FailingBackend(2, 64, 16, error=KeyboardInterrupt(), fail_at=fail_at, is_late=is_late)
    engine = engine_on(backend, threaded=False)
    response = engine.run(items)
    with pytest.raises(KeyboardInterrupt):
        all(iter(engine.step, False))
    assert streams(response) == expected
    engine.close()


@thread_only(Reason.BY_HAND)
def test_ctrl_c_while_waiting_by_hand_cancels_the_batch_alone() -> None:
    backend = FailingBackend(2, 64, 16, error=KeyboardInterrupt(), fail_at=2)
    engine = engine_on(backend, options={"ignore_eos": True}, threaded=False)
    other = engine.run(prompts(1, max_tokens=9))
    response = engine.run(prompts(3))
    with pytest.raises(KeyboardInterrupt):
        response.results()
    assert [r.finish_reason for r in all_results(response)] == ["cancelled"] * 3
    assert [r.finish_reason for r in all_results(other)] == ["length"]
    engine.close()


# ---- references ----


@no_pool(Reason.ONE_BACKEND)
def test_dropping_the_last_reference_ends_the_thread() -> None:
    engine = engine_on(FakeBackend())
    thread = owner_of(engine)
    del engine
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@no_pool(Reason.ONE_BACKEND)
def test_response_keeps_its_engine() -> None:
    backend = GatedBackend(2, 64, 16, hold_at=1)
    engine = engine_on(backend, options={"ignore_eos": True})
    thread, response = owner_of(engine), engine.run(prompts(3, max_tokens=5))
    del engine
    backend.wait_until_held()
    gc.collect()
    backend.release()
    assert [r.finish_reason for r in all_results(response)] == ["length"] * 3
    assert thread.is_alive()
    del response
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@no_pool(Reason.ONE_BACKEND)
def test_engine_nobody_holds_ends_after_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    unraised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    backend = GatedBackend(2, 64, 16, hold_at=1)
    engine = engine_on(backend, options={"ignore_eos": True})
    thread, is_alive = owner_of(engine), weakref.ref(engine)
    engine.run(prompts(3, max_tokens=5))
    del engine
    backend.wait_until_held()
    gc.collect()
    assert is_alive()
    backend.release()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert sum(len(p.binds) for p in backend.plans) == 3
    assert not unraised


USES: dict[str, Callable[[Engine], object]] = {
    "none": lambda engine: None,
    "run": lambda engine: engine.run(prompts(3)),
    "steps": lambda engine: (engine.run(prompts(3)), engine.step(), engine.step()),
    "result": lambda engine: next(engine.run(prompts(3)).as_completed()),
    "chunk": lambda engine: next(iter(engine.run(prompts(3)))),
    "generator": lambda engine: next(iter(engine.run(iter(prompts(30))))),
    "two": lambda engine: (engine.run(prompts(3)), next(iter(engine.run(prompts(3))))),
    "paused": lambda engine: engine.pause(engine.submit("a").ids[0]),
    "embed": lambda engine: engine.embed(["a", "b"]),
}


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("use", USES)
def test_engine_by_hand_that_nobody_holds_is_freed_with_its_requests(use: str) -> None:
    backend = FakeBackend(2, 64, 16)
    engine = engine_on(backend, threaded=False, options={"ignore_eos": True})
    is_alive = weakref.ref(engine)
    USES[use](engine)
    del engine
    gc.collect()
    assert is_alive() is None
    assert backend.is_closed


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("read", [iter, BatchResponse.as_completed])
def test_reader_goes_on_with_an_engine_by_hand_that_nobody_else_holds(
    read: Callable[[BatchResponse], Iterator[Any]],
) -> None:
    backend = FakeBackend(2, 64, 16)
    engine = engine_on(backend, threaded=False, options={"ignore_eos": True})
    is_alive, reader = weakref.ref(engine), read(engine.run(prompts(3, max_tokens=5)))
    del engine
    gc.collect()
    assert sum(given.finish_reason == "length" for given in reader) == 3
    assert not backend.is_closed
    del reader
    gc.collect()
    assert is_alive() is None
    assert backend.is_closed


@thread_only(Reason.ONE_BACKEND)
def test_model_is_freed_where_its_engine_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    monkeypatch.setattr(loader, "load_backend", lambda *args, **given: (backend, str))
    monkeypatch.setenv("CBATCH_CACHE_DIR", "~no-such-user/cells")
    with pytest.raises(ConfigError, match="no-such-user"):
        open_local(None, EngineOptions(checkpoint_mib=1), None, bool)
    assert backend.is_closed


# ---- processes ----


def run_script(source: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, which must end well and say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(source)]
        + [str(a) for a in args],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done


@pytest.mark.real
def test_ctrl_c_while_waiting_cancels_the_batch_and_leaves_the_engine() -> None:
    run_script(
        """
        import sys, threading, traceback
        from tests.runtime.backends import CtrlC, GatedBackend, all_results
        from cbatch.engine import Engine

        def names(frame):
            return [f.f_code.co_name for f, _ in traceback.walk_stack(frame)]

        def press_when_waiting():
            backend.wait_until_held()
            while "results" not in names(sys._current_frames()[main]):
                pass
            backend.release_when_asked()
            ctrl_c.press()

        main, ctrl_c = threading.main_thread().ident, CtrlC()
        backend = GatedBackend(2, 64, 16, hold_at=3)
        engine = Engine(backend, options={"ignore_eos": True})
        response = engine.run(["a", "b", "c"])
        threading.Thread(target=press_when_waiting).start()
        try:
            response.results()
        except KeyboardInterrupt:
            pass
        else:
            sys.exit("no KeyboardInterrupt")
        assert [r.finish_reason for r in all_results(response)] == ["cancelled"] * 3
        [again] = all_results(engine.run(["a"], options={"max_tokens": 3}))
        assert again.finish_reason == "length"
        engine.close()
        """
    )


@pytest.mark.real
def test_ctrl_c_while_closing_is_raised_when_the_thread_has_ended() -> None:
    run_script(
        """
        import sys, threading, traceback
        from tests.runtime.backends import CtrlC, GatedBackend, owner_of
        from cbatch.engine import Engine

        def press_when_closing():
            while "_end_thread" not in [f.f_code.co_name for f, _ in traceback.walk_stack(sys._current_frames()[main])]:
                pass
            ctrl_c.press()
            backend.release()

        main, ctrl_c = threading.main_thread().ident, CtrlC()
        backend = GatedBackend(2, 64, 16, hold_at=3)
        engine = Engine(backend, options={"ignore_eos": True})
        owner = owner_of(engine)
        response = engine.run(["a", "b", "c"])
        backend.wait_until_held()
        threading.Thread(target=press_when_closing).start()
        try:
            engine.close()
        except KeyboardInterrupt:
            assert not owner.is_alive()
        else:
            sys.exit("no KeyboardInterrupt")
        engine.close()
        """
    )


@pytest.mark.real
def test_child_of_a_fork_gets_a_typed_error() -> None:
    run_script(
        """
        import os, sys
        from tests.runtime.backends import GatedBackend, all_results
        from cbatch.engine import Engine
        from cbatch.errors import EngineClosedError

        backend = GatedBackend(2, 64, 16, hold_at=3)
        engine = Engine(backend, options={"ignore_eos": True, "max_tokens": 9})
        done = engine.run(["z"], options={"max_tokens": 1})
        all_results(done)
        response = engine.run(["a", "b"])
        backend.wait_until_held()
        child = os.fork()
        if child == 0:
            calls = [lambda: engine.run(["c"]), engine.stats, engine.cancel_all,
                     lambda: engine.cancel("0"), response.results, response.cancel,
                     lambda: next(iter(response)), lambda: next(response.as_completed())]
            for call in calls:
                try:
                    call()
                except EngineClosedError as error:
                    assert "parent" in str(error)
                else:
                    os._exit(1)
            assert done.results()[0].finish_reason == "length"
            engine.close()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        backend.release()
        assert [r.finish_reason for r in all_results(response)] == ["length"] * 2
        """
    )


@pytest.mark.real
def test_child_of_a_fork_does_not_step_by_hand() -> None:
    run_script(
        """
        import os, sys
        from cbatch.backend.fake import FakeBackend, Faults
        from cbatch.engine import Engine
        from cbatch.errors import EngineClosedError

        engine = Engine(FakeBackend(), threaded=False)
        response = engine.run(["a"])
        child = os.fork()
        if child == 0:
            for call in (engine.step, response.results, lambda: next(iter(response))):
                try:
                    call()
                except EngineClosedError:
                    continue
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(response.results()) == 1
        """
    )


@pytest.mark.parametrize("reader", ["None", "response.results(return_errors=True)"])
def test_interpreter_exits_cleanly_with_work_in_flight(test_model: Path, reader: str) -> None:
    run_script(
        f"""
        import sys, threading
        import cbatch
        engine = cbatch.load(sys.argv[1], parallel=8, n_threads=1)
        response = engine.run([str(i) for i in range(500)], options={{"ignore_eos": True}})
        threading.Thread(target=lambda: {reader}, daemon=True).start()
        next(iter(response))
        """,
        test_model,
    )


def test_two_engines_in_one_process(test_model: Path) -> None:
    options = {"max_tokens": 8, "temperature": 0}
    with (
        cbatch.load(test_model, parallel=2, n_threads=1, options=options) as one,
        cbatch.load(test_model, parallel=3, n_threads=1, options=options) as two,
    ):
        responses = [one.run(["a", "b", "c"]), two.run(["c", "b", "a"])]
        first, second = map(streams, responses)
    assert first == second[::-1]


@thread_only(Reason.BY_HAND)
def test_model_that_is_loaded_while_the_program_ends_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opener(_: object) -> Any:
        raise RuntimeError("can't register atexit after shutdown")

    with pytest.raises(RuntimeError, match="atexit"):
        Engine(opener=opener).open()
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    with pytest.raises(ModelLoadError, match="before the main thread ends"):
        Engine(opener=opener).open()
