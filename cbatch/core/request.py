"""One request: what was asked, with merged options and a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from cbatch.messages import BatchPrompt
    from cbatch.options import AdapterSet, DryBreakers, Grammar, RunOptions, Sampling
    from cbatch.response import TokenLogprob


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, with merged options and a seed."""

    id: str
    prompt: BatchPrompt
    options: RunOptions
    sampling: Sampling
    stop_tokens: Collection[int] = ()
    """A set if there may be many, because each sampled token is looked up."""
    deadline_s: float = math.inf
    """The deadline, in seconds of the engine's clock."""
    adapters: AdapterSet = ()
    n_logprobs: int | None = None
    """Alternatives to report for each sampled token; None reports no log-probabilities."""
    n_prompt_logprobs: int | None = None
    """Alternatives to report for each token of the prompt; None for a prompt that is not scored."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Log-probabilities of the prompt, if an earlier request computed them."""
    job: int = 0
    """The number of the call that it belongs to; 0 for none. Answers of one call may draft from each other."""
    owner: str = ""
    """Identifies the engine that the request was submitted to."""
    output: tuple[int, ...] = ()
    """Output to continue: tokens that an earlier request with this prompt sampled."""
    output_logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of `output`, if asked for."""
    continues: int | None = None
    """The number of the sequence whose result this request continues; None if it continues none."""
    grammar: Grammar | None = None
    """What the output must match."""
    is_grammar_open: bool = False
    """Whether the grammar depends on the end of the prompt's text; `grammar` is None until that is known."""
    ending: str = ""
    """Text that is appended to the prompt and scored."""
    dry_breakers: DryBreakers | None = None
    """Strings at which DRY's search for repetitions stops."""
    can_shift: bool = False
    """Whether the engine supports `n_discard`."""
    n_trained: int = 0
    """The model's training context in tokens; 0 if unknown."""
    asked_stops: Collection[int] = ()
    """Those of `stop_tokens` that the caller gave; a set likewise."""


@dataclass(eq=False, slots=True)
class RequestClock:
    """When a request was submitted, admitted and so on, in seconds of the engine's clock."""

    submitted_s: float
    admitted_s: float | None = None
    computed_s: float | None = None
    """When the prompt was computed; set only if nothing is sampled."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    def after_s(self, when_s: float | None) -> float | None:
        """Return the seconds from submission to `when_s`; None if that is None."""
        return None if when_s is None else when_s - self.submitted_s
