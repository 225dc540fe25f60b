"""`cbatch daemon`: processes that are driven by lines, over pipes and sockets."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cbatch
from cbatch.daemon.lines import END, MORE
from cbatch.daemon.streams import TEXT
from tests.cli.conftest import invoke
from tests.runtime.backends import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

A, B = (1, 20, 300, 40), (1, 21, 22)
SIZES = ("--cache-slots", 2, "--max-ctx=256", "--threads", 1, "-ctk", "f16", "--ignore-eos")


@pytest.fixture
def prompt(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of prompt files."""

    def write(*tokens: int) -> Path:
        path = tmp_path / f"p{tokens[1]}.bin"
        path.write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
        return path

    return write


@contextmanager
def daemon(*args: object, **given: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start a daemon on small slots; it is gone behind the block."""
    command = [sys.executable, "-m", "cbatch", "daemon", *map(str, (*SIZES, *args))]
    process = subprocess.Popen(  # type: ignore[call-overload]
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(str(cbatch.__file__)).parents[1],
        **given,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def streams_of(frames: bytes) -> dict[int, list[int]]:
    streams: dict[int, list[int]] = {}
    for mark, id, value in struct.iter_unpack("<3i", frames):
        assert mark == -2
        streams.setdefault(id, []).append(value)
    return streams


@cache
def expected(tokens: tuple[int, ...], n: int) -> list[int]:
    """What the library answers to a prompt."""
    options = cbatch.RunOptions(temperature=0.0, max_tokens=n, ignore_eos=True)
    with cbatch.load(parallel=2, ctx_per_seq=256, n_threads=1) as engine:
        result = engine.run(cbatch.BatchPrompt(tokens=tokens), options=options).results()[0]
    assert len(result.token_ids) == n
    return [*result.token_ids]


@pytest.mark.real
def test_two_requests_in_turns_are_told_apart_and_a_probe_keeps_nothing(
    prompt: Callable[..., Path],
) -> None:
    lines = [f"REQ 7 START {prompt(*A)} 12 3", f"REQ 8 START {prompt(*B)} 9 2"]
    lines += [
        "SCHED_BATCH_PROBE",
        "SCHED_BATCH_TARGET_STEP",
        "SCHED_BATCH_PROBE",
        "SCHED_DRAIN",
        "",
    ]
    with daemon("--stream-tagged") as process:
        frames, text = process.communicate("\n".join(lines).encode(), PATIENCE_S)
        assert process.returncode == 0
    streams = streams_of(frames)
    for id, answer in ((7, expected(A, 12)), (8, expected(B, 12)[:9])):
        assert [v for v in streams[id] if v >= 0] == answer
        assert (streams[id][-1], streams[id].count(END)) == (END, 1)
    assert b"REQ 7 started in slot 0" in text
    assert text.count(b"SCHED_BATCH_PROBE compared=2 ") == 2


@pytest.mark.real
def test_oldest_command_answers_with_bare_numbers(prompt: Callable[..., Path]) -> None:
    with daemon() as process:
        lines = f"{prompt(*A)} 5\r\n{prompt(*B)} 3".encode("utf-8-sig")  # as some editors write it
        frames, _ = process.communicate(lines, PATIENCE_S)
        assert process.returncode == 0
    values = [value for (value,) in struct.iter_unpack("<i", frames)]
    assert values == [*expected(A, 12)[:5], END, *expected(B, 12)[:3], END]


@pytest.mark.real
def test_stream_goes_to_a_descriptor(prompt: Callable[..., Path]) -> None:
    source, sink = os.pipe()
    with (
        open(source, "rb") as frames,
        daemon("--tagged-stream", f"--stream-fd={sink}", pass_fds=(sink,)) as process,
    ):
        os.close(sink)
        out, _ = process.communicate(f"REQ 1 START {prompt(*A)} 4 2".encode(), PATIENCE_S)
        assert (process.returncode, out) == (0, b"")
        assert [v for v in streams_of(frames.read())[1] if v >= 0] == expected(A, 12)[:4]


@pytest.mark.real
def test_reader_who_leaves_ends_the_daemon(prompt: Callable[..., Path]) -> None:
    with daemon("--stream-tagged") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"LIST_REQUESTS\n")
        process.stdin.flush()
        assert b"LIST_REQUESTS" in process.stderr.readline()
        process.stdout.close()
        process.stdin.write(f"REQ 1 START {prompt(*A)} 200 1\n".encode())
        process.stdin.flush()
        assert b"the reader of the stream has left" in process.stderr.read()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.real
def test_ctrl_c_ends_the_daemon_quietly_with_130() -> None:
    with daemon("--stream-tagged") as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"LIST_REQUESTS\n")
        process.stdin.flush()
        assert b"LIST_REQUESTS" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read() == b"cbatch: interrupted\n"


# ---- sockets ----


class Client:
    """A client at a socket."""

    def __init__(self, address: str) -> None:
        if ":" in address:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)), PATIENCE_S)
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(PATIENCE_S)
            self.socket.connect(address)
        self.file = self.socket.makefile("rb")

    def say(self, line: str) -> None:
        self.socket.sendall(line.encode() + b"\n")

    def read(self) -> tuple[int, int | str]:
        """Return the id and the value, or the text, of the next frame."""
        mark, id, value = struct.unpack("<3i", self.file.read(12))
        assert mark == -2
        if value != TEXT:
            return id, value
        (n,) = struct.unpack("<i", self.file.read(4))
        return id, self.file.read(n + -n % 4)[:n].decode()

    def read_until(self, *frame: object) -> list[tuple[int, int | str]]:
        found = [self.read()]
        while found[-1] != frame:
            found.append(self.read())
        return found

    def close(self) -> None:
        self.file.close()
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def address_of(stderr: IO[bytes] | None) -> str:
    assert stderr is not None
    line = stderr.readline().decode()
    assert line.startswith("cbatch: listening on "), line
    return line.removeprefix("cbatch: listening on ").rstrip("\n")


@pytest.mark.real
@pytest.mark.parametrize("way", ["--socket", "--port"])
def test_clients_at_a_socket_are_served_one_at_a_time(
    tmp_path: Path, prompt: Callable[..., Path], way: str
) -> None:
    place = tmp_path / "s" if way == "--socket" else 0
    with daemon("--stream-tagged", way, place) as process:
        address = address_of(process.stderr)
        with Client(address) as first:
            first.say(f"REQ 1 START {prompt(*A)} 40 2")
            found = first.read_until(1, MORE)
            assert found[0] == (1, "started in slot 0: 4 + 40 tokens, in turns of 2")
            with Client(address) as second:
                assert second.read() == (0, "error: another client is connected: try again later")
                assert second.read() == (0, END)
                assert second.file.read() == b""
            first.say("SCHED_STEP")
            found += first.read_until(1, MORE)
            assert [v for _, v in found if isinstance(v, int) and v >= 0] == expected(A, 12)[:4]
        # its request ends with it: the same id is free again
        with next_client(address) as third:
            third.say(f"REQ 1 START {prompt(*B)} 4 2")
            third.socket.shutdown(socket.SHUT_WR)
            values = [value for _, value in third.read_until(1, END)]
            assert [v for v in values if isinstance(v, int) and v >= 0] == expected(B, 12)[:4]
            assert third.file.read() == b""
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    assert not (tmp_path / "s").exists()


@pytest.mark.real
@pytest.mark.parametrize(
    ("number", "exit_code", "is_served"),
    [(signal.SIGTERM, 143, True), (signal.SIGHUP, 129, False)],
    ids=["TERM", "HUP"],
)
def test_signal_ends_a_daemon_and_removes_its_socket(
    tmp_path: Path, number: signal.Signals, exit_code: int, *, is_served: bool
) -> None:
    place = tmp_path / "s"
    with daemon("--stream-tagged", "--socket", place) as process, ExitStack() as stack:
        address = address_of(process.stderr)
        if is_served:
            stack.enter_context(closing(next_client(address)))
        assert place.exists()
        process.send_signal(number)
        _, text = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == exit_code
        assert text.decode().endswith(f"cbatch: ended by {number.name}\n")
    assert not place.exists()


@pytest.mark.real
@pytest.mark.parametrize("first", [b"LIST_REQUESTS\n" * 2000, b'{"cbatch": 2}\n'])
def test_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path, first: bytes) -> None:
    command = b"LIST_REQUESTS\n" if first[:1] != b"{" else b'{"op": "slots", "n": 1}\n'
    with (
        daemon("--stream-tagged", "--socket", tmp_path / "s") as process,
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.connect(str(tmp_path / "s") if address_of(process.stderr) else "")
        client.settimeout(1)
        client.sendall(first)
        with suppress(TimeoutError):  # the daemon takes no more
            while True:
                client.sendall(command * 1000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143


def next_client(address: str) -> Client:
    """Return a client that is served: the one before may not be gone yet."""
    while True:
        client = Client(address)
        try:
            client.say("LIST_REQUESTS")
            if client.read()[1] == "LIST_REQUESTS":
                return client
        except OSError:
            pass
        client.close()


@pytest.mark.real
def test_socket_that_was_left_behind_is_taken_over(
    tmp_path: Path, prompt: Callable[..., Path]
) -> None:
    place = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place))
    with (
        daemon("--socket", place, "--stream-tagged") as process,
        Client(address_of(process.stderr)),
        daemon("--socket", place, "--stream-tagged") as other,
    ):
        assert place.stat().st_mode & 0o077 == 0
        _, text = other.communicate(timeout=PATIENCE_S)
        assert other.returncode == 2
        assert (
            text.decode() == f"cbatch: {place}: another process listens there: give another path\n"
        )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--stream-fd", 0), "--stream-fd 0 is where commands come from"),
        (("--stream-fd", 2), "--stream-fd 2 is where text goes to"),
        (("--stream-fd", 987), "--stream-fd 987 cannot be written to: Bad file descriptor"),
        (("--stream-fd", 10**30), "--stream-fd 1"),
        (("--stream-fd", -1), "--stream-fd -1 cannot be written to"),
        (("--socket", "s", "--port", 0), "give --socket or --port, not both"),
        (("--socket", "s", "--stream-fd", 1), "leave out --stream-fd"),
        (("--port", 65536), "less than or equal to 65535"),
        (("--cache-slots", 0), "parallel must be 1"),
        (("--max-ctx=0",), "ctx_per_seq must be 1"),
        (("-ctk", "q9"), "cache_type_k must be one of"),
        (("-ctv=q4_0", "--flash-attn", "off"), "cache_type_v='q4_0' needs flash attention"),
        (("--temperature", -1), "temperature must be"),
    ],
    ids=str,
)
def test_wrong_command_line_of_the_daemon_is_named(args: tuple[object, ...], words: str) -> None:
    result = invoke("daemon", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr
