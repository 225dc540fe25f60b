"""Rounds in turn, what is refused, and the medians of what counts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.bench.comparison import Comparison, ComparisonPlan, Load
from cbatch.bench.exact_text import ExactText
from cbatch.bench.measured import MeasuredAnswer
from cbatch.bench.sides import SideError
from cbatch.bench.summary import Middle, Summary, markdown, text_table
from cbatch.bench.workloads import workload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.bench.measured import Chains
    from cbatch.bench.pacing import Pace


def tokenize(text: str) -> list[int]:
    return [len(word) for word in re.findall(r"\S+", text)]


class Acted:
    """A side that answers in no time and says that it took some."""

    is_remote = False
    memory_mib = 5.0

    def __init__(
        self,
        name: str,
        log: list[str],
        seconds: Callable[[int], float] = lambda n_clients: 1.0,
        **broken: Any,
    ) -> None:
        self.name, self._log, self._seconds, self._broken = name, log, seconds, broken
        self.n_runs = self.n_starts = 0
        self.fails_in: set[int] = set()
        self.interrupts_in: int | None = None

    def start(self) -> None:
        self.n_starts += 1

    def close(self) -> None:
        self._log.append(f"close {self.name}")

    def run(
        self, chains: Chains, pace: Pace, n_rows: int, *, is_streamed: bool
    ) -> tuple[list[MeasuredAnswer], float]:
        i, self.n_runs = self.n_runs, self.n_runs + 1
        self._log.append(self.name)
        if i in self.fails_in:
            raise SideError(f"{self.name}: died")
        if i == self.interrupts_in:
            raise KeyboardInterrupt
        requests = [request for chain in chains for request in chain]
        made = [
            MeasuredAnswer(r.id, 0.0, 0.1, 0.5, r.n_output, r.n_prompt, (0.01,), 9, "length")
            for r in requests
        ]
        is_measured = i > 0  # the first run warms up
        made = [replace(a, **self._broken) for a in made] if is_measured else made
        return made, self._seconds(pace.n_clients) * sum(a.n_output for a in made) / 100


def comparison(sides: Sequence[Acted], *loads: Load, **more: Any) -> Comparison:
    more = {"n_rounds": 2, "n_requests": 4, **more}
    plan = ComparisonPlan([workload_of("burst")], loads or (Load(at_once=1),), **more)
    return Comparison(plan, sides, 4, ExactText(tokenize), tokenize)


def test_sides_take_turns_with_the_same_requests_each_first_as_often() -> None:
    log: list[str] = []
    made = comparison([Acted("engine", log), Acted("other", log)], has_warm=True)
    made.run()
    assert [name for name in log[2:] if not name.startswith("close")][:2] == ["engine", "other"]
    assert log.count("engine") == log.count("other")
    assert all(m.counts for m in made.measured)
    by_round = [
        {m.figures.n_prompt for m in made.measured if m.figures and m.i_round == i} for i in (0, 1)
    ]
    assert [len(found) for found in by_round] == [1, 1]
    assert by_round[0] != by_round[1]
    rows = [(row.side, row.state) for row in Summary(made).rows]
    assert rows == [(side, state) for state in ("cold", "warm") for side in ("engine", "other")]


def test_ratio_is_that_of_each_round_and_walls_are_set_against_one_alone() -> None:
    log: list[str] = []
    ours = Acted("engine", log, lambda n: 1.0 if n == 1 else 0.5)
    made = comparison([ours, Acted("other", log)], Load(at_once=1), Load(at_once=4))
    made.run()
    rows = {(row.side, row.load.at_once): row for row in Summary(made).rows}
    assert rows["other", 4].ratio == Middle(2.0, 2.0, 2.0)
    assert rows["other", 4].ours == "engine"
    assert (
        rows["engine", 4].wall_ratio == 2.0
    )  # twice the time of one, where four in turn take four times
    assert rows["other", 4].wall_ratio == 4.0
    assert rows["engine", 1].output_tps == Middle(100.0, 100.0, 100.0)
    assert rows["engine", 4].memory_mib == 5.0


def test_sides_that_answer_one_by_one_are_measured_alone() -> None:
    log: list[str] = []
    made = comparison(
        [Acted("engine", log, lambda n: 1 / n), Acted("one", log)], Load(at_once=1), Load(at_once=4)
    )
    made.run()
    rows = {(row.side, row.load.at_once): row for row in Summary(made).rows}
    assert ("one", 4) not in rows
    assert rows["engine", 4].over_one == Middle(4.0, 4.0, 4.0)
    made = comparison([Acted("engine", []), Acted("llama", [])], Load(at_once=8), Load(at_once=4))
    made.run()  # at the least load
    rows = {(row.side, row.load.at_once): row for row in Summary(made).rows}
    assert rows.keys() == {("engine", 8), ("engine", 4), ("llama", 4)}
    assert rows["engine", 8].over_one == Middle(1.0, 1.0, 1.0)


def test_bare_loop_alone_gives_a_table_of_widths() -> None:
    made = comparison([], Load(at_once=1), Load(at_once=2))
    made.bare = Bare("bare", [])  # type: ignore[assignment]
    made.run()
    [table] = Summary(made).tables()
    assert [row[:2] for row in table.rows] == [("1", "100"), ("2", "180")]
    made, bare = comparison([Acted("engine", [])]), Bare("bare", [])
    bare.has_prompts = False
    made.bare = bare  # type: ignore[assignment]
    made.run()
    summary = Summary(made)
    assert summary.problems() == []
    assert summary.remarks() == ["the best prompt rate could not be measured: no copies"]
    assert (summary.rows[0].of_ideal, summary.rows[0].of_bare) == (None, Middle(1.0, 1.0, 1.0))


def test_refused_round_is_named_and_its_rate_is_not_shown() -> None:
    made = comparison([Acted("engine", []), Acted("other", [], n_distinct=1, n_output=9)])
    made.run()
    summary = Summary(made)
    [row] = [row for row in summary.rows if row.side == "other"]
    assert (row.output_tps, row.ratio, row.n_counted, row.n_rounds) == (None, None, 0, 2)
    assert len(summary.problems()) == 2
    assert "burst, 1 at once, round 1, cold, other: " in summary.problems()[0]
    assert "| refused |" in markdown(summary.tables())


@pytest.mark.parametrize(("n_distinct", "is_refused"), [(1, False), (5, True)])
def test_degenerate_answers_count_where_the_model_alone_gives_them(
    n_distinct: int, is_refused: bool
) -> None:
    made = comparison([Acted("engine", [], n_distinct=1, n_output=16)])
    judge = Acted("engine", [], n_distinct=n_distinct, n_output=16)
    judge.n_runs = 1  # it needs no warm-up
    made.judge = judge  # type: ignore[assignment]
    made.run()
    assert [not m.counts for m in made.measured] == [is_refused] * 2
    assert ("degenerate" in " ".join(Summary(made).problems())) == is_refused


class Judge(Acted):
    """Answers as the model, whose next token is the one before plus 1, and says how likely each token is."""

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        return {"margins": [self._margins(**item) for item in job["scored"]]}

    @staticmethod
    def _margins(tokens: list[int], n_prompt: int, n_likely: int, banned: list[int]) -> list[float]:
        assert (n_likely, banned) == (20, [99])
        found = zip(tokens[n_prompt - 1 :], tokens[n_prompt:], strict=False)
        return [0.0 if token == before + 1 else -9.0 for before, token in found]


class Continues(Acted):
    """A side whose answers have the tokens of the prompt's model, from the second one on plus `junk`."""

    def __init__(self, name: str, junk: int = 0, *, in_text: bool = False) -> None:
        super().__init__(name, [])
        self._junk, self._in_text = junk, in_text

    def run(self, chains: Chains, *args: Any, **more: Any) -> tuple[list[MeasuredAnswer], float]:
        prompts = {r.id: tokenize(r.prompt)[-1] for chain in chains for r in chain}
        answers, seconds = super().run(chains, *args, **more)
        return [self._told(a, prompts[a.id]) for a in answers], seconds

    def _told(self, answer: MeasuredAnswer, last: int) -> MeasuredAnswer:
        tokens = [
            last + i + (self._junk * i if i > 1 else 0) for i in range(1, answer.n_output + 1)
        ]
        text = " ".join("x" * token for token in tokens)
        return replace(answer, tokens=() if self._in_text else tuple(tokens), text=text)


