"""`cbatch daemon` driven by lines of JSON: by plain programs, and by `cbatch.worker.connect`."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
from codecs import BOM_UTF8
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cbatch
from cbatch.worker import connect
from cbatch.worker.framing import framed, read_frames
from tests.cli.test_daemon import address_of, daemon
from tests.runtime.backends import PATIENCE_S

HELLO = {"cbatch": 2}
RUN = {
    "op": "run",
    "n": 1,
    "items": [{"prompt": "The sky is", "id": "a"}, {"prompt": "One, two,", "id": "b"}],
    "options": {"max_tokens": 6, "temperature": 0},
}


def lines_of(*messages: dict[str, Any], end: str = "\n") -> bytes:
    return "".join(json.dumps(message) + end for message in messages).encode()


@cache
def expected() -> dict[str, list[int]]:
    """What the library answers."""
    items: Any = RUN["items"]
    prompts = [cbatch.BatchPrompt(**item, options={"ignore_eos": True}) for item in items]
    with cbatch.load(parallel=2, ctx_per_seq=256, n_threads=1) as engine:
        results = engine.run(prompts, options={"max_tokens": 6, "temperature": 0}).results()
    return {result.id: [*result.token_ids] for result in results}


def answers_in(out: bytes) -> dict[str, list[int]]:
    first, *frames = map(json.loads, out.splitlines())
    assert (first["cbatch"], first["parallel"]) == (2, 2)
    results = [result for frame in frames for result in frame.get("results", ())]
    return {result["id"]: result["token_ids"] for result in results}


@pytest.mark.real
@pytest.mark.parametrize(("mark", "end"), [(b"", "\n"), (BOM_UTF8, "\r\n")])
def test_input_of_a_program_that_is_closed_at_once_is_answered(mark: bytes, end: str) -> None:
    lines = mark + lines_of(HELLO, RUN, end=end)
    with daemon() as process:
        out, _ = process.communicate(lines.rstrip() if mark else lines, PATIENCE_S)
        assert process.returncode == 0
    assert answers_in(out) == expected()


@pytest.mark.real
def test_frames_of_msgpack_go_to_a_descriptor() -> None:
    source, sink = os.pipe()
    with open(source, "rb") as frames, daemon(f"--stream-fd={sink}", pass_fds=(sink,)) as process:
        os.close(sink)
        run = framed(msgspec.msgpack.encode(RUN), "msgpack")
        out, _ = process.communicate(lines_of({**HELLO, "frames": "msgpack"}) + run, PATIENCE_S)
        found = [msgspec.msgpack.decode(frame) for frame in read_frames(frames)]
        assert (process.returncode, out) == (0, b"")
    assert answers_in(b"\n".join(map(msgspec.json.encode, found))) == expected()


@pytest.mark.real
@pytest.mark.parametrize("place", ["socket", "port"])
def test_engine_of_connect_leaves_the_daemon_to_the_next_client(place: str, tmp_path: Path) -> None:
    where = ("--socket", tmp_path / "d.sock") if place == "socket" else ("--port", 0)
    with daemon(*where) as process:
        address = address_of(process.stderr)
        for _ in range(2):
            with connect(address) as engine:
                assert engine.parallel == 2
                results = engine.run([prompt_of(i) for i in range(5)]).results()
                assert [len(result.token_ids) for result in results] == [4] * 5
                with pytest.raises(cbatch.EngineError, match="another client is connected"):
                    connect(address)
                assert engine.stats().n_submitted == 5
                engine.reset_stats()
        assert process.poll() is None


def prompt_of(i: int) -> cbatch.BatchPrompt:
    options = {"max_tokens": 4, "ignore_eos": True}
    return cbatch.BatchPrompt(prompt=f"{i} is", options=options)


@pytest.mark.real
def test_requests_of_a_client_that_leaves_end_with_it(tmp_path: Path) -> None:
    with daemon("--socket", tmp_path / "d.sock") as process:
        address = address_of(process.stderr)
        with connect(address) as engine:
            engine.run(["go on"], options={"ignore_eos": True})
        with connect(address) as engine:
            assert [slot.status for slot in engine.slots()] == ["free"] * 2
            assert engine.submit(prompt_of(1)).result().finish_reason == "length"


@pytest.mark.real
def test_daemon_that_dies_gives_typed_errors(tmp_path: Path) -> None:
    with daemon("--socket", tmp_path / "d.sock") as process:
        address = address_of(process.stderr)
        with connect(address) as engine:
            # it pauses, so it cannot end before the daemon does
            response = engine.run(["go on"], options={"ignore_eos": True, "pause_every": 4})
            chunks = iter(response)
            next(chunks)
            process.kill()
            with pytest.raises(cbatch.BatchError) as caught:
                response.results(timeout=PATIENCE_S)
            [result] = caught.value.results
            assert isinstance(result.error, cbatch.WorkerDiedError)
            with pytest.raises(cbatch.EngineClosedError):
                engine.run(["again"])
    with pytest.raises(cbatch.EngineError, match="no worker answers"):
        connect(address)


@pytest.mark.real
@pytest.mark.parametrize(
    ("first", "word"),
    [
        (b'{"cbatch": 3}', "not 3"),
        (b'{"cbatch": 2, "load": {}}', "has loaded its model"),
        (b"{", "not a line of JSON"),
    ],
)
def test_wrong_first_line_is_refused_by_name(first: bytes, word: str) -> None:
    with daemon() as process:
        out, text = process.communicate(first + b"\n" + lines_of(RUN), PATIENCE_S)
        assert process.returncode == 2
    said = json.loads(out)
    assert said["cbatch"] == 2
    assert word in said["error"]["message"]
    assert text.decode() == f"cbatch: {said['error']['message']}\n"


@pytest.mark.real
def test_input_that_is_no_frame_ends_the_daemon_with_the_reason() -> None:
    run = framed(msgspec.msgpack.encode(RUN), "msgpack")
    with daemon() as process:
        first = lines_of({**HELLO, "frames": "msgpack"})
        out, text = process.communicate(first + run + run[:-1], PATIENCE_S)
        assert process.returncode == 2
    found = [msgspec.msgpack.decode(frame) for frame in read_frames(io.BytesIO(out))]
    assert answers_in(b"\n".join(map(msgspec.json.encode, found))) == expected()
    [error] = [error for frame in found for error in frame.get("errors", ())]
    assert text.decode() == f"cbatch: {error['message']}\n"
    assert "cut off" in error["message"]


@pytest.mark.real
def test_client_with_a_wrong_first_line_leaves_the_socket_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with daemon("--socket", path) as process:
        address = address_of(process.stderr)
        with socket.socket(socket.AF_UNIX) as wrong:
            wrong.settimeout(PATIENCE_S)
            wrong.connect(str(path))
            wrong.sendall(b'{"cbatch": 3}\n')
            assert b"not 3" in wrong.makefile("rb").read()
        with connect(address) as engine:
            assert engine.submit(prompt_of(1)).result().finish_reason == "length"
        assert process.poll() is None


NODE = """
const daemon = require("child_process").spawn(process.argv[1], process.argv.slice(2));
require("readline").createInterface({ input: daemon.stdout }).on("line", line => {
  for (const result of JSON.parse(line).results ?? []) console.log(result.id, result.text);
});
daemon.stdin.end(process.env.LINES);
"""


@pytest.mark.real
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node")
def test_program_in_javascript_gets_its_answers() -> None:
    with daemon() as process:
        command: Any = process.args
        process.kill()
    env = {**os.environ, "LINES": lines_of(HELLO, RUN).decode()}
    cwd = Path(str(cbatch.__file__)).parents[1]
    done = subprocess.run(
        ["node", "-e", NODE, *command], env=env, cwd=cwd, capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in done.stdout.decode().splitlines()) == ["a", "b"]


@pytest.mark.real
def test_second_program_at_a_socket_hears_that_another_is_served(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with daemon("--socket", path) as process:
        with connect(address_of(process.stderr)), socket.socket(socket.AF_UNIX) as other:
            other.connect(str(path))
            other.sendall(lines_of(HELLO, RUN))
            with other.makefile("rb") as said:
                answer = json.loads(said.read())
        assert answer["error"]["message"] == "another client is connected: try again later"
