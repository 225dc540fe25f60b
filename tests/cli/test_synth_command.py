"""`cbatch synth`, and what every command shares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cbatch
from cbatch.bench.synthetic import SHAPES, write_model
from tests.cli.conftest import invoke


def test_synth_writes_what_the_library_writes(tmp_path: Path) -> None:
    result = invoke("synth", tmp_path / "a.gguf", "--seed", 5)
    assert result.exit_code == 0
    assert "test q8_0, seed 5" in result.stderr
    expected = write_model(tmp_path / "b.gguf", SHAPES["test"], seed=5)
    assert (tmp_path / "a.gguf").read_bytes() == expected.read_bytes()


def test_synth_of_another_type_is_larger(tmp_path: Path) -> None:
    assert invoke("synth", tmp_path / "a.gguf", "--type", "f32").exit_code == 0
    assert invoke("synth", tmp_path / "b.gguf", "--type", "q4_0").exit_code == 0
    sizes = [(tmp_path / name).stat().st_size for name in ("a.gguf", "b.gguf")]
    assert sizes[0] > 2 * sizes[1]


def test_synth_over_a_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"precious")
    result = invoke("synth", path)
    assert (result.exit_code, path.read_bytes()) == (2, b"precious")
    assert f"{path}: exists already: give another file, or --force" in result.stderr
    assert invoke("synth", path, "--force").exit_code == 0
    assert path.read_bytes()[:4] == b"GGUF"


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
        (("--type", "q9"), "unknown weight type 'q9'; known are f32, f16, q4_0, q8_0"),
        (("--seed", "-1"), "--seed"),
    ):
        result = invoke("synth", path, *args)
        assert (result.exit_code, path.exists()) == (2, False)
        assert words in result.stderr
    assert "is a directory" in invoke("synth", tmp_path).stderr


def test_version_is_the_package_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"cbatch {cbatch.__version__}\n")


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
