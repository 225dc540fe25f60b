"""`cbatch run`: answers in a file, clear words for bad input, and an end that leaves whole lines."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.bench.synthetic import SHAPES
from cbatch.errors import ConfigError, PromptTooLongError
from tests.cli.conftest import Done, forbid_opening, invoke, parse, start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import SynthFactory

    WriteInput = Callable[..., Path]

CHAT = [{"role": "user", "content": "Say red."}]
SHORT = {"max_tokens": 3, "ignore_eos": True}
STOPS = {"stop_token_ids": [*range(SHAPES["test"].n_vocab)]}
"""Without a cap, and over at the first token."""
SMALL = ("--parallel", 2, "--threads", 1)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def run(source: object, out: object, model: Path, *args: object) -> Done:
    return invoke("run", source, "-o", out, "-m", model, *SMALL, "--quiet", *args)


def test_run_answers_every_kind_of_prompt(
    write_input: WriteInput, out: Path, test_model: Path
) -> None:
    source = write_input(
        {"id": "chat", "messages": CHAT, "options": SHORT},
        "",
        {"prompt": "Once upon", "options": {**SHORT, "seed": 7}},
        {"id": "ids", "tokens": [5, 6, 7], "options": SHORT},
    )
    assert run(source, out, test_model).exit_code == 0
    lines = {line["id"]: line for line in parse(out.read_bytes())}
    assert sorted(lines) == ["chat", "ids", "line-2"]
    assert list(lines["line-2"]) == [
        *("id", "text", "finish_reason", "error", "usage", "timings", "seed", "digest"),
    ]
    assert lines["line-2"]["seed"] == 7
    for line in lines.values():
        assert (line["finish_reason"], line["error"]) == ("length", None)
        assert line["usage"]["completion_tokens"] == 3
    assert lines["ids"]["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("requests", "args", "n_window"),
    [
        ([{"tokens": [5] * 300, "options": SHORT}, {"prompt": "a", "options": STOPS}], (), 2048),
        ([{"tokens": [5] * 300, "options": SHORT}, {"prompt": "a", "options": SHORT}], (), 512),
        ([{"tokens": [5] * 300}, {"prompt": "a"}], ("--max-tokens", 9), 512),
        ([{"tokens": [5] * 3000, "options": SHORT}], (), 3072),
    ],
    ids=["uncapped", "short", "short by the run's cap", "long"],
)
def test_windows_are_made_to_the_measure_of_the_file(
    write_input: WriteInput,
    out: Path,
    synth: SynthFactory,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[dict[str, Any]],
    args: tuple[object, ...],
    n_window: int,
) -> None:
    loaded: list[int] = []
    really_run = cbatch.Engine.run

    def run_noted(engine: cbatch.Engine, *args: Any, **more: Any) -> cbatch.BatchResponse:
        loaded.append(engine.n_window)
        return really_run(engine, *args, **more)

    monkeypatch.setattr(cbatch.Engine, "run", run_noted)
    result = run(write_input(*requests), out, synth("test"), *args)
    assert (result.exit_code, loaded) == (0, [n_window])
    assert all(line["error"] is None for line in parse(out.read_bytes()))


def test_run_wide_options_hold_where_a_line_says_nothing(
    write_input: WriteInput, out: Path, test_model: Path
) -> None:
    source = write_input({"prompt": "a"}, {"prompt": "a", "options": {"max_tokens": 2}})
    options = ("--max-tokens", 4, "--seed", 9, "--ignore-eos", "--temperature", 0, "--stop", "\x00")
    assert run(source, out, test_model, *options).exit_code == 0
    lines = parse(out.read_bytes())
    assert {line["id"]: line["usage"]["completion_tokens"] for line in lines} == {
        "line-1": 4,
        "line-2": 2,
    }
    assert {line["seed"] for line in lines} == {9}


def test_failed_item_has_its_error_and_the_others_are_fine(
    write_input: WriteInput, out: Path, test_model: Path
) -> None:
    source = write_input(
        {"id": "fine", "prompt": "a", "options": SHORT},
        {"id": "long", "tokens": [5] * 300, "options": SHORT},
        {"id": "also fine", "prompt": "b", "options": SHORT},
    )
    result = run(source, out, test_model, "--ctx-per-seq", 256)
    assert result.exit_code == 1
    assert "1 of 3 items failed: 1 PromptTooLongError; the first: " in result.stderr
    assert f"{source}, line 2: the prompt has 300 tokens" in result.stderr
    again = run(source, out, test_model, "--ctx-per-seq", 256)
    told = "1 of 3 items failed: 1 in earlier runs (1 PromptTooLongError); the first: "
    assert f"{told}{source}, line 2: the prompt has 300 tokens" in again.stderr
    assert again.stderr.endswith("; --retry-errors runs those again\n")
    lines = {line["id"]: line for line in parse(out.read_bytes())}
    assert lines["long"]["error"]["type"] == PromptTooLongError.__name__
    assert "300 tokens" in lines["long"]["error"]["message"]
    assert lines["long"]["finish_reason"] == "error"
    assert [lines[id]["finish_reason"] for id in ("fine", "also fine")] == ["length", "length"]


@pytest.mark.real
def test_load_refuses_a_bad_grammar_of_all_requests_before_the_model() -> None:
    with pytest.raises(ConfigError, match="regex: "):
        cbatch.load("not-there.gguf", options={"regex": "a(b"})


@pytest.mark.real
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--set", "regex=a(b"), "regex: "),
        (("--set", "regex=a(b", "--dry-run"), "regex: "),
        (("--set", 'json_schema={"type": "foo"}'), "json_schema: Invalid type: foo"),
        (("--set", "grammar=start: ("), "grammar: "),
        (("--chat-template", "{{ x"), "chat_template does not compile"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_no_item_could_follow_stops_the_run_before_the_model_loads(
    write_input: WriteInput, out: Path, tmp_path: Path, given: tuple[str, ...], words: str
) -> None:
    source = write_input({"prompt": "a"})
    done = invoke("run", source, "-o", out, "-m", tmp_path / "not-there.gguf", *given)
    assert (done.exit_code, out.exists()) == (2, False)
    assert f"cbatch: {words}" in done.stderr


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "not JSON"),
        ({"id": "first", "prompt": "a"}, "the id 'first' occurs twice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_line_costs_one_line_and_strict_stops_before_anything_runs(
    write_input: WriteInput, out: Path, test_model: Path, bad: object, words: str
) -> None:
    source = write_input({"id": "first", "prompt": "a", "options": SHORT}, "", bad)
    result = run(source, out, test_model, "--strict")
    assert (result.exit_code, out.exists()) == (2, False)
    assert f"{source}, line 3: " in result.stderr
    assert words in result.stderr
    result = run(source, out, test_model)
    assert result.exit_code == 1
    assert "1 of 2 items failed" in result.stderr
    good, wrong = sorted(parse(out.read_bytes()), key=lambda line: line["error"] is not None)
    assert (good["id"], good["error"]) == ("first", None)
    assert f"line 3: {words}" in wrong["error"]["message"] or words in wrong["error"]["message"]


def test_input_that_cannot_be_read_is_named(
    write_input: WriteInput, tmp_path: Path, out: Path, test_model: Path
) -> None:
    for source, words in (
        (write_input("", "  "), "no requests found"),
        (tmp_path / "none", "cannot be read: No such file"),
        (tmp_path, "is a directory"),
    ):
        result = run(source, out, test_model)
        assert (result.exit_code, out.exists()) == (2, False)
        assert f"{source}: {words}" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--parallel", 0), "parallel must be 1 … 256, not 0"),
        (("--chat-template", "mine"), "chat_template='mine'"),
        (("--model", "none.gguf"), "none.gguf: cannot be read"),
    ],
    ids=str,
)
def test_bad_setting_is_named_and_nothing_is_written(
    write_input: WriteInput, out: Path, test_model: Path, args: tuple[object, ...], words: str
) -> None:
    result = run(write_input({"prompt": "a"}), out, test_model, *args)
    assert (result.exit_code, out.exists()) == (2, False)
    assert result.stderr.startswith("cbatch: ")  # nothing is said to be loading
    assert words in result.stderr


def test_existing_output_is_kept_without_force(
    write_input: WriteInput, out: Path, test_model: Path
) -> None:
    source = write_input({"prompt": "a", "options": SHORT})
    out.write_text("precious")
    result = run(source, out, test_model)
    assert (result.exit_code, out.read_text()) == (2, "precious")
    assert f"{out}: exists already, and cbatch did not write it" in result.stderr
    result = run(source, out, out.with_name("none.gguf"), "--force")  # which cannot start
    assert (result.exit_code, out.read_text()) == (2, "precious")
    assert run(source, out, test_model, "--force").exit_code == 0
    assert len(parse(out.read_bytes())) == 1


@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl"])
def test_file_without_permission_is_named_and_kept(
    write_input: WriteInput,
    out: Path,
    test_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    source = write_input({"prompt": "a", "options": SHORT})
    out.write_text("precious")
    with monkeypatch.context() as patch:
        forbid_opening(out.with_name(name), patch)
        result = run(source, out, test_model, "--force")
    assert (result.exit_code, out.read_bytes()) == (2, b"precious")
    assert result.stderr == f"cbatch: {out.with_name(name)}: cannot be read: Permission denied\n"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--chat-template", "{}"), ("--chat-template", "@{}"), ("--chat-template-kwargs", "@{}")),
        *(("--set", "json_schema=@{}"), ("--set", "grammar=@{}"), ("--adapter", "a={}")),
    ],
)
def test_file_of_an_option_is_never_written_over(
    flag: str, value: str, write_input: WriteInput, out: Path, test_model: Path
) -> None:
    source, file = write_input({"prompt": "a"}), out.with_name("given.json")
    file.write_text("{}")
    given = (flag, value.format(file), "--force")
    for places in ((out, "--report", file), (file,)):
        result = run(source, places[0], test_model, *given, *places[1:])
        assert (result.exit_code, file.read_text()) == (2, "{}")
        assert f"{file}: is the input" in result.stderr


def test_input_by_another_name_is_never_the_output(
    write_input: WriteInput, out: Path, test_model: Path
) -> None:
    source = write_input({"prompt": "a"})
    before = source.read_bytes()
    out.hardlink_to(source)
    result = run(source, out, test_model, "--force")
    assert (result.exit_code, source.read_bytes()) == (2, before)
    assert f"{out}: is the input" in result.stderr


def test_output_that_comes_up_while_the_model_loads_is_left_alone(
    write_input: WriteInput, out: Path, test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = cbatch.load

    def slow_load(model: Path, **settings: Any) -> cbatch.Engine:
        out.write_text("precious")
        return load(model, **settings)

    monkeypatch.setattr("cbatch.files.settings.load", slow_load)
    result = run(write_input({"prompt": "a"}), out, test_model)
    assert (result.exit_code, out.read_text()) == (2, "precious")
    assert f"{out}: " in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full, a disk that is always full")
def test_full_disk_ends_the_run_with_a_clear_line(
    write_input: WriteInput, test_model: Path
) -> None:
    result = run(write_input({"prompt": "a", "options": SHORT}), "/dev/full", test_model)
    assert result.exit_code == 2
    assert result.stderr == "cbatch: /dev/full: No space left on device\n"


def test_dash_is_stdin_and_stdout(test_model: Path) -> None:
    with start("run", "-", "-o", "-", "-m", test_model, *SMALL) as process:
        answers, said = process.communicate(
            b'{"id": "\xc3\xa9", "prompt": "a", "options": {"max_tokens": 9}}\n'
        )
    assert process.returncode == 0, said
    assert [line["id"] for line in parse(answers)] == ["é"]
    assert b"slots   1 of 2 at most, 1.0 on average" in said


def test_ctrl_c_exits_130_and_leaves_whole_lines(
    write_input: WriteInput, out: Path, test_model: Path
) -> None:
    endless = [{"prompt": "b", "options": {"ignore_eos": True, "max_tokens": 200}}] * 5000
    source = write_input(*[{"prompt": "a", "options": SHORT}] * 4, *endless)
    with start("run", source, "-o", out, "-m", test_model, *SMALL) as process:
        while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 2):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130, said
    assert b"finishing the running items; Ctrl-C again stops at once" in said
    assert b"run the same command again to continue" in said
    assert b"Traceback" not in said
    answers = out.read_bytes()
    assert answers.endswith(b"\n")
    ids = [line["id"] for line in parse(answers)]
    assert 2 <= len(ids) == len(set(ids)) < 100


def test_engine_that_dies_ends_the_run_and_leaves_its_items_for_the_next(
    write_input: WriteInput, out: Path, test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object) -> None:
        raise MemoryError("no room for logits")

    source = write_input(*[{"prompt": "a", "options": SHORT}] * 3)
    monkeypatch.setattr("cbatch.backend.llama.llama_backend.LlamaBackend._run", explode)
    result = invoke("run", source, "-o", out, "-m", test_model, "--no-isolate", *SMALL)
    assert result.exit_code == 2
    assert "the engine stopped: no room for logits" in result.stderr
    assert out.read_bytes() == b""


@pytest.mark.parametrize("debug", [False, True])
def test_bug_shows_a_traceback_only_on_request(
    write_input: WriteInput, out: Path, monkeypatch: pytest.MonkeyPatch, *, debug: bool
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("cbatch.files.settings.load", broken)
    source = write_input({"prompt": "a"})
    flags = ["--debug"] if debug else []
    result = invoke(*flags, "run", source, "-o", out, "-m", "any", "--quiet")
    assert result.exit_code == 2
    assert ("Traceback" in result.stderr) is debug
    assert "KeyError: 'lost'" in result.stderr


@pytest.mark.real
def test_demo_needs_no_file_and_reads_well() -> None:
    result = invoke("run", "--demo", "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n\n") == 64
    assert "> Say red.\n  red\n\n" in result.stdout
    assert "> Tell me a short story about a fox in the desert.\n  There was once" in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


@pytest.mark.real
def test_demo_may_write_a_file_of_answers(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    assert invoke("run", "--demo", "--quiet", "-o", out).exit_code == 0
    answers = {a["id"]: a for a in map(json.loads, out.read_text().splitlines())}
    assert len(answers) == 64
    assert answers["0"]["text"] == "red"
    assert {a["finish_reason"] for a in answers.values()} == {"stop"}


def test_demo_writes_json_lines_under_no_other_name(tmp_path: Path) -> None:
    result = invoke("run", "--demo", "--quiet", "-o", tmp_path / "answers.csv")
    assert result.exit_code == 2
    assert "its name says csv, but answers are cbatch" in result.stderr
