"""Answers that must be calls are calls, and right: `python -m tests.call_runs 300 [FORM …]` for so many of each form.

At temperature 1.5 nothing but the masks keeps an answer in order.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jsonschema

import cbatch
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from cbatch.engine import Engine
    from cbatch.response import BatchResult

MARKS = {
    "bare": "",
    "llama": '"parameters": ',
    "hermes": "<tool_call>",
    "function tags, json": "<function=",
    "function tags": "<function= <parameter=",
    "seed": "<function= <parameter= <seed:tool_call>",
    "glm": "<tool_call> <arg_key>",
    "mistral": "[TOOL_CALLS]",
    "mistral, named": "[TOOL_CALLS] [ARGS]",
    "kimi": "<|tool_call_argument_begin|>",
    "functionary v3.2": ">>>all",
    "dsml": "DSML invoke name=",
    "minimax": "<invoke name= <minimax:tool_call>",
    "invoke": "<invoke name=",
    "command r7b": "<|START_ACTION|>",
    "granite": "<|tool_call|>",
    "apriel": "<tool_calls>[",
    "minimax m1": "<tool_calls>",
    "nemotron v2": "<TOOLCALL>",
    "gigachat": "<|function_call|>",
}
"""By a name for people: what a template contains that teaches the form.

DeepSeek's is left out: its marks hold U+2581, which the tokenizer of the model that ships takes for a space.
"""

COLOURS = ["red", "green", "dark blue"]
TOOLS: list[dict[str, Any]] = [
    {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"type": "string", "enum": COLOURS},
                "n_coats": {"type": "integer", "minimum": 1, "maximum": 99},
                "is_wet": {"type": "boolean"},
            },
            "required": ["colour"],
        },
    },
    {
        "name": "paint_all",
        "parameters": {
            "type": "object",
            "properties": {
                "colours": {
                    "type": "array",
                    "items": {"enum": COLOURS},
                    "minItems": 1,
                    "maxItems": 3,
                }
            },
            "required": ["colours"],
        },
    },
    {"name": "stop"},
    {
        "name": "label",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 12}},
            "required": ["text"],
        },
    },
]
"""The last of them cannot be written argument by argument: with it, forms of pairs give way to JSON."""


@dataclass(frozen=True, slots=True)
class Found:
    """How many answers were whole and right, how many were cut off, and how many calls there were."""

    n_right: int
    n_cut: int
    n_calls: int


def template(name: str) -> str:
    """Return a chat template that teaches the form of this name."""
    return (
        "{{ messages[-1].content }}{% for t in tools or [] %} {{ t.function.name }}{% endfor %}\n{# "
        + MARKS[name]
        + " #}"
    )


def prompts(n: int, tools: list[dict[str, Any]]) -> list[BatchPrompt]:
    """Return `n` chats that must call a tool: any of them, or one by name, in turn."""
    offered = [{"type": "function", "function": tool} for tool in tools]
    named = [{"type": "function", "function": {"name": tool["name"]}} for tool in tools]
    choices = ["required", *named]
    return [
        BatchPrompt(
            [{"role": "user", "content": f"Item {i}"}],
            options={"tools": offered, "tool_choice": choices[i % len(choices)], "seed": i},
        )
        for i in range(n)
    ]


def check(prompt: BatchPrompt, result: BatchResult) -> int:
    """Assert that an answer is what was asked for; return how many calls it has, 0 where it was cut off."""
    assert result.error is None, result.error
    if result.finish_reason == "length":
        return 0
    assert (result.finish_reason, result.text, result.warnings) == ("tool_calls", "", ()), result
    options = cbatch.RunOptions.of(prompt.options)
    choice, tools = options.tool_choice, options.offered_tools
    for call in result.tool_calls:
        assert call.name in tools.names
        jsonschema.Draft202012Validator(tools.parameters(call.name)).validate(
            json.loads(call.arguments)
        )
    if not isinstance(choice, str):
        assert [c.name for c in result.tool_calls] == [(choice or {})["function"]["name"]]
    return len(result.tool_calls)


def run(engine: Engine, n: int, tools: list[dict[str, Any]], **options: Any) -> Found:
    """Run `n` prompts and check every answer."""
    asked = prompts(n, tools)
    said = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 200}
    results = engine.run(asked, options={**said, **options}).results(return_errors=True)
    n_calls = [check(p, r) for p, r in zip(asked, results, strict=True)]
    return Found(sum(map(bool, n_calls)), n_calls.count(0), sum(n_calls))


def main() -> None:
    """Print how many of the answers asked for were whole; an assertion fails where one is wrong."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    for name in sys.argv[2:] or MARKS:
        with cbatch.load(parallel=16, ctx_per_seq=512, chat_template=template(name)) as engine:
            for tools in (TOOLS, TOOLS[:3]):
                found = run(engine, n, tools)
                sys.stdout.write(
                    f"{name}, {len(tools)} tools, {n} runs: {found.n_right} whole and valid "
                    f"with {found.n_calls} calls, {found.n_cut} cut off\n"
                )


if __name__ == "__main__":
    main()
