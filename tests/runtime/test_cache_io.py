"""The thread that reads and writes files: whoever asked is told, whatever happens, and a reader before a writer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cbatch.backend.fake import FakeBackend, FakeVocab
from cbatch.cache.cell_file import CachedCells
from cbatch.cache.store import CacheStore
from cbatch.core.batcher import MultiRequestBatcher
from cbatch.core.driver import SequenceDriver, Wait
from cbatch.core.saved_cells import ToStore
from cbatch.runtime.cache_io import CacheIo
from cbatch.runtime.prompt_fit import set_prompt
from cbatch.runtime.wants import CacheEntry, CacheRead, CacheRef, SequenceWants
from tests.helpers import make_request
from tests.places import text_of
from tests.runtime.backends import PATIENCE_S, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cbatch.cache.cell_file import Fingerprint
    from cbatch.runtime.cache_io import Post
    from cbatch.runtime.wants import Want

DATA = np.zeros(80, np.uint8)
CHECKPOINT = np.ones(32, np.uint8)


class Told(SequenceWants):
    """Is told what came of wants."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def resolve(self, want: Want, found: object, now: float) -> list[Any]:
        self.told.append(found)
        return []


class Forgetful(MultiRequestBatcher):
    """Stands for a batcher."""

    def __init__(self) -> None:
        pass


class Exporting(FakeBackend):
    """Has the cells of every slot, unless they are lost."""

    is_lost = False

    def export_state(self, key: int, *, is_kept: bool = False) -> Any:
        assert is_kept == (key < 0)  # others go on from checkpoints
        return None if self.is_lost else CHECKPOINT if key == -1 else DATA if key == 0 else None


@dataclass(eq=False)
class Owner:
    """Asks a `CacheIo`, and is told."""

    cache_io: CacheIo
    told: Told
    posted: SimpleQueue[Callable[[], object]]

    def read(self, key: str, *, is_wanted: bool = True) -> None:
        self.cache_io.order(read(key, is_wanted=is_wanted))

    def write(self, key: str) -> None:
        self.cache_io.order(stored(key))

    def take(self, n: int = 1) -> list[Any]:
        """Wait until so many answers are there."""
        for _ in range(n):
            self.posted.get(timeout=PATIENCE_S)()
        return self.told.told[-n:]


def read(key: str, *, is_wanted: bool = True) -> CacheRead:
    driver = stored(key).driver
    driver.waits_for = Wait.CACHE
    drivers = [driver] if is_wanted else []
    return CacheRead(CacheRef(key), drivers, lambda *_: 10)


def stored(key: str) -> ToStore:
    request = make_request(key, text_of(10), cache_key=key, save_cache=True)
    driver = SequenceDriver.of(request, FakeVocab(320).piece, 0.0)
    set_prompt(driver, text_of(10), 64)
    return ToStore(driver, 0, 10)


def make_owner(folder: Path, *, is_threaded: bool, post: Post | None = None) -> Owner:
    posted, told = SimpleQueue[Any](), Told()
    store = CacheStore(folder, 2**40)
    cache_io = CacheIo(
        store,
        Exporting(),
        Forgetful(),
        told,
        lambda: 0.0,
        post or posted.put,
        is_threaded=is_threaded,
    )
    return Owner(cache_io, told, posted)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """Return the owner of a `CacheIo` with a thread."""
    made = make_owner(tmp_path, is_threaded=True)
    yield made
    in_thread(made.cache_io.close)()


@pytest.fixture
def by_hand(tmp_path: Path) -> Owner:
    """Return the owner of a `CacheIo` without a thread."""
    return make_owner(tmp_path, is_threaded=False)


def raises(error: BaseException) -> Callable[..., Any]:
    def broken(*_: object) -> None:
        raise error

    return broken


