"""`cbatch ask`: an answer as it comes, a conversation, and every way to leave."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import cbatch
from cbatch.cli import app
from cbatch.cli.ask import Conversation, _show
from cbatch.cli.main import write
from tests.cli.conftest import Done, Raw, invoke, start

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import SynthFactory

SHORT = ("--max-tokens", 8, "--seed", 1, "--ignore-eos", "--threads", 1)
ENDLESS = ("--seed", 1, "--ignore-eos", "--threads", 1, "--ctx-per-seq", 30_000)
OPTIONS = {"max_tokens": 8, "seed": 1, "ignore_eos": True}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ask(model: Path, *args: object, stdin: str | bytes = "") -> Done:
    command = ["ask", *args, "-m", model, *SHORT]
    result = CliRunner().invoke(app, [str(part) for part in command], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def engine(test_model: Path) -> Iterator[cbatch.Engine]:
    """What the command makes of its options."""
    with cbatch.load(test_model, parallel=1, n_threads=1, options=OPTIONS) as engine:
        yield engine


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every chat that was submitted."""
    chats: list[Any] = []
    submit = cbatch.Engine.submit

    def record(self: cbatch.Engine, prompt: Any, **more: Any) -> cbatch.BatchResponse:
        chats.append(list(prompt))
        return submit(self, prompt, **more)

    monkeypatch.setattr(cbatch.Engine, "submit", record)
    return chats


def line_of(text: str) -> str:
    """An answer as the command writes it."""
    return text if text.endswith("\n") else f"{text}\n"


def test_ask_answers_what_the_library_answers(test_model: Path, engine: cbatch.Engine) -> None:
    expected = line_of(engine.submit([user("Hi")]).result().text)
    assert ask(test_model, "Hi") == Done(0, expected, "")
    assert ask(test_model, stdin="Hi\n") == Done(0, expected, "")
    assert ask(test_model, "-", stdin="Hi\n") == Done(0, expected, "")


def test_every_answer_of_several_is_shown(test_model: Path, engine: cbatch.Engine) -> None:
    loose = {"temperature": 5, "min_p": 0, "top_p": 1}
    result = engine.submit([user("Hi")], options={"n": 3, **loose}).result()
    texts = [line_of(choice.text) for choice in result.choices]
    expected = "".join(f"[{i}]\n{text}" for i, text in enumerate(texts, 1))
    assert len(set(texts)) == 3
    more = [word for name, value in loose.items() for word in ("--set", f"{name}={value}")]
    assert ask(test_model, "Hi", "--set", "n=3", *more) == Done(0, expected, "")


def test_log_probabilities_and_warnings_go_to_stderr(
    test_model: Path, engine: cbatch.Engine
) -> None:
    result = engine.submit([user("Hi")], options={"logprobs": 2}).result()
    assert result.logprobs is not None
    more = ("--set", "logprobs=2", "--set", "cache_key=none-of-this-name")
    done = ask(test_model, "Hi", *more)
    assert (done.exit_code, done.stdout) == (0, line_of(result.text))
    total, *tokens, warning = done.stderr.splitlines()
    assert total == f"log-probability {sum(t.logprob for t in result.logprobs):.4f}"
    assert len(tokens) == len(result.logprobs) == 8
    assert tokens[0].split()[0] == f"{result.logprobs[0].logprob:.4f}"
    assert warning == "cbatch: warning: cache_key: no cells are saved under this key"


def test_system_text_comes_first(test_model: Path, asked: list[Any]) -> None:
    assert ask(test_model, "Hi", "--system", "Be brief.").exit_code == 0
    assert asked == [[{"role": "system", "content": "Be brief."}, user("Hi")]]


def test_conversation_goes_on_until_an_empty_line(test_model: Path, asked: list[Any]) -> None:
    result = ask(test_model, "-i", "One", stdin="Two\n\nThree\n")
    assert (result.exit_code, result.stderr) == (0, "")
    [first, second] = asked
    assert first == [user("One")]
    assert [m["role"] for m in second] == ["user", "assistant", "user"]
    assert second[2] == user("Two")
    assert result.stdout.startswith(line_of(second[1]["content"]))
    assert len(second[1]["content"]) > 0


def test_conversation_without_a_first_question_reads_it(test_model: Path, asked: list[Any]) -> None:
    assert ask(test_model, "-i", stdin="Last").exit_code == 0
    assert asked == [[user("Last")]]
    assert ask(test_model, "-i", stdin="") == Done(0, "", "")


def test_answer_that_was_left_stays_in_the_conversation(engine: cbatch.Engine) -> None:
    conversation = Conversation(engine)
    parts = conversation.answer("One")
    first = next(parts)
    parts.close()
    assert conversation.messages == [user("One"), assistant(first)]
    assert list(conversation.answer("Two"))
    assert len(conversation.messages) == 4


