"""Several answers to one prompt, and log-probabilities, by the fake backend."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import BatchPrompt
from cbatch.backend.fake import FakeBackend, fake_logprobs
from cbatch.core.plan import KvCapabilities
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import (
    ConfigError,
    DeadlineError,
    DuplicateIdError,
    EngineClosedError,
    GrammarError,
)
from cbatch.options import RunOptions
from cbatch.response import BatchError, BatchOutputChunk, TokenLogprob
from cbatch.runtime.choices import Choices
from cbatch.runtime.mailbox import N_AHEAD_PER_SLOT, Mailbox
from tests.helpers import A_SECOND_A_STEP, partitioned
from tests.kinds import Reason, each_kind, engine_on, no_pool, thread_only
from tests.places import ask_held, steps, wait_until
from tests.runtime.backends import (
    Cancelled,
    FailingBackend,
    GatedBackend,
    all_results,
    ids_in_flight,
    in_thread,
    is_room_awaited,
    n_commands,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.engine import Engine
    from cbatch.messages import Prompt
    from cbatch.response import BatchResult

pytestmark = each_kind

LONG = {"ignore_eos": True, "max_tokens": 6}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with closing(engine_on(FakeBackend(4, 64, 32), options=LONG)) as made:
        yield made


def answer(engine: Engine, **options: Any) -> BatchResult:
    [result] = all_results(engine.run([BatchPrompt(prompt="a b c", id="x")], options=options))
    return result


def mean_of(result: BatchResult) -> float:
    assert result.logprobs
    return sum(t.logprob for t in result.logprobs) / len(result.logprobs)


# ---- n ----


@pytest.mark.parametrize("seeds", [(7, 8, 9), (2**64 - 2, 2**64 - 1, 0)])
def test_choices_are_those_of_requests_with_the_seeds_that_follow(
    engine: Engine, seeds: tuple[int, ...]
) -> None:
    result = answer(engine, n=3, seed=seeds[0])
    alone = [answer(engine, seed=seed) for seed in seeds]
    assert [c.token_ids for c in result.choices] == [r.token_ids for r in alone]
    assert tuple(c.seed for c in result.choices) == seeds
    assert len({c.token_ids for c in result.choices}) == 3
    assert {c.id for c in result.choices} == {"x"}


def test_result_with_choices_is_the_first_and_counts_them_all(engine: Engine) -> None:
    result = answer(engine, n=3, seed=7)
    first = result.choices[0]
    assert (result.text, result.token_ids) == (first.text, first.token_ids)
    assert (result.id, result.finish_reason, result.error) == ("x", "length", None)
    assert (first.usage.completion_tokens, result.usage.completion_tokens) == (6, 18)
    assert result.usage.prompt_tokens == first.usage.prompt_tokens
    assert result.timings.total_s == max(c.timings.total_s for c in result.choices)
    assert answer(engine, n=1).choices == ()


def test_chunks_of_choices_have_their_index_and_the_id_of_the_request(engine: Engine) -> None:
    texts: dict[int, str] = defaultdict(str)
    ends: list[int] = []
    response = engine.run([BatchPrompt(prompt="a b c", id="x")], options={"n": 3, "seed": 7})
    for chunk in response:
        assert chunk.id == "x"
        texts[chunk.index] += chunk.text
        ends += [chunk.index] * (chunk.finish_reason is not None)
    [result] = response.results()
    assert [texts[i] for i in range(3)] == [c.text for c in result.choices]
    assert sorted(ends) == [0, 1, 2]


@no_pool(Reason.ONE_BACKEND)
def test_id_is_taken_until_the_last_choice_has_ended() -> None:
    backend = GatedBackend(2, 64, 32, hold_at=8)
    with closing(engine_on(backend, options=LONG)) as engine:
        prompt = BatchPrompt(prompt="a b c", id="x")
        response = engine.run([prompt], options={"n": 3})  # in two slots: two end first
        backend.wait_until_held()
        with pytest.raises(DuplicateIdError):
            engine.run([prompt])
        backend.release()
        assert len(all_results(response)[0].choices) == 3
        assert all_results(engine.run([prompt]))[0].finish_reason == "length"


@no_pool(Reason.ONE_BACKEND)
def test_cancel_ends_all_choices_and_counts_one_request() -> None:
    backend = GatedBackend(2, 64, 32, hold_at=3)
    with closing(engine_on(backend, options=LONG)) as engine:
        prompts = [BatchPrompt(prompt="a", id="x"), BatchPrompt(prompt="b")]
        response = engine.run(prompts, options={"n": 3})
        backend.wait_until_held()
        backend.release_when_asked()
        assert engine.cancel("x")
        assert not engine.cancel("x")
        first, second = all_results(response)
        assert [c.finish_reason for c in first.choices] == ["cancelled"] * 3
        assert first.finish_reason == "cancelled"
        assert second.finish_reason == "length"


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("end", ["cancel_all", "leave", "close"])
def test_end_of_a_batch_ends_all_its_choices(end: str) -> None:
    backend = GatedBackend(2, 64, 32, hold_at=3)
    with closing(engine_on(backend, options=LONG)) as engine:
        response = engine.run(["a", "b"], options={"n": 3})
        backend.wait_until_held()
        backend.release_when_asked()
        if end == "cancel_all":
            assert engine.cancel_all() == 2
        elif end == "leave":
            response.as_completed().close()
        else:
            engine.close()
        choices = [c for result in all_results(response) for c in result.choices]
        assert [c.finish_reason for c in choices] == ["cancelled"] * 6


Ask = Callable[[Callable[[], object]], object]


@contextmanager
def six_choices_in_line() -> Iterator[tuple[Engine, Ask, Callable[[], list[BatchResult]]]]:
    """One slot, room for one to wait, and six choices of `x`, the first at work, until something is asked.

    The second call waits for the results.
    """
    backend = GatedBackend(1, 64, 32, hold_at=3)
    schedule = ScheduleOptions(max_queue=1)
    with closing(engine_on(backend, options=LONG, schedule=schedule)) as engine:
        prompt = BatchPrompt(prompt="a", id="x")
        running = in_thread(lambda: all_results(engine.run([prompt], options={"n": 6})))
        backend.wait_until_held()
        wait_until(lambda: is_room_awaited(engine) or n_commands(engine) > 0)  # who submits
        yield engine, partial(ask_held, engine, backend), running


@no_pool(Reason.ONE_BACKEND)
def test_cancel_ends_choices_too_that_wait_for_room_in_the_queue() -> None:
    with six_choices_in_line() as (engine, ask, running):
        assert ask(lambda: engine.cancel("x"))
        [result] = running()
        assert [c.finish_reason for c in result.choices] == ["cancelled"] * 6
        assert not ids_in_flight(engine)


@thread_only(Reason.BY_HAND)
def test_choices_pause_each_for_itself_and_are_resumed_together() -> None:
    backend = FakeBackend(4, 64, 32)
    with closing(engine_on(backend, options=LONG, threaded=False)) as engine:
        response = engine.run(
            [BatchPrompt(prompt="a", id="x")], options={"n": 3, "max_tokens": 9, "pause_every": 4}
        )
        for n_all in (12, 18, 27):
            while engine.step():
                pass
            stats = engine.stats()
            assert stats.n_output_tokens == n_all
            assert stats.n_paused == (3 if n_all < 27 else 0)
            assert engine.resume("x", 2 if n_all == 12 else None) is (n_all < 27)
        [result] = all_results(response)
        assert [len(choice.token_ids) for choice in result.choices] == [9] * 3


@no_pool(Reason.ONE_BACKEND)
def test_pause_holds_choices_too_that_wait_for_room_in_the_queue() -> None:
    with six_choices_in_line() as (engine, ask, running):
        assert ask(lambda: engine.pause("x"))
        assert not engine.pause("x")
        wait_until(lambda: engine.stats().n_submitted == 6)
        stats = engine.stats()
        assert (stats.n_running, stats.n_finished) == (0, {})
        assert engine.resume("x")
        assert not engine.resume("x")
        assert [c.finish_reason for c in running()[0].choices] == ["length"] * 6


def test_one_choice_that_fails_fails_its_item(engine: Engine) -> None:
    results = [answer(engine, n=4, seed=seed, regex="1:5:7") for seed in range(8)]
    broken = [r for r in results if any(c.error for c in r.choices)]
    assert broken
    for result in broken:
        assert isinstance(result.error, GrammarError)
        assert result.finish_reason == "error"
    with pytest.raises(BatchError):
        engine.run(
            ["a b c"], options={"n": 4, "seed": results.index(broken[0]), "regex": "1:5:7"}
        ).results()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Return an engine by hand with one slot, whose clock is the backend's: each step takes a second."""
    backend = GatedBackend(1, 64, 32, cost=A_SECOND_A_STEP)
    monkeypatch.setattr("time.perf_counter", lambda: backend.now_s)
    with closing(engine_on(backend, options=LONG, threaded=False)) as made:
        yield made


