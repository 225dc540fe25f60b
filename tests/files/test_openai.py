from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import inf, nan
from typing import TYPE_CHECKING, Any

import pytest
from openai.types import BatchError, Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from cbatch.errors import (
    CBatchError,
    ConfigError,
    DeadlineError,
    PromptTooLongError,
    RequestCancelledError,
    RequestFailedError,
    UnsupportedOptionError,
)
from cbatch.files.input.json_requests import CHAT, COMPLETIONS
from cbatch.options import RunOptions
from cbatch.response import TokenLogprob, ToolCall, Usage
from tests.files.samples import ANSWER, error_of, failed, read, records, write

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.files.input.item import Item
    from cbatch.response import BatchResult

MESSAGES = [{"role": "user", "content": "hi"}]


def request(id: str | None = "a", url: str = CHAT, **body: Any) -> dict[str, Any]:
    """A batch request; of a chat unless the body has a prompt."""
    content = {} if "prompt" in body or "messages" in body else {"messages": MESSAGES}
    return {
        "custom_id": id,
        "method": "POST",
        "url": COMPLETIONS if "prompt" in body and url == CHAT else url,
        "body": {"model": "m", **content, **body},
    }


def path_of(folder: Path, *requests: dict[str, Any]) -> str:
    return write(folder / "in.jsonl", "\n".join(map(json.dumps, requests)))


def item(folder: Path, **said: Any) -> Item:
    [found] = read(path_of(folder, request(**said)))
    return found


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (rb'"\ud800"', "invalid_json_line"),
        (b'"\xff"', "invalid_utf8"),
        (b"[" * 200 + b"]" * 200, "invalid_json_line"),
    ],
)
def test_flaw_in_a_text_leaves_the_request_its_custom_id(
    tmp_path: Path, text: bytes, code: str
) -> None:
    line = json.dumps(request(prompt="TEXT")).encode().replace(b'"TEXT"', text)
    path = write(tmp_path / "in.jsonl", b"%b\n%b" % (line, line.replace(b'"a"', rb'"\ud800"')))
    first, second = records(path, format="openai").splitlines()
    assert json.loads(first)["custom_id"] == "a"
    assert json.loads(first)["error"]["code"] == code
    assert json.loads(second)["custom_id"] == "line-2"


def line_of(folder: Path, result: BatchResult = ANSWER, **said: Any) -> Any:
    return json.loads(records(path_of(folder, request(**said)), result=result))


def body_of(folder: Path, result: BatchResult = ANSWER, **said: Any) -> Any:
    return line_of(folder, result, **said)["response"]["body"]


def test_request_is_an_item_with_its_options(tmp_path: Path) -> None:
    found = item(tmp_path, max_tokens=5, stop="x", logit_bias={"7": -100}, top_k=3)
    assert (found.id, found.is_labelled) == ("a", True)
    assert found.prompt is not None
    assert found.prompt.options == RunOptions(max_tokens=5, stop="x", logit_bias={7: -100}, top_k=3)
    assert found.prompt.messages == tuple(MESSAGES)


@pytest.mark.parametrize(
    "ignored",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"},
        {"stream": False, "stream_options": {"include_usage": True}},
        {"modalities": ["text"]},
        {"temperature": None, "tools": None, "audio": None},
        {"messages": [{**MESSAGES[0], "name": None, "tool_calls": None}]},
    ],
)
def test_names_that_do_not_change_the_answer_are_ignored(
    tmp_path: Path, ignored: dict[str, Any]
) -> None:
    assert item(tmp_path, **ignored).prompt == item(tmp_path).prompt


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [
        ("x", "x", None),
        (["x"], "x", None),
        ([1, 2], None, (1, 2)),
        ([[1, 2]], None, (1, 2)),
    ],
)
def test_completion_takes_text_or_tokens(
    tmp_path: Path, prompt: object, text: str | None, tokens: tuple[int, ...] | None
) -> None:
    found = item(tmp_path, prompt=prompt).prompt
    assert found is not None
    assert (found.prompt, found.tokens) == (text, tokens)


