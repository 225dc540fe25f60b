"""A trial of flash attention on a loaded model: the same steps with and without it, in turn."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from cbatch.backend.host_limits import available_cores
from cbatch.backend.llama.context import DEFAULT_WINDOW
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model import LlamaModel
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.core.plan import Binding, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.errors import DecodeError
from cbatch.options import GREEDY

_N_ROWS = 16
"""Rows that decode, if there are several slots. Fewer rows show a smaller difference of the same sign."""

_N_HISTORY, _N_PROMPT = 448, 64
"""Cells of a long row, and tokens of a prompt: the fewest that flash attention computes in tiles.
Source: ggml/src/ggml-cpu/common.h, GGML_FA_TILE_Q."""

_LONGEST_MIXED = 0.75
"""Longest row among rows of many lengths, as a fraction of a long row. Source: with it the trial agrees with *mixed*:
rates without flash attention over those with it are 0.78 and 0.76 (the shipped model, one thread)."""

_N_DECODED = 2
"""Decoding steps of all rows for each prompt, as with prompts of about 150 tokens and answers of 70."""

_MOST_BYTES = 2**31
"""Bytes of weights from which no processor computes steps fast enough for a trial."""

_KEY = 0

_Positive: TypeAlias = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class TrialShape:
    """The sizes of a trial's steps."""

    n_rows: int
    n_history: int
    n_threads: int

    @classmethod
    def of(cls, model: LlamaModel, options: EngineOptions) -> TrialShape:
        """Return the trial for a context. Processes that divide the slots and cores of one engine get equal trials."""
        n_ctx = options.n_ctx and options.n_ctx // options.n_slots
        n_window = options.ctx_per_seq or n_ctx or DEFAULT_WINDOW
        n_most = min(n_window, model.n_ctx_train or n_window) - 1
        n_rows = _N_ROWS if options.n_slots > 1 else 1
        return cls(n_rows, max(1, min(_N_HISTORY, n_most)), options.n_threads or 0)

    def __str__(self) -> str:
        threads = f"{self.n_threads} threads" if self.n_threads else "all threads"
        return (
            f"{self.n_rows} rows of up to {self.n_history} cells, prompts of {_N_PROMPT}, {threads}"
        )


@dataclass(frozen=True, slots=True)
class TrialRound:
    """Times of the same steps with flash attention over those without, measured in turn."""

    mixed: _Positive
    """For decoding steps of rows of many lengths, and prompts. Without flash attention each row looks at as many cells
    as the longest row has."""
    alike: _Positive
    """For decoding steps of rows that are all long."""
    wall_s: _Positive
    """Seconds of all steps, both ways."""
    cpu_s: _Positive
    """CPU seconds of this process per computing thread: fewer if other programs took cores."""


def rounds(model: LlamaModel, shape: TrialShape) -> Generator[TrialRound, None, None]:
    """Yield rounds for ever; the first is slower than the others. Yield none for a model that is too large.

    Raises:
        CBatchError: the steps cannot be computed.
    """
    if model.n_bytes > _MOST_BYTES:
        return
    with model.in_use(), ExitStack() as stack:
        on = stack.enter_context(closing(_Way(model, shape, "on")))
        off = stack.enter_context(closing(_Way(model, shape, "off")))
        while True:
            yield _round(on, off)
            yield _round(on, off, is_off_first=True)


def _round(on: _Way, off: _Way, *, is_off_first: bool = False) -> TrialRound:
    took = {way: way.turn() for way in ((off, on) if is_off_first else (on, off))}
    return TrialRound(
        mixed=took[on].mixed_s / took[off].mixed_s,
        alike=took[on].alike_s / took[off].alike_s,
        wall_s=took[on].wall_s + took[off].wall_s,
        cpu_s=(took[on].cpu_s + took[off].cpu_s) / min(on.n_threads, available_cores()),
    )


@dataclass(frozen=True, slots=True)
class _Took:
    alike_s: float
    mixed_s: float
    wall_s: float
    cpu_s: float


class _Way:
    """A context with or without flash attention. Every slot but the last gets a history of zeros."""

    def __init__(self, model: LlamaModel, shape: TrialShape, said: Literal["on", "off"]) -> None:
        n_rows, n_history = shape.n_rows, shape.n_history
        options = EngineOptions(
            parallel=n_rows + 1,
            ctx_per_seq=n_history + _N_PROMPT,
            n_batch=max(n_rows + 1, _N_PROMPT),
            n_threads=shape.n_threads or None,
            flash_attn=said,
        )
        self._backend = LlamaBackend(model, Tuning(options), owns_model=False)
        self.n_threads = self._backend.n_threads
        slots = [Slot(i) for i in range(n_rows + 1)]
        rows, last = slots[:-1], slots[-1]
        self._fill = StepPlan(
            (), clears=tuple(rows), loads=tuple((slot, _KEY, n_history) for slot in rows)
        )
        n_longest = int(_LONGEST_MIXED * n_history)
        lengths = [max(1, n_longest * (i + 1) // n_rows) for i in range(n_rows)]
        self._shorten = StepPlan((), trims=tuple(zip(rows, lengths, strict=True)))
        self._alike = _decoding(rows, [n_history] * n_rows)
        self._varied = _decoding(rows, lengths)
        self._prompt = StepPlan((Span(last, 0, (1,) * _N_PROMPT, has_output=True),))
        self._clear = StepPlan((), clears=(last,))
        try:
            self._backend.import_zeros(_KEY, n_history)
            self._run(StepPlan((), binds=tuple(Binding(slot, 0, GREEDY, ()) for slot in slots)))
        except BaseException:
            self.close()
            raise

    def turn(self) -> _Took:
        self._run(self._fill)
        alike_s, alike_cpu_s = self._seconds(self._alike)
        self._run(self._shorten)
        varied_s, varied_cpu_s = self._seconds(self._varied)
        prompt_s, prompt_cpu_s = self._seconds(self._prompt)
        self._run(self._clear)
        return _Took(
            alike_s,
            _N_DECODED * varied_s + prompt_s,
            alike_s + varied_s + prompt_s,
            alike_cpu_s + varied_cpu_s + prompt_cpu_s,
        )

    def _seconds(self, plan: StepPlan) -> tuple[float, float]:
        start_s, start_cpu_s = perf_counter(), process_time()
        self._run(plan)
        return perf_counter() - start_s, process_time() - start_cpu_s

    def _run(self, plan: StepPlan) -> None:
        result = self._backend.run(plan)
        if result.code or result.lost:
            raise DecodeError(result.code)

    def close(self) -> None:
        self._backend.close()


def _decoding(slots: Sequence[Slot], lengths: Sequence[int]) -> StepPlan:
    rows = (Span(slot, n, (1,), has_output=True) for slot, n in zip(slots, lengths, strict=True))
    return StepPlan(tuple(rows))
