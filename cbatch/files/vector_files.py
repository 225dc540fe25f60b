"""Embeddings for the rows of tables and lines of text, and the rows that fit a query best."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from cbatch.chat.vector_calls import RerankCall, embed_settings
from cbatch.errors import ConfigError
from cbatch.files.file_formats import WRITTEN_LAST, check_name, output_format
from cbatch.files.file_run import run_file
from cbatch.files.input.item_stream import ItemStream
from cbatch.files.outcome import RunSummary
from cbatch.files.output.durable import whole
from cbatch.files.output.encoders import Encoder, ScoreColumns
from cbatch.files.output.target import encoder
from cbatch.files.places import check_apart, check_new, file_of, is_dash, stdout
from cbatch.files.settings import FileOptions, engine_for, read_to_load, split_settings
from cbatch.files.vector_work import in_order, result_of, text_or_prompt
from cbatch.files.work import RunTally
from cbatch.options import NO_OPTIONS
from cbatch.support.checks import (
    MAX_INT,
    check_int,
    check_text,
)
from cbatch.support.folders import told
from cbatch.support.hub import local_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.files.input.item_stream import Paths

_NOT_OF_VECTORS = (
    "adopt",
    "audio_column",
    "dedupe",
    "image_column",
    "is_raw",
    "report",
    "system",
    "trace",
    "vectors",
    "options",
)
"""Options of a run over files that have no effect on embeddings and scores."""

_NOT_OF_SCORES = ("errors", "max_time_s", "retry_errors", "shuffle", "window")

_N_COLUMN = 1000  # characters of a column's name


def embed_file(
    source: Paths,
    output: str | Path,
    *,
    column: str | None = None,
    pooling: str | None = None,
    normalize: bool = True,
    dimensions: int | None = None,
    instruction: str | None = None,
    truncate: str | None = None,
    **settings: Any,
) -> RunSummary:
    """Embed the text of each row of a table, or of each line, and write the rows with their embeddings.

    A stopped run is continued as `run_file` continues one. Parquet and Arrow get a column of fixed-size lists of
    float32, or of lists and nulls where a text has an error; JSON lines and CSV a list; `.npy` an array of a row for
    each item, NaN where it has no embedding.

    Args:
        source: as for `run_file`.
        output: as for `run_file`, and `.npy`.
        column: with the text; None: `template`, else a column named text or prompt, or the lines of plain text.
        pooling, normalize, dimensions, instruction, truncate: as for `Engine.embed`.
        settings: of `run_file`: engine, model, template, limit and others.

    Returns:
        What was done.

    Raises:
        ConfigError: a wrong setting, or the model has no embeddings. Others as of `run_file`.
    """
    settings = _checked(settings)
    given = {"pooling": pooling, "dimensions": dimensions, "instruction": instruction}
    given |= {"truncate": truncate, "normalize": None if normalize is True else normalize}
    return run_file(
        source,
        output,
        is_raw=True,
        vectors=embed_settings(given),
        **_with_column(column, settings),
    )


def rerank_file(  # noqa: PLR0913  # how rows are scored, and what is written
    source: Paths,
    output: str | Path,
    query: str,
    *,
    engine: Engine | None = None,
    model: Any = None,
    column: str | None = None,
    top_n: int | None = None,
    raw_scores: bool = False,
    instruction: str | None = None,
    truncate: str | None = None,
    **settings: Any,
) -> RunSummary:
    """Write the rows of a table, or lines of text, that fit a query, the best first, with their scores.

    All rows are in memory; a stopped run begins again. Rows with an error come last.

    Args:
        source: as for `run_file`.
        output: a file in .jsonl, .csv or .tsv, or "-" for stdout.
        query: that rows are compared with.
        engine, model: as for `run_file`.
        column: with the text, as for `embed_file`.
        top_n: most rows to write.
        raw_scores, instruction, truncate: as for `Engine.rerank`.
        settings: of `run_file`: template, format, output_format, keep_columns, limit, force, and those of `load`.

    Raises:
        ConfigError: a wrong setting, or the model cannot rerank.
        OutputError: the output cannot be written.
    """
    settings = _checked(settings, *_NOT_OF_SCORES)
    n_most = None if top_n is None else check_int("top_n", top_n, 1, MAX_INT)
    call = RerankCall(check_text("query", query, MAX_INT), [])
    asked, of_load = split_settings(_with_column(column, settings) | {"is_raw": True})
    place = file_of("output", output)
    if not is_dash(place):
        check_new(place, force=asked.force)
    with ExitStack() as stack:
        stream = stack.enter_context(closing(ItemStream(source, asked)))
        model = local_model(model)
        check_apart(place, [*stream.source.paths, *read_to_load(model, of_load)])
        encode = _encoder(stream, place, asked)
        lent = engine_for(
            engine, model, of_load, lambda: None, asked=asked, options=NO_OPTIONS,
            isolates=True,
        )  # fmt: skip
        items = [*islice(stream, asked.limit)]
        runner = stack.enter_context(lent)
        if why := call.lack(runner):
            raise ConfigError(f"{why}: give another model")
        good = [item for item in items if item.prompt is not None]
        texts: list[Any] = [text_or_prompt(item.prompt) for item in good if item.prompt is not None]
        given = embed_settings({"instruction": instruction, "truncate": truncate})
        start_s = time.perf_counter()
        response: Any = runner.rerank(query, texts, raw_scores=raw_scores, **given) if texts else []
        scored = [*zip(good, in_order(response), strict=True)]
        tally = RunTally(n_items=len(items), n_done=len(items))
        records = [*_records(encode, scored, items, tally)]
        _write(place, encode.header() + b"".join(records[:n_most]), force=asked.force)
    return RunSummary("done", **asdict(tally), elapsed_s=time.perf_counter() - start_s)


def _write(place: Path, data: bytes, *, force: bool) -> None:
    """Write an output whole or not at all; refuse a file that has come since the run began."""
    if is_dash(place):
        stdout().write(data)
        stdout().flush()
        return
    check_new(place, force=force)
    with told(place), whole(place) as part:
        part.write_bytes(data)


def _records(
    encode: Encoder, scored: list[tuple[Item, Any]], items: list[Item], tally: RunTally
) -> Iterator[bytes]:
    """Yield the records of rows, the best first, those without a score last; count them."""
    wrong: list[bytes] = []
    best = sorted(scored, key=lambda pair: pair[1].score if pair[1].error is None else 0.0)
    for item, found in reversed(best):
        tally.prompt_tokens += found.n_tokens
        result = result_of(item.id, [[found]], 0.0)
        record = encode.result(item, result, digest=b"", created=0, model="")
        if found.error is None:
            yield record
        else:
            tally.fail(type(found.error).__name__, f"{item.place}: {found.error}")
            wrong.append(record)
    yield from wrong
    for item in items:
        if item.error is not None:
            tally.fail(item.error.code, f"{item.place}: {item.error.message}")
            yield encode.error(item, item.error)


def _encoder(stream: ItemStream, place: Path, asked: FileOptions) -> Encoder:
    source = stream.source
    format = output_format(source, asked.output_format or "auto", place)
    format = "jsonl" if format in ("cbatch", "openai") else format
    if format in WRITTEN_LAST:
        raise ConfigError(f"{place}: scores are written as jsonl, csv or tsv: give another name")
    check_name(place, format, is_asked=asked.output_format is not None)
    keep, column = asked.keep_columns, asked.output_column
    return encoder(format, source, ScoreColumns(source.columns, keep=keep, output_column=column))


def _checked(settings: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Return settings that have an effect; ConfigError for one that is given without any, which `more` are too."""
    without = (*_NOT_OF_VECTORS, *more)
    for name in without:
        if settings.get(name):
            raise ConfigError(f"{name} has no effect on embeddings and scores: leave it out")
    return {name: value for name, value in settings.items() if name not in without}


def _with_column(column: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the template that is a column."""
    if column is None:
        return {**settings}
    if settings.get("template") is not None:
        raise ConfigError("give column or template, not both")
    name = check_text("column", column, _N_COLUMN)
    return {**settings, "template": "{" + name + "}"}
