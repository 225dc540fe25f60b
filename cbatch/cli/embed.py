"""`cbatch embed`: the rows of tables in, the rows with their embeddings out."""

from pathlib import Path
from typing import Annotated

import typer

from cbatch.chat.vector_calls import POOLINGS
from cbatch.cli.completion import among
from cbatch.cli.option_table import DEVICES, Given, names_in, option, takes
from cbatch.cli.run import finish_run, view_for
from cbatch.files.vector_files import embed_file

OF_RUN = ("max_time_s", "isolate", "replicas", "json", "quiet")
OF_MODEL = (
    *("model", "parallel", "threads", "gpu_layers", "llama_library"),
    *("exact", "flash_attn", "memory_mib"),
)
OF_FILES = (
    "format",
    "output_format",
    "output_column",
    "keep_columns",
    "template",
    "limit",
    "force",
)
_OF_RESUMED = ("errors", "retry_errors", "shuffle", "strict", "window")
_DEVICES = names_in(DEVICES, without=("cache_mib", "cache_media"))

COLUMN = option(help="Column with the text.", default="text or prompt", metavar="NAME")
TRUNCATE = option(
    help="Which part of texts that are too long is cut off: end or start.",
    default="refuse them",
    autocompletion=among(["end", "start"]),
)
INSTRUCTION = option(
    help="Instruction put before each text, as the model expects it.", default="none"
)


@takes(*OF_RUN, *OF_FILES, *_OF_RESUMED, *OF_MODEL, *_DEVICES)
def embed(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="IN...", help="Tables or text files, all of one format; - is stdin."
        ),
    ],
    *,
    output: Annotated[
        Path,
        option("--output", "-o", metavar="OUT", help="The file for the embeddings; - is stdout."),
    ],
    column: Annotated[str | None, COLUMN] = None,
    pooling: Annotated[
        str | None,
        option(
            help="How the vectors of tokens become one: mean, cls or last.",
            default="the model's",
            autocompletion=among(POOLINGS),
        ),
    ] = None,
    normalize: Annotated[
        bool,
        option("--normalize/--no-normalize", help="Give embeddings length 1."),
    ] = True,
    dimensions: Annotated[
        int | None,
        option(help="Keep only the first N numbers of each embedding.", default="all", min=1),
    ] = None,
    instruction: Annotated[str | None, INSTRUCTION] = None,
    truncate: Annotated[str | None, TRUNCATE] = None,
    given: Given,
) -> None:
    """Embed the text of each row.

    The input is CSV, TSV, Parquet, Arrow, JSON lines or plain text. OUT.parquet has a
    column of float32 lists, OUT.npy an array, OUT.jsonl and OUT.csv lists of numbers.
    After Ctrl-C, a crash or a full disk, the same command continues the run.

    Example: cbatch embed docs.csv --column text -m model.gguf -o vectors.parquet
    """
    view = view_for(output, is_quiet=given["quiet"], is_json=given["json"])
    call = {
        "model": given["model"],
        "column": column,
        "pooling": pooling,
        "normalize": normalize,
        "dimensions": dimensions,
        "instruction": instruction,
        "truncate": truncate,
        **given.settings("Options", "Files"),
        **given.engine_settings(),
    }
    finish_run(source, output, view, call, embed_file)
