"""`cbatch serve` in a process of its own."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import termios
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from typer.testing import CliRunner

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.bench import server_process
from cbatch.cli import app
from cbatch.cli.serve import ShortLines, _with_files
from cbatch.errors import ConfigError
from cbatch.server import create_app
from cbatch.support.logs import FIELDS
from tests.server.clients import call, certificate_files, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.conftest import SynthFactory


@contextmanager
def started(
    model: Path, *arguments: str, before: Sequence[str] = (), **of_process: Any
) -> Iterator[subprocess.Popen[str]]:
    """`cbatch serve` with two slots; it is killed where a test leaves it running."""
    own = ["-m", str(model), "--port", "0", "--threads", "1", "--parallel", "2"]
    command = [sys.executable, "-m", "cbatch.cli", *before, "serve", *own, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **of_process) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.real
def test_serve_answers_until_it_is_told_to_end(test_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\ufeffother\n\nsecret\n")  # with the mark that some editors write
    with started(test_model, "--api-key-file", str(keys)) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"serving (\S+) at (http://127\.0\.0\.1:\d+), 2 slots", line)
        assert found is not None, line
        headers = {"authorization": "Bearer other"}
        with httpx.Client(base_url=found[2], headers=headers, timeout=60) as client:
            (model,) = client.get("/v1/models").json()["data"]
            assert model["id"] == found[1] == test_model.stem
            chat = {"messages": [{"role": "user", "content": "What is 2+3?"}], "temperature": 0}
            answer = client.post("/v1/chat/completions", json=chat).json()
            assert answer["choices"][0]["message"]["content"] == "5"
            assert client.get("/v1/models", headers={"authorization": "no"}).status_code == 401
            page = client.get("/", headers={"authorization": ""})
            assert page.headers["content-type"].startswith("text/html")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 0
        assert "secret" not in process.stderr.read()


@pytest.mark.real
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_serve_logs_each_request(test_model: Path, log_format: str) -> None:
    with started(test_model, "--log-format", log_format, "--no-page") as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        line = next(line for line in lines if "serving chat at " in line)
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        with httpx.Client(base_url=found[0], timeout=60) as client:
            chat = {"messages": [{"role": "user", "content": "private"}], "max_tokens": 3}
            assert client.get("/").status_code == 404
            id = client.post("/v1/chat/completions", json=chat).headers["x-request-id"]
        logged = [
            next(
                line
                for line in lines
                if f" {kind} request_id={id}" in line or (f'"{kind} request_id={id} ' in line)
            )
            for kind in ("request", "http")
        ]
        os.kill(process.pid, signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait() == 0
    assert "private" not in "".join([*logged, rest])
    if log_format == "json":
        request, http = map(json.loads, logged)
        assert request["time"] > 0
        assert request["finish_reason"] in ("stop", "length")
        assert request["model"] == test_model.stem
        assert (http["request_id"], http["status"]) == (id, 200)
    else:
        assert re.match(r"\d{4}-\d\d-\d\d \S+ INFO cbatch: request ", logged[0])
        assert "path=/v1/chat/completions status=200" in logged[1]


@pytest.mark.real
@pytest.mark.parametrize(("before", "n_lines"), [([], 2), (["--log-level", "error"], 0)])
def test_serve_says_a_short_line_of_each_request(
    test_model: Path, before: list[str], n_lines: int
) -> None:
    with started(test_model, before=before) as process:
        assert process.stderr is not None
        with httpx.Client(base_url=_address_in(process), timeout=60) as client:
            chat = {"messages": [{"role": "user", "content": "private"}], "max_tokens": 3}
            assert client.post("/v1/chat/completions?key=secret", json=chat).status_code == 200
            assert client.get("/no%0Asuch").status_code == 404
            client.get("/slots", headers={"x-cbatch-poll": "1"})
        os.kill(process.pid, signal.SIGTERM)
        lines = process.stderr.read().splitlines()
    shown = [re.sub(r"^\d\d:\d\d:\d\d |\d+ ms$", "", line) for line in lines if " ms" in line]
    wanted = ["GET /no\\nsuch 404 ", "POST /v1/chat/completions 200 "][:n_lines]
    assert sorted(shown) == wanted  # a line may be written a moment after its answer


def test_path_of_a_short_line_is_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/x 200 1 ms\n12:00:00 GET /é"
    values = {"method": "GET", "path": path, "status": 404, "latency_ms": 0.4}
    ShortLines().emit(logging.makeLogRecord({FIELDS: values}))
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"..:..:.. GET /x%20200%201%20ms\\n12:00:00%20GET%20/\\xe9 404 0 ms\n", line
    )


def test_short_log_has_warnings_once(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("cbatch.server", "cbatch.files", "cbatch.worker", "cbatch.reload")
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        for name in names:
            what = {"name": name, "levelno": level, "msg": f"{name} at {level}"}
            ShortLines().emit(logging.makeLogRecord(what))
    assert capsys.readouterr().err.splitlines() == [
        f"cbatch: {name} at {level}" for level in (30, 40) for name in names[:2]
    ]


@contextmanager
def unread(how: str) -> Iterator[int]:
    """A stderr that takes nothing: a pipe without room, or without a reader, or a full device."""
    source, sink = os.pipe()
    if how == "not read":
        fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, 4096)
        os.write(sink, b"x" * 4095 + b"\n")
    else:
        os.close(source)
    if how == "full":
        os.close(sink)
        sink = os.open("/dev/full", os.O_WRONLY)
    try:
        yield sink
    finally:
        os.close(sink)
        if how == "not read":
            os.close(source)


def listens(path: Path) -> bool:
    """Whether somebody listens at a path, which is there a moment before."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@pytest.mark.real
