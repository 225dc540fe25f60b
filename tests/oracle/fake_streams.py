"""What `FakeBackend` gives for a sequence run alone: the reference for whatever company and scheduling change."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.fake.fake_tokens import (
    fake_score,
    matcher_of,
    mix,
    shifted,
    state_after,
    tag_of,
)
from cbatch.core.plan import GrammarStep, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.backend.fake import FakeBackend
    from cbatch.core.plan import Binding
    from cbatch.options import AdapterSet


def rolled(token_ids: Any, logits: Any) -> Any:
    """A processor of logits that depends on every token so far."""
    return np.roll(logits, shift_of(token_ids.tolist()))


def shift_of(token_ids: Sequence[int]) -> int:
    """How far `rolled` moves logits."""
    return len(token_ids) + sum(token_ids)


def stream_alone(
    backend: FakeBackend,
    prompt: Sequence[int],
    binding: Binding,
    n_output: int,
    adapters: AdapterSet = (),
) -> list[int]:
    """The first `n_output` tokens, the end included; `binding.history` is what it was before the first output."""
    tag = tag_of(adapters)
    state, output = state_after(backend.start, [token | tag for token in prompt]), list[int]()
    while len(output) < n_output:
        matcher = matcher_of(binding, output)
        history = (*binding.history, *output)
        token = backend.next_token(state, history, binding, len(prompt) + len(output))
        if binding.processor is not None:
            token = (token + shift_of(history)) % backend.vocab.n_vocab
        output.append(matcher.choose(token) if matcher else token)
        if output[-1] in binding.stop_tokens:
            break
        step = matcher.follow(output[-1]) if matcher else GrammarStep()
        if step.problem:
            del output[-1]
        if step.problem or (step.is_complete and not step.forced):
            break
        state = mix(state, output[-1] | tag)
    return output


class MovingContext:
    """The cells of a sequence alone whose window moves when it is full, and the last token, which has none yet."""

    def __init__(
        self,
        backend: FakeBackend,
        tokens: Sequence[int],
        n_keep: int,
        n_discard: int,
        n_window: int,
    ) -> None:
        self.cells = list(tokens)
        self._start, self._sizes = backend.start, (n_keep, n_discard)
        self._n_window = n_window
        while len(self.cells) > n_window:
            del self.cells[n_keep : n_keep + n_discard]

    def append(self, cell: int) -> None:
        """Add a token; if it is one too many, those that leave go before it is computed."""
        if len(self.cells) == self._n_window:
            self.cells = shifted(self._start, self.cells, *self._sizes)
        self.cells.append(cell)


def scores_alone(
    backend: FakeBackend, tokens: Sequence[int], n_top: int, adapters: AdapterSet = ()
) -> list[TokenLogprobs]:
    """The scores of all tokens but the first."""
    state, tag = backend.start, tag_of(adapters)
    scores = list[TokenLogprobs]()
    for token, target in pairwise(tokens):
        state = mix(state, token | tag)
        scores.append(fake_score(state, target, n_top))
    return scores
