"""`exact=True` through every door: in this process, in a worker, over replicas, with any number of threads."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.errors import EngineError
from cbatch.messages import BatchPrompt
from cbatch.worker.pool import Pool

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.response import TokenLogprob
    from tests.conftest import SynthFactory

pytestmark = pytest.mark.real

ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 3}
LENGTHS = [*range(3, 13), 31, 63, 64, 65, 72, 200, 257, 600]
DOORS: list[dict[str, Any]] = [
    {"n_threads": 2},
    {"n_threads": 1},
    {"replicas": 1, "n_threads": 1},
    {"replicas": 2, "n_threads": 2},
]

Said = list[tuple["TokenLogprob", ...] | None]


def answers(path: Path, parallel: int, **settings: Any) -> tuple[str, Said]:
    """Return how an engine says that it is exact, and what it answers."""
    dice = random.Random(3)
    asked = [BatchPrompt(tokens=dice.choices(range(261, 4096), k=n)) for n in LENGTHS]
    sizes: dict[str, Any] = {"parallel": parallel, "ctx_per_seq": 768, "exact": True}
    with cbatch.load(path, **sizes, **settings) as engine:
        assert engine.exactness == "bitwise"
        results = engine.run(asked, options=ANSWER).results()
        return engine.fingerprint["exact"], [result.logprobs for result in results]


@pytest.mark.parametrize(
    ("type", "doors"), [("q8_0", DOORS), ("q4_k_m", DOORS[::3]), ("f16", DOORS[1:3])]
)
def test_bits_are_the_same_in_process_in_a_worker_and_in_replicas(
    synth: SynthFactory, type: str, doors: list[dict[str, Any]]
) -> None:
    path = synth("exact", type=type)
    (settings, expected), *others = [answers(path, 16, **door) for door in doors]
    assert [said for said, _ in others] == [settings] * len(others)
    for door, (_, found) in zip(doors[1:], others, strict=True):
        assert found == expected, door
    assert len({tuple(t.token_id for t in said or ()) for said in expected}) == len(LENGTHS)


@pytest.mark.parametrize(("parallel", "replicas"), [(8, 2), (2, 2)])
def test_replicas_of_few_slots_compute_as_one_engine_of_all(
    synth: SynthFactory, parallel: int, replicas: int
) -> None:
    path = synth("exact", type="q4_k_m")
    assert answers(path, parallel, replicas=replicas) == answers(path, parallel)


def test_replicas_that_compute_differently_are_refused(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_all(pool: Pool, command: Any, *given: Any) -> list[Any]:
        found = real(pool, command, *given)
        return [(c, {**said, "exact": f"by {i}"}) for i, (c, said) in enumerate(found)]

    real = Pool.ask_all
    monkeypatch.setattr(Pool, "ask_all", ask_all)
    sizes: dict[str, Any] = {"parallel": 4, "ctx_per_seq": 256, "exact": True}
    with pytest.raises(
        EngineError, match=r"compute differently \(by 0 \| by 1\): leave replicas out"
    ):
        cbatch.load(test_model, replicas=2, **sizes)
    cbatch.load(test_model, replicas=1, **sizes).close()


def test_replicas_with_other_rope_factors_are_refused(longrope_model: Path) -> None:
    with pytest.raises(EngineError, match="other rope factors"):
        cbatch.load(longrope_model, replicas=2, parallel=3, n_ctx=3000)
    cbatch.load(longrope_model, replicas=2, parallel=4, n_ctx=3000).close()
