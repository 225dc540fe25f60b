"""`cbatch synth`, and what every command shares."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import cbatch
from cbatch.backend.llama.gguf import read_header
from cbatch.bench.synthetic import SHAPES, write_model
from tests.cli.conftest import invoke, start


@pytest.mark.parametrize(("name", "seed"), [("test", 5), ("mamba", 0), ("bert", 1)])
def test_synth_writes_what_the_library_writes(tmp_path: Path, name: str, seed: int) -> None:
    result = invoke("synth", tmp_path / "a.gguf", "--shape", name, "--seed", seed)
    assert result.exit_code == 0, result.stderr
    assert f"{name} q8_0, seed {seed}" in result.stderr
    expected = write_model(tmp_path / "b.gguf", SHAPES[name], seed=seed)
    assert (tmp_path / "a.gguf").read_bytes() == expected.read_bytes()


def test_synth_over_a_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"precious")
    result = invoke("synth", path)
    assert (result.exit_code, path.read_bytes()) == (2, b"precious")
    assert f"{path}: exists already: give another file, or --force" in result.stderr
    assert invoke("synth", path, "--force").exit_code == 0
    assert path.read_bytes()[:4] == b"GGUF"


def test_synth_never_replaces_the_model_whose_vocabulary_it_takes(tmp_path: Path) -> None:
    (path := tmp_path / "a.gguf").write_bytes(b"precious")
    result = invoke("synth", path, "--vocab", path, "--force")
    assert (result.exit_code, path.read_bytes()) == (2, b"precious")
    assert f"{path}: is the input" in result.stderr


def test_synth_of_a_model_to_stdout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("synth", "-")
    assert (result.exit_code, result.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert "give a file" in result.stderr


def test_synth_with_wrong_values_names_them_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for args, words in (
        (("--shape", "huge"), "unknown shape 'huge'; known are test, exact, tiny, small"),
        (("--type", "q9"), "unknown weight type 'q9'; known are f32, f16, bf16, q8_0, q4_0"),
        (("--type", "q4_k_m"), "q4_k_m needs n_embd or n_ff to be a multiple of 256"),
        (("--type", "mxfp4_moe"), "mxfp4_moe needs experts"),
        (("--seed", "-1"), "--seed"),
        (("--n-vocab", "300"), "n_vocab must be at least 356"),
        (("--n-embd", "65"), "n_embd / n_head, the width of a head, must be an even number"),
        (("--n-head", "4", "--n-kv-head", "3"), "n_head must be a multiple of n_kv_head"),
        (("--experts", "1"), "n_expert must be 0 or at least 2"),
        (("--experts", "4", "--experts-used", "5"), "n_expert_used must be 1 … n_expert"),
        (("--experts-used", "2"), "--experts-used needs experts: give --experts, too"),
        (("--full-every", "2"), "--full-every needs a sliding window: give --window, too"),
        (("--window", "8", "--full-every", "3"), "full_every must be 2 … n_layer"),
        (("--shape", "mamba", "--window", "8"), "mamba models have no sliding window"),
        (("--vocab", tmp_path / "none.gguf"), "none.gguf: cannot be read: No such file"),
        (("--mmproj", "llava", "--n-layer", "2"), "a projector has no n_layer"),
        (("--vocab", Path(__file__)), "test_synth_command.py: is not a GGUF file"),
        (("--shape", "8b", "--type", "f32", "--n-layer", "512"), "bytes of disk"),
    ):
        result = invoke("synth", path, *args)
        assert (result.exit_code, path.exists()) == (2, False)
        assert words in result.stderr
    assert "is a directory" in invoke("synth", tmp_path).stderr


def test_synth_takes_vocabulary_and_sizes(tmp_path: Path, test_model: Path) -> None:
    path = tmp_path / "a.gguf"
    sizes = "--n-layer 3 --n-embd 96 --n-head 3 --n-kv-head 1 --n-ff 64 --type f32 --tied"
    more = "--experts 4 --window 24 --full-every 3"
    result = invoke("synth", path, "--vocab", test_model, *sizes.split(), *more.split())
    assert result.exit_code == 0, result.stderr
    with cbatch.load(path, parallel=2, ctx_per_seq=64, n_threads=1) as engine:
        assert engine.tokenize("Say hello.") == tokens_of(test_model, "Say hello.")
        assert len(engine.run(["Hi"], options={"max_tokens": 9}).results()[0].token_ids) == 9
    header = read_header(path, "")
    assert header is not None
    told = {name.partition(".")[2]: value for name, value in header.values.items()}
    assert (told["block_count"], told["attention.head_count_kv"]) == (3, 1)
    assert (told["expert_count"], told["expert_used_count"]) == (4, 2)
    assert told["attention.sliding_window"] == 24
    assert header.integers["granite_swa.attention.sliding_window_pattern"] == (1, 1, 0)
    assert header.tensors["blk.0.ffn_up_exps.weight"].sizes == (96, 64, 4, 1)
    assert "output.weight" not in header.tensors


def tokens_of(path: Path, text: str) -> list[int]:
    with cbatch.load(path, parallel=1, ctx_per_seq=64, n_threads=1) as engine:
        return engine.tokenize(text)


@pytest.mark.real
def test_synth_of_a_mix_names_rows_that_have_another_type(tmp_path: Path) -> None:
    args = ("--n-embd", "96", "--n-ff", "256", "--type", "q4_k_m", "--n-vocab", "400")
    result = invoke("synth", tmp_path / "a.gguf", *args)
    assert result.exit_code == 0, result.stderr
    assert "rows of 96 numbers are not a multiple of 256" in result.stderr
    again = invoke("synth", tmp_path / "b.gguf", *args, "--n-embd", "256")
    assert (again.exit_code, again.stderr.count("\n")) == (0, 1)


def start_long(path: Path, type: str) -> subprocess.Popen[bytes]:
    """Start a command that takes minutes; return when it writes the file, or when llama.cpp does."""
    n_layer = 300 if type == "q8_0" else 2
    sizes = ("--shape", "small", "--n-layer", n_layer, "--n-vocab", 400, "--type", type)
    process = start("synth", path, *sizes)
    while not has_part(path):
        assert process.poll() is None
        time.sleep(0.01)
    return process


def has_part(path: Path) -> bool:
    """Whether something of the file itself is written, which is not what is quantised afterwards."""
    parts = [p for p in path.parent.glob(".*.part") if ".f16." not in p.name]
    return any(part.stat().st_size for part in parts)


@pytest.mark.real
@pytest.mark.parametrize(
    ("number", "exit_code", "type"),
    [
        (signal.SIGINT, 130, "q8_0"),
        (signal.SIGTERM, 143, "iq2_xxs"),
        (signal.SIGHUP, 129, "iq2_xxs"),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_synth_that_is_broken_off_leaves_nothing(
    tmp_path: Path, number: signal.Signals, exit_code: int, type: str
) -> None:
    """While the file is written, and while llama.cpp quantises, which takes minutes for this one."""
    process = start_long(tmp_path / "a.gguf", type)
    try:
        assert process.poll() is None, "it was through before the signal"
        process.send_signal(number)
        _, words = process.communicate()
    finally:
        process.kill()
    assert process.returncode == exit_code, words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
def test_synth_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    process = start_long(path, "iq2_xxs")
    process.kill()
    process.communicate()
    assert len(list(tmp_path.iterdir())) == 2
    result = invoke("synth", path)
    assert result.exit_code == 0, result.stderr
    assert list(tmp_path.iterdir()) == [path]


def shown_on(ends: tuple[int, int], path: Path) -> str:
    """What the command shows on a terminal or a pipe: its two ends, to read and to write."""
    reader, writer = ends
    process = subprocess.Popen(
        [sys.executable, "-m", "cbatch", "synth", str(path)],
        stderr=writer,
        cwd=Path(str(cbatch.__file__)).parent.parent,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(writer)
    shown = b""
    with suppress(OSError):  # a terminal that nobody holds any more
        while data := os.read(reader, 4096):
            shown += data
    os.close(reader)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.real
def test_progress_is_drawn_on_a_terminal_alone(tmp_path: Path) -> None:
    on_terminal = shown_on(pty.openpty(), tmp_path / "a.gguf")
    elsewhere = shown_on(os.pipe(), tmp_path / "b.gguf")
    assert "━" in on_terminal
    assert "bytes" in on_terminal
    assert "━" not in elsewhere
    assert elsewhere.count("\n") == 1


def test_version_names_package_bindings_and_library() -> None:
    from cbatch.backend.bindings import library_file, library_version, llama_cpp

    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"cbatch {cbatch.__version__}",
        f"llama-cpp-python {llama_cpp.__version__}",
        f"llama.cpp {library_version()}, {library_file()}",
    ]


@pytest.mark.real
def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    script = (
        "import sys; from cbatch.cli import app\n"
        "try: app(['--help'])\n"
        "finally: assert not {'llama_cpp', 'numpy', 'gguf'} & set(sys.modules)"
    )
    folder = Path(str(cbatch.__file__)).parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"run" in done.stdout
    assert b"synth" in done.stdout
