"""No option is taken and ignored: each one changes an answer or is refused, alone or with what it needs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch import RequestError, RunOptions
from tests.face.test_tools import TIME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.response import BatchResult

TEMPLATE = """{{ x }}{% for t in tools or [] %}{{ t.function.name }}
{% endfor %}{{ messages[0].content }}<think>
{# <tool_call></think> #}"""
TEXT = "Once upon a time there was a red fox and a red fox and a red"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
WARM: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
ALL: dict[str, Any] = {**WARM, "top_k": 0, "top_p": 1, "min_p": 0}
DRY: dict[str, Any] = {**GREEDY, "dry_multiplier": 3, "dry_allowed_length": 1}
XTC: dict[str, Any] = {**ALL, "xtc_probability": 1, "xtc_threshold": 0.01}
SHORT: dict[str, Any] = {"max_tokens": 3}
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALLS: dict[str, Any] = {"tools": [TIME], "tool_choice": "required", "temperature": 0}
KEY: dict[str, Any] = {**SHORT, "cache_key": "there is none"}

# by name: what is asked without the option, and its value
RAW: dict[str, tuple[dict[str, Any], Any]] = {
    "max_tokens": (GREEDY, 3),
    "max_completion_tokens": ({"temperature": 0, "timeout_s": 60}, 3),
    "strict_max_tokens": ({"max_tokens": 10_000, "temperature": 0}, True),
    "stop": (GREEDY, ["a", "e", "o"]),
    "stop_token_ids": (GREEDY, list(range(1000))),
    "include_stop": ({**GREEDY, "stop": ["a", "e", "o"]}, True),
    "ignore_eos": ({**GREEDY, "logit_bias": {"END": 1000}}, True),
    "temperature": (WARM, 0),
    "top_k": (ALL, 1),
    "top_p": (ALL, 0),
    "min_p": (ALL, 1),
    "typical_p": (ALL, 0.01),
    "top_n_sigma": (ALL, 0.01),
    "xtc_probability": ({**XTC, "xtc_probability": 0}, 1),
    "xtc_threshold": (XTC, 1),
    "repeat_penalty": (GREEDY, 100),
    "repeat_last_n": ({**GREEDY, "repeat_penalty": 100}, 0),
    "presence_penalty": (GREEDY, 100),
    "frequency_penalty": (GREEDY, 100),
    "dry_multiplier": (GREEDY, 100),
    "dry_base": (DRY, 0),
    "dry_allowed_length": (DRY, 50),
    "dry_penalty_last_n": (DRY, 0),
    "dry_sequence_breakers": (DRY, ["e", "o", "a", " "]),
    "logit_bias": (GREEDY, {5: 1000}),
    "seed": (WARM, 8),
    "n": (WARM, 2),
    "best_of": (WARM, 8),
    "logprobs": (SHORT, True),
    "top_logprobs": ({**SHORT, "logprobs": True}, 2),
    "prompt_logprobs": (SHORT, 0),
    "prompt_logprobs_start": ({**SHORT, "prompt_logprobs": 0}, 3),
    "echo": (SHORT, True),
    "priority": (SHORT, 1),
    "timeout_s": (SHORT, 0),
    "cache_key": (SHORT, "there is none"),
    "save_cache": (KEY, True),
    "cache_required": ({**SHORT, "cache_key": "never saved"}, True),
    "prefill_only": (SHORT, True),
    "n_keep": ({**LONG, "n_discard": 32, "logprobs": 0}, 12),
    "n_discard": (LONG, 32),
    "adapter": (SHORT, "there is none"),
    "skip_special_tokens": ({**GREEDY, "include_stop": True, "logit_bias": {"END": 1000}}, False),
    "json_schema": (GREEDY, SCHEMA),
    "response_format": (GREEDY, {"type": "json_object"}),
    "regex": (GREEDY, "[0-9]+"),
    "choice": (GREEDY, ["one", "two"]),
    "choice_probs": ({**GREEDY, "choice": ["one", "two"]}, True),
    "grammar": (GREEDY, 'start: "x"'),
}
CHAT: dict[str, tuple[dict[str, Any], Any]] = {
    "tools": (GREEDY, [TIME]),
    "tool_choice": ({**CALLS, "tool_choice": "none", "max_tokens": 40}, "required"),
    "chat_template_kwargs": (GREEDY, {"x": "Well, well."}),
    "reasoning_format": (GREEDY, "none"),
}


ELSEWHERE = {
    "logits_processor",
    "parallel_tool_calls",
    "thinking_budget",
    "slot",
    "pause_every",
} | {"cache_salt"}
"""They take a function (test_logits_processor), a model that calls twice or thinks (test_tool_calls), others in slots
(test_chosen_slots), somebody who resumes (test_quanta), or other prompts in memory (test_sharing)."""


@pytest.fixture(scope="module", params=[None, 1], ids=["thread", "worker"])
def engine(
    request: pytest.FixtureRequest, test_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[cbatch.Engine]:
    settings: dict[str, Any] = {"parallel": 2, "ctx_per_seq": 256, "n_threads": 1}
    settings["replicas"] = request.param
    folder = tmp_path_factory.mktemp("cells")
    with cbatch.load(test_model, chat_template=TEMPLATE, cache_dir=folder, **settings) as loaded:
        yield loaded


def seen(engine: cbatch.Engine, options: dict[str, Any], *, is_chat: bool) -> object:
    """What a caller sees of an answer, or the kind of error that refuses it."""
    [end] = engine.tokenize(engine.model_facts.eos_token)
    bias = {
        end if token == "END" else token: b for token, b in options.get("logit_bias", {}).items()
    }
    asked = {**options, "logit_bias": bias} if bias else options
    given: Any = [{"role": "user", "content": TEXT}] if is_chat else TEXT
    try:
        result = engine.submit(given, options=asked).result()
    except (cbatch.ConfigError, RequestError) as error:
        return type(error)
    return (*_seen(result), *map(_seen, result.choices))


def _seen(result: BatchResult) -> tuple[object, ...]:
    calls = [(call.name, call.arguments) for call in result.tool_calls]
    n_prompt = result.usage.prompt_tokens
    told = (n_prompt, result.text, result.reasoning, calls, result.token_ids, result.warnings)
    scores = result.logprobs, result.prompt_logprobs, result.choice_probs
    return *told, result.finish_reason, *map(repr, scores)


def test_every_option_of_a_request_is_tried_here() -> None:
    assert set(RAW) | set(CHAT) | ELSEWHERE == {f.name for f in fields(RunOptions)}


@pytest.mark.parametrize("name", [*RAW, *CHAT])
def test_each_option_of_a_request_shows(engine: cbatch.Engine, name: str) -> None:
    is_chat = name in CHAT
    base, value = (CHAT if is_chat else RAW)[name]
    plain = seen(engine, base, is_chat=is_chat)
    assert isinstance(plain, tuple)
    assert seen(engine, {**base, name: value}, is_chat=is_chat) != plain