@pytest.mark.parametrize(("key", "n_there"), [(-1, 4), (-2, 0)])
def test_checkpoint_is_written_beside_the_cells_unless_it_is_gone(
    by_hand: Owner, monkeypatch: pytest.MonkeyPatch, key: int, n_there: int
) -> None:
    by_hand.cache_io.order(replace(stored("k"), checkpoint=(key, 4)))
    assert by_hand.take() == [CacheEntry(text_of(10), 10, n_there)]
    loads = [(stored("k").driver, 7)]
    monkeypatch.setattr(Told, "resolve", lambda *_: loads)
    imported: list[tuple[int, list[int], int]] = []
    monkeypatch.setattr(
        Exporting, "import_state", lambda _, key, data, n: imported.append((key, data.tolist(), n))
    )
    for n in filter(None, (n_there, 10)):
        by_hand.cache_io.order(replace(read("k"), n_usable=lambda *_, n=n: n))
        by_hand.take()
    expected = {4: CHECKPOINT, 10: DATA}
    assert imported == [(7, expected[n].tolist(), n) for n in (n_there, 10) if n]


def test_checkpoint_that_finds_no_memory_is_dropped_and_refuses_nobody(
    by_hand: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand.write("k")
    by_hand.take()
    dropped: list[int] = []
    driver = stored("k").driver
    monkeypatch.setattr(Told, "resolve", lambda *_: [(driver, 7), (driver, -3)])
    monkeypatch.setattr(Forgetful, "drop_checkpoint", lambda _, key: dropped.append(key))

    def import_state(_: object, key: int, *__: object) -> None:
        if key < 0:
            raise MemoryError

    monkeypatch.setattr(Exporting, "import_state", import_state)
    by_hand.read("k")
    by_hand.take()
    assert (dropped, driver.error, driver.warnings) == ([-3], None, [])


# ---- whatever happens, whoever asked is told ----


def test_write_without_memory_for_its_tokens_is_told_the_next_read_done(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CachedCells, "__init__", raises(MemoryError()))
    owner.write("k")
    [problem] = owner.take()
    assert problem == "the cells were not saved: MemoryError"
    owner.read("other")
    [missing] = owner.take()
    assert missing.is_missing


def test_answer_that_cannot_be_posted_leaves_the_thread_to_the_next(tmp_path: Path) -> None:
    posted = SimpleQueue[Any]()
    posts = iter([raises(RuntimeError("the engine is closed")), posted.put])
    made = make_owner(tmp_path, is_threaded=True, post=lambda c: next(posts)(c))
    made.write("lost")
    made.write("k")
    posted.get(timeout=PATIENCE_S)()
    assert made.told.told == [CacheEntry(text_of(10), 10)]
    in_thread(made.cache_io.close)()


# ---- what comes first ----


@pytest.fixture
def first_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """Stop writing until it is let go; return what lets it go, and the files as they are done."""
    arrived, go, done = threading.Event(), threading.Event(), list[str]()
    read, write = CacheStore.read, CacheStore.write

    def noted(store: CacheStore, key: str, fingerprint: Fingerprint) -> CachedCells:
        done.append(f"read {key}")
        return read(store, key, fingerprint)

    def gated(store: CacheStore, key: str, cells: CachedCells, fingerprint: Fingerprint) -> None:
        arrived.set()
        assert go.wait(PATIENCE_S)
        write(store, key, cells, fingerprint)
        done.append(f"write {key}")

    monkeypatch.setattr(CacheStore, "read", noted)
    monkeypatch.setattr(CacheStore, "write", gated)
    yield go, done
    go.set()


def test_reads_pass_writes_that_have_not_begun(
    owner: Owner, first_write: tuple[threading.Event, list[str]]
) -> None:
    go, done = first_write
    for key in "abc":
        owner.write(key)
    owner.read("d")
    owner.read("a")
    go.set()
    owner.take(5)
    # the first may have begun, or not
    assert [f for f in done if f != "write a"] == ["read d", "read a", "write b", "write c"]
