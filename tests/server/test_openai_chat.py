"""Chat completions: the whole answer, the streamed one, and their equality."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import anyio
import pytest

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.response import BatchOutputChunk, BatchResult, Timings, TokenLogprob, ToolCall, Usage
from cbatch.runtime.step_record import SlotState
from cbatch.server.answer_events import (
    Called,
    Ended,
    Event,
    Events,
    Failed,
    Reasoning,
    Text,
    chunk_events,
    joined_events,
)
from cbatch.server.call import fingerprint_of
from cbatch.server.openai_answers import timings_of
from cbatch.server.openai_chat import ChatCall, ChatStream
from cbatch.server.pulse import EngineQuestion
from cbatch.server.responses_api import ResponsesCall
from tests.runtime.backends import GatedBackend
from tests.server.clients import CHAT, COMPLETIONS, USER, call, error_of, events_of, fake_app

if TYPE_CHECKING:
    from starlette.applications import Starlette

TIMES = Timings(0.0, None, 0.0, None, None)
ASKED = {"messages": USER, "max_tokens": 6, "seed": 3}
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": USER}),
    (COMPLETIONS, {"prompt": "Hi"}),
]


def test_answer_has_every_field_of_the_format_and_is_that_of_the_engine() -> None:
    with Engine(FakeBackend(4, 256)) as engine:
        expected = engine.submit(USER, options={"max_tokens": 6, "seed": 3}).result().text
    with fake_app() as app:
        body = call(app, CHAT, {**ASKED, "model": "any/name"}).json()
    assert (body["object"], body["model"]) == ("chat.completion", "any/name")
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"].keys() == {"role", "content", "refusal", "annotations"}
    assert choice["message"]["content"] == expected
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 6, 13)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert body["timings"]["predicted_n"] == 6


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2, "n": 2}])
def test_streamed_answer_equals_the_whole_one(app: Starlette, more: dict[str, Any]) -> None:
    asked = {**ASKED, **more}
    whole = call(app, CHAT, asked).json()
    usage = {"include_usage": True}
    events = events_of(call(app, CHAT, {**asked, "stream": True, "stream_options": usage}))
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        deltas = [part["delta"] for part in parts]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(d.get("content", "") for d in deltas) == choice["message"]["content"]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["length"]
        scored = [t for p in parts if p["logprobs"] for t in p["logprobs"]["content"]]
        assert scored == (choice["logprobs"] or {"content": []})["content"]
        is_beside = all(p["logprobs"] for p in parts if p["delta"].get("content"))
        assert is_beside == bool(choice["logprobs"])
    assert events[-1]["usage"].keys() == whole["usage"].keys()
    assert events[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(e["usage"] is None for e in events[:-1])
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("model", ["\0", "text of chatcmpl-0", '"', "é\u2028"])
def test_name_of_the_model_is_repeated_as_it_is(app: Starlette, model: str) -> None:
    whole = call(app, CHAT, {**ASKED, "model": model}).json()
    events = events_of(call(app, CHAT, {**ASKED, "model": model, "stream": True}))
    assert {e["model"] for e in events} == {whole["model"]} == {model}
    assert all("usage" not in event for event in events)
    texts = [c["delta"].get("content", "") for e in events for c in e["choices"]]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]


def test_one_application_answers_in_loops_of_both_kinds(app: Starlette) -> None:
    answers = [
        call(app, CHAT, {**ASKED, "stream": is_streamed}, backend=backend)
        for backend in ("asyncio", "trio", "asyncio")
        for is_streamed in (False, True)
    ]
    assert [answer.status_code for answer in answers] == [200] * 6
    for path in ("/health", "/metrics", "/slots"):
        assert call(app, path, backend="trio").status_code == 200


def test_times_have_draft_tokens_where_there_were_some() -> None:
    times = replace(TIMES, n_draft_tokens=7, n_accepted_tokens=5, n_model_draft_tokens=4)
    result = BatchResult("a", "", (), "stop", None, Usage(4, 3), times, seed=0)
    told = timings_of(result)
    assert (told["draft_n"], told["draft_n_accepted"], told["draft_model_n"]) == (7, 5, 4)


@pytest.mark.parametrize(("path", "prompt"), PROMPTS)
def test_times_are_numbers_also_of_one_token_and_stand_beside_the_usage(
    app: Starlette, path: str, prompt: dict[str, Any]
) -> None:
    asked = {**prompt, "max_tokens": 1, "seed": 1}
    told = call(app, path, asked).json()["timings"]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *_, before, last = events_of(call(app, path, {**asked, **usage}))
    several = {"prompt": ["a", "b"], "max_tokens": 1, "seed": 1, **usage}
    assert "timings" not in events_of(call(app, COMPLETIONS, several))[-1]
    rates = {f"{n}_per_{unit}" for n in ("prompt", "predicted") for unit in ("second", "token_ms")}
    sizes = {"cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "queue_ms"}
    assert told.keys() == rates | sizes  # no drafts
    assert all(isinstance(value, int | float) and value >= 0 for value in told.values())
    assert told["predicted_per_second"] == told["predicted_per_token_ms"] == 0.0
    assert last["choices"] == []
    assert last["timings"] == before["timings"]
    assert last["timings"].keys() == told.keys()


@pytest.mark.parametrize(("path", "prompt"), PROMPTS)
def test_fingerprint_is_that_of_the_engine(path: str, prompt: dict[str, Any]) -> None:
    asked = {**prompt, "max_tokens": 2, "seed": 1}
    found = set()
    for size in (256, 512):  # sizes do not change answers
        with fake_app(4, size) as app:
            whole = call(app, path, asked).json()
            events = events_of(call(app, path, {**asked, "stream": True}))
            found |= {each["system_fingerprint"] for each in (whole, *events)}
            assert found == {fingerprint_of(app.state.desk.engine)}
    with Engine(FakeBackend(4, 256)) as engine:
        other = {**engine.fingerprint, "model": "other"}
        with patch.object(Engine, "fingerprint", other), fake_app(engine=engine) as app:
            assert call(app, path, asked).json()["system_fingerprint"] not in found


def test_log_probabilities_have_the_ids_of_their_tokens(app: Starlette) -> None:
    asked = {"max_tokens": 3, "seed": 1, "return_tokens": True}
    tops = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    (chat,) = call(app, CHAT, {**asked, **tops}).json()["choices"]
    (text,) = call(app, COMPLETIONS, {**asked, "prompt": "Hi", "logprobs": 1}).json()["choices"]
    content = chat["logprobs"]["content"]
    assert [token["id"] for token in content] == chat["token_ids"]
    for token in content:
        tops_of = {top["id"]: top["logprob"] for top in token["top_logprobs"]}
        assert len(tops_of) == 2
        assert tops_of.get(token["id"], token["logprob"]) == token["logprob"]
    assert text["logprobs"]["token_ids"] == text["token_ids"]


def test_stream_of_thinking_and_calls_has_each_in_its_place() -> None:
    asked = {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}
    chat = ChatCall.of(asked)
    calls = ToolCall("a", "f", "{}"), ToolCall("b", "f", '{"x":1}')
    result = BatchResult(
        "1", "Hm", (1,), "tool_calls", None, Usage(3, 4), TIMES, 0, reasoning="Well"
    )
    stream = ChatStream(chat, {"id": "id"})
    events: list[Event] = [
        Reasoning(0, "Well"),
        Text(0, "Hm"),
        *(Called(0, i, c) for i, c in enumerate(calls)),
        Ended(0, result, result),
    ]
    text = b"".join(stream.last_frames(events)).decode()
    deltas = [p.split('"delta":')[1].split(',"finish_reason"')[0] for p in text.split("\n\n")[:-2]]
    assert deltas == [
        '{"role":"assistant","content":""}',
        '{"reasoning_content":"Well"}',
        '{"content":"Hm"}',
        '{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]}',
        '{"tool_calls":[{"index":1,"id":"b","type":"function","function":{"name":"f","arguments":"{\\"x\\":1}"}}]}',
        "{}",
    ]


def test_texts_that_came_meanwhile_are_one_event_a_choice() -> None:
    with Engine(GatedBackend(4, 256), threaded=False) as engine:
        options = {"max_tokens": 8, "seed": 1, "n": 2, "ignore_eos": True}
        response = engine.run([USER], options=options, streamed=True)
        while engine.step():
            pass
        expected = [choice.text for choice in response.result().choices]
        assert response.n_unread_chunks > 2

        async def read() -> list[Event]:
            return await Events(response, 2).next()

        texts = [event for event in anyio.run(read) if isinstance(event, Text)]
    assert sorted((t.i_choice, t.text) for t in texts) == [*enumerate(expected)]


def test_text_that_comes_while_others_are_read_comes_before_its_end() -> None:
    """A delivery between the look at chunks and the look at results."""
    with Engine(GatedBackend(4, 256), threaded=False) as engine:
        options = {"max_tokens": 4, "seed": 1, "ignore_eos": True}
        response = engine.run([USER, USER], options=options, streamed=True)
        while not response.n_unread_chunks:
            engine.step()

        class Late:
            """The response, whose end comes just when its reader has seen that there are no more chunks."""

            @property
            def n_unread_chunks(self) -> int:
                n = response.n_unread_chunks
                while not n and engine.step():
                    pass
                return n

            def __getattr__(self, name: str) -> Any:
                return getattr(response, name)

            def __aiter__(self) -> Any:
                return aiter(response)

        async def read() -> list[Event]:
            events, found = Events(cast("Any", Late()), 1), list[Event]()
            while not events.have_ended:
                found += await events.next()
            return found

        events = anyio.run(read)
        texts = [result.text for result in response.results()]
    for i, text in enumerate(texts):
        own = [event for event in events if not isinstance(event, Failed) and event.i_choice == i]
        *parts, last = own
        assert isinstance(last, Ended)
        assert "".join(part.text for part in parts if isinstance(part, Text)) == text


def test_log_probabilities_stand_beside_their_text() -> None:
    one, other = (TokenLogprob(token, bytes([token]), -1.0) for token in b"ab")
    chunks = [
        BatchOutputChunk("a", "a", (97,), 0, None, "", "a", (one,)),
        BatchOutputChunk("a", "<", (60,), 0, None, "", "", (one,)),
        BatchOutputChunk("a", "b", (98,), 0, None, "b", "", (other,)),
        BatchOutputChunk("a", "", (60,), 0, None, "", "", (one,)),
    ]
    asked = {"messages": USER, "logprobs": True, "return_tokens": True}
    stream = ChatStream(ChatCall.of(asked), {"id": "id"})
    found = joined_events([event for chunk in chunks for event in chunk_events(chunk, 0)])
    first, second = found
    assert isinstance(first, Reasoning)
    assert (first.token_ids, first.logprobs) == ((97, 60), (one, one))
    assert isinstance(second, Text)
    assert (second.token_ids, second.logprobs) == ((98, 60), (other, one))
    _, *frames, rest = b"".join(stream.frames(found)).decode().split("\n\n")
    choices = [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames]
    assert [c["delta"] for c in choices] == [{"reasoning_content": "a"}, {"content": "b"}]
    assert [c["token_ids"] for c in choices] == [[97, 60], [98, 60]]
    assert ["".join(t["token"] for t in c["logprobs"]["content"]) for c in choices] == ["aa", "ba"]
    assert rest == ""


def test_format_of_a_text_is_moot_where_a_call_is_demanded() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    format = {"type": "json_object"}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        body = {"messages": USER, "tools": tools, "tool_choice": choice, "response_format": format}
        asked = ChatCall.of(body).asked
        assert (asked.options.response_format, asked.ignored) == (None, ["response_format"])
    asked = ChatCall.of({**body, "tool_choice": "none"}).asked
    assert asked.options.response_format is not None
    assert asked.ignored == []
    flat = [{"type": "function", "name": "f", "parameters": {}}]
    more = {"tools": flat, "tool_choice": "required", "text": {"format": format}}
    assert ResponsesCall.of({"input": "Hi", **more}).asked.ignored == ["text"]


def test_unknown_fields_are_named_in_a_header() -> None:
    with fake_app() as app:
        answer = call(app, CHAT, {**ASKED, "user": "me", "frobnicate": 1, "seed": None})
        assert answer.headers["x-ignored-fields"] == "user, frobnicate"
    with fake_app(strict_fields=True) as app:
        error = error_of(call(app, CHAT, {**ASKED, "frobnicate": 1}), 400)
        assert (error["param"], error["code"]) == ("frobnicate", "unknown_parameter")
        assert call(app, CHAT, {**ASKED, "user": "me"}).status_code == 200


MAX_3 = {"max_tokens": 3}
ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_completion_tokens": 3, "max_tokens": 9}, MAX_3),
    ({"n_predict": 3}, MAX_3),
    ({**MAX_3, "top_k": -1}, {**MAX_3, "top_k": 0}),
    ({**MAX_3, "repetition_penalty": 2}, {**MAX_3, "repeat_penalty": 2}),
    ({**MAX_3, "seed": -2}, {**MAX_3, "seed": 2**64 - 2}),
    ({**MAX_3, "logit_bias": [[5, False]]}, {**MAX_3, "logit_bias": {"5": -9}}),
]


@pytest.mark.parametrize("both", ALIKE)
def test_names_of_others_mean_the_same(
    app: Starlette, both: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    one, other = (call(app, CHAT, {"messages": USER, "seed": 1, **more}).json() for more in both)
    assert one["choices"] == other["choices"]


def test_ids_of_tokens_are_told_where_they_are_asked_for(app: Starlette) -> None:
    whole = call(app, CHAT, {**ASKED, "return_tokens": True}).json()["choices"][0]
    asked = {**ASKED, "return_token_ids": True, "stream": True}
    events = events_of(call(app, CHAT, asked))
    streamed = [t for e in events for c in e["choices"] for t in c.get("token_ids", ())]
    assert streamed == whole["token_ids"]
    assert len(streamed) == 6


def test_developer_speaks_as_the_system_and_nulls_are_not_said(app: Starlette) -> None:
    messages = [{"role": "developer", "content": "Be brief", "name": None}, *USER]
    prompt = call(app, "/apply-template", {"messages": messages}).json()["prompt"]
    assert prompt == "system:Be brief\nuser:Hi"


WRONG: list[dict[str, Any]] = [
    *({"messages": said} for said in (None, [{"role": "user"}])),
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    *({"temperature": -1}, {"max_completion_tokens": 0}, {"logprobs": 3}, {"stream_options": 3}),
    *({"tools": [{"type": "web_search"}]}, {"tool_choice": "required"}, {"functions": []}),
    *({"modalities": ["audio"]}, {"response_format": {"type": "xml"}}, {"guided_json": {}}),
    *({"structured_outputs": {"json": {}, "regex": "a"}}, {"continue_final_message": True}),
    *({"response_format": {"type": "json_object"}}, {"logit_bias": {"999999": 1}}),
]


def test_wrong_field_is_named(app: Starlette) -> None:
    for more in WRONG:
        (param,) = more
        found = error_of(call(app, CHAT, {**ASKED, **more}), 400)["param"]
        assert found.partition("[")[0] == param, more


# ---- how far the prompt is ----


@pytest.mark.parametrize(("path", "n"), [(CHAT, 1), (CHAT, 2), (COMPLETIONS, 1)])
def test_stream_tells_how_far_its_prompt_is_until_the_answer_begins(path: str, n: int) -> None:
    backend = GatedBackend(2, 256, hold_at=0)
    prompt = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    sampling = {"max_tokens": 6, "n": n, "seed": 1}
    asked = {**prompt, **sampling, "stream": True, "return_progress": True}
    with (
        Engine(backend) as engine,
        fake_app(engine=engine, keep_alive_s=0.01, status_after_s=60) as app,
    ):
        desk, n_looks = app.state.desk, [0]

        def look() -> list[SlotState]:
            n_looks[0] += 1
            if n_looks[0] == 5:
                backend.release()
            (visit,) = desk._visits.values()
            id = visit.response.ids[0] + ("[0]" if n > 1 else "")
            others = SlotState(0, "running", 9, "another", 9, 1), SlotState(1, "free", 0)
            if n_looks[0] == 1:  # it waits
                return [*others]
            return [*others, SlotState(2, "running", 4, id, 7, min(7, n_looks[0]), 0, 1)]

        desk.slots = EngineQuestion(look, desk.clock)
        events = events_of(call(app, path, asked))
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [(each["total"], each["cache"]) for each in told] == [(7, 1)] * len(told)
    assert [each["processed"] for each in told][:4] == [2, 3, 4, 5]
    times = [each["time_ms"] for each in told]
    assert times == sorted(times)
    said = [i for i, event in enumerate(events) if "prompt_progress" in event]
    texts = [i for i, event in enumerate(events) if _text_in(event)]
    assert said[-1] < texts[0]
    if path == CHAT:
        assert [e["choices"][0]["delta"].get("role") for e in events[:n]] == ["assistant"] * n


def _text_in(event: dict[str, Any]) -> str:
    (choice,) = event["choices"]
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


@pytest.mark.parametrize(
    ("path", "more"),
    [(CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": ["a", "b"], "stream": True})],
)
def test_progress_that_has_no_place_is_ignored_by_name(
    app: Starlette, path: str, more: dict[str, Any]
) -> None:
    answer = call(app, path, {"max_tokens": 2, "return_progress": True, **more})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "return_progress"
    assert "prompt_progress" not in answer.text
