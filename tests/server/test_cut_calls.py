"""Calls that a limit or a stop string cuts off: no dialect shows their markup, streamed or not."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch import Engine
from tests.chat.test_tool_calls import BODY, CALL, SAID, Speaker
from tests.face.test_tools import TIME, USER
from tests.server.clients import call, fake_app

FUNCTION = TIME["function"]
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [dict(TIME)],
    "/v1/responses": [{"type": "function", **FUNCTION}],
    "/v1/messages": [{"name": FUNCTION["name"], "input_schema": {"type": "object"}}],
}
ENDS = {
    "/v1/chat/completions": ('"finish_reason":"length"', '"finish_reason":"stop"'),
    "/v1/responses": ('"status":"incomplete"', '"status":"completed"'),
    "/v1/messages": ('"stop_reason":"max_tokens"', '"stop_reason":"stop_sequence"'),
}
N_SAID = SAID.index(CALL)
"""Tokens before the call."""


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("n_tokens", [N_SAID + 1, N_SAID + 2, N_SAID + len(BODY) // 2])
def test_call_cut_off_by_the_limit_is_not_shown(
    path: str, n_tokens: int, is_streamed: bool
) -> None:
    check(path, {"max_tokens": n_tokens}, 0, is_streamed=is_streamed)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "stop"), ("/v1/messages", "stop_sequences")],
)
def test_call_cut_off_by_a_stop_string_is_not_shown(
    path: str, field: str, is_streamed: bool
) -> None:
    check(path, {"max_tokens": 200, field: ["argum"]}, 1, is_streamed=is_streamed)


def check(path: str, more: dict[str, Any], i_end: int, *, is_streamed: bool) -> None:
    if path == "/v1/responses":
        more["max_output_tokens"] = more.pop("max_tokens")
    messages = "input" if path == "/v1/responses" else "messages"
    asked = {messages: [USER], "tools": TOOLS[path], "stream": is_streamed, **more}
    with fake_app(engine=Engine(Speaker(SAID, n_slots=2, n_window=1024))) as app:
        answer = call(app, path, asked)
    assert answer.status_code == 200, answer.text
    assert ENDS[path][i_end] in answer.text.replace('": ', '":')
    assert not any(word in answer.text for word in ("tool_call>", '{\\"', "zone"))