@thread_only(Reason.BY_HAND)
def test_choices_that_no_time_was_left_for_are_the_error_of_their_request(timed: Engine) -> None:
    asked = [BatchPrompt(prompt="a b c", id="x", options={"n": 4, "timeout_s": 8.0})]
    [result] = all_results(timed.run(asked))
    whole, cut, *never = result.choices
    assert [(c.finish_reason, c.error) for c in (whole, cut)] == [
        ("length", None),
        ("timeout", None),
    ]
    assert all(isinstance(c.error, DeadlineError) for c in never)
    assert (result.finish_reason, result.error) == ("timeout", never[0].error)
    assert result.usage.prompt_tokens == whole.usage.prompt_tokens
    with pytest.raises(BatchError, match="x: the deadline passed"):
        timed.run(asked).results()
    with pytest.raises(DeadlineError):
        timed.run(asked).result()


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("options", [{"n": 2}, {"best_of": 2}])
@pytest.mark.parametrize("end", ["timeout", "cancel"])
def test_request_of_which_one_choice_was_cut_off_says_so(
    timed: Engine, options: dict[str, Any], end: str
) -> None:
    time = {"timeout_s": 8.0} if end == "timeout" else {}
    response = timed.run([BatchPrompt(prompt="a b c", id="x")], options={**options, **time})
    if end == "cancel":
        steps(timed, 8)
        assert timed.cancel("x")
    [result] = response.results()
    assert result.finish_reason == ("timeout" if end == "timeout" else "cancelled")
    assert (result.error, result.stop_reason) == (None, None)
    assert result.text == result.choices[0].text != ""


