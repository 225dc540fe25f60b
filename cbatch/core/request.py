"""What the engine was asked, settled, and where a result comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch.messages import BatchPrompt
    from cbatch.options import AdapterSet, Breakers, Grammar, RunOptions, Sampling
    from cbatch.response import FinishReason, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, settled: the options are merged and the seed is drawn."""

    id: str
    prompt: BatchPrompt
    options: RunOptions
    sampling: Sampling
    stop_tokens: tuple[int, ...] = ()
    deadline_s: float = math.inf
    """When it ends whatever it is doing, in seconds of the engine's clock."""
    adapters: AdapterSet = ()
    n_logprobs: int | None = None
    """Alternatives to report for each sampled token; None where none is asked for its log-probability."""
    n_prompt_logprobs: int | None = None
    """Alternatives to report for each token of the prompt; None where it is not scored."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Those of the prompt, where an earlier request found them."""
    owner: str = ""
    """Whose request it is: the mark of an engine."""
    output: tuple[int, ...] = ()
    """What it goes on from: tokens that an earlier request with this prompt sampled."""
    output_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of `output`, where they are asked for."""
    continues: int | None = None
    """The number of that request's sequence."""
    grammar: Grammar | None = None
    """What its output must match."""
    breakers: Breakers | None = None
    """Past what DRY does not look."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a result comes from: what there is to go on from, whatever was made of the result since."""

    request: Request
    number: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
