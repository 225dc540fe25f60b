"""Streams that are closed, full or left by their reader, Ctrl-C pressed too often, a terminal that is closed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.cli.demo import write_result
from cbatch.cli.main import Interrupts, write
from cbatch.errors import ConfigError
from cbatch.files.places import stdin, stdout
from cbatch.response import BatchResult, Timings, Usage
from tests.cli.conftest import Done, Raw, invoke, parse, start

if TYPE_CHECKING:
    from collections.abc import Callable

    WriteInput = Callable[..., Path]

SMALL = ("--parallel", 2, "--threads", 1)
SHORT = {"max_tokens": 3, "ignore_eos": True}
ENDLESS = {"prompt": "b", "options": {"ignore_eos": True}}
CLI = Path(str(cbatch.__file__)).parent.parent

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell and signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full, which is always full")


def redirected(how: str, *args: object) -> Done:
    """Run a command with redirections that the shell makes, such as `<&-`; its output is buffered, as by default."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m cbatch.cli "$@" {how}', sys.executable, *map(str, args)],
        capture_output=True,
        cwd=CLI,
        env=env,
        check=False,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


# ---- closed and full ----


@posix
@pytest.mark.parametrize(
    ("how", "args", "words"),
    [
        ("<&-", ("ask",), "stdin is closed"),
        ("<&-", ("run", "-", "-o", "-"), "stdin is closed"),
        (">&-", ("ask", "Hi"), "stdout is closed"),
        ("<in.jsonl >&-", ("run", "-", "-o", "-", "--quiet"), "stdout is closed"),
    ],
    ids=str,
)
def test_closed_stream_is_named(
    write_input: WriteInput,
    test_model: Path,
    how: str,
    args: tuple[object, ...],
    words: str,
) -> None:
    source = write_input({"prompt": "a", "options": SHORT})
    done = redirected(how.replace("in.jsonl", str(source)), *args, "-m", test_model)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"cbatch: {words}")
    assert done.stderr.count("\n") == 1


@posix
@pytest.mark.parametrize(
    "args", [("-o", "in.jsonl", "--force"), ("-o", "out", "--report", "in.jsonl")], ids=str
)
def test_file_behind_stdin_is_never_written_to(
    write_input: WriteInput, test_model: Path, args: tuple[str, ...]
) -> None:
    source = write_input({"prompt": "a", "options": SHORT})
    asked = source.read_bytes()
    places = [source.with_name(arg) if not arg.startswith("-") else arg for arg in args]
    done = redirected(f"<{source}", "run", "-", *places, "-m", test_model)
    assert (done.exit_code, source.read_bytes()) == (2, asked)
    assert done.stderr == f"cbatch: {source}: is the input: give another file for the results\n"


_SEEN_BY_A_COMMAND = """
import os, signal, sys
from cbatch import __main__, cli

def app(prog_name):
    seen = [os.readlink(f"/proc/self/fd/{i}") for i in range(3)], signal.getsignal(signal.SIGCHLD)
    with open(sys.argv[1], "w") as file:
        print(seen == (["/dev/null"] * 3, signal.SIG_DFL), sys.stdin, sys.stdout, sys.stderr, file=file)

cli.app = app
__main__.main()
"""


@linux
@pytest.mark.real
def test_files_of_a_command_never_take_the_place_of_closed_streams(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    command = ["sh", "-c", 'exec "$0" -c "$1" "$2" <&- >&- 2>&-', sys.executable]
    subprocess.run(
        [*command, _SEEN_BY_A_COMMAND, str(seen)],
        cwd=CLI,
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),  # as some parents do
    )
    assert seen.read_text() == "True None None None\n"


def test_closed_streams_are_errors_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "stdout", None)
    for stream in (stdin, stdout):
        with pytest.raises(ConfigError, match="is closed"):
            stream()
    with pytest.raises(ConfigError, match="is closed"):
        write("x")


@linux
@pytest.mark.parametrize("args", [("--version",), ("info",)])
def test_full_stdout_is_one_line_without_a_traceback(
    test_model: Path, args: tuple[str, ...]
) -> None:
    model = (test_model,) if args == ("info",) else ()
    done = redirected(">/dev/full", *args, *model)
    assert (done.exit_code, done.stderr) == (2, "cbatch: No space left on device\n")


