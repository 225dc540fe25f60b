"""The rules of `exact` without a model: on a backend whose tokens depend on how many rows are computed together."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.backend.fake.fake_backend import Bits
from cbatch.core.plan import KvCapabilities
from cbatch.core.span import ANYWHERE, PromptCuts
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.messages import BatchPrompt
from tests.runtime.backends import all_results, together

if TYPE_CHECKING:
    from collections.abc import Sequence

N_SLOTS, N_WINDOW, N_ALIGNED = 6, 256, 16
ANSWER: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}

KERNELS = Bits(of=lambda n: min(n, 8) if n < 8 else 8 + n % 4)
"""Each number of rows below 8 has bits of its own, and so has what is left over of fours."""
PADDED = Bits(of=KERNELS.of, width=lambda n: max(8, -(-n // 4) * 4))
TILED = Bits(of=lambda n: min(n, 8), width=lambda n: max(8, n))
"""Each number of rows below 8 has bits of its own."""
OF_SEVEN = Bits(of=lambda n: min(n, 8), width=lambda _: 7)
"""The same, in steps of seven rows, whose bits no long chunk has."""
EVERY, FREE = PromptCuts.every(N_ALIGNED), PromptCuts(N_ALIGNED, 56, least=8)
IN_ROWS = PromptCuts(N_ALIGNED, 56, least=9, ends_in_row=True)


def backend(bits: Bits | None, cuts: PromptCuts, **memory: Any) -> FakeBackend:
    able = {"can_copy": True, "can_save": True, "saved_bytes_per_cell": 8, **memory}
    kinds = KvCapabilities("partitioned", N_SLOTS * N_WINDOW, **able)
    made = FakeBackend(N_SLOTS, N_WINDOW, 64, memory=kinds)
    made.cuts = cuts
    made.bits = bits
    return made


def prompts() -> list[BatchPrompt]:
    """Prompts of 1 to 90 tokens; half of them begin alike, the first of these up to a place where chunks begin."""
    dice = random.Random(7)
    common = dice.choices(range(256), k=50)
    made = [dice.choices(range(256), k=1 + 4 * i) for i in range(23)]
    made[1::2] = [[*common, *tokens[: 25 - 2 * i]] for i, tokens in enumerate(made[1::2])]
    made[1] = common[: 3 * N_ALIGNED]
    return [
        BatchPrompt(tokens=tokens, options={**ANSWER, "seed": i}) for i, tokens in enumerate(made)
    ]


def answers(made: FakeBackend, *, is_alone: bool, **schedule: Any) -> Sequence[tuple[int, ...]]:
    """Return the tokens of each prompt, computed one after the other or together."""
    with closing(Engine(made, schedule=ScheduleOptions(**schedule))) as engine:
        items = prompts()
        asked = [[item] for item in items] if is_alone else [items]
        found = [result for batch in asked for result in all_results(engine.run(batch))]
    assert [r.error for r in found] == [None] * len(items)
    return [r.token_ids for r in found]


SCHEDULES: Sequence[dict[str, Any]] = (
    {},
    {"share_prefixes": False},
    {"policy": "round_robin", "quantum": 3, "swap_mib": 1},
    {"policy": "round_robin", "quantum": 3, "swap_mib": 0},
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("memory", [{}, {"can_copy": False, "can_trim": False}], ids=str)
@pytest.mark.parametrize(
    ("bits", "cuts"),
    [(PADDED, EVERY), (TILED, FREE), (OF_SEVEN, IN_ROWS)],
    ids=["every", "free", "in rows"],
)
def test_padded_steps_give_the_same_tokens_alone_and_in_company(
    schedule: dict[str, Any], memory: dict[str, Any], bits: Bits, cuts: PromptCuts
) -> None:
    alone = answers(backend(bits, cuts, **memory), is_alone=True, share_prefixes=False)
    assert answers(backend(bits, cuts, **memory), is_alone=False, **schedule) == alone


@pytest.mark.parametrize(
    ("bits", "cuts"),
    [(KERNELS, EVERY), (PADDED, ANYWHERE), (TILED, replace(FREE, least=1))],
    ids=["no pads", "cuts anywhere", "short last chunks"],
)
def test_what_exact_leaves_out_changes_tokens(bits: Bits, cuts: PromptCuts) -> None:
    alone = answers(backend(bits, cuts), is_alone=True, share_prefixes=False)
    with together(N_SLOTS):
        found = answers(backend(bits, cuts), is_alone=False)
    assert found != alone


def test_rows_count_for_nothing_where_no_bits_are_said() -> None:
    alone = answers(backend(None, ANYWHERE), is_alone=True)
    assert answers(backend(None, FREE), is_alone=False) == alone
