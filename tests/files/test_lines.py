from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import PromptTooLongError
from cbatch.files.output.encoders import dump
from cbatch.options import RunOptions
from cbatch.response import DRAFT_COUNTS, TokenLogprob, ToolCall
from tests.files.samples import ANSWER, error_of, failed, read, records, write

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.files.input.item import Item

GOOD = '{"id": "a", "prompt": "x"}\n'


def items(folder: Path, *lines: str | bytes) -> list[Item]:
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    return read(write(folder / "in.jsonl", data), format="cbatch")


def item(folder: Path, **request: Any) -> Item:
    [found] = items(folder, json.dumps(request))
    return found


def result_of(folder: Path, result: Any = ANSWER, line: str = GOOD) -> Any:
    return json.loads(records(write(folder / "in.jsonl", line), result=result))


def test_line_is_an_item_with_its_id_place_and_options(tmp_path: Path) -> None:
    found = item(tmp_path, id="a", messages=[{"role": "user", "content": "x"}], options={"seed": 3})
    assert (found.number, found.id, found.is_labelled, found.error) == (1, "a", True, None)
    assert found.place == f"{tmp_path}/in.jsonl, line 1"
    assert found.prompt is not None
    assert (found.prompt.id, found.prompt.options) == (None, RunOptions(seed=3))


def test_blank_lines_are_not_counted_but_places_are_those_of_the_file(tmp_path: Path) -> None:
    found = items(tmp_path, "", '{"prompt": "x"}', "  \r", '{"prompt": "y"}\r')
    assert [(i.number, i.id, i.place[-6:], i.is_labelled) for i in found] == [
        (1, "line-1", "line 2", False),
        (2, "line-2", "line 4", False),
    ]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("nope", "invalid_json_line", "not JSON: Expecting value at column 1: nope"),
        # which ends in the middle: not in the line below
        (
            '{"prompt": "x"',
            "invalid_json_line",
            "not JSON: Expecting ',' delimiter at column 15: {",
        ),
        (
            '{"prompt": "x", "max_tokens": 4}',
            "invalid_request",
            'put it in "options": {"options": ',
        ),
        (
            '{"prompt": "x", "options": {"seed": -%s}}' % ("9" * 5000),
            "invalid_json_line",
            "^the integer -9{19}… has 5,000 digits; at most 4,300 are allowed: {",
        ),
        (
            '{"prompt": "x", "options": {"json_schema": "{\\"maximum\\": %s}"}}' % ("9" * 5000),
            "invalid_request",
            "^json_schema: the integer 9{20}… has 5,000 digits; at most 4,300 are allowed$",
        ),
        ('{"prompt": "x"', "invalid_json_line", "not JSON"),
        ("[" * 100_000, "invalid_json_line", "nested more than 128 deep"),
        ("[1]", "invalid_json_line", "not a JSON object"),
        (b'{"prompt": "\xff"}', "invalid_utf8", "not UTF-8: invalid start byte at byte 12"),
        ('{"prompt": "\\ud800"}', "invalid_json_line", "half of a surrogate pair"),
        ('{"id": 5, "prompt": "x"}', "invalid_request", "id must be a non-empty string, not 5"),
        ('{"id": "", "prompt": "x"}', "invalid_request", "id must be a non-empty string"),
        ('{"id": "a"}', "invalid_request", "give one of messages, prompt and tokens, not none"),
        ('{"prompt": "x", "tokens": [1]}', "invalid_request", "give one of"),
        ('{"prompt": ""}', "invalid_request", "the prompt is empty"),
        ('{"prompt": "x", "foo": 1}', "invalid_request", "unknown key 'foo'; .* give a template"),
        ('{"prompt": "x", "options": [1]}', "invalid_request", "options must be an object"),
        ('{"prompt": "x", "options": {"top_k": true}}', "invalid_request", "top_k must be"),
        ('{"prompt": "x", "options": {"foo": 1}}', "unsupported_parameter", "unknown option 'foo'"),
    ],
)
def test_line_that_is_wrong_is_an_item_with_its_error(
    tmp_path: Path, line: str | bytes, code: str, said: str
) -> None:
    bad, good = items(tmp_path, line, GOOD)
    assert error_of(bad).code == code
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(error_of(bad).message)
    assert good.error is None


