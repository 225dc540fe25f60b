"""`cbatch status`: the progress of an output."""

import json as encoding
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cbatch.cli.main import write
from cbatch.cli.option_table import option


def status(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The output of a run.")],
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IN...]", help="The run's input. Default: the files that the run was given."
        ),
    ] = None,
    *,
    json: Annotated[bool, option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Show how many items are done, failed and left. Needs no model and changes nothing.

    Also works while a run writes to OUT.

    Example: cbatch status answers.jsonl
    """
    from cbatch.files.file_status import status_of  # sqlite3 is slow to import

    found = status_of(output, source or ())
    write((encoding.dumps(asdict(found)) if json else "\n".join(found.lines())) + "\n")
