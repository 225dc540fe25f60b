"""From a prompt to the tokens of its sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.core.prefix_index import n_common
from cbatch.errors import CBatchError, RequestFailedError, words_of
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from cbatch.core.driver import SequenceDriver

Tokenize = Callable[[BatchPrompt, RunOptions], Sequence[int]]


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
