"""What every command shares: the environment, the log, completion, help."""

from __future__ import annotations

import json
import logging
import re
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
from typer.testing import CliRunner

from cbatch.cli import app
from cbatch.cli.main import make_app
from tests.cli.conftest import invoke, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COMMANDS: dict[str, Any] = dict(vars(typer.main.get_command(app))["commands"])


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("cbatch")
    before = (logger.level, list(logger.handlers))
    yield logger
    assert (logger.level, logger.handlers) == before


def options_of(command: str) -> Iterator[Any]:
    """The options of a command, but `--help`."""
    for parameter in COMMANDS[command].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            yield parameter


def test_options_come_from_the_environment(
    write_input: Callable[..., Path],
    tmp_path: Path,
    test_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    for name, value in {
        "OUTPUT": str(out),
        "MODEL": str(test_model),
        "PARALLEL": "1",
        "THREADS": "1",
        "MAX_TOKENS": "3",
        "SEED": "5",
        "IGNORE_EOS": "1",
        "FORCE": "true",
        "QUIET": "yes",
    }.items():
        monkeypatch.setenv(f"CBATCH_RUN_{name}", value)
    result = invoke("run", write_input({"prompt": "a"}))
    assert (result.exit_code, result.stderr) == (0, "")
    [line] = parse(out.read_bytes())
    assert (line["seed"], line["usage"]["completion_tokens"]) == (5, 3)


@pytest.mark.skipif(sys.platform == "win32", reason="folders in use stay")
@pytest.mark.parametrize(
    "words", [("run", "in.jsonl", "-o", "out.jsonl"), ("sort", "a", "-o", "b")]
)
def test_removed_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stderr == "cbatch: the current folder was removed: change to another one\n"


def test_command_line_comes_before_the_environment(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBATCH_INFO_PARALLEL", "3")
    monkeypatch.setenv("CBATCH_INFO_JSON", "1")
    assert json.loads(invoke("info", test_model).stdout)["parallel"] == 3
    assert json.loads(invoke("info", test_model, "--parallel", 2).stdout)["parallel"] == 2
    monkeypatch.delenv("CBATCH_INFO_JSON")
    monkeypatch.setenv("CBATCH_INFO_PARALLEL", "0")  # which is not blamed then
    result = invoke("info", test_model, "--parallel", 257)
    assert result.stderr == "cbatch: parallel must be 1 … 256, not 257\n"


@pytest.mark.parametrize(
    ("variable", "value", "args"),
    [
        ("CBATCH_LOG_LEVEL", "loud", ("info", "MODEL")),
        ("CBATCH_DEBUG", "perhaps", ("info", "MODEL")),
        ("CBATCH_INFO_EXACT", "maybe", ("info", "MODEL")),
        ("CBATCH_INFO_PARALLEL", "many", ("info", "MODEL")),
        ("CBATCH_ASK_CHAT_TEMPLATE", "mine", ("ask", "Hi", "-m", "MODEL")),
        ("CBATCH_ASK_MODEL", "none.gguf", ("ask", "Hi")),
        ("CBATCH_RUN_OUTPUT", ".", ("run", "in.jsonl", "-m", "MODEL")),
        ("CBATCH_RUN_N_CTX", "0", ("run", "in.jsonl", "-o", "-", "-m", "MODEL")),
    ],
)
def test_every_bad_value_in_the_environment_is_named(
    test_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    args: tuple[str, ...],
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("CBATCH_ASK_TEMPERATURE", "0.5")  # which is fine
    result = invoke(*[test_model if part == "MODEL" else part for part in args])
    assert result.exit_code == 2
    assert f"(from {variable})" in " ".join(result.stderr.replace("│", "").split())
    assert result.stderr.count("CBATCH_") == 1


@pytest.mark.parametrize("name", ["CBATCH_SHOW_COMPLETION", "CBATCH_VERSION"])
def test_environment_asks_for_no_version_and_no_completion(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert "Commands" in invoke("--help").stdout
    result = invoke("info", "none.gguf")
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("run", "--regex", "a"), "No such option: --regex: use --set regex=…"),
        (("run", "--n-predict=4"), "No such option: --n-predict: use --max-tokens"),
        (("run", "-c", "512"), "No such option: -c: use --ctx-per-seq"),
        (("run", "-ngl3"), "No such option: -ngl: use --gpu-layers"),
        (("--bogus",), "No such option: --bogus"),
        (("info", "x.gguf", "--bogus"), "No such option: --bogus"),
        (("run", "-", "--temprature", "1"), "--temperature"),
        (("inf", "x.gguf"), "Did you mean 'info'"),
        (("ask", "Hi", "there", "-m", "x.gguf"), "there"),
        (("--log-level", "loud", "info", "none.gguf"), "loud"),
        (("serve", "nope.gguf"), "-m nope.gguf"),
        (("serve", "--replicas", "many"), "--replicas must be a whole number or auto, not 'many'"),
        (("serve", "--replicas", "9" * 5000), "--replicas must be "),
        (("serve", "--grace-s", "1e300"), "grace_s must be 0 … 1e+09, not 1e+300"),
        (("bench", "--timeout-s", "inf"), "timeout_s must be a finite number, not inf"),
        (("tune", "--minutes", "inf"), "minutes must be a finite number, not inf"),
        (("verify", "--timeout-s", "1e300"), "timeout_s must be 0 … 1e+09, not 1e+300"),
        (("run", "in.jsonl"), "give --output (-o) a file"),
        (("run",), "give a batch file, or --demo"),
        (("run", "in.jsonl", "--demo"), "leave out in.jsonl"),
        (("run", "--demo", "--report", "r.html"), "leave out --report"),
        (("run", "--demo", "--max-time-s", "5"), "leave out --max-time-s"),
        (("run", "--demo", "--raw"), "leave out --raw"),
        (("run", "--demo", "--dry-run"), "leave out --dry-run"),
    ],
    ids=str,
)
def test_wrong_command_line_is_named(args: tuple[str, ...], words: str) -> None:
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help_and_is_read_from_the_environment(command: str) -> None:
    for parameter in options_of(command):
        assert parameter.help, parameter.name
        assert parameter.allow_from_autoenv, parameter.name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_one_example_and_every_default(command: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"])
    assert result.output.count(f"Example: cbatch {command} ") == 1
    for parameter in options_of(command):
        if isinstance(parameter.show_default, str):
            assert f"[default: ({parameter.show_default})]" in result.output
        elif parameter.secondary_opts:
            chosen = parameter.opts if parameter.default else parameter.secondary_opts
            assert f"[default: {chosen[0].removeprefix('--')}]" in result.output
        elif parameter.default not in (None, False):
            assert f"[default: {parameter.default}]" in result.output


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_the_window_and_cuts_no_option(command: str | None) -> None:
    args = [command] if command else []
    result = CliRunner(env={"COLUMNS": "40"}).invoke(app, [*args, "--help"])
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 40
    assert "…" not in result.output.replace("1 … 256", "")
    assert "<bool>" not in result.output  # a flag takes no value
    for parameter in options_of(command) if command else ():
        assert re.search(rf"{parameter.opts[0]}\s", result.output)


def test_log_level_shows_the_log_on_stderr(
    logger: logging.Logger, test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # else the machine may have other memory to tell of the second time
    monkeypatch.setattr("cbatch.backend.load.free_memory.host_free", lambda path: 2**34)
    quiet = invoke("info", test_model)
    assert quiet.stderr == ""
    assert "16.0 GiB free; the KV cache may take" in quiet.stdout
    loud = invoke("--log-level", "INFO", "info", test_model)
    assert (loud.exit_code, loud.stdout) == (0, quiet.stdout)
    assert all(line.startswith("INFO cbatch.llama: ") for line in loud.stderr.splitlines())
    assert "general.architecture" in loud.stderr
    monkeypatch.setenv("CBATCH_LOG_LEVEL", "error")
    assert invoke("info", test_model).stderr == ""


def test_log_line_that_cannot_be_written_ends_nothing(
    logger: logging.Logger, test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(line: str) -> None:
        raise OSError("gone")

    monkeypatch.setattr("cbatch.cli.main.say", break_off)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    assert invoke("--log-level", "info", "info", test_model).exit_code == 0


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (None, ["cbatch: worker 0 died"]),
        ("warning", ["WARNING cbatch.worker: worker 0 died", "WARNING cbatch: other"]),
        ("error", []),
    ],
)
def test_deaths_of_workers_are_on_stderr_at_the_default_log_level(
    level: str | None, shown: list[str], logger: logging.Logger
) -> None:
    def lose() -> None:
        logging.getLogger("cbatch.worker").warning("worker 0 died")
        logging.getLogger("cbatch").warning("other")

    def keep() -> None:
        """Make the application one of several commands."""

    arguments = ["lose"] if level is None else ["--log-level", level, "lose"]
    result = CliRunner().invoke(make_app(lose, keep), arguments)
    assert result.stderr.splitlines() == shown
    assert logging.getLogger("cbatch.worker").handlers == []


# ---- completion ----


def completed(words: str) -> list[str]:
    """Return what bash is told of the last word of a command line."""
    at = str(words.count(" "))
    asked = {"_CBATCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": at}
    result = CliRunner(env=asked).invoke(app, [], prog_name="cbatch")
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.stdout.split()


def test_shell_completes_commands() -> None:
    assert completed("cbatch i") == ["info"]
    assert "--install-completion" in invoke("--help").stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("run --kv ", "auto partitioned unified"),
        ("ask Hi --flash-attn o", "on off"),
        ("serve --policy r", "round_robin"),
        ("run --when-full ", "wait reject"),
        ("run --format c", "cbatch csv"),
        ("run --output-format te", "text"),
        ("run --replicas a", "auto"),
        ("serve --replicas a", "auto"),
        ("serve --log-format j", "json"),
        ("synth m.gguf --shape te", "test"),
        ("bench --case stall", "stall"),
        ("bench --workload decode,m", "decode,mixed"),
        ("info --kv p", "partitioned"),
    ],
    ids=str,
)
def test_shell_completes_words_of_choices(words: str, found: str) -> None:
    assert completed(f"cbatch {words}") == found.split()


@pytest.mark.parametrize("command", ["run -m", "info", "bench -m", "synth a.gguf --vocab"])
def test_shell_completes_model_files(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a[1].gguf", "b.txt", "b c.gguf", "models/big.gguf", "models/deep/c.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completed(f"cbatch {command} ") == ["a[1].gguf", "models/big.gguf"]
    assert completed(f"cbatch {command} a[") == ["a[1].gguf"]
    assert completed(f"cbatch {command} ~/mod") == ["~/models/big.gguf"]
    assert completed(f"cbatch {command} b") == []


def test_shell_completion_downloads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    hub = SimpleNamespace(hf_hub_download=lambda **given: asked.append(given))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    for command in ("info", "run -m"):
        words = f"cbatch {command} hf:me/models/a.gguf --kv p"
        assert completed(words) == ["partitioned"]
    assert asked == []
