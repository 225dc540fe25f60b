"""`cbatch verify`: what an engine makes of models."""

import json as encoding
from pathlib import Path
from typing import Annotated

import typer

from cbatch.cli.main import ExitCode, write
from cbatch.cli.option_table import option
from cbatch.cli.terminal import printable, say
from cbatch.errors import ConfigError


def verify(
    *,
    archs: Annotated[
        Path | None,
        option(
            metavar="DIR",
            help="A folder: each of its models is tried, in a process of its own.",
            default="none",
        ),
    ] = None,
    parallel: Annotated[int, option(help="Sequences at once.", min=2, max=256)] = 4,
    timeout_s: Annotated[
        float, option(help="Most seconds for a model; its process is ended then.", min=1)
    ] = 600.0,
    json: Annotated[
        bool, option("--json", help="One JSON object a line for each model instead of a table.")
    ] = False,
) -> None:
    """Try whether models answer in company as they do alone, what they share, and what is exact.

    Example: cbatch verify --archs models
    """
    if archs is None:
        raise ConfigError("give a folder of models: --archs DIR")
    from cbatch.verify.findings import table
    from cbatch.verify.folder import models_in, verify_all

    models, found = models_in(archs), []
    for finding in verify_all(models, parallel, timeout_s):
        found.append(finding)
        if json:
            write(encoding.dumps(finding.as_json(), ensure_ascii=False) + "\n")
        else:
            say(f"{len(found)}/{len(models)} {printable(finding.model)}")
    if not json:
        for line in table(found):
            write(f"{line}\n")
    n_wrong = sum(finding.is_wrong for finding in found)
    say(f"{len(found)} models, {sum(bool(f.refusal) for f in found)} refused, {n_wrong} wrong")
    if n_wrong:
        raise typer.Exit(ExitCode.SOME_FAILED)
