"""Anthropic's messages: answers, streams and their equality, fields, blocks, errors."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch import Engine, load
from cbatch.errors import PromptTooLongError
from cbatch.server import create_app
from cbatch.server.anthropic_fields import joined
from cbatch.server.anthropic_messages import MessagesCall
from cbatch.server.http_errors import problem_of
from tests.chat.test_tool_calls import (
    CALL,
    CALL_END,
    CONTROLS,
    LONG_THOUGHT,
    SAID,
    THINK,
    THINK_END,
    Speaker,
)
from tests.profiles import examples
from tests.server.clients import MESSAGES, USER, call, fake_app, message_of

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    import httpx
    from starlette.applications import Starlette

ASKED: dict[str, Any] = {"messages": USER, "max_tokens": 6, "seed": 3}
COUNT = f"{MESSAGES}/count_tokens"
TOOL = {
    "name": "get_time",
    "description": "Tell the time",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
USED = {"type": "tool_use", "id": "abc", "name": "get_time", "input": {"zone": None}}
TIME_TOLD = {"type": "tool_result", "tool_use_id": "abc", "content": "12"}


def speaking(said: list[int]) -> Any:
    return fake_app(engine=Engine(Speaker(said)))


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's format."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"]
    return str(body["error"]["message"])


def chat_of(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Messages as the chat template gets them."""
    (prompt,) = MessagesCall.of({"messages": [*messages], **more}, is_capped=False).prompts
    return [dict(message) for message in prompt.messages or ()]


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


# ---- answers ----


def test_answer_has_every_field_and_cached_tokens_are_no_input() -> None:
    with fake_app() as app:
        answer, again = (call(app, MESSAGES, {**ASKED, "model": "any/name"}) for _ in range(2))
    body = answer.json()
    assert body.pop("id").startswith("msg_")
    (block,) = body.pop("content")
    assert block.pop("text")
    assert block == {"type": "text", "citations": None}
    usage = {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 6,
        "output_tokens_details": {"thinking_tokens": 0},
        **dict.fromkeys(("cache_creation", "inference_geo", "server_tool_use", "service_tier")),
    }
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "any/name",
        "container": None,
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "stop_details": None,
        "usage": usage,
    }
    assert again.json()["usage"] == {**usage, "input_tokens": 1, "cache_read_input_tokens": 6}
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs when it is asked for again."""
    usage = message["usage"]
    n_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
    blocks = [{**block, "id": None} for block in message["content"]]
    told = {"id": None, "content": blocks, "usage": (n_input, usage["output_tokens"])}
    return {**message, **told}


def both(app: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer, which is the same streamed and not."""
    whole = call(app, MESSAGES, asked).json()
    streamed = message_of(call(app, MESSAGES, {**asked, "stream": True}))
    assert without_ids(streamed) == without_ids(whole)
    return streamed


PIECES = [
    [THINK], [THINK_END], [*b"<think>"], [*b"</think>"], [CALL], [CALL_END], [*b" \n"], [*"é€".encode()], [226],
    [*b"a"],
    [*b'{"name": "get_time", "arguments": {"zone": "CET"}}'], [*b'{"name"'], [*b"<tool_call>"], [*b"Well"],
]  # fmt: skip


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    said=st.lists(st.sampled_from(PIECES), max_size=12),
    more=st.fixed_dictionaries(
        {},
        optional={
            "tools": st.just([TOOL]),
            "stop_sequences": st.just(["ll", "zone"]),
            "max_tokens": st.integers(0, 40),
            "thinking": st.just({"type": "adaptive"}),
        },
    ),
)
def test_streamed_message_equals_the_whole_one(said: list[list[int]], more: dict[str, Any]) -> None:
    with speaking([token for piece in said for token in piece]) as app:
        both(app, {"messages": USER, "max_tokens": 100, **more})