def test_question_that_failed_is_forgotten(engine: cbatch.Engine) -> None:
    conversation = Conversation(engine)
    with pytest.raises(cbatch.PromptTooLongError):
        list(conversation.answer("a" * 20_000))
    assert conversation.messages == []


def test_conversation_goes_on_after_a_question_too_long(test_model: Path, asked: list[Any]) -> None:
    result = ask(test_model, "-i", "a" * 20_000, stdin="Short\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("cbatch: the conversation has ")
    assert result.stderr.endswith(
        ", and the model was not trained for longer texts: start a new one\n"
    )
    assert result.stderr.count("\n") == 1
    assert asked[1] == [user("Short")]
    assert result.stdout


def test_answer_that_fills_the_slot_says_so(test_model: Path) -> None:
    args = ("Hi", "-m", test_model, "--ignore-eos", "--threads", 1, "--ctx-per-seq", 256)
    full, capped = invoke("ask", *args), invoke("ask", *args, "--max-tokens", 9)
    assert (full.exit_code, capped.exit_code, capped.stderr) == (0, 0, "")
    assert (
        full.stderr
        == "cbatch: the answer ends here because the slot is full: raise --ctx-per-seq\n"
    )


def test_question_too_long_for_a_small_slot_names_the_option(test_model: Path) -> None:
    result = invoke("ask", "a" * 2000, "-m", test_model, "--threads", 1, "--ctx-per-seq", 256)
    assert result.exit_code == 1
    assert result.stderr.endswith(": start a new one, or raise --ctx-per-seq\n")


def test_ctrl_c_in_a_conversation_ends_the_answer_alone(
    test_model: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("cbatch.cli.ask.write", write)
    assert ask(test_model, "-i", "One", stdin="Two\n").exit_code == 0
    assert asked[1] == [user("One"), assistant(written[0]), user("Two")]
    assert written[1] == "\n"


def test_model_without_template_says_how_to_go_on(synth: SynthFactory) -> None:
    model = synth(metadata={"tokenizer.chat_template": None})
    result = ask(model, "Hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "cbatch: this model has no chat template: give one, such as --chat-template chatml\n"
    )
    assert ask(model, "Hi", "--chat-template", "chatml").exit_code == 0


@pytest.mark.parametrize(
    ("args", "stdin", "words"),
    [
        (("",), "", "the question is empty"),
        ((), b"\xff", "<stdin>: not UTF-8"),
        (("-i",), b"\xff\n", "<stdin>: not UTF-8"),
        (("Hi", "--top-p", 2), "", "top_p must be 0 … 1, not 2"),
        (("Hi", "--chat-template", "mine"), "", "chat_template='mine'"),
    ],
    ids=str,
)
def test_bad_input_of_ask_is_one_line(
    test_model: Path, args: tuple[object, ...], stdin: str | bytes, words: str
) -> None:
    result = ask(test_model, *args, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_part_of_an_answer_is_written_at_once(
    engine: cbatch.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, conversation = Raw(), Conversation(engine)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw)))
    write("é")
    assert raw.written == ["é".encode()]
    assert _show(conversation, "Hi") == 0
    assert len(raw.written) > 2
    answer = conversation.messages[1]["content"]
    assert b"".join(raw.written[1:]).decode() == line_of(answer)


def first_byte(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1)


def test_ctrl_c_ends_one_answer_quietly_with_130(test_model: Path) -> None:
    with start("ask", "Hi", "-m", test_model, *ENDLESS) as process:
        assert first_byte(process)  # as it comes: the answer is far from done
        process.send_signal(signal.SIGINT)
        answer, said = process.communicate()
    assert (process.returncode, said) == (130, b"")
    assert answer.endswith(b"\n")


def test_reader_who_leaves_ends_ask_quietly_with_0(test_model: Path) -> None:
    with start("ask", "Hi", "-m", test_model, *ENDLESS) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert first_byte(process)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_conversation_on_a_terminal_prompts_and_ends_at_ctrl_d(test_model: Path) -> None:
    done = on_terminal(b"Hi\n\x04", "ask", "-i", "-m", test_model, *SHORT)
    assert done.exit_code == 0
    assert done.stderr.startswith("cbatch: type an empty line to end the conversation\n> ")
    assert done.stderr.count("> ") == 2
    assert done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_question_typed_on_a_terminal_is_asked_for(test_model: Path) -> None:
    done = on_terminal(b"Hi\n\x04", "ask", "-m", test_model, *SHORT)
    assert done.exit_code == 0
    assert done.stderr == "cbatch: type the question, then Ctrl-D on a line of its own\n"
    assert done.stdout


def on_terminal(typed: bytes, *args: object) -> Done:
    """Run a command whose stdin is a terminal; its stdout is a pipe."""
    import pty

    ours, theirs = pty.openpty()
    try:
        with start(*args, stdin=theirs) as process:
            os.write(ours, typed)
            answer, said = process.communicate()
    finally:
        os.close(ours)
        os.close(theirs)
    return Done(process.returncode, answer.decode(), said.decode())
