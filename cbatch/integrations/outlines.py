"""Outlines: `Cbatch`, a model whose batches are computed together, for any output type."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outlines.inputs import Chat
from outlines.models import VLLM, AsyncVLLM
from outlines.models.base import AsyncModel, Model, ModelTypeAdapter
from outlines.types import CFG, JsonSchema
from outlines.types.dsl import python_types_to_terms, to_regex

from cbatch.errors import ConfigError
from cbatch.options import check_one_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from cbatch.engine import Engine
    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse


class TypeAdapter(ModelTypeAdapter):
    """Inputs and output types of Outlines, as the engine takes them."""

    def format_input(self, model_input: Any) -> str | list[dict[str, Any]]:
        """Return a text as a raw prompt, and a `Chat` as messages.

        Raises:
            ConfigError: another type, such as a list with an image.
        """
        if isinstance(model_input, Chat):
            return list(model_input.messages)
        if isinstance(model_input, str):
            return model_input
        raise ConfigError(f"cbatch takes a text or a Chat, not {type(model_input).__name__}")

    def format_output_type(self, output_type: Any = None) -> dict[str, Any]:
        """Return the option that an answer of this type follows: a JSON schema, a grammar or an expression."""
        if output_type is None:
            return {}
        term = python_types_to_terms(output_type)
        if isinstance(term, CFG):
            return {"grammar": term.definition}
        if isinstance(term, JsonSchema):
            schema = {"schema": json.loads(term.schema), "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        return {"regex": to_regex(term)}


class _OverEngine:
    """What the model for plain code and the one for async code have in common."""

    def __init__(self, engine: Engine) -> None:
        """Take an engine; whoever loaded it closes it."""
        self.engine, self.type_adapter = engine, TypeAdapter()

    def _run(
        self, inputs: Sequence[Any], output_type: Any, options: dict[str, Any]
    ) -> BatchResponse:
        prompts = [self.type_adapter.format_input(each) for each in inputs]
        shape = self.type_adapter.format_output_type(output_type)
        return self.engine.run(prompts, options=shape | options)


class Cbatch(_OverEngine, Model):
    """A model over an engine: `Cbatch(cbatch.load("model.gguf"))`.

    Further arguments of a call, `batch` and `stream` are `RunOptions` by name; `backend` has no effect.
    """

    def generate(self, model_input: Any, output_type: Any = None, **options: Any) -> Any:
        """Answer one input, with a list of texts where `n` asks for several. Raises the error of its request."""
        return _texts(self._run([model_input], output_type, options).result())

    def generate_batch(
        self, model_input: Sequence[Any], output_type: Any = None, **options: Any
    ) -> list[Any]:
        """Answer all inputs together. Raises a `BatchError`, which has all results, where one fails."""
        return [_texts(r) for r in self._run(model_input, output_type, options).results()]

    def generate_stream(
        self, model_input: Any, output_type: Any = None, **options: Any
    ) -> Iterator[str]:
        """Yield the parts of an answer as they come; leaving early frees its slot."""
        check_one_answer(options, self.engine.options)
        response = self._run([model_input], output_type, options)
        yield from (chunk.content for chunk in response if chunk.content)
        response.result()  # raises the error of a request that failed


class AsyncCbatch(_OverEngine, AsyncModel):
    """As `Cbatch`, for async code."""

    async def generate(self, model_input: Any, output_type: Any = None, **options: Any) -> Any:
        """Answer one input, with a list of texts where `n` asks for several. Raises the error of its request."""
        return _texts(await self._run([model_input], output_type, options).only())

    async def generate_batch(
        self, model_input: Sequence[Any], output_type: Any = None, **options: Any
    ) -> list[Any]:
        """Answer all inputs together. Raises a `BatchError`, which has all results, where one fails."""
        return [_texts(result) for result in await self._run(model_input, output_type, options)]

    async def generate_stream(
        self, model_input: Any, output_type: Any = None, **options: Any
    ) -> AsyncIterator[str]:
        """Yield the parts of an answer as they come; leaving early frees its slot."""
        check_one_answer(options, self.engine.options)
        response = self._run([model_input], output_type, options)
        async for chunk in response:
            if chunk.content:
                yield chunk.content
        await response.only()  # raises the error of a request that failed


# `outlines.Generator` takes the classes of a closed list only; these two give output types to the model as they are.
VLLM.register(Cbatch)
AsyncVLLM.register(AsyncCbatch)


def _texts(result: BatchResult) -> str | list[str]:
    return [choice.text for choice in result.choices] if result.choices else result.text
