"""Whether llama.cpp computes several sequences together as it computes each alone, tried when a model is loaded.

Where it does not, an engine computes one sequence at a time: slower, and right.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cbatch.backend.bindings import llama_cpp
from cbatch.core.plan import Binding, Chunk, Slot, StepPlan
from cbatch.errors import EngineError
from cbatch.options import GREEDY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.llama_backend import LlamaBackend
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions

    Logits = NDArray[np.float32]

ROUNDING_LEAST, ROUNDING_MOST, ROUNDING_GAIN = 2e-3, 0.1, 1e4
"""Limits of what rounding may do: the squared difference of two rows of logits by the variance of one. A prompt in one
chunk and token by token shows how much it does to this model; in company it may be the gain times as much.

Source: measured on 131 architectures and 9 kinds of weights. Where llama.cpp is right: up to 0.001 in one chunk, 0.005
in company, and at most 2,000 times as much. Where it is wrong: 0.01 to 2.6."""

BY_EXACT = "together: exact=True holds"
"""What is said where a proof makes a trial needless."""

_ENDING = {
    "plamo2": "0.3.36",
}
"""Architectures whose computation of several sequences ends the process or is wrong, and the version of
llama-cpp-python in which it was seen last, by `cbatch verify --archs`.

plamo2: src/models/plamo2.cpp writes states at `kv_head * n_seqs` where they belong at `kv_head`."""

_KNOWN = frozenset(("gemma", "granite", "llama", "mistral3", "olmo", "qwen2", "qwen3", "smollm3"))
"""Dense transformers with cells of one kind, whose graphs are the first that llama.cpp had: these are not tried.
Source: `cbatch verify --archs` on the models of tests/zoo."""

_N_PROMPTS, _N_DECODED = (4, 2, 3), 3
_N_TRIALS = 2
"""Trials with other tokens that have to fail: where rounding changes the choice of an expert, one may."""


@dataclass(frozen=True, slots=True)
class Company:
    """How the sequences of a model are computed."""

    text: str
    """See `Engine.company`."""
    options: EngineOptions
    is_sound: bool = True
    """Whether the options are the given ones, which are right."""


def find_known(model: LlamaModel, options: EngineOptions) -> Company | None:
    """Return what is known without a trial; None where a trial has to tell."""
    version = _ENDING.get(model.architecture)
    if version and options.n_slots > 1:
        why = (
            f"llama.cpp computes several sequences of a {model.architecture} model wrongly, or ends the process "
            f"(seen with llama-cpp-python {version}, this is {llama_cpp.__version__})"
        )
        return Company(_alone(why), replace(options, parallel=1), is_sound=False)
    is_plain = not (model.has_states or llama_cpp.llama_model_n_swa(model.pointer))
    if is_plain and model.architecture in _KNOWN and not _has_experts(model):
        return Company(
            f"together: {model.architecture} models are known to be computed alike", options
        )
    return None


def find_company(backend: LlamaBackend, is_stopped: Callable[[], bool] = bool) -> Company:
    """Try it on a new backend, in some 25 small steps; every slot is empty afterwards."""
    options = backend.options
    if options.exact and backend.n_slots > 1:
        return Company(BY_EXACT, options)
    for seed in range(_N_TRIALS):
        problem, is_wrong_alone = _Trial(backend, is_stopped, seed).find_problem()
        if not problem:
            break
    else:
        n_ubatch = 1 if is_wrong_alone else options.n_ubatch
        alone = replace(options, parallel=1, n_ubatch=n_ubatch)
        return Company(_alone(problem), alone, is_sound=False)
    if backend.n_slots == 1:
        return Company("one at a time: there is one slot", options)
    return Company("together: a trial gave the same alone and in company, within rounding", options)


def _alone(why: str) -> str:
    return f"one at a time: {why}"


def _has_experts(model: LlamaModel) -> bool:
    return int(model.metadata.get(f"{model.architecture}.expert_count", 0)) > 0


class _Trial:
    """Computes up to three sequences in the first slots: alone, token by token, and together."""

    def __init__(self, backend: LlamaBackend, is_stopped: Callable[[], bool], seed: int) -> None:
        self._backend, self._is_stopped = backend, is_stopped
        self._n_prompts = _N_PROMPTS[: backend.n_slots]
        dice, n_vocab = random.Random(seed), backend.vocab.n_vocab
        # [0, n) prompt   [n, n + _N_DECODED) fed one by one
        self._texts = [dice.choices(range(n_vocab), k=n + _N_DECODED) for n in self._n_prompts]

    def find_problem(self) -> tuple[str, bool]:
        """Return what is wrong, empty if nothing is, and whether a prompt alone is computed wrongly already."""
        alone = [self._token_by_token(i) for i in range(len(self._texts))]
        try:
            whole = [self._whole(i) for i in range(len(self._texts))]
            rounding = max(map(_difference, alone, whole))
            if rounding > ROUNDING_MOST:
                return "llama.cpp computes a prompt otherwise than its tokens one by one", True
            together = self._together()
        except EngineError as error:
            if self._is_stopped():
                raise
            return f"llama.cpp does not compute several sequences: {error}", False
        finally:
            self._clear()
        limit = min(max(ROUNDING_GAIN * rounding, ROUNDING_LEAST), ROUNDING_MOST)
        for place, a, b in zip(("first", "second", "third"), alone, together, strict=False):
            if _difference(a, b) > limit:
                why = f"llama.cpp computes the {place} of several sequences otherwise than alone"
                return why, False
        return "", False

    def _token_by_token(self, i: int) -> list[Logits]:
        """Compute a sequence alone; return the logits after its prompt and after each token that follows."""
        self._clear()
        found = []
        for position, token in enumerate(self._texts[i]):
            found += self._run([Chunk(Slot(i), position, (token,), has_output=True)])
        return found[self._n_prompts[i] - 1 :]

    def _whole(self, i: int) -> list[Logits]:
        """Compute a prompt alone in one chunk; return the logits after it."""
        self._clear()
        prompt = self._texts[i][: self._n_prompts[i]]
        return self._run([Chunk(Slot(i), 0, prompt, has_output=True)])

    def _together(self) -> list[list[Logits]]:
        """Compute all: prompts together, one beside rows of one token, rows without the first sequence, rows of all.

        Returns:
            the logits of each after its prompt and after the tokens that follow, as many as were computed.
        """
        self._clear()
        n = len(self._texts)
        n_done = [0] * n
        found: list[list[Logits]] = [[] for _ in range(n)]
        every = range(n)
        for which in (every[:2], every, every[1:], every):
            chunks = []
            for i in which:
                start = n_done[i]
                n_done[i] = start + 1 if start else self._n_prompts[i]
                tokens = self._texts[i][start : n_done[i]]
                chunks.append(Chunk(Slot(i), start, tokens, has_output=True))
            for i, logits in zip(which, self._run(chunks), strict=True):
                found[i].append(logits)
        return found

    def _run(self, chunks: Sequence[Chunk]) -> list[Logits]:
        """Run one step; return the logits of each chunk."""
        if self._is_stopped():
            raise EngineError("it was stopped")
        if not chunks:
            return []
        result = self._backend.run(StepPlan(tuple(chunks)))
        if result.code:
            raise EngineError(f"llama_decode returned {result.code}")
        return [self._backend.logits(chunk.slot) for chunk in chunks]

    def _clear(self) -> None:
        slots = [Slot(i) for i in range(len(self._texts))]
        binds = tuple(Binding(slot, 0, GREEDY, ()) for slot in slots)
        self._backend.run(StepPlan((), clears=tuple(slots), binds=binds))


def _difference(alone: Sequence[Logits], found: Sequence[Logits]) -> float:
    """Return by how much rows of logits differ at most from those computed alone, as many as were found."""
    return max(_difference_of_rows(a, b) for a, b in zip(alone, found, strict=False))


def _difference_of_rows(alone: Logits, found: Logits) -> float:
    """Return the squared difference of two rows by the variance of the first; where either is finite alone, infinity.

    What is infinite or NaN in both is left out: some models mask tokens, and a broken model is broken alone.
    """
    is_finite = np.isfinite(alone)
    if not np.array_equal(is_finite, np.isfinite(found)):
        return np.inf
    a, b = alone[is_finite].astype(np.float64), found[is_finite].astype(np.float64)
    by = float(np.sum((a - b) ** 2))
    return by / float(np.sum((a - a.mean()) ** 2)) if by else 0.0