@thread_only(Reason.BY_HAND)
def test_best_of_candidates_that_never_ran_leave_the_best_of_the_others(timed: Engine) -> None:
    options = {"best_of": 4, "timeout_s": 8.0}
    result = timed.submit("a b c", options=options).result()
    assert (result.finish_reason, result.error, len(result.choices)) == ("timeout", None, 1)
    [warning] = result.warnings
    assert (
        "2 of 4 answers failed and were left out; the first failed with: the deadline passed"
        in warning
    )


@thread_only(Reason.DEATH)
def test_best_of_whose_engine_dies_is_an_error_of_the_engine() -> None:
    backend = FailingBackend(1, 64, 32, error=MemoryError("gone"), fail_at=8)
    engine = engine_on(backend, options={**LONG, "best_of": 3})
    [result] = all_results(engine.submit("a b c"))
    assert result.finish_reason == "error"
    assert isinstance(result.error, EngineClosedError)
    engine.close()


def test_fed_batch_with_choices_stays_within_what_it_may_hold() -> None:
    backend = FakeBackend(2, 64, 32)
    with closing(engine_on(backend, options={**LONG, "n": 5})) as engine:
        n_read = 0

        def prompts() -> Iterator[str]:
            nonlocal n_read
            for i in range(60):
                n_read += 1
                yield f"p{i}"

        n_given, n_ahead = 0, []
        for chunk in engine.run(prompts()):
            n_given += chunk.finish_reason is not None
            n_ahead.append(n_read - n_given / 5)
        assert n_given == 300
        assert max(n_ahead) <= N_AHEAD_PER_SLOT * engine.parallel + 1


