"""LangChain: `ChatCbatch`, a chat model whose batches keep all slots busy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessageChunk,
    convert_to_openai_messages,
    message_chunk_to_message,
)
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.runnables.config import get_config_list
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, Field, model_validator

from cbatch.chat.openai_format import chat_logprobs, finish_of
from cbatch.engine import Engine  # pydantic reads it
from cbatch.options import RunOptions, check_one_answer
from cbatch.response import BatchOutputChunk, BatchResult

N_AT_ONCE_PER_SLOT = 2
"""Threads of `batch` for each slot: two keep 15.5 of 16 slots busy, LangChain's own number 5.5."""

HOSTS_OWN = ("run_manager", "stream")
"""Arguments that LangChain gives and that are not options: its callbacks, and whether `invoke` streams."""


class ChatCbatch(BaseChatModel):
    """A chat model over an engine: `ChatCbatch(engine=cbatch.load("model.gguf"), temperature=0)`.

    Further arguments, and those of `invoke`, `bind` and `batch`, are `RunOptions` by name. `batch` has two requests a
    slot in flight unless `max_concurrency` is set; `abatch` has all. `response_metadata` has `finish_reason` and, where
    asked for, `logprobs`; `additional_kwargs["reasoning_content"]` has the thinking.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: Engine = Field(repr=False)
    """Computes the answers; whoever loaded it closes it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """`RunOptions` of all requests."""
    streaming: bool = False
    """Whether `invoke` streams, for callbacks that see each token."""

    @model_validator(mode="before")
    @classmethod
    def _take_options(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Take every argument that is not a field as an option, and check the options."""
        own = {name: given[name] for name in given.keys() & cls.model_fields.keys()}
        options = {**own.get("options", {}), **{n: given[n] for n in given.keys() - own.keys()}}
        RunOptions.of(options)
        return {**own, "options": options}

    @property
    def _llm_type(self) -> str:
        return "cbatch"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.engine.model_name, "engine": self._engine_said, **self.options}

    @cached_property
    def _engine_said(self) -> str:  # LangChain's caches tell answers apart by it
        return f"{self.engine.fingerprint} {self.engine.options}"

    def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
        known = {"model": self.engine.model_name, **self.options, **kwargs}
        return super()._get_ls_params(stop=stop, **known)

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> Any:
        """Answer all inputs; with `return_exceptions=True` a failed one has its error in place."""
        return super().batch(inputs, self._wide(config, len(inputs)), **kwargs)

    def batch_as_completed(self, inputs: Sequence[Any], config: Any = None, **kwargs: Any) -> Any:
        """Answer all inputs; return an iterator over index and answer in order of completion."""
        return super().batch_as_completed(inputs, self._wide(config, len(inputs)), **kwargs)

    def _wide(self, config: Any, n: int) -> list[dict[str, Any]]:
        """Return a configuration for each input, with threads for all slots where none asks for another number."""
        n_most = N_AT_ONCE_PER_SLOT * self.engine.parallel
        found = get_config_list(config, n)
        return [c | {"max_concurrency": c.get("max_concurrency") or n_most} for c in found]

    def _asked(self, messages: Any, stop: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        options = {**self.options, **given} | ({} if stop is None else {"stop": stop})
        settled = {name: value for name, value in options.items() if name not in HOSTS_OWN}
        return convert_to_openai_messages(list(messages)), settled

    def _generate(self, messages: Any, stop: Any = None, **kwargs: Any) -> Any:
        chat, options = self._asked(messages, stop, kwargs)
        return self._result(self.engine.submit(chat, options=options).result())

    async def _agenerate(self, messages: Any, stop: Any = None, **kwargs: Any) -> Any:
        chat, options = self._asked(messages, stop, kwargs)
        return self._result(await self.engine.chat(chat, **options))

    def _stream(self, messages: Any, stop: Any = None, **kwargs: Any) -> Iterator[Any]:
        chat, options = self._asked(messages, stop, kwargs)
        check_one_answer(options, self.engine.options)
        response = self.engine.submit(chat, options=options)
        yield from map(_chunk, response)
        yield self._last_chunk(response.result())

    async def _astream(self, messages: Any, stop: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        chat, options = self._asked(messages, stop, kwargs)
        check_one_answer(options, self.engine.options)
        response = self.engine.submit(chat, options=options)
        async for chunk in response:
            yield _chunk(chunk)
        yield self._last_chunk(await response.only())

    def _result(self, result: BatchResult) -> Any:
        usage, made = _usage(result), []
        for answer in result.choices or (result,):
            text = {"content": answer.text, **_thinking(answer.reasoning)}
            message = message_chunk_to_message(AIMessageChunk(**text, **usage, **_calls(answer)))
            info = self._end(answer) | _logprobs(answer)
            made.append(ChatGeneration(message=message, generation_info=info))
        return ChatResult(generations=made)

    def _last_chunk(self, result: BatchResult) -> Any:
        message = AIMessageChunk("", **_usage(result), **_calls(result), chunk_position="last")
        return ChatGenerationChunk(message=message, generation_info=self._end(result))

    def _end(self, result: BatchResult) -> dict[str, Any]:
        return {"finish_reason": finish_of(result), "model_name": self.engine.model_name}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text by the model's own tokenizer."""
        return self.engine.tokenize(text)

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Any:
        """Offer tools; `tool_choice` is as the option, or True for "any", or a tool's name."""
        strict = kwargs.pop("strict", None)
        formatted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if tool_choice in [tool["function"]["name"] for tool in formatted]:
            tool_choice = {"type": "function", "function": {"name": tool_choice}}
        choice = "any" if tool_choice is True else tool_choice or None
        return self.bind(tools=formatted, **kwargs, **({"tool_choice": choice} if choice else {}))

    def with_structured_output(self, schema: Any, *, include_raw: Any = False, **more: Any) -> Any:
        """Have answers match a schema, or call a tool with it where `method` is "function_calling"."""
        if more.pop("method", None) == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **more)
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        own = getattr(schema, "model_json_schema", None)  # LangChain's loses what refers to itself
        shape = own() if own else convert_to_json_schema(schema)
        parser = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
        asked = {"schema": shape, "strict": more.pop("strict", True)}
        model = self.bind(
            response_format={"type": "json_schema", "json_schema": asked},
            ls_structured_output_format={"kwargs": {"method": "json_schema"}, "schema": schema},
            **more,
        )
        if not include_raw:
            return model | parser
        assign = RunnablePassthrough.assign
        parsed = assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        unparsed = assign(parsed=lambda _: None)
        either = parsed.with_fallbacks([unparsed], exception_key="parsing_error")
        return RunnableMap(raw=model) | either


def _chunk(chunk: BatchOutputChunk) -> Any:
    message = AIMessageChunk(chunk.content, **_thinking(chunk.reasoning))
    return ChatGenerationChunk(message=message, generation_info=_logprobs(chunk))


def _thinking(text: str) -> dict[str, Any]:
    return {"additional_kwargs": {"reasoning_content": text}} if text else {}


def _logprobs(answer: BatchResult | BatchOutputChunk) -> dict[str, Any]:
    found = answer.logprobs
    return {} if found is None else {"logprobs": {"content": chat_logprobs(found)["content"]}}


def _calls(result: BatchResult) -> dict[str, Any]:
    calls = [{"name": c.name, "args": c.arguments, "id": c.id} for c in result.tool_calls]
    return {"tool_call_chunks": [{**call, "index": i} for i, call in enumerate(calls)]}


def _usage(result: BatchResult) -> dict[str, Any]:
    used = result.usage
    usage = {
        "input_tokens": used.prompt_tokens,
        "output_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "input_token_details": {"cache_read": used.cached_tokens},
        "output_token_details": {"reasoning": used.reasoning_tokens},
    }
    return {"usage_metadata": usage}
