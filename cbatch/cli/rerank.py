"""`cbatch rerank`: rows or lines in, those that fit a query best out."""

from pathlib import Path
from typing import Annotated

import typer

from cbatch.cli.embed import COLUMN, INSTRUCTION, OF_FILES, OF_MODEL, TRUNCATE
from cbatch.cli.option_table import Given, option, takes
from cbatch.cli.run import end_run, ending_with_the_reader, view_for
from cbatch.files.places import STDOUT
from cbatch.files.vector_files import rerank_file


@takes("isolate", "replicas", "json", "quiet", *OF_FILES, *OF_MODEL)
def rerank(
    query: Annotated[str, typer.Argument(help="The text that rows are scored against.")],
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="IN...", help="Tables or text files, all of one format; - is stdin."
        ),
    ],
    *,
    output: Annotated[
        Path, option("--output", "-o", metavar="OUT", help="The file for the rows; - is stdout.")
    ] = STDOUT,
    column: Annotated[str | None, COLUMN] = None,
    top_n: Annotated[
        int | None,
        option(
            "--top-n", "-n", help="Write only this many rows, the best ones.", default="all", min=1
        ),
    ] = None,
    raw_scores: Annotated[
        bool,
        option(
            "--raw-scores", help="Write scores as the model gives them, instead of between 0 and 1."
        ),
    ] = False,
    instruction: Annotated[str | None, INSTRUCTION] = None,
    truncate: Annotated[str | None, TRUNCATE] = None,
    given: Given,
) -> None:
    """Write the rows that fit a query, the best first.

    Example: cbatch rerank "how to bake bread" docs.csv --column text -m model.gguf -n 10
    """
    view = view_for(output, is_quiet=given["quiet"], is_json=given["json"])
    with ending_with_the_reader(view):
        summary = rerank_file(
            source,
            output,
            query,
            model=given["model"],
            column=column,
            top_n=top_n,
            raw_scores=raw_scores,
            instruction=instruction,
            truncate=truncate,
            **given.settings("Options", "Files"),
            **given.engine_settings(),
        )
    end_run(summary, view)
