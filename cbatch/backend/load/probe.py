"""The exactness probe: whether a request's logits depend on its company.

One sequence is computed alone, then in every way that a scheduler may compute it: with others in narrow and wide steps,
in chunks, in one step with other prompts, in another slot, computed again from its tokens. Logits are compared bit for
bit.
"""

from __future__ import annotations

import math
import random
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.pad_rows import ANY_SHAPE, RowShape
from cbatch.core.plan import Binding, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import BITWISE, EngineOptions
from cbatch.errors import CBatchError, EngineError
from cbatch.options import GREEDY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel

    Logits = NDArray[np.float32]

COULD_NOT_RUN = "not guaranteed: the probe could not run"
_NOT_ASKED = (
    "not guaranteed: the probe found no difference, but each step takes what fits of a prompt; "
    "exact=True cuts all prompts alike"
)
WIDTHS = (2, 7, 8, 9, 16)
"""Widths at which kernels of the CPU backend change. Source: measured; see docs/understand/exactness.md."""
_N_PROMPT = 70  # above 64: the chunk length from which flash attention takes its tiled path
_N_LONG = 560  # above 512: the cells from which a lone row takes flash attention's split path
_N_DECODED = 2
_N_LEAST = 16  # smallest window to try; smaller ones exist in unified memory alone


def probe(
    model: LlamaModel,
    options: EngineOptions,
    is_stopped: Callable[[], bool] = bool,
    shape: RowShape = ANY_SHAPE,
) -> str:
    """Return `bitwise`, or `not guaranteed: reason`, for this model under these settings.

    Works on a context of its own, so an engine on the same model is not disturbed. Computes about 5,000 tokens; ends
    once `is_stopped` is true. With `exact`, steps have the shape.
    """
    n_slots = min(options.n_exact_slots, max(WIDTHS) + 1)
    small = probed_options(model, options, n_slots, _N_LONG + 16)
    try:
        with model.in_use():
            finding = _first_finding(model, small, is_stopped, shape)
    except CBatchError as error:
        return f"{COULD_NOT_RUN}: {error}"
    if finding is None:
        return BITWISE if options.exact else _NOT_ASKED
    way, difference = finding
    cause = _cause(way, model, options)
    return f"not guaranteed: logits change {way} (by up to {difference:.2g}): {cause}"


def probed_options(
    model: LlamaModel, options: EngineOptions, n_slots: int, n_window: int
) -> EngineOptions:
    """Return the options of a context to probe: `n_slots` slots of at most `n_window` cells."""
    wanted = options.ctx_per_seq or (options.n_ctx or 2**20) // options.n_slots
    n_window = max(_N_LEAST, min(wanted, model.n_ctx_train or wanted, n_window))
    n_batch = max(options.n_batch, n_slots)
    return replace(
        options,
        parallel=n_slots,
        exact_slots=None,
        n_batch=n_batch,
        n_ctx=None,
        ctx_per_seq=n_window,
    )


def difference(a: Logits, b: Logits) -> float:
    """Return by how much two rows of logits differ at most; 0 only where their bits are equal."""
    if np.array_equal(a.view(np.uint32), b.view(np.uint32)):
        return 0.0
    with np.errstate(invalid="ignore"):  # between infinities
        by = float(np.max(np.abs(a - b)))
    return math.inf if math.isnan(by) else max(by, float(np.finfo(np.float32).tiny))


def _first_finding(
    model: LlamaModel, options: EngineOptions, is_stopped: Callable[[], bool], shape: RowShape
) -> tuple[str, float] | None:
    tuning = Tuning(options, shape=shape)
    with closing(LlamaBackend(model, tuning, owns_model=False)) as backend:
        n_window = min(backend.n_window, _N_LONG + 16)  # llama.cpp rounds a small one up
        for way, alone, found in Probe(backend, n_window, is_stopped).ways():
            for a, b in zip(alone, found, strict=True):
                if by := difference(a, b):
                    return way, by
    return None