@thread_only(Reason.AT_ONCE)
def test_winding_down_spares_a_request_of_which_a_choice_runs() -> None:
    backend = GatedBackend(1, 64, 32, hold_at=3)
    with closing(engine_on(backend, options=LONG)) as engine:
        response = engine.run(["a", "b"], options={"n": 3, "seed": 7})
        backend.wait_until_held()
        response.wind_down()
        backend.release()
        first, second = all_results(response)
        assert [c.finish_reason for c in first.choices] == ["length"] * 3
        assert [c.finish_reason for c in second.choices] == ["cancelled"] * 3


@thread_only(Reason.AT_ONCE)
def test_winding_down_ends_choices_too_that_wait_for_room_in_the_queue() -> None:
    backend = GatedBackend(1, 64, 32, hold_at=3)
    schedule = ScheduleOptions(max_queue=1)
    with closing(engine_on(backend, options=LONG, schedule=schedule)) as engine:
        other = engine.run(["a"], options={"max_tokens": 20})
        backend.wait_until_held()
        response = engine.run(iter([BatchPrompt(prompt="b", id="x")]), options={"n": 3})
        wait_until(lambda: "x" in ids_in_flight(engine))
        response.wind_down()
        backend.release()
        [result] = all_results(response)
        assert [c.finish_reason for c in result.choices] == ["cancelled"] * 3
        assert all_results(other)[0].finish_reason == "length"


@thread_only(Reason.BY_HAND)
def test_choices_that_never_ran_do_not_count_as_computed() -> None:
    backend = GatedBackend(1, 128, 64, memory=partitioned(128))
    with closing(engine_on(backend, options=LONG, threaded=False)) as engine:
        engine.submit("x" * 60).result()
        response = engine.run([BatchPrompt(prompt="x" * 60, id="x")], options={"n": 3})
        steps(engine, 2)
        engine.cancel("x")
        [result] = response.results(return_errors=True)
        assert [c.error is None for c in result.choices] == [True, False, False]
        assert result.usage.cached_tokens == 59


@thread_only(Reason.BY_HAND)
def test_choice_before_the_one_that_scores_has_no_prompt_scores() -> None:
    pool = KvCapabilities(
        "unified", 128, can_copy=True
    )  # where the second finds its prompt, and the first has no room for it
    schedule = ScheduleOptions(admission="reserve")
    backend = GatedBackend(4, 128, 64, memory=pool)
    with closing(engine_on(backend, options=LONG, threaded=False, schedule=schedule)) as engine:
        engine.submit("x" * 60, options={"max_tokens": 30})
        steps(engine, 2)
        options = {"n": 2, "prompt_logprobs": 0, "echo": True, "logprobs": True}
        response = engine.run([BatchPrompt(prompt="x" * 60, id="x")], options=options)
        steps(engine, 3)
        engine.cancel("x")
        [result] = response.results(return_errors=True)
        first, second = result.choices
        assert (first.prompt_logprobs, first.logprobs) == ((), ())
        assert second.prompt_logprobs == (None,) * 60
        assert [t.token_id for t in second.logprobs or ()] == [*second.token_ids]
        assert len(second.token_ids) > 60


# ---- best_of ----


