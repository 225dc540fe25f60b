"""`exact=True` on the real llama.cpp: a request's tokens and logits are the same bits alone and in company."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.row_digests import DigestingStepper, RowDigests
from cbatch.backend.load import packed
from cbatch.backend.load.loader import describe_model
from cbatch.backend.load.open_model import open_model
from cbatch.backend.load.row_shapes import find_exact
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.messages import BatchPrompt
from tests.runtime.backends import all_results

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.backend.llama.pad_rows import RowShape
    from cbatch.core.plan import StepResult
    from cbatch.response import BatchResult
    from tests.conftest import SynthFactory

N_PROMPTS, N_SLOTS, N_WINDOW = 24, 16, 1024
LENGTHS = (3, 600)
N_GREEDY = 8
TYPES = ["q8_0", "q4_0", "f16", "bf16", "q4_k_m", "q6_k", "iq4_xs"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": N_GREEDY, "ignore_eos": True}


class RecordingStepper(DigestingStepper):
    """Keeps digests of the logits of every output, and the widths of steps."""

    def __init__(self, ctx: Any, **sizes: Any) -> None:
        self.rows: RowDigests = {}
        super().__init__(ctx, rows=self.rows, **sizes)
        self.n_rows_max = self.n_pad_rows = 0
        self.widths: set[int] = set()

    def run(self, *args: Any, **given: Any) -> StepResult:
        spans, pads, n_before = args[0], given.get("pads", ()), len(self.rows)
        result = super().run(*args, **given)
        n_outputs = sum(c.has_output for c in spans)
        assert len(self.rows) == n_before + n_outputs, "a token was computed twice"
        self.n_pad_rows += len(pads)
        self.n_rows_max = max(self.n_rows_max, len(spans) - len(pads))
        if len(spans[0].inputs) == 1:
            self.widths.add(len(spans))
        return result


@dataclass
class Exact:
    """An engine that keeps its logits, and the prompts."""

    engine: Engine
    stepper: RecordingStepper
    prompts: list[list[int]]
    shape: RowShape

    def take_rows(self) -> RowDigests:
        rows = dict(self.stepper.rows)
        self.stepper.rows.clear()
        return rows

    def items(self) -> list[BatchPrompt]:
        """The prompts, shuffled; the seed tells them apart. Each third one is sampled."""
        items = [
            BatchPrompt(
                tokens=tokens, id=f"p{i}", options={**GREEDY, "seed": i, "temperature": i % 3 // 2}
            )
            for i, tokens in enumerate(self.prompts)
        ]
        random.Random(2).shuffle(items)
        return items


@pytest.fixture(scope="module", params=TYPES)
def exact(request: pytest.FixtureRequest, synth: SynthFactory) -> Iterator[Exact]:
    settings = EngineOptions(parallel=N_SLOTS, ctx_per_seq=N_WINDOW, exact=True)
    model = open_model(synth("exact", type=request.param), settings)
    steppers: list[RecordingStepper] = []

    def make_stepper(ctx: Any, **sizes: Any) -> RecordingStepper:
        steppers.append(RecordingStepper(ctx, **sizes))
        return steppers[-1]

    found = find_exact(model, settings)
    assert found.exactness == "bitwise"
    backend = LlamaBackend(model, found, stepper=make_stepper)
    dice, (low, high) = random.Random(1), LENGTHS
    shares = [
        (i / (N_PROMPTS - 1)) ** 3 for i in range(N_PROMPTS)
    ]  # more short ones: they are cheap
    lengths = [low + round(share * (high - low)) for share in shares]
    prompts = [[dice.randrange(261, backend.vocab.n_vocab) for _ in range(n)] for n in lengths]
    with Engine(backend) as engine:
        yield Exact(engine, steppers[0], prompts, found.shape)


def test_logits_and_tokens_are_the_same_bits_alone_and_in_company(exact: Exact) -> None:
    items = exact.items()
    exact.engine.reset_stats()
    together = all_results(exact.engine.run(items))
    rows_together = exact.take_rows()
    assert exact.engine.stats().n_pad_rows == exact.stepper.n_pad_rows > 0
    assert exact.stepper.n_rows_max == N_SLOTS
    alone = [all_results(exact.engine.run(item))[0] for item in items]
    rows_alone = exact.take_rows()
    assert tokens_of(together) == tokens_of(alone)
    assert [key for key, row in rows_alone.items() if rows_together[key] != row] == []
    assert len(rows_together) == len(rows_alone) == N_PROMPTS * N_GREEDY
    shape = exact.shape
    assert exact.stepper.widths == {shape.width(n) for n in exact.stepper.widths}
    check_that_equality_says_something(together)


def check_that_equality_says_something(results: Sequence[BatchResult]) -> None:
    """The answers differ from each other, and none is one token again and again."""
    assert [len(r.token_ids) for r in results] == [N_GREEDY] * N_PROMPTS
    assert len({r.token_ids for r in results}) == N_PROMPTS
    assert all(len(set(r.token_ids)) > 1 for r in results)


def tokens_of(results: Sequence[BatchResult]) -> list[tuple[int, ...]]:
    assert [r.error for r in results] == [None] * len(results)
    return [r.token_ids for r in results]


# ---- common beginnings ----

COMMON_AND_OWN = (
    *((600, 0), (70, 9), (70, 3), (130, 64), (200, 1), (330, 50), (513, 8), (515, 70)),
    *((64, 7), (64, 8), (128, 63), (128, 65), (576, 2), (300, 90), (63, 30)),
)
"""Tokens of a long prompt that another begins with, and tokens of its own."""


@pytest.mark.parametrize(("type", "flash_attn"), [("q8_0", "on"), ("q4_k_m", "off")])
def test_beginnings_are_shared_from_any_multiple_of_64_bit_for_bit(
    synth: SynthFactory, type: str, flash_attn: str
) -> None:
    dice = random.Random(5)
    common = dice.choices(range(261, 4096), k=600)
    prompts = [[*common[:n], *dice.choices(range(261, 4096), k=m)] for n, m in COMMON_AND_OWN]
    asked = [BatchPrompt(tokens=p, options={**GREEDY, "logprobs": 5}) for p in prompts]
    sizes: dict[str, Any] = {"parallel": 4, "ctx_per_seq": N_WINDOW, "flash_attn": flash_attn}
    path = synth("exact", type=type)
    with cbatch.load(path, exact=True, share_prefixes=False, **sizes) as engine:
        alone = [engine.submit(one).result().logprobs for one in asked]
    scored = BatchPrompt(tokens=common, options={**GREEDY, "prompt_logprobs": 0, "max_tokens": 1})
    with cbatch.load(path, exact=True, **sizes) as engine:
        assert engine.submit(scored).result().error is None
        results = engine.run(asked).results()
    assert [r.logprobs for r in results] == alone
    # rows of one sequence that flash attention takes together, or products in tiles
    cached = [r.usage.cached_tokens for r in results]
    least = 64 if flash_attn == "on" else 8
    shared = [
        min(n, len(p) - least) // 64 * 64 for (n, _), p in zip(COMMON_AND_OWN, prompts, strict=True)
    ]
    assert {n % 64 for n in cached} == {0}
    assert sum(cached) >= 0.6 * sum(shared)


# ---- what the probe says ----


@pytest.mark.parametrize("n_slots", [1, 5])
def test_exact_keeps_to_budget_and_window(synth: SynthFactory, n_slots: int) -> None:
    options = EngineOptions(exact=True, parallel=n_slots, n_batch=n_slots)
    said = describe_model(synth("exact"), replace(options, memory_mib=20), asks_probe=False)
    assert said["n_memory_bytes"] <= 20 * 2**20
    assert (
        describe_model(synth("exact"), replace(options, ctx_per_seq=1024), asks_probe=False)[
            "n_window"
        ]
        == 1024
    )


def test_exact_is_refused_for_unified_memory_without_loading() -> None:
    with pytest.raises(ConfigError, match="unified"):
        cbatch.load("there is no such file", exact=True, kv="unified")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv": "unified"}, "with kv='unified' the position of a cell changes the rounding"),
        ({"kv": "unified", "flash_attn": "off"}, "with kv='unified' the position of a cell"),
        ({"flash_attn": "on"}, "flash attention chooses its kernel by the shape of a step"),
    ],
    ids=["unified", "unified without flash attention", "flash attention"],
)
def test_reason_is_told_where_exactness_does_not_hold(
    synth: SynthFactory, settings: dict[str, Any], reason: str
) -> None:
    with cbatch.load(synth("exact"), ctx_per_seq=N_WINDOW, repack="llama", **settings) as engine:
        assert engine.exactness.startswith("not guaranteed: logits change ")
        assert reason in engine.exactness


@pytest.mark.skipif(bool(packed.why_unfit()), reason=packed.why_unfit() or "-")
@pytest.mark.parametrize("kv", ["unified", "partitioned"])
def test_packed_model_rounds_alike_with_flash_attention(synth: SynthFactory, kv: str) -> None:
    """Wherever cells lie, and however prompts are cut."""
    with cbatch.load(synth("exact"), ctx_per_seq=N_WINDOW, kv=kv, flash_attn="on") as engine:
        assert engine.exactness.startswith("not guaranteed: the probe found no difference")