def _cause(way: str, model: LlamaModel, options: EngineOptions) -> str:
    if options.kv == "unified":
        return "with kv='unified' the position of a cell changes the rounding"
    if way.startswith("with the width"):
        is_plain = model.file_type.startswith(("q8_0", "q4_0", "q4_1", "q5_0", "q5_1"))
        if is_plain and not options.exact:
            return "repacked weights or flash attention compute some rows of a step differently"
        return f"{model.file_type} weights use another kernel in narrow steps"
    if options.exact:
        return f"kernels for {model.file_type} weights depend on the shape of a step"
    if options.flash_attn != "off":
        return "flash attention chooses its kernel by the shape of a step"
    return "llama.cpp uses another kernel for one token than for several; exact=True cuts all prompts alike"


class CheckedSteps:
    """Runs steps of a backend of its own, one after another."""

    def __init__(self, backend: LlamaBackend, is_stopped: Callable[[], bool]) -> None:
        self._backend, self._is_stopped = backend, is_stopped

    def compute(self, chunks: Sequence[Span]) -> None:
        """Run one step; an `EngineError` says that it failed, or that no more is to be run."""
        if self._is_stopped():
            raise EngineError("the probe was stopped")
        result = self._backend.run(StepPlan(tuple(chunks)))
        if result.code:
            raise EngineError(f"llama_decode returned {result.code}")

    def clear(self) -> None:
        """Empty and bind every slot."""
        slots = [Slot(i) for i in range(self._backend.n_slots)]
        binds = tuple(Binding(slot, 0, GREEDY, ()) for slot in slots)
        self._backend.run(StepPlan((), clears=tuple(slots), binds=binds))