@pytest.mark.parametrize(
    ("how", "before", "after"),
    [
        ("not read", [], []),
        ("not read", ["--log-level", "debug"], ["--log-format", "json"]),
        ("gone", [], []),
        ("full", [], []),
        ("closed", [], []),
    ],
    ids=str,
)
def test_server_without_a_usable_stderr_serves_and_ends(
    test_model: Path, tmp_path: Path, how: str, before: list[str], after: list[str]
) -> None:
    path = tmp_path / "socket"
    shell = ["sh", "-c", 'exec "$@" 2>&-' if how == "closed" else 'exec "$@"', "sh"]
    own = ["-m", str(test_model), "--uds", str(path), "--threads", "1", "--replicas", "1"]
    command = [*shell, sys.executable, "-m", "cbatch.cli", *before, "serve", *own, *after]
    with unread(how) as sink, subprocess.Popen(command, stderr=sink) as process:
        try:
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                wait_until(lambda: listens(path) or process.poll() is not None)
                chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
                for _ in range(2):
                    answer = client.post("/v1/chat/completions", json=chat, timeout=60)
                    assert answer.status_code == 200
                if how == "not read":
                    assert client.post("/v1/models/load", timeout=60).status_code == 200
                assert client.get("/health", timeout=60).status_code == 200
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tls-key", "key.pem"], "--tls-key needs --tls-cert"),
        (["--tls-cert", "none.pem"], "the certificate none.pem: No such file or directory"),
        (["--tls-cert", __file__], f"the certificate {__file__}: "),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid: "),
        (
            ["--host", "../.."],
            "--host ../..: is not a host name: each part between dots must have 1 … 63",
        ),
        (["--host", "\udced"], "--host \\xed: is not a host name"),
        (["--host", "x" * 1000], f"--host {'x' * 253}…: is not a host name"),
        (["--host", "x." * 1000], f"--host {'x.' * 126}x…: "),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8080: Cannot assign requested address"),
        (["--uds", __file__], "exists and is not a socket"),
        (["--uds", "/no/such/folder/socket"], "/no/such/folder/socket: No such file or directory"),
        (["--max-connections", "999999999"], "--max-connections 999999999 needs"),
        (["--max-queue-tokens", "-1"], "max_queue_tokens must be 0 …"),
        (["--max-body-mib", "0"], "max_body_mib must be 1 … 1024"),
        (["--chat-template-kwargs", "no"], "--chat-template-kwargs: must be a JSON object"),
        (["--policy", "worst"], "policy must be one of"),
        (["--host", "0.0.0.0", "--port", "0"], "--host 0.0.0.0: other machines can reach"),
        (["--host", "::", "--port", "0"], "or --no-auth to serve everybody"),
    ],
)
def test_wrong_option_is_refused_before_the_model_is_loaded(
    arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("key", "arguments", "words"),
    [
        (" \t", [], "CBATCH_API_KEY is blank: set it to a key, unset it, or give --no-auth"),
        ("", [], "CBATCH_API_KEY is blank"),
        ("", ["--no-auth", "--policy", "worst"], "policy must be one of"),
        ("k", ["--no-auth"], "--no-auth is for a server without keys"),
    ],
)
def test_key_in_the_environment_that_cannot_be_meant_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str, arguments: list[str], words: str
) -> None:
    monkeypatch.setenv("CBATCH_API_KEY", key)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert (result.exit_code, words in result.stderr) == (2, True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_port_in_use_is_told_before_the_model_is_loaded(host: str) -> None:
    with socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    ) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--host", host, "--port", port])
    assert result.exit_code == 2
    assert f"--host {host} --port {port}: Address already in use" in result.stderr


