"""`cbatch run` over files of every kind: checked, estimated, limited, gone on with, told as events."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING

import pyarrow.parquet
import pytest

from tests.cli.conftest import Done, invoke, parse, start

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ("--parallel", 2, "--threads", 1, "--max-tokens", 3, "--ignore-eos")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": f"r{i}", "prompt": f"Say {i}"}) for i in range(20)]
    path.write_text("\n".join([*lines, "{bad"]) + "\n")
    return path


def run(source: object, model: Path, *args: object) -> Done:
    return invoke("run", source, "-m", model, *SMALL, *args)


@pytest.mark.parametrize(
    ("flag", "code", "said"),
    [
        ("--check", 1, ("line 21: not JSON", "items   21, 1 wrong: 1 invalid_json_line")),
        ("--dry-run", 0, ("sample  20 of 20 items", "60 out", "MiB of the host")),
    ],
)
def test_look_ahead_tells_and_writes_nothing(
    source: Path, test_model: Path, flag: str, code: int, said: tuple[str, ...]
) -> None:
    done = run(source, test_model, flag)
    assert (done.exit_code, done.stdout) == (code, "")
    assert all(words in done.stderr for words in said)
    assert [path.name for path in source.parent.iterdir()] == ["in.jsonl"]


def test_prompt_of_a_request_is_text_or_a_chat_as_asked(tmp_path: Path, test_model: Path) -> None:
    source, table = tmp_path / "in.jsonl", tmp_path / "in.csv"
    source.write_text(
        '{"prompt": "Say red."}\n{"messages": [{"role": "user", "content": "Say red."}]}'
    )
    table.write_text("prompt\nSay red.\n")
    n_tokens = {}
    for more in ("", "--raw", "--chat"):
        done = run(source, test_model, "-o", tmp_path / f"out{more}.jsonl", *filter(None, (more,)))
        assert done.exit_code == 0
        assert ("is completed as text" in done.stderr) == (not more)
        lines = sorted(parse((tmp_path / f"out{more}.jsonl").read_bytes()), key=lambda r: r["id"])
        n_tokens[more] = [line["usage"]["prompt_tokens"] for line in lines]
    assert n_tokens[""] == n_tokens["--raw"]
    assert n_tokens["--chat"] == [n_tokens["--raw"][1]] * 2
    assert n_tokens["--raw"][0] < n_tokens["--chat"][0]
    for more, text in (("--raw", n_tokens["--raw"][0]), ("--chat", n_tokens["--chat"][0])):
        out = tmp_path / f"rows{more}.jsonl"
        assert run(table, test_model, "-o", out, more).exit_code == 0
        assert [line["prompt_tokens"] for line in parse(out.read_bytes())] == [text]
    done = run(source, test_model, "-o", tmp_path / "out.jsonl", "--chat")
    assert (done.exit_code, "rows was chats, is now prompts as chats" in done.stderr) == (2, True)


def test_labels_are_written_with_their_probability(tmp_path: Path, test_model: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.parquet"
    source.write_text("id,review\n1,Splendid\n2,Broken\n")
    asked = (
        "--template",
        "Good or bad? {review}",
        "--choice",
        "good, bad",
        "--set",
        "logprobs=true",
    )
    more = ("--output-column", "label", "--keep-columns", "id")
    done = invoke("run", source, "-o", out, "-m", test_model, "--parallel", 2, *asked, *more)
    assert done.exit_code == 0, done.stderr
    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert [list(row)[:2] for row in rows] == [["id", "label"]] * 2
    assert all(row["label"] in ("good", "bad") and row["logprob"] < 0 for row in rows)
    done = invoke("run", source, "-o", out, "-m", test_model, *asked)
    assert done.exit_code == 2
    assert "kept columns was id, is now all" in done.stderr


def test_run_goes_on_behind_its_limit(source: Path, test_model: Path) -> None:
    out = source.with_name("out.jsonl")
    done = run(source, test_model, "-o", out, "--limit", 15)
    assert done.exit_code == 0
    assert "stopped at the limit: run the same command again to continue" in done.stderr
    done = run(source, test_model, "-o", out)
    assert done.exit_code == 1
    assert "continuing: 15 items have a record" in done.stderr
    assert sorted(line["id"] for line in parse(out.read_bytes())) == sorted(
        [*(f"r{i}" for i in range(20)), "line-21"]
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--temperature", 0.5), "temperature=0.5"),
        (("--cache-type-k", "q8_0"), "cache_type_k was f16, is now q8_0"),
        (("--chat-template", "chatml"), "chat template was"),
        (("--parallel", 3, "--ctx-per-seq", 512, "--policy", "shortest"), ""),
        (("--flash-attn", "off"), ""),
    ],
)
def test_settings_that_change_answers_are_refused_and_others_not(
    source: Path, test_model: Path, more: tuple[object, ...], words: str
) -> None:
    out = source.with_name("out.jsonl")
    run(source, test_model, "-o", out, "--limit", 5)
    before = out.read_bytes()
    done = run(source, test_model, "-o", out, *more)
    assert done.exit_code == (2 if words else 1)  # for its last line is wrong
    assert words in done.stderr
    assert ("--force" in done.stderr) == bool(words)
    assert (out.read_bytes() == before) == bool(words)


def test_errors_and_retries_have_their_own_file(source: Path, test_model: Path) -> None:
    out, errors = source.with_name("out.jsonl"), source.with_name("errors.jsonl")
    report, trace = source.with_name("r.html"), source.with_name("t.json")
    beside = ("--errors", errors, "--report", report, "--trace", trace)
    for args in ((), ("--retry-errors",)):
        done = run(source, test_model, "-o", out, *beside, *args)
        assert done.exit_code == 1
        assert (len(parse(out.read_bytes())), len(parse(errors.read_bytes()))) == (20, 1)
    assert "invalid_json_line" in report.read_text()
    assert json.loads(trace.read_text())


def test_events_are_json_lines(source: Path, test_model: Path) -> None:
    done = run(source, test_model, "-o", source.with_name("out.jsonl"), "--json", "--limit", 5)
    first, *_, summary, last = map(json.loads, done.stderr.splitlines())
    assert first["event"] == "note"
    assert (summary["event"], summary["n_done"], summary["output_tokens"]) == ("summary", 5, 15)
    assert (last["event"], "stopped at the limit" in last["text"]) == ("note", True)


def test_what_a_look_finds_is_an_event_too(source: Path, test_model: Path) -> None:
    [found] = parse(run(source, test_model, "--check", "--json").stderr)
    assert (found["event"], found["n_items"], found["n_by_code"]) == (
        "check",
        21,
        {"invalid_json_line": 1},
    )
    [found] = parse(run(source, test_model, "--dry-run", "--json").stderr)
    assert (found["event"], found["output_tokens"]) == ("estimate", 60)


def test_ctrl_c_while_stdin_is_silent_ends_the_command(tmp_path: Path, test_model: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = ("run", "-", "-o", out, "-m", test_model, *SMALL, "--window", 1, "--quiet")
    with start(*command) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b'{"id": "a", "prompt": "Hi"}\n')
        process.stdin.flush()
        while process.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert said.endswith(b"run the same command again to continue; finished items are kept\n")
    assert len(parse(out.read_bytes())) == 1
