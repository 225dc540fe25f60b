"""A run may end anywhere: whatever is left is gone on with, and every item is there once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from cbatch.files import disk
from cbatch.files.manifest import Manifest
from tests.files.journals import records, run_pass

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

N_PASSES = 4
N_ITEMS = 33

OUTPUTS = ("out", "errors")
MANIFEST = ("out.manifest", "out.manifest-wal")
STEPS = {"write_at", "truncate", "sync", "replace", "sync_folder", "commit"}

Loss = Literal["nothing", "half a write", "tails", "blocks", "log"]
LOSSES: tuple[Loss, ...] = ("nothing", "half a write", "tails", "blocks", "log")
"""What else is lost: of outputs, what no `sync` was waited for, cut off or zeros; of the manifest, the same."""


class Killed(BaseException):
    """What stands for SIGKILL, or for the loss of power."""


class Machine:
    """Counts what a run does to the disk, and ends it before one of these steps.

    What the disk has then is found in `picture`.
    """

    def __init__(self, folder: Path, i_kill: int | None = None, loss: Loss = "nothing") -> None:
        self.folder, self.picture = folder, folder.with_name(f"{folder.name}-killed")
        self.i_kill, self.loss = i_kill, loss
        self.names = Counter[str]()
        self.synced = {
            name: (folder / name).stat().st_size for name in OUTPUTS if (folder / name).exists()
        }
        self.manifest = self._manifest_now()

    def is_killed(self, i_pass: int) -> bool:
        """Do a pass; return whether it came to the step."""
        with pytest.MonkeyPatch.context() as patch:
            for name in STEPS - {"commit"}:
                patch.setattr(disk, name, self._watched(name, getattr(disk, name)))
            patch.setattr(Manifest, "commit", self._watched("commit", Manifest.commit))
            try:
                run_pass(self.folder, i_pass, N_ITEMS, slice=4, sync_s=0 if i_pass % 2 else 1e9)
            except Killed:
                return True
        return False

    def _watched(self, name: str, do: Callable[..., None]) -> Callable[..., None]:
        def watched(*args: object) -> None:
            if self.names.total() == self.i_kill:
                if not self.picture.exists():
                    self._take_picture(name, *args)
                raise Killed
            self.names[name] += 1
            do(*args)
            self._follow(name, *args)

        return watched

    def _follow(self, name: str, *args: object) -> None:
        """Note what the disk has for certain after a step."""
        if name == "sync":
            path = Path(f"/proc/self/fd/{args[0]}").readlink()
            self.synced[path.name] = path.stat().st_size
        elif name == "replace":
            new, old = (Path(str(arg)) for arg in args)
            self.synced[old.name] = self.synced.pop(new.name, old.stat().st_size)
        elif name == "commit":
            [manifest] = args
            assert isinstance(manifest, Manifest)
            if manifest.execute("PRAGMA synchronous").fetchone() == (2,):
                self.manifest = self._manifest_now()

    def _manifest_now(self) -> dict[str, bytes]:
        paths = [self.folder / name for name in MANIFEST]
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    def _take_picture(self, name: str, *args: object) -> None:
        if self.loss == "half a write" and name == "write_at":
            fd, data, start = args
            assert isinstance(fd, int)
            assert isinstance(data, bytes)
            assert isinstance(start, int)
            os.pwrite(fd, data[: len(data) // 2], start)
        shutil.copytree(self.folder, self.picture)
        if self.loss in ("tails", "blocks"):
            for output in OUTPUTS:
                self._lose_unsynced(self.picture / output)
        elif self.loss == "log":
            for file in MANIFEST:
                (self.picture / file).unlink(missing_ok=True)
            for file, data in self.manifest.items():
                (self.picture / file).write_bytes(data)

    def _lose_unsynced(self, path: Path) -> None:
        if path.exists():
            size = path.stat().st_size
            os.truncate(path, min(size, self.synced.get(path.name, 0)))
            if self.loss == "blocks":
                os.truncate(path, size)


def undisturbed(folder: Path) -> list[dict[str, list[bytes]]]:
    """Do every pass, and keep the folder as it was before each; return what the files hold after each."""
    folder.mkdir()
    found = []
    for i_pass in range(N_PASSES):
        shutil.copytree(folder, folder.with_name(f"before-{i_pass}"))
        run_pass(folder, i_pass, N_ITEMS)
        found.append(records(folder))
    return found


def test_passes_change_retry_and_repeat_ids(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "files")
    assert len({len(after["errors"]) for after in expected}) > 1
    assert [len(after["out"]) + len(after["errors"]) for after in expected] == [N_ITEMS] * N_PASSES
    assert all(a != b for a, b in itertools.pairwise(expected))


@pytest.mark.parametrize("loss", LOSSES)
def test_kill_before_every_step_leaves_what_can_go_on(tmp_path: Path, loss: Loss) -> None:
    expected, names = undisturbed(tmp_path / "files"), Counter[str]()
    for i_pass in range(N_PASSES):
        for i_kill in itertools.count():
            folder = tmp_path / f"{i_pass}-{i_kill}"
            shutil.copytree(tmp_path / f"before-{i_pass}", folder)
            first = Machine(folder, i_kill, loss)
            if not first.is_killed(i_pass):
                names += first.names
                break
            second = Machine(first.picture, i_kill * 7 % 31, loss)
            last = second.picture if second.is_killed(i_pass) else second.folder
            run_pass(last, i_pass, N_ITEMS)
            assert records(last) == expected[i_pass], (i_pass, i_kill)
            left = [
                p.name for p in last.iterdir() if p.name not in ("out", "errors", "out.manifest")
            ]
            assert left == []
    assert set(names) == STEPS


# ---- SIGKILL ----


N_LONG = 300
N_KILLS = 18


def _child(progress: Connection, folder: Path, i_pass: int) -> None:
    run_pass(folder, i_pass, N_LONG, said=lambda: progress.send(True))


def _is_killed(folder: Path, i_pass: int, chance: random.Random) -> bool:
    """Do a pass in a process of its own, and kill it at a random moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    progress, its_end = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(its_end, folder, i_pass))
    child.start()
    its_end.close()
    for _ in range(chance.randint(1, N_LONG // 3)):
        progress.recv()
    time.sleep(chance.random() * 1e-3)
    child.kill()
    child.join()
    progress.close()
    return child.exitcode == -signal.SIGKILL


def test_sigkill_at_random_moments_leaves_every_item_once(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    folder.mkdir()
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    n_killed = 0
    for i_pass in range(N_PASSES):
        n_killed += sum(_is_killed(folder, i_pass, chance) for _ in range(N_KILLS))
        for place in (whole, folder):
            run_pass(place, i_pass, N_LONG)
        assert records(folder) == records(whole), seed
    assert n_killed >= 60
