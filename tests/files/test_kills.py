"""A run may end anywhere: whatever is left is gone on with, and every item is there once."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.files.journals import records, run_pass
from tests.files.machine import LOSSES, STEPS, Loss, Machine
from tests.profiles import lines_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.real

N_PASSES = 4
N_ITEMS = 17


def undisturbed(folder: Path) -> list[dict[str, list[bytes]]]:
    """Do every pass, and keep the folder as it was before each; return what the files hold after each."""
    folder.mkdir()
    found = []
    for i_pass in range(N_PASSES):
        shutil.copytree(folder, folder.with_name(f"before-{i_pass}"))
        run_pass(folder, i_pass, N_ITEMS)
        found.append(records(folder))
    return found


def do_pass(folder: Path, i_pass: int) -> None:
    """Do a pass in small slices, waiting for the disk after each or only at the end."""
    run_pass(folder, i_pass, N_ITEMS, slice=4, sync_s=0 if i_pass % 2 else 1e9)


def test_passes_change_retry_and_repeat_ids(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "files")
    assert len({len(after["errors"]) for after in expected}) > 1
    assert [len(after["out"]) + len(after["errors"]) for after in expected] == [N_ITEMS] * N_PASSES
    assert all(a != b for a, b in itertools.pairwise(expected))


def kill_before_every_step(
    before: Path, loss: Loss, i_pass: int, expected: dict[str, list[bytes]]
) -> Counter[str]:
    """Do a pass on a folder, killed before each of its steps, and again as it goes on; return the steps."""
    do = partial(do_pass, i_pass=i_pass)
    for i_kill in itertools.count():
        folder = before.with_name(f"{before.name}-{i_kill}")
        shutil.copytree(before, folder)
        first = Machine(folder, i_kill, loss)
        if not first.is_killed(do):
            return first.names
        second = Machine(first.picture, i_kill * 7 % 31, loss)
        last = second.picture if second.is_killed(do) else second.folder
        run_pass(last, i_pass, N_ITEMS)
        assert records(last) == expected, (i_pass, i_kill)
        left = {re.sub(r"\.cut-off\d*$", "", path.name) for path in last.iterdir()}
        assert left == {"errors", "out", "out.manifest"}
        for done in (folder, first.picture, second.picture):
            shutil.rmtree(done, ignore_errors=True)
    raise AssertionError


@pytest.mark.parametrize("loss", LOSSES)
def test_kill_before_every_step_leaves_what_can_go_on(tmp_path: Path, loss: Loss) -> None:
    names = Counter[str]()
    for i_pass, expected in enumerate(undisturbed(tmp_path / "files")):
        names += kill_before_every_step(tmp_path / f"before-{i_pass}", loss, i_pass, expected)
    assert set(names) == STEPS - {"truncate"}  # what a kill leaves is cut off, and nothing else


N_FEW = 4


@pytest.mark.parametrize(
    ("loss", "has_others"),
    [*((loss, False) for loss in LOSSES), *((loss, True) for loss in LOSSES[1::2])],
    ids=lambda value: {False: "new", True: "forced over others"}.get(value, value),
)
def test_two_kills_before_any_two_steps_leave_what_can_go_on(
    tmp_path: Path, loss: Loss, has_others: bool
) -> None:
    do = partial(run_pass, i_pass=0, n_items=N_FEW, slice=2, sync_s=0, force=has_others)
    for i_first in itertools.count():
        folder = tmp_path / f"first-{i_first}"
        folder.mkdir()
        if has_others:
            run_pass(folder, 1, N_FEW, header=b"other\n")
        first = Machine(folder, i_first, loss)
        if not first.is_killed(do):
            break
        # of all pairs of steps a third with each loss, others with the next
        seconds = itertools.count((i_first + LOSSES.index(loss)) % lines_apart(1), lines_apart(1))
        kill_again_before_steps(first.picture, loss, do, seconds)
        shutil.rmtree(first.picture)
    expected = records(folder)
    assert i_first > 15
    for path in tmp_path.glob("last-*"):
        assert records(path) == expected, path.name


def kill_again_before_steps(
    left: Path, loss: Loss, do: Callable[[Path], object], seconds: Iterator[int]
) -> None:
    """Go on with what a kill has left, killed before these steps of that too; then to the end."""
    for i_second in seconds:
        folder = left.with_name(f"last-{left.name}-{i_second}")
        shutil.copytree(left, folder)
        second = Machine(folder, i_second, loss)
        if not second.is_killed(do):
            return
        shutil.rmtree(folder)
        do(second.picture)


@pytest.mark.parametrize("loss", LOSSES)
def test_kill_while_a_shorter_file_is_mended_leaves_what_can_go_on(
    tmp_path: Path, loss: Loss
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    run_pass(folder, 0, N_ITEMS)
    expected = records(folder)
    os.truncate(folder / "out", (folder / "out").stat().st_size // 2)
    kill_before_every_step(folder, loss, 0, expected)
