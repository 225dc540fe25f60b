"""Every benchmark of one question runs, by its name, and prints what it finds."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cbatch.bench import cases, experiments
from cbatch.bench.cases import present, run_case, told
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

OF_A_MODEL = {
    "staggered": "--rounds 1 --output 16 --prompt 16 --parallel 2",
    "steps": "--rows 2 --steps 8 --rounds 1",
    "streaming": "--requests 2 --tokens 8 --rounds 1",
    "shared_prefix": "--requests 4 --common 32 --own 8 --output 4 --slots 2 --rounds 1",
    "prompts_first": "--requests 4 --common 64 --own 8 16 --output 2 4 --slots 2 --rounds 1",
    "short_sequences": "--rows 2 --histories 8 --newcomer 4 --rounds 1",
    "repack": "--rows 2 --steps 4 --rounds 1",
    "huge_pages": "--pairs 1 --rounds 1 --share 0.1",
    "narrow_steps": "--rows 3 4 --slots 4 --prompt 4 --output 100 --rounds 1",
    "prompt_lengths": "--prompt 8 40 --output 4 --rounds 1",
    "stall": "--decoders 2 --prompt 64 --rounds 1 --around 4",
    "samplers": "--rows 2 --steps 2 --rounds 1",
    "constraints": "--rows 2 --tokens 8 --rounds 1 --only letters records",
    "prompt_scores": "--requests 2 --prompt 20 --slots 2 --rounds 1 --top 0",
    "continuations": "--tasks 2 --common 0 --slots 2 --rounds 1",
    "side_job": "--streams 2 --tokens 100 --rounds 1",
    "beside_loops": "--slots 2 --steps 4 --rounds 1 --seconds 0.1 --answers 10 --loops 0 1 --workloads burst --count 2",
    "thread_counts": "--rows 2 --tokens 4 --seconds 0.1 --rounds 1",
    "idle_engine": "--rows 2 --tokens 4 --rounds 1",
    "random_load": "--seconds 0.1 --requests 2",
    "exact_price": "--workload decode mixed --slots 2 --requests 4 --rounds 1",
    "first_tokens": "--rounds 1 --sizes 2 --streams 1 --prompts 40",
    "speculation": "--rounds 1 --texts list,free --running 1,2 --tokens 8 --items 2",
    "http_load": "--few 2 --many 4 --tokens 4 --rounds 1 --parallel 2",
    "http_faults": "--clients 4 --minutes 0.01 --good 1 --tokens 4 --parallel 2",
    "step_costs": "--widths 1 2 --chunks 16 --rounds 1",
}
WITHOUT = {
    "batch_files": "--lines 20 --few 10",
    "queues": "--policy fcfs --slots 2 --queued 3 --steps 5",
    "calls": "--rows 2 --steps 3",
    "simulate": "--requests 50 --slots 2 --policy fcfs",
    "simulate_nodes": "--nodes 1 2 --rows 100",
}
TABLES = ("batch_files", "calls")


def check(name: str, shown: str) -> None:
    """Fail where nothing was measured, or where a figure is none."""
    lines = shown.splitlines()
    assert lines
    if name in TABLES:
        numbers = [
            float(n.replace(",", "")) for n in re.findall(r"[0-9][0-9,.]*[0-9]|[0-9]", shown)
        ]
        assert any(number > 0 for number in numbers)
        return
    for line in lines:
        found = [*numbers_in(json.loads(line, parse_constant=pytest.fail))]
        assert any(number > 0 for number in found)
        assert all(map(math.isfinite, found))


def numbers_in(value: object) -> Iterator[float]:
    """Yield the numbers of a JSON value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.mark.parametrize("shown", ["", "{}", '{"a": 0}', '{"a": NaN}', '{"a": 1}\n{"b": true}'])
def test_output_without_figures_is_found(shown: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check("steps", shown)


def test_cases_are_those_that_run() -> None:
    files = Path(str(experiments.__file__)).parent.glob("*.py")
    scripts = {path.stem for path in files if "def main(words" in path.read_text("utf-8")}
    assert set(present()) == scripts
    elsewhere = {"replicas", "ray_bench"}  # one has a test of its own, the other takes a cluster
    assert scripts - elsewhere == OF_A_MODEL.keys() | WITHOUT.keys()


def test_package_without_experiments_says_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "find_spec", lambda _: None)
    assert present() == ()
    with pytest.raises(ConfigError, match="case 'steps' is not in the installed package"):
        run_case("steps", [])


@pytest.mark.parametrize("name", present())
def test_case_says_in_one_line_what_it_is(name: str) -> None:
    assert 10 < len(told(name)) < 120


def test_unknown_case_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown case 'speed'; known are batch_files"):
        run_case("speed", [])


def test_answer_without_a_second_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="--output must be at least 2, not 1"):
        run_case("prompt_lengths", ["model.gguf", "--output", "1"])


@pytest.mark.real
@pytest.mark.parametrize("name", OF_A_MODEL)
def test_case_runs_on_a_model(
    name: str, test_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_case(name, [str(test_model), *OF_A_MODEL[name].split()])
    check(name, capsys.readouterr().out)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.real if name == "batch_files" else ())
        for name in WITHOUT
    ],
)
def test_case_runs_without_a_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_case(name, WITHOUT[name].split())
    check(name, capsys.readouterr().out)
