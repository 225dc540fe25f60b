"""Whether llama.cpp computes several sequences together as it computes each alone, tried when a model is loaded.

If it does not, an engine computes one sequence at a time: slower, but right. A crash of llama.cpp is found in a
separate process, and the engine then gets settings that do not crash; see `survival`.
"""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cbatch.backend.llama.context import context_cells
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load import notes
from cbatch.backend.load.note_parts import note_parts
from cbatch.backend.load.probe import CheckedSteps
from cbatch.backend.load.survival import find_surviving
from cbatch.core.plan import Slot
from cbatch.core.span import Span
from cbatch.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

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

_KNOWN = frozenset(("gemma", "granite", "llama", "mistral3", "olmo", "qwen2", "qwen3", "smollm3"))
"""Dense transformers with cells of one kind, whose graphs are the first that llama.cpp had: these are not tried.
Source: `cbatch verify --archs` on the models of tests/zoo."""

_NOTE = "company"
_N_PROMPTS, _N_DECODED = (4, 2, 3), 3
_N_TEXT = max(_N_PROMPTS) + _N_DECODED
_N_TRIALS = 2
"""Trials with other tokens that have to fail: where rounding changes the choice of an expert, one may."""


def find_company(
    model: LlamaModel, asked: EngineOptions, is_stopped: Callable[[], bool] = bool
) -> Tuning:
    """Return options with which llama.cpp computes several sequences rightly and does not crash: known, noted or tried.

    With `exact` several slots need no trial: the proof that follows shows more.
    """
    if found := find_known(model, asked) or _remembered(model, asked):
        return found
    options = find_surviving(model, asked, is_stopped)
    if options.exact and options.n_slots > 1:
        found = Tuning(options, BY_EXACT)
    else:
        roomy = Tuning(_with_room(options))
        with closing(LlamaBackend(model, roomy, owns_model=False)) as backend:
            found = try_company(backend, is_stopped, options)
    found = _compared(found, asked, model.architecture)
    if parts := _parts(model, asked):
        options = found.options
        said = [found.company, options.n_slots, options.n_ubatch, found.is_sound]
        notes.write(json.dumps(said), _NOTE, *parts)
    return found


def _with_room(options: EngineOptions) -> EngineOptions:
    """Return options with the same graphs, for a context that holds the trial's steps and texts, whatever its sizes."""
    n_ctx, n_window = options.n_ctx, options.ctx_per_seq
    return replace(
        options,
        n_batch=max(options.n_batch, options.n_slots * max(_N_PROMPTS)),
        n_ubatch=min(options.n_ubatch, options.n_batch),
        n_ctx=n_ctx and max(n_ctx, options.n_slots * _N_TEXT),
        ctx_per_seq=n_window and max(n_window, _N_TEXT),
    )


def _compared(found: Tuning, asked: EngineOptions, architecture: str) -> Tuning:
    options = found.options
    if not found.is_sound or (options.n_slots, options.n_ubatch) == (asked.n_slots, asked.n_ubatch):
        return found
    if options.n_slots == 1:
        why = f"llama.cpp crashes on several sequences of a {architecture} model"
        return replace(found, company=_alone(why), is_sound=False)
    sizes = {
        "parallel": (options.n_slots, asked.n_slots),
        "n_ubatch": (options.n_ubatch, asked.n_ubatch),
    }
    changed = {name: pair for name, pair in sizes.items() if pair[0] != pair[1]}
    now = " and ".join(f"{name}={pair[0]}" for name, pair in changed.items())
    before = " and ".join(f"{name}={pair[1]}" for name, pair in changed.items())
    why = f"{now}, because llama.cpp crashes with {before}"
    return replace(found, company=f"{found.company}; {why}", is_sound=False)


def _parts(model: LlamaModel, options: EngineOptions) -> Sequence[str]:
    """Return what a finding depends on; empty if that is unknown or no trial is needed."""
    if model.is_borrowed or (options.exact and options.n_slots > 1):
        return ()
    n_graph = min(options.n_ubatch, context_cells(model, options))
    return note_parts(model.parts, options, slots=options.n_slots, n_graph=n_graph)


def _remembered(model: LlamaModel, options: EngineOptions) -> Tuning | None:
    parts = _parts(model, options)
    found = notes.read_as(tuple[str, int, int, bool], _NOTE, *parts) if parts else None
    if found is None:
        return None
    text, n_slots, n_ubatch, is_sound = found
    if is_sound:  # nothing was changed, so `parallel` may stay None
        return Tuning(options, text)
    if not (1 <= n_slots <= options.n_slots and 1 <= n_ubatch <= options.n_ubatch):
        return None
    return Tuning(replace(options, parallel=n_slots, n_ubatch=n_ubatch), text, is_sound=False)


