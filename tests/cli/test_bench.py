"""`cbatch bench`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from cbatch.bench import comparison
from cbatch.bench.cases import present
from cbatch.bench.server_process import served
from cbatch.bench.sides import KINDS
from cbatch.bench.text_work import VECTOR_WORKLOADS
from cbatch.bench.verdict import differences
from cbatch.bench.workloads import WORKLOADS
from tests.cli.conftest import invoke, start

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.bench.measured import MeasuredAnswer
    from tests.conftest import SynthFactory

SHORT = ("--workload", "burst", "--rounds", 1, "--count", 4)


def test_list_has_a_line_for_every_workload_side_and_case() -> None:
    shown = invoke("bench", "--list")
    assert shown.exit_code == 0
    lines = {line.split()[0]: line for line in shown.stdout.splitlines() if line.startswith("  ")}
    assert lines.keys() == {*WORKLOADS, *VECTOR_WORKLOADS, *KINDS, *present()}
    assert all(len(line.split()) > 2 for line in lines.values())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--workload", "fast"), "unknown workload 'fast'; known are decode, mixed"),
        (("--workload", ","), "no name in ','"),
        (("--sides", "vllm"), "unknown side 'vllm'; known are engine"),
        (("--at-once", "two"), "at_once must be whole numbers separated by commas"),
        (("--at-once", "0"), "at_once"),
        (("--rate", "-1"), "rate must be numbers of requests a second"),
        (("--rate", "inf"), "rate must be numbers of requests a second"),
        (("--prompt-tokens", "9-8"), "the smaller number first, not 9-8"),
        (("--prompt-tokens", "many"), "prompt_tokens must be a number of tokens"),
        (("--prompt-tokens", "9" * 5000), "prompt_tokens must be a number of tokens"),
        (
            ("--requests", "own", "--prompt-tokens", "9"),
            "--prompt-tokens has no effect on --requests",
        ),
        (("--against", "ftp://a"), "ftp://a: is not a server's URL"),
        (("--api-key", "a"), "--against-model and --api-key need --against"),
        (("--llama-server", "/no/where"), "/no/where: is not a file"),
        (("--case", "speed"), "unknown case 'speed'; known are batch_files"),
        (("--json", "."), "is a directory: give a file"),
        (("--html", "no/a.html"), "no/a.html: the folder no does not exist"),
        (("--svg", "no/a.svg"), "no/a.svg: the folder no does not exist"),
        (("one.gguf", "-m", "two.gguf"), "MODEL is one.gguf and -m is two.gguf"),
        (("--from", "no.json", "--svg", "a.svg"), "no.json"),
        (("one.gguf", "two.gguf"), "two.gguf: one model at a time"),
        (("no.gguf",), "no.gguf"),
        pytest.param(
            ("--workload", "long", "--ctx-per-seq", "512"),
            "long needs a window of 1,548 tokens, more than a slot holds (512)",
            marks=pytest.mark.real,
        ),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(args: tuple[str, ...], words: str) -> None:
    shown = invoke("bench", *args)
    assert shown.exit_code == 2
    assert words in shown.stderr


def test_file_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("mine", encoding="utf-8")
    shown = invoke("bench", "--json", tmp_path / "a.json")
    assert (shown.exit_code, "exists already" in shown.stderr) == (2, True)
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("command", "option"),
    [("tune", "--json"), *(("bench", f"--{kind}") for kind in ("json", "markdown", "html", "svg"))],
)
def test_results_never_replace_the_model(tmp_path: Path, command: str, option: str) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(b"precious")
    (link := tmp_path / "link").symlink_to(parts[1])
    for file in (*parts, link):
        shown = invoke(command, parts[0], option, file, "--force")
        assert (shown.exit_code, f"{file}: is the input" in shown.stderr) == (2, True)
    assert [part.read_bytes() for part in parts] == [b"precious"] * 2


@pytest.mark.parametrize("read", ["--from", "--requests", "--llama-server"])
def test_results_never_replace_what_is_read(tmp_path: Path, read: str) -> None:
    (file := tmp_path / "a").write_bytes(b"precious")
    shown = invoke("bench", read, file, "--svg", file, "--force")
    assert (shown.exit_code, f"{file}: is the input" in shown.stderr) == (2, True)
    assert file.read_bytes() == b"precious"


@pytest.mark.real
def test_own_sides_are_measured_and_written_in_four_formats(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "markdown", "html", "svg")}
    written = [word for kind, file in files.items() for word in (f"--{kind}", file)]
    shown = invoke("bench", *SHORT, "--at-once", "1,2", *written)
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(files["json"].read_text(encoding="utf-8"))
    rows = {(row["side"], row["load"]["at_once"]): row for row in found["rows"]}
    assert rows.keys() == {
        *(("engine", 1), ("one", 1), ("llama", 1), ("static", 1), ("engine", 2), ("static", 2))
    }
    assert all(row["output_tps"]["median"] > 0 for row in rows.values())
    assert rows["engine", 2]["wall_ratio"] > 0
    assert rows["engine", 2]["of_bare"]["median"] > 0
    assert rows["engine", 2]["of_ideal"] > 0
    assert rows["llama", 1]["ratio"]["median"] > 0
    assert found["settings"]["seed"] == 1
    assert [w["n_rows"] for w in found["widths"]] == [1, 2]
    assert (
        len({r["figures"]["n_output"] for r in found["rounds"] if r["load"]["at_once"] == 1}) == 1
    )
    assert "seed 1, rounds 1" in files["markdown"].read_text(encoding="utf-8")
    page = files["html"].read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert not re.search(r"(src|href)=|url\(", page)
    picture = ElementTree.fromstring(files["svg"].read_text(encoding="utf-8"))
    dots = picture.iterfind(
        ".//{http://www.w3.org/2000/svg}circle/{http://www.w3.org/2000/svg}title"
    )
    assert {(dot.text or "").partition(":")[0] for dot in dots} == {
        "engine",
        "one",
        "llama",
        "static",
        "bare loop",
    }
    for text in (files["markdown"].read_text(encoding="utf-8"), shown.stdout):
        assert "burst: many short questions (8–24 in, 4–16 out)" in text
        assert "engine" in text
    assert "burst, 2 at once, round 1, cold, engine: " in shown.stderr


@pytest.mark.real
def test_arrivals_by_chance_and_a_file_of_requests(tmp_path: Path) -> None:
    line = {"id": "a", "prompt": "Say red and blue.", "max_tokens": 5, "seed": 1}
    (tmp_path / "own.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    shown = invoke(
        "bench",
        "--requests",
        tmp_path / "own.jsonl",
        "--rate",
        "20",
        "--rounds",
        1,
        "--sides",
        "engine",
    )
    assert shown.exit_code == 0, shown.stderr
    assert "own: 1 requests from a file" in shown.stdout
    assert "20 a second" in shown.stdout


@pytest.mark.real
def test_exact_answers_are_compared_with_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def spoilt(
        alone: dict[str, tuple[int, ...]], answers: list[MeasuredAnswer], **more: Any
    ) -> list[str]:
        here = {answer.id: answer.tokens for answer in answers}
        compared.extend(len(tokens) for id, tokens in alone.items() if tokens == here[id])
        wrong = {id: (*tokens[:-1], tokens[-1] + 1) for id, tokens in alone.items()}
        return differences(wrong, answers, **more)

    monkeypatch.setattr(comparison, "differences", spoilt)
    shown = invoke("bench", *SHORT, "--at-once", 2, "--sides", "engine", "--exact", "--parallel", 2)
    assert shown.exit_code == 1, shown.stderr
    assert len(compared) == 4
    assert all(n >= 4 for n in compared)  # whole answers
    assert "4 of 4 answers differ from those of the same requests run alone" in shown.stderr


@pytest.mark.real
def test_servers_are_measured_beside_ours_and_wrong_ones_are_named(
    synth: SynthFactory, tmp_path: Path
) -> None:
    args = (*SHORT, "--at-once", 2, "--sides", "engine,serve")
    sizes = ("--parallel", "2")
    with served(None, *sizes) as server, served(str(synth("test")), *sizes) as wrong:
        urls = [f"http://127.0.0.1:{port}" for port in (server.port, 9, wrong.port)]
        file = tmp_path / "a.json"
        against = [word for url in urls for word in ("--against", url)]
        shown = invoke("bench", *args, *against, "--json", file)
    assert shown.exit_code == 1
    ours, gone, other = (f"{url}/v1" for url in urls)
    assert f"refused: {gone}: {gone}: cannot connect: " in shown.stderr
    assert re.search(rf"refused: {other}: .*it has another model", shown.stderr), shown.stderr
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["side"] for row in rows] == ["engine", "serve", ours]
    assert [row["ours"] for row in rows] == [None, None, "serve"]
    assert rows[2]["ratio"]["median"] > 0
    assert {row["n_counted"] for row in rows} == {1}


@pytest.mark.real
def test_ctrl_c_ends_with_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    args = ("--workload", "burst", "--at-once", 1, "--rounds", 100_000, "--count", 1)
    process = start("bench", *args, "--sides", "engine", "--json", file)
    try:
        assert process.stderr is not None
        seen = b""
        while b"round 2, " not in seen:
            seen = process.stderr.readline()
            assert seen, "it ended by itself"
        os.kill(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, stderr
    assert b"interrupted: these are the complete rounds" in stderr
    assert "burst: many short questions" in stdout.decode()
    [row] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert 2 <= row["n_counted"] < 100_000


@pytest.mark.real
def test_case_runs_with_arguments_of_its_own() -> None:
    shown = invoke("bench", "--case", "calls", "--", "--rows", 2, "--steps", 3)
    assert shown.exit_code == 0, shown.stderr


def test_sides_are_of_the_same_cbatch_whatever_the_folder_holds(
    tmp_path: Path, test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cbatch").mkdir()
    (tmp_path / "cbatch" / "__init__.py").write_text("raise ImportError('another one')\n")
    monkeypatch.chdir(tmp_path)
    sizes = ["--at-once", 1, "--count", 1, "--rounds", 1, "--output-tokens", 2]
    result = invoke("bench", test_model, "--workload", "burst", "--sides", "engine", *sizes)
    assert "another one" not in result.stderr
    assert result.exit_code == 0, result.stderr


SERVER = """#!{python}
import http.server, os, pathlib, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{{}}")

    def do_POST(self):
        time.sleep(3600)

pathlib.Path({pid!r}).write_text(str(os.getpid()))
place = "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(place, Handler).serve_forever()
"""


@pytest.mark.real
def test_signal_ends_the_servers_that_it_started(test_model: Path, tmp_path: Path) -> None:
    program, pid = tmp_path / "llama-server", tmp_path / "pid"
    program.write_text(SERVER.format(python=sys.executable, pid=str(pid)))
    program.chmod(0o755)
    args = ("--llama-server", program, "--sides", "engine", "--at-once", 2, *SHORT)
    running = start("bench", test_model, *args)
    while not (pid.exists() and pid.read_text()):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate()
    assert running.returncode == 128 + signal.SIGTERM, said.decode()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
