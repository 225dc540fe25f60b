"""Completions: text, token ids, several prompts, echo and log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cbatch import BatchPrompt, Engine, load
from cbatch.backend.fake import FakeBackend
from cbatch.server import create_app
from tests.server.clients import CHAT, COMPLETIONS, call, error_of, events_of, fake_app

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from starlette.applications import Starlette

    from cbatch.response import TokenLogprob

ASKED = {"prompt": "ab", "max_tokens": 4, "seed": 1}


def test_answer_has_the_format_and_sixteen_tokens(app: Starlette) -> None:
    body = call(app, COMPLETIONS, {"prompt": "ab", "seed": 1, "ignore_eos": True}).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}
    assert body["usage"]["completion_tokens"] == 16


def test_prompts_do_without_the_template_variables_of_the_server() -> None:
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    with fake_app(engine=Engine(FakeBackend(4, 256), options=options)) as app:
        assert call(app, COMPLETIONS, ASKED).status_code == 200
        assert call(app, COMPLETIONS, {**ASKED, **options}).status_code == 400


def test_choices_count_through_the_prompts() -> None:
    prompts = ["ab", [97, 98], [97, 99]]
    with Engine(FakeBackend(4, 256)) as engine:
        items = [
            BatchPrompt(prompt="ab"),
            BatchPrompt(tokens=[97, 98]),
            BatchPrompt(tokens=[97, 99]),
        ]
        results = engine.run(items, options={"max_tokens": 4, "seed": 1, "n": 2}).results()
        expected = [choice.text for result in results for choice in result.choices]
        with fake_app(engine=engine) as app:
            body = call(app, COMPLETIONS, {**ASKED, "prompt": prompts, "n": 2}).json()
    assert [c["index"] for c in body["choices"]] == [*range(6)]
    assert [c["text"] for c in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2},
        {"n": 2, "echo": True, "logprobs": 1},
        {"prompt": ["ab", [99]], "echo": True, "logprobs": 2},
        {"prompt": "a", "echo": True, "logprobs": 0},
    ],
)
def test_streamed_answer_equals_the_whole_one(app: Starlette, more: dict[str, Any]) -> None:
    asked = {**ASKED, **more}
    whole = call(app, COMPLETIONS, asked).json()
    events = events_of(call(app, COMPLETIONS, {**asked, "stream": True}))
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(p["text"] for p in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        scored = [p["logprobs"] for p in parts if p["logprobs"]]
        for name, values in (choice["logprobs"] or {}).items():
            told = [found[name] for found in scored]
            assert values == (None if told[0] is None else [v for found in told for v in found])
        assert all(p["logprobs"] for p in parts if p["text"]) == bool(choice["logprobs"])
    assert {e["object"] for e in events} == {"text_completion"}


def ended_at_once(prompts: Sequence[Any]) -> Any:
    """The first prompt whose answer is no token but the end."""
    with Engine(FakeBackend(4, 256)) as engine:
        results = engine.run(prompts, options={"max_tokens": 1, "seed": 1}).results()
    return next(p for p, r in zip(prompts, results, strict=True) if not r.token_ids)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_of_an_answer_without_a_token_says_that_there_is_none(
    app: Starlette, path: str
) -> None:
    asked: dict[str, Any] = {"seed": 1, "max_tokens": 1, "return_tokens": True}
    if path == CHAT:
        chats = [[{"role": "user", "content": f"{i:03}"}] for i in range(1000)]
        asked |= {"messages": ended_at_once(chats), "logprobs": True}
    else:
        asked |= {"prompt": ended_at_once([f"{i:03}" for i in range(1000)]), "logprobs": 1}
    whole = call(app, path, asked).json()["choices"][0]
    last = events_of(call(app, path, {**asked, "stream": True}))[-1]["choices"][0]
    assert whole["token_ids"] == []
    assert whole["logprobs"] is not None
    for field in ("token_ids", "logprobs", "finish_reason"):
        assert last[field] == whole[field]
    if path == COMPLETIONS:  # an echo counts the token that ends the answer
        choice = call(app, path, {**asked, "echo": True}).json()["choices"][0]
        assert choice["text"] == asked["prompt"]
        assert len(choice["logprobs"]["tokens"]) == len(asked["prompt"]) + 1


def test_echo_has_a_number_for_each_token_but_the_first(app: Starlette) -> None:
    asked = {**ASKED, "echo": True, "logprobs": 1, "max_tokens": 1}
    found = call(app, COMPLETIONS, asked).json()["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert len({len(values) for values in found.values()}) == 1
    assert found["text_offset"] == [0, 1, 2]
    # the chosen token's number is the very float of its alternative
    assert found["token_logprobs"][-1] == found["top_logprobs"][-1][found["tokens"][-1]]


WRONG: list[dict[str, Any]] = [
    *({"prompt": said} for said in ([], [1, "a"], [True], ["a", {}], [[1, -1]], [9999])),
    *({"logprobs": 99}, {"best_of": 3, "stream": True}, {"suffix": "x"}, {"max_tokens": 0}),
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
]


def test_wrong_field_is_named(app: Starlette) -> None:
    for more in WRONG:
        found = error_of(call(app, COMPLETIONS, {**ASKED, **more}), 400)["param"]
        assert found.partition("[")[0] == next(iter(more)), more


def test_one_bad_prompt_fails_all_before_any_runs() -> None:
    with Engine(FakeBackend(4, 64)) as engine, fake_app(engine=engine) as app:
        error = error_of(call(app, COMPLETIONS, {**ASKED, "prompt": ["a", "b" * 99]}), 400)
        assert engine.stats().n_steps == 0
    assert error["code"] == "context_length_exceeded"


@pytest.mark.real
def test_likelihoods_as_an_evaluation_reads_them_are_those_of_the_engine(test_model: Path) -> None:
    """What lm-evaluation-harness's `local-completions` asks and reads. Source: its models/openai_completions.py."""
    context, endings = "What is 2+3?", ["5", " 5", " The sum is five.", "\n"]
    with load(test_model, parallel=4, n_threads=1, exact=True) as engine:
        n_context = len(engine.tokenize(context))
        prompts = [engine.tokenize(context + ending) for ending in endings]
        options = {"prompt_logprobs": 1, "max_tokens": 0}
        items = [BatchPrompt(tokens=prompt) for prompt in prompts]
        expected = [
            _likelihood((result.prompt_logprobs or ())[n_context:])
            for result in engine.run(items, options=options).results()
        ]
        asked = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
        app = create_app(engine)
        choices = call(app, COMPLETIONS, {**asked, "temperature": 0}).json()["choices"]
    found = []
    for choice in sorted(choices, key=lambda choice: choice["index"]):
        numbers = choice["logprobs"]["token_logprobs"][n_context:-1]
        tops = choice["logprobs"]["top_logprobs"][n_context:-1]
        is_greedy = all(n == max(top.values()) for n, top in zip(numbers, tops, strict=True))
        found.append((sum(numbers), is_greedy))
    assert found == expected
    assert {is_greedy for _, is_greedy in found} == {True, False}


