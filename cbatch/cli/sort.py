"""`cbatch sort`: the answers to a batch file in the order of its requests."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cbatch.cli.main import ExitCode, leave_stdout
from cbatch.cli.option_table import option
from cbatch.cli.terminal import say
from cbatch.errors import ConfigError
from cbatch.files.places import is_dash, stdout

if TYPE_CHECKING:
    from cbatch.files.output.sorting import Sorted


def sort(
    answers: Annotated[Path, typer.Argument(metavar="OUT", help="The output of a run.")],
    *,
    output: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            metavar="SORTED",
            help="Write the records to this file, and leave OUT unchanged; - is stdout.",
            default="OUT itself, and its file of errors",
        ),
    ] = None,
    by: Annotated[
        list[Path] | None,
        option(
            "--by",
            metavar="INPUT",
            help="The run's input, for JSON lines without a manifest; may be repeated.",
        ),
    ] = None,
    force: Annotated[bool, option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Put the answers to a batch file into the order of its requests.

    Answers are written in the order in which they finish. A sorted file can
    still be continued.

    Example: cbatch sort answers.jsonl
    """
    from cbatch.files.output.sorting import sort_in_place, sort_to  # sqlite3 is slow to import

    if is_dash(answers):
        raise ConfigError("-: stdin has no manifest: give the output file of a run")
    if output is None:
        if by:
            raise ConfigError(f"{answers}: --by needs another file to write to: give -o SORTED")
        for path, counts in sort_in_place(answers).items():
            for line in (*counts.notes, _told(path, counts)):
                say(line)
    elif is_dash(output):
        _write_sorted(answers, by or [])
    else:
        say(_told(output, sort_to(answers, output, by=by or [], force=force)))


def _told(path: Path, counts: "Sorted") -> str:
    gone = f"; the last {counts.n_gone:,} belong to requests that are no longer in the input"
    return f"{path}: {counts.n_records:,} records in the order of the requests{gone if counts.n_gone else ''}"


def _write_sorted(output: Path, by: list[Path]) -> None:
    from cbatch.files.output.sorting import sorted_records

    file = stdout()
    with sorted_records(output, by=by) as records:
        try:
            for piece in records.pieces:
                file.write(piece)
            file.flush()
        except BrokenPipeError:
            leave_stdout()
            raise typer.Exit(ExitCode.DONE) from None
