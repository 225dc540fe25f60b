"""Bodies of any values in the declared fields: an answer or a refusal that names a field, and nobody else notices."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.options import RunOptions
from cbatch.server import anthropic_fields, request_fields, responses_fields
from tests.profiles import examples
from tests.server.clients import CHAT, COMPLETIONS, MESSAGES, USER, fake_app
from tests.server.kept import kept_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.applications import Starlette

RESPONSES, COUNT = "/v1/responses", "/v1/messages/count_tokens"
COUNT_INPUT = f"{RESPONSES}/input_tokens"

OPTIONS = {f.name: f.metadata.get("limits", ()) for f in fields(RunOptions)}
"""The limits of each option, as they are declared."""
CELLS = ("cache_key", "save_cache", "cache_required")
for name in CELLS:
    del OPTIONS[name]  # a folder is needed

OF_ALL = {
    *OPTIONS,
    *request_fields.IGNORED,
    *request_fields.HARMLESS,
    *request_fields.REFUSED,
    *request_fields.RENAMED,
    *request_fields.READ_BY_ALL,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def said(role: str, *content: Any) -> dict[str, Any]:
    """A message of one text, or of parts."""
    return {"role": role, "content": content[0] if isinstance(content[0], str) else [*content]}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


TOOL = {"type": "function", "function": FUNCTION}
CALLED = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
SHORT = {"max_tokens": 2}
GOOD: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": USER, **SHORT, "tools": [TOOL]},
        {
            "messages": [
                said("system", text("Be brief.")),
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "2"},
            ],
            **SHORT,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {"messages": USER, "max_tokens": 1, "logprobs": True, "top_logprobs": 2, "n": 2},
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": FORMAT}},
    ],
    COMPLETIONS: [
        {"prompt": "ab", **SHORT},
        {"prompt": ["a", "b"], "max_tokens": 1, "echo": True, "logprobs": 1, "stream": True},
        {"prompt": [[5, 6], [7]], **SHORT, "stop": ["x"], "logit_bias": {"5": -1}},
    ],
    MESSAGES: [
        {"messages": USER, **SHORT, "thinking": {"type": "enabled", "budget_tokens": 9}},
        {
            "system": [text("Be brief.")],
            "messages": [
                *USER,
                said(
                    "assistant", {"type": "thinking", "thinking": "Hm.", "signature": "x"}, CALLED
                ),
                said("user", {"type": "tool_result", "tool_use_id": "1", "content": "2"}),
            ],
            **SHORT,
            "stream": True,
            "stop_sequences": ["x"],
            "tools": [{"name": "add", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
        {
            "messages": [
                said("user", {"type": "image", "source": IMAGE}),
                said("assistant", {"type": "redacted_thinking", "data": "x"}),
            ],
            **SHORT,
            "output_config": {"effort": "low", "format": FORMAT},
        },
    ],
    RESPONSES: [
        {"input": "Hi", "max_output_tokens": 2, "text": {"format": {"type": "text"}}},
        {
            "instructions": "Be brief.",
            "input": [
                said("user", text("1+1?", "input_text")),
                {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "2"},
            ],
            "max_output_tokens": 2,
            "stream": True,
            "tools": [{"type": "function", **FUNCTION}],
            "reasoning": {"effort": "low"},
        },
        {
            "input": [
                {"type": "reasoning", "content": [text("Hm.", "reasoning_text")]},
                said("user", {"type": "input_image", "image_url": "x"}),
            ],
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
    ],
    COUNT: [{"messages": USER}],
    COUNT_INPUT: [
        {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "any"}
    ],
    "/tokenize": [{"content": "ab", "with_pieces": True}, {"prompt": "ab"}, {"messages": USER}],
    "/detokenize": [{"tokens": [5, 6]}],
    "/apply-template": [{"messages": USER}],
}
"""Bodies that are answered, by path."""

OWN: dict[str, set[str]] = {
    path: {*of.own, *of.ignored, *of.refused}
    for path, of in {
        MESSAGES: anthropic_fields.DIALECT,
        RESPONSES: responses_fields.DIALECT,
    }.items()
}
OWN[COUNT_INPUT] = OWN[RESPONSES]
NAMES = {path: sorted({*OF_ALL, *OWN.get(path, ()), *GOOD[path][0]}) for path in GOOD}
"""The fields of each path."""

WORDS = ["auto", "none", "text", "function", "json_object", "json_schema", "assistant", "required"]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 4)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from([*WORDS, "", "\x00", "\u2028", "🙂", "x" * 5000]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "role", "content", "json", "text", "1"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def value_of(name: str) -> st.SearchStrategy[Any]:
    """Any value, and where a field is declared with limits, those and what is next to them."""
    numbers = [limit for limit in OPTIONS.get(name, ()) if isinstance(limit, int | float)]
    edges = [near for limit in numbers for near in (limit - 1, limit, limit + 1, str(limit))]
    return st.sampled_from(edges) | values if edges else values


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values are in a body: keys and indexes from its top."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inner:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from places_in(part, (*path, key))


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A good body with some fields more, and some places changed."""
    body: dict[str, Any] = deepcopy(draw(st.sampled_from(GOOD[path])))
    for name in draw(st.lists(st.sampled_from(NAMES[path]), max_size=3)):
        body[name] = draw(value_of(name))
    for _ in range(draw(st.integers(0, 2))):
        if not body:
            break
        place = draw(st.sampled_from([*places_in(body)]))
        at: Any = body
        for key in place[:-1]:
            at = at[key]
        what = draw(st.sampled_from(["value", "value", "nothing", "list", "twice"]))
        if what == "nothing" and isinstance(at, dict):
            at.pop(place[-1], None)
        elif what == "list":
            at[place[-1]] = [at[place[-1]]]
        elif what == "twice" and isinstance(at, list):
            at.append(deepcopy(at[place[-1]]))
        else:
            at[place[-1]] = draw(values)
    return body


