"""Results and items as the tests of files need them."""

from __future__ import annotations

import bz2
import gzip
import lzma
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.files.file_formats import output_format
from cbatch.files.input.source import open_source
from cbatch.files.output.target import encoder
from cbatch.response import BatchResult, Timings, Usage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cbatch.errors import CBatchError
    from cbatch.files.input.item import Item, ItemError

ANSWER = BatchResult(
    "7", "Hi!", (1, 2), "stop", None, Usage(3, 2), Timings(0.1, 0.2, 0.3, 30.0, 20.0, 0.25), seed=5
)
"""What a request came to."""


_PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def failed(error: CBatchError) -> BatchResult:
    """A request that came to nothing."""
    return replace(
        ANSWER, text="", token_ids=(), finish_reason="error", error=error, usage=Usage(3, 0)
    )


def write(path: Path, content: str | bytes) -> str:
    """Write a file, compressed where its name says so; return its path."""
    data = content if isinstance(content, bytes) else content.encode()
    compress = _PACKERS.get(path.suffix)
    if compress is not None:
        data = compress(data)
    path.write_bytes(data)
    return str(path)


def read(*paths: str, **said: Any) -> list[Item]:
    """Return all items of files."""
    with open_source(list(paths), **said) as source:
        return list(source)


def error_of(item: Item) -> ItemError:
    """Return what is wrong with an item that cannot be asked."""
    assert item.prompt is None
    assert item.error is not None
    return item.error


def records(*paths: str, to: str = "auto", result: BatchResult = ANSWER, **said: Any) -> bytes:
    """Return the whole output for files whose requests all come to `result`."""
    with open_source(list(paths), **said) as source:
        encode = encoder(output_format(source, to), source)
        return encode.header() + b"".join(
            encode.error(item, item.error)
            if item.error
            else encode.result(item, result, digest=bytes(16), created=1, model="the model")
            for item in source
        )
