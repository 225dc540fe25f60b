"""inspect_ai: a provider, so that `inspect eval task.py --model cbatch/model.gguf` computes in this process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolCall, ToolFunction

from cbatch.chat.openai_format import chat_logprobs
from cbatch.errors import ConfigError, PromptTooLongError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.response import BatchResult, TokenLogprob

N_AT_ONCE_PER_SLOT = 2
"""Requests in flight for each slot: while inspect_ai looks at an answer, another one is computed."""

SHIPPED = "shipped"
"""The name of the model that ships inside: `--model cbatch/shipped`."""

_SAME = (
    "max_tokens temperature top_p top_k seed best_of frequency_penalty presence_penalty logit_bias logprobs "
    "top_logprobs prompt_logprobs parallel_tool_calls"
)
_OTHER = {"stop_seqs": "stop", "num_choices": "n", "reasoning_tokens": "thinking_budget"}
_OPTIONS = {**_OTHER, **{name: name for name in _SAME.split()}}
"""Fields of inspect_ai's configuration, and the options that they are here."""

_REASONS = {"length": "max_tokens", "window": "model_length", "stop": "stop"}


class CbatchAPI(ModelAPI):
    """A model of this process; model arguments (`-M parallel=16`) are those of `cbatch.load`.

    All models of a process with equal arguments share one engine.
    """

    def __init__(
        self,
        model_name: str,
        base_url: Any = None,
        api_key: Any = None,
        config: Any = None,
        **settings: Any,
    ) -> None:
        """Load the model, which may take a while.

        Raises:
            CBatchError: as `cbatch.load`.
        """
        from cbatch.engine_spec import EngineSpec

        super().__init__(model_name, None, None, [])
        if base_url is not None:
            raise ConfigError("cbatch computes in this process and has no base_url: leave it out")
        self._spec = EngineSpec(None if model_name == SHIPPED else model_name, **settings)
        self._lent = self._spec.shared()
        self.engine = self._lent.__enter__()
        self._is_closed = False

    def close(self) -> None:
        """Free the model, where nothing else in this process uses it."""
        if not self._is_closed:
            self._is_closed = True
            self._lent.__exit__()

    def max_connections(self) -> int:
        """Return how many requests keep all slots busy."""
        return N_AT_ONCE_PER_SLOT * self.engine.parallel

    def connection_key(self) -> str:
        """Return a name for the engine: its requests are counted together."""
        return f"cbatch {hash(self._spec)}"

    def collapse_user_messages(self) -> bool:
        """Join messages of a user that follow each other: many templates refuse them."""
        return True

    async def count_text_tokens(self, text: str) -> int:
        """Return how many tokens a text has."""
        return self.engine.count_tokens(text)

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self.engine.tokenize(text)

    async def generate(
        self, input: Sequence[Any], tools: Sequence[Any], tool_choice: Any, config: Any
    ) -> Any:
        """Answer a chat. A task that is cancelled cancels the request.

        Raises:
            CBatchError: the request failed, but not a prompt that is too long: that is an answer with its reason.
        """
        options = {
            ours: v for its, ours in _OPTIONS.items() if (v := getattr(config, its)) is not None
        }
        options |= (
            _tools(tools, tool_choice) | _schema(config.response_schema) | (config.extra_body or {})
        )
        try:
            result = await self.engine.chat([_message(m) for m in input], **options)
        except PromptTooLongError as error:
            return ModelOutput.from_content(self.model_name, str(error), "model_length", str(error))
        return self._output(result)

    def _output(self, result: BatchResult) -> Any:
        used = result.usage
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(answer, result) for answer in result.choices or (result,)],
            usage=ModelUsage(
                input_tokens=used.prompt_tokens - used.cached_tokens,
                input_tokens_cache_read=used.cached_tokens,
                output_tokens=used.completion_tokens,
                reasoning_tokens=used.reasoning_tokens,
                total_tokens=used.prompt_tokens + used.completion_tokens,
            ),
            time=result.timings.total_s - result.timings.queue_s,
        )

    def _choice(self, answer: BatchResult, whole: BatchResult) -> Any:
        thinking = [ContentReasoning(reasoning=answer.reasoning)] if answer.reasoning else []
        calls = [ToolCall(c.id, c.name, json.loads(c.arguments)) for c in answer.tool_calls]
        message = ChatMessageAssistant(
            content=[*thinking, ContentText(text=answer.text)] if thinking else answer.text,
            tool_calls=calls or None,
            model=self.model_name,
            source="generate",
        )
        return ChatCompletionChoice(
            message=message,
            stop_reason="tool_calls" if calls else _REASONS.get(answer.finish_reason, "unknown"),
            logprobs=_logprobs(answer.logprobs),
            prompt_logprobs=_logprobs([t for t in whole.prompt_logprobs or () if t]),
        )


@modelapi(name="cbatch")
def cbatch() -> type[CbatchAPI]:
    """Register the provider."""
    return CbatchAPI


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> Any:
    return Logprobs.model_validate(chat_logprobs(tokens)) if tokens else None


def _tools(tools: Sequence[Any], choice: Any) -> dict[str, Any]:
    if not tools:
        return {}
    told = [(tool.name, tool.description, _plain(tool.parameters)) for tool in tools]
    offered = [_function(name=name, description=text, parameters=p) for name, text, p in told]
    is_named = isinstance(choice, ToolFunction)
    return {"tools": offered, "tool_choice": _function(name=choice.name) if is_named else choice}


def _function(**said: Any) -> dict[str, Any]:
    return {"type": "function", "function": said}


def _plain(schema: Any) -> Any:
    return schema.model_dump(exclude_none=True, by_alias=True)


def _schema(asked: Any) -> dict[str, Any]:
    if asked is None:
        return {}
    inner = {"schema": _plain(asked.json_schema), "strict": asked.strict is not False}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def _message(message: Any) -> dict[str, Any]:
    parts = message.content if isinstance(message.content, list) else []
    for part in parts:
        if not isinstance(part, ContentText | ContentReasoning):
            raise ConfigError(f"cbatch reads text, not {type(part).__name__}")
    error = getattr(message, "error", None)
    said = {"role": message.role, "content": f"Error: {error.message}" if error else message.text}
    if message.role == "tool":
        return said | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {})
    called = getattr(message, "tool_calls", None) or ()
    calls = [{"id": c.id, **_function(name=c.function, arguments=c.arguments)} for c in called]
    return said | ({"tool_calls": calls} if calls else {})
