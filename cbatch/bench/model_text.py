"""A model's vocabulary, without its weights: what writes and counts prompts."""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbatch.bench.exact_text import ExactText

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cbatch.support.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class ModelText:
    """What the vocabulary of a model can do, and what the file says of the model."""

    path: str
    tokenize: Callable[[str], Sequence[int]]
    exact: ExactText
    n_ctx_train: int
    end_tokens: Sequence[int]
    facts: ModelFacts

    def answer_tokens(self, text: str) -> Sequence[int]:
        """Return the tokens of an answer: without the mark that begins a prompt."""
        return self.tokenize(text)[len(self.tokenize("")) :]


@contextmanager
def model_text(path: str | None) -> Iterator[ModelText]:
    """Open a model's vocabulary for the block; None: of the model that ships inside.

    Raises:
        ModelLoadError: no such file, damaged, or not a model that generates text.
    """
    from cbatch.backend.llama.log import llama_log  # llama_cpp is slow to import
    from cbatch.backend.llama.model import facts_of
    from cbatch.backend.load.open_model import open_model, shipped_model

    found = str(shipped_model() if path is None else path)
    with llama_log().captured(), closing(open_model(found, has_weights=False)) as model:
        tokenize, end_tokens = model.vocab.tokenize, model.vocab.end_tokens
        exact = ExactText(tokenize)
        yield ModelText(found, tokenize, exact, model.n_ctx_train, end_tokens, facts_of(model))
