"""A machine that is switched off before any step that a run does to the disk."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from cbatch.files.output import durable as disk
from cbatch.files.output.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable

OUTPUTS = ("out", "errors")
MANIFEST = ("out.manifest", "out.manifest-wal")
_OF_MANIFEST = ("commit", "fold")
STEPS = {"write_at", "truncate", "sync", "replace", "sync_folder", *_OF_MANIFEST}

Loss = Literal["nothing", "half a write", "tails", "blocks", "log", "all but copies"]
LOSSES: tuple[Loss, ...] = ("nothing", "half a write", "tails", "blocks", "log", "all but copies")
"""What else is lost: of outputs, what no `sync` was waited for, cut off or zeros; of the manifest, the same; names; or
what is neither an output nor the manifest itself, as where somebody copies these alone."""


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
            path.name: path.stat().st_size for path in folder.iterdir() if path.name not in MANIFEST
        }
        self.renamed: dict[str, tuple[str, bytes | None]] = {}
        self.manifest = self._manifest_now()

    def is_killed(self, do: Callable[[Path], object]) -> bool:
        """Do something to the folder; return whether it came to the step."""
        with pytest.MonkeyPatch.context() as patch:
            for name in STEPS:
                place = Manifest if name in _OF_MANIFEST else disk
                patch.setattr(place, name, self._watched(name, getattr(place, name)))
            try:
                do(self.folder)
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
            self._foresee(name, *args)
            do(*args)
            self._follow(name, *args)

        return watched

    def _foresee(self, name: str, *args: object) -> None:
        """Note what is there before a step."""
        if name == "replace":
            new, old = (Path(str(arg)) for arg in args)
            self.renamed[old.name] = new.name, old.read_bytes() if old.exists() else None

    def _follow(self, name: str, *args: object) -> None:
        """Note what the disk has for certain after a step."""
        if name == "sync":
            path = Path(f"/proc/self/fd/{args[0]}").readlink()
            self.synced[path.name] = path.stat().st_size
        elif name == "sync_folder":
            for old, (new, _) in self.renamed.items():
                self.synced[old] = self.synced.pop(new, 0)
            self.renamed.clear()
        elif name in _OF_MANIFEST:
            [manifest] = args
            assert isinstance(manifest, Manifest)
            if name == "fold" or manifest.execute("PRAGMA synchronous").fetchone() == (2,):
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
        copied = (
            (*OUTPUTS, MANIFEST[0]) if self.loss == "all but copies" else os.listdir(self.folder)
        )
        self.picture.mkdir()
        for file in set(copied) & set(os.listdir(self.folder)):
            shutil.copy2(self.folder / file, self.picture / file)
        if self.loss in ("tails", "blocks", "log"):
            self._lose_names()
        if self.loss in ("tails", "blocks"):
            for output in OUTPUTS:
                self._lose_unsynced(self.picture / output)
        elif self.loss == "log":
            for file in MANIFEST:
                (self.picture / file).unlink(missing_ok=True)
            for file, data in self.manifest.items():
                (self.picture / file).write_bytes(data)

    def _lose_names(self) -> None:
        for old, (new, data) in self.renamed.items():
            (self.picture / old).rename(self.picture / new)
            if data is not None:
                (self.picture / old).write_bytes(data)

    def _lose_unsynced(self, path: Path) -> None:
        if path.exists():
            size = path.stat().st_size
            os.truncate(path, min(size, self.synced.get(path.name, 0)))
            if self.loss == "blocks":
                os.truncate(path, size)