@pytest.mark.parametrize(
    ("body", "code", "param", "said"),
    [
        ({"stream": True}, "invalid_request", "stream", "stream must be False in a batch file"),
        ({"parallel_tool_calls": "no"}, "invalid_request", "parallel_tool_calls", "True or False"),
        ({"messages": None}, "invalid_request", "messages", "messages is missing"),
        ({"messages": []}, "invalid_request", None, "the prompt is empty"),
        ({"messages": ["x"]}, "invalid_request", "messages", "must be a mapping"),
        ({"prompt": ["x", "y"]}, "invalid_request", "prompt", "a list of 2 prompts"),
        ({"prompt": [[1], [2]]}, "invalid_request", "prompt", "a list of 2 prompts"),
        ({"prompt": 5}, "invalid_request", "prompt", "prompt must be a string, not int"),
        ({"prompt": [True]}, "invalid_request", None, "tokens must be token ids"),
        ({"model": 5}, "invalid_request", "model", "model must be a string, not 5"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens", "max_tokens must be 1 …"),
        (
            {"stop": "x", "stop_token_ids": [-1]},
            "invalid_request",
            "stop_token_ids",
            "stop_token_ids must be",
        ),
        ({"foo": 1}, "unsupported_parameter", "foo", "unknown option 'foo'"),
    ],
)
def test_body_that_is_wrong_is_answered_with_400(
    tmp_path: Path, body: dict[str, Any], code: str, param: str | None, said: str
) -> None:
    error = error_of(item(tmp_path, **body))
    assert (error.code, error.param) == (code, param)
    assert said in error.message
    line = line_of(tmp_path, **body)
    assert (line["custom_id"], line["error"]) == ("a", None)
    assert line["response"]["status_code"] == 400
    answer = line["response"]["body"]["error"]
    assert answer["message"] == f"{tmp_path}/in.jsonl, line 1: {error.message}"
    assert (answer["type"], answer["param"]) == ("invalid_request_error", param)
    assert answer["code"] == (None if code == "invalid_request" else code)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"custom_id": None}, "missing_custom_id"),
        ({"custom_id": 5}, "invalid_custom_id"),
        ({"custom_id": ""}, "invalid_custom_id"),
        ({"method": "GET"}, "invalid_method"),
        ({"url": ["/v1/completions"]}, "invalid_url"),
        ({"body": 5}, "invalid_request"),
        ({"foo": 1}, "invalid_request"),
    ],
)
def test_line_that_is_no_request_has_no_response(
    tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    path = path_of(tmp_path, request() | change, request("b"))
    bad, good = read(path)
    assert error_of(bad).code == code
    assert good.error is None
    line = json.loads(records(path).splitlines()[0])
    if code == "invalid_request":
        assert error_of(bad).param in change
        return
    assert line["response"] is None
    assert line["error"] == {"code": code, "message": f"{bad.place}: {error_of(bad).message}"}
    assert line["custom_id"] == ("a" if "custom_id" not in change else "line-1")


def test_other_model_than_before_is_refused(tmp_path: Path) -> None:
    requests = [request(id, model=m) for id, m in zip("abcd", ("m", "n", None, ""), strict=True)]
    a, b, c, d = read(path_of(tmp_path, *requests))
    assert error_of(b).code == "model_mismatch"
    assert "'n' differs from that of the lines before: 'm'" in error_of(b).message
    assert (a.error, c.error, d.error) == (None, None, None)


def test_requests_of_openais_types_are_read(tmp_path: Path) -> None:
    body: CompletionCreateParamsNonStreaming = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["x"],
        "seed": 1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
    }
    TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body)
    [found] = read(path_of(tmp_path, request() | {"body": body}))
    assert found.error is None
    assert found.prompt is not None
    assert isinstance(found.prompt.options, RunOptions)
    assert (found.prompt.options.max_tokens, found.prompt.options.n) == (5, 2)


def test_errors_of_lines_are_openais(tmp_path: Path) -> None:
    error = error_of(item(tmp_path, foo=1))
    said = BatchError.model_validate(asdict(error) | {"line": 1}, strict=True)
    assert (said.code, said.param) == ("unsupported_parameter", "foo")


def test_both_urls_are_served_in_one_file_unless_the_batch_is_for_one(tmp_path: Path) -> None:
    path = path_of(tmp_path, request("a"), request("b", prompt="x"))
    assert [item.error for item in read(path)] == [None, None]
    a, b = read(path, url=CHAT)
    assert a.error is None
    assert error_of(b).code == "url_mismatch"


def test_batch_for_a_url_that_is_not_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'/v1/images' is not supported"):
        read(path_of(tmp_path, request()), url="/v1/images")


