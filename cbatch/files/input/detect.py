"""What a batch file is, by its name and its first lines."""

from __future__ import annotations

from collections import deque
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from cbatch.errors import ConfigError
from cbatch.files.input.item import LineError
from cbatch.files.input.lines import KEYS, load
from cbatch.files.input.text_files import COMPRESSED, LongLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.files.input.text_files import InputFile

Format: TypeAlias = Literal["openai", "cbatch", "jsonl", "csv", "tsv", "text", "parquet", "arrow"]
"""What a batch file may be; `jsonl` are objects of the user's own, asked by a template."""

SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".txt": "text",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
"""Endings of names that tell the format."""

COLUMNAR = ("parquet", "arrow")
JSON_LINES = ("openai", "cbatch", "jsonl")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_N_LOOK, _N_LOOK_BYTES = 100, 2**20
"""Lines, and bytes, to look at for one that tells a format: the first may be blank or broken."""


def check_format(format: str, *more: str) -> None:
    """Check the name of a format; `more` is what may be said instead.

    Raises:
        ConfigError: there is none of this name.
    """
    known = (*more, *get_args(Format))
    if format not in known:
        raise ConfigError(f"format must be one of {', '.join(known)}, not {format!r}")


def format_of(file: InputFile, asked: str, *, has_template: bool) -> Format | None:
    """Return a file's format; None where nothing is in it.

    Args:
        file: is as before when this returns.
        asked: the format, or auto.
        has_template: whether JSON objects are asked by a template, so that they are no requests.

    Raises:
        ConfigError: it cannot be told, or this kind of file cannot be read here.
    """
    format = SUFFIXES.get(_suffix(file.path)) if asked == "auto" else cast("Format", asked)
    if format in COLUMNAR:
        _check_columnar(file)
        return format if file.n_bytes else None
    lines = list(_first_lines(file, up_to_any=format is not None))
    file.rewind()
    if not lines or format is not None:
        return format if lines else None
    return _format_of_lines(file, lines, has_template=has_template)


def named_format(path: PurePath) -> Format | None:
    """Return the format that the ending of a name says, `jsonl` for all that are JSON lines; None: none."""
    suffix = path.suffix.lower()
    return "jsonl" if suffix in _JSON_SUFFIXES else SUFFIXES.get(suffix)


def is_columnar(path: PurePath) -> bool:
    """Whether a name is that of a Parquet or Arrow file."""
    return named_format(path) in COLUMNAR


def _suffix(path: str) -> str:
    """Return what a name ends in, without a compression's."""
    name = PurePath(path.lower())
    return PurePath(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def _check_columnar(file: InputFile) -> None:
    if not file.is_regular or file.is_compressed:
        what = "compressed" if file.is_regular else "a pipe"
        raise ConfigError(
            f"{file.name}: is {what}: Parquet and Arrow are read from files as they are"
        )


def _first_lines(file: InputFile, *, up_to_any: bool) -> Iterator[bytes | LongLine]:
    """Yield the first lines that are not blank, up to an object or, if `up_to_any`, to one of them."""
    n_bytes = 0
    for _, line in zip(range(_N_LOOK), file.ahead(), strict=False):
        n_bytes += 0 if isinstance(line, LongLine) else len(line)
        if isinstance(line, LongLine) or line.strip():
            yield line
            if up_to_any or _object_of(line) is not None:
                return
        if n_bytes > _N_LOOK_BYTES:
            return


def first_object(file: InputFile) -> dict[str, Any] | None:
    """Return the first JSON object among a file's first lines; the file is as before then."""
    last = deque(_first_lines(file, up_to_any=False), maxlen=1)
    file.rewind()
    return _object_of(last[0]) if last else None


def _object_of(line: bytes | LongLine) -> dict[str, Any] | None:
    try:
        return None if isinstance(line, LongLine) else load(line)
    except (LineError, RecursionError):
        return None


def _format_of_lines(
    file: InputFile, lines: Sequence[bytes | LongLine], *, has_template: bool
) -> Format:
    """Return the format of JSON lines by the first object among them; `cbatch` where there is none."""
    start = lines[0] if isinstance(lines[0], bytes) else b""
    if _suffix(file.path) not in _JSON_SUFFIXES and not start.lstrip().startswith(b"{"):
        known = ", ".join(get_args(Format))
        raise ConfigError(f"{file.name}: its format cannot be told by its name: give it ({known})")
    if start.lstrip().startswith(b"["):
        raise ConfigError(
            f"{file.name}: begins with [, as a JSON array does: give one object a line (jq -c '.[]' writes that)"
        )
    if has_template:
        return "jsonl"
    request = _object_of(lines[-1])
    if request is None or not request.keys().isdisjoint(KEYS):
        return "cbatch"
    return "openai" if request.keys() & {"custom_id", "body"} else "jsonl"
