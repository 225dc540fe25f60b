"""`cbatch status`: the progress of an output."""

import json as encoding
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cbatch.cli.main import write
from cbatch.cli.option_table import option


def status(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="What a run has written.")],
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IN...]", help="Its input; without, the files that the run was given."
        ),
    ] = None,
    *,
    json: Annotated[bool, option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Tell how many items are done, failed and left; no model is needed, and nothing is changed.

    A run may be writing there meanwhile.

    Example: cbatch status answers.jsonl
    """
    from cbatch.files.file_status import status_of  # sqlite3 is slow to import

    found = status_of(output, source or ())
    write((encoding.dumps(asdict(found)) if json else "\n".join(found.lines())) + "\n")
