"""`run(..., dedupe=True)`: equal requests of a batch are computed once, and each has its result."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch import BatchPrompt, Engine
from cbatch.backend.fake import FakeBackend
from cbatch.errors import ConfigError, DeadlineError, PromptTooLongError, RequestCancelledError
from cbatch.files import run_file
from cbatch.runtime import copies
from cbatch.runtime.mailbox import N_AHEAD_PER_SLOT, N_COPIES_AHEAD
from tests.kinds import each_kind, engine_on
from tests.places import wait_until
from tests.profiles import examples
from tests.runtime.backends import GatedBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.response import BatchResult

GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "seed": 1}
"""With a seed, for the fake backend draws also greedy tokens by it."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_on(FakeBackend(4, 64, 16)) as made:
        yield made


def mixed(n: int = 40) -> list[BatchPrompt]:
    """Prompts of which each is there four times, in text, chats and tokens, and with options of their own."""
    kinds: list[dict[str, Any]] = [
        {"prompt": "a text"},
        {"prompt": "a text", "options": {"max_tokens": 3}},
        {"messages": [{"role": "user", "content": "a text"}]},
        {"tokens": [1, 2, 3]},
        {"prompt": "other"},
    ]
    return [BatchPrompt(**kinds[i % 5 + (i >= 20 and i % 5 == 9)], id=f"q{i}") for i in range(n)]


@each_kind
def test_equal_requests_are_computed_once_and_answered_each(engine: Engine) -> None:
    items = mixed()
    alone = engine.run(items, options=GREEDY).results()
    before = engine.stats().n_output_tokens
    results = engine.run(items, options=GREEDY, dedupe=True).results()
    n_sampled = engine.stats().n_output_tokens - before
    assert [r.id for r in results] == [item.id for item in items]
    assert [(r.text, r.token_ids, r.finish_reason) for r in results] == [
        (r.text, r.token_ids, r.finish_reason) for r in alone
    ]
    assert n_sampled == 4 * 6 + 3


@each_kind
def test_chunks_of_every_copy_make_its_text(engine: Engine) -> None:
    texts: dict[str, str] = {}
    for chunk in engine.run(mixed(), options=GREEDY, dedupe=True):
        texts[chunk.id] = texts.get(chunk.id, "") + chunk.text
    wanted = engine.run(mixed(), options=GREEDY).results()
    assert texts == {result.id: result.text for result in wanted}


@pytest.mark.parametrize(
    ("options", "n_computed"),
    [
        ({"temperature": 1, "seed": 3}, 1),
        ({"temperature": 1, "seed": None}, 8),
        ({"temperature": 0, "n": 2}, 8),
        ({"choice": ["x", "y"], "choice_probs": True, "temperature": None}, 1),
    ],
)
def test_only_certain_answers_are_shared(
    engine: Engine, options: dict[str, Any], n_computed: int
) -> None:
    engine.reset_stats()
    response = engine.run(
        ["a"] * 8,
        options={k: v for k, v in {**GREEDY, **options}.items() if v is not None},
        dedupe=True,
    )
    assert len(response.results()) == 8
    n_each = 2 if options.keys() & {"n", "choice"} else 1
    assert engine.stats().n_submitted == n_computed * n_each


def test_copies_of_a_failed_request_fail_and_later_ones_are_computed(engine: Engine) -> None:
    items = ["a" * 90, "b", "a" * 90]
    first, good, last = engine.run(items, options=GREEDY, dedupe=True).results(return_errors=True)
    assert isinstance(first.error, PromptTooLongError)
    assert isinstance(last.error, PromptTooLongError)
    assert good.error is None


@each_kind
@pytest.mark.parametrize("by", ["response", "engine"])
def test_cancelled_batch_of_a_list_ends_every_item(engine: Engine, by: str) -> None:
    items = [f"{i % 40}" for i in range(400)]
    response = engine.run(items, options={**GREEDY, "max_tokens": 40}, dedupe=True)
    if by == "engine":
        engine.cancel_all()
    else:
        response.cancel()
    results = response.results(return_errors=True)
    assert [result.id for result in results] == [*response.ids]
    assert len(results) == 400
    assert {type(result.error) for result in results} <= {type(None), RequestCancelledError}


@pytest.mark.parametrize("is_source", [False, True])
def test_item_with_wrong_options_fails_alone(engine: Engine, *, is_source: bool) -> None:
    items = [BatchPrompt(prompt="a", options=o) for o in (None, {"n": 3}, {"n": 3}, None)]
    options = {**GREEDY, "best_of": 2}  # less than n
    response = engine.run(iter(items) if is_source else items, options=options, dedupe=True)
    errors = [type(r.error) for r in response.results(return_errors=True)]
    assert errors == [type(None), ConfigError, ConfigError, type(None)]


def test_waiting_copies_do_not_hold_up_what_is_behind_them() -> None:
    """Three hundred copies of one request, more than are in hand otherwise, are read while it runs."""
    items = [*["long"] * 300, *"abcd"]
    with engine_on(FakeBackend(5, 64, 16), threaded=False) as engine:
        response = engine.run(iter(items), options={**GREEDY, "max_tokens": 50}, dedupe=True)
        assert len(response.results()) == 304
        assert engine.stats().n_active_max == 5


