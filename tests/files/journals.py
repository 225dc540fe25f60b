"""Runs without a model: items that are claimed and answered in several passes, some anew, some with errors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from cbatch.files.output.journal import Journal
from cbatch.files.output.opening import OutputSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SETTINGS = {"model": "tiny", "output format": "lines"}

HEADER = b"header\n"


@dataclass(frozen=True)
class Asked:
    """An item of a pass."""

    number: int
    id: str
    digest: bytes
    record: bytes
    is_error: bool


def asked(i_pass: int, n_items: int) -> Iterator[Asked]:
    """Yield the items of a pass: some changed since the last, some that fail in it, some with an id of before."""
    for number in range(1, n_items + 1):
        is_double = number % 11 == 10
        version = i_pass if number % 7 == 3 else 0
        is_error = is_double or (number + i_pass) % 5 == 0
        text = f"{number} asked {version} in pass {i_pass} {'x' * (number * 37 % 400)}\n"
        yield Asked(
            number=number,
            id=f"item-{number - 1 if is_double else number}",
            digest=f"{version:016}".encode(),
            record=(text if number % 29 else text.replace("x", "y" * 100)).encode(),
            is_error=is_error,
        )


def open_journal(folder: Path, *, has_errors: bool = True, **more: Any) -> Journal:
    """Open the journal of a folder."""
    errors = folder / "errors" if has_errors else None
    return journal_of(folder / "out", **{"header": HEADER, "errors": errors, **more})


def journal_of(output: Path, **more: Any) -> Journal:
    """Open the journal of an output."""
    spec = {"settings": SETTINGS, **more}
    names = spec.keys() & {f.name for f in fields(OutputSpec)}
    of_spec = {name: spec.pop(name) for name in names}
    return Journal(OutputSpec(output, **of_spec), **spec)


def run_pass(
    folder: Path,
    i_pass: int,
    n_items: int = 40,
    *,
    slice: int = 3,
    said: Callable[[], None] = lambda: None,
    **more: Any,
) -> None:
    """Do all of a pass that is still to do; every second one tries errors again. `said` is called at each slice."""
    with open_journal(folder, retry_errors=bool(i_pass % 2), **more) as journal:
        for item in asked(i_pass, n_items):
            if journal.claim(item.id, item.digest, item.number) in ("new", "duplicate"):
                journal.add(item.number, item.record, is_error=item.is_error)
            if item.number % slice == 0:
                said()
                journal.commit()


def records(folder: Path) -> dict[str, list[bytes]]:
    """Return the records of both files, sorted, after checking that they begin with the header."""
    found = dict[str, list[bytes]]()
    for name in ("out", "errors"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        assert lines[0] == HEADER
        assert all(line.endswith(b"\n") for line in lines)
        found[name] = sorted(lines[1:])
    return found