@linux
@pytest.mark.parametrize("how", ["2>/dev/full", "2>&-"])
def test_what_cannot_be_said_stops_no_work(
    write_input: WriteInput, tmp_path: Path, test_model: Path, how: str
) -> None:
    out = tmp_path / "out.jsonl"
    source = write_input({"prompt": "a", "options": SHORT})
    assert redirected(how, "run", source, "-o", out, "-m", test_model, *SMALL).exit_code == 0
    assert len(parse(out.read_bytes())) == 1
    asked = redirected(how, "ask", "Say red.", "--max-tokens", "3")
    assert (asked.exit_code, bool(asked.stdout.strip())) == (0, True)
    assert redirected(how, "info", "none.gguf").exit_code == 2


@posix
@pytest.mark.parametrize("args", [("info",), ("--help",)], ids=str)
def test_reader_who_leaves_ends_every_command_quietly(
    test_model: Path, args: tuple[str, ...]
) -> None:
    model = (test_model,) if args == ("info",) else ()
    with start(*args, *model) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@posix
@pytest.mark.parametrize("args", [(), ("--json",), ("--demo",)], ids=str)
def test_reader_who_leaves_ends_a_run_with_a_word(
    write_input: WriteInput, test_model: Path, args: tuple[str, ...]
) -> None:
    source = () if "--demo" in args else (write_input(*[{"prompt": "a", "options": SHORT}] * 2000),)
    with start("run", *source, "-o", "-", "-m", test_model, *SMALL, *args) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 0
    assert "stdout was closed" in said.splitlines()[-1]
    assert "Traceback" not in said
    if "--json" in args:
        assert {line["event"] for line in parse(said)} <= {"note", "progress", "summary"}


@posix
def test_reader_who_leaves_a_named_pipe_is_an_error_with_its_name(
    write_input: WriteInput, tmp_path: Path, test_model: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    source = write_input(*[{"prompt": "a", "options": SHORT}] * 2000)
    with start("run", source, "-o", pipe, "-m", test_model, *SMALL, "--quiet") as process:
        with pipe.open("rb") as reader:
            reader.readline()
        _, said = process.communicate()
    assert (process.returncode, said.decode()) == (2, f"cbatch: {pipe}: Broken pipe\n")


# ---- what programs read ----


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("run", "none.jsonl", "-o", "-"), "none.jsonl: cannot be read: No such file"),
        (("run", "none.jsonl"), "give --output"),
        (("run", "in.jsonl", "-o", "-", "--nonsense"), "No such option: --nonsense"),
    ],
    ids=str,
)
def test_fatal_errors_are_events_for_programs(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], words: str
) -> None:
    done = invoke(*args, "--json")
    [event] = parse(done.stderr)
    assert (done.exit_code, done.stdout) == (2, "")
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert words in event["text"]
    assert invoke(*args).stderr.count("{") == 0
    monkeypatch.setenv("CBATCH_RUN_JSON", "1")
    assert parse(invoke(*args).stderr) == [event]


def test_traceback_and_interrupt_are_in_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    [event] = parse(invoke("--debug", "run", "none.jsonl", "-o", "-", "--json").stderr)
    assert "ConfigError" in event["traceback"]

    def press(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cbatch.backend.load.loader.describe_model", press)
    assert invoke("info", "any.gguf") == Done(130, "", "cbatch: interrupted\n")
    done = invoke("info", "any.gguf", "--json")
    assert done.exit_code == 130
    assert parse(done.stderr) == [{"event": "error", "text": "interrupted", "exit_code": 130}]


def test_log_is_events_for_programs(write_input: WriteInput, test_model: Path) -> None:
    source = write_input({"prompt": "a", "options": SHORT})
    asked = ("run", source, "-o", "-", "-m", test_model, *SMALL, "--json")
    events = parse(invoke("--log-level", "debug", *asked).stderr)
    logs = [event for event in events if event["event"] == "log"]
    assert logs
    assert {"level", "logger", "text"} <= logs[0].keys()


@posix
@pytest.mark.parametrize("how", ["run", "ask"])
def test_live_line_never_hides_the_cursor(
    write_input: WriteInput, tmp_path: Path, test_model: Path, how: str
) -> None:
    import pty

    source = write_input(*[{"prompt": "a", "options": {"max_tokens": 20}}] * 2000)
    args = ("ask", "Hi") if how == "ask" else ("run", source, "-o", tmp_path / "out.jsonl")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "cbatch.cli", *map(str, (*args, "-m", test_model))]
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=terminal
    ) as process:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # the terminal's end
            while piece := os.read(ours, 4096):
                seen += piece
                hidden, shown = seen.rfind(b"\x1b[?25l"), seen.rfind(b"\x1b[?25h")
                if how == "run" and shown > hidden >= 0:
                    process.kill()  # nothing is there to show the cursor again
    os.close(ours)
    assert b"\x1b[?25l" in seen
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")


