"""Continuous batching for GGUF models, on top of llama-cpp-python."""

import logging

from cbatch.engine import Engine
from cbatch.errors import (
    BannedTokensError,
    CacheError,
    CBatchError,
    ConfigError,
    DeadlineError,
    DecodeError,
    DuplicateIdError,
    EngineClosedError,
    EngineError,
    GrammarError,
    IncompatibleLlamaError,
    InsideStepError,
    ModelLoadError,
    OutputError,
    PromptError,
    PromptTooLongError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    RequestFailedError,
    UnsupportedOptionError,
    WorkerDiedError,
)
from cbatch.loading import load
from cbatch.messages import BatchPrompt, LookAhead
from cbatch.options import RunOptions
from cbatch.response import (
    BatchError,
    BatchOutputChunk,
    BatchResult,
    FinishReason,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)
from cbatch.runtime.batch_response import BatchResponse
from cbatch.runtime.row_comparison import RowComparison
from cbatch.runtime.step_record import StepRecord, StepRow
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
    "Engine",
    "EngineClosedError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "GrammarError",
    "IncompatibleLlamaError",
    "InsideStepError",
    "LookAhead",
    "ModelLoadError",
    "OutputError",
    "PromptError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestCancelledError",
    "RequestError",
    "RequestFailedError",
    "RowComparison",
    "RunOptions",
    "StepRecord",
    "StepRow",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "UnsupportedOptionError",
    "Usage",
    "WorkerDiedError",
    "__version__",
    "load",
]
