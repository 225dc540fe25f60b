"""One request: what was asked, with merged options and a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.errors import PromptError, PromptTooLongError

if TYPE_CHECKING:
    from cbatch.messages import BatchPrompt
    from cbatch.options import AdapterSet, DryBreakers, Grammar, RunOptions, Sampling
    from cbatch.response import TokenLogprob

MAX_OUTPUT = 2**31 - 1
"""The cap of an unlimited output, possible with a moving window."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, with merged options and a seed."""

    id: str
    prompt: BatchPrompt
    options: RunOptions
    sampling: Sampling
    stop_tokens: tuple[int, ...] = ()
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
    """The number of the call it belongs to; 0 for none. Draft tokens may come from other answers of the call."""
    owner: str = ""
    """Identifies the engine that the request was submitted to."""
    output: tuple[int, ...] = ()
    """Output to continue: tokens that an earlier request with this prompt sampled."""
    output_logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of `output`, if asked for."""
    continues: int | None = None
    """The number of the earlier request's sequence."""
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

    @property
    def slides(self) -> bool:
        """Whether tokens are left out of a prompt that is larger than the window."""
        options = self.options
        is_scored = self.n_prompt_logprobs is not None
        return bool(options.n_discard) and not options.prefill_only and not is_scored

    def n_keep(self, n_prompt: int, n_first: int) -> int:
        """Return how many tokens a moving window keeps: by default `n_first`; the option −1 means the whole prompt."""
        n_keep = n_first if self.options.n_keep is None else self.options.n_keep
        return n_prompt if n_keep < 0 else n_keep

    def cap(self, n_prompt: int, n_window: int, n_first: int = 0) -> tuple[int, list[str]]:
        """Return the maximum output length for a prompt of `n_prompt` tokens, with a warning if more was asked for.

        Raises:
            RequestFailedError: the prompt has no token.
            PromptTooLongError: the window is too small for the prompt, for the prompt and a strict cap, or for what is
                kept of a prompt with left-out tokens.
        """
        if not n_prompt:
            raise PromptError("the prompt is empty: it has no token")
        cap = 0 if self.options.prefill_only else self.options.max_tokens
        n_least = self._n_least(cap)
        if n_prompt + n_least > n_window:
            n_keep = self.n_keep(n_prompt, n_first) if self.slides else None
            if n_keep is None or n_keep > n_window - 2:
                raise PromptTooLongError(
                    n_prompt,
                    n_window,
                    n_least,
                    n_keep=n_keep,
                    can_slide=self._could_slide(self.n_keep(n_prompt, n_first), n_window),
                    can_lower=bool(self.options.strict_max_tokens) and n_prompt < n_window,
                    n_trained=self.n_trained,
                )
        n_most = MAX_OUTPUT if self.options.n_discard else n_window - n_prompt
        if cap is None or cap <= n_most:
            return n_most if cap is None else cap, []
        why = f"the prompt has {n_prompt} and the window {n_window}"
        return n_most, [f"max_tokens is {n_most}, not {cap}: {why}"]

    def _could_slide(self, n_keep: int, n_window: int) -> bool:
        """Return whether the prompt would fit if the request set `n_discard`."""
        is_whole = self.options.prefill_only or self.n_prompt_logprobs is not None
        return self.can_shift and not is_whole and n_keep <= n_window - 2

    def _n_least(self, cap: int | None) -> int:
        """Return the output length that must fit: a strict cap, or one token more than there is."""
        n_next = 1
        if not self.options.n_discard:
            n_next += len(self.output)
            if self.options.strict_max_tokens and cap is not None:
                return cap
        return n_next if cap is None else min(cap, n_next)