def test_best_of_keeps_the_likeliest_in_that_order(engine: Engine) -> None:
    every = answer(engine, n=6, seed=3, logprobs=True).choices
    kept = answer(engine, n=2, best_of=6, seed=3, logprobs=True).choices
    assert [c.seed for c in kept] == [c.seed for c in sorted(every, key=lambda c: -mean_of(c))[:2]]


def test_best_of_alone_gives_one_answer_and_no_logprobs(engine: Engine) -> None:
    result = answer(engine, best_of=6, seed=3)
    [kept] = result.choices
    assert kept.token_ids == answer(engine, n=2, best_of=6, seed=3, logprobs=True).token_ids
    assert (result.logprobs, kept.logprobs) == (None, None)
    assert result.usage.completion_tokens == 36


def test_best_of_streams_what_it_keeps_when_it_is_known(engine: Engine) -> None:
    response = engine.run(["a b c"], options={"best_of": 5, "n": 2, "seed": 3})
    chunks = list(response)
    [result] = response.results()
    assert [(c.index, c.text, c.finish_reason) for c in chunks] == [
        (i, c.text, "length") for i, c in enumerate(result.choices)
    ]


def test_best_of_prefers_what_did_not_fail(engine: Engine) -> None:
    whole = [answer(engine, n=4, seed=4 * seed, regex="1:5:7", logprobs=0) for seed in range(16)]
    mixed = [r for r in whole if 0 < sum(c.error is not None for c in r.choices) < 4]
    told = [[c for c in r.choices if c.logprobs] for r in mixed]
    assert any(max(choices, key=mean_of).error for choices in told)  # the likeliest
    for result in mixed:
        kept = answer(engine, best_of=4, seed=result.choices[0].seed, regex="1:5:7")
        assert kept.error is None
        n_failed = sum(c.error is not None for c in result.choices)
        assert f"{n_failed} of 4 answers failed and were left out" in kept.warnings[-1]


def test_result_has_taken_as_long_as_the_slowest_answer_whichever_is_kept(engine: Engine) -> None:
    fast, slow = answer(engine, seed=1), answer(engine, seed=2)
    total_s = fast.timings.total_s + 9
    times = replace(slow.timings, total_s=total_s, last_token_s=total_s)
    box = Mailbox(1, Cancelled(), None)
    choices = Choices(box, 0, "x", RunOptions(best_of=2))
    last = [BatchOutputChunk(id, "", (), finish_reason="stop") for id in choices.member_ids]
    choices.deliver(last, [(0, fast), (1, replace(slow, timings=times))])
    [joined] = box.wait(0)
    assert joined.timings == replace(fast.timings, total_s=total_s, last_token_s=total_s)


def test_best_of_counts_the_prompt_as_computed_whichever_it_keeps() -> None:
    memory = partitioned(4 * 64)
    for seed in range(6):
        with closing(engine_on(FakeBackend(4, 64, 32, memory=memory), options=LONG)) as engine:
            options = {"best_of": 3, "seed": seed}
            result = engine.submit("x" * 40, options=options).result()
            assert result.usage.cached_tokens == 0


# ---- log-probabilities ----


def test_logprobs_are_one_for_each_token_of_the_answer(engine: Engine) -> None:
    result = answer(engine, logprobs=True)
    assert result.logprobs is not None
    found = [(t.token_id, t.logprob, t.top) for t in result.logprobs]
    assert found == [(t, fake_logprobs(t, 0).logprob, ()) for t in result.token_ids]
    assert b"".join(t.data for t in result.logprobs).decode(errors="replace") == result.text


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 1},
        {"logprobs": 1, "n": 3},
        {"logprobs": 1, "n": 3, "echo": True},
        {"logprobs": 1, "n": 2, "best_of": 4, "echo": True},
        {"best_of": 3},
        {"n": 2},
    ],
)
def test_chunks_have_the_log_probabilities_of_their_tokens(
    engine: Engine, asked: dict[str, Any]
) -> None:
    response = engine.run(["a b c"], options={**asked, "seed": 3})
    chunks, result = list(response), response.result()
    for i, choice in enumerate(result.choices or (result,)):
        own = [chunk for chunk in chunks if chunk.index == i]
        if "logprobs" not in asked:
            assert {chunk.logprobs for chunk in own} == {None}
            continue
        assert figures([t for c in own for t in c.logprobs or ()]) == figures(choice.logprobs or ())
        assert all(len(c.logprobs or ()) == len(c.token_ids) for c in own)