@pytest.mark.parametrize("is_threaded", [False, True])
def test_copies_are_read_ahead_up_to_a_number(is_threaded: bool) -> None:
    n_read = []

    def source() -> Iterator[str]:
        for i in range(5 * N_COPIES_AHEAD):
            n_read.append(i)
            yield "equal"

    backend = GatedBackend(2, 64, hold_at=0 if is_threaded else None)
    with Engine(backend, options=GREEDY, threaded=is_threaded) as engine:
        response = engine.run(source(), dedupe=True)
        results = response.as_completed()
        if is_threaded:
            backend.wait_until_held()
            wait_until(lambda: len(n_read) >= N_COPIES_AHEAD)
        backend.release()
        next(results)
        assert len(n_read) <= N_COPIES_AHEAD + 2 * N_AHEAD_PER_SLOT
        assert len([*results]) == len(n_read) - 1 == 5 * N_COPIES_AHEAD - 1


def test_answers_that_are_kept_have_a_limit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "N_BYTES_KEPT", 5_000)
    items = [f"{i % 20}" for i in range(200)]
    results = engine.run(iter(items), options=GREEDY, dedupe=True).results()
    assert [r.text for r in results[:20]] * 10 == [r.text for r in results]


CHAT: list[Any] = [{"role": "user", "content": "a text"}]
PAD = "x" * 100

plain_values = st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, "1"])
mappings = st.lists(st.tuples(st.sampled_from("ab"), plain_values), max_size=2).map(dict)
close_values = st.one_of(plain_values, mappings, st.lists(plain_values, max_size=2))


def a_tool(value: Any) -> dict[str, Any]:
    schema = {"type": "object", "description": PAD, "properties": {"a": {"const": value}}}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


KINDS: dict[str, Any] = {
    "chat_template_kwargs": close_values.map(lambda value: {"pad": PAD, "value": value}),
    "tools": close_values.map(lambda value: [a_tool(value)]),
    "regex": st.sampled_from("01").map(lambda parity: "0" * 100 + parity),
    "stop": st.sampled_from("aeiou").map(lambda text: [PAD, text]),
}
several_close = st.sampled_from([*KINDS]).flatmap(
    lambda name: st.lists(KINDS[name].map(lambda value: {name: value}), min_size=2, max_size=5)
)


def what(results: list[BatchResult]) -> list[tuple[object, ...]]:
    return [(r.text, r.token_ids, r.finish_reason, r.usage.prompt_tokens) for r in results]


@each_kind
def test_requests_with_options_that_are_close_are_answered_as_alone() -> None:
    def alone(options: dict[str, Any]) -> BatchResult:
        with engine_on(FakeBackend(1, 512, 64), threaded=False, options=GREEDY) as other:
            return other.submit(CHAT, options=options).result()

    with engine_on(FakeBackend(4, 512, 64), options=GREEDY) as engine:

        @settings(max_examples=examples(100))
        @given(several_close)
        def check(several: list[dict[str, Any]]) -> None:
            wanted = what([alone(options) for options in several])
            items = [BatchPrompt(messages=CHAT, options=options) for options in several]
            assert what(engine.run(items).results()) == wanted
            assert what(engine.run(items, dedupe=True).results()) == wanted
            assert what([engine.submit(CHAT, options=o).result() for o in several]) == wanted

        check()


def test_messages_of_any_keys_and_values_are_answered_and_told_apart(engine: Engine) -> None:
    odd: list[Any] = [1, True, 1.0, 10**5000, {2: 1, "b": 2}, {"b": 2, 2: 1}, b"x", object()]
    items = [BatchPrompt(messages=[CHAT[0] | {5: value}]) for value in odd]
    engine.reset_stats()
    results = engine.run(items, options=GREEDY, dedupe=True).results()
    assert len({r.text for r in results}) == 1
    assert engine.stats().n_submitted == len(odd)


def test_awaited_and_wrong(engine: Engine) -> None:
    async def run() -> list[str]:
        return [r.text for r in await engine.run(["a"] * 3, options=GREEDY, dedupe=True)]

    assert len(set(asyncio.run(run()))) == 1
    with pytest.raises(ConfigError, match="dedupe"):
        engine.run(["a"], dedupe="yes")  # type: ignore[arg-type]


def test_equal_lines_of_a_file_have_a_record_each(engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"id": str(i), "prompt": f"{i % 5}"} for i in range(50)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outputs = []
    for name, dedupe in (("one", True), ("each", False)):
        engine.reset_stats()
        run_file(source, tmp_path / name, engine=engine, options=GREEDY, dedupe=dedupe)
        records = map(json.loads, (tmp_path / name).read_text().splitlines())
        outputs.append({record["id"]: record["text"] for record in records})
        assert engine.stats().n_submitted == (5 if dedupe else 50)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 50


@pytest.mark.parametrize("max_time_s", [1e-6, 0.01])
def test_each_prompt_of_a_list_has_a_result_after_the_time_is_over(
    engine: Engine, max_time_s: float
) -> None:
    items = [f"{i % 40}" for i in range(300)]
    response = engine.run(items, options=GREEDY, dedupe=True, max_time_s=max_time_s)
    results = response.results(return_errors=True)
    assert [result.id for result in results] == [*response.ids]
    assert len(results) == 300
    assert {type(result.error) for result in results} <= {type(None), DeadlineError}
