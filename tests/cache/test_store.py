"""Cells on disk: found by key and fingerprint, whole or not there, no larger together than they may be."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cbatch.cache.cell_file
import cbatch.cache.store
from cbatch.backend.fake import FakeBackend
from cbatch.cache.cell_file import CachedCells, file_name
from cbatch.cache.store import CacheStore, cells_folder
from cbatch.core.plan import KvCapabilities
from cbatch.engine import Engine
from cbatch.errors import CacheError, ConfigError
from tests.profiles import examples
from tests.test_imports import inside

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from cbatch.cache.store import CacheFile

F16 = {"model": "sha256:ab", "type_k": "f16"}
Q8 = {"model": "sha256:ab", "type_k": "q8_0"}
SMALL = 1000
"""Bytes of cells; the rest of a file is some 200."""
MIB = 2**20


class Clock:
    """Unix time by hand: each look is a second later."""

    def __init__(self, now_s: float = 1e9) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def cells(n_bytes: int = SMALL, *, seed: int = 0, n_tokens: int = 7) -> CachedCells:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 32000, n_tokens).tolist()
    return CachedCells(tokens, n_tokens // 2, rng.integers(0, 256, n_bytes, dtype=np.uint8))


def with_checkpoint(written: CachedCells, n_cells: int = 3, n_bytes: int = 50) -> CachedCells:
    return replace(written, n_checkpoint=n_cells, checkpoint=np.full(n_bytes, 7, np.uint8))


def same(a: CachedCells, b: CachedCells) -> bool:
    numbers = [(c.n_prompt, c.tokens, c.n_checkpoint) for c in (a, b)]
    states = [[s.tolist() for s in (c.data, c.checkpoint) if s is not None] for c in (a, b)]
    return numbers[0] == numbers[1] and states[0] == states[1]


def make_store(folder: Path, n_bytes_max: int = MIB, clock: Clock | None = None) -> CacheStore:
    return CacheStore(folder, n_bytes_max, clock=clock or Clock())


def keys(store: CacheStore) -> list[str]:
    return [file.key for file in store.files()]


def only(store: CacheStore) -> CacheFile:
    [file] = store.files()
    return file


def fails(store: CacheStore, key: str = "a", fingerprint: dict[str, str] = F16) -> str:
    """Return why this key cannot be read."""
    with pytest.raises(CacheError) as caught:
        store.read(key, fingerprint)
    assert caught.value.key == key
    return caught.value.reason


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.part"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "of the user" / "cells"


@pytest.fixture
def store(folder: Path) -> CacheStore:
    return make_store(folder)


# ---- what is written is read ----


@pytest.mark.parametrize(("n_bytes", "n_tokens"), [(0, 0), (1, 5000), (SMALL, 1), (3 * MIB, 5000)])
def test_read_gives_what_was_written(folder: Path, n_bytes: int, n_tokens: int) -> None:
    store, written = make_store(folder, 4 * MIB), cells(n_bytes, n_tokens=n_tokens)
    store.write("a", written, F16)
    assert same(store.read("a", F16), written)
    assert store.verify(only(store)) is None


def test_read_of_a_large_file_takes_several_pieces(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cbatch.cache.cell_file, "_PIECE", 64)
    written = cells(SMALL + 1)
    store.write("a", written, F16)
    assert same(store.read("a", F16), written)
    assert store.verify(only(store)) is None


def test_system_that_writes_less_than_asked_loses_nothing(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:37]))
    written = cells()
    store.write("a", written, F16)
    assert same(store.read("a", F16), written)


def test_cells_may_be_read_only_or_every_other_byte_of_something(store: CacheStore) -> None:
    written = cells()
    written.data.flags.writeable = False
    store.write("a", written, F16)
    assert same(store.read("a", F16), written)
    strided = CachedCells(written.tokens[::2], 1, written.data[::2])
    store.write("a", strided, F16)
    assert same(store.read("a", F16), strided)


def test_write_again_replaces(store: CacheStore) -> None:
    for seed in range(3):
        store.write("a", cells(seed=seed), F16)
    assert same(store.read("a", F16), cells(seed=2))
    assert keys(store) == ["a"]


def test_fresh_store_creates_nothing(store: CacheStore, folder: Path) -> None:
    assert store.files() == []
    assert store.remove("a") == store.remove_all() == 0
    assert fails(store) == "no cells are saved under this key"
    assert not folder.exists()


def test_reading_a_large_file_needs_its_size_once(folder: Path) -> None:
    store, n_bytes = make_store(folder, 64 * MIB), 32 * MIB
    store.write("a", CachedCells(range(9), 9, np.ones(n_bytes, np.uint8)), F16)
    tracemalloc.start()
    try:
        store.read("a", F16)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * n_bytes
        tracemalloc.reset_peak()
        assert store.verify(only(store)) is None
        assert tracemalloc.get_traced_memory()[1] < n_bytes / 2
    finally:
        tracemalloc.stop()


def test_writing_a_large_file_copies_no_cells(folder: Path) -> None:
    store, written = make_store(folder, 64 * MIB), cells(32 * MIB)
    tracemalloc.start()
    try:
        store.write("a", written, F16)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


# ---- names ----

NASTY = [
    "../../etc/passwd", "/etc/passwd", ".", "..", "", "a/b", "a\\b", "nul\0l", "\x1b[2J", "\n", "é\u202eb", "\ud800",
    "\ud83d\ude00", "😀", "CON", " ", "k" * 1024, "🐈" * 1024,
]  # fmt: skip


def test_any_text_is_a_key_and_names_a_file_of_the_folder(store: CacheStore, folder: Path) -> None:
    for seed, key in enumerate(NASTY):
        store.write(key, cells(seed=seed), F16)
    for seed, key in enumerate(NASTY):
        assert same(store.read(key, F16), cells(seed=seed))
    assert keys(store) == NASTY[::-1]
    assert [path.name for path in folder.parent.iterdir()] == ["cells"]
    name = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.cells")
    assert all(name.fullmatch(path.name) for path in folder.iterdir())
    assert [store.remove(key) for key in NASTY] == [1] * len(NASTY)
    assert list(folder.iterdir()) == []


@settings(max_examples=examples(30))
@given(st.text(st.characters()), st.dictionaries(st.text(st.characters()), st.text(), max_size=3))
def test_any_key_and_fingerprint_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, key: str, fingerprint: dict[str, str]
) -> None:
    store = make_store(tmp_path_factory.mktemp("cells"))
    store.write(key, cells(), fingerprint)
    assert same(store.read(key, dict(reversed(fingerprint.items()))), cells())
    assert (only(store).key, only(store).fingerprint) == (key, fingerprint)


def test_default_folder_is_among_the_users_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cells_folder().parts[-2:] == ("cbatch", "cells")
    if sys.platform == "linux":
        assert cells_folder() == tmp_path / "cbatch" / "cells"


@pytest.mark.skipif(sys.platform == "win32", reason="homes are found by another variable")
def test_folder_in_the_home_is_found_however_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CBATCH_CACHE_DIR", "~/named")
    assert cells_folder() == tmp_path / "named"
    assert cells_folder(Path("~/x")) == cells_folder("~/x") == tmp_path / "x"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom nobody knows, as in some containers."""
    for name in ("HOME", "XDG_CACHE_HOME", "CBATCH_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@pytest.mark.skipif(sys.platform != "linux", reason="caches are elsewhere")
def test_folder_of_a_user_without_a_home_is_refused(homeless: None) -> None:
    with pytest.raises(ConfigError, match=r"give cache_dir: .* home"):
        cells_folder()


@pytest.mark.skipif(sys.platform != "linux", reason="caches are elsewhere")
def test_user_without_a_home_runs_what_needs_no_folder_and_is_told_else(
    homeless: None,
) -> None:
    memory = KvCapabilities("partitioned", 128, can_save=True, can_copy=True)
    with Engine(FakeBackend(2, 64, 64, memory=memory), threaded=False) as engine:
        assert engine.submit("a", options={"max_tokens": 1}).result().warnings == ()
        keyed = engine.submit("a", options={"max_tokens": 1, "cache_key": "k", "save_cache": True})
        assert all("give cache_dir" in w for w in keyed.result().warnings)
        assert keyed.result().warnings


def test_named_folder_in_a_home_that_is_not_there_is_refused(
    homeless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBATCH_CACHE_DIR", "~/cells")
    with pytest.raises(ConfigError, match="cache_dir='~/cells'"):
        Engine(FakeBackend(2, 64, 64), threaded=False).open()


def test_store_and_its_files_depend_on_few_modules_of_the_face() -> None:
    assert (inside("cache.store"), inside("cache.cell_file")) == (
        {"errors", "cache.cell_file", "support.folders", "support.logs"},
        {"errors"},
    )


# ---- fingerprints ----


def test_one_key_of_two_fingerprints_is_two_files(store: CacheStore) -> None:
    store.write("a", cells(seed=1), F16)
    store.write("a", cells(seed=2), Q8)
    assert same(store.read("a", F16), cells(seed=1))
    assert same(store.read("a", Q8), cells(seed=2))
    assert len(store.files()) == len(store.files("a")) == 2
    assert store.files("b") == []
    assert store.remove("a") == 2


def test_key_of_another_fingerprint_names_each_difference(store: CacheStore) -> None:
    store.write("a", cells(), F16)
    assert fails(store, fingerprint=Q8) == "type_k is q8_0, but was f16 when the cells were saved"
    other = {"model": "sha256:cd", "type_k": "f16", "lora": "x"}
    assert fails(store, fingerprint=other) == (
        "lora is x, but was nothing when the cells were saved; "
        "model is sha256:cd, but was sha256:ab when the cells were saved"
    )
    assert fails(store, fingerprint={"model": "sha256:ab"}) == (
        "type_k is nothing, but was f16 when the cells were saved"
    )


def test_key_of_several_fingerprints_names_the_nearest(store: CacheStore) -> None:
    for fingerprint in ({"model": "x", "type_k": "f32"}, F16, {"model": "x", "type_k": "q4_0"}):
        store.write("a", cells(), fingerprint)
    assert fails(store, fingerprint=Q8) == "type_k is q8_0, but was f16 when the cells were saved"


def test_file_that_came_while_it_was_missed_differs_in_nothing(
    store: CacheStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def miss_once(path: Path) -> NoReturn:
        monkeypatch.undo()
        raise FileNotFoundError(path)

    def reason() -> str:
        monkeypatch.setattr(cbatch.cache.store, "opened_file", miss_once)
        return fails(store)

    store.write("a", cells(), F16)
    assert reason() == "no cells are saved under this key"
    store.write("a", cells(), Q8)
    assert reason() == "type_k is f16, but was q8_0 when the cells were saved"


def test_values_in_an_error_cannot_command_a_terminal(store: CacheStore) -> None:
    store.write("a", cells(), {"type_k\n": "\x1b[2J"})
    assert (
        fails(store, fingerprint={})
        == r"'type_k\n' is nothing, but was '\x1b[2J' when the cells were saved"
    )


def test_other_fingerprint_in_a_bad_file_is_as_none(store: CacheStore, folder: Path) -> None:
    store.write("a", cells(), F16)
    only(store).path.write_bytes(b"x")
    assert fails(store, fingerprint=Q8) == "no cells are saved under this key"


# ---- what is refused ----


def test_fingerprint_beyond_the_header_is_refused(store: CacheStore, folder: Path) -> None:
    store.write("a", cells(), {"model": "x" * 65_000})
    assert same(store.read("a", {"model": "x" * 65_000}), cells())
    with pytest.raises(CacheError, match=r"more than 65,536 bytes"):
        store.write("b", cells(), {"model": "x" * 65_536})
    assert keys(store) == ["a"]


def test_file_larger_than_the_limit_is_refused_before_anything_is_written(folder: Path) -> None:
    make_store(folder).write("a", cells(), F16)
    size = only(make_store(folder)).n_bytes
    exact, tight = make_store(folder, size), make_store(folder, size - 1)
    exact.write("a", cells(), F16)
    before = list(folder.iterdir())
    with pytest.raises(
        CacheError, match=rf"{size:,} bytes, more than the limit of {size - 1:,} .* cache_mib"
    ):
        tight.write("a", cells(seed=1), F16)
    assert list(folder.iterdir()) == before
    assert same(tight.read("a", F16), cells())


# ---- damage ----


def test_every_cut_is_an_error(store: CacheStore) -> None:
    store.write("a", cells(40), F16)
    path = only(store).path
    data = path.read_bytes()
    for n_bytes in range(len(data)):
        path.write_bytes(data[:n_bytes])
        assert fails(store)
        assert store.verify(only(store))
    path.write_bytes(data)
    assert same(store.read("a", F16), cells(40))


def test_every_flipped_byte_is_an_error(store: CacheStore) -> None:
    store.write("a", cells(40), F16)
    path = only(store).path
    data = path.read_bytes()
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 0x20]) + data[i + 1 :])
        assert fails(store)
        assert store.verify(only(store))
        assert bool(only(store).problem) is (i < len(data) - 40 - 32)  # all but the cells


