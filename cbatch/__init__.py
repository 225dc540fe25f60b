"""Continuous batching for GGUF models, on top of llama-cpp-python."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch.embedding import EmbedResult, RerankResult
    from cbatch.engine import Engine
    from cbatch.engine_spec import EngineSpec
    from cbatch.errors import (
        BannedTokensError,
        CacheError,
        CBatchError,
        ConfigError,
        DeadlineError,
        DecodeError,
        DuplicateIdError,
        EmbeddingError,
        EngineClosedError,
        EngineError,
        GrammarError,
        IncompatibleLlamaError,
        InsideStepError,
        ModelLoadError,
        NoThreadError,
        OutputError,
        PromptError,
        PromptTooLongError,
        QueueFullError,
        RequestCancelledError,
        RequestError,
        RequestFailedError,
        TextTooLongError,
        UnsupportedOptionError,
        UnsupportedTaskError,
        WorkerDiedError,
    )
    from cbatch.loading import load, load_async
    from cbatch.messages import BatchPrompt, LookAhead
    from cbatch.options import LogitsProcessor, RunOptions
    from cbatch.response import (
        BatchError,
        BatchOutputChunk,
        BatchResult,
        FinishReason,
        Score,
        Timings,
        TokenLogprob,
        ToolCall,
        Usage,
    )
    from cbatch.runtime.batch_response import BatchResponse
    from cbatch.runtime.row_comparison import RowComparison
    from cbatch.runtime.step_record import StepRecord, StepRow
    from cbatch.runtime.text_responses import EmbedResponse, RerankResponse
    from cbatch.stats import EngineStats

__version__ = "0.1.0"

logging.getLogger("cbatch").addHandler(logging.NullHandler())

__all__ = [
    "BannedTokensError",
    "BatchError",
    "BatchOutputChunk",
    "BatchPrompt",
    "BatchResponse",
    "BatchResult",
    "CBatchError",
    "CacheError",
    "ConfigError",
    "DeadlineError",
    "DecodeError",
    "DuplicateIdError",
    "EmbedResponse",
    "EmbedResult",
    "EmbeddingError",
    "Engine",
    "EngineClosedError",
    "EngineError",
    "EngineSpec",
    "EngineStats",
    "FinishReason",
    "GrammarError",
    "IncompatibleLlamaError",
    "InsideStepError",
    "LogitsProcessor",
    "LookAhead",
    "ModelLoadError",
    "NoThreadError",
    "OutputError",
    "PromptError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestCancelledError",
    "RequestError",
    "RequestFailedError",
    "RerankResponse",
    "RerankResult",
    "RowComparison",
    "RunOptions",
    "Score",
    "StepRecord",
    "StepRow",
    "TextTooLongError",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "UnsupportedOptionError",
    "UnsupportedTaskError",
    "Usage",
    "WorkerDiedError",
    "__version__",
    "load",
    "load_async",
]

_MODULES = {
    "embedding": ("EmbedResult", "RerankResult"),
    "engine": ("Engine",),
    "engine_spec": ("EngineSpec",),
    "loading": ("load", "load_async"),
    "messages": ("BatchPrompt", "LookAhead"),
    "options": ("LogitsProcessor", "RunOptions"),
    "response": (
        "BatchError",
        "BatchOutputChunk",
        "BatchResult",
        "FinishReason",
        "Score",
        "Timings",
        "TokenLogprob",
        "ToolCall",
        "Usage",
    ),
    "runtime.batch_response": ("BatchResponse",),
    "runtime.row_comparison": ("RowComparison",),
    "runtime.step_record": ("StepRecord", "StepRow"),
    "runtime.text_responses": ("EmbedResponse", "RerankResponse"),
    "stats": ("EngineStats",),
}
"""The modules of the public names except errors; imported at first use, so that a command can handle signals first."""

if not TYPE_CHECKING:  # so that types are checked by the imports above

    def __getattr__(name: str) -> object:
        if name in __all__:
            module = next((m for m, names in _MODULES.items() if name in names), "errors")
            globals()[name] = found = getattr(import_module(f"{__name__}.{module}"), name)
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
