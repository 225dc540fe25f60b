"""Batch files: one request a line in, one result a line out."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from cbatch.errors import CBatchError, ConfigError
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cbatch.response import BatchResult

_KEYS = ("id", "messages", "prompt", "tokens", "options")


STDOUT = Path("-")


def is_pipe(path: Path) -> bool:
    """Whether the path is `-`: stdin or stdout."""
    return str(path) == "-"


def stdin() -> BinaryIO:
    """Return stdin.

    Raises:
        ConfigError: the command was started with it closed.
    """
    if sys.stdin is None:
        raise ConfigError("stdin is closed: there is nothing to read")
    return sys.stdin.buffer


def stdout() -> BinaryIO:
    """Return stdout.

    Raises:
        ConfigError: the command was started with it closed.
    """
    if sys.stdout is None:
        raise ConfigError("stdout is closed: there is nowhere to write to")
    return sys.stdout.buffer


# ---- in ----


def read_prompts(path: Path) -> list[BatchPrompt]:
    """Read every request of a batch file (`-`: of stdin); blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; the message names file and line.
    """
    if is_pipe(path):
        return parse_lines("<stdin>", stdin())
    try:
        with path.open("rb") as file:
            return parse_lines(str(path), file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def parse_lines(name: str, lines: Iterable[bytes]) -> list[BatchPrompt]:
    """Return the requests of these lines; see `read_prompts`."""
    prompts: list[BatchPrompt] = []
    line_of: dict[str, int] = {}
    for i_line, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _parse(line)
            if prompt.id is not None:
                _check_new(prompt.id, i_line, line_of)
        except CBatchError as error:
            raise ConfigError(f"{name}, line {i_line}: {error}") from error
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{name}: no request in it: give one JSON object a line")
    return prompts


def _parse(line: bytes) -> BatchPrompt:
    request = _load(line)
    if not isinstance(request, dict):
        raise ConfigError(f"not a JSON object: {_shown(line)}")
    for key in request:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}; there is: {', '.join(_KEYS)}")
    return BatchPrompt(**request)


def _load(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}: {_shown(line)}") from error


def _check_new(id: str, i_line: int, line_of: dict[str, int]) -> None:
    if id in line_of:
        raise ConfigError(f"the id {id!r} is also that of line {line_of[id]}: ids must be unique")
    line_of[id] = i_line


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= 60 else f"{text[:57]}…"


# ---- out ----


def check_target(path: Path, *inputs: Path, force: bool) -> None:
    """Check that results can be written, long before the first one is there.

    Raises:
        ConfigError: a missing folder, one of the inputs, no permission, or see `check_new`.
    """
    if is_pipe(path):
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist")
    if path.is_file() and any(i.exists() and path.samefile(i) for i in inputs):
        raise ConfigError(f"{path}: is the input: give another file for the results")
    check_new(path, force=force)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: no permission to write there")


def check_new(path: Path, *, force: bool) -> None:
    """Check that no work of another run would be lost.

    Raises:
        ConfigError: a directory, or an existing file without `force`.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory: give a file")
    if path.is_file() and not force:
        raise ConfigError(f"{path}: exists already: give another file, or --force to replace it")


@contextmanager
def open_target(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open the file for results, or stdout for `-`.

    Raises:
        ConfigError: it cannot be opened, or a file came there since `check_target` and there is no `force`.
    """
    if is_pipe(path):
        yield stdout()
        return
    try:
        is_device = path.exists() and not path.is_file()
        file = path.open("wb" if force or is_device else "xb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_result(file: BinaryIO, result: BatchResult) -> None:
    """Write one result as a whole line that the system has when this returns."""
    file.write(_encode(_as_json(result)) + b"\n")
    file.flush()


def _as_json(result: BatchResult) -> dict[str, object]:
    error = result.error
    return {
        "id": result.id,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": error and {"type": type(error).__name__, "message": str(error)},
        "usage": asdict(result.usage),
        "timings": asdict(result.timings),
        "seed": result.seed,
        **({"reasoning": result.reasoning} if result.reasoning else {}),
        **({"tool_calls": [c.as_dict() for c in result.tool_calls]} if result.tool_calls else {}),
    }


def _encode(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
        return json.dumps(value).encode()