class TextJudge(Continues, Judge):
    """A judge whose own answers are right."""


@pytest.mark.parametrize("in_text", [False, True])
@pytest.mark.parametrize("name", ["engine", "serve"])
def test_junk_behind_a_right_first_token_gets_no_rate(name: str, in_text: bool) -> None:
    for junk in (0, 3):
        made = comparison([Continues(name, junk, in_text=in_text)])
        made.judge = TextJudge("engine")  # type: ignore[assignment]
        made.end_tokens = (99,)
        made.run()
        assert [m.counts for m in made.measured] == [not junk] * 2
        assert (not Summary(made).problems()) == (not junk)


@pytest.mark.parametrize("i_run", [0, 1], ids=["warm-up", "round"])
def test_side_that_dies_loses_that_round_or_is_left_out(i_run: int) -> None:
    other = Acted("other", [])
    other.fails_in = {i_run}
    made = comparison([Acted("engine", []), other])
    made.run()
    found = [(row.n_counted, row.n_rounds) for row in Summary(made).rows if row.side == "other"]
    assert found == ([(1, 2)] if i_run else [])
    place = "burst, 1 at once, round 1, cold, other: " if i_run else ""
    assert Summary(made).problems() == [f"{place}other: died"]


def test_ctrl_c_leaves_what_was_measured() -> None:
    ours = Acted("engine", [])
    ours.interrupts_in = 2
    made = comparison([ours])
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert [row.n_counted for row in Summary(made).rows] == [1]