@pytest.mark.real
def test_encrypted_key_is_refused_and_asks_for_nothing(tmp_path: Path) -> None:
    files = certificate_files(tmp_path, "secret")
    result = CliRunner().invoke(app, ["serve", "--tls-cert", files[0], "--tls-key", files[1]])
    assert result.exit_code == 2
    assert "is encrypted" in result.stderr


def serving(
    model: Path, *arguments: str, has_folder: bool = True
) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """A server of the command line with two slots, and where it says that it is; else it takes the default folder."""
    own = ("--threads", "1", "--parallel", "2", "--replicas", "1", "-m", str(model))
    return server_process.serving(*own, *arguments, has_folder=has_folder)


@pytest.mark.real
def test_serve_speaks_https(test_model: Path, tmp_path: Path) -> None:
    certificate, key = certificate_files(tmp_path, None)
    files = ("--tls-cert", certificate, "--tls-key", key)
    with serving(test_model, "--host", "::1", "--port", "0", *files) as (_, where):
        assert where.startswith("https://[::1]:")
        with httpx.Client(base_url=where, verify=False, timeout=60) as client:
            assert client.get("/health").json()["status"] == "ok"


@pytest.mark.real
def test_signal_lets_a_stream_end_and_then_the_server(test_model: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "stream": True}
    with (
        serving(test_model, "--port", "0", "--log-format", "none") as (process, where),
        httpx.Client(base_url=where, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json={**chat, "ignore_eos": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait() == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.real
def test_server_on_a_terminal_says_that_it_loads(test_model: Path) -> None:
    ours, theirs = os.openpty()
    arguments = ("-m", str(test_model), "--port", "0", "--threads", "1", "--replicas", "1")
    command = [sys.executable, "-m", "cbatch.cli", "serve", *arguments]
    with subprocess.Popen(command, stderr=theirs) as process, open(ours) as said:
        os.close(theirs)
        try:
            assert said.readline() == f"cbatch: loading {test_model}\n"
            assert "serving" in said.readline()
        finally:
            process.kill()


def _address_in(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"serving \S+ at (http://127\.0\.0\.1:\d+)", line)
    assert found is not None, line
    return found[1]


@pytest.mark.real
def test_hangup_reloads_the_model_that_the_file_now_is(synth: SynthFactory, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.symlink_to(synth("test"))
    arguments = ("--replicas", "1", "--log-format", "none", "--files-dir", str(tmp_path / "kept"))
    with started(path, *arguments, start_new_session=True) as process:
        with httpx.Client(base_url=_address_in(process), timeout=60) as client:
            assert process.stderr is not None
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            before = client.post("/v1/chat/completions", json=chat).json()["system_fingerprint"]
            path.unlink()
            process.send_signal(signal.SIGHUP)  # no file: the old model stays
            lines = [process.stderr.readline() for _ in range(2)]
            assert lines[0] == "cbatch: the model is being reloaded\n"
            assert lines[1].startswith("cbatch: the reload failed, the old model stays in use: ")
            assert client.get("/health").json()["reload"] == "failed"
            path.symlink_to(synth("test", seed=1))
            process.send_signal(signal.SIGHUP)
            lines = [process.stderr.readline() for _ in range(2)]
            assert lines[1].startswith("cbatch: the model is reloaded; ")
            answer = client.post("/v1/chat/completions", json=chat).json()
            assert answer["system_fingerprint"] != before
            assert client.get("/v1/files").status_code == 200
        process.terminate()
        assert process.wait() == 0
        assert process.stderr.read() == ""


@pytest.mark.real
def test_hangup_of_a_terminal_ends_the_server(test_model: Path) -> None:
    ours, theirs = os.openpty()
    try:
        in_terminal: dict[str, Any] = {
            "start_new_session": True,
            "preexec_fn": partial(_take_terminal, theirs),
        }
        with started(test_model, "--replicas", "1", **in_terminal) as process:
            _address_in(process)
            process.send_signal(signal.SIGHUP)
            assert process.wait() == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
    finally:
        os.close(ours)
        os.close(theirs)


def _take_terminal(file: int) -> None:
    fcntl.ioctl(file, termios.TIOCSCTTY, 0)


def test_serve_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.cli.serve.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    assert 'pip install ".[server]"' in result.stderr


@pytest.mark.real
def test_all_but_the_server_works_without_its_packages() -> None:
    code = """
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("starlette", "uvicorn", "prometheus_client"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import cbatch, cbatch.cli, cbatch.files
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.real
def test_each_path_is_for_this_user_and_has_its_own_files_which_stay(
    test_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def client(name: str) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(tmp_path / name))
        return httpx.Client(transport=transport, base_url="http://server", timeout=60)

    form: dict[str, Any] = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    first, other = (
        partial(serving, test_model, "--uds", str(tmp_path / name), has_folder=False)
        for name in ("a", "b")
    )
    with first(), other(), client("a") as a, client("b") as b:
        file = a.post("/v1/files", **form).json()
        assert b.get("/v1/files").json()["data"] == []
    with first() as (process, where):
        assert where == str(tmp_path / "a")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
        with client("a") as a:
            assert a.get("/v1/files").json()["data"] == [file]
            assert a.get("/v1/models").json()["data"][0]["id"] == test_model.stem
        process.terminate()
        assert process.wait() == 0
    assert not (tmp_path / "a").exists()


def test_default_folder_that_is_taken_leaves_a_server_without_files(tmp_path: Path) -> None:
    with Engine(FakeBackend(1, 64)) as engine:
        create = partial(create_app, engine)
        first, why = _with_files(create, None, tmp_path)
        assert (why, call(first, "/v1/files").status_code) == ("", 200)
        second, why = _with_files(create, None, tmp_path)
        assert why.startswith(f"no files and batches here: files_dir={tmp_path}: another server")
        assert "--files-dir" in why
        assert call(second, "/v1/files").status_code == 404
        with pytest.raises(ConfigError, match="another server uses it"):
            _with_files(create, tmp_path, tmp_path / "other")
        first.state.desk.close()
        third, why = _with_files(create, None, tmp_path)
        assert why == ""
        third.state.desk.close()