def test_thinking_text_and_calls_are_blocks() -> None:
    with speaking(SAID) as app:
        message = both(app, {**ASKED, "max_tokens": 200, "tools": [TOOL]})
    thinking, said, used = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "I häve to")
    assert thinking["signature"]
    assert (said["type"], said["text"]) == ("text", "Wait.")
    assert (used["type"], used["name"], used["input"]) == ("tool_use", "get_time", {"zone": "CET"})
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize(
    ("more", "reason", "stop"),
    [
        ({}, "end_turn", None),
        ({"stop_sequences": ["x", "lo"]}, "stop_sequence", "lo"),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"stop_token_ids": [ord("e")]}, "end_turn", None),
    ],
)
def test_reason_of_the_end_is_told(more: dict[str, Any], reason: str, stop: str | None) -> None:
    with speaking([*b"Hello"]) as app:
        message = both(app, {"messages": USER, "max_tokens": 100, **more})
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert len(message["content"]) == (more.get("max_tokens") != 0)


def test_full_window_and_a_prompt_beyond_it_are_told() -> None:
    with fake_app(2, 16) as app:
        reason = both(app, {**ASKED, "max_tokens": 500})["stop_reason"]
        for more in ({}, {"stream": True}):
            asked = {**ASKED, "messages": [user(text("x" * 40))], **more}
            words = error_of(call(app, MESSAGES, asked), 400, "invalid_request_error")
            assert words == "prompt is too long: 45 tokens > 16 maximum"  # clients search for it
        assert call(app, COUNT, asked).json() == {"input_tokens": 45}
    assert reason == "model_context_window_exceeded"


def test_shipped_model_answers_the_same_with_a_stream(test_model: Path) -> None:
    options = {"max_tokens": 12, "temperature": 0}
    asked = {"messages": USER, "system": "Be brief.", **options}
    with load(test_model, parallel=2, n_threads=1) as engine:
        app = create_app(engine)
        chat = [{"role": "system", "content": "Be brief."}, *USER]
        expected = engine.submit(chat, options=options).result()
        message = both(app, asked)
        n_tokens = call(app, COUNT, {**asked, "max_tokens": None}).json()
    assert [block["text"] for block in message["content"]] == [expected.text]
    assert n_tokens == {"input_tokens": expected.usage.prompt_tokens}


def test_silence_before_the_first_token_is_pings_in_a_begun_message() -> None:
    stream = MessagesCall.of(ASKED).stream("m")
    silence = (stream.idle() + stream.idle()).decode().split("\n\n")
    names = [frame.split("\n")[0] for frame in silence]
    assert names == ["event: message_start", "event: ping", "event: ping", ""]


# ---- fields ----


def test_blocks_become_a_chat() -> None:
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    function = {"name": "get_time", "arguments": {"zone": None}}
    assert chat_of(
        {"role": "user", "content": "When?"},
        user(text("It"), text("is")),
        assistant(thinking, redacted, text("I "), text("ask")),
        assistant(USED),
        user(TIME_TOLD, text("Well?")),
        {"role": "assistant", "content": "It is"},
        system=[text("x-anthropic-billing-header: cch=1a2b"), text("Be brief.")],
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?\nIt\nis"},
        {
            "role": "assistant",
            "content": "I ask",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "abc", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "abc", "content": "12"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "It is"},
    ]
    said = chat_of(
        {"role": "system", "content": "a"}, *USER, system="x-anthropic-billing-header: c\nBe"
    )
    assert said[0] == {"role": "system", "content": "Be\na"}


def test_failed_tool_is_told_as_one() -> None:
    failed = {**TIME_TOLD, "content": [text("no"), text("clock")], "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "d"}
    chat = chat_of(*USER, assistant(USED, {**USED, "id": "d"}), user(failed, empty))
    assert [message["role"] for message in chat] == ["user", "assistant", "tool", "tool"]
    assert [message["content"] for message in chat[1:]] == [None, "Error: no\nclock", ""]
    assert len(chat[1]["tool_calls"]) == 2


def test_texts_of_a_long_run_are_joined_at_once() -> None:
    chat = [{"role": "user", "content": f"{i}", "reasoning_content": ""} for i in range(20_000)]
    n_joins = 0

    def watch(frame: FrameType, event: str, called: Any) -> None:
        nonlocal n_joins
        n_joins += event == "c_call" and called.__name__ == "join"

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        (message,) = joined(chat)
    finally:
        sys.setprofile(before)
    text = "\n".join(map(str, range(20_000)))
    assert message == {"role": "user", "content": text, "reasoning_content": ""}
    assert n_joins == 2


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.sampled_from("ab")},
    optional={
        "reasoning_content": st.sampled_from(["", "c", "d"]),
        "tool_calls": st.lists(st.integers(0, 9), max_size=2),
        "tool_call_id": st.sampled_from("ef"),
    },
)


