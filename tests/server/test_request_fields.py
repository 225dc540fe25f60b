"""Fields by names and values of other servers: done in every dialect, or refused."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine, load
from cbatch.backend.fake import FakeBackend
from cbatch.options import RunOptions
from cbatch.server import create_app
from cbatch.server.anthropic_messages import MessagesCall
from cbatch.server.http_errors import HttpProblemError
from cbatch.server.openai_chat import ChatCall
from cbatch.server.openai_completions import CompletionCall
from cbatch.server.request_fields import SAMPLERS
from cbatch.server.responses_api import ResponsesCall
from tests.server.clients import CHAT, COMPLETIONS, MESSAGES, USER, call, error_of, fake_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from starlette.applications import Starlette

    from cbatch.server.call import Call

RESPONSES = "/v1/responses"
BEGUN = [*USER, {"role": "assistant", "content": "So"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 4, "seed": 1},
    COMPLETIONS: {"prompt": "ab", "max_tokens": 4, "seed": 1},
    MESSAGES: {"messages": USER, "max_tokens": 4, "seed": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": 4, "seed": 1},
}
CHATS = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}
READERS: dict[str, Callable[..., Call]] = {
    CHAT: ChatCall.of,
    COMPLETIONS: CompletionCall.of,
    MESSAGES: MessagesCall.of,
    RESPONSES: ResponsesCall.of,
}
of_all = pytest.mark.parametrize("path", BODIES)
of_chats = pytest.mark.parametrize("path", CHATS)


@pytest.fixture(scope="module")
def shipped(test_model: Path) -> Iterator[Starlette]:
    with load(test_model, parallel=2, n_threads=1) as engine:
        yield (made := create_app(engine))
        made.state.desk.close()


def read(path: str, **more: Any) -> Call:
    """What a body of a dialect asks for."""
    return READERS[path]({**BODIES[path], **more})


def refusal(path: str, **more: Any) -> HttpProblemError:
    """Why a body of a dialect is refused."""
    with pytest.raises(HttpProblemError) as caught:
        read(path, **more)
    assert caught.value.status == 400
    return caught.value


# ---- the last message ----


CONTINUED: list[dict[str, Any]] = [
    *({}, {"continue_final_message": True}),
    *({"add_generation_prompt": said} for said in (False, True)),
    *({"continue_final_message": True, "add_generation_prompt": said} for said in (False, None)),
]


@of_chats
def test_last_message_of_the_assistant_is_continued(path: str) -> None:
    for said in CONTINUED:
        found = read(path, **{CHATS[path]: BEGUN}, **said)
        assert found.prompts[0].messages is not None
        assert found.prompts[0].messages[-1] == BEGUN[-1]
        assert found.asked.ignored == []


@of_chats
def test_wish_about_the_last_message_that_is_not_done_is_refused(path: str) -> None:
    said = {"continue_final_message": True, "add_generation_prompt": True}
    problem = refusal(path, **{CHATS[path]: BEGUN}, **said)
    assert problem.param == "continue_final_message"
    assert "cannot both be true" in problem.message
    for messages, field, value in (
        (USER, "continue_final_message", True),
        (BEGUN, "continue_final_message", False),
        (USER, "add_generation_prompt", False),
        (USER, "add_generation_prompt", "no"),
    ):
        assert refusal(path, **{CHATS[path]: messages, field: value}).param == field


def test_text_has_no_last_message() -> None:
    said = {"continue_final_message": True, "add_generation_prompt": False}
    assert read(COMPLETIONS, **said).asked.ignored == [*said]


# ---- parts ----


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, "text"), (MESSAGES, "text"), (RESPONSES, "input_text")]
)
def test_parts_of_a_text_are_lines(path: str, kind: str) -> None:
    parts = [{"type": kind, "text": word} for word in ("a", "b", "")]
    found = read(path, **{CHATS[path]: [{"role": "user", "content": parts[:2]}]})
    assert found.prompts[0].messages == ({"role": "user", "content": "a\nb"},)


# ---- samplers, and others that would change the answer ----


NONE = {option: value for options in SAMPLERS.values() for option, value in options.items()}


KEPT: list[tuple[Any, tuple[str, ...]]] = [
    *(([], ()), ("", ()), ("kpt", ("top_k", "top_p", "temperature"))),
    (["top_k", "temperature"], ("top_k", "temperature")),
    (["Top-K", "typ-p", "nucleus", "minp"], ("top_k", "typical_p", "top_p", "min_p")),
    ("edskypmxt", tuple(NONE)),
]


@of_all
def test_samplers_that_are_not_named_do_nothing(path: str) -> None:
    given = {"top_k": 9, "top_p": 0.5, "temperature": 0.25, "dry_multiplier": 2.0}
    for samplers, kept in KEPT:
        options = read(path, samplers=samplers, **given).asked.options
        assert {name: getattr(options, name) for name in NONE} == {
            name: given.get(name) if name in kept else value for name, value in NONE.items()
        }


@of_all
def test_samplers_in_another_order_or_unknown_are_refused(path: str) -> None:
    orders: list[Any] = [["temperature", "top_k"], "tk", ["top_k", "top_k"]]
    for samplers in [*orders, ["mirostat"], "a", "i", ["k"], [3], 3, {}]:
        assert refusal(path, samplers=samplers).param == "samplers"


NEUTRAL: dict[str, tuple[list[Any], Any]] = {
    "post_sampling_probs": ([False], True),
    "min_keep": ([0, 1], 2),
    "t_max_predict_ms": ([-1, 0], 100),
    "n_indent": ([0], 2),
    "grammar_lazy": ([False], True),
    "lora": ([[]], [{"id": 0, "scale": 1}]),
}


@of_all
def test_fields_of_llama_server_are_neutral_or_refused_with_what_to_do(path: str) -> None:
    for field, (neutral, other) in NEUTRAL.items():
        for value in neutral:
            assert read(path, **{field: value}).asked.ignored == [field]
        problem = refusal(path, **{field: other})
        assert (problem.param, problem.code) == (field, "unsupported_parameter")
        assert ";" in problem.message


def test_structures_of_vllm_bind_a_response() -> None:
    for said in ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}):
        assert read(RESPONSES, **said).asked.options.choice == ("a", "b")


# ---- neutral values ----


@of_all
def test_neutral_values_say_nothing(path: str) -> None:
    none, plain = RunOptions(logit_bias={}), read(path).asked
    empty: list[dict[str, Any]] = [{name: ""} for name in ("grammar", "regex", "model")]
    empty += [{"guided_grammar": "", "guided_regex": ""}, {"id_slot": -1}]
    for said in [*empty, {"logit_bias": []}, {"logit_bias": {}}]:
        asked = read(path, **said).asked
        assert (asked.common.model, asked.ignored) == (None, [])
        assert asked.options.over(none) == plain.options.over(none)


@of_all
@pytest.mark.parametrize("n_keep", [0, -1])
def test_kept_tokens_of_a_window_that_does_not_move_are_taken(
    app: Starlette, path: str, n_keep: int
) -> None:
    assert call(app, path, {**BODIES[path], "n_keep": n_keep}).status_code == 200


def test_empty_model_is_a_missing_one() -> None:
    with fake_app(model_required=True) as app:
        for more in ({"model": ""}, {}):
            error = error_of(call(app, CHAT, {**BODIES[CHAT], **more}), 400)
            assert error["param"] == "model"
    with fake_app(model_name="m") as app:
        assert call(app, CHAT, {**BODIES[CHAT], "model": ""}).json()["model"] == "m"


def test_empty_prompt_is_the_token_that_begins_a_text(shipped: Starlette) -> None:
    first = shipped.state.desk.engine.model_facts.bos_id
    asked = {"max_tokens": 4, "return_tokens": True, "ignore_eos": True, "temperature": 0}
    for prompt in ("", None, ["", "a"], [first]):
        found = call(shipped, COMPLETIONS, {**asked, "prompt": prompt}).json()["choices"][0]
        if prompt == "":
            expected = found["token_ids"]
            assert len(expected) == 4
        assert found["token_ids"] == expected


def test_empty_prompt_of_a_model_without_such_a_token_is_refused(app: Starlette) -> None:
    for prompt in ("", None):
        assert error_of(call(app, COMPLETIONS, {"prompt": prompt}), 400)["param"] == "prompt"
    assert error_of(call(app, COMPLETIONS, {}), 400)["param"] == "prompt"


# ---- slots ----


@of_all
def test_slot_is_chosen_by_its_id(path: str) -> None:
    assert read(path, id_slot=1).asked.options.slot == 1
    with fake_app(2, 64) as app:
        assert call(app, path, {**BODIES[path], "id_slot": 1}).status_code == 200
        problem = call(app, path, {**BODIES[path], "id_slot": 2})
        assert problem.status_code == 400
        assert "slot" in problem.json()["error"]["message"]


# ---- biases ----


@of_all
def test_bias_of_a_text_is_that_of_its_tokens(path: str) -> None:
    """The tokens of the fake backend are bytes."""
    with Engine(FakeBackend(2, 64)) as engine:
        for said in (
            [["ab", 2], ["a", 1], [98, False], [99, 3], [99, 1.5]],
            {"ab": 2, "a": 1, "98": False, "99": 4.5},
        ):
            found = read(path, logit_bias=said)
            assert [*found.see_vocabulary(engine, engine.model_facts)]
            biases = {97: 3.0, 98: -math.inf, 99: 4.5}
            assert found.asked.options.logit_bias == biases


BIASES: list[Any] = [
    *([["a", "b"]], [["", 1]], {"": 1}, [[True, 1]], [[None, 1]], {"a": True}, {"a": 1e9}),
    *([["a", 1]] * 4097, [[1, 1]] * 4097, {"a": None}, {"1": "x"}),
    *({"-3": 1}, [[-3, 1]], [["a", 1, 2]], "a", [["a", 6000], ["a", 6000]], [[2**40, 1]]),
]


@of_all
def test_wrong_bias_is_refused_by_name(path: str) -> None:
    with Engine(FakeBackend(2, 64)) as engine:
        for said in BIASES:
            with pytest.raises(HttpProblemError) as caught:
                _ = [*read(path, logit_bias=said).see_vocabulary(engine, engine.model_facts)]
            assert caught.value.param == "logit_bias"


@of_chats
def test_banned_text_is_not_in_the_answer(path: str, shipped: Starlette) -> None:
    asked = {**BODIES[path], "temperature": 0}
    assert "Hello" in call(shipped, path, asked).text
    assert "Hello" not in call(shipped, path, {**asked, "logit_bias": [["Hello", False]]}).text


# ---- tools ----


FUNCTIONS: dict[str, dict[str, Any]] = {
    name: {"name": name, "parameters": {"type": "object"}} for name in ("f", "g")
}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_of_the_choice(mode: str) -> None:
    nested = [{"type": "function", "function": function} for function in FUNCTIONS.values()]
    flat: list[dict[str, Any]] = [
        {"type": "function", **function} for function in FUNCTIONS.values()
    ]
    choice: dict[str, Any] = {"type": "allowed_tools"}
    choice["allowed_tools"] = {"mode": mode, "tools": nested[1:]}
    of_chat = read(CHAT, tools=nested, tool_choice=choice).asked
    listed = [{"type": "function", "name": "g"}, {"type": "mcp", "server_label": "s"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": listed}
    of_response = read(RESPONSES, tools=flat, tool_choice=choice).asked
    for asked in (of_chat, of_response):
        assert asked.options.offered_tools.names == ("g",)
        assert asked.options.demanded_tools.names == (("g",) if mode == "required" else ())
    assert of_response.ignored == ["tool_choice.tools[1]"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_choice_of_any_tool_demands_a_call(path: str) -> None:
    function: dict[str, Any] = {"type": "function", **FUNCTIONS["f"]}
    tool = function if path == RESPONSES else {"type": "function", "function": FUNCTIONS["f"]}
    asked = read(path, tools=[tool], tool_choice="any").asked
    assert asked.options.tool_choice == "required"


# ---- misspelt names ----


@pytest.mark.parametrize(
    ("path", "name", "known"),
    [
        (CHAT, "max_token", "max_tokens"),
        (COMPLETIONS, "promt_logprobs", "prompt_logprobs"),
        (MESSAGES, "stop_sequence", "stop_sequences"),
        (RESPONSES, "max_output_token", "max_output_tokens"),
    ],
)
def test_unknown_field_is_a_warning_of_the_log_once(
    app: Starlette, path: str, name: str, known: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        answer = call(app, path, {**BODIES[path], name: 3, "user": "u"})
        assert name in answer.headers["x-ignored-fields"]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith(f"ignored the unknown field '{name}'; did you mean {known}")


def test_clients_cannot_fill_the_log_with_names(caplog: pytest.LogCaptureFixture) -> None:
    with fake_app() as app:
        call(app, CHAT, {**BODIES[CHAT], **{f"x{i}": 1 for i in range(300)}})
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 100


def test_long_unknown_name_is_cut_in_answer_and_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with fake_app() as app:
        answer = call(app, CHAT, {**BODIES[CHAT], "x" * 50_000: 1})
        assert len(answer.headers["x-ignored-fields"]) == 1024
        logged = [r.getMessage() for r in caplog.records]
        assert any("ignored fields" in text for text in logged)
        assert any("unknown field" in text for text in logged)
        assert max(map(len, logged)) < 2000