FLAWS = {
    "half of a pair": (b'"\\ud800"', "invalid_json_line"),
    "no UTF-8": (b'"\xff"', "invalid_utf8"),
    "too deep": (b"[" * 200 + b"]" * 200, "invalid_json_line"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaw_in_a_text_leaves_the_line_its_id(tmp_path: Path, flaw: str) -> None:
    value, code = FLAWS[flaw]
    [found] = items(tmp_path, b'{"prompt": %b, "id": "\xc3\xa4"}' % value)
    assert (found.id, found.is_labelled, error_of(found).code) == ("ä", True, code)


@pytest.mark.parametrize("id", [rb'"a\ud800"', b'"a\xff"', b"[7]", b"null"])
def test_id_that_is_no_text_is_none(tmp_path: Path, id: bytes) -> None:
    [found] = items(tmp_path, b'{"prompt": "\xff", "id": %b}' % id)
    assert (found.id, found.is_labelled, error_of(found).code) == ("line-1", False, "invalid_utf8")


def test_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    [found] = items(tmp_path, '{"prompt": "\\ud83d\\ude00"}')
    assert found.prompt is not None
    assert found.prompt.prompt == "😀"


def test_line_over_the_limit_is_an_item_with_its_error(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", GOOD + "x" * 100 + "\n" + GOOD)
    first, second, third = read(path, max_line_bytes=60)
    assert error_of(second).code == "line_too_long"
    assert "101 bytes, but at most 60 are allowed" in error_of(second).message
    assert (first.error, third.error, third.number) == (None, None, 3)


def test_options_that_are_alike_are_one_object(tmp_path: Path) -> None:
    said = ['{"seed": 1}', '{"seed": 1}', '{"temperature": 1}', '{"temperature": 1.0}']
    said += [f'{{"seed": {seed}}}' for seed in range(200)]
    lines = [f'{{"prompt": "x", "options": {options}}}' for options in said]
    found = [item.prompt.options for item in items(tmp_path, *lines) if item.prompt]
    assert found[0] is found[1]
    assert found[2] is not found[3]
    assert [RunOptions.of(options).seed for options in found[4:]] == list(range(200))


def test_result_is_a_line_with_the_items_id(tmp_path: Path) -> None:
    assert result_of(tmp_path) == {
        "id": "a",
        "text": "Hi!",
        "finish_reason": "stop",
        "error": None,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "context_shifts": 0,
            "reasoning_tokens": 0,
            "image_tokens": 0,
            "audio_tokens": 0,
        },
        "timings": {
            "queue_s": 0.1,
            "ttft_s": 0.2,
            "total_s": 0.3,
            "prompt_tps": 30.0,
            "generation_tps": 20.0,
            "last_token_s": 0.25,
        },
        "seed": 5,
        "digest": "00" * 16,
    }


def test_result_has_what_there_is_besides_text(tmp_path: Path) -> None:
    call = ToolCall("c1", "look", "{}")
    full = replace(ANSWER, reasoning="hm", tool_calls=(call,), warnings=("careful",))
    line = result_of(tmp_path, full)
    assert line["reasoning"] == "hm"
    assert line["tool_calls"] == [call.as_dict()]
    assert line["warnings"] == ["careful"]


def test_draft_tokens_are_written_where_there_were_any(tmp_path: Path) -> None:
    drafted = replace(ANSWER.timings, n_draft_tokens=9, n_accepted_tokens=4, n_job_draft_tokens=2)
    assert "n_draft_tokens" not in result_of(tmp_path, ANSWER)["timings"]
    written = result_of(tmp_path, replace(ANSWER, timings=drafted))["timings"]
    assert {name: n for name, n in written.items() if name.startswith("n_")} == {
        **dict.fromkeys(DRAFT_COUNTS, 0),
        "n_draft_tokens": 9,
        "n_accepted_tokens": 4,
        "n_job_draft_tokens": 2,
    }


@pytest.mark.parametrize("reason", ["END", 0, 7])
def test_what_ended_an_answer_is_written_for_it_and_for_each_choice(
    tmp_path: Path, reason: str | int
) -> None:
    ended = replace(ANSWER, stop_reason=reason)
    line = result_of(tmp_path, replace(ended, choices=(ended, ANSWER)))
    assert line["stop_reason"] == line["choices"][0]["stop_reason"] == reason
    assert "stop_reason" not in line["choices"][1]


def test_logprobs_are_written_with_ids_and_text(tmp_path: Path) -> None:
    tokens = (
        TokenLogprob(1, b"Hi", -0.5, (TokenLogprob(9, b"\xc3", -inf),)),
        TokenLogprob(2, b"!", 0.0),
    )
    assert result_of(tmp_path, replace(ANSWER, logprobs=tokens))["logprobs"] == [
        {
            "token_id": 1,
            "text": "Hi",
            "logprob": -0.5,
            "top": [{"token_id": 9, "text": "bytes:\\xc3", "logprob": -9999.0}],
        },
        {"token_id": 2, "text": "!", "logprob": 0.0},
    ]


def test_several_answers_are_written_as_choices(tmp_path: Path) -> None:
    both = (ANSWER, replace(ANSWER, text="Ho!", seed=6, reasoning="hm"))
    line = result_of(tmp_path, replace(ANSWER, choices=both))
    assert line["text"] == "Hi!"
    assert line["choices"] == [
        {"text": "Hi!", "finish_reason": "stop", "error": None, "seed": 5},
        {"text": "Ho!", "finish_reason": "stop", "error": None, "seed": 6, "reasoning": "hm"},
    ]


def test_failed_result_has_its_error(tmp_path: Path) -> None:
    line = result_of(tmp_path, failed(PromptTooLongError(9, 8)))
    assert line["error"]["type"] == "PromptTooLongError"
    assert "9 tokens" in line["error"]["message"]


def test_wrong_line_becomes_a_line_with_place_and_reason(tmp_path: Path) -> None:
    line = result_of(tmp_path, line='{"prompt": "", "id": "a"}')
    assert line["id"] == "a"
    assert line["finish_reason"] == "error"
    assert line["error"] == {
        "type": "ConfigError",
        "message": f"{tmp_path}/in.jsonl, line 1: the prompt is empty",
        "code": "invalid_request",
    }
    [found] = items(tmp_path, '{"tokens": [1, 2], "options": {"foo": 1}}')
    assert error_of(found).param == "foo"


def test_half_a_surrogate_pair_in_an_answer_is_written_as_an_escape(tmp_path: Path) -> None:
    assert result_of(tmp_path, replace(ANSWER, text="\ud800ä"))["text"] == "\ud800ä"
    assert json.loads(dump(["\ud800ä", nan])) == ["\ud800ä", None]