def forged(header: object, *, tokens: bytes = b"", n_data: int = 0, version: int = 1) -> bytes:
    """Return a file with right digests of whatever header this is."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = b"\x93CBCELLS" + struct.pack("<II", version, len(encoded)) + encoded + tokens
    head += hashlib.sha256(head).digest() + bytes(n_data)
    return head + hashlib.sha256(head).digest()


GOOD = {"key": "a", "fingerprint": F16, "n_tokens": 1, "n_prompt": 1, "n_data": 3}
TOKEN = struct.pack("<i", 5)


def put(folder: Path, data: bytes) -> None:
    """Put a file of these bytes where the cells of ("a", F16) are."""
    path = folder / file_name("a", F16)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_forged_file_is_as_one_that_was_written(store: CacheStore, folder: Path) -> None:
    put(folder, forged({**GOOD, "later": 1}, tokens=TOKEN, n_data=3))
    found = store.read("a", F16)
    assert (found.tokens, found.n_prompt, found.data.tolist()) == ([5], 1, [0, 0, 0])


@pytest.mark.parametrize(
    "header",
    [
        b"", b"null", b"[]", b"{}", b"{", b"\xff\xfe", b"[" * 60_000, b'{"n_tokens":' + b"9" * 60_000 + b"}",
        json.dumps(GOOD).encode().replace(b'"n_data": 3', b'"n_data": ' + b"9" * 4300),
        json.dumps(GOOD).encode().replace(b'"n_tokens": 1', b'"n_tokens": ' + b"9" * 4299),
        json.dumps(GOOD).encode().replace(b'"n_data": 3', b'"n_data": 1e999'),
        {**GOOD, "n_tokens": -1}, {**GOOD, "n_data": -3}, {**GOOD, "n_prompt": 2}, {**GOOD, "n_prompt": -1},
        {**GOOD, "n_tokens": 1.0}, {**GOOD, "n_tokens": "1"}, {**GOOD, "n_data": None}, {**GOOD, "key": 7},
        {**GOOD, "fingerprint": []}, {**GOOD, "fingerprint": {"model": 1}},
        {k: v for k, v in GOOD.items() if k != "n_prompt"},
    ],
    ids=lambda header: str(header)[:60],
)  # fmt: skip
def test_header_that_says_nonsense_is_an_error(
    store: CacheStore, folder: Path, header: object
) -> None:
    put(folder, forged(header, tokens=TOKEN, n_data=3))
    assert fails(store).endswith("has a damaged header")
    assert only(store).problem == store.verify(only(store)) == "has a damaged header"


WITH_CHECKPOINT = {**GOOD, "n_checkpoint": 1, "n_checkpoint_data": 2}


def test_checkpoint_is_in_a_file_of_its_own_version(store: CacheStore, folder: Path) -> None:
    for n, written in enumerate((cells(), with_checkpoint(cells())), 1):
        store.write("a", written, F16)
        assert same(store.read("a", F16), written)
        assert store.verify(only(store)) is None
        assert (folder / file_name("a", F16)).read_bytes()[8] == n
    path = folder / file_name("a", F16)
    data = path.read_bytes()
    path.write_bytes(data[:-40] + b"\0" + data[-39:])  # in the checkpoint
    assert "digest" in fails(store)
    assert "digest" in str(store.verify(only(store)))
    put(folder, forged(WITH_CHECKPOINT, tokens=TOKEN, n_data=5, version=2))
    found = store.read("a", F16)
    assert found.checkpoint is not None
    assert (found.data.tolist(), found.checkpoint.tolist()) == ([0, 0, 0], [0, 0])


@pytest.mark.parametrize(
    "header",
    [
        GOOD,
        {**WITH_CHECKPOINT, "n_checkpoint": 0},
        {**WITH_CHECKPOINT, "n_checkpoint": 2},
        {**WITH_CHECKPOINT, "n_checkpoint": "1"},
        {**WITH_CHECKPOINT, "n_checkpoint_data": -2},
        {**WITH_CHECKPOINT, "n_checkpoint_data": None},
    ],
)
def test_checkpoint_that_says_nonsense_is_an_error(
    store: CacheStore, folder: Path, header: object
) -> None:
    put(folder, forged(header, tokens=TOKEN, n_data=5, version=2))
    assert fails(store).endswith("has a damaged header")
    assert only(store).problem == store.verify(only(store)) == "has a damaged header"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a file of cells"),
        (b"GGUF" + bytes(400), "is not a file of cells"),
        (forged(GOOD, tokens=TOKEN, n_data=3, version=3), "is of version 3, but this cbatch reads versions 1 and 2"),
        (forged(GOOD, tokens=TOKEN, n_data=4), "bytes, but should have"),
        (forged(GOOD, tokens=TOKEN, n_data=2), "bytes, but should have"),
        (forged({**GOOD, "n_tokens": 2**62}, tokens=TOKEN, n_data=3), "bytes, but should have"),
        (forged({**GOOD, "n_data": 2**62}, tokens=TOKEN, n_data=3), "bytes, but should have"),
        (forged({**GOOD, "key": "b"}, tokens=TOKEN, n_data=3), "another key or fingerprint"),
        (forged({**GOOD, "fingerprint": Q8}, tokens=TOKEN, n_data=3), "another key or fingerprint"),
        (b"\x93CBCELLS" + struct.pack("<II", 1, 2**32 - 1) + bytes(99), "has a damaged header"),
        (b"\x93CBCELLS" + struct.pack("<II", 1, 200) + bytes(99), "is cut off"),
        (b"\x93CBCELLS" + struct.pack("<II", 1, 2**16 + 1) + bytes(2**17), "has a damaged header"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_file_that_is_not_what_it_says_is_an_error(
    store: CacheStore, folder: Path, data: bytes, words: str
) -> None:
    put(folder, data)
    assert words in fails(store)
    assert words in (only(store).problem or "")


def test_file_beyond_the_memory_is_an_error(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", cells(), F16)
    take = cbatch.cache.cell_file.FileReader.take

    def refuse(reader: Any, n_bytes: int) -> Any:
        if n_bytes == SMALL:
            raise MemoryError
        return take(reader, n_bytes)

    monkeypatch.setattr(cbatch.cache.cell_file.FileReader, "take", refuse)
    assert fails(store).endswith("is larger than the free memory")


def test_file_cut_off_while_it_is_read_is_an_error(
    store: CacheStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", cells(100_000), F16)
    head = cbatch.cache.cell_file.FileReader.head

    def cut(reader: Any) -> Any:
        found = head(reader)
        os.truncate(folder / file_name("a", F16), 300)
        return found

    monkeypatch.setattr(cbatch.cache.cell_file.FileReader, "head", cut)
    assert fails(store).endswith("was cut off while it was read")


def as_fifo(path: Path) -> None:
    os.mkfifo(path)


def as_link(path: Path) -> None:
    target = path.rename(path.parent / "elsewhere")
    path.symlink_to(target)


def as_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (as_fifo, "is not a regular file"),
        (as_link, "is a symbolic link"),
        (as_folder, "is not a regular file"),
    ],
)
def test_what_is_no_file_is_an_error_and_never_waited_for(
    store: CacheStore, folder: Path, make: Callable[[Path], None], words: str
) -> None:
    store.write("a", cells(), F16)
    path = only(store).path
    if make is not as_link:
        path.unlink()
    make(path)
    assert fails(store).endswith(words)
    assert only(store).problem == store.verify(only(store)) == words


def test_write_replaces_a_link_and_not_what_it_leads_to(store: CacheStore, tmp_path: Path) -> None:
    store.write("a", cells(), F16)
    path, precious = only(store).path, tmp_path / "precious"
    precious.write_text("mine")
    path.unlink()
    path.symlink_to(precious)
    store.write("a", cells(seed=1), F16)
    assert same(store.read("a", F16), cells(seed=1))
    assert precious.read_text() == "mine"


def test_write_over_a_folder_is_an_error(store: CacheStore, folder: Path) -> None:
    path = folder / file_name("a", F16)
    path.mkdir(parents=True)
    with pytest.raises(CacheError, match="cannot be written"):
        store.write("a", cells(), F16)
    with pytest.raises(CacheError, match="cannot be removed"):
        store.remove("a")
    with pytest.raises(CacheError, match="cannot be removed"):
        store.remove_all()
    assert parts(folder) == []


def test_descriptors_are_closed_whatever_happens(store: CacheStore, folder: Path) -> None:
    store.write("a", cells(), F16)
    store.write("b", cells(), F16)
    put(folder, b"bad")
    n_before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        store.read("b", F16)
        fails(store)
        fails(store, "c")
        store.files()
        store.write("b", cells(), F16)
    assert len(os.listdir("/dev/fd")) <= n_before + 3


# ---- private, whole ----


def test_folder_and_files_are_the_owners_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        make_store(folder).write("a", cells(), F16)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_file_that_others_may_write_is_refused_until_they_may_not(
    store: CacheStore, folder: Path, mode: int
) -> None:
    store.write("a", cells(), F16)
    [path] = folder.iterdir()
    path.chmod(mode)
    assert "is writable by others" in fails(store)
    [file] = store.files()
    assert "chmod go-w" in (file.problem or "")
    path.chmod(mode & ~0o022)
    store.read("a", F16)


def test_file_of_another_user_is_refused(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", cells(), F16)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "belongs to another user" in fails(store)


def test_file_is_private_from_its_first_byte(
    store: CacheStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    write = os.write

    def look(fd: int, data: Any) -> int:
        modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return write(fd, data)

    monkeypatch.setattr(os, "write", look)
    store.write("a", cells(), F16)
    assert set(modes) == {0o600}


def test_write_syncs_the_file_then_renames_it_then_syncs_the_folder(
    store: CacheStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(fd: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        done.append("folder" if is_folder else f"file of {os.fstat(fd).st_size}")
        fsync(fd)

    def note_replace(path: Path, target: Path) -> Path:
        assert path.parent == target.parent == folder
        done.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    store.write("a", cells(), F16)
    assert done == [f"file of {only(store).n_bytes}", "rename", "folder"]


def test_folder_that_cannot_be_synced_harms_nothing(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    store.write("a", cells(), F16)
    assert same(store.read("a", F16), cells())


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("write", errno.ENOSPC, "No space left on device: make room there, remove files with `cbatch cache rm`"),
        ("write", errno.EDQUOT, "or give another folder (cache_dir)"),
        ("fsync", errno.EIO, "Input/output error"),
        ("open", errno.EACCES, "Permission denied"),
        ("mkdir", errno.EACCES, "Permission denied"),
        ("scandir", errno.EACCES, "Permission denied"),
    ],
)  # fmt: skip
def test_write_that_fails_says_why_and_leaves_the_former_file(
    store: CacheStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    words: str,
) -> None:
    store.write("a", cells(), F16)

    def refuse(*args: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(Path if call == "mkdir" else os, call, refuse)
        with pytest.raises(CacheError) as caught:
            store.write("a", cells(seed=1), F16)
    assert "cannot be written: " in caught.value.reason
    assert caught.value.where == str(folder)
    assert words in caught.value.reason
    assert isinstance(caught.value.__cause__, OSError)
    assert same(store.read("a", F16), cells())
    assert parts(folder) == []


def test_write_is_done_though_the_folder_cannot_be_listed_behind_it(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.write("a", cells(), F16)
    scandir, replace = os.scandir, Path.replace

    def replace_and_run_out(path: Path, target: Path) -> Path:
        monkeypatch.setattr(os, "scandir", fails_with(errno.EMFILE))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_and_run_out)
    store.write("a", cells(seed=1), F16)
    assert "cannot be listed" in caplog.text
    monkeypatch.setattr(os, "scandir", scandir)
    assert same(store.read("a", F16), cells(seed=1))


def fails_with(code: int) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


def test_folder_that_is_a_file_is_an_error_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    store = make_store(path)
    for call in (
        lambda: store.write("a", cells(), F16),
        lambda: store.read("a", F16),
        lambda: store.files(),
        lambda: store.remove("a"),
        lambda: store.remove_all(),
    ):
        with pytest.raises(CacheError, match="cannot be"):
            call()


def test_interrupted_write_leaves_the_former_file(
    store: CacheStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", cells(), F16)

    def press(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", press)
        with pytest.raises(KeyboardInterrupt):
            store.write("a", cells(seed=1), F16)
    assert same(store.read("a", F16), cells())
    assert parts(folder) == []


CHILD = """
import os, sys, time
from pathlib import Path
import numpy as np
from cbatch.core.plan import KvCapabilities
from cbatch.engine import Engine
from cbatch.errors import CacheError, ConfigError
from cbatch.cache.cell_file import CachedCells
from cbatch.cache.store import CacheStore
folder, how = Path(sys.argv[1]), sys.argv[2]
new = CachedCells(range(5), 5, np.ones(100_000, np.uint8))
really = getattr(os, how, None)
def stop(*args, **more):
    if how == "write":
        really(args[0], args[1][: len(args[1]) // 2])
    print("here", flush=True)
    time.sleep(600)
if how == "limit":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
elif how == "replace":
    Path.replace = stop
else:
    setattr(os, how, stop)
try:
    CacheStore(folder, 2**20).write("a", new, {"model": "sha256:ab", "type_k": "f16"})
except CacheError as error:
    print(error)
"""


def start_child(folder: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), how],
        stdout=subprocess.PIPE,
    )


@pytest.mark.real
@pytest.mark.parametrize("how", ["write", "replace"])
def test_killed_write_leaves_the_former_file(store: CacheStore, folder: Path, how: str) -> None:
    store.write("a", cells(), F16)
    with start_child(folder, how) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert same(store.read("a", F16), cells())
    assert keys(store) == ["a"]
    assert len(parts(folder)) == 1


@pytest.mark.real
def test_file_that_may_not_grow_so_far_leaves_the_former_one(
    store: CacheStore, folder: Path
) -> None:
    store.write("a", cells(), F16)
    with start_child(folder, "limit") as child:
        said, _ = child.communicate()
    assert child.returncode == 0
    assert b"File too large: make room there" in said
    assert same(store.read("a", F16), cells())
    assert parts(folder) == []


def test_left_over_of_a_killed_write_goes_after_an_hour(folder: Path) -> None:
    clock = Clock()
    store = make_store(folder, clock=clock)
    store.write("a", cells(), F16)
    path = only(store).path
    old = folder / f".{path.name}.0123456789abcdef.part"
    young, foreign = old.with_name(f".{path.name}.fedcba9876543210.part"), folder / ".note.part"
    for left, age_s in ((old, 3700), (young, 3500), (foreign, 10**6)):
        left.write_bytes(b"half")
        os.utime(left, (clock.now_s - age_s, clock.now_s - age_s))
    store.write("a", cells(), F16)
    assert parts(folder) == sorted([young, foreign])
    clock.now_s += 200
    store.write("b", cells(), F16)
    assert parts(folder) == [foreign]


# ---- the limit ----


def size_of_one(folder: Path) -> int:
    store = make_store(folder.with_name("other"))
    store.write("a", cells(), F16)
    return only(store).n_bytes


@pytest.mark.parametrize("n_room", [1, 3])
def test_least_recently_used_go_first(folder: Path, n_room: int) -> None:
    store = make_store(folder, n_room * size_of_one(folder))
    for key in "abcde":
        store.write(key, cells(), F16)
    assert keys(store) == list("edcba")[:n_room]


def test_one_byte_less_than_all_need_removes_one(folder: Path) -> None:
    store = make_store(folder, 3 * size_of_one(folder) - 1)
    for key in "abc":
        store.write(key, cells(), F16)
    assert keys(store) == ["c", "b"]


def test_reading_is_use_and_looking_is_not(folder: Path) -> None:
    store = make_store(folder, 3 * size_of_one(folder))
    for key in "abc":
        store.write(key, cells(), F16)
    store.read("a", F16)
    assert store.verify(store.files("b")[0]) is None
    assert keys(store) == ["a", "c", "b"]
    store.write("d", cells(), F16)
    assert keys(store) == ["d", "a", "c"]


def test_file_just_written_stays_also_where_it_is_the_oldest(folder: Path) -> None:
    clock = Clock()
    store = make_store(folder, 2 * size_of_one(folder), clock)
    for key in "ab":
        store.write(key, cells(), F16)
    clock.now_s = 1.0  # somebody set the clock back
    store.write("c", cells(), F16)
    assert keys(store) == ["b", "c"]


def test_what_is_not_ours_is_neither_counted_nor_removed(folder: Path) -> None:
    store = make_store(folder, 2 * size_of_one(folder))
    store.write("a", cells(), F16)
    for name in ("note.txt", "x.cells", f"{only(store).path.name}.bak"):
        (folder / name).write_bytes(bytes(10 * MIB))
        os.utime(folder / name, (0, 0))
    for key in "bc":
        store.write(key, cells(), F16)
    assert keys(store) == ["c", "b"]
    assert len(list(folder.iterdir())) == 5
    assert store.remove_all() == 2
    assert len(list(folder.iterdir())) == 3


def test_what_is_no_file_is_neither_counted_nor_removed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(folder, 2 * size_of_one(folder))
    fifo, inner = folder / file_name("x", F16), folder / file_name("y", F16)
    inner.mkdir(parents=True)
    os.mkfifo(fifo)
    for path in (fifo, inner):
        os.utime(path, (0, 0))
    for key in "abc":
        store.write(key, cells(), F16)
    assert [file.key for file in store.files() if file.problem is None] == ["c", "b"]
    assert fifo.is_fifo()
    assert inner.is_dir()
    assert caplog.text == ""


def test_file_that_may_not_be_removed_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(folder, 2 * size_of_one(folder))
    for key in "ab":
        store.write(key, cells(), F16)
    kept, unlink = folder / file_name("a", F16), Path.unlink

    def refuse(path: Path, **more: Any) -> None:
        if path == kept:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        unlink(path, **more)

    monkeypatch.setattr(Path, "unlink", refuse)
    store.write("c", cells(), F16)
    assert keys(store) == ["c", "a"]
    assert f"{kept} cannot be removed: Permission denied" in caplog.text
    with pytest.raises(CacheError, match="cannot be removed: Permission denied"):
        store.remove("a")


# ---- company ----


def vanish_after_scan(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let files vanish between their listing and what comes next."""
    found = CacheStore._found

    def remove(store: CacheStore, *args: Any) -> Any:
        entries = found(store, *args)
        for entry in entries:
            if entry.name in names:
                Path(entry).unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(CacheStore, "_found", remove)


def test_file_that_vanishes_meanwhile_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(folder, 2 * size_of_one(folder))
    for key in "ab":
        store.write(key, cells(), F16)
    gone = store.files("a")[0]
    vanish_after_scan(monkeypatch, gone.path.name)
    assert keys(store) == ["b"]
    assert store.verify(gone) is None
    store.write("c", cells(), F16)
    assert keys(store) == ["c", "b"]
    store.write("a", cells(), F16)
    assert store.remove("a") == 0


def test_trim_takes_one_that_vanishes_for_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(folder, 2 * size_of_one(folder))
    for key in "ab":
        store.write(key, cells(), F16)
    unlink = Path.unlink

    def be_late(path: Path, **more: Any) -> None:
        unlink(path, missing_ok=True)
        unlink(path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", be_late)
        store.write("c", cells(), F16)
    assert keys(store) == ["c", "b"]


def test_reader_keeps_the_file_that_is_replaced_meanwhile(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", cells(), F16)
    head = cbatch.cache.cell_file.FileReader.head

    def replace(reader: Any) -> Any:
        monkeypatch.setattr(cbatch.cache.cell_file.FileReader, "head", head)
        store.write("a", cells(seed=1), F16)
        return head(reader)

    monkeypatch.setattr(cbatch.cache.cell_file.FileReader, "head", replace)
    assert same(store.read("a", F16), cells())
    assert same(store.read("a", F16), cells(seed=1))


def test_use_that_may_not_be_marked_harms_no_reading(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", cells(), F16)

    def refuse(*args: object, **more: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "utime", refuse)
    assert same(store.read("a", F16), cells())


def test_threads_that_write_in_a_small_folder_each_find_their_own(folder: Path) -> None:
    store = CacheStore(folder, 2 * size_of_one(folder))
    start = threading.Barrier(4)

    def write(i: int) -> None:
        start.wait()
        for _ in range(20):
            store.write(f"{i}", cells(seed=i), F16)

    with ThreadPoolExecutor(4) as pool:
        for task in [pool.submit(write, i) for i in range(4)]:
            task.result()
    assert len(keys(store)) == 2


# ---- listing, removing ----


def test_listing_tells_what_there_is(store: CacheStore, folder: Path) -> None:
    store.write("a", cells(), F16)
    file = only(store)
    assert (file.key, file.n_tokens, file.fingerprint, file.problem) == ("a", 7, F16, None)
    assert file.used_at == 1e9 + 1  # the first look at the clock
    assert file.n_bytes == file.path.stat().st_size
    assert file.path.parent == folder


def test_bad_file_is_listed_with_its_problem_and_can_be_removed_by_its_key(
    store: CacheStore, folder: Path
) -> None:
    store.write("a", cells(), F16)
    store.write("b", cells(), F16)
    path = folder / file_name("a", F16)
    path.write_bytes(path.read_bytes()[:-1])
    [bad] = store.files("a")
    assert bad in store.files()
    assert (bad.key, bad.n_tokens, bad.fingerprint) == ("", 0, {})
    assert "bytes, but should have" in (bad.problem or "")
    assert store.remove("a") == 1
    assert keys(store) == ["b"]


def test_remove_all_takes_unfinished_writes_too(store: CacheStore, folder: Path) -> None:
    store.write("a", cells(), F16)
    store.write("b", cells(), F16)
    part = folder / f".{file_name('a', F16)}.0123456789abcdef.part"
    part.write_bytes(b"half")
    assert store.remove_all() == 3
    assert list(folder.iterdir()) == []


def test_what_cannot_be_removed_is_named_and_the_others_are_gone(
    store: CacheStore, folder: Path
) -> None:
    for key in "abc":
        store.write(key, cells(), F16)
    folders = [folder / f"{n:032x}-{n:032x}.cells" for n in (0, 16**32 - 1)]
    for path in folders:
        path.mkdir()
    with pytest.raises(
        CacheError, match=r"cannot be removed: .*; .* cannot be removed: "
    ) as caught:
        store.remove_all()
    assert all(str(path) in str(caught.value) for path in folders)
    assert sorted(folder.iterdir()) == folders