def find_known(model: LlamaModel, options: EngineOptions) -> Tuning | None:
    """Return what is known without a trial; None where a trial has to tell."""
    is_known = model.has_plain_cells and model.architecture in _KNOWN
    if is_known and not _has_experts(model):
        said = f"together: {model.architecture} models give the same results in a batch as alone"
        return Tuning(options, said)
    return None


def try_company(
    backend: LlamaBackend,
    is_stopped: Callable[[], bool] = bool,
    options: EngineOptions | None = None,
) -> Tuning:
    """Try a new backend in some 50 small steps; every slot is empty afterwards.

    Args:
        backend: its batch and its window hold the trial's prompts.
        is_stopped: called now and then; once it is true, the trial ends with an `EngineError`.
        options: those that the finding is for; default: the backend's.
    """
    options = options or backend.options
    for seed in range(_N_TRIALS):
        problem, is_wrong_alone = _CompanyTrial(backend, is_stopped, seed).find_problem()
        if not problem:
            break
    else:
        n_ubatch = 1 if is_wrong_alone else options.n_ubatch
        alone = replace(options, parallel=1, n_ubatch=n_ubatch)
        return Tuning(alone, _alone(problem), is_sound=False)
    if backend.n_slots == 1:
        return Tuning(options, "one at a time: there is one slot")
    said = "together: a trial gave the same results in a batch as alone, within rounding"
    return Tuning(options, said)


def _alone(why: str) -> str:
    return f"one at a time: {why}"


def _has_experts(model: LlamaModel) -> bool:
    return int(model.metadata.get(f"{model.architecture}.expert_count", 0)) > 0


class _CompanyTrial(CheckedSteps):
    """Computes one of three texts in each slot: each text alone, token by token, then all slots together."""

    def __init__(self, backend: LlamaBackend, is_stopped: Callable[[], bool], seed: int) -> None:
        super().__init__(backend, is_stopped)
        self._n_prompts = [n for n, _ in zip(_N_PROMPTS, range(backend.n_slots), strict=False)]
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
                return (
                    "llama.cpp gives other results for a prompt than for its tokens one by one",
                    True,
                )
            found = [pair for slots in self._companies() for pair in self._together(slots)]
        except EngineError as error:
            if self._is_stopped():
                raise
            return f"llama.cpp does not compute several sequences: {error}", False
        finally:
            self.clear()
        limit = min(max(ROUNDING_GAIN * rounding, ROUNDING_LEAST), ROUNDING_MOST)
        for place, n, slot, logits in found:
            if _difference(alone[slot % len(alone)], logits) > limit:
                of_all = f"sequence {place} of {n}"
                return (
                    f"llama.cpp gives other results for {of_all} than for that sequence alone",
                    False,
                )
        return "", False

    def _companies(self) -> Iterator[range]:
        """Yield slots to compute together: all, then fewer at either end."""
        n = self._backend.n_slots
        yield range(n)
        for i, width in enumerate(sorted({*range(3, n, max(1, n // 4)), *range(n - 1, 2, -n)})):
            yield range(width) if i % 2 else range(n - width, n)

    def _token_by_token(self, i: int) -> list[Logits]:
        """Compute a sequence alone; return the logits after its prompt and after each token that follows."""
        self.clear()
        found = []
        for position, token in enumerate(self._texts[i]):
            found += self._run([Span(Slot(i), position, (token,), has_output=True)])
        return found[self._n_prompts[i] - 1 :]

    def _whole(self, i: int) -> list[Logits]:
        self.clear()
        prompt = self._texts[i][: self._n_prompts[i]]
        return self._run([Span(Slot(i), 0, prompt, has_output=True)])

    def _together(self, slots: range) -> Iterator[tuple[int, int, int, list[Logits]]]:
        """Compute these slots: prompts together, some prompts beside rows, rows without the first slot, rows of all.

        Yields:
            its place (from 1), the number of slots, its slot, and the logits after its prompt and after each computed
            token that follows.
        """
        self.clear()
        n_done = dict.fromkeys(slots, 0)
        found: dict[int, list[Logits]] = {slot: [] for slot in slots}
        for which in (slots[:2], slots, slots[1:], slots):
            chunks = []
            for slot in which:
                i_text = slot % len(self._texts)
                start = n_done[slot]
                n_done[slot] = start + 1 if start else self._n_prompts[i_text]
                tokens = self._texts[i_text][start : n_done[slot]]
                chunks.append(Span(Slot(slot), start, tokens, has_output=True))
            for slot, logits in zip(which, self._run(chunks), strict=True):
                found[slot].append(logits)
        for place, slot in enumerate(slots, 1):
            yield place, len(slots), slot, found[slot]

    def _run(self, chunks: Sequence[Span]) -> list[Logits]:
        if chunks:
            self.compute(chunks)
        return [self._backend.logits(chunk.slot) for chunk in chunks]


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