def test_answer_is_the_documented_line(tmp_path: Path) -> None:
    line = line_of(tmp_path)
    key = line["id"].removeprefix("batch_req_")
    assert len(key) == 24
    assert line["id"] == line_of(tmp_path, seed=1)["id"] != line_of(tmp_path, id="b")["id"]
    assert body_of(tmp_path, model=None)["model"] == "the model"  # that of the run
    assert line == {
        "id": f"batch_req_{key}",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{'00' * 16}",
            "body": {
                "id": f"chatcmpl-{key}",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hi!"},
                        "finish_reason": "stop",
                        "logprobs": None,
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }


def test_chat_round_trips_through_openais_types(tmp_path: Path) -> None:
    call = ToolCall("c1", "look", '{"at": 1}')
    full = replace(
        ANSWER,
        text="",
        reasoning="hm",
        tool_calls=(call,),
        finish_reason="tool_calls",
        usage=Usage(3, 2, 1),
    )
    body = body_of(tmp_path, full)
    found = ChatCompletion.model_validate(body, strict=True)
    message = found.choices[0].message
    assert message.tool_calls is not None
    assert (message.tool_calls[0].id, message.content) == ("c1", None)
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == 1
    assert message.model_extra == {"reasoning_content": "hm"}
    assert found.to_dict(exclude_unset=True) == body


TOKENS = (
    TokenLogprob(1, b"Hi", -0.5, (TokenLogprob(1, b"Hi", -0.5), TokenLogprob(9, b"\xc3", -inf))),
    TokenLogprob(2, b"\xc3", -0.25, (TokenLogprob(2, b"\xc3", -0.25),)),
    TokenLogprob(3, b"\xa4!", -0.125),
)


LIKELIEST = (TokenLogprob(1, b"a", -0.1), TokenLogprob(2, b"b", -2.0))


def test_logprobs_of_a_chat_round_trip_through_openais_types(tmp_path: Path) -> None:
    body = body_of(tmp_path, replace(ANSWER, text="Hiä!", logprobs=TOKENS), logprobs=True)
    found = ChatCompletion.model_validate(body, strict=True)
    assert found.to_dict(exclude_unset=True) == body
    assert found.choices[0].logprobs is not None
    content = found.choices[0].logprobs.content
    assert content is not None
    assert [(t.token, t.bytes, t.logprob) for t in content] == [
        ("Hi", [72, 105], -0.5),
        ("bytes:\\xc3", [195], -0.25),
        ("bytes:\\xa4\\x21", [164, 33], -0.125),
    ]
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -9999.0]


def test_logprobs_of_a_completion_round_trip_through_openais_types(tmp_path: Path) -> None:
    result = replace(ANSWER, text="Hiä!", logprobs=TOKENS)
    body = body_of(tmp_path, result, prompt="x", logprobs=2)
    found = Completion.model_validate(body, strict=True)
    assert found.to_dict(exclude_unset=True) == body
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 2, 2]
    assert logprobs.token_logprobs == [-0.5, -0.25, -0.125]
    assert logprobs.top_logprobs == [
        {"Hi": -0.5, "bytes:\\xc3": -9999.0},
        {"bytes:\\xc3": -0.25},
        {"bytes:\\xa4\\x21": -0.125},
    ]


@pytest.mark.parametrize(
    ("token", "logprob", "tops"),
    [
        (TokenLogprob(1, b"a", -0.1, LIKELIEST), -0.1, {"a": -0.1, "b": -2.0}),
        (TokenLogprob(2, b"b", -2.0000001, LIKELIEST), -2.0, {"a": -0.1, "b": -2.0}),
        (TokenLogprob(3, b"c", -7.0, LIKELIEST), -7.0, {"a": -0.1, "b": -2.0, "c": -7.0}),
        (TokenLogprob(4, b"a", -7.0, LIKELIEST), -7.0, {"a": -0.1, "b": -2.0}),
    ],
    ids=["likeliest", "its alternative's number", "outside", "another of the same text"],
)
def test_sampled_token_of_a_completion_is_among_the_likeliest(
    tmp_path: Path, token: TokenLogprob, logprob: float, tops: dict[str, float]
) -> None:
    result = replace(ANSWER, logprobs=(token,))
    found = body_of(tmp_path, result, prompt="x", logprobs=2)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [logprob]
    assert [*found["top_logprobs"][0].items()] == [*tops.items()]  # the likeliest first


