"""`cbatch cache`: what is on disk is listed, checked and removed; no key commands the terminal."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from cbatch.cache.cell_file import CachedCells
from cbatch.cache.store import CacheFile, CacheStore
from cbatch.cli import app
from cbatch.cli.cache import table
from tests.cli.conftest import Done, invoke, parse, start
from tests.cli.test_streams import redirected

if TYPE_CHECKING:
    from pathlib import Path

FINGERPRINT = {"model": "sha256:" + "ab" * 32, "type_k": "f16"}
COMMANDS = ("ls", "rm", "verify")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cells"


def keep(folder: Path, *keys: str, fingerprint: dict[str, str] = FINGERPRINT) -> CacheStore:
    """Write a file under each key, the later the more recently used."""
    now_s = iter(range(10**9, 2 * 10**9, 60))
    store = CacheStore(folder, 2**30, clock=lambda: next(now_s))
    for key in keys:
        data = np.zeros(2**20, np.uint8)
        store.write(key, CachedCells(range(1234), 9, data), fingerprint)
    return CacheStore(folder, 0)


def cache(command: str, *args: object, folder: Path, answer: str | None = None) -> Done:
    if answer is None:
        return invoke("cache", command, *args, "--cache-dir", folder)
    words = ["cache", command, *map(str, args), "--cache-dir", str(folder)]
    result = CliRunner().invoke(app, words, input=answer)
    return Done(result.exit_code, result.stdout, result.stderr)


def damage(path: Path) -> None:
    """Flip a byte of the cells."""
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


# ---- ls ----


def test_ls_is_an_aligned_table_of_the_most_recently_used_first(folder: Path) -> None:
    store = keep(folder, "system", "é猫")
    done = cache("ls", folder=folder)
    model = FINGERPRINT["model"]
    assert (done.exit_code, done.stderr) == (0, f"2 files, 2.0 MiB in {folder}\n")
    b, a = (datetime.fromtimestamp(f.used_at).strftime("%Y-%m-%d %H:%M") for f in store.files())
    assert done.stdout.splitlines() == [
        "key     tokens     size  last used         model",
        f"é猫      1,234  1.0 MiB  {b}  {model}",
        f"system   1,234  1.0 MiB  {a}  {model}",
    ]


def test_ls_of_nothing_says_so_and_makes_no_folder(folder: Path) -> None:
    assert cache("ls", folder=folder) == Done(0, "", f"0 files, 0.0 MiB in {folder}\n")
    assert cache("ls", "--json", folder=folder) == Done(0, "", "")
    assert not folder.exists()


def test_ls_json_is_one_object_a_line(folder: Path) -> None:
    store = keep(folder, "a", "b")
    done = cache("ls", "--json", folder=folder)
    assert (done.exit_code, done.stderr) == (0, "")
    b = store.files("b")[0]
    assert [line["key"] for line in parse(done.stdout)] == ["b", "a"]
    assert parse(done.stdout)[0] == {
        "key": "b",
        "n_tokens": 1234,
        "n_bytes": b.n_bytes,
        "used_at": b.used_at,
        "fingerprint": FINGERPRINT,
        "path": str(b.path),
        "problem": None,
    }


def test_ls_shows_what_is_wrong_with_a_bad_file(folder: Path) -> None:
    store = keep(folder, "a", "b")
    path = store.files("a")[0].path
    cut(path)
    done = cache("ls", folder=folder)
    assert done.exit_code == 0
    [line] = [line for line in done.stdout.splitlines() if line.startswith("? ")]
    assert f"{path.name} has " in line
    assert (
        "bytes, but should have" in parse(cache("ls", "--json", folder=folder).stdout)[0]["problem"]
    )


@pytest.mark.parametrize("width", [80, 110, 66])
def test_ls_on_a_terminal_cuts_long_names_to_its_width(folder: Path, width: int) -> None:
    files = keep(folder, "k" * 1000, "猫" * 200).files()
    wide, narrow = list(table(files)), list(table(files, width))
    assert {cell_len(line) for line in narrow[1:]} == {width} != {cell_len(line) for line in wide}
    n_key = width - 16 - len("  tokens     size  1234-12-12 12:12    ")  # what the model leaves
    assert "k" * (n_key - 1) + "…  " in narrow[2]
    assert "猫" * ((n_key - 1) // 2) in narrow[1]
    assert narrow[1].endswith(FINGERPRINT["model"][:15] + "…")


def test_ls_on_a_terminal_gives_the_model_what_short_keys_leave(folder: Path) -> None:
    files = keep(folder, "a").files()
    [_, line] = table(files, 80)
    assert cell_len(line) == 80
    assert list(table(files, 200)) == list(table(files))


def test_ls_of_a_time_beyond_the_calendar_goes_on(tmp_path: Path) -> None:
    files = [CacheFile("a", 1, 512, used_at, {}, tmp_path) for used_at in (1e12, -1e12, 1e300)]
    assert [line.split()[-3:] for line in table(files)][1:] == [["0.5", "KiB", "?"]] * 3


NASTY = ["\x1b[2J", "a\nb\r\x07", "\x9b31m\x7f", "\u202eabc\u2028", "\ud800\0", '"\\é猫', ""]


@pytest.mark.parametrize("key", NASTY, ids=repr)
@pytest.mark.parametrize("how", [(), ("--json",)])
def test_no_key_and_no_model_reaches_a_terminal_raw(
    folder: Path, key: str, how: tuple[str, ...]
) -> None:
    store = keep(folder, key, fingerprint={"model": key, "\x1b": "\x9b"})
    done = cache("ls", *how, folder=folder)
    assert done.exit_code == 0
    assert all(line.isprintable() for line in done.stdout.split("\n"))
    assert len(done.stdout.splitlines()) == (1 if how else 2)
    if how:
        assert parse(done.stdout)[0]["key"] == key
    damage(store.files()[0].path)
    for said in (cache("verify", folder=folder), cache("verify", key, folder=folder)):
        assert said.exit_code == 1
        assert all(line.isprintable() for line in (said.stdout + said.stderr).split("\n"))


def test_unknown_key_does_not_reach_a_terminal_raw(folder: Path) -> None:
    for command in ("rm", "verify"):
        done = cache(command, "\x1b[2J", folder=folder)
        assert (done.exit_code, done.stdout) == (1, "")
        assert r"'\x1b[2J'" in done.stderr
        assert "\x1b" not in done.stderr


# ---- rm ----


def test_rm_removes_the_files_of_its_keys_of_every_fingerprint(folder: Path) -> None:
    keep(folder, "a", "b", "c")
    store = keep(folder, "a", fingerprint={"model": "other"})
    assert cache("rm", "a", "b", "a", folder=folder) == Done(0, "", "")
    assert [file.key for file in store.files()] == ["c"]


def test_rm_names_unknown_keys_and_removes_the_others(folder: Path) -> None:
    store = keep(folder, "a", "b")
    done = cache("rm", "x", "a", "y", folder=folder)
    assert done == Done(1, "", f"cbatch: no file in {folder} has the key 'x' or 'y'\n")
    assert [file.key for file in store.files()] == ["b"]


@pytest.mark.parametrize(
    ("answer", "is_gone"),
    [("y\n", True), (" YES \n", True), ("", False), ("yak\n", False)],
)
def test_rm_all_asks_first(folder: Path, answer: str, is_gone: bool) -> None:
    store = keep(folder, "a", "b")
    done = cache("rm", "--all", folder=folder, answer=answer)
    question = f"remove 2 files, 2.0 MiB in {folder}? [y/N] "
    assert (done.exit_code, done.stdout) == (0 if is_gone else 1, "")
    assert done.stderr == question + ("" if is_gone else "cbatch: nothing removed\n")
    assert (store.files() == []) == is_gone


def test_rm_all_does_not_ask_who_is_sure(folder: Path) -> None:
    store = keep(folder, "a", "b")
    assert cache("rm", "--all", "--yes", folder=folder) == Done(0, "", "")
    assert store.files() == []


@pytest.mark.parametrize("args", [(), ("a", "--all"), ("a", "--all", "--yes")], ids=str)
def test_rm_of_nothing_or_of_both_is_refused(folder: Path, args: tuple[str, ...]) -> None:
    store = keep(folder, "a")
    done = cache("rm", *args, folder=folder)
    words = "cbatch: give the keys of the files to remove, or --all, but not both\n"
    assert done == Done(2, "", words)
    assert len(store.files()) == 1


def test_rm_all_goes_on_where_a_folder_is_named_like_a_file_and_names_it(folder: Path) -> None:
    store = keep(folder, "a", "b")
    path = folder / f"{0:032x}-{0:032x}.cells"
    path.mkdir()
    done = cache("rm", "--all", "--yes", folder=folder)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{path} cannot be removed" in done.stderr
    assert [file.path for file in store.files()] == [path]


# ---- verify ----


def test_verify_names_each_bad_file_with_the_reason(folder: Path) -> None:
    store = keep(folder, "a", "b", "c")
    assert cache("verify", folder=folder) == Done(0, "", f"3 files, 3.0 MiB in {folder}, 0 bad\n")
    [a], [b] = store.files("a"), store.files("b")
    damage(a.path)
    cut(b.path)
    done = cache("verify", folder=folder)
    assert (done.exit_code, done.stderr) == (1, f"3 files, 3.0 MiB in {folder}, 2 bad\n")
    of_b, of_a = done.stdout.splitlines()
    assert of_a == f"a: {a.path} is damaged: its digest does not match its content"
    assert of_b.startswith(f"unknown key: {b.path} has ")


def test_verify_of_keys_reads_theirs_alone(folder: Path) -> None:
    store = keep(folder, "a", "b")
    cut(store.files("a")[0].path)
    assert cache("verify", "b", folder=folder).exit_code == 0
    done = cache("verify", "a", "a", folder=folder)
    assert done.exit_code == 1
    assert done.stdout.startswith("a: ")
    assert done.stdout.count("\n") == 1
    done = cache("verify", "x", "b", folder=folder)
    assert done.exit_code == 1
    assert done.stderr.endswith(f"cbatch: no file in {folder} has the key 'x'\n")


# ---- all of them ----


def test_folder_comes_from_the_environment_or_is_the_users(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(folder, "a")
    if sys.platform == "linux":
        keep(tmp_path / "home" / "cbatch" / "cells", "b")
        assert [line["key"] for line in parse(invoke("cache", "ls", "--json").stdout)] == ["b"]
    monkeypatch.setenv("CBATCH_CACHE_DIR", str(folder))
    assert [line["key"] for line in parse(invoke("cache", "ls", "--json").stdout)] == ["a"]
    assert cache("ls", "--json", folder=tmp_path / "none").stdout == ""
    monkeypatch.setenv("CBATCH_CACHE_LS_JSON", "1")
    assert [line["key"] for line in parse(invoke("cache", "ls").stdout)] == ["a"]
    assert invoke("cache", "rm", "a").exit_code == 0
    assert invoke("cache", "verify").stderr == f"0 files, 0.0 MiB in {folder}, 0 bad\n"


@pytest.mark.skipif(sys.platform == "win32", reason="homes are found by another variable")
def test_folder_in_the_home_is_found_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "x", "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [
        line["key"] for line in parse(invoke("cache", "ls", "--json", "--cache-dir=~/x").stdout)
    ] == ["a"]
    monkeypatch.setenv("CBATCH_CACHE_DIR", "~/x")
    assert [line["key"] for line in parse(invoke("cache", "ls", "--json").stdout)] == ["a"]


@pytest.mark.parametrize("args", [("ls",), ("rm", "a"), ("rm", "--all", "--yes"), ("verify",)])
def test_folder_that_cannot_be_read_is_one_line(tmp_path: Path, args: tuple[str, ...]) -> None:
    path = tmp_path / "file"
    path.touch()
    done = cache(*args, folder=path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert str(path) in done.stderr
    assert "Not a directory" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_has_one_example_and_cuts_nothing(command: str | None) -> None:
    args = ["cache", *filter(None, [command]), "--help"]
    result = CliRunner(env={"COLUMNS": "40"}).invoke(app, args)
    assert result.exit_code == 0
    assert result.output.count("Example: cbatch cache ") == 1
    assert "…" not in result.output
    assert max(map(len, result.output.splitlines())) <= 44
    if command:
        assert "--cache-dir" in result.output


def test_cache_without_a_command_shows_help() -> None:
    result = CliRunner().invoke(app, ["cache"])
    assert "verify" in result.output
    assert invoke("cache", "lss").exit_code == 2


@pytest.mark.real
def test_cache_commands_import_no_llama_cpp(folder: Path) -> None:
    keep(folder, "a")
    code = (
        "import sys\n"
        "from cbatch.cli import app\n"
        "sys.modules['llama_cpp'] = None\n"
        "app(sys.argv[1:], prog_name='cbatch')"
    )
    for args in (("ls",), ("verify",), ("rm", "a")):
        done = subprocess.run(
            [sys.executable, "-c", code, "cache", *args, "--cache-dir", str(folder)],
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert b"\x1b" not in done.stdout + done.stderr  # no colour but on a terminal


@pytest.mark.real
def test_reader_who_leaves_ends_ls_quietly(folder: Path) -> None:
    keep(folder, *"abcdef")
    with start("cache", "ls", "--json", "--cache-dir", folder) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.real
def test_question_that_nobody_can_answer_removes_nothing(folder: Path) -> None:
    store = keep(folder, "a")
    for how, code, words in (("</dev/null", 1, "nothing removed"), ("<&-", 2, "stdin is closed")):
        done = redirected(how, "cache", "rm", "--all", "--cache-dir", folder)
        assert (done.exit_code, done.stdout) == (code, "")
        assert f"cbatch: {words}" in done.stderr
        assert len(store.files()) == 1