# ---- whole lines ----


@pytest.mark.parametrize("n_chars", [10, 100_000])
def test_result_reaches_the_system_as_one_write_of_a_whole_line(n_chars: int) -> None:
    raw = Raw()
    file: Any = io.BufferedWriter(raw)
    timings = Timings(0.0, None, 0.0, None, None)
    for id in "ab":
        text = "é" * n_chars
        write_result(file, BatchResult(id, text, (), "stop", None, Usage(1, 1), timings, 0))
    assert [line["id"] for line in parse(b"".join(raw.written))] == ["a", "b"]
    assert [data.count(b"\n") for data in raw.written] == [1, 1]
    assert all(data.endswith(b"\n") for data in raw.written)


def wait_for_answers(process: subprocess.Popen[bytes], out: Path) -> None:
    while process.poll() is None and not (out.exists() and out.stat().st_size):
        time.sleep(0.01)


@posix
def test_closed_terminal_leaves_whole_lines(
    write_input: WriteInput, tmp_path: Path, test_model: Path
) -> None:
    out = tmp_path / "out.jsonl"
    source = write_input(*[{"prompt": "a", "options": {"max_tokens": 2}}] * 5000)
    with start("run", source, "-o", out, "-m", test_model, *SMALL) as process:
        wait_for_answers(process, out)
        process.send_signal(signal.SIGHUP)
        process.communicate()
    assert process.returncode == 130
    answers = out.read_bytes()
    assert answers.endswith(b"\n")
    assert parse(answers)


# ---- Ctrl-C ----


@posix
@pytest.mark.parametrize("gap_s", [0.001, 0.1])
def test_ctrl_c_pressed_again_and_again_ends_as_one(
    write_input: WriteInput, tmp_path: Path, test_model: Path, gap_s: float
) -> None:
    out = tmp_path / "out.jsonl"
    source = write_input({"prompt": "a", "options": SHORT}, *[ENDLESS] * 2000)
    command = ("run", source, "-o", out, "-m", test_model, *SMALL, "--quiet")
    with start(*command, "--ctx-per-seq", 30_000) as process:
        wait_for_answers(process, out)
        while process.poll() is None:  # two that come together are one
            process.send_signal(signal.SIGINT)
            time.sleep(gap_s)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode in (130, -signal.SIGINT)  # to a shell both are 130
    assert said.count(b"\n") <= 3
    assert b"Traceback" not in said
    assert out.read_bytes().endswith(b"\n")


@posix
def test_ctrl_c_ends_the_answer_and_at_the_next_prompt_the_conversation(test_model: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    endless = ("--ignore-eos", "--threads", 1, "--ctx-per-seq", 30_000)
    try:
        with start("ask", "-i", "Hi", "-m", test_model, *endless, stdin=theirs) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert os.read(process.stdout.fileno(), 1)
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline().startswith(b"cbatch: ")  # how it ends
            assert process.stderr.read(2) == b"> "
            process.send_signal(signal.SIGINT)
            os.write(ours, b"\x04")  # ends it with 0 if that was not heard
            process.communicate()
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 130


def test_first_ctrl_c_is_an_interrupt_and_patience_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    interrupts = Interrupts(clock=lambda: now_s)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupts.press()
        now_s += Interrupts.PATIENCE_S
        interrupts.press()
        assert ended == []
        interrupts.forget()
    with pytest.raises(KeyboardInterrupt):
        interrupts.press()
    now_s += Interrupts.PATIENCE_S + 0.1
    interrupts.press()
    assert ended == [130]


def test_handler_of_ctrl_c_is_put_back_unless_it_was_pressed() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before
        with pytest.raises(KeyboardInterrupt), Interrupts():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_that_somebody_else_handles_is_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
