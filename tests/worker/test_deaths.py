"""What the death of a worker costs: the requests that it computed, and no others."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.engine import Engine
from cbatch.errors import (
    DeadlineError,
    EngineClosedError,
    EngineError,
    ModelLoadError,
    RequestCancelledError,
    WorkerDiedError,
)
from cbatch.messages import BatchPrompt
from cbatch.worker.pool import N_FAILED_MAX, N_USELESS_MAX
from cbatch.worker.replica import back_off_s
from cbatch.worker.requests import N_ALONE_MAX
from tests.places import wait_until
from tests.runtime.backends import (
    GatedBackend,
    all_results,
    mailbox_of,
    runtime_of,
    together,
)
from tests.worker.links import Launches, MortalBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.batch_response import BatchResponse

SHORT = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "seed": 1}
LONG = {**SHORT, "max_tokens": 40}
POISON = 7
"""A token that no text has."""


def make(n_slots: int = 2, **given: Any) -> Callable[[], MortalBackend]:
    return partial(MortalBackend, n_slots, 64, 64, **given)


def prompts(n: int, poison: int | None = None) -> list[BatchPrompt]:
    """As many prompts, one of them with the poison in it."""
    tokens = [[100 + i, POISON if i == poison else 101, 102] for i in range(n)]
    return [BatchPrompt(tokens=some, id=f"r{i}") for i, some in enumerate(tokens)]


def undisturbed(n: int, options: dict[str, Any] = SHORT) -> list[tuple[int, ...]]:
    with Engine(GatedBackend(2, 64, 64), options=options) as engine:
        return [result.token_ids for result in all_results(engine.run(prompts(n)))]


def ends(results: Sequence[BatchResult]) -> list[str]:
    return [type(r.error).__name__ if r.error else r.finish_reason for r in results]


def wait_until_begun(engine: Engine, n: int) -> None:
    """Wait until the client knows that the first prompts are computed: a worker may say it a little later."""
    requests = runtime_of(engine).pool.requests
    begun = [requests[f"r{i}"] for i in range(n)]
    wait_until(lambda: all(asked.has_begun for asked in begun))


def killed_at(launches: Launches, n_run: int, engine: Engine, n: int, **more: Any) -> Any:
    """Kill the worker of an engine behind so many runs of steps of a batch; return the response."""
    first = launches.backends[0]
    first.hold_at = n_run
    with together(2):
        response = engine.run(prompts(n), **more)
        first.wait_until_held()
    wait_until_begun(engine, 2)
    launches.links[0].kill("ended by SIGKILL")
    first.release()
    return response


def chunks_until_death(
    launches: Launches, engine: Engine
) -> tuple[list[BatchOutputChunk], BatchResponse]:
    """Have one prompt answered, and read chunks as they come, until the worker dies."""
    first = launches.backends[0]
    first.hold_at, first.die_at = 0, 20
    response = engine.run(prompts(1), ask_again=True)
    first.wait_until_held()
    assert not mailbox_of(response).has_chunk()
    engine.count_tokens("a")  # the worker knows of the reader when it has answered
    first.may_die.clear()
    first.release()
    chunks = iter(response)
    got = [next(chunks)]
    first.may_die.set()
    return [*got, *chunks], response


def test_death_ends_what_was_computed_and_nothing_that_waited() -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine:
        results = all_results(killed_at(launches, 3, engine, 6))
    assert ends(results) == ["WorkerDiedError"] * 2 + ["length"] * 4
    assert [r.token_ids for r in results[2:]] == undisturbed(6)[2:]
    error = results[0].error
    assert isinstance(error, WorkerDiedError)
    assert (error.cause, error.n_alone) == ("ended by SIGKILL", 0)
    assert len(launches.links) == 2


@pytest.mark.parametrize("feed", [list, iter])
def test_batch_that_asks_again_has_all_answers_after_a_death(feed: Callable[..., Any]) -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine:
        first = launches.backends[0]
        first.hold_at = 3
        response = engine.run(feed(prompts(30)), ask_again=True)
        first.wait_until_held()
        launches.links[0].kill()
        first.release()
        results = [*response.as_completed()]
    found = {result.id: result.token_ids for result in results}
    assert len(results) == 30
    assert [found[f"r{i}"] for i in range(30)] == undisturbed(30)


def test_stream_keeps_what_its_reader_had_and_is_not_asked_again() -> None:
    launches = Launches(make())
    with launches.engine(options=LONG) as engine:
        got, response = chunks_until_death(launches, engine)
        [result] = all_results(response)
    assert [chunk.finish_reason for chunk in got if chunk.finish_reason] == ["error"]
    assert result.token_ids == sum((chunk.token_ids for chunk in got), ())
    n = len(result.token_ids)
    assert 0 < n < LONG["max_tokens"]
    assert result.token_ids == undisturbed(1, LONG)[0][:n]
    assert result.text == "".join(chunk.text for chunk in got)
    assert str(result.error).endswith("GGML_ASSERT(token != poison) failed")


def test_poison_fails_by_name_and_its_neighbours_have_answers() -> None:
    launches = Launches(make(poison=POISON))
    with launches.engine(options=SHORT) as engine:
        results = all_results(engine.run(prompts(8, poison=1), ask_again=True))
    expected = undisturbed(8)
    assert ends(results) == ["length", "WorkerDiedError", *["length"] * 6]
    assert all(r.token_ids == expected[i] for i, r in enumerate(results) if i != 1)
    error = results[1].error
    assert isinstance(error, WorkerDiedError)
    assert error.n_alone == N_ALONE_MAX
    assert "GGML_ASSERT(token != poison) failed" in str(error)
    assert len(launches.links) == 1 + 2 + N_ALONE_MAX


def test_poison_with_two_workers_leaves_answers_to_all_others() -> None:
    launches = Launches(make(poison=POISON))
    with launches.engine(2, options=SHORT) as engine:
        results = all_results(engine.run(iter(prompts(40, poison=5)), ask_again=True))
    assert sorted(ends(results)) == ["WorkerDiedError", *["length"] * 39]
    assert ends([r for r in results if r.id == "r5"]) == ["WorkerDiedError"]


def test_prompt_that_kills_before_it_is_computed_fails_alone() -> None:
    launches = Launches(make(poison_text="x"))
    texts = ["a", "b", "x", "c"]
    with launches.engine(options=SHORT) as engine:
        items = [BatchPrompt(prompt=text) for text in texts]
        results = all_results(engine.run(items, ask_again=True))  # others may have begun
    assert ends(results) == ["length", "length", "WorkerDiedError", "length"]


def test_choices_end_once_each_when_their_worker_dies() -> None:
    launches = Launches(make(3))
    with launches.engine(options={**LONG, "n": 2}) as engine:
        got, response = chunks_until_death(launches, engine)
        [result] = all_results(response)
    assert sorted(c.index for c in got if c.finish_reason == "error") == [0, 1]
    assert [choice.finish_reason for choice in result.choices] == ["error", "error"]
    for i, choice in enumerate(result.choices):
        assert choice.token_ids == sum((c.token_ids for c in got if c.index == i), ())


@pytest.mark.parametrize(
    "data", [b"Segmentation fault\n", b"\x40\0\0\0Segmentation", b"\2\0\0\0{]", b"\0\0\0\0{"]
)
def test_garbage_is_told_and_its_worker_replaced(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine, caplog.at_level(logging.WARNING):
        launches.links[0].say(data)
        results = all_results(engine.run(prompts(4), ask_again=True))
    assert [r.token_ids for r in results] == undisturbed(4)
    assert len(launches.links) == 2
    assert "it sent what cannot be read" in caplog.text


def test_death_within_a_frame_ends_that_frame_alone(caplog: pytest.LogCaptureFixture) -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine, caplog.at_level(logging.WARNING):
        launches.links[0].say(b"\x40\0\0\0\x81\xa7results\x91")
        launches.links[0].kill("ended by SIGKILL")
        results = all_results(engine.run(prompts(4)))
    assert [r.token_ids for r in results] == undisturbed(4)
    warnings = [r.getMessage() for r in caplog.records if r.name == "cbatch.worker"]
    died = "worker 0 died: ended by SIGKILL; restarting now"
    assert warnings == [died, "worker 0 is running again"]


def test_failed_starts_are_told_to_what_waits_and_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cbatch.worker.replica.BACK_OFF_S", (0.0,))
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine, caplog.at_level(logging.WARNING):
        assert engine.outage is None
        launches.error = EngineError("no memory")
        results = all_results(killed_at(launches, 3, engine, 4))
        assert launches.n_failed >= N_FAILED_MAX
        with pytest.raises(ModelLoadError, match="no worker can be started: no memory"):
            engine.count_tokens("a")
        wait_until(lambda: launches.n_failed >= 30)
        assert engine.outage is not None
        assert engine.outage.cause == "no worker can be started: no memory"
        launches.error = None
        wait_until(lambda: engine.outage is None)
        assert [r.token_ids for r in all_results(engine.run(prompts(4)))] == undisturbed(4)
    assert ends(results) == ["WorkerDiedError"] * 2 + ["ModelLoadError"] * 2
    told = [r.getMessage() for r in caplog.records]
    assert "worker 0 could not be started: no memory; restarting now" in told
    assert told[-1] == "worker 0 is running again"


@pytest.mark.parametrize("n", [1, 3])
def test_requests_wait_through_fewer_failed_starts_than_tell_them(
    monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr("cbatch.worker.replica.BACK_OFF_S", (0.0,))
    launches = Launches(make())
    with launches.engine(n, options=SHORT) as engine:
        launches.gate.clear()
        launches.fail_next(N_FAILED_MAX * n - 1, EngineError("no memory"))
        for link in launches.links[:n]:
            link.kill()
        wait_until(lambda: engine.outage is not None)
        response = engine.run(prompts(4))
        launches.gate.set()
        assert [r.token_ids for r in all_results(response)] == undisturbed(4)
        assert launches.n_failed == N_FAILED_MAX * n - 1


def test_failed_starts_beside_a_worker_that_runs_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cbatch.worker.replica.BACK_OFF_S", (0.0,))
    launches = Launches(make())
    with launches.engine(2, options=SHORT) as engine:
        launches.error = EngineError("no memory")
        launches.links[0].kill()
        results = all_results(engine.run(prompts(8), ask_again=True))  # the other one does it
        assert [r.token_ids for r in results] == undisturbed(8)
        wait_until(lambda: launches.n_failed > 2 * N_FAILED_MAX)
        launches.gate.clear()
        launches.links[1].kill()
        wait_until(lambda: engine.outage is not None)
        launches.error = None
        response = engine.run(prompts(4))
        launches.gate.set()
        assert [r.token_ids for r in all_results(response)] == undisturbed(4)


def test_pause_before_a_start_grows_to_half_a_minute() -> None:
    pauses = [back_off_s(n) for n in (0, 1, 2, 5, 9, 1000)]
    assert pauses == [0.0, 0.0, 0.1, 1.0, 30.0, 30.0]


def test_request_that_waits_for_a_worker_ends_at_its_deadline() -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine:
        launches.gate.clear()
        launches.links[0].kill()
        pool = runtime_of(engine).pool
        wait_until(lambda: not pool.ready)
        late = engine.submit("a", options={"timeout_s": 0})
        first = engine.submit("b", options={"timeout_s": 3600})
        pool.look()
        with pytest.raises(DeadlineError, match="the deadline passed"):
            late.result()
        launches.gate.set()
        assert first.result().finish_reason == "length"


def test_bug_in_a_place_ends_the_engine_and_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine:
        pool = runtime_of(engine).pool

        def leave(_: object) -> bool:
            raise KeyError("lost")

        monkeypatch.setattr(pool, "leave", leave)
        results = all_results(killed_at(launches, 3, engine, 4))
        assert ends(results) == ["EngineClosedError"] * 4
        assert "internal error: 'lost'" in str(results[0].error)
        assert engine.outage is not None
        assert (engine.outage.cause, engine.outage.retry_s) == ("internal error: 'lost'", None)


def test_worker_that_has_loaded_other_files_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.worker.replica.BACK_OFF_S", (0.0,))
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine:
        launches.make = make(seed=7)
        results = all_results(killed_at(launches, 3, engine, 4))
        assert ends(results) == ["WorkerDiedError"] * 2 + ["ModelLoadError"] * 2
        assert "was replaced while the engine ran" in str(results[2].error)
        launches.make = make()
        wait_until(lambda: engine.outage is None)
        assert [r.token_ids for r in all_results(engine.run(prompts(4)))] == undisturbed(4)


def test_request_cancelled_while_no_worker_is_there_is_cancelled() -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine:
        launches.gate.clear()
        response = killed_at(launches, 3, engine, 4)
        left = response.as_completed()
        assert ends([next(left), next(left)]) == ["WorkerDiedError"] * 2
        assert engine.cancel("r2")
        launches.gate.set()
        results = all_results(response)
    assert results[2].finish_reason == "cancelled"
    assert isinstance(results[2].error, RequestCancelledError)
    assert results[3].finish_reason == "length"


def test_items_that_are_not_to_begin_do_not_begin_in_another_worker() -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine:
        first = launches.backends[0]
        first.hold_at = 3
        with together(2):
            response = engine.run(prompts(6), ask_again=True)
            first.wait_until_held()
        wait_until_begun(engine, 2)
        launches.links[0].kill()
        mailbox_of(response).wind_down()
        first.release()
        results = all_results(response)
    assert [r.finish_reason for r in results] == ["length"] * 2 + ["cancelled"] * 4


def test_paused_request_is_paused_in_the_next_worker() -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine:
        first = launches.backends[0]
        first.hold_at = 3
        response = engine.run(prompts(4), ask_again=True)
        first.wait_until_held()
        first.release_when_asked()
        assert engine.pause("r3")
        launches.links[0].kill()
        left = response.as_completed()
        assert sorted(next(left).id for _ in range(3)) == ["r0", "r1", "r2"]
        assert engine.resume("r3")
        assert [r.token_ids for r in all_results(response)] == undisturbed(4)


def test_engine_of_a_worker_that_fails_is_told_why_and_started_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine, caplog.at_level(logging.WARNING):
        launches.backends[0].run = _raise  # type: ignore[method-assign]
        with together(2):
            results = all_results(engine.run(prompts(2)))
        assert [r.token_ids for r in all_results(engine.run(prompts(2)))] == undisturbed(2)
    assert ends(results) == ["WorkerDiedError"] * 2
    assert "the engine stopped: out of luck" in str(results[0].error)


def _raise(plan: object) -> Any:
    raise MemoryError("out of luck")


def test_close_ends_a_worker_that_is_not_ready_yet() -> None:
    launches = Launches(make())
    engine = launches.engine(options=SHORT)
    engine.open()
    launches.is_silent = True
    launches.links[0].kill()
    launches.wait_for(2)
    response = engine.run(prompts(3))
    engine.close()
    assert ends(all_results(response)) == ["RequestCancelledError"] * 3


def test_figures_of_a_worker_that_died_are_kept_and_its_slots_not_added() -> None:
    launches = Launches(make())
    with launches.engine(options=SHORT) as engine:
        with together(2):
            assert ends(all_results(engine.run(prompts(4)))) == ["length"] * 4
        before = engine.stats()
        launches.links[0].kill()
        assert ends(all_results(engine.run(prompts(4), ask_again=True))) == ["length"] * 4
        stats = engine.stats()
    assert (before.n_finished, stats.n_finished) == ({"length": 4}, {"length": 8})
    assert (before.n_active_max, stats.n_active_max) == (2, 2)


def test_workers_that_all_die_before_any_answer_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cbatch.worker.replica.BACK_OFF_S", (0.0,))
    launches = Launches(make(die_at=1))
    with launches.engine(2, options=SHORT) as engine:
        results = all_results(engine.run(prompts(40)))
        # the last ones may have been at the last worker that died
        error = next(r.error for r in results if isinstance(r.error, EngineClosedError))
        words = f"{N_USELESS_MAX} workers died before one had answered a request: ended by SIGABRT"
        assert words in str(error)
        with pytest.raises(EngineClosedError):
            engine.run(prompts(1))
    assert len(launches.links) <= N_USELESS_MAX + 2


def test_deaths_behind_an_answer_do_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.worker.replica.BACK_OFF_S", (0.0,))
    launches = Launches(make(poison=POISON))
    with launches.engine(options=SHORT) as engine:
        all_results(engine.run(prompts(1)))
        for _ in range(N_USELESS_MAX):
            assert ends(all_results(engine.run(prompts(1, poison=0)))) == ["WorkerDiedError"]
        assert ends(all_results(engine.run(prompts(1)))) == ["length"]
