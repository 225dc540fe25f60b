"""llama-server's own completions, infill, and what it does by slot and for adapters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import Engine
from cbatch.backend.fake import END_TOKEN, FakeBackend
from tests.server.clients import call, error_of, fake_app

if TYPE_CHECKING:
    import httpx
    from starlette.applications import Starlette

COMPLETION, INFILL = "/completion", "/infill"
ASKED = {"prompt": "ab", "n_predict": 4, "seed": 1, "ignore_eos": True}


def parts_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_completion_has_the_format_of_llama_server(app: Starlette) -> None:
    body = call(app, COMPLETION, {**ASKED, "stop": ["never"], "return_tokens": True}).json()
    assert body.keys() == {
        *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted"),
        *("tokens_evaluated", "generation_settings", "prompt", "has_new_line", "truncated"),
        *("stop_type", "stopping_word", "tokens_cached", "timings"),
    }
    assert (body["index"], body["stop"], body["id_slot"], body["prompt"]) == (0, True, -1, "ab")
    assert len(body["tokens"]) == body["tokens_predicted"] == body["timings"]["predicted_n"] == 4
    assert (body["tokens_evaluated"], body["tokens_cached"]) == (2, 5)
    assert (body["stop_type"], body["stopping_word"], body["truncated"]) == ("limit", "", False)
    settings = body["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["stop"]) == (4, 1, ["never"])
    assert (settings["temperature"], settings["top_k"], settings["stream"]) == (0.8, 40, False)


def test_settings_tell_the_biases_of_tokens(app: Starlette) -> None:
    biases = {"ignore_eos": True, "logit_bias": [[97, 1.5], [98, False]]}
    usual, biased = (
        call(app, COMPLETION, {**ASKED, **more}).json() for more in ({"ignore_eos": False}, biases)
    )
    assert usual["generation_settings"]["logit_bias"] == []
    assert biased["generation_settings"]["logit_bias"] == [
        {"token": 97, "bias": 1.5},
        {"token": 98, "bias": None},
        {"token": END_TOKEN, "bias": None},
    ]


def test_completion_says_what_ended_it() -> None:
    with fake_app(2, 16) as app:
        text = call(app, COMPLETION, ASKED).json()["content"]
        word = call(app, COMPLETION, {**ASKED, "stop": [text[-1]]}).json()
        full = call(app, COMPLETION, {**ASKED, "n_predict": -1}).json()
    assert (word["stop_type"], word["stopping_word"]) == ("word", text[-1])
    assert (full["stop_type"], full["truncated"]) == ("limit", True)
    assert full["generation_settings"]["n_predict"] == -1


def test_stream_ends_with_the_whole_and_without_done(app: Starlette) -> None:
    whole = call(app, COMPLETION, ASKED).json()
    *parts, last = parts_of(call(app, COMPLETION, {**ASKED, "stream": True}))
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert all(not part["stop"] and part["tokens"] for part in parts)
    assert parts[-1]["tokens_predicted"] == 4
    assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
    for name in ("stop_type", "prompt", "tokens_evaluated", "model"):
        assert last[name] == whole[name]
    assert last["generation_settings"]["stream"]


def test_prompts_may_be_texts_tokens_objects_and_mixed(app: Starlette) -> None:
    alike: list[Any] = ["ab", [97, 98], {"prompt_string": "ab"}, ["a", 98], [97, "b"], ["ab", ""]]
    one = [call(app, COMPLETION, {**ASKED, "prompt": said}).json() for said in alike[:5]]
    all = call(app, COMPLETION, {**ASKED, "prompt": alike[:5]}).json()
    two = call(app, COMPLETION, {**ASKED, "prompt": ["ab", "ab"]}).json()
    assert len({answer["content"] for answer in [*one, *all, *two]}) == 1
    assert [answer["index"] for answer in all] == [*range(5)]
    assert [answer["prompt"] for answer in all] == ["ab", [97, 98], "ab", ["a", 98], [97, "b"]]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "prompt must have a text or a token"),
        (3, "prompt must be a string or a list of token ids"),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "multimodal_data"),
        ({}, "prompt must be a string or a list of token ids"),
        (["a", -3, 4], "must be a list of token ids"),
        ([["a", None]], "must be a list of token ids"),
    ],
)
def test_wrong_prompt_is_refused(app: Starlette, prompt: Any, words: str) -> None:
    error = error_of(call(app, COMPLETION, {**ASKED, "prompt": prompt}), 400)
    assert error["param"] == "prompt"
    assert words in error["message"]


def test_probabilities_have_the_likeliest(app: Starlette) -> None:
    asked = {**ASKED, "n_probs": 3}
    whole = call(app, COMPLETION, asked).json()["completion_probabilities"]
    *parts, last = parts_of(call(app, COMPLETION, {**asked, "stream": True}))
    assert [len(token["top_logprobs"]) for token in whole] == [3] * 4
    assert whole[0].keys() == {"id", "token", "logprob", "bytes", "top_logprobs"}
    assert [t for part in parts for t in part["completion_probabilities"]] == whole
    assert "completion_probabilities" not in last


def test_response_fields_are_the_only_ones(app: Starlette) -> None:
    wanted = ["content", "generation_settings/n_predict", "no", "timings/no/way", ""]
    asked = {**ASKED, "response_fields": wanted}
    body = call(app, COMPLETION, asked).json()
    last = parts_of(call(app, COMPLETION, {**asked, "stream": True}))[-1]
    assert body.keys() == last.keys() == {"content", "generation_settings/n_predict"}
    assert body["generation_settings/n_predict"] == 4
    for wrong in (3, [str(i) for i in range(200)], ["a/" * 100]):
        error = error_of(call(app, COMPLETION, {**ASKED, "response_fields": wrong}), 400)
        assert error["param"] == "response_fields"


# ---- infill ----

FIM = {"pre": 300, "suf": 301, "mid": 302}
PLACE = {"input_prefix": "ab", "prompt": "c", "input_suffix": "d"}
OF_PLACE = [300, 97, 98, 99, 301, 100, 302]


def filled(asked: dict[str, Any], expected: list[int], fim: dict[str, int] = FIM) -> None:
    """Check that a place is asked of the model as these tokens."""
    backend = FakeBackend(2, 128)
    backend.fim = fim
    options = {"n_predict": 4, "seed": 1, "ignore_eos": True}
    with fake_app(engine=Engine(backend)) as app:
        response = call(app, INFILL, {**options, **asked})
        same = call(app, COMPLETION, {**options, "prompt": expected})
    assert response.status_code == 200, response.text
    assert response.json()["content"] == same.json()["content"]
    assert response.json()["tokens_evaluated"] == len(expected)


def test_infill_has_what_stands_before_and_behind() -> None:
    filled(PLACE, OF_PLACE)
    filled({"input_prefix": "ab", "input_suffix": ""}, [300, 97, 98, 301, 302])


def test_infill_has_other_files_first() -> None:
    snippet = [*b"\n\n--- snippet ---\n\n"]
    files = [{"filename": "f", "text": "x"}, {"text": "y"}]
    filled({**PLACE, "input_extra": files}, [*snippet, 120, *snippet, 121, *OF_PLACE])
    names = [305, *b"myproject\n", 304, *b"f\n", 120, 304, *b"tmp\n", 121, 304, *b"filename\n"]
    filled({**PLACE, "input_extra": files}, [*names, *OF_PLACE], {**FIM, "sep": 304, "rep": 305})


def test_infill_keeps_what_is_near_the_place() -> None:
    place = {"input_prefix": "a" * 100 + "b" * 90, "input_suffix": "d" * 28 + "e" * 100}
    near = [300, *b"b" * 90, 301, *b"d" * 28, 302]  # of 128 cells less 4 of output
    filled({**place, "input_extra": [{"text": "x"}]}, [*b"--\n\nx"[-3:], *near])


def test_infill_takes_what_editors_send() -> None:
    limits = {"t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "n_indent": 2}
    samplers = ["top_k", "top_p", "infill"]
    backend = FakeBackend(2, 128)
    backend.fim = FIM
    with fake_app(engine=Engine(backend)) as app:
        response = call(app, INFILL, {**PLACE, **limits, "samplers": samplers, "n_predict": 1})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == (
        "t_max_prompt_ms, t_max_predict_ms, n_indent, samplers.infill"
    )


def test_model_without_tokens_for_it_refuses_infill(app: Starlette) -> None:
    error = error_of(call(app, INFILL, PLACE), 501)
    assert error["code"] == "not_implemented"
    assert "no prefix and no suffix and no middle token" in error["message"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 3}, "input_suffix"),
        ({"prompt": [1]}, "prompt"),
        ({"input_extra": {}}, "input_extra"),
        ({"input_extra": [{"filename": "ok"}]}, "input_extra"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra"),
    ],
)
def test_wrong_place_is_refused(app: Starlette, more: dict[str, Any], field: str) -> None:
    assert error_of(call(app, INFILL, {**PLACE, **more}), 400)["param"] == field


# ---- slots and adapters ----


def test_adapters_are_listed_and_not_set() -> None:
    backend = FakeBackend(2, 64)
    with fake_app(engine=Engine(backend)) as app:
        assert call(app, "/lora-adapters").json() == []
        error = error_of(call(app, "/lora-adapters", [{"id": 0, "scale": 1.0}]), 501)
    assert "name an adapter as model or adapter" in error["message"]
    backend = FakeBackend(2, 64)
    backend.adapters = ("x",)
    with fake_app(engine=Engine(backend)) as app:
        assert call(app, "/lora-adapters").json() == [{"id": 0, "path": "x", "scale": 0.0}]


@pytest.mark.parametrize("action", ["save", "restore", "erase"])
def test_slots_are_not_saved_by_number(app: Starlette, action: str) -> None:
    error = error_of(call(app, f"/slots/0?action={action}", {"filename": "a"}), 501)
    assert (error["code"], "cache_key" in error["message"]) == ("not_implemented", True)
