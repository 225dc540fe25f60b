"""`cbatch verify`: what an engine makes of models."""

import json as encoding
from pathlib import Path
from typing import Annotated

import typer

from cbatch.cli.main import ExitCode, write
from cbatch.cli.option_table import (
    MODEL_OPTION,
    Given,
    in_reach,
    model_argument,
    one_model,
    option,
    takes,
)
from cbatch.cli.terminal import printable, say
from cbatch.errors import ConfigError
from cbatch.files.output.durable import write_whole
from cbatch.files.places import check_place


@takes("llama_library")
def verify(
    file: Annotated[
        Path | None, model_argument("A GGUF file with which exact=True is tested at length.")
    ] = None,
    *,
    model: Annotated[Path | None, MODEL_OPTION] = None,
    given: Given,
    archs: Annotated[
        Path | None,
        option(
            metavar="DIR",
            help="A folder of models to test, each in a separate process.",
            default="none",
        ),
    ] = None,
    parallel: Annotated[int, option(help="Sequences at once.", min=2, max=256)] = 4,
    timeout_s: Annotated[
        float,
        option(
            help="Most seconds for each model; then its process is killed.",
            min=1,
            callback=in_reach,
        ),
    ] = 600.0,
    count: Annotated[
        int,
        option(
            help="For MODEL: number of different prompts, of 3 to 600 tokens.", min=2, max=10_000
        ),
    ] = 24,
    html: Annotated[
        Path | None,
        option(
            "--html",
            metavar="FILE",
            help="For MODEL: also write the results as an HTML page with a chart.",
            default="none",
        ),
    ] = None,
    json: Annotated[
        bool,
        option("--json", help="Print a JSON object per model, one a line, instead of a table."),
    ] = False,
) -> None:
    """Test exact=True for MODEL, or compare results in a batch and alone for each model of a folder.

    Example: cbatch verify model.gguf --parallel 16
    """
    model = one_model(file, model)
    if archs is None and model is not None:
        _check_page(html)
        _prove(model, parallel, count, html, as_json=json)
    elif archs is None or model is not None:
        raise ConfigError("give a model or a folder of models: MODEL or --archs DIR")
    elif html is not None:
        raise ConfigError("--html is for MODEL, not for --archs")
    else:
        _try_all(archs, parallel, timeout_s, as_json=json)


def _check_page(html: Path | None) -> None:
    from cbatch.files.report.page import is_report

    if html is not None:
        check_place(html)
    if html is not None and html.is_file() and not is_report(html):
        raise ConfigError(f"{html} exists and is not a page of cbatch: give another file to --html")


def _prove(model: Path, parallel: int, count: int, html: Path | None, *, as_json: bool) -> None:
    from cbatch.cli.verify_page import lines_of, proof_page
    from cbatch.files.report.page import machine_and_versions
    from cbatch.verify.proof import prove

    found = prove(model, parallel, count, say)
    machine = machine_and_versions()
    if as_json:
        write(encoding.dumps({**found.as_json(), "machine": machine}, ensure_ascii=False) + "\n")
    else:
        for line in lines_of(found):
            write(f"{printable(line)}\n")
    if html is not None:
        settings = {"parallel": found.parallel, "window": found.n_window, "prompts": count}
        write_whole(html, proof_page(found, settings, machine))
    if not found.is_exact:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _try_all(archs: Path, parallel: int, timeout_s: float, *, as_json: bool) -> None:
    from cbatch.verify.findings import table
    from cbatch.verify.folder import models_in, verify_all

    models, found = models_in(archs), []
    for finding in verify_all(models, parallel, timeout_s):
        found.append(finding)
        if as_json:
            write(encoding.dumps(finding.as_json(), ensure_ascii=False) + "\n")
        else:
            say(f"{len(found)}/{len(models)} {printable(finding.model)}")
    if not as_json:
        for line in table(found):
            write(f"{line}\n")
    n_wrong = sum(finding.is_wrong for finding in found)
    say(f"{len(found)} models, {sum(bool(f.refusal) for f in found)} refused, {n_wrong} wrong")
    if n_wrong:
        raise typer.Exit(ExitCode.SOME_FAILED)
