"""Backends of every kind of memory, and what tests of their cells do again and again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.memory import LlamaCells
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.native import NativeStepper
from cbatch.backend.load.open_model import open_model
from cbatch.core.plan import Binding, Slot, StepPlan, StepResult
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.errors import PlanError
from cbatch.options import GREEDY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from cbatch.backend import Backend
    from tests.conftest import SynthFactory

    MakeBackend = Callable[..., LlamaBackend]

KINDS = ("partitioned", "unified", "recurrent")
N_SLOTS = 3
PROMPT = [300 + 7 * i for i in range(20)]
WIDE = {"n_head": 1}  # a head of 64: those that 64 does not divide cannot be shifted in blocks
KEYS_IN_BLOCKS: dict[str, Any] = {"cache_type_k": "q8_0", "shape": WIDE}
CELL_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "partitioned": ("partitioned", {}),
    "unified": ("unified", {}),
    "exact": ("partitioned", {"exact": True}),
    "keys in blocks": ("partitioned", KEYS_IN_BLOCKS),
    "keys in blocks in a pool": ("unified", KEYS_IN_BLOCKS),
    "positions stretched": ("partitioned", {"rope_scaling": "yarn", "rope_freq_scale": 0.5}),
}
"""Settings under which cells are laid out, or read, in ways of their own."""
OTHER = [400 + 3 * i for i in range(33)]


@contextmanager
def bound_backends() -> Iterator[Callable[[LlamaBackend], LlamaBackend]]:
    """Have backends closed at the end of the block that are given to a function, which binds all their slots."""
    log, made = llama_log(), list[LlamaBackend]()
    log.install()

    def bound(backend: LlamaBackend) -> LlamaBackend:
        made.append(backend)
        bind_all(backend)
        return backend

    yield bound
    for backend in made:
        backend.close()
    log.remove()


def make_backends(synth: SynthFactory) -> Iterator[MakeBackend]:
    """Yield a factory of backends: 3 slots, 768 cells, all bound to greedy sampling. In the end close them."""

    def make(
        kind: str,
        *,
        stepper: Any = None,
        shape: Mapping[str, int] | None = None,
        has_short_pool: bool = False,
        **given: Any,
    ) -> LlamaBackend:
        kv = "unified" if kind == "unified" else "partitioned"
        sizes = {"parallel": N_SLOTS, "n_ctx": 768, "kv": kv, "n_batch": 512, "n_threads": 1}
        options = EngineOptions(**{**sizes, **given})
        path = synth("mamba" if kind == "recurrent" else "test", **(shape or {}))
        model = open_model(path, EngineOptions(repack=options.repack))
        tuning = Tuning(options, has_short_pool=has_short_pool)
        return bound(LlamaBackend(model, tuning, stepper=stepper))

    with bound_backends() as bound:
        yield make


def bind_all(backend: LlamaBackend) -> None:
    slots = [Slot(i) for i in range(backend.n_slots)]
    backend.run(StepPlan((), binds=tuple(Binding(slot, 0, GREEDY, ()) for slot in slots)))


def chunk(slot: int, start: int, tokens: Sequence[int]) -> Span:
    return Span(Slot(slot), start, tokens, has_output=True)


def go_on(
    backend: LlamaBackend, slot: int, tokens: Sequence[int], n: int, **orders: Any
) -> list[int]:
    """Compute `tokens` in a slot, after what it holds when the orders are done; return the next `n` tokens."""
    start = orders.pop("start", backend.n_cells[slot])
    output: list[int] = []
    while len(output) < n:
        plan = StepPlan((chunk(slot, start, tokens),), n_steps=n - len(output), **orders)
        result = backend.run(plan)
        assert (result.code, result.lost) == (0, ())
        output += result.tokens[0]
        start, tokens, orders = backend.n_cells[slot], output[-1:], {}
    return output


def after(backend: LlamaBackend, slot: int, tokens: Sequence[int], n: int) -> list[int]:
    """The next `n` tokens after token 7 behind others, all computed in an empty slot and left there."""
    backend.run(StepPlan((chunk(slot, 0, tokens),)))
    return go_on(backend, slot, [7], n)


def saved(backend: LlamaBackend, tokens: Sequence[int], slot: int = 0) -> NDArray[np.uint8]:
    """Compute tokens in an empty slot, hand their cells out, and leave it empty."""
    backend.run(StepPlan((chunk(slot, 0, tokens),)))
    assert backend.run(StepPlan((), saves=((Slot(slot), 9),), clears=(Slot(slot),))).lost == ()
    data = backend.export_state(9)
    assert data is not None
    return data


def held(backend: LlamaBackend) -> list[int]:
    """Each slot's cells as llama.cpp has them, which must be as the backend counts them."""
    cells = LlamaCells(backend.ctx)
    found = [cells.count(slot) for slot in range(backend.n_slots)]
    assert found == backend.n_cells
    return found


def is_refused(backend: Backend, wrong: StepPlan) -> bool:
    try:
        backend.run(wrong)
    except PlanError:
        return True
    return False


Failures = list[tuple[int, int] | None]
"""What becomes of each run from now on: (code, steps done before it), or nothing out of the ordinary."""


class FailingStepper(NativeStepper):
    """Fails as `failures` says; what a failing first step leaves is all but the last token of its first chunk."""

    def __init__(self, ctx: Any, failures: Failures, **sizes: Any) -> None:
        super().__init__(ctx, **sizes)
        self._failures = failures

    def run(
        self,
        chunks: Sequence[Span],
        n_steps: int = 1,
        slice_s: float = 0.0,
        masks: Any = None,
        await_masks: Any = None,
        pads: Any = (),
        changes: Any = None,
        n_drafts: int = 0,
    ) -> StepResult:
        """Do a run, or part of one."""
        failure = self._failures.pop(0) if self._failures else None
        if failure is None:
            return super().run(
                chunks, n_steps, slice_s, masks, await_masks, pads, changes, n_drafts
            )
        code, n_done = failure
        if n_done:
            return replace(super().run(chunks, n_done, masks=masks, pads=pads), code=code)
        first = chunks[0]
        if code not in (1, -1) and len(first.inputs) > 1:
            super().run([Span(first.slot, first.start, first.inputs[:-1], False)])
        return StepResult([[] for _ in chunks], 0, code)


def failing(make: MakeBackend, kind: str, **given: Any) -> tuple[LlamaBackend, Failures]:
    failures: Failures = []
    return make(kind, stepper=partial(FailingStepper, failures=failures), **given), failures