class Probe(CheckedSteps):
    """Computes made-up sequences on a backend, alone and in company."""

    def __init__(
        self, backend: LlamaBackend, n_window: int, is_stopped: Callable[[], bool]
    ) -> None:
        """Take a backend of its own, the cells that a slot may have, and what says whether to stop."""
        super().__init__(backend, is_stopped)
        dice = random.Random(1)
        n_vocab = backend.vocab.n_vocab
        n_prompt = min(_N_PROMPT, n_window - _N_DECODED - 2)
        n_long = min(_N_LONG, n_window - _N_DECODED - 2)
        # [0, n_prompt) prompt   [n_prompt, n_prompt + _N_DECODED) fed one by one
        self._tokens = [dice.randrange(n_vocab) for _ in range(n_prompt + _N_DECODED)]
        self._long = [dice.randrange(n_vocab) for _ in range(n_long + _N_DECODED)]
        self._others = [
            [dice.randrange(n_vocab) for _ in range(3 + (11 * i) % n_prompt + _N_DECODED)]
            for i in range(backend.n_slots)
        ]

    def ways(self) -> Iterator[tuple[str, list[Logits], list[Logits]]]:
        """Yield each way of computing, the fast ones first, with the logits computed alone and in this way."""
        alone = self._alone(self._tokens)
        for width in (w for w in WIDTHS if w <= self._backend.n_slots):
            way = f"with the width of a step ({width} rows against 1)"
            for i_ours in {0, width // 2, width - 1}:
                company = self._others[:width]
                company[i_ours] = self._tokens
                yield way, alone, self._in_company(company, i_ours)
        yield "when prompts are merged into one step", alone, self._merged(self._tokens)
        if not self._backend.cuts:
            for n_chunk in (n for n in (1, 3, 33, 64) if n <= self._backend.n_batch):
                way = f"when a prompt is computed in chunks of {n_chunk}"
                yield way, alone, self._alone(self._tokens, n_chunk)
            way = "when tokens are computed again as a prompt"
            yield way, alone[-1:], self._again(self._tokens)
        if len(self._long) > len(self._tokens):
            alone = self._alone(self._long)
            yield "when long prompts share a step", alone, self._merged(self._long)
            cuts, memory = self._backend.cuts, self._backend.memory
            n_loaded = cuts.whole(len(self._long) - _N_DECODED - cuts.least) if cuts else 0
            if n_loaded > 0 and memory.can_save and not memory.can_trim:
                yield "when saved cells are loaded", alone, self._loaded(self._long, n_loaded)

    def _alone(self, tokens: Sequence[int], n_chunk: int = 0) -> list[Logits]:
        """Compute a sequence alone in slot 0, its prompt in chunks of `n_chunk` tokens if not 0."""
        return self._in_company([tokens], 0, n_chunk)

    def _in_company(
        self, company: Sequence[Sequence[int]], i_ours: int, n_chunk: int = 0
    ) -> list[Logits]:
        """Compute the prompts one after another, then decode all of them together, one row each."""
        self.clear()
        logits = [
            self.prefill(Slot(i), tokens[:-_N_DECODED], n_chunk) for i, tokens in enumerate(company)
        ]
        return [logits[i_ours], *self._decode(company, i_ours)]

    def _merged(self, tokens: Sequence[int]) -> list[Logits]:
        """Compute the sequence's prompt in one step with as many others as fit, in the slot above theirs."""
        self.clear()
        prompt, n_batch = tokens[:-_N_DECODED], self._backend.n_batch
        n_first = self._n_chunk(prompt, 0, max(1, n_batch // 2))
        sizes = accumulate(len(other) - _N_DECODED for other in self._others[:-1])
        company = self._others[: sum(size <= n_batch - n_first for size in sizes)]
        i_ours, is_whole = len(company), n_first == len(prompt)
        chunks = [
            Span(Slot(i), 0, other[:-_N_DECODED], has_output=True)
            for i, other in enumerate(company)
        ]
        chunks.append(Span(Slot(i_ours), 0, prompt[:n_first], has_output=is_whole))
        first = self.run(chunks, i_ours)
        if not is_whole:
            first = self.prefill(Slot(i_ours), prompt, start=n_first)
        return [first, *self._decode([*company, tokens], i_ours)]

    def _loaded(self, tokens: Sequence[int], n_loaded: int) -> list[Logits]:
        """Go on from the first tokens, computed in another slot, saved and loaded, where there are two slots."""
        self.clear()
        prompt, first = tokens[:-_N_DECODED], Slot(min(1, self._backend.n_slots - 1))
        self.prefill(first, prompt[:n_loaded])
        self._backend.run(StepPlan((), saves=((first, 0),)))
        loads = ((Slot(0), 0, n_loaded),)
        if self._backend.run(StepPlan((), clears=(Slot(0),), loads=loads, forgets=(0,))).lost:
            raise EngineError("saved cells cannot be loaded")
        return [self.prefill(Slot(0), prompt, start=n_loaded), *self._decode([tokens], 0)]

    def _again(self, tokens: Sequence[int]) -> list[Logits]:
        """Compute prompt and decoded tokens as one prompt, as after a preemption."""
        self.clear()
        return [self.prefill(Slot(0), tokens)]

    def prefill(
        self, slot: Slot, prompt: Sequence[int], n_chunk: int = 0, start: int = 0
    ) -> Logits:
        """Compute a prompt from its token `start` on, alone; return the logits after it."""
        n_chunk, end = n_chunk or self._backend.n_batch, start
        while end < len(prompt):
            start, end = end, end + self._n_chunk(prompt, end, n_chunk)
            chunk = Span(slot, start, prompt[start:end], has_output=end == len(prompt))
            logits = self.run([chunk], 0)
        return logits

    def _n_chunk(self, prompt: Sequence[int], start: int, n_most: int) -> int:
        """Return the tokens of the chunk from `start`: up to `n_most`, or as prompts have to be cut."""
        if cuts := self._backend.cuts:
            return cuts.n_chunk(start, len(prompt), self._backend.n_batch)
        return min(len(prompt) - start, n_most)

    def _decode(self, company: Sequence[Sequence[int]], i_ours: int) -> list[Logits]:
        """Decode the last tokens of the sequences in slots 0, 1, …, one a step; return the logits of slot `i_ours`."""
        found = []
        for i_fed in range(_N_DECODED, 0, -1):
            chunks = [
                Span(Slot(i), len(t) - i_fed, [t[-i_fed]], has_output=True)
                for i, t in enumerate(company)
            ]
            found.append(self.run(chunks, i_ours))
        return found

    def run(self, chunks: Sequence[Span], i_ours: int) -> Logits:
        """Run one step; return the logits of chunk `i_ours` (empty where it has no output)."""
        self.compute(chunks)
        if not chunks[i_ours].has_output:
            return np.empty(0, np.float32)
        return self._backend.logits(chunks[i_ours].slot)
