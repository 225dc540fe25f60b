"""Rows of pictures and sounds on disk: they stand in for encoding, and no file is trusted beyond what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cbatch
from cbatch.bench.synthetic_projector import write_projector
from cbatch.cache.cell_file import CachedCells
from cbatch.cache.store import CacheStore
from tests.backend.llama.test_pictures import GREEDY, chat, png
from tests.runtime.backends import all_results, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = [pytest.mark.real, pytest.mark.own_library]

ASKED = [chat("Look:", png(i), "What?") for i in (0, 1, 0)]


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("projectors") / "p.gguf"
    return write_projector(path, 64, kind="llava-tiles")


def answers(model: Path, **settings: Any) -> tuple[list[tuple[int, ...]], int]:
    """Return the tokens of each chat, and how many pictures were encoded."""
    with cbatch.load(model, parallel=2, ctx_per_seq=512, **settings) as engine:
        results = all_results(engine.run(ASKED, options=GREEDY))
        assert [r.error for r in results] == [None] * len(ASKED)
        return [r.token_ids for r in results], parts_of(engine).backend.projector.n_encoded


def test_rows_are_encoded_once_for_many_processes(
    showing_model: Path, projector: Path, tmp_path: Path
) -> None:
    without, n_encoded = answers(showing_model, mmproj=projector, cache_dir=tmp_path / "none")
    assert n_encoded == 2
    assert not (tmp_path / "none").exists()
    given = {"cache_dir": tmp_path, "cache_media": True}
    assert answers(showing_model, mmproj=projector, **given) == (without, 2)
    assert answers(showing_model, mmproj=projector, **given) == (without, 0)
    files = CacheStore(tmp_path, 0).files()
    assert [(f.key.partition(" ")[0], f.problem) for f in files] == [("picture", None)] * 2
    other = write_projector(tmp_path / "other.gguf", 64, kind="llava-tiles", seed=1)
    assert answers(showing_model, mmproj=other, **given)[1] == 2
    assert answers(showing_model, mmproj=projector, **given) == (without, 0)


def cut(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return data[:-4]


def of_no_numbers(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.full(data.size // 4, np.nan, np.float32).view(np.uint8)


@pytest.mark.parametrize("spoil", [cut, of_no_numbers, None])
def test_rows_that_do_not_fit_are_encoded_again_and_replaced(
    showing_model: Path,
    projector: Path,
    tmp_path: Path,
    spoil: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"mmproj": projector, "cache_dir": tmp_path, "cache_media": True}
    expected, _ = answers(showing_model, **given)
    store = CacheStore(tmp_path, 2**30)
    for file in store.files():
        if spoil is None:
            data = bytearray(file.path.read_bytes())
            data[-200] ^= 1
            file.path.write_bytes(data)
        else:
            cells = store.read(file.key, file.fingerprint)
            spoiled = CachedCells((), 0, spoil(cells.data))
            store.write(file.key, spoiled, file.fingerprint)
    assert answers(showing_model, **given) == (expected, 2)
    told = [r.getMessage() for r in caplog.records if "is encoded again" in r.getMessage()]
    assert len(told) == 2
    assert answers(showing_model, **given) == (expected, 0)


def test_rows_that_cannot_be_written_cost_no_answer(
    showing_model: Path, projector: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    given = {"cache_dir": tmp_path / "file" / "folder", "cache_media": True}
    assert answers(showing_model, mmproj=projector, **given)[1] == 2
    assert len([r for r in caplog.records if "was not saved on disk" in r.getMessage()]) == 2
