"""What `llm` asks and is told, in its own words and in those of OpenAI's API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
import llm
from llm.parts import ReasoningPart, StreamEvent, TextPart, ToolCallPart, ToolResultPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.response import BatchOutputChunk, BatchResult


def options_of(prompt: Any) -> dict[str, Any]:
    """Return the options that a prompt of `llm` has, with its schema and tools."""
    options: dict[str, Any] = prompt.options.model_dump(exclude_none=True)
    if prompt.schema:
        schema = {"schema": prompt.schema, "strict": True}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**options, "tools": [_tool(tool) for tool in prompt.tools]}


def _tool(tool: Any) -> dict[str, Any]:
    said = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": said}


def as_openai(message: Any) -> Iterator[dict[str, Any]]:
    """Yield a message as OpenAI's API has it: one for each answer of a tool."""
    said: dict[str, Any] = {"role": message.role, "content": ""}
    for part in message.parts:
        if isinstance(part, ToolResultPart):
            yield {"role": "tool", "content": part.output, "tool_call_id": part.tool_call_id}
        elif isinstance(part, ToolCallPart):
            call = {"name": part.name, "arguments": part.arguments}
            asked = {"id": part.tool_call_id, "type": "function", "function": call}
            said.setdefault("tool_calls", []).append(asked)
        elif isinstance(part, TextPart):
            said["content"] += part.text
        elif not isinstance(part, ReasoningPart):
            raise click.ClickException(f"cbatch reads text, not {type(part).__name__}")
    if said["content"] or "tool_calls" in said:
        yield said


def events_of(chunk: BatchOutputChunk) -> Iterator[Any]:
    """Yield what `llm` is told of a chunk."""
    if chunk.reasoning:
        yield StreamEvent(type="reasoning", chunk=chunk.reasoning)
    if chunk.content:
        yield StreamEvent(type="text", chunk=chunk.content)


def end_of(result: BatchResult, response: Any) -> Iterator[Any]:
    """Yield the calls of an answer; note them, its usage and its end in the response."""
    for call in result.tool_calls:
        yield StreamEvent(type="tool_call_name", chunk=call.name, tool_call_id=call.id)
        yield StreamEvent(type="tool_call_args", chunk=call.arguments, tool_call_id=call.id)
        given = json.loads(call.arguments)
        response.add_tool_call(llm.ToolCall(call.name, given, tool_call_id=call.id))
    used = result.usage
    kinds = ("cached_tokens", "reasoning_tokens")
    details = {kind: n for kind in kinds if (n := getattr(used, kind))}
    response.set_usage(input=used.prompt_tokens, output=used.completion_tokens, details=details)
    response.response_json = {"finish_reason": result.finish_reason, "seed": result.seed}
