"""OpenAI's responses: answers, streams and their equality, fields, items, errors."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.errors import WorkerDiedError
from cbatch.server import create_app
from cbatch.server.answer_events import Text
from cbatch.server.exchange import dumps
from cbatch.server.http_errors import problem_of
from cbatch.server.responses_api import ResponsesCall
from tests.chat.test_tool_calls import SAID, Speaker
from tests.profiles import examples
from tests.server.clients import call, error_of, fake_app, running
from tests.server.test_anthropic_messages import PIECES, speaking

if TYPE_CHECKING:
    import httpx
    from starlette.applications import Starlette

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"input": "Hi", "max_output_tokens": 6, "seed": 3}
TOOL = {"type": "function", "name": "get_time", "parameters": {"type": "object"}}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream: named, and numbered without a gap."""
    assert response.status_code == 200, response.text
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def response_of(response: httpx.Response) -> dict[str, Any]:
    """The response that a stream ends with; its items are those that were told before."""
    first, second, *events, last = events_of(response)
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    found: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{found['status']}"
    assert found["id"] == first["response"]["id"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert done == found["output"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    for i, item in enumerate(done):
        deltas = [e["delta"] for e in events if "delta" in e and e["item_id"] == item["id"]]
        assert all(e["output_index"] == i for e in events if e.get("item_id") == item["id"])
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(deltas) == text
    return found


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs when it is asked for again."""
    usage = {**response["usage"], "input_tokens_details": None}
    output = [{**item, "id": None, "call_id": None} for item in response["output"]]
    same = {"id": None, "created_at": None, "output": output, "usage": usage}
    return {**response, **same, "completed_at": response["completed_at"] is not None}


def both(app: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The response, which is the same streamed and not."""
    whole = call(app, PATH, asked)
    assert whole.status_code == 200, whole.text
    streamed = response_of(call(app, PATH, {**asked, "stream": True}))
    assert without_ids(streamed) == without_ids(whole.json())
    return streamed


def test_response_has_its_output_and_repeats_its_request(app: Starlette) -> None:
    asked = {"instructions": "Be brief", "model": "m"}
    scored = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = both(app, {**ASKED, **asked, **scored})
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    scores = item["content"][0]["logprobs"]
    assert [len(score["top_logprobs"]) for score in scores] == [2] * 6
    told = {**asked, "store": False, "background": False, "object": "response"}
    told["incomplete_details"] = {"reason": "max_output_tokens"}
    assert {name: response[name] for name in told} == told
    assert response["usage"]["output_tokens"] == 6


def test_what_a_stream_repeats_is_made_json_once_and_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    large: list[bool] = []

    def noted(value: object) -> bytes:
        data = dumps(value)
        if len(data) > 2**18:
            large.append(threading.current_thread() is threading.main_thread())
        return data

    monkeypatch.setattr("cbatch.server.sse.dumps", noted)
    monkeypatch.setattr("cbatch.server.responses_api.dumps", noted)
    with fake_app(2, 2**20) as app:
        asked = {**ASKED, "instructions": "x" * 2**18, "stream": True}
        response = response_of(call(app, PATH, asked))
    assert response["instructions"] == "x" * 2**18
    assert large == [False]


def test_response_tells_how_it_was_sampled() -> None:
    backend = FakeBackend(4, 256)
    backend.sampling_defaults = {"top_p": 0.5, "temperature": 0.1}
    options = {"temperature": 0.25, "frequency_penalty": 0.125}
    with fake_app(engine=Engine(backend, options=options)) as app:
        said, asked = both(app, ASKED), both(app, {**ASKED, "temperature": 0.75})
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    assert [said[name] for name in names] == [0.25, 0.5, 0.0, 0.125]
    assert asked["temperature"] == 0.75


def test_tokens_of_an_input_are_counted_with_its_tools() -> None:
    asked = {"input": "Hi", "instructions": "Be brief", "tools": [TOOL], "store": True}
    with speaking(SAID) as app:
        counted = call(app, f"{PATH}/input_tokens", asked)
        used = call(app, PATH, asked).json()["usage"]["input_tokens"]
        wrong = error_of(call(app, f"{PATH}/input_tokens", {"input": 1}), 400)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": used}
    assert counted.headers["x-ignored-fields"] == "store"
    assert wrong["param"] == "input"


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    said=st.lists(st.sampled_from(PIECES), max_size=12),
    more=st.fixed_dictionaries(
        {},
        optional={"tools": st.just([TOOL]), "max_output_tokens": st.integers(1, 40)},
    ),
)
def test_streamed_response_equals_the_whole_one(
    said: list[list[int]], more: dict[str, Any]
) -> None:
    with speaking([token for piece in said for token in piece]) as app:
        both(app, {"input": "Hi", **more})


def test_thinking_text_and_calls_are_items() -> None:
    with speaking(SAID) as app:
        response = both(app, {"input": "Hi", "tools": [TOOL]})
    thought, said, called = response["output"]
    kinds = ["reasoning", "message", "function_call"]
    assert [item["type"] for item in response["output"]] == kinds
    assert thought["content"] == [{"type": "reasoning_text", "text": "I häve to"}]
    assert said["content"][0]["text"] == "Wait."
    assert (called["name"], json.loads(called["arguments"])) == ("get_time", {"zone": "CET"})
    assert response["status"] == "completed"


def test_items_become_a_chat() -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "When?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "H"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {"type": "function_call", "call_id": "abc", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "abc", "output": "12"},
    ]
    (prompt,) = ResponsesCall.of({"input": items, "instructions": "Be"}).prompts
    called = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": {}}}
    thought = {"reasoning_content": "H", "tool_calls": [called]}
    assert [*map(dict, prompt.messages or ())] == [
        {"role": "system", "content": "Be\nBrief"},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "I", **thought},
        {"role": "tool", "tool_call_id": "abc", "content": "12"},
    ]


