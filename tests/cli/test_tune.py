"""`cbatch tune`: what it prints, writes and keeps, on engines that only say their times."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from cbatch.bench import sides, tuning
from cbatch.bench.workloads import WORKLOADS
from tests.bench.test_tuning import Machine
from tests.cli.conftest import invoke

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cbatch.bench.tuning import TunedSide
    from cbatch.bench.workloads import Workload


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """No note is there yet, and engines are as fast as a table says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found, given = Machine(), dict[str, Any]()

    def side(kind: str, model: str, settings: Mapping[str, Any]) -> TunedSide:
        if not given:
            given.update(settings)
        return found.side({k: v for k, v in settings.items() if given.get(k) != v})

    monkeypatch.setattr(sides, "ProcessSide", side)
    monkeypatch.setattr(tuning, "N_ROUNDS_MOST", 3)
    for name, job in WORKLOADS.items():
        short = replace(job, own=(2, 4), output=(2, 4), n_common=0)
        monkeypatch.setitem(cast("dict[str, Workload]", WORKLOADS), name, short)
    monkeypatch.setattr("cbatch.backend.host_limits.available_cores", lambda: 2)
    return found


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("one.gguf", "-m", "two.gguf"), "MODEL is one.gguf and -m is two.gguf"),
        (("--minutes", "0"), "--minutes"),
        (("--json", "."), "is a directory: give a file"),
        (("no.gguf",), "no.gguf"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(args: tuple[str, ...], words: str) -> None:
    shown = invoke("tune", *args)
    assert shown.exit_code == 2
    assert words in shown.stderr


def test_slot_that_is_too_small_for_the_jobs_is_refused(test_model: Path) -> None:
    shown = invoke("tune", test_model, "--ctx-per-seq", 512)
    assert shown.exit_code == 2
    assert "the jobs need slots of 668 tokens, but have 512" in shown.stderr


def test_table_and_flags_are_printed_and_written(
    machine: Machine, test_model: Path, tmp_path: Path
) -> None:
    machine.speeds = {"n_ubatch=1024": 1.2, "n_threads=1": 0.6, "cache_type_k=q8_0": 1.1}
    machine.broken = {"start replicas=2"}
    file = tmp_path / "tuned.json"
    shown = invoke("tune", test_model, "--at-once", 2, "--json", file)
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[-1] == "use --n-ubatch 1024"
    rows = {line.split("  ")[0]: line for line in lines if line.startswith("--")}
    assert "1.20 ± 0.01" in rows["--n-ubatch 1024"]
    assert rows["--threads 1"].endswith("slower in decode, mixed, shared")
    assert rows["--kv unified"].endswith("no difference")
    assert rows["--replicas 2"].endswith("refused: replicas=2: no memory")
    assert "--n-ubatch 1024: faster in decode, mixed, shared" in shown.stderr
    said = json.loads(file.read_text(encoding="utf-8"))
    assert (said["advice"], said["flags"]) == ({"n_ubatch": 1024}, "use --n-ubatch 1024")
    assert invoke("tune", test_model, "--json", file).exit_code == 2, "the file is kept"


def test_setting_that_is_given_stays(machine: Machine, test_model: Path) -> None:
    shown = invoke("tune", test_model, "--at-once", 2, "--kv", "partitioned", "--threads", 2, "-q")
    assert shown.exit_code == 0
    assert shown.stderr == ""
    assert "kv partitioned" in shown.stdout.splitlines()[0]
    assert "--kv " not in shown.stdout
    assert "--threads " not in shown.stdout
    assert shown.stdout.endswith("the defaults are best here\n")


def test_flash_attention_is_kept_for_loads_and_put_right_later(
    machine: Machine, test_model: Path
) -> None:
    machine.speeds = {"flash_attn=off": 1.2}
    shown = invoke("tune", test_model, "--at-once", 2)
    assert "flash attention off is kept for later loads" in shown.stdout
    assert shown.stdout.endswith("the defaults are best here\n"), "no flag is needed"
    assert "off (measured with this model on " in " ".join(
        invoke("info", test_model).stdout.split()
    )
    machine.speeds = {"flash_attn=on": 1.2}
    assert (
        "flash attention on is kept for later loads"
        in invoke("tune", test_model, "--at-once", 2).stdout
    )
    assert "if this model supports it (measured" in " ".join(
        invoke("info", test_model).stdout.split()
    )


def test_nothing_is_kept_beside_other_programs(machine: Machine, test_model: Path) -> None:
    machine.speeds, machine.cpu_share = {"flash_attn=off": 1.2}, 0.4
    shown = invoke("tune", test_model, "--at-once", 2)
    assert "other programs were busy" in shown.stdout
    assert shown.stdout.endswith("use --flash-attn off\n")
    assert "measured with this model" not in invoke("info", test_model).stdout


def test_ctrl_c_shows_what_was_found(machine: Machine, test_model: Path) -> None:
    machine.speeds = {"flash_attn=off": 1.2}

    def interrupt(name: str) -> None:
        if name == "n_threads=1":
            raise KeyboardInterrupt

    machine.before_job = interrupt
    shown = invoke("tune", test_model, "--at-once", 2)
    assert shown.exit_code == 130
    assert "--flash-attn off" in shown.stdout
    assert "not measured: --threads 1; --replicas 2" in shown.stdout


def test_model_that_cannot_be_loaded_says_why(machine: Machine, test_model: Path) -> None:
    machine.broken = {"start "}
    shown = invoke("tune", test_model, "--at-once", 2)
    assert shown.exit_code == 2
    assert ": no memory" in shown.stderr


@pytest.mark.real
def test_real_engines_take_turns() -> None:
    shown = invoke("tune", "--at-once", 1, "--minutes", 0.05)
    assert shown.exit_code == 0, shown.stderr
    assert "noise, by two engines with the same settings: decode " in shown.stdout