def check_error(path: str, answer: httpx.Response, asked: dict[str, Any]) -> None:
    """Check that a refusal has the form of the path's dialect, and names a field where that form has a place."""
    said = answer.json()
    if path in (MESSAGES, COUNT):
        assert said["type"] == "error"
        assert said["request_id"] == answer.headers["request-id"]
        assert {"type", "message"} <= said["error"].keys()
        return
    error = said["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["message"]
    if answer.status_code == 400 and error["code"] != "invalid_json":
        known = {*asked, "messages", "prompt", "input", "tokens"}
        assert error["param"].partition("[")[0].partition(".")[0] in known, error


def check_stream(path: str, text: str) -> None:
    """Check that a stream ends as its dialect ends it, or with an error."""
    *_, last, rest = text.split("\n\n")
    assert rest == ""
    ends = {MESSAGES: "message_stop", RESPONSES: "response."}.get(path, "[DONE]")
    assert ends in last or '"error"' in last, last


async def ask_all(app: Starlette, asked: list[tuple[str, Any]]) -> list[httpx.Response]:
    """Ask all at once."""
    found: list[Any] = [None] * len(asked)
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        anyio.create_task_group() as tasks,
    ):

        async def ask(i: int, path: str, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            found[i] = await client.post(path, content=data, headers=headers)

        for i, (path, body) in enumerate(asked):
            tasks.start_soon(ask, i, path, body)
    return found


NEIGHBOUR = {"max_tokens": 2, "seed": 1, "prompt": "ab"}

lasting = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("path", GOOD)
def test_any_body_is_answered_or_refused_by_name(path: str) -> None:
    with fake_app(4, 64, max_choices=64) as app:
        alone, *good = anyio.run(
            ask_all, app, [(COMPLETIONS, NEIGHBOUR), *((path, body) for body in GOOD[path])]
        )
        assert {answer.status_code for answer in good} <= {200, 400}, [a.text for a in good]
        engine = app.state.desk.engine

        @lasting
        @given(body=bodies(path))
        def check(body: dict[str, Any]) -> None:
            neighbour, answer = anyio.run(ask_all, app, [(COMPLETIONS, NEIGHBOUR), (path, body)])
            assert neighbour.json()["choices"] == alone.json()["choices"]
            assert answer.status_code in (200, 400, 504), answer.text
            if answer.status_code != 200:
                check_error(path, answer, body)
            elif answer.headers["content-type"] == "text/event-stream":
                check_stream(path, answer.text)
            stats = engine.stats()
            assert stats.n_running == stats.n_waiting == stats.n_paused == 0
            assert app.state.desk.n_in_flight == 0

        check()


def _object(body: bytes) -> dict[str, Any]:
    try:
        read: Any = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return dict(read) if isinstance(read, dict) else {}


ODD = (
    *("1e999", "-1e999", "[1e999]", '{"a": 1e999}', '{"5": -1e999}', "NaN", "-Infinity"),
    *("-0", "-0.0", "1e-999", "1.0", "1.5", "-1", "1" + "0" * 400, "1" + "0" * 5000, "1e308"),
    *('"\\ud800"', '{"\\ud800": 1}', '"\\u0000"', '"a\\u0000b"', '""', '" "', '"1"'),
    *('"\xff"', "\0", "{", "]", "-", "", f'"{"x" * 9000}"'),
    *("[" * 99 + "]" * 99, "[" * 300 + "]" * 300, '{"a":' * 99 + "1" + "}" * 99, "[" * 90_000),
    *("true", "false", "[]", "{}", "[null]", "[[]]", "[{}]", '{"": null}', '[""]'),
    *('{"type": null}', '{"type": {}}', '{"type": []}', '[{"type": 1}]', '{"type": "function"}'),
    *('[{"type": "function"}]', '{"type": "json_schema"}', '{"format": {"type": 1}}'),
    *('{"effort": 1}', "[1, 2]", '["a", 1]'),
)
"""Values as JSON writes them, and what is none: the sender chooses the text."""

N_ODD = 300
"""Cases of each path that are tried, chosen anew where the fields change."""

OF_BATCH = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
BATCHES = {"/v1/batches": OF_BATCH, "/v1/messages/batches": ("requests",)}


def with_field(body: dict[str, Any], name: str, raw: str, *, is_twice: bool = False) -> bytes:
    """A body whose field `name` has a value as it is written; with `is_twice`, after one of another value."""
    rest = {key: value for key, value in body.items() if key != name}
    twice = f"{json.dumps(name)}: null, " if is_twice else ""
    return f"{json.dumps(rest)[:-1]}, {twice}{json.dumps(name)}: {raw}}}".encode("latin-1")


@pytest.mark.parametrize("path", [*GOOD, *BATCHES])
def test_any_field_with_any_json_is_answered_or_refused(path: str, tmp_path: Path) -> None:
    good = GOOD.get(
        path, [{"completion_window": "24h", "endpoint": CHAT, "input_file_id": "file-1"}]
    )
    names = NAMES.get(path) or [*BATCHES[path], "unknown"]
    cases = [(name, raw) for name in [*names, *CELLS] for raw in ODD]
    cases = random.Random(path).sample(cases, min(len(cases), examples(N_ODD)))
    with kept_app(tmp_path, max_choices=64) as app:
        engine = app.state.desk.engine
        for name, raw in cases:
            body = with_field(good[0], name, raw, is_twice=len(raw) % 2 == 1)
            (answer,) = anyio.run(ask_all, app, [(path, body)])
            assert answer.status_code in (200, 400, 404, 504), (name, raw[:50], answer.text)
            if answer.status_code != 200 and path not in BATCHES:
                check_error(path, answer, _object(body))
        assert engine.stats().n_running == 0
