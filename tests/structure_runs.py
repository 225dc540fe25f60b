"""Answers under bounded schemas parse and validate: `python -m tests.structure_runs 1000` for so many.

At temperature 1.5 nothing but the masks keeps an answer in order.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jsonschema

import cbatch
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from cbatch.engine import Engine
    from cbatch.response import BatchResult

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "boolean"},
                {"type": "null"},
                {"type": "integer", "minimum": -99, "maximum": 99},
            ]
        },
        "minItems": 1,
        "maxItems": 6,
    },
    {"type": "string", "pattern": "^[A-Z][a-z]{2,8} [0-9]{1,3}$"},
    {
        "type": "object",
        "properties": {
            "when": {"type": "string", "format": "date"},
            "kind": {"const": "é “quoted” \\ \n"},
            "inner": {
                "type": "object",
                "properties": {"a": {"type": "number", "minimum": 0, "maximum": 1}},
                "additionalProperties": False,
            },
        },
        "required": ["when", "kind"],
        "additionalProperties": False,
    },
    {"enum": ["yes", "no", 3, None, [1, 2], {"a": "b"}]},
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 9},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
]

REGEX = r"[0-9]{3}-[a-f]{2,4}( or [0-9]{3}-[a-f]{2,4})?"


@dataclass(frozen=True, slots=True)
class Found:
    """How many answers were whole and right, and how many were cut off."""

    n_right: int
    n_cut: int


def prompts(n: int) -> list[BatchPrompt]:
    """Return `n` prompts: under each schema, under an expression, and free ones, in turn."""
    said: list[dict[str, Any]] = [{"json_schema": s} for s in SCHEMAS]
    said += [{"regex": REGEX}, {}]
    return [
        BatchPrompt(prompt=f"Item {i}: ", options={**said[i % len(said)], "seed": i})
        for i in range(n)
    ]


def check(prompt: BatchPrompt, result: BatchResult) -> bool:
    """Assert that an answer is what was asked for; return whether it was whole."""
    assert result.error is None, result.error
    options = cbatch.RunOptions.of(prompt.options)
    if result.finish_reason != "stop":
        return False
    if options.json_schema is not None:
        schema = json.loads(str(options.json_schema))
        answer = json.loads(result.text)
        # formats are not asserted, as is JSON schema's default: llguidance knows no leap years
        jsonschema.Draft202012Validator(schema).validate(answer)
        if isinstance(answer, dict) and "when" in answer:
            assert re.fullmatch(r"\d{4}-[01]\d-[0-3]\d", answer["when"]), answer
    elif options.regex is not None:
        assert re.fullmatch(options.regex, result.text), result.text
    return True


def run(engine: Engine, n: int, **options: Any) -> Found:
    """Run `n` prompts and check every answer."""
    asked = prompts(n)
    said = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 200}
    results = engine.run(asked, options={**said, **options}).results(return_errors=True)
    whole = [check(p, r) for p, r in zip(asked, results, strict=True)]
    return Found(sum(whole), len(whole) - sum(whole))


def main() -> None:
    """Print how many of the answers asked for were whole; an assertion fails where one is wrong."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with cbatch.load(parallel=16, ctx_per_seq=512) as engine:
        found = run(engine, n)
    sys.stdout.write(f"{n} runs: {found.n_right} whole and valid, {found.n_cut} cut off\n")


if __name__ == "__main__":
    main()
