"""Where the manifest of an output is, by whatever name the output is called and wherever it was moved.

A manifest stands beside the file itself. Beside a link that a run was given stands a link to the manifest: where the
file was moved or renamed without it, and the link with it, the manifest is found there, and brought along.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from cbatch.files.output.compact import fits
from cbatch.files.output.durable import told
from cbatch.files.output.manifest import Manifest, ManifestError, manifest_of, remove_manifest
from cbatch.files.places import real

if TYPE_CHECKING:
    from pathlib import Path


def manifest_at(name: Path) -> Path:
    """Return where the manifest of an output is now; where there is none, where it is to be."""
    home = manifest_of(real(name))
    for place in (home, manifest_of(name)):
        if place.is_file():
            return real(place)
    return home


def records_of(output: Path) -> Path:
    """Return where the records are to be of an output that is made of them at the end."""
    return output.with_name(f"{output.name}.records")


def records_at(name: Path) -> Path:
    """Return where the records are of an output that is made of them; they stay where they are if it alone is moved."""
    output = real(name)
    home, left = records_of(output), real(records_of(name))
    if home.exists() or not (output.is_file() and left.is_file()):
        return home
    made = left.with_name(left.name.removesuffix(".records"))
    return home if made.exists() and real(made) != output else left


def bring_manifest(name: Path) -> Path:
    """Return where the manifest of an output is to be, and have it there, if it was left elsewhere and fits.

    Raises:
        ConfigError: another run writes there.
        OutputError: the disk is full.
    """
    output = real(name)
    home, left = manifest_of(output), manifest_at(name)
    if left != home:
        is_ours = False
        with suppress(ManifestError):
            is_ours = _brought(left, output, home)
        if not is_ours and home.is_symlink():  # to the manifest of another output
            home.unlink()
    return home


def _brought(left: Path, output: Path, home: Path) -> bool:
    """Whether a manifest is that of an output; it is at `home` then, and elsewhere only where a like output is."""
    with closing(Manifest(left, output)) as manifest:
        row = manifest.files().get(0)
        if row is None or not manifest.count(0).n_records or not fits(manifest, row, output):
            return False
        with told(home):
            manifest.copy(home)
    if not row.path.exists() or real(row.path) == output:
        remove_manifest(left)
    return True


def point_to(name: Path, companion: Path, place: Path) -> None:
    """Have a link beside a link: what belongs to the file that it leads to is found there too.

    Args:
        name: what the user calls the output.
        companion: where who knows that name alone looks.
        place: what is to be found.
    """
    if not name.is_symlink() or (companion.exists() and not companion.is_symlink()):
        return
    is_absolute = os.path.isabs(os.readlink(name))
    target = place if is_absolute else os.path.relpath(place, real(companion.parent))
    with suppress(OSError):  # it is a help, where it can be
        companion.unlink(missing_ok=True)
        companion.symlink_to(target)
