"""Prompts become tokens: when their turn comes, so that a long queue costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.core.prefix import n_common
from cbatch.errors import CBatchError, RequestFailedError, words_of
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.request import Request

Tokenize = Callable[[BatchPrompt, RunOptions], Sequence[int]]


class Prompts:
    """Makes prompts tokens, for windows of `n_window`."""

    def __init__(self, tokenize: Tokenize, n_window: int) -> None:
        self.tokenize, self._n_window = tokenize, n_window

    def prepare(self, driver: SequenceDriver) -> None:
        """Make the prompt tokens, or note why that cannot be; touches nothing but the driver."""
        if driver.is_prepared:
            return
        try:
            tokens = self.tokenize(driver.request.prompt, driver.request.options)
            driver.prepare(tokens, self._n_window)
            if driver.request.options.n_discard:
                driver.keep_in_window(self._n_first_message(driver.request, tokens))
        except CBatchError as error:
            driver.refusal = error
        except Exception as error:
            # a template may raise anything: it is this request's own failure
            driver.refusal = RequestFailedError(
                f"the prompt could not be prepared: {words_of(error)}"
            )
            driver.refusal.__cause__ = error

    def _n_first_message(self, request: Request, tokens: Sequence[int]) -> int:
        """Return how many tokens the first message of a chat takes; the first token of what is no chat."""
        prompt = request.prompt
        if prompt.messages is None:
            return 1
        try:
            first = self.tokenize(replace(prompt, messages=prompt.messages[:1]), request.options)
        except Exception:  # a template may refuse a lone message
            return 1
        return max(1, n_common([*first], [*tokens]))
