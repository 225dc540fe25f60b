"""Digests of items: another wherever the answer may be another, the same wherever it is the same question."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.files.input.item import Item, ItemError, item_key
from cbatch.files.output.identity import Digests
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions

CHAT = [{"role": "user", "content": "Say red."}]
PLAIN = RunOptions()


def make_item(prompt: BatchPrompt | None = None, **more: Any) -> Item:
    given = {"number": 1, "place": "in, line 1", "id": "a", "error": None, **more}
    return Item(prompt=prompt, **given)


def digest(prompt: BatchPrompt, defaults: RunOptions = PLAIN, fingerprint: str = "model") -> bytes:
    return Digests(defaults, fingerprint)(make_item(prompt))


def of_options(defaults: RunOptions = PLAIN, **options: Any) -> bytes:
    return digest(BatchPrompt(CHAT, options=options), defaults)


def test_digest_has_16_bytes_and_stays_as_it_is() -> None:
    assert len(of_options()) == 16
    # Written manifests hold digests: one that changes runs everything again.
    assert of_options(temperature=0).hex() == "f5b14d34583bc1c2caf7340aa9bddf20"


def test_digest_depends_on_the_model_but_not_on_number_place_and_id() -> None:
    item = make_item(BatchPrompt(CHAT))
    other = replace(item, number=9, place="elsewhere", id="b", is_labelled=True)
    make = Digests(PLAIN, "model")
    assert make(item) == make(other) != Digests(PLAIN, "other")(item)


def test_different_questions_have_different_digests() -> None:
    prompts = [
        BatchPrompt(CHAT),
        BatchPrompt([{"role": "system", "content": "Say red."}]),
        BatchPrompt([*CHAT, *CHAT]),
        BatchPrompt([{**CHAT[0], "name": "Ann"}]),
        BatchPrompt(prompt="Say red."),
        BatchPrompt(prompt="Say red. "),
        BatchPrompt(prompt="\ud800"),
        BatchPrompt(tokens=[1, 2]),
        BatchPrompt(tokens=[12]),
        BatchPrompt(prompt="[1, 2]"),
    ]
    assert len({digest(prompt) for prompt in prompts}) == len(prompts)


def test_order_of_keys_in_a_message_does_not_matter() -> None:
    turned = [dict(reversed(list(m.items()))) for m in CHAT]
    assert digest(BatchPrompt(turned)) == digest(BatchPrompt(CHAT))


def test_order_of_properties_in_a_schema_matters() -> None:
    a, b = {"a": {"type": "string"}, "b": {"type": "string"}}, {"type": "object"}
    turned = dict(reversed(list(a.items())))
    assert of_options(json_schema={**b, "properties": a}) != of_options(
        json_schema={**b, "properties": turned}
    )


CHANGES: dict[str, Any] = {
    "max_tokens": 7, "stop": "x", "stop_token_ids": [1], "include_stop": True, "ignore_eos": True,
    "temperature": 0.3, "top_k": 7, "top_p": 0.3, "min_p": 0.3, "typical_p": 0.3, "top_n_sigma": 0.3,
    "xtc_probability": 0.3, "xtc_threshold": 0.3, "repeat_penalty": 1.3, "repeat_last_n": 7,
    "presence_penalty": 0.3, "frequency_penalty": 0.3, "dry_multiplier": 0.3, "dry_base": 1.3,
    "dry_allowed_length": 7, "dry_penalty_last_n": 7, "dry_sequence_breakers": ["x"],
    "logit_bias": {1: -math.inf}, "seed": 7, "timeout_s": 7.5, "cache_key": "x", "save_cache": True,
    "cache_required": True, "prefill_only": True, "n_keep": 7, "n_discard": 7, "adapter": {"x": 0.5},
    "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}],
    "tool_choice": "none", "chat_template_kwargs": {"x": 1}, "reasoning_format": "none",
    "thinking_budget": 7, "skip_special_tokens": False, "json_schema": {"type": "object"},
    "response_format": {"type": "json_object"}, "regex": "x", "choice": ["x"], "grammar": "start: 'x'",
}  # fmt: skip


def test_every_option_that_an_answer_depends_on_matters() -> None:
    digests = {of_options(), *(of_options(**{name: v}) for name, v in CHANGES.items())}
    assert len(digests) == len(CHANGES) + 1


def test_every_option_is_tried_here_or_changes_no_answer() -> None:
    left = {f.name for f in fields(RunOptions)} - set(CHANGES)
    assert left >= {"max_completion_tokens", "priority"}
    assert of_options(max_completion_tokens=7) == of_options(max_tokens=7)
    assert of_options(priority=7) == of_options()


@pytest.mark.parametrize("name", CHANGES)
def test_option_of_the_run_is_as_one_of_the_item(name: str) -> None:
    option = {name: CHANGES[name]}
    assert of_options(RunOptions(**option)) == of_options(**option) != of_options()
    assert of_options(RunOptions(**option), **option) == of_options(**option)


def test_whole_number_is_the_same_with_a_point() -> None:
    assert of_options(temperature=1.0) == of_options(temperature=1)
    assert of_options(top_p=math.nextafter(0.5, 1)) != of_options(top_p=0.5)


def test_what_the_answer_repeats_of_the_item_matters() -> None:
    make = Digests(PLAIN, "model")
    extras = [None, {"a": 1}, {"a": 2}, ("url", "model"), {"a": b"x"}]
    assert len({make(make_item(BatchPrompt(CHAT), extra=extra)) for extra in extras}) == 5


def test_error_of_an_item_matters() -> None:
    make = Digests(PLAIN, "model")
    errors = [
        ItemError("a", "b"),
        ItemError("a", "c"),
        ItemError("b", "b"),
        ItemError("a", "b", "c"),
    ]
    assert len({make(make_item(error=error)) for error in errors}) == 4


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 3),
        "temperature": st.sampled_from([0, 0.5, 1]),
        "seed": st.integers(0, 3),
        "stop": st.sampled_from(["a", ["a", "b"]]),
        "regex": st.sampled_from(["a", "b"]),
    },
)


@given(OPTIONS, OPTIONS)
@settings(deadline=None)
def test_digest_is_that_of_the_options_that_hold(own: Any, defaults: Any) -> None:
    merged = RunOptions(**own).over(RunOptions(**defaults))
    assert of_options(RunOptions(**defaults), **own) == digest(BatchPrompt(CHAT, options=merged))


def test_key_of_a_name_is_no_key_of_a_number() -> None:
    named = make_item(BatchPrompt(CHAT), number=1, id="5", is_labelled=True)
    assert item_key(named) == "5"
    assert item_key(replace(named, number=5, is_labelled=False)) == "\0" + "5"
