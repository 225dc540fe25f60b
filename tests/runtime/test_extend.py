"""Going on from a result: two parts are one run, and no prompt is computed twice while its cells are there."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from cbatch.backend.fake import END_TOKEN, FakeBackend, Faults
from cbatch.cache.store import CacheStore
from cbatch.core.plan import KvCapabilities
from cbatch.core.span import PromptCuts
from cbatch.errors import (
    CacheError,
    ConfigError,
    DuplicateIdError,
    PromptTooLongError,
    QueueFullError,
)
from cbatch.response import TokenLogprob, Usage
from tests.helpers import A_SECOND_A_STEP
from tests.kinds import Reason, each_kind, engine_on, no_pool, thread_only
from tests.places import (
    DEFAULTS,
    ENDLESS,
    Place,
    can_all,
    expected,
    expects_little,
    first_chunk,
    item,
    plans_of,
    read_all,
    steps,
    text_of,
)
from tests.runtime.backends import GatedBackend, ids_in_flight, together

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cbatch.engine import Engine
    from cbatch.response import BatchResult

pytestmark = each_kind

MEMORIES = {
    "partitioned": can_all(4 * 256),
    "pool": KvCapabilities("unified", 600, can_save=True, can_copy=True, saved_bytes_per_cell=1024),
    "recurrent": KvCapabilities("recurrent", 4, can_trim=False, can_save=True, saved_bytes=4096),
    "bare": KvCapabilities("partitioned", 4 * 256),
}


def extended(place: Place, engine: Engine, result: BatchResult, n_tokens: int) -> BatchResult:
    [more] = place.results(engine.extend(result, n_tokens))
    return more


def text_and_tokens(result: BatchResult) -> tuple[str, tuple[int, ...], str]:
    return result.text, result.token_ids, result.finish_reason


def seed_where(is_so: Callable[[tuple[int, ...]], bool], tokens: list[int], n: int) -> int:
    """The first seed whose answer is as the test needs it."""
    return next(s for s in count() if is_so(expected(tokens, n, seed=s)))


# ---- two parts are one run ----


@pytest.mark.parametrize(
    ("kind", "n_first", "n_more"),
    [("partitioned", 1, 1), ("pool", 1, 40), ("recurrent", 30, 1), ("bare", 17, 23)],
)
def test_two_parts_are_the_tokens_of_one_run(
    any_way: Place, kind: str, n_first: int, n_more: int
) -> None:
    engine = any_way.engine(memory=MEMORIES[kind])
    first = any_way.result(engine, text_of(50), max_tokens=n_first)
    result = extended(any_way, engine, first, n_more)
    assert result.token_ids == expected(text_of(50), n_first + n_more)
    assert result.token_ids[:n_first] == first.token_ids
    assert (result.id, result.seed, result.finish_reason) == (first.id, first.seed, "length")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (50, n_first + n_more)
    assert result.usage.cached_tokens == 50
    assert engine.stats().n_prompt_tokens == 50


def test_seed_that_was_drawn_is_drawn_once(tmp_path: Path) -> None:
    with engine_on(
        FakeBackend(2, 64, 64, memory=can_all(128)),
        options={"ignore_eos": True},
        cache_dir=tmp_path,
    ) as engine:
        first = engine.submit(item(text_of(9), max_tokens=5)).result()
        result = engine.extend(first, 5).result()
    assert result.token_ids == expected(text_of(9), 10, seed=first.seed)


def test_ten_parts_are_one_run_and_compute_each_token_once(any_way: Place) -> None:
    engine = any_way.engine()
    result = any_way.result(engine, text_of(50), max_tokens=7)
    for i in range(9):
        result = extended(any_way, engine, result, 7)
        assert result.usage.completion_tokens == 7 * (i + 2)
    assert result.token_ids == expected(text_of(50), 70)
    stats = engine.stats()
    assert (stats.n_prompt_tokens, stats.n_recomputed_tokens) == (50, 0)
    assert stats.n_step_tokens == 50 + 69


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("chunk_alignment", [16])
def test_two_parts_under_exact_have_the_shapes_of_one_run(
    any_way: Place, chunk_alignment: int
) -> None:
    engine = any_way.engine(cuts=PromptCuts.every(chunk_alignment))
    first = any_way.result(engine, text_of(50), max_tokens=9)
    result = extended(any_way, engine, first, 9)
    assert result.token_ids == expected(text_of(50), 18)
    chunks = [c for plan in plans_of(engine) for c in plan.spans]
    assert all(len(c.inputs) == 1 for c in chunks if c.start >= 50)
    assert [c.start for c in chunks if c.start < 50] == list(range(0, 50, chunk_alignment))


@pytest.mark.parametrize(
    ("kind", "chunk_alignment"), [("partitioned", 0), ("partitioned", 16), ("recurrent", 0)]
)
def test_part_whose_slot_was_taken_is_computed_again_and_the_same(
    any_way: Place, kind: str, chunk_alignment: int
) -> None:
    engine = any_way.engine(
        n_slots=1, memory=MEMORIES[kind], cuts=PromptCuts.every(chunk_alignment)
    )
    first = any_way.result(engine, text_of(50), max_tokens=9)
    any_way.result(engine, text_of(80, start=3))
    result = extended(any_way, engine, first, 9)
    assert result.token_ids == expected(text_of(50), 18)
    assert result.usage.cached_tokens == 0
    assert engine.stats().n_prompt_tokens == 50 + 80 + 50


@no_pool(Reason.ONE_BACKEND)
def test_full_pool_that_preempts_changes_no_part(any_way: Place) -> None:
    memory = KvCapabilities("unified", 160, can_save=True, can_copy=True, saved_bytes_per_cell=1024)
    for swap_mib in (0, 64):
        schedule = {"admission": "optimistic", "swap_mib": swap_mib}
        engine = any_way.engine(4, 128, memory=memory, schedule=schedule)
        prompts = [text_of(20, start=i) for i in range(4)]
        firsts = any_way.results(engine.run([item(p, max_tokens=15) for p in prompts]))
        expects_little(any_way, engine)
        with together(4):
            responses = [engine.extend(first, 75) for first in firsts]
            results = [any_way.results(response)[0] for response in responses]
        assert [r.token_ids for r in results] == [expected(p, 90) for p in prompts]
        assert engine.stats().n_preempted > 0


def test_prompt_alone_goes_on_with_an_answer(any_way: Place) -> None:
    engine = any_way.engine()
    first = any_way.result(engine, text_of(50), prefill_only=True)
    result = extended(any_way, engine, first, 9)
    assert result.token_ids == expected(text_of(50), 9)
    assert engine.stats().n_prompt_tokens == 51  # its last token again, for the logits


def test_prompt_read_from_a_generator_goes_on(any_way: Place) -> None:
    engine = any_way.engine()
    firsts = any_way.results(engine.run(iter([item(text_of(9 + i)) for i in range(9)])))
    for i, first in enumerate(firsts):
        assert extended(any_way, engine, first, 6).token_ids == expected(text_of(9 + i), 12)


@pytest.mark.parametrize("prompt", ["tell me", [{"role": "user", "content": "tell me"}]])
def test_text_and_chat_go_on(any_way: Place, prompt: Any) -> None:
    engine = any_way.engine()
    [first] = any_way.results(engine.run([prompt]))
    [whole] = any_way.results(engine.run([prompt], options={"max_tokens": 12}))
    assert text_and_tokens(extended(any_way, engine, first, 6)) == text_and_tokens(whole)


# ---- text at the border ----


def test_character_split_at_the_border_is_whole_in_the_end(any_way: Place) -> None:
    tokens = text_of(20)
    seed = seed_where(lambda a: 0xC3 <= a[4] <= 0xCF and 0x80 <= a[5] <= 0xBF, tokens, 6)
    engine = any_way.engine()
    first = any_way.result(engine, tokens, seed=seed, max_tokens=5)
    result = extended(any_way, engine, first, 5)
    whole = any_way.result(engine, tokens, seed=seed, max_tokens=10)
    assert first.text.endswith("�")
    assert text_and_tokens(result) == text_and_tokens(whole)
    assert bytes(result.token_ids[4:6]).decode() in result.text


def stop_over(answer: tuple[int, ...], i: int) -> str:
    """A stop string that begins in token `i` and ends in the next one."""
    return b"".join(map(FakeBackend(1).vocab.piece, answer[i : i + 2])).decode()


def is_text(answer: tuple[int, ...], i: int) -> bool:
    """Whether the tokens `i` and `i + 1` are whole characters, and stand nowhere before."""
    pair = answer[i : i + 2]
    return all(31 < t < 127 or t > END_TOKEN for t in pair) and not set(pair) & set(answer[:i])


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_string_across_the_border_ends_the_answer_where_one_run_ends(
    any_way: Place, include_stop: bool
) -> None:
    tokens = text_of(20)
    seed = seed_where(lambda a: is_text(a, 4), tokens, 6)
    stop = stop_over(expected(tokens, 6, seed=seed), 4)
    options: dict[str, Any] = {"seed": seed, "stop": stop, "include_stop": include_stop}
    engine = any_way.engine()
    first = any_way.result(engine, tokens, **options, max_tokens=5)
    whole = any_way.result(engine, tokens, **options, max_tokens=20)
    assert (first.finish_reason, whole.finish_reason) == ("length", "stop")
    assert first.text.endswith(stop[0])  # it came out, for nothing followed
    assert text_and_tokens(extended(any_way, engine, first, 15)) == text_and_tokens(whole)


def test_stop_string_and_stop_token_in_the_second_part_end_it(any_way: Place) -> None:
    tokens = text_of(20)
    seed = seed_where(lambda a: is_text(a, 8), tokens, 10)
    answer = expected(tokens, 10, seed=seed)
    engine = any_way.engine()
    for options in ({"stop": [stop_over(answer, 8)]}, {"stop_token_ids": [answer[8]]}):
        said: dict[str, Any] = {"seed": seed, **options}
        first = any_way.result(engine, tokens, **said, max_tokens=4)
        whole = any_way.result(engine, tokens, **said, max_tokens=30)
        result = extended(any_way, engine, first, 26)
        assert text_and_tokens(result) == text_and_tokens(whole)
        assert result.finish_reason == "stop"


def test_end_of_generation_in_the_second_part_ends_it(any_way: Place) -> None:
    tokens = text_of(20)
    seed = seed_where(lambda a: END_TOKEN in a[6:] and END_TOKEN not in a[:6], tokens, 30)
    engine = any_way.engine()
    first = any_way.result(engine, tokens, seed=seed, ignore_eos=False, max_tokens=6)
    result = extended(any_way, engine, first, 50)
    n = expected(tokens, 30, seed=seed).index(END_TOKEN)
    assert result.finish_reason == "stop"
    assert result.token_ids[:n] == expected(tokens, n, seed=seed)


def test_chunks_of_a_part_are_the_whole_text_with_one_end(any_way: Place) -> None:
    engine = any_way.engine(kind=GatedBackend)
    first = any_way.result(engine, text_of(50), max_tokens=9)
    response = engine.extend(first, 20)
    chunks = read_all(any_way, response)
    [result] = any_way.results(response)
    assert "".join(c.text for c in chunks) == result.text
    assert tuple(t for c in chunks for t in c.token_ids) == result.token_ids
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["length"]
    assert chunks[-1].finish_reason == "length"


# ---- how the first part ended ----


def test_part_that_was_cancelled_goes_on(any_way: Place) -> None:
    engine = any_way.engine(n_window=ENDLESS, kind=GatedBackend)
    response = engine.submit(item(text_of(50), max_tokens=ENDLESS // 2))
    first_chunk(response)
    response.cancel()
    [first] = any_way.results(response)
    assert first.finish_reason == "cancelled"
    result = extended(any_way, engine, first, 9)
    assert result.token_ids == expected(text_of(50), len(first.token_ids) + 9)
    assert engine.stats().n_prompt_tokens == 50


@thread_only(Reason.BY_HAND)
def test_part_that_was_cancelled_in_its_prompt_goes_on(by_hand: Place) -> None:
    engine = by_hand.engine(n_window=512, kind=GatedBackend)
    response = engine.run([item(text_of(200), "a")])
    steps(engine, 2)
    engine.cancel("a")
    [first] = by_hand.results(response)
    assert (first.finish_reason, first.token_ids) == ("cancelled", ())
    assert extended(by_hand, engine, first, 9).token_ids == expected(text_of(200), 9)
    assert engine.stats().n_prompt_tokens == 200


@thread_only(Reason.BY_HAND)
def test_part_whose_time_was_over_goes_on_with_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GatedBackend(1, 256, 64, cost=A_SECOND_A_STEP, memory=can_all(256))
    monkeypatch.setattr("time.perf_counter", lambda: backend.now_s)
    engine = engine_on(backend, options=DEFAULTS, threaded=False, cache_dir=tmp_path)
    result = engine.submit(item(text_of(50), max_tokens=50, timeout_s=4.0)).result()
    for n in (4, 8, 12):
        assert (result.finish_reason, len(result.token_ids)) == ("timeout", n)
        assert result.token_ids == expected(text_of(50), n)
        result = engine.extend(result, 20).result()
    assert engine.stats().n_prompt_tokens == 50


def ended_by(place: Place, reason: str) -> tuple[Engine, BatchResult]:
    """An engine, and a result of it that ended so."""
    answer = expected(text_of(40))
    if reason == "stop":
        engine = place.engine()
        return engine, place.result(engine, text_of(40), stop_token_ids=[answer[2]])
    if reason == "window":
        backend = FakeBackend(1, 64, 64, memory=can_all(64))
        engine = engine_on(backend, options={"ignore_eos": True}, threaded=place.way != "by hand")
        place.made.append(engine)
        return engine, place.result(engine, text_of(40))
    if reason == "error":
        engine = place.engine(faults=Faults(broken=lambda chunk: chunk.start > 41))
        return engine, place.result(engine, text_of(40))
    engine = place.engine(n_slots=1, n_window=ENDLESS, kind=GatedBackend)
    engine.run([item(text_of(9), "long", max_tokens=ENDLESS - 9)])
    response = engine.run(
        [item(text_of(40), "queued", timeout_s=0.0 if reason == "timeout" else None)]
    )
    if reason == "cancelled":
        engine.cancel("queued")
    [result] = place.results(response)
    engine.cancel("long")
    return engine, result


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("reason", ["stop", "window", "error", "cancelled", "timeout"])
def test_result_with_nothing_to_go_on_from_is_refused(any_way: Place, reason: str) -> None:
    engine, result = ended_by(any_way, reason)
    assert result.finish_reason == reason
    with pytest.raises(ConfigError, match=f"ended by '{reason}'"):
        engine.extend(result, 5)
    assert not ids_in_flight(engine)


# ---- what cannot be extended ----


def test_result_of_another_engine_is_refused(any_way: Place) -> None:
    result = any_way.result(any_way.engine(), text_of(40))
    for kept in (result, pickle.loads(pickle.dumps(result))):
        with pytest.raises(ConfigError, match="not from this engine"):
            any_way.engine().extend(kept, 5)


ALTERED: dict[str, dict[str, Any]] = {
    "token_ids": {"token_ids": (1, 2, 3)},
    "ids that there are not": {"token_ids": (2**40, -5)},
    "nothing": {"token_ids": None},
    "finish_reason": {"finish_reason": "timeout"},
    "usage": {"usage": Usage(0, 0)},
    "no usage": {"usage": None},
    "logprobs that are none": {"logprobs": (5,) * 6},
    "no logprobs": {"logprobs": None},
    "prompt_logprobs": {"prompt_logprobs": (None, 5)},
    "choices": {"choices": 5, "token_ids": 5},
    "tops": {"logprobs": (TokenLogprob(1, b"", 0.0, 5),) * 6},  # type: ignore[arg-type]
}


@no_pool(Reason.ONE_BACKEND)
@pytest.mark.parametrize("name", ALTERED)
def test_altered_result_is_refused_and_costs_nobody_else_anything(place: Place, name: str) -> None:
    engine = place.engine()
    result = place.result(engine, text_of(40), logprobs=0)
    altered = replace(result, **ALTERED[name])
    with pytest.raises(ConfigError, match="was changed: extend a result as the engine returned it"):
        engine.extend(altered, 5)
    assert not ids_in_flight(engine)
    assert extended(place, engine, result, 5).token_ids == expected(text_of(40), 11)


def test_fields_that_nothing_goes_on_from_may_be_altered(any_way: Place) -> None:
    engine = any_way.engine()
    result = any_way.result(engine, text_of(40))
    shown = replace(result, id="shown", text=result.text.upper(), seed=9, warnings=("odd",))
    assert extended(any_way, engine, shown, 5).token_ids == expected(text_of(40), 11)


def test_result_of_a_prompt_that_was_never_queued_is_refused(any_way: Place) -> None:
    engine = any_way.engine()
    wrong: list[Any] = [[1, 2]]
    [result] = any_way.results(engine.run(iter(wrong)))
    assert isinstance(result.error, ConfigError)
    with pytest.raises(ConfigError):
        engine.extend(result, 5)


def test_what_is_no_result_or_no_number_of_tokens_is_refused(place: Place) -> None:
    engine = place.engine()
    result = place.result(engine, text_of(40))
    numbers: list[Any] = [0, -1, 1.0, "5", True, None, 2**31 - 1, 2**31, 2**70]
    others: list[Any] = [None, "0", 3, [], ("0",)]
    for given in [*((result, n) for n in numbers), *((other, 5) for other in others)]:
        with pytest.raises(ConfigError, match="extend takes"):
            engine.extend(*given)
    assert extended(place, engine, result, 5).token_ids == expected(text_of(40), 11)


def test_window_counts_prompt_and_both_parts(any_way: Place) -> None:
    engine = any_way.engine(n_window=64)
    first = any_way.result(engine, text_of(40), max_tokens=10)
    capped = extended(any_way, engine, first, 15)
    assert (capped.finish_reason, capped.token_ids) == ("window", expected(text_of(40), 24))
    assert capped.warnings == (
        "max_tokens is 24, not 25: the prompt has 40 tokens and the window 64",
    )
    result = extended(any_way, engine, first, 14)
    assert (result.finish_reason, result.token_ids) == ("length", expected(text_of(40), 24))
    late = extended(any_way, engine, result, 1)
    assert isinstance(late.error, PromptTooLongError)
    assert (late.error.n_prompt, late.error.n_output, late.error.n_limit) == (40, 25, 64)


def test_strict_cap_holds_for_both_parts(any_way: Place) -> None:
    engine = any_way.engine(n_window=64)
    first = any_way.result(engine, text_of(40), max_tokens=10, strict_max_tokens=True)
    late = extended(any_way, engine, first, 15)
    assert isinstance(late.error, PromptTooLongError)
    assert (late.error.n_prompt, late.error.n_output, late.error.n_limit) == (40, 25, 64)


def test_id_in_flight_is_refused_until_it_has_ended(any_way: Place) -> None:
    engine = any_way.engine(n_window=ENDLESS, kind=GatedBackend)
    [first] = any_way.results(engine.run([item(text_of(40), "a")]))
    running = engine.extend(first, ENDLESS // 2)
    with pytest.raises(DuplicateIdError, match="'a'"):
        engine.extend(first, 5)
    with pytest.raises(DuplicateIdError, match="'a'"):
        engine.run([item(text_of(9), "a")])
    running.cancel()
    any_way.results(running)
    other = engine.run([item(text_of(9), "a", max_tokens=ENDLESS // 2)])
    with pytest.raises(DuplicateIdError):
        engine.extend(first, 5)
    other.cancel()
    any_way.results(other)
    assert extended(any_way, engine, first, 5).token_ids == expected(text_of(40), 11)


@thread_only(Reason.BY_HAND)
def test_full_queue_refuses_and_frees_the_id(by_hand: Place) -> None:
    engine = by_hand.engine(
        n_slots=1,
        n_window=ENDLESS,
        kind=GatedBackend,
        schedule={"max_queue": 0, "when_full": "reject"},
    )
    first = by_hand.result(engine, text_of(40))
    engine.run([item(text_of(9), "long", max_tokens=ENDLESS // 2)])
    with pytest.raises(QueueFullError):
        engine.extend(first, 5)
    engine.cancel("long")
    assert extended(by_hand, engine, first, 5).token_ids == expected(text_of(40), 11)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_tasks_of_one_event_loop_save_extend_and_read(tmp_path: Path, loop: str) -> None:
    texts: dict[int, str] = {}

    async def ask(engine: Engine, i: int) -> None:
        prompt = item(text_of(30, i), cache_key=f"k{i}", save_cache=True)
        [first] = await engine.submit(prompt)
        [second] = await engine.extend(first, 6)
        assert second.token_ids == expected(text_of(30, i), 12)
        texts[i] = "".join([chunk.text async for chunk in engine.extend(second, 6)])

    async def run() -> None:
        backend = FakeBackend(4, 256, 64, memory=can_all(1024))
        async with engine_on(backend, options=DEFAULTS, cache_dir=tmp_path) as engine:
            async with anyio.create_task_group() as tasks:
                for i in range(12):
                    tasks.start_soon(ask, engine, i)
            whole = await engine.run([item(text_of(30, i), max_tokens=18) for i in range(12)])
            assert [texts[i] for i in range(12)] == [r.text for r in whole]

    anyio.run(run, backend=loop)
    assert len(CacheStore(tmp_path, 2**40).files()) == 12


# ---- results that were kept somewhere ----


def test_result_that_was_pickled_or_copied_goes_on(any_way: Place) -> None:
    engine = any_way.engine()
    result = any_way.result(engine, text_of(50), max_tokens=4)
    ways: list[Callable[[BatchResult], BatchResult]] = [
        lambda r: pickle.loads(pickle.dumps(r)),
        copy.deepcopy,
        copy.copy,
        replace,
    ]
    for n, kept in enumerate(ways, 1):
        result = extended(any_way, engine, kept(result), 4)
        assert result.token_ids == expected(text_of(50), 4 * n + 4)
    assert engine.stats().n_prompt_tokens == 50


def test_pickle_of_a_result_holds_no_engine_and_little_but_its_tokens(
    any_way: Place,
) -> None:
    engine = any_way.engine(n_window=4096)
    result = any_way.result(engine, text_of(2000))
    assert len(pickle.dumps(result)) < 20_000


# ---- with a key ----


def test_extension_saves_under_its_key_again(any_way: Place) -> None:
    engine = any_way.engine()
    first = any_way.result(engine, text_of(50), cache_key="k", save_cache=True)
    result = extended(any_way, engine, first, 6)
    assert result.warnings == ()
    [file] = CacheStore(any_way.folder, 2**40).files()
    assert file.n_tokens == 50 + 11
    follower = [*text_of(50), *result.token_ids, 1]
    found = any_way.result(any_way.engine(), follower, cache_key="k", cache_required=True)
    assert (found.token_ids, found.usage.cached_tokens) == (expected(follower), 61)


@no_pool(Reason.ONE_BACKEND)
def test_extension_whose_key_is_in_flight_is_refused(any_way: Place) -> None:
    engine = any_way.engine(n_window=ENDLESS, kind=GatedBackend)
    first = any_way.result(engine, text_of(50), cache_key="k", save_cache=True)
    other = engine.run(
        [item(text_of(9), "b", cache_key="k", save_cache=True, max_tokens=ENDLESS // 2)]
    )
    with pytest.raises(CacheError, match="two requests in flight"):
        engine.extend(first, 6)
    assert ids_in_flight(engine) == ["b"]
    engine.cancel("b")
    any_way.results(other)
    assert extended(any_way, engine, first, 6).token_ids == expected(text_of(50), 12)
