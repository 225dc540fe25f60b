"""One request: what was asked, its prompt as tokens, and when it passed its stations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from cbatch.core.prefix_index import n_common
from cbatch.errors import (
    CBatchError,
    PromptError,
    PromptTooLongError,
    RequestFailedError,
    words_of,
)
from cbatch.response import Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.core.driver import SequenceDriver
    from cbatch.messages import BatchPrompt
    from cbatch.options import AdapterSet, DryBreakers, Grammar, RunOptions, Sampling
    from cbatch.response import TokenLogprob


Tokenize: TypeAlias = "Callable[[BatchPrompt, RunOptions], Sequence[int]]"

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
    dry_breakers: DryBreakers | None = None
    """Strings past which DRY looks for no repetition."""

    def cap(self, n_prompt: int, n_window: int) -> tuple[int, list[str]]:
        """Return the most tokens of output for a prompt of `n_prompt` tokens, with a warning where more are asked for.

        Raises:
            RequestFailedError: the prompt has no token.
            PromptTooLongError: the prompt does not fit the window, or not with all of a strict cap.
        """
        if not n_prompt:
            raise PromptError("the prompt is empty: it has no token")
        cap = 0 if self.options.prefill_only else self.options.max_tokens
        n_least = self._n_least(cap)
        if n_prompt + n_least > n_window:
            raise PromptTooLongError(n_prompt, n_window, n_least)
        n_most = MAX_OUTPUT if self.options.n_discard else n_window - n_prompt
        if cap is None or cap <= n_most:
            return n_most if cap is None else cap, []
        why = f"the prompt has {n_prompt} and the window {n_window}"
        return n_most, [f"max_tokens is {n_most}, not {cap}: {why}"]

    def _n_least(self, cap: int | None) -> int:
        """Return how much output there must be room for: all of a strict cap, or one token more than there is."""
        n_next = 1
        if not self.options.n_discard:
            n_next += len(self.output)
            if self.options.strict_max_tokens and cap is not None:
                return cap
        return n_next if cap is None else min(cap, n_next)


class PromptPreparer:
    """Makes prompts tokens; changes nothing but their sequences. From any thread."""

    def __init__(self, tokenize: Tokenize, n_window: int) -> None:
        self._tokenize, self._n_window = tokenize, n_window

    def prepare(self, driver: SequenceDriver) -> None:
        """Make a sequence's prompt tokens, or set its error where that cannot be; no effect where that was done."""
        if driver.is_prepared:
            return
        try:
            tokens = self._tokenize(driver.request.prompt, driver.request.options)
            driver.prepare(tokens, self._n_window)
            if driver.request.options.n_discard:
                driver.keep_in_window(self._n_first_message(driver, tokens))
        except CBatchError as error:
            driver.error = error
        except Exception as error:
            # a template may raise anything: it is this request's own failure
            driver.error = RequestFailedError(
                f"the prompt could not be prepared: {words_of(error)}"
            )
            driver.error.__cause__ = error

    def _n_first_message(self, driver: SequenceDriver, tokens: Sequence[int]) -> int:
        """Return how many tokens the first message of a chat takes; 1 for a prompt that is no chat."""
        prompt, options = driver.request.prompt, driver.request.options
        if prompt.messages is None:
            return 1
        try:
            first = self._tokenize(replace(prompt, messages=prompt.messages[:1]), options)
        except Exception:  # a template may refuse a lone message
            return 1
        return max(1, n_common([*first], [*tokens]))


@dataclass(eq=False, slots=True)
class RequestClock:
    """When one request passed its stations, in seconds of the engine's clock."""

    submitted_s: float
    admitted_s: float | None = None
    computed_s: float | None = None
    """When the prompt was computed, where nothing is sampled."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    def timings(self, n_computed: int, n_output: int) -> Timings:
        """Return the request's times; a rate is None where nothing was timed, never a division by zero.

        Args:
            n_computed: tokens that were computed for the first one to be sampled.
            n_output: tokens that were sampled.
        """
        end = self.finished_s if self.finished_s is not None else self.submitted_s
        admitted, first, last = self.admitted_s, self.first_token_s, self.last_token_s
        return Timings(
            queue_s=(end if admitted is None else admitted) - self.submitted_s,
            ttft_s=None if first is None else first - self.submitted_s,
            total_s=end - self.submitted_s,
            prompt_tps=_rate(n_computed, admitted, self.computed_s if first is None else first),
            generation_tps=_rate(n_output - 1, first, last),
            last_token_s=None if last is None else last - self.submitted_s,
        )


def _rate(n_tokens: int, start_s: float | None, end_s: float | None) -> float | None:
    if start_s is None or end_s is None or end_s <= start_s or n_tokens < 1:
        return None
    return n_tokens / (end_s - start_s)
