"""Sharing changes no answer: the same prompts with it on and off, by whole engines on the fake backend."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch import BatchPrompt
from cbatch.backend.fake import FakeBackend
from cbatch.core.plan import KvCapabilities
from cbatch.core.span import ANYWHERE, PromptCuts
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from tests.profiles import examples
from tests.runtime.backends import all_results

if TYPE_CHECKING:
    from cbatch.response import BatchResult

N_SLOTS, N_WINDOW, N_BATCH = 4, 160, 32
Kind = Literal["partitioned", "unified", "recurrent"]
KINDS: list[Kind] = ["partitioned", "unified", "recurrent"]


@st.composite
def prompts(draw: st.DrawFn) -> BatchPrompt:
    """One of a few beginnings, some tokens of its own, and all that is asked of an answer."""
    base, n_common = draw(st.integers(0, 2)), draw(st.sampled_from([0, 31, 32, 64, 90]))
    own = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
    asked: dict[str, Any] = {
        "max_tokens": draw(st.integers(1, 20)),
        "seed": draw(st.integers(0, 3)),
        "ignore_eos": draw(st.booleans()),
        "n": draw(st.sampled_from([1, 1, 2, 3])),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 1])),
        "regex": draw(st.sampled_from([None, None, "0", "1:5", "0:4:6"])),
        "stop_token_ids": draw(st.lists(st.integers(0, 255), max_size=8)),
        "adapter": draw(st.sampled_from([None, None, "a"])),
        "best_of": draw(st.sampled_from([None, None, 4])),
    }
    if asked["n"] == 1 and asked["best_of"] is None:
        asked["prefill_only"] = draw(st.integers(0, 5)) == 5
    tokens = [*range(100 * base, 100 * base + n_common), *own]
    return BatchPrompt(tokens=[t % 256 for t in tokens], options=asked)


@st.composite
def memories(draw: st.DrawFn, cuts: PromptCuts) -> KvCapabilities:
    """Slots of their own, a pool that may be too small for all, or states."""
    kind = draw(st.sampled_from([KINDS[0], KINDS[2]] if cuts else KINDS))
    can_trim = kind != "recurrent" and draw(st.booleans())
    n_cells = draw(st.integers(N_WINDOW, N_SLOTS * N_WINDOW))
    return KvCapabilities(
        kind,
        n_cells if kind == "unified" else N_SLOTS * N_WINDOW,
        can_trim=can_trim,
        can_copy=can_trim,
        can_save=draw(st.booleans()),
        saved_bytes_per_cell=1024,
    )


def answers(
    memory: KvCapabilities,
    cuts: PromptCuts,
    batches: list[list[BatchPrompt]],
    *,
    is_shared: bool,
) -> tuple[list[BatchResult], int]:
    """Run one batch after the other; return the results, and how many tokens of prompts were computed."""
    backend = FakeBackend(N_SLOTS, N_WINDOW, N_BATCH, memory=memory)
    backend.cuts, backend.adapters = cuts, ("a",)
    schedule = ScheduleOptions(share_prefixes=is_shared)
    with closing(Engine(backend, schedule=schedule, threaded=False)) as engine:
        found = [r for batch in batches for r in all_results(engine.run(batch))]
        return found, engine.stats().n_prompt_tokens


def told(result: BatchResult) -> tuple[object, ...]:
    """All that a caller sees of an answer, but for times and for what was computed."""
    own = (result.finish_reason, result.text, result.token_ids, result.seed, repr(result.error))
    counts = (result.usage.prompt_tokens, result.usage.completion_tokens)
    logprobs = (result.logprobs, result.prompt_logprobs)
    return (*own, *counts, *logprobs, *(told(choice) for choice in result.choices))


@given(st.sampled_from([ANYWHERE, PromptCuts.every(16), PromptCuts(16, 48, least=7)]), st.data())
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_batches_have_the_same_answers_with_sharing_on_and_off(
    cuts: PromptCuts, data: st.DataObject
) -> None:
    memory = data.draw(memories(cuts))
    batches = data.draw(st.lists(st.lists(prompts(), min_size=1, max_size=6), max_size=3))
    on, n_on = answers(memory, cuts, batches, is_shared=True)
    off, n_off = answers(memory, cuts, batches, is_shared=False)
    assert [*map(told, on)] == [*map(told, off)]
    assert n_on <= n_off


def test_choices_of_a_prompt_compute_it_once_in_every_memory_that_copies() -> None:
    batch = [BatchPrompt(tokens=range(100), options={"n": 4, "max_tokens": 4, "seed": 1})]
    for kind in KINDS[:2]:
        memory = KvCapabilities(
            kind, 4 * N_WINDOW - 1 if kind == "unified" else 4 * N_WINDOW, can_copy=True
        )
        on, n_on = answers(memory, ANYWHERE, [batch], is_shared=True)
        off, n_off = answers(memory, ANYWHERE, [batch], is_shared=False)
        assert (n_on, n_off) == (103, 400)
        assert [*map(told, on)] == [*map(told, off)]