def test_requests_of_a_file_are_cold_for_a_server_once() -> None:
    chains = workload_of("burst").chains(ExactText(tokenize), 2, "a")
    log: list[str] = []
    ours, theirs = Acted("engine", log), Acted("theirs", log)
    theirs.is_remote = True
    made = comparison([ours, theirs], file=chains)
    made.run()
    assert [m.state for m in made.measured if m.side == "engine"] == ["cold", "cold"]
    assert [m.state for m in made.measured if m.side == "theirs"] == ["cold", "warm"]
    assert log.count("close engine") == 1
    assert log.count("close theirs") == 0


def test_figures_are_json_with_every_round() -> None:
    made = comparison([Acted("engine", [])], Load(rate=5.0))
    made.run()
    found = Summary(made).as_dict()
    assert len(found["rounds"]) == 2
    assert found["rounds"][0]["figures"]["output_tps"] > 0
    assert found["rows"][0]["wall_ratio"] is None
    assert json.dumps(found)


class Bare(Acted):
    """A loop whose third width is slower than the second."""

    def decode_tps(self, n_rows: int, n_steps: int) -> float:
        return {1: 100.0, 2: 180.0, 3: 150.0, 4: 400.0}[n_rows]

    has_prompts = True

    def prompt_tps(self, n_rows: int) -> float:
        if not self.has_prompts:
            raise SideError("no copies")
        return 1000.0


def test_shares_of_the_bare_loop_and_of_the_ideal_and_cliffs() -> None:
    made = comparison([Acted("engine", [])], *(Load(at_once=n) for n in (1, 2, 3, 4, 8)))
    made.bare = Bare("bare", [])  # type: ignore[assignment]
    made.run()
    summary = Summary(made)
    rows = {row.load.at_once: row for row in summary.rows}
    assert rows[1].of_bare == Middle(1.0, 1.0, 1.0)
    assert rows[8].of_bare == Middle(0.25, 0.25, 0.25)  # of four rows: there are no more slots
    assert [(w.n_rows, w.faster) for w in summary.widths] == [
        (1, None),
        (2, None),
        (3, 2),
        (4, None),
    ]
    assert "cliff: 3 rows decode 150 tokens/s, fewer than 2 rows do" in summary.remarks()
    [m] = [m for m in made.measured if m.load.at_once == 1 and m.i_round == 0]
    assert m.figures is not None
    ideal_s = m.n_distinct / 1000.0 + m.figures.n_output / 400.0
    assert rows[1].of_ideal == pytest.approx(ideal_s / m.figures.seconds, rel=0.2)


@pytest.mark.parametrize("width", [50, 80, 180])
def test_tables_are_readable_at_any_width(width: int) -> None:
    made = comparison([Acted("engine", []), Acted("llama-server", [])])
    made.run()
    [table] = Summary(made).tables()
    lines = text_table(table, width)
    assert max(map(len, lines)) <= width
    shown = "\n".join(lines)
    assert [column for column in table.columns if column not in shown] == []
    assert [cell for row in table.rows for cell in row if cell not in shown] == []
    assert lines[0].startswith("load       side")
    assert lines[1].startswith("1 at once  engine")
    assert (len(lines) == 3) == (width == 180)
