"""`cbatch serve` in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from typer.testing import CliRunner

from cbatch.cli import app

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.real
def test_serve_answers_until_it_is_told_to_end(test_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n\nother\n")
    arguments = ["--port", "0", "--threads", "1", "--parallel", "2", "--api-key-file", str(keys)]
    with subprocess.Popen(
        [sys.executable, "-m", "cbatch.cli", "serve", "-m", str(test_model), *arguments],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
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
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 0
        assert "secret" not in process.stderr.read()


@pytest.mark.real
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_serve_logs_each_request(test_model: Path, log_format: str) -> None:
    arguments = ["--port", "0", "--threads", "1", "--parallel", "2", "--log-format", log_format]
    with subprocess.Popen(
        [sys.executable, "-m", "cbatch.cli", "serve", "-m", str(test_model), *arguments],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        line = next(line for line in lines if "serving" in line)
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        with httpx.Client(base_url=found[0], timeout=60) as client:
            chat = {"messages": [{"role": "user", "content": "private"}], "max_tokens": 3}
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tls-key", "key.pem"], "--tls-key needs --tls-cert"),
        (["--max-body-mib", "0"], "max_body_mib must be 1 … 1024"),
        (["--policy", "worst"], "policy must be one of"),
    ],
)
def test_wrong_option_is_refused_before_the_model_is_loaded(
    arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


def test_serve_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.cli.serve.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    assert 'pip install "cbatch[server]"' in result.stderr


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
