"""Prompts in every shape: what they become, what is refused with which hint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cbatch.errors import ConfigError
from cbatch.messages import BatchPrompt, as_prompts
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("prompts", ["say red", ["say red"], ("say red",), iter(["say red"])])
def test_string_is_a_raw_prompt(prompts: str | Iterable[str]) -> None:
    assert as_prompts(prompts) == [BatchPrompt(prompt="say red")]


@pytest.mark.parametrize("prompts", [[SYSTEM, USER], [[SYSTEM, USER]], (SYSTEM, USER)])
def test_flat_message_list_is_a_batch_of_one(prompts: Any) -> None:
    [prompt] = as_prompts(prompts)
    assert prompt.messages == (SYSTEM, USER)


def test_batch_prompt_is_taken_as_it_is() -> None:
    prompt = BatchPrompt(tokens=[1, 2])
    assert as_prompts(prompt) == [prompt]
    assert as_prompts([prompt])[0] is prompt


def test_mixed_shapes_keep_their_order() -> None:
    mixed: list[Any] = ["text", [USER], BatchPrompt(tokens=[1])]
    prompts = as_prompts(mixed)
    assert [(p.prompt, p.messages, p.tokens) for p in prompts] == [
        ("text", None, None),
        (None, (USER,), None),
        (None, None, (1,)),
    ]


@pytest.mark.parametrize("prompts", [[1, 2, 3], [[1, 2, 3]], [["a", 2]], [True]])
def test_numbers_are_refused_with_the_hint_to_tokens(prompts: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompts\[0\].*BatchPrompt\(tokens="):
        as_prompts(prompts)


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([], "batch is empty"),
        (iter([]), "batch is empty"),
        ("", "prompt is empty"),
        ([[]], r"prompts\[0\]: the prompt is empty"),
        (["ok", ""], r"prompts\[1\]: the prompt is empty"),
        (["ok", None], r"prompts\[1\].*NoneType"),
        (["ok", 1.5], r"prompts\[1\].*float"),
        (["ok", {1, 2}], r"prompts\[1\].*set"),
        (USER, "dict"),
        (None, "NoneType"),
        (7, "int"),
        ([USER, "text"], r"prompts\[0\].*this is a single message"),
        (["text", USER], r"prompts\[1\].*this is a single message"),
        ([[USER], [USER, "text"]], r"prompts\[1\]: messages\[1\].*str"),
        ([[USER], [["nested"]]], r"prompts\[1\]: messages\[0\].*list"),
        ([{"id": "a", "messages": [USER]}], r"a list of messages or a BatchPrompt; .*\(\*\*item\)"),
        ([{"prompt": "x"}], r"BatchPrompt\(\*\*item\)"),
        ([[{"prompt": "x"}]], r"prompts\[0\]: .*BatchPrompt\(\*\*item\)"),
        ([{"content": "hi"}], r"messages\[0\] has no role"),
        ([{"role": "", "content": "hi"}], r"messages\[0\] has no role"),
        ([{"role": 3, "content": "hi"}], r"messages\[0\] has no role"),
        ([USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\] content.*int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a picture without url"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]"),
    ],
)
def test_nonsense_is_refused_and_its_place_is_named(prompts: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        as_prompts(prompts)


def test_text_parts_are_lines_and_other_keys_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [prompt] = as_prompts([{"role": "user", "content": parts, "name": "ann"}])
    assert prompt.messages == ({"role": "user", "content": "a\nb", "name": "ann"},)


def test_message_changed_later_does_not_change_the_prompt() -> None:
    message = {"role": "user", "content": "before"}
    chat = [message]
    prompt = BatchPrompt(chat)
    message["content"] = "after"
    chat.append(USER)
    assert prompt.messages == ({"role": "user", "content": "before"},)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "none"),
        ({"prompt": "a", "tokens": [1]}, r"\['prompt', 'tokens'\]"),
        ({"messages": [USER], "prompt": "a"}, "messages"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 3}, "int"),
        ({"messages": []}, "empty"),
        ({"messages": "hi"}, "not a string"),
        ({"messages": USER}, "dict"),
        ({"tokens": []}, "empty"),
        ({"tokens": "12"}, "str"),
        ({"tokens": [1, -1]}, "-1"),
        ({"tokens": [1, True]}, "True"),
        ({"tokens": [1, 2.0]}, "2.0"),
        ({"prompt": "a", "id": ""}, "id"),
        ({"prompt": "a", "id": 3}, "id"),
        ({"prompt": "a", "options": 3}, "int"),
        ({"prompt": "a", "options": {"max_tokens": 0}}, "max_tokens"),
        ({"prompt": "a", "options": {"max_token": 1}}, "max_token"),
    ],
)
def test_malformed_batch_prompt_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BatchPrompt(**fields)


def test_options_as_a_mapping_are_built() -> None:
    assert BatchPrompt(prompt="a", options={"seed": 3}).options == RunOptions(seed=3)
