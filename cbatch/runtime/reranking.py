"""Scores of documents, by a classifier or by a chat model that is asked about each document."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.embedding import TextSettings, logit, sigmoid
from cbatch.errors import PromptError, RequestFailedError, TextTooLongError
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.response import BatchResult
    from cbatch.runtime.interface import Runtime
    from cbatch.support.model_facts import ModelFacts

_YES, _NO = "yes", "no"

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Source of both: the model card of Qwen3-Reranker.

_OPTIONS = {"choice": [_YES, _NO], "choice_probs": True}

N_SEQUENCES = len((_YES, _NO))
"""Sequences of the request that judges a document."""

_N_ANSWER = 8
"""Tokens kept free for the longest answer and marks around it. Our choice."""


class Judge:
    """Makes the prompts by which a model for chats judges documents. From any thread."""

    def __init__(self, runtime: Runtime, facts: ModelFacts, settings: TextSettings) -> None:
        self._runtime, self._settings = runtime, settings
        self._is_chat = bool(facts.chat_template)
        self._variables = (
            {"enable_thinking": False} if "enable_thinking" in facts.chat_template else {}
        )

    def prompt(self, document: BatchPrompt) -> BatchPrompt:
        """Return the prompt of a document, cut off where that is asked for.

        Raises:
            TextTooLongError: there is no room for it.
            PromptError: the document is token ids.
        """
        text = document.prompt
        if text is None:
            raise PromptError("a document to rerank must be a string, not token ids")
        made, n_limit = self._prompt(text), self._runtime.n_window - _N_ANSWER
        if self._settings.truncate is not None:
            made = self._cut(text, made, n_limit)
        return replace(made, id=document.id)

    def _cut(self, text: str, made: BatchPrompt, n_limit: int) -> BatchPrompt:
        n_tokens = self._n_tokens(made)
        if n_tokens <= n_limit:
            return made
        tokens: Sequence[int] = self._runtime.tokens_of(BatchPrompt(prompt=text), RunOptions())
        n_left = len(tokens)
        while n_tokens > n_limit:
            n_left -= n_tokens - n_limit
            if n_left <= 0:
                raise TextTooLongError(n_tokens, n_limit, is_cut=True)
            some = tokens[:n_left] if self._settings.truncate == "end" else tokens[-n_left:]
            text = b"".join(self._runtime.pieces_of(list(some))).decode("utf-8", "ignore")
            made = self._prompt(text)
            n_tokens = self._n_tokens(made)
        return made

    def _n_tokens(self, prompt: BatchPrompt) -> int:
        return self._runtime.n_tokens_of(prompt, RunOptions.of(prompt.options))

    def _prompt(self, text: str) -> BatchPrompt:
        settings = self._settings
        asked = (
            f"<Instruct>: {settings.instruction or _INSTRUCTION}\n"
            f"<Query>: {settings.query}\n<Document>: {text}"
        )
        options: dict[str, Any] = dict(_OPTIONS)
        if not self._is_chat:
            words = f"{_SYSTEM}\n\n{asked}\n\nAnswer:"
            return BatchPrompt(prompt=words, options={**options, "choice": [" yes", " no"]})
        if self._variables:
            options["chat_template_kwargs"] = self._variables
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]
        return BatchPrompt(messages, options=options)


def judged(result: BatchResult, *, is_raw: bool) -> float:
    """Return the score of a document by its answer, yes or no: the probability of yes, or its logit.

    Raises:
        RequestFailedError: the request has ended without one.
    """
    if result.choice_probs is None:
        raise RequestFailedError(f"the document was not scored: {result.finish_reason}")
    found = {text.strip(): p for text, p in result.choice_probs.items()}[_YES]
    return logit(found) if is_raw else found


def classified(result: BatchResult, *, facts: ModelFacts, is_raw: bool) -> float:
    """Return the score that a classifier gave: its first output, a logit or a probability. Raises as `judged`."""
    if not result.embedding:
        raise RequestFailedError(f"the document was not scored: {result.finish_reason}")
    (found,) = struct.unpack("<f", result.embedding[:4])
    if facts.has_probabilities:
        return logit(found) if is_raw else float(found)
    return float(found) if is_raw else sigmoid(found)
