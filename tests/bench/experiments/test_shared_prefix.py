"""The loop written by hand for prompts that begin alike, and the script that compares the engine with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
import pytest

from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load.open_model import open_model
from cbatch.bench.bare import BareLoop, suffix_rows
from cbatch.bench.experiments.shared_prefix import PrefixJob, Prompts
from cbatch.core.plan import Binding, Slot, StepPlan
from cbatch.core.span import Span
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.options import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel
    from tests.conftest import SynthFactory

N_VOCAB = 1024
OPTIONS = {"ctx_per_seq": 256, "n_threads": 1, "flash_attn": "off"}


@pytest.fixture
def model(random_model: Path) -> Iterator[LlamaModel]:
    model = open_model(random_model)
    yield model
    model.close()


def test_prompts_have_the_sizes_of_their_job_and_part_where_they_should() -> None:
    job = PrefixJob(requests=9, common=5, own=3, output=2, slots=4)
    prompts = Prompts.random(job, N_VOCAB)
    tokens = [p.tokens or () for p in prompts.requests()]
    assert [len(t) for t in tokens] == [8] * 9
    assert {tuple(t[:5]) for t in tokens} == {tuple(prompts.common)}
    assert len({t[5] for t in tokens}) == 9
    assert all(3 <= token < N_VOCAB for t in tokens for token in t)
    assert (job.n_prompt, job.n_distinct, job.n_output) == (72, 32, 18)
    assert Prompts.random(job, N_VOCAB) == prompts != Prompts.random(job, N_VOCAB, seed=8)


def test_prompts_that_cannot_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 requests cannot differ in 3 tokens"):
        Prompts.random(PrefixJob(4, 0, 1, 1, 1), n_vocab=6)


@pytest.mark.parametrize("size", ["requests", "own", "output", "slots"])
def test_job_without_work_is_refused(size: str) -> None:
    sizes = {"requests": 1, "common": 0, "own": 1, "output": 1, "slots": 1}
    with pytest.raises(ConfigError, match=size):
        PrefixJob(**{**sizes, size: 0})


def test_rows_are_first_tokens_by_slot_then_the_rest_with_outputs_last() -> None:
    rows = suffix_rows([[10, 11, 12], [20], [30, 31]], n_common=7)
    assert [(r.slot, r.position, r.token) for r in rows] == [
        (0, 7, 10), (1, 7, 20), (2, 7, 30), (0, 8, 11), (0, 9, 12), (2, 8, 31)
    ]  # fmt: skip
    assert [r.token for r in rows if r.has_output] == [20, 12, 31]


@pytest.mark.parametrize("kv", ["partitioned", "unified"])
@pytest.mark.parametrize("n_batch", [512, 16])
@pytest.mark.parametrize("n_common", [0, 40])
def test_loop_computes_what_each_prompt_gives_alone(
    model: LlamaModel, kv: str, n_batch: int, n_common: int
) -> None:
    prompts = Prompts.random(PrefixJob(5, n_common, 10, 1, 3), N_VOCAB)
    loop = BareLoop(
        model, EngineOptions.of({**OPTIONS, "parallel": 3, "kv": kv, "n_batch": n_batch})
    )
    for n_output in (4, 1):
        assert loop.run(prompts.common, prompts.owns, n_output) > 0
    assert [loop.cells.count(slot) for slot in range(3)] == [n_common] * 3
    # the outputs left are those of the last batch: with 16 of the last wave's 20 rows in one before, one of two
    n_outputs = 2 if n_batch == 512 else 1
    for i in range(1, n_outputs + 1):
        row = llama_cpp.llama_get_logits_ith(loop.ctx, -i)
        found = np.ctypeslib.as_array(row, (N_VOCAB,)).copy()
        alone = logits_alone(model, [*prompts.common, *prompts.owns[-i]])
        np.testing.assert_allclose(found, alone, atol=0.05 * np.abs(alone).max())
    loop.close()


def logits_alone(model: LlamaModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    backend = LlamaBackend(
        model, Tuning(EngineOptions.of({**OPTIONS, "parallel": 1})), owns_model=False
    )
    chunk = Span(Slot(0), 0, tuple(tokens), has_output=True)
    backend.run(StepPlan((chunk,), binds=(Binding(Slot(0), len(tokens), Sampling(), ()),)))
    found = backend.logits(Slot(0))
    backend.close()
    return found


def test_loop_refuses_a_memory_that_cannot_be_cut_back(synth: SynthFactory) -> None:
    model = open_model(synth("mamba"))
    loop = BareLoop(model, EngineOptions(parallel=2, ctx_per_seq=256, n_threads=1))
    with pytest.raises(ConfigError, match="cannot copy"):
        loop.run([1], [[2]], 1)
    loop.close()
    model.close()
