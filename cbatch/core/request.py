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
"""Stands for an output without end, where the window moves on."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked: the options are merged and the seed is drawn."""

    id: str
    prompt: BatchPrompt
    options: RunOptions
    sampling: Sampling
    stop_tokens: tuple[int, ...] = ()
    deadline_s: float = math.inf
    """When it ends at the latest, in seconds of the engine's clock."""
    adapters: AdapterSet = ()
    n_logprobs: int | None = None
    """Alternatives to report for each sampled token; None where no log-probabilities are asked for."""
    n_prompt_logprobs: int | None = None
    """Alternatives to report for each token of the prompt; None where it is not scored."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Log-probabilities of the prompt, where an earlier request found them."""
    job: int = 0
    """The number of the call it belongs to; 0 for none. Drafts may come from the answers of one call, too."""
    owner: str = ""
    """The mark of the engine that it was submitted to."""
    output: tuple[int, ...] = ()
    """Output to go on from: tokens that an earlier request with this prompt sampled."""
    output_logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of `output`, where they are asked for."""
    continues: int | None = None
    """The number of the earlier request's sequence."""
    grammar: Grammar | None = None
    """What the output must match."""
    is_grammar_open: bool = False
    """Whether the end of the prompt's text decides its grammar, which is None until then."""
    ending: str = ""
    """Text that is put behind the prompt, and scored."""
    dry_breakers: DryBreakers | None = None
    """Strings past which DRY looks for no repetition."""
    can_shift: bool = False
    """Whether the engine could serve `n_discard`."""
    n_trained: int = 0
    """Tokens that the model was trained for; 0 where unknown."""

    @property
    def slides(self) -> bool:
        """Whether tokens of a prompt that does not fit the window are left out, so that the rest fits."""
        options = self.options
        is_scored = self.n_prompt_logprobs is not None
        return bool(options.n_discard) and not options.prefill_only and not is_scored

    def n_keep(self, n_prompt: int, n_first: int) -> int:
        """Return the tokens that a moving window is to keep: by default `n_first`; −1 stands for the whole prompt."""
        n_keep = n_first if self.options.n_keep is None else self.options.n_keep
        return n_prompt if n_keep < 0 else n_keep

    def cap(self, n_prompt: int, n_window: int, n_first: int = 0) -> tuple[int, list[str]]:
        """Return the most tokens of output for a prompt of `n_prompt` tokens, with a warning where more are asked for.

        Raises:
            RequestFailedError: the prompt has no token.
            PromptTooLongError: the prompt does not fit the window, or not with all of a strict cap, or it slides and
                what is kept of it does not fit.
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
        """Return whether the prompt would fit with `n_discard`, which it does not set."""
        is_whole = self.options.prefill_only or self.n_prompt_logprobs is not None
        return self.can_shift and not is_whole and n_keep <= n_window - 2

    def _n_least(self, cap: int | None) -> int:
        """Return how much output there must be room for: all of a strict cap, or one token more than there is."""
        n_next = 1
        if not self.options.n_discard:
            n_next += len(self.output)
            if self.options.strict_max_tokens and cap is not None:
                return cap
        return n_next if cap is None else min(cap, n_next)
