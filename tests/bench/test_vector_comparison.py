"""Comparisons of embeddings: what is asked, who is left out, and what the table shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from cbatch.bench.sides import SideError, VectorRound
from cbatch.bench.text_work import VectorWorkload, vector_workload
from cbatch.bench.vector_comparison import VectorComparison, VectorPlan
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.bench.text_work import TextCall

EMBED = VectorWorkload("embed", "some texts", 3, (2, 6))
RERANK = VectorWorkload("rerank", "some documents", 3, (2, 6), 4)


@dataclass
class MadeUpSide:
    """A side with given rows and a given time for each round."""

    name: str
    seconds: float = 1.0
    row: tuple[float, ...] = (3.0, 4.0)
    fails_in: int = 99
    n_rounds: int = 0
    n_closes: int = 0
    asked: list[int] = field(default_factory=list)
    memory_mib: float | None = 7.0

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Note it."""
        self.n_closes += 1

    def answer(self, calls: Sequence[TextCall], n_clients: int) -> VectorRound:
        """Return the time."""
        self.n_rounds += 1
        if self.n_rounds > self.fails_in:
            raise SideError(f"{self.name}: gone")
        self.asked.append(n_clients)
        return VectorRound(self.seconds, 2 * self.seconds)

    def rows(self, call: TextCall) -> list[list[float]]:
        """Return the same row for each text."""
        return [[*self.row] for _ in call.texts]


def compared(
    workload: VectorWorkload, *sides: MadeUpSide, loads: Sequence[int] = (1, 2)
) -> VectorComparison:
    plan = VectorPlan([workload], loads, n_rounds=2, n_calls=2)
    found = VectorComparison(plan, lambda _: sides, str.split, bool)
    found.run()
    return found


def test_texts_have_about_their_tokens_and_differ_by_seed() -> None:
    [call, other] = EMBED.calls(str.split, 2, "1")
    assert all(2 <= len(text.split()) <= 6 for text in call.texts + other.texts)
    assert (len(call.texts), call.query) == (3, None)
    assert EMBED.calls(str.split, 2, "1") == [call, other]
    assert EMBED.calls(str.split, 2, "2") != [call, other]
    assert {len(c.query.split()) for c in RERANK.calls(str.split, 2, "1") if c.query} == {4}


@pytest.mark.parametrize(
    ("name", "own", "n_common", "words"),
    [
        ("embed", (5, 2), None, "the smaller number first, not 5-2"),
        ("embed", None, 5, "texts of embed have no common tokens"),
        ("rerank", None, 0, "tokens of the query must be at least 1, not 0"),
    ],
)
def test_wrong_sizes_are_refused(
    name: str, own: tuple[int, int] | None, n_common: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        vector_workload(name, own=own, n_common=n_common)


def test_table_has_the_ratio_of_each_side_to_ours() -> None:
    ours, theirs = MadeUpSide("engine"), MadeUpSide("llama-server", 3.0, (6.0, 8.0))
    found = compared(EMBED, ours, theirs)
    [table] = found.tables()
    rows = {(row[0], row[1]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert len(rows) == 4
    row = rows["2 at once", "llama-server"]
    assert (row["texts/s"], row["texts/CPU s"], row["cosine"]) == ("2", "1", "1.000000")
    assert row["cbatch over it"] == row["by CPU"] == "3.00 (3.00–3.00)"
    assert rows["1 at once", "engine"]["cbatch over it"] == ""
    assert (ours.asked, ours.n_closes) == ([1, 1, 2, 2], 1)
    assert not found.refused


def test_side_with_other_vectors_is_left_out() -> None:
    other = MadeUpSide("other", row=(4.0, 3.0))
    found = compared(EMBED, MadeUpSide("engine"), other)
    assert found.refused == ["embed: other: has another model or other results: cosine 0.9600"]
    assert other.n_rounds == 0
    assert other.n_closes == 1


def test_scores_may_be_logits_there() -> None:
    raw, wrong = MadeUpSide("raw", row=(0.0,)), MadeUpSide("wrong", row=(1.0,))
    found = compared(RERANK, MadeUpSide("engine", row=(0.5,)), raw, wrong)
    assert found.apart == {("rerank", "engine"): 0.0, ("rerank", "raw"): 0.0}
    assert [line.partition(": has")[0] for line in found.refused] == ["rerank: wrong"]


def test_side_that_fails_is_left_out_and_others_go_on() -> None:
    broken, whole = MadeUpSide("broken", fails_in=1), MadeUpSide("whole")
    found = compared(EMBED, MadeUpSide("engine"), broken, whole)
    assert found.refused == ["embed: broken: gone"]
    assert (broken.n_rounds, whole.n_rounds) == (2, 4)
    [table] = found.tables()
    assert [row[1] for row in table.rows].count("broken") == 1