def _likelihood(tokens: Sequence[TokenLogprob | None]) -> tuple[float, bool]:
    known = [token for token in tokens if token]
    assert len(known) == len(tokens)
    is_greedy = all(token.token_id == token.top[0].token_id for token in known)
    return sum(token.logprob for token in known), is_greedy


EXTRAS: list[dict[str, Any]] = [
    {"prompt_logprobs": 1, "max_tokens": 1},
    {"choice": ["red", "green"], "choice_probs": True},
    {"xtc_threshold": 0.3, "max_tokens": 1},
    {"max_tokens": 999, "ignore_eos": True},
]


@pytest.mark.parametrize("more", EXTRAS)
def test_each_of_several_prompts_has_what_it_has_alone(
    more: dict[str, Any], app: Starlette
) -> None:
    prompts = ["one two", "three"]
    alone = [call(app, COMPLETIONS, {**more, "prompt": p}).json()["cbatch"] for p in prompts]
    assert all(alone)
    together = {**more, "prompt": prompts}
    assert call(app, COMPLETIONS, together).json()["cbatch"] == alone
    events = events_of(call(app, COMPLETIONS, {**together, "stream": True}))
    told = {e["choices"][0]["index"]: e["cbatch"] for e in events if "cbatch" in e}
    assert told == dict(enumerate(alone))


def test_several_prompts_without_such_fields_have_no_list(app: Starlette) -> None:
    assert "cbatch" not in call(app, COMPLETIONS, {**ASKED, "prompt": ["ab", "cd"]}).json()
