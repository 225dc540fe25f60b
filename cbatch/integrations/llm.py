"""The command and library `llm`: a plugin with the shipped model, and with files that `llm cbatch add` names."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import llm
from llm.parts import ReasoningPart, StreamEvent, TextPart, ToolCallPart, ToolResultPart
from pydantic import create_model

from cbatch.errors import CBatchError
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

    from cbatch.engine import Engine
    from cbatch.engine_spec import EngineSpec
    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.batch_response import BatchResponse

_TYPES = {"int | None": int, "float | None": float, "bool | None": bool, "str | None": str}
_FOR_BATCHES = {"n", "best_of", "echo", "slot", "pause_every", "prefill_only", "prompt_logprobs"}
"""Options that `llm`, which shows one answer as it comes, has no use for."""

_FIELDS: dict[str, Any] = {
    f.name: (_TYPES[str(f.type)] | None, None)
    for f in fields(RunOptions)
    if f.type in _TYPES and f.name not in _FOR_BATCHES
}

Options = create_model("Options", __base__=llm.Options, stop=(str | None, None), **_FIELDS)
"""`RunOptions` of a single value: `llm -o temperature 0`."""


class _LoadedOnce:
    """A model that is loaded when it is first used, and stays."""

    def __init__(self, model_id: str, settings: Mapping[str, Any]) -> None:
        """Name a model; its first use loads it. `settings` are arguments of `cbatch.load`."""
        self.model_id, self.settings = model_id, settings
        self._is_kept = False

    @property
    def spec(self) -> EngineSpec:
        """The engine of this model: one for a process, whichever model object asks for it."""
        from cbatch.engine_spec import EngineSpec  # slow to import, and `llm` imports all plugins

        return EngineSpec(**self.settings)

    def _keep(self) -> None:
        """Have it stay loaded from now on, until the process ends."""
        if not self._is_kept:
            self.spec.shared().__enter__()
            self._is_kept = True


class _Chats(_LoadedOnce):
    """What the model for plain code and the one for async code have in common."""

    can_stream = True
    supports_schema = True
    supports_tools = True
    Options = Options

    def _submit(self, engine: Engine, prompt: Any) -> BatchResponse:
        self._keep()
        chat = [each for message in prompt.messages for each in _as_openai(message)]
        return engine.submit(chat, options=_options_of(prompt))


class Cbatch(_Chats, llm.Model):
    """A model for plain code."""

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[Any]:
        """Yield the events of an answer."""
        with self.spec.shared() as engine:
            answer = self._submit(engine, prompt)
            for chunk in answer:
                yield from _events_of(chunk)
            yield from _end_of(answer.result(), response)


class AsyncCbatch(_Chats, llm.AsyncModel):
    """A model for async code."""

    async def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any
    ) -> AsyncIterator[Any]:
        """Yield the events of an answer."""
        async with self.spec.shared() as engine:
            answer = self._submit(engine, prompt)
            async for chunk in answer:
                for event in _events_of(chunk):
                    yield event
            for event in _end_of(await answer.only(), response):
                yield event


# ---- what is asked and told, in `llm`'s words and in those of OpenAI's API ----


def _options_of(prompt: Any) -> dict[str, Any]:
    """Return the options that a prompt of `llm` has, with its schema and tools."""
    options: dict[str, Any] = prompt.options.model_dump(exclude_none=True)
    if prompt.schema:
        schema = {"schema": prompt.schema, "strict": True}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {**options, "tools": [_tool(tool) for tool in prompt.tools]}


def _tool(tool: Any) -> dict[str, Any]:
    said = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": said}


def _as_openai(message: Any) -> Iterator[dict[str, Any]]:
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


def _events_of(chunk: BatchOutputChunk) -> Iterator[Any]:
    """Yield what `llm` is told of a chunk."""
    if chunk.reasoning:
        yield StreamEvent(type="reasoning", chunk=chunk.reasoning)
    if chunk.content:
        yield StreamEvent(type="text", chunk=chunk.content)


def _end_of(result: BatchResult, response: Any) -> Iterator[Any]:
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


# ---- embeddings, and the models that there are ----


class CbatchEmbeddings(_LoadedOnce, llm.EmbeddingModel):
    """A model that makes vectors: `llm embed`, `llm embed-multi`, `llm similar`."""

    batch_size = 1000  # texts for which `llm` waits together. Our choice.

    def embed_batch(
        self, items: Iterable[str | bytes], *, key: str | None = None
    ) -> Iterator[list[float]]:
        """Yield the vector of each text, of length 1."""
        with self.spec.shared() as engine:
            self._keep()
            yield from engine.embed(items).array().tolist()


def _file() -> Path:
    return Path(llm.user_dir()) / "cbatch.json"


def _added() -> dict[str, dict[str, Any]]:
    """Return the settings of every model that was added, by its name."""
    return dict(json.loads(_file().read_text("utf-8"))) if _file().exists() else {}


def _value(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register the shipped model as `cbatch`, and every model that was added."""
    for name, settings in {"cbatch": {}, **_added()}.items():
        register(Cbatch(name, settings), AsyncCbatch(name, settings))


@llm.hookimpl
def register_embedding_models(register: Any) -> None:
    """Register the same models for embeddings: which of them have one is known when they are loaded."""
    for name, settings in {"cbatch": {}, **_added()}.items():
        register(CbatchEmbeddings(name, settings))


@llm.hookimpl
def register_commands(cli: Any) -> None:
    """Add `llm cbatch add`."""

    @cli.group(name="cbatch")
    def group() -> None:
        """Models that cbatch computes."""

    @group.command()
    @click.argument("name")
    @click.argument("model")
    @click.option(
        "settings", "-s", "--set", nargs=2, multiple=True, help="An argument of cbatch.load."
    )
    def add(name: str, model: str, settings: Any) -> None:
        """Add a GGUF file, or hf:OWNER/REPO/FILE.gguf, under a name."""
        from cbatch.engine_spec import EngineSpec

        try:
            given = {key: _value(value) for key, value in settings}
            spec = EngineSpec(model, **given)
        except CBatchError as error:
            raise click.ClickException(str(error)) from None
        models = {**_added(), name: {"model": spec.model, **given}}
        _file().write_text(json.dumps(models, indent=2), "utf-8")
        click.echo(f"llm -m {name} answers with {spec.model}")