@pytest.mark.parametrize(("n", "tops"), [(2, [None, {"a": -0.1, "b": -2.0, "c": -7.0}]), (0, None)])
def test_first_token_of_an_echoed_prompt_has_neither_number_nor_likeliest(
    tmp_path: Path, n: int, tops: object
) -> None:
    likeliest = LIKELIEST if n else ()
    tokens = (TokenLogprob(1, b"x", nan), TokenLogprob(3, b"c", -7.0, likeliest))
    result = replace(ANSWER, text="xc", logprobs=tokens)
    body = body_of(tmp_path, result, prompt="x", logprobs=n, echo=True)
    found = body["choices"][0]
    assert (found["text"], found["logprobs"]["token_logprobs"]) == ("xc", [None, -7.0])
    assert found["logprobs"]["top_logprobs"] == tops


def test_logprobs_of_the_prompt_stand_beside(tmp_path: Path) -> None:
    scored = (None, TokenLogprob(1, b"x", -0.5))
    body = body_of(tmp_path, replace(ANSWER, prompt_logprobs=scored), prompt_logprobs=0)
    found = [None, {"token_id": 1, "text": "x", "logprob": -0.5}]
    assert body["cbatch"] == {"prompt_logprobs": found}
    ChatCompletion.model_validate(body, strict=True)


@pytest.mark.parametrize("said", [{}, {"prompt": "x"}])
def test_several_answers_are_several_choices(tmp_path: Path, said: dict[str, Any]) -> None:
    both = (ANSWER, replace(ANSWER, finish_reason="length"))
    body = body_of(tmp_path, replace(ANSWER, choices=both, usage=Usage(3, 4)), n=2, **said)
    kind = Completion if said else ChatCompletion
    found = kind.model_validate(body, strict=True)
    assert [(c.index, c.finish_reason) for c in found.choices] == [(0, "stop"), (1, "length")]
    assert body["usage"]["total_tokens"] == 7


@pytest.mark.parametrize(("reason", "said"), [("window", {}), ("timeout", {"prompt": "x"})])
def test_reason_that_openai_does_not_know_is_length_and_said_beside(
    tmp_path: Path, reason: Any, said: dict[str, Any]
) -> None:
    body = body_of(tmp_path, replace(ANSWER, finish_reason=reason, warnings=("w",)), **said)
    kind = Completion if said else ChatCompletion
    assert kind.model_validate(body, strict=True).choices[0].finish_reason == "length"
    assert body["cbatch"] == {"finish_reasons": [reason], "warnings": ["w"]}


def test_what_ended_an_answer_is_said_beside_it_for_each_choice(tmp_path: Path) -> None:
    ended = replace(ANSWER, stop_reason="END")
    assert body_of(tmp_path, ended)["cbatch"] == {"stop_reasons": ["END"]}
    several = replace(ANSWER, choices=(ANSWER, replace(ANSWER, stop_reason=0)))
    assert body_of(tmp_path, several)["cbatch"] == {"stop_reasons": [None, 0]}
    assert "cbatch" not in body_of(tmp_path, ANSWER)


@pytest.mark.parametrize(
    ("error", "status", "type", "code"),
    [
        (PromptTooLongError(9, 8), 400, "invalid_request_error", "context_length_exceeded"),
        (UnsupportedOptionError("foo"), 400, "invalid_request_error", "unsupported_parameter"),
        (ConfigError("bad"), 400, "invalid_request_error", None),
        (RequestFailedError("oh"), 500, "server_error", "server_error"),
    ],
)
def test_failed_request_is_answered_with_its_status(
    tmp_path: Path, error: CBatchError, status: int, type: str, code: str | None
) -> None:
    line = line_of(tmp_path, failed(error))
    assert line["error"] is None
    assert line["response"]["status_code"] == status
    said = line["response"]["body"]["error"]
    assert (said["message"], said["type"], said["code"]) == (str(error), type, code)


@pytest.mark.parametrize(
    ("error", "code"),
    [(RequestCancelledError("c"), "batch_cancelled"), (DeadlineError(1.0), "request_timeout")],
)
def test_request_that_never_ran_has_no_response(
    tmp_path: Path, error: CBatchError, code: str
) -> None:
    line = line_of(tmp_path, failed(error))
    assert line["response"] is None
    assert line["error"] == {"code": code, "message": str(error)}


def test_other_inputs_are_answered_as_chats_or_completions(tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.jsonl", '{"prompt": "x"}\n{"messages": [{"role": "user", "content": "x"}]}'
    )
    first, second = map(json.loads, records(path, to="openai").splitlines())
    assert first["response"]["body"]["object"] == "text_completion"
    assert (second["response"]["body"]["object"], second["custom_id"]) == (
        "chat.completion",
        "line-2",
    )