def figures(tokens: Sequence[TokenLogprob]) -> list[Any]:
    return [(t.token_id, str(t.logprob), t.top) for t in tokens]  # NaN is not itself


@thread_only(Reason.BY_HAND)
def test_choices_that_have_ended_are_told_to_a_reader_who_comes_later() -> None:
    box = Mailbox(1, Cancelled(), None)
    choices = Choices(box, 0, "x", RunOptions(n=2))
    first, _ = choices.member_ids
    choices.deliver([BatchOutputChunk(first, "a", (1,), finish_reason="stop")], [])
    assert box.n_unread_chunks == 0
    box.is_streamed = True
    choices.deliver((), ())
    assert box.n_unread_chunks == 1


@thread_only(Reason.ONE_BACKEND)
def test_choice_that_never_ran_has_no_echo() -> None:
    asked = {"n": 3, "echo": True, "logprobs": 1, "max_tokens": 40}
    backend = GatedBackend(2, 64, 32, hold_at=3)
    with engine_on(backend, options=LONG) as engine:
        response = engine.run([BatchPrompt(prompt="abc", options=asked)])
        backend.wait_until_held()
        backend.release_when_asked()
        response.cancel()
        [result] = response.results(return_errors=True)
    *begun, last = result.choices
    assert all(len(c.token_ids) == len(c.logprobs or ()) > 3 for c in begun)
    assert (last.text, last.token_ids, last.logprobs) == ("", (), ())


@thread_only(Reason.BY_HAND)
def test_choices_wait_for_the_scores_of_the_echo() -> None:
    box = Mailbox(1, Cancelled(), None)
    box.is_streamed = True
    choices = Choices(box, 0, "x", RunOptions(n=2, echo=True, logprobs=True))
    first, second = choices.member_ids
    known, unknown = TokenLogprob(1, b"a", -1.0), TokenLogprob(1, b"a", math.nan)
    own = TokenLogprob(2, b"b", -2.0)
    late = BatchOutputChunk(second, "ab", (1, 2), content="ab", logprobs=(unknown, own))
    choices.deliver([late], [])
    choices.deliver([replace(late, text="b", content="b", token_ids=(2,), logprobs=(own,))], [])
    assert box.n_unread_chunks == 0
    choices.deliver([replace(late, id=first, token_ids=(1,), logprobs=(known,))], [])
    told = [box.take_chunk() for _ in range(box.n_unread_chunks)]
    assert [(c.index, c.logprobs) for c in told if c] == [
        (0, (known,)),
        (1, (known, own)),
        (1, (own,)),
    ]


@pytest.mark.parametrize("asked", [{"logprobs": 3}, {"logprobs": True, "top_logprobs": 3}])
def test_top_logprobs_are_the_likeliest(engine: Engine, asked: dict[str, Any]) -> None:
    result = answer(engine, **asked)
    assert result.logprobs
    for token in result.logprobs:
        top = [(t.token_id, t.logprob) for t in token.top]
        assert top == list(fake_logprobs(token.token_id, 3).top)


def test_number_for_logprobs_is_not_taken_for_true(engine: Engine) -> None:
    asked: list[dict[str, Any]] = [{"logprobs": True}, {"logprobs": 1}, {"logprobs": 0}]
    prompts = [BatchPrompt(prompt="a", options=options) for options in asked]
    results = all_results(engine.run(prompts))
    assert [len(r.logprobs[0].top) for r in results if r.logprobs] == [0, 1, 0]