def test_failure_in_a_stream_is_a_response_that_failed() -> None:
    stream = ResponsesCall.of(ASKED).stream("m")
    said = b"".join(stream.frames([Text(0, "a")])) + stream.error(
        problem_of(WorkerDiedError("killed"))
    )
    *events, last = [json.loads(f.split("data: ")[1]) for f in said.decode().split("\n\n")[:-1]]
    assert last["type"] == "response.failed"
    assert last["sequence_number"] == len(events)
    assert last["response"]["id"] == events[0]["response"]["id"]
    assert last["response"]["error"]["code"] == "worker_died"


def test_tools_that_are_no_functions_are_ignored_by_name(app: Starlette) -> None:
    tools = [{"type": "web_search"}, {**TOOL, "strict": True}]
    asked = {**ASKED, "tools": tools, "store": True, "include": ["x"], "text": {"verbosity": "low"}}
    answer = call(app, PATH, asked)
    named = "store, tools[0], tools.strict, text.verbosity, include.x"
    assert answer.headers["x-ignored-fields"] == named


WRONG: list[dict[str, Any]] = [
    *({"input": said} for said in (None, [], [3], [{"type": "item_reference", "id": "x"}])),
    {"input": [{"type": "reasoning", "content": [{"text": "x"}]}]},
    {"input": [{"role": "tool", "content": "x"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]},
    *({"instructions": 3}, {"max_output_tokens": 0}, {"background": True}, {"n": 2}),
    *({"previous_response_id": "x"}, {"conversation": "x"}, {"prompt": {"id": "x"}}),
    *({"text": 3}, {"text": {"format": {"type": "xml"}}}, {"reasoning": {"effort": 3}}),
    *({"include": 3}, {"tools": [{"type": "function"}]}, {"tool_choice": "required"}),
    *({"tool_choice": {"type": "custom"}}, {"temperature": -1}, {"max_tokens": 9}),
    *({"n_predict": 9}, {"reasoning_effort": "low"}, {"n_cmpl": 2}),  # it has names of its own
]


def test_wrong_field_is_named(app: Starlette) -> None:
    for more in WRONG:
        (param,) = more
        assert error_of(call(app, PATH, {**ASKED, **more}), 400)["param"] == param, more


@pytest.mark.real
def test_client_reads_thinking_and_calls() -> None:
    with (
        Engine(Speaker(SAID, n_slots=2, n_window=1024)) as engine,
        running(create_app(engine)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": "m", "input": "Hi", "tools": [TOOL]}
        with client.responses.stream(**asked) as stream:
            for _ in stream:
                pass
            output = stream.get_final_response().output
        assert [item.type for item in output] == ["reasoning", "message", "function_call"]
        told = {"type": "function_call_output", "call_id": output[2].call_id, "output": "12"}
        said = [item.model_dump(exclude_none=True) for item in output]
        turns: list[Any] = [{"role": "user", "content": "Hi"}, *said, told]
        assert client.responses.create(**{**asked, "input": turns}).status == "completed"


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_logprobs": 1},
        {"choice": ["red", "green"], "choice_probs": True},
        {"xtc_threshold": 0.3},
    ],
)
def test_response_has_what_the_format_lacks(more: dict[str, Any], app: Starlette) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "seed": 3, **more}
    expected = call(app, "/v1/chat/completions", chat).json()["cbatch"]
    assert call(app, PATH, {**ASKED, **more}).json()["cbatch"] == expected
    assert response_of(call(app, PATH, {**ASKED, **more, "stream": True}))["cbatch"] == expected