@given(st.lists(MESSAGE, max_size=8))
@settings(max_examples=examples(200))
def test_a_chat_is_joined_as_by_adding_each_message_to_those_before(
    chat: list[dict[str, Any]],
) -> None:
    expected: list[dict[str, Any]] = []
    for message in chat:
        expected = joined([*expected, message])
    assert joined(chat) == expected
    n_calls = sum(len(message.get("tool_calls", ())) for message in chat)
    assert sum(len(message.get("tool_calls", ())) for message in expected) == n_calls


ENABLED = {"type": "enabled", "budget_tokens": 1024}
CHOICE = {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}
DEMANDED = {"type": "function", "function": {"name": "get_time"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, {"tool_choice": "required"}),
    ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    ({"tool_choice": CHOICE}, {"tool_choice": DEMANDED, "parallel_tool_calls": False}),
    (
        {"thinking": ENABLED},
        {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 1024},
    ),
    (
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
        {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"}},
    ),
    ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": None}),
    ({"output_config": {"format": SCHEMA}}, {"json_schema": '{"type":"object"}'}),
    ({"stop_sequences": ["a", ""]}, {"stop": ("a",)}),
    ({"max_tokens": 0}, {"prefill_only": True, "max_tokens": None}),
]


def test_fields_become_options() -> None:
    for body, options in OPTIONS:
        found = MessagesCall.of({**ASKED, **body}).asked.options
        assert {name: getattr(found, name) for name in options} == options


def test_tools_are_shown_to_the_model_and_counted() -> None:
    (tool,) = MessagesCall.of({**ASKED, "tools": [TOOL]}).asked.options.offered_tools
    shown = {"name": "get_time", "description": "Tell the time", "parameters": TOOL["input_schema"]}
    assert tool["function"] == shown
    with speaking([*b"x"]) as app:
        plain, count = (
            call(app, COUNT, {"messages": USER, **more}).json()["input_tokens"]
            for more in ({}, {"tools": [TOOL]})
        )
        answer = call(app, MESSAGES, {**ASKED, "tools": [TOOL]}).json()
    assert plain == 7
    assert count == answer["usage"]["input_tokens"] > 100


@pytest.mark.parametrize("is_limited", [True, False])
def test_thinking_has_its_budget_where_it_can_be_limited(is_limited: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 3}
    backend = Speaker(LONG_THOUGHT)
    if not is_limited:
        backend.vocab.controls = {**CONTROLS, THINK_END: b"<end of thought>"}
    with fake_app(engine=Engine(backend)) as app:
        answer = call(app, MESSAGES, {**ASKED, "max_tokens": 50, "thinking": thinking})
        count = call(app, COUNT, {"messages": USER, "thinking": thinking})
    assert (answer.status_code, count.status_code) == (200, 200)
    if is_limited:
        first, second = answer.json()["content"]
        assert (first["thinking"], second["text"]) == ("abc", "efghok")
    for each in (answer, count):
        named = each.headers.get("x-ignored-fields")
        assert named == (None if is_limited else "thinking.budget_tokens")


def test_unknown_fields_are_named_in_a_header() -> None:
    more = {
        "metadata": {"user_id": "me"},
        "frobnicate": 1,
        "tools": [{**TOOL, "strict": True}],
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "stream_options": {},
    }
    named = "metadata, frobnicate, stream_options, tools.strict"
    with fake_app() as app:
        for path in (MESSAGES, COUNT):
            answer = call(app, path, {**ASKED, **more})
            assert answer.headers["x-ignored-fields"] == named
    with fake_app(strict_fields=True) as app:
        for name in ("frobnicate", "stream_options"):
            answer = call(app, MESSAGES, {**ASKED, name: {}})
            assert name in error_of(answer, 400, "invalid_request_error")
        assert call(app, MESSAGES, {**ASKED, "metadata": {}}).status_code == 200


LAST_CALLS = {"messages": [*USER, assistant(USED)]}
WRONG: dict[str, list[dict[str, Any]]] = {
    "max_tokens is missing": [{"max_tokens": None}],
    "max_tokens": [{"max_tokens": "9"}],
    "messages is missing": [{"messages": None}],
    "messages.0": [{"messages": ["Hi"]}],
    "messages.0.role": [{"messages": [{"role": "tool", "content": "a"}]}],
    "messages.0.content": [{"messages": [{"role": "user"}]}],
    "'document'": [{"messages": [user({"type": "document"})]}],
    "messages.0.content.0": [{"messages": [user(USED)]}],
    "messages.1 calls tools and is the last": [LAST_CALLS],
    "is_error": [{"messages": [user({**TIME_TOLD, "is_error": 1})]}],
    "messages.1.content.0": [{"messages": [*USER, assistant({**USED, "input": "{}"}), *USER]}],
    "system": [{"system": 3}],
    "system.0.type": [{"system": [{"text": "a"}]}],
    "stop_sequences": [{"stop_sequences": [3]}],
    "stop_sequences and stop": [{"stop_sequences": ["a"], "stop": "b"}],
    "tools.0": [{"tools": [{"type": "web_search_20250305", "name": "web_search"}]}],
    "tools.0.input_schema": [{"tools": [{"name": "f"}]}],
    "tools": [{"tools": [{**TOOL, "name": ""}]}],
    "tool_choice.name": [{"tools": [TOOL], "tool_choice": {"type": "tool"}}],
    "tool_choice": [
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        {"tool_choice": {"type": "any"}},
    ],
    "thinking.budget_tokens": [{"thinking": {"type": "enabled"}}],
    "thinking": [{"thinking": {"type": "enabled", "budget_tokens": 9}, "thinking_budget": 9}],
    "output_config": [{"output_config": {"format": {"type": "xml"}}}],
    "output_config.format.type": [{"output_config": {"format": {"schema": {}}}}],
    "output_format": [{"output_format": {"type": "json_schema"}}],
    "output_config: ": [{"output_config": {"format": {"type": "json_schema", "schema": {}}}}],
    "chat_template_kwargs": [{"output_config": {"effort": "low"}, "chat_template_kwargs": 3}],
    "mcp_servers": [{"mcp_servers": [{}]}],
    "n is not supported": [{"n": 2}],
    "pause_every": [{"pause_every": 2}],
}
"""Words of the refusal, and what is refused with them."""


def test_wrong_field_is_named(app: Starlette) -> None:
    for words, bodies in WRONG.items():
        for more in bodies:
            answer = call(app, MESSAGES, {**ASKED, **more})
            assert words in error_of(answer, 400, "invalid_request_error"), more


# ---- errors ----


def test_every_error_has_the_format_of_its_path() -> None:
    asked = json.dumps(ASKED).encode()
    kind = {"content-type": "application/json"}
    with fake_app(max_body_mib=1) as app:
        error_of(call(app, MESSAGES), 405, "invalid_request_error")
        error_of(call(app, "/messages/batches", ASKED), 404, "not_found_error")
        error_of(call(app, MESSAGES, b"{", headers=kind), 400, "invalid_request_error")
        error_of(call(app, MESSAGES, asked), 415, "invalid_request_error")
        long = asked + b" " * 2**20
        error_of(call(app, MESSAGES, long, headers=kind), 413, "request_too_large")
        error_of(call(app, MESSAGES, {**ASKED, "timeout_s": 0}), 504, "timeout_error")
        app.state.desk.is_draining = True
        answer = call(app, MESSAGES, ASKED)
        error_of(answer, 529, "overloaded_error")
        assert answer.headers["retry-after"] == "1"
        assert call(app, "/v1/completions", {"prompt": "a"}).status_code == 503
    with fake_app(api_keys="k") as app:
        for path in (MESSAGES, COUNT, "/messages/none"):
            error_of(call(app, path, ASKED), 401, "authentication_error")
        assert call(app, MESSAGES, ASKED, headers={"x-api-key": "k"}).status_code == 200


def test_error_in_a_stream_is_an_event() -> None:
    stream = MessagesCall.of(ASKED).stream("m")
    name, data, *rest = stream.error(problem_of(PromptTooLongError(9, 8))).decode().split("\n")
    assert (name, rest) == ("event: error", ["", ""])
    error = json.loads(data.removeprefix("data: "))
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