def test_logprobs_of_an_extended_answer_are_those_of_one_run(engine: Engine) -> None:
    first = answer(engine, seed=5, logprobs=2)
    longer = engine.extend(first, 6).result()
    assert longer.logprobs == answer(engine, seed=5, logprobs=2, max_tokens=12).logprobs


@thread_only(Reason.BY_HAND)
def test_text_of_a_token_that_is_no_whole_character_shows_as_unknown() -> None:
    from cbatch.response import TokenLogprob

    assert TokenLogprob(1, "é".encode()[:1], -0.5).text == "\ufffd"


# ---- extending ----


def test_choice_can_be_extended_and_their_result_not(engine: Engine) -> None:
    result = answer(engine, n=2, seed=7)
    with pytest.raises(ConfigError, match=r"'x' has 2 choices: extend one of them"):
        engine.extend(result, 4)
    longer = engine.extend(result.choices[1], 4).result()
    assert longer.id == "x"
    assert longer.token_ids == answer(engine, seed=8, max_tokens=10).token_ids


def test_extended_choice_tells_no_logprobs_where_they_were_to_rank_by(engine: Engine) -> None:
    [kept] = answer(engine, best_of=3, seed=7).choices
    longer = engine.extend(kept, 4).result()
    assert longer.logprobs is None
    assert longer.token_ids == answer(engine, seed=kept.seed, max_tokens=10).token_ids


@no_pool(Reason.ONE_BACKEND)
def test_extended_choice_scores_the_prompt_where_the_first_did_not() -> None:
    backend = GatedBackend(2, 256, 8, hold_at=4)
    with closing(engine_on(backend, schedule=ScheduleOptions(share_prefixes=False))) as engine:
        prompt = BatchPrompt(prompt="a" * 40, id="x")
        options = {**LONG, "n": 2, "seed": 7, "prompt_logprobs": 0}
        with together(2):
            response = engine.run([prompt], options=options)
            backend.wait_until_held()
        backend.release_when_asked()
        engine.cancel("x")
        second = all_results(response)[0].choices[1]
        longer = engine.extend(second, 4).result()
        assert longer.prompt_logprobs
        assert None not in longer.prompt_logprobs[1:]


# ---- wrong values ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be 1 … 128, not 0"),
        ({"n": 129}, "128"),
        ({"n": 3, "best_of": 2}, "best_of=2 is less than n=3"),
        ({"n": True}, "n"),
        ({"logprobs": 21}, "20"),
        ({"logprobs": -1}, "logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "20"),
        ({"top_logprobs": 2}, "needs logprobs=True"),
        ({"top_logprobs": 2, "logprobs": False}, "needs logprobs=True"),
        ({"logprobs": math.nan}, "logprobs"),
        ({"n": 2, "prefill_only": True}, "prefill_only allows one answer"),
        ({"best_of": 2, "save_cache": True, "cache_key": "k"}, "save_cache allows one answer"),
    ],
)
def test_wrong_value_is_named(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.run(["a"], options=options)


def test_options_that_do_not_go_together_name_the_request(engine: Engine) -> None:
    prompts: list[Prompt] = ["a", BatchPrompt(prompt="b", id="x", options={"n": 4})]
    with pytest.raises(ConfigError, match="request 'x': best_of=2 is less than n=4"):
        engine.run(prompts[1:], options={"best_of": 2})
    whole, failed = engine.run(prompts, options={"best_of": 2}).results(return_errors=True)
    assert whole.error is None
    assert "request 'x': best_of=2 is less than n=4" in str(failed.error)


@thread_only(Reason.BY_HAND)
def test_id_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match="NUL"):
        BatchPrompt(prompt="a", id="x\0y")
