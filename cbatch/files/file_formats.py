"""Formats of batch files: told by names and first lines, and chosen for answers."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from cbatch.errors import ConfigError
from cbatch.files.input.item import InputLineError
from cbatch.files.input.json_requests import KEYS, load
from cbatch.files.input.raw_streams import COMPRESSED, UNREAD
from cbatch.files.input.text_files import InputFile, LongLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cbatch.files.input.source import Source

Format: TypeAlias = Literal[
    "openai", "cbatch", "jsonl", "csv", "tsv", "text", "parquet", "arrow", "npy"
]
"""Formats of batch files; `jsonl` is objects of the user's own, with a template; `npy` is for embeddings alone."""

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
    ".npy": "npy",
}
"""Formats by the ending of a name."""

COLUMNAR = ("parquet", "arrow")
WRITTEN_LAST = (*COLUMNAR, "npy")
"""Formats of outputs that are made of records at the end of a run."""
JSON_LINES = ("openai", "cbatch", "jsonl")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_N_LOOK, _N_LOOK_BYTES = 100, 2**20
"""Lines that are not blank, and bytes, to search for an object that tells the format: the first may be broken."""


def check_format(format: str, *more: str) -> None:
    """Raise ConfigError for an unknown name of a format; `more` names are allowed too."""
    known = (*more, *get_args(Format))
    if format not in known:
        raise ConfigError(f"format must be one of {', '.join(known)}, not {format!r}")


def format_of(file: InputFile, asked: str, *, has_template: bool) -> Format | None:
    """Return a file's format, None for an empty file, and rewind the file.

    With a template JSON objects are rows and no requests. ConfigError where the format cannot be told, or a columnar
    file is not a regular file.
    """
    format = SUFFIXES.get(_suffix(file.path)) if asked == "auto" else cast("Format", asked)
    if format == "npy":
        raise ConfigError(f"{file.name}: npy files hold numbers, not texts: give a table")
    if format in COLUMNAR:
        _check_columnar(file)
        return format if file.n_bytes else None
    start = _first_line(file, lambda line: True)
    if start is None or format is not None:
        return None if start is None else format
    return _format_of_lines(file, start, has_template=has_template)


def named_format(path: PurePath) -> Format | None:
    """Return the format of a name's ending, `jsonl` for all JSON lines; None for another ending."""
    suffix = path.suffix.lower()
    return "jsonl" if suffix in _JSON_SUFFIXES else SUFFIXES.get(suffix)


def is_columnar(path: PurePath) -> bool:
    """Whether a name is that of a file which is made of records at the end of a run."""
    return named_format(path) in WRITTEN_LAST


def _suffix(path: str) -> str:
    """Return the ending of a name in lower case, without that of a compression."""
    name = PurePath(path.lower())
    return PurePath(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def _check_columnar(file: InputFile) -> None:
    if not file.is_regular or file.is_compressed:
        what = "compressed" if file.is_regular else "a pipe"
        raise ConfigError(
            f"{file.name}: is {what}: give Parquet and Arrow as files that are not compressed"
        )


def _first_line(
    file: InputFile, is_wanted: Callable[[bytes | LongLine], object]
) -> bytes | LongLine | None:
    """Return the first line that is wanted among a file's first lines, and rewind the file."""
    found = next(filter(is_wanted, _first_lines(file)), None)
    file.rewind()
    return found


def _first_lines(file: InputFile) -> Iterator[bytes | LongLine]:
    """Yield the first lines that are not blank; ConfigError where too many blank ones come before all others."""
    n_lines = n_bytes = 0
    for line in file.ahead():
        n_bytes += 0 if isinstance(line, LongLine) else len(line)
        if isinstance(line, LongLine) or line.strip():
            n_lines += 1
            yield line
        if n_lines == _N_LOOK or n_bytes > _N_LOOK_BYTES:
            break
    if not n_lines and n_bytes > _N_LOOK_BYTES:
        raise ConfigError(f"{file.name}: begins with {n_bytes:,} bytes of blank lines: remove them")


def first_object(file: InputFile) -> dict[str, Any] | None:
    """Return the first JSON object among a file's first lines, and rewind the file."""
    line = _first_line(file, lambda line: _object_of(line) is not None)
    return None if line is None else _object_of(line)


def _object_of(line: bytes | LongLine) -> dict[str, Any] | None:
    try:
        return load(line)
    except (InputLineError, RecursionError):
        return None


def _format_of_lines(file: InputFile, line: bytes | LongLine, *, has_template: bool) -> Format:
    """Return the format of JSON lines by the first object among them; `cbatch` where there is none."""
    start = b"" if isinstance(line, LongLine) else line.lstrip()
    if _suffix(file.path) not in _JSON_SUFFIXES and not start.startswith(b"{"):
        known = ", ".join(get_args(Format))
        raise ConfigError(
            f"{file.name}: its name does not tell its format: give the format ({known})"
        )
    if start.startswith(b"["):
        raise ConfigError(
            f"{file.name}: begins with [, as a JSON array does: give one object a line (jq -c '.[]' writes that)"
        )
    if has_template:
        return "jsonl"
    request = first_object(file)
    if request is None or not request.keys().isdisjoint(KEYS):
        return "cbatch"
    return "openai" if request.keys() & {"custom_id", "body"} else "jsonl"


# ---- of answers ----

_SPREADSHEETS = (".xlsx", ".xls", ".ods")
_NO_TEXT = "answers cannot be written as plain text, because they have several lines"


def output_format(source: Source, asked: str = "auto", path: PurePath | None = None) -> Format:
    """Return the format of an output: the one asked for, else that of its name, else that of the input.

    Plain text is answered in cbatch's lines; a name of JSON lines keeps the input's kind of JSON lines.

    Raises:
        ConfigError: an unknown format, or one in which answers cannot be written.
    """
    check_format(asked, "auto")
    if asked == "text":
        raise ConfigError(f"{_NO_TEXT}: use cbatch or csv")
    if asked != "auto":
        return cast("Format", asked)
    own: Format = "cbatch" if source.format == "text" else source.format
    named = None if path is None else named_format(path)
    if named is None or (named == "jsonl" and own in JSON_LINES):
        return own
    if named == "text":
        raise ConfigError(
            f"{path}: {_NO_TEXT}: use a name that ends in .jsonl or .csv, or give the format "
            "(--output-format)"
        )
    return named


def check_name(path: PurePath, format: str, *, is_asked: bool = False) -> None:
    """Raise ConfigError where the name of a file of answers is that of a compressed file or of another format.

    A name may be that of another text format if the user chose the format (`is_asked`).
    """
    if path.suffix.lower() in (*COMPRESSED, *UNREAD):
        raise ConfigError(
            f"{path}: answers cannot be compressed, because a later run appends to the file: leave out {path.suffix}"
        )
    if path.suffix.lower() in _SPREADSHEETS:
        raise ConfigError(
            f"{path}: answers cannot be written as spreadsheets: use a name that ends in .csv"
        )
    named = named_format(path)
    if named is None or named == ("jsonl" if format in JSON_LINES else format):
        return
    if is_asked and not {named, format} & set(WRITTEN_LAST):
        return
    raise ConfigError(f"{path}: its name says {named}, but answers are {format}: give another name")
